"""Planners as real processes: one leads, another takes over, and none that dies or stands still does any harm."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Protocol

import pytest

from planner.cycle import Planner
from planner.settings import load_settings
from service.errors import NotLeading
from service.keys import KEY_CHECK, hash_key
from service.ledger import Ledger
from service.published import EndpointView
from service.store import verify
from tests.contract.planning import PlannerProcess
from tests.contract.serving import Serving

KEYS = {hash_key(name.encode()): count for name, count in {"hot": 900, "warm": 90, "mild": 45, "cold": 9}.items()}
WINDOW_S = 30
Start = Callable[..., PlannerProcess]


class Server(Protocol):
    url: str


class Killable(Server, Protocol):
    def kill(self) -> None: ...
    def start(self) -> None: ...


@pytest.fixture
async def ledger(valkey: Server, pool: str) -> AsyncIterator[Ledger]:
    ledger = Ledger(valkey.url, pool)
    yield ledger
    await ledger.close()


@pytest.fixture
def start(valkey: Server, pool: str, tmp_path: Path) -> Iterator[Start]:
    """Start planners that are gone when the test ends."""
    running: list[PlannerProcess] = []

    def start(name: str, **settings: object) -> PlannerProcess:
        settings = {"interval_s": 0.2, "lease_s": 2, "name": name} | settings
        running.append(PlannerProcess(valkey.url, pool, tmp_path / name, **settings))
        return running[-1]

    yield start
    for process in running:
        process.end()


async def count(ledger: Ledger) -> None:
    start_s = int(time.time()) // WINDOW_S * WINDOW_S
    await ledger.add_rates(start_s, KEYS, instance="x", batch=1, ttl_s=600)


async def test_one_of_two_plans_and_the_other_takes_over(ledger: Ledger, start: Start) -> None:
    """While one leads the other leaves no record; SIGKILL hands over when the lease ends, once."""
    await count(ledger)
    one = start("one")
    await one.until(event="plan_cycle", decision="published")
    two = start("two")
    await two.until(event="planner_stands_by")
    at = len(one.events())
    for _ in range(3):
        at = await one.until(at, event="plan_cycle", decision="unchanged")
    assert {record["planner"] for record in await ledger.read_cycles()} == {"one"}
    one.end()
    await two.until(event="planner_leads")
    await two.until(event="plan_cycle", decision="unchanged", trigger="lead")
    assert (await ledger.read_cycles())[0]["planner"] == "two"
    assert [p.version for p in await ledger.read_log()] == [1]


async def test_sigterm_hands_over_at_once(ledger: Ledger, start: Start) -> None:
    """A planner that ends gives its lease back: with one of an hour the other leads within seconds."""
    one = start("one", lease_s=3600)
    await one.until(event="planner_leads")
    two = start("two", lease_s=3600)
    await two.until(event="planner_stands_by")
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(timeout=20) == 0
    await two.until(event="planner_leads")


async def test_a_planner_that_stood_still_comes_back_as_the_second(ledger: Ledger, start: Start) -> None:
    """Stopped for longer than its lease and then continued, it stands by; no record of it is newer than the other's."""
    await count(ledger)
    one = start("one")
    await one.until(event="plan_cycle", decision="published")
    two = start("two")
    await two.until(event="planner_stands_by")
    one.process.send_signal(signal.SIGSTOP)
    at = await two.until(event="plan_cycle", trigger="lead")
    one.process.send_signal(signal.SIGCONT)
    await one.until(event="planner_stands_by")
    for _ in range(3):
        at = await two.until(at, event="plan_cycle", trigger="timer")
    planners = [record["planner"] for record in reversed(await ledger.read_cycles())]
    assert planners == sorted(planners), "one, one, …, two, two"


