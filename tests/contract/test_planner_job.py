"""The planner job on a real server: counts become a published plan; races, losses and damage end well."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from planner.job import Record, cycle, window_starts
from planner.settings import PlannerSettings, load_settings
from service.errors import PlanConflict, StoreUnavailable
from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.store import Head, Store, verify

WINDOW_S = 30
NOW_S = 1_800_000_045.0  # the middle of a window
OPEN_S = 1_800_000_030
KEYS = {hash_key(name.encode()): count for name, count in {"hot": 900, "warm": 90, "mild": 45, "cold": 9}.items()}


class Server(Protocol):
    url: str

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Racing(Store):
    """A store in which somebody else publishes another plan just before our first publications."""

    races = 0

    async def publish(self, plan: Plan, *, expected: Head, actor: str, reason: str) -> Plan:
        if self.races:
            self.races -= 1
            nothing = {"key_hashes": array("Q"), "target_offsets": array("I", [0]), "targets": array("I")}
            other = replace(plan, **nothing, rates_rps=array("f"))
            await super().publish(other, expected=expected, actor="rival", reason="")
        return await super().publish(plan, expected=expected, actor=actor, reason=reason)


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Racing]:
    store = Racing(valkey.url, pool)
    yield store
    await store.close()


@pytest.fixture
def settings(valkey: Server, pool: str) -> PlannerSettings:
    return load_settings(
        {}, redis_url=valkey.url, pool=pool, endpoint=("a=10.0.0.1:80", "b"), slots_per_endpoint=2, replica_cap_rps=20.0
    )


async def count(store: Store, window_start_s: int, counts: Mapping[int, int], *, instance: str = "x") -> None:
    await store.add_rates(window_start_s, counts, instance=instance, batch=window_start_s, ttl_s=600)


async def planned(store: Store, settings: PlannerSettings, now_s: float = NOW_S) -> Record:
    return await cycle(store, settings, clock=lambda: now_s)


async def published(store: Store) -> Plan:
    head = await store.read_head()
    return verify(await store.read_plan_bytes(head.version), head, key_check=hash_key(KEY_CHECK))


def test_window_starts_end_with_the_open_one() -> None:
    """The newest windows, oldest first, aligned as services align them."""
    assert list(window_starts(NOW_S, WINDOW_S, 3)) == [OPEN_S - 60, OPEN_S - 30, OPEN_S]
    assert list(window_starts(90.0, 30, 1)) == [90]


async def test_without_counts_nothing_is_published(store: Store, settings: PlannerSettings) -> None:
    """An empty pool gives a record that says so, and no plan."""
    record = await planned(store, settings)
    assert (record["decision"], record["version"], record["keys"], record["windows"]) == ("no_rates", 0, 0, 0)
    assert await store.read_head() == Head()


async def test_counts_of_all_instances_and_windows_become_a_plan(store: Store, settings: PlannerSettings) -> None:
    """Rates are requests over the time covered; the hot key gets two copies, the coldest none."""
    await count(store, OPEN_S - WINDOW_S, KEYS)
    await count(store, OPEN_S, KEYS, instance="y")
    await count(store, OPEN_S - 10 * WINDOW_S, {1: 10**9})  # older than the ten windows
    record = await planned(store, settings)
    assert (record["decision"], record["version"], record["windows"]) == ("published", 1, 2)
    assert (record["keys"], record["admitted"]) == (4, 3)
    assert record["rate_rps"] == pytest.approx(2 * sum(KEYS.values()) / 45)
    assert record["admitted_rate_share"] == pytest.approx(1 - 9 / sum(KEYS.values()))
    assert set(record["durations_ms"]) == {"read_rates", "admit", "place", "compare", "publish"}
    plan = await published(store)
    assert (plan.version, plan.epoch) == (record["version"], record["epoch"])
    assert plan.content_sha256() == record["sha256"]
    assert plan.endpoints == ("a", "b")
    rows = {h: plan.target_names(row) for row, h in enumerate(plan.key_hashes)}
    assert rows == {hash_key(b"hot"): ("a", "b"), hash_key(b"warm"): ("a",), hash_key(b"mild"): ("b",)}
    assert plan.actor == "planner"
    assert json.loads(json.dumps(record)) == record


async def test_the_same_assignment_is_not_published_again(store: Store, settings: PlannerSettings) -> None:
    """A cycle that finds its own assignment published leaves it alone, also when rates have moved."""
    await count(store, OPEN_S, KEYS)
    first = await planned(store, settings)
    again = await planned(store, settings)
    assert (again["decision"], again["version"], again["epoch"]) == ("unchanged", 1, first["epoch"])
    assert again["sha256"] == first["sha256"]
    later = await planned(store, settings, NOW_S + 5)
    assert later["rate_rps"] < first["rate_rps"]
    assert (later["decision"], later["version"]) == ("unchanged", 1), "other rates alone are no other assignment"
    await count(store, OPEN_S, {hash_key(b"new"): 500}, instance="y")
    other = await planned(store, settings, NOW_S + 5)
    assert (other["decision"], other["version"]) == ("published", 2)


async def test_a_lost_race_is_run_again_from_the_newer_head(store: Racing, settings: PlannerSettings) -> None:
    """When somebody publishes in the middle of a cycle, the cycle reads again and publishes upon that."""
    await count(store, OPEN_S, KEYS)
    store.races = 1
    record = await planned(store, settings)
    assert (record["decision"], record["version"]) == ("published", 2)
    log = await store._redis.xrange(store._key("log"))
    assert [entry[b"actor"] for _, entry in log] == [b"rival", b"planner"]


async def test_a_race_lost_twice_is_a_conflict(store: Racing, settings: PlannerSettings) -> None:
    """The second conflict of one cycle goes to the caller, and the rival's plan stays."""
    await count(store, OPEN_S, KEYS)
    store.races = 2
    with pytest.raises(PlanConflict) as caught:
        await planned(store, settings)
    assert (caught.value.expected_version, caught.value.published_version) == (1, 2)
    assert (await store.read_head()).actor == "rival"