async def test_once_is_refused_while_another_leads(ledger: Ledger, valkey: Server, pool: str) -> None:
    """Exit code 4 names who leads; --force takes the lead, plans, and gives it back."""
    await count(ledger)
    assert (await ledger.lead("other:1", ttl_s=600)).mine
    command = [sys.executable, "-m", "planner.cli", "planner", "once", "--redis", valkey.url, "--pool", pool]
    command += ["--endpoint", "a", "--slots", "2", "--replica-cap", "9", "-o", "json"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], env=environ, capture_output=True, text=True, timeout=60)

    refused = run()
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "planner other:1 leads this pool" in refused.stderr
    assert json.loads(run("--force").stdout)["decision"] == "published"
    assert (await ledger.lead("next", ttl_s=1)).mine, "the lead is free again"


async def test_a_lost_endpoint_is_planned_around_at_once(ledger: Ledger, start: Start) -> None:
    """When all services say that an endpoint is not ready, its keys move without waiting for the timer; and back."""
    await count(ledger)

    async def say(ready: bool, version: int) -> None:
        fleet = [EndpointView("a", "10.0.0.1:80", ready, False, 0), EndpointView("b", "10.0.0.2:80", True, False, 0)]
        await ledger.write_ack("one", version=version, epoch=1, error="", fleet=fleet, ttl_s=600)

    await say(True, 0)
    one = start("one", interval_s=3600, check_s=3600, watch_s=0.1, lost_after_s=0.3)
    at = await one.until(event="plan_cycle", decision="published", trigger="lead")
    await say(False, 1)
    at = await one.until(at, event="plan_cycle", decision="published", trigger="lost: a", lost=["a"])
    head = await ledger.read_head()
    assert verify(await ledger.read_plan_bytes(head.version), head, key_check=hash_key(KEY_CHECK)).endpoints == ("b",)
    two = start("two", interval_s=3600, check_s=3600, watch_s=0.1, lost_after_s=0.3)
    await two.until(event="planner_stands_by")
    one.end()
    after = await two.until(event="plan_cycle", trigger="lead", decision="unchanged", lost=["a"])
    await say(True, 2)
    await two.until(after, event="plan_cycle", decision="published", trigger="back: a", lost=[])


async def test_a_start_without_redis_says_so_and_goes_on(own_valkey: Killable, pool: str, tmp_path: Path) -> None:
    """One line with the remedy while there is none, and the lead when it comes."""
    own_valkey.kill()
    one = PlannerProcess(own_valkey.url, pool, tmp_path / "log", name="one")
    try:
        await one.until(event="lead_unknown", level="warning")
        own_valkey.start()
        await one.until(event="plan_cycle", decision="no_rates")
        assert [event["event"] for event in one.events()].count("lead_unknown") == 1
    finally:
        one.end()