async def test_a_published_plan_that_nobody_can_use_is_replaced(store: Store, settings: PlannerSettings) -> None:
    """Bytes that are gone, or were built with another salt, do not stop the next plan."""
    await count(store, OPEN_S, KEYS)
    salted = settings.model_copy(update={"key_salt": "other"})
    assert (await planned(store, salted))["version"] == 1
    assert (await planned(store, settings))["decision"] == "published"
    await store._redis.delete(store._key("plan", 2))
    record = await planned(store, settings)
    assert (record["decision"], record["version"]) == ("published", 3)
    await published(store)


async def test_a_store_that_came_back_empty_gets_a_plan_of_a_higher_epoch(own_valkey: Server, pool: str) -> None:
    """After a loss of all data the next counts lead to version 1 of an epoch above the lost one."""
    store = Store(own_valkey.url, pool)
    settings = load_settings(
        {}, redis_url=own_valkey.url, pool=pool, endpoint=("a",), slots_per_endpoint=2, replica_cap_rps=20.0
    )
    await count(store, OPEN_S, KEYS)
    before = await planned(store, settings)
    own_valkey.kill()
    with pytest.raises(StoreUnavailable):
        await planned(store, settings)
    own_valkey.start()
    while int(time.time()) <= before["epoch"]:
        await asyncio.sleep(0.05)
    await count(store, OPEN_S, KEYS)
    after = await planned(store, settings)
    assert (after["version"], after["epoch"] > before["epoch"]) == (1, True)
    await store.close()


class Loop:
    """A `planner run` process whose log lines can be waited for."""

    def __init__(self, url: str, pool: str, log: Path) -> None:
        self._log = log
        command = ["planner", "run", "--redis", url, "--pool", pool, "--endpoint", "a", "--endpoint", "b"]
        # One copy a key: how many a rate needs would depend on how long the open window has lasted.
        command += ["--slots", "2", "--replica-cap", "1e6", "--interval-s", "0.1"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([sys.executable, "-m", "planner.cli", *command], stderr=stderr, env=environ)

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def until(self, after: int = 0, **wanted: object) -> int:
        """Wait for a line that holds the wanted fields at or after a position; return the position behind it."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for position, event in enumerate(self.events()[after:], start=after):
                if wanted.items() <= event.items():
                    return position + 1
            assert self.process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.02)
        pytest.fail(f"no line with {wanted} in:\n{self._log.read_text()}")


async def test_the_loop_outlives_redis_and_ends_on_sigterm(own_valkey: Server, pool: str, tmp_path: Path) -> None:
    """One line a cycle; while Redis is away each cycle says so; a plan follows its return; SIGTERM exits 0 at once."""
    loop = Loop(own_valkey.url, pool, tmp_path / "log")
    try:
        await loop.until(event="plan_cycle", decision="no_rates")
        own_valkey.kill()
        at = await loop.until(event="plan_cycle_failed", error="StoreUnavailable")
        own_valkey.start()
        at = await loop.until(at, event="plan_cycle", decision="no_rates")
        store = Store(own_valkey.url, pool)
        await count(store, int(time.time()) // WINDOW_S * WINDOW_S, KEYS)
        await loop.until(at, event="plan_cycle", decision="published", keys=len(KEYS))
        assert len(await published(store)) == len(KEYS)
        await store.close()
        loop.process.send_signal(signal.SIGTERM)
        assert loop.process.wait(timeout=10) == 0
        assert loop.events()[-1]["event"] == "planner_stopped"
    finally:
        loop.process.kill()
        loop.process.wait()