class Engine:
    """What a probe sees of an engine."""

    def __init__(self) -> None:
        class Healthy(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"

    def end(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._server.server_close()


async def test_an_engine_that_dies_leaves_the_plan(
    ledger: Ledger, valkey: Server, pool: str, start: Start, tmp_path: Path
) -> None:
    """From the service's probe by its ack to the planner, and as a plan back into the service's table."""
    await count(ledger)
    a, b = Engine(), Engine()
    fleet = {"endpoint": f"a={a.address},b={b.address}", "probe_interval_s": "0.1", "probe_failures": "2"}
    where = {"redis_url": valkey.url, "pool": pool, "plan_poll_s": "0.2"}
    with Serving(tmp_path / "serve", **fleet, **where):  # type: ignore[arg-type]
        one = start("one", interval_s=3600, check_s=3600, watch_s=0.1, lost_after_s=0.5)
        at = await one.until(event="plan_cycle", decision="published", trigger="lead")
        a.end()
        await one.until(at, event="plan_cycle", decision="published", trigger="lost: a")
        deadline = time.monotonic() + 30
        while [(ack.version, ack.error) for ack in await ledger.read_acks()] != [(2, "")]:
            assert time.monotonic() < deadline, "the service serves the plan without it"
            await asyncio.sleep(0.05)
    b.end()


CHILD = """
import asyncio, os, signal, sys
import planner.cycle, planner.leader
from planner.job import once
from planner.settings import load_settings
from service.ledger import Ledger

step, when, url, pool = sys.argv[1:]
owner, name = {
    "lead": (Ledger, "lead"), "resume": (Ledger, "read_cycles"), "freeze": (Ledger, "read_freeze"),
    "read": (planner.cycle.Windows, "read"), "build": (planner.cycle, "build"), "judge": (planner.cycle, "judge"),
    "publish": (Ledger, "publish"), "record": (Ledger, "record"), "resign": (Ledger, "resign"),
}[step]
real = getattr(owner, name)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def plain(*args, **given):
    if when == "before":
        die()
    real(*args, **given)
    die()

async def waiting(*args, **given):
    if when == "before":
        die()
    await real(*args, **given)
    die()

patched = waiting if asyncio.iscoroutinefunction(real) else plain
setattr(owner, name, patched)
if step == "judge":
    init = planner.cycle.Planner.__init__
    planner.cycle.Planner.__init__ = lambda self, *args, **given: init(self, *args, **{**given, "judge": patched})
options = dict(endpoint=("a", "b"), slots_per_endpoint=2, replica_cap_rps=1e6, name="child", lease_s=0.5)
asyncio.run(once(load_settings({}, redis_url=url, pool=pool, **options)))
"""

STEPS = [
    ("lead", "after"),
    ("freeze", "before"),
    ("read", "before"),
    ("build", "before"),
    ("judge", "before"),
    ("judge", "after"),
    ("publish", "before"),
    ("publish", "after"),
    ("resign", "before"),
]


@pytest.mark.parametrize(
    ("step", "when", "first"), [(*s, True) for s in STEPS] + [("record", "before", False), ("record", "after", False)]
)
async def test_a_planner_killed_between_two_steps_loses_nothing(
    ledger: Ledger, valkey: Server, pool: str, step: str, when: str, first: bool
) -> None:
    """The published plan is whole, the next planner leads after the lease, plans on, and publishes nothing twice."""
    await count(ledger)
    options = {"endpoint": ("a", "b"), "slots_per_endpoint": 2, "replica_cap_rps": 1e6, "name": "next"}
    settings = load_settings({}, redis_url=valkey.url, pool=pool, **options)
    if not first:  # a cycle that publishes nothing comes after one that did
        lease = await ledger.lead("before", ttl_s=60)
        await Planner(ledger, settings).cycle(lease.value)
        await ledger.resign("before")
    child = await asyncio.to_thread(die_in_a_cycle, step, when, valkey.url, pool)
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    await whole(ledger)
    lease = await taken(ledger)
    record = await Planner(ledger, settings).cycle(lease)
    done = not first or (step, when) in (("publish", "after"), ("resign", "before"))
    assert record["decision"] == ("unchanged" if done else "published")
    assert await whole(ledger) == 1
    assert [p.version for p in await ledger.read_log()] == [1], "one publication, whoever made it"
    decisions = [r["decision"] for r in await ledger.read_cycles()]
    assert decisions.count("published") == 1, "with its record"


def die_in_a_cycle(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-c", CHILD, *arguments], timeout=60, capture_output=True)


async def taken(ledger: Ledger) -> str:
    """Return the lease of the next planner, once that of the dead one has ended."""
    deadline = time.monotonic() + 30
    while not (lease := await ledger.lead("next", ttl_s=60)).mine:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return lease.value


async def whole(ledger: Ledger) -> int:
    """Return the published version, its plan verified; every version in the log has its record and nothing else."""
    head = await ledger.read_head()
    if head.version:
        verify(await ledger.read_plan_bytes(head.version), head, key_check=hash_key(KEY_CHECK))
    logged = sorted(p.version for p in await ledger.read_log())
    recorded = sorted(r["version"] for r in await ledger.read_cycles() if r["decision"] == "published")
    assert logged == recorded == list(range(1, head.version + 1))
    return head.version


async def test_a_lease_that_ended_is_nobodys(ledger: Ledger) -> None:
    """By the server's clock: no planner's own clock decides who leads."""
    assert (await ledger.lead("one", ttl_s=0.05)).mine
    await asyncio.sleep(0.2)
    with pytest.raises(NotLeading):
        await ledger.record("1 one", "{}")
    assert await ledger.read_cycles() == []
