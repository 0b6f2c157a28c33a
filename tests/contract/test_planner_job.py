"""The planner on a real server: counts become a published plan; races, losses, damage and bad input end well."""

import asyncio
import json
import math
import signal
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import redis

from planner.cycle import Planner
from planner.gate import Memory, Situation, Verdict
from planner.job import Job
from planner.leader import Leader
from planner.rates import KeyRates
from planner.record import Record
from planner.settings import PlannerSettings, load_settings
from planner.windows import Windows, window_starts
from service.errors import InvalidPlan, NotLeading, PlanConflict, StoreUnavailable
from service.keys import KEY_CHECK, hash_key
from service.ledger import Ledger
from service.plan import Plan
from service.published import EndpointView
from service.store import Head, Store, verify
from tests.contract.planning import PlannerProcess

WINDOW_S = 30
NOW_S = 1_800_000_045.0  # the middle of a window
OPEN_S = 1_800_000_030
KEYS = {hash_key(name.encode()): count for name, count in {"hot": 900, "warm": 90, "mild": 45, "cold": 9}.items()}


class Server(Protocol):
    url: str

    def kill(self) -> None: ...
    def start(self) -> None: ...


class Racing(Ledger):
    """A store in which somebody else publishes another plan just before our first publications."""

    races = 0

    async def publish(self, plan: Plan, *, expected: Head, actor: str, reason: str, **planners: Any) -> Plan:
        if self.races:
            self.races -= 1
            nothing = {"key_hashes": array("Q"), "target_offsets": array("I", [0]), "targets": array("I")}
            other = replace(plan, **nothing, rates_rps=array("f"))
            await super().publish(other, expected=expected, actor="rival", reason="")
        return await super().publish(plan, expected=expected, actor=actor, reason=reason, **planners)


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Racing]:
    store = Racing(valkey.url, pool)
    yield store
    await store.close()


@pytest.fixture
def settings(valkey: Server, pool: str) -> PlannerSettings:
    return load_settings(
        {},
        redis_url=valkey.url,
        pool=pool,
        endpoint=("a=10.0.0.1:80", "b"),
        slots_per_endpoint=2,
        replica_cap_rps=20.0,
        gate=False,
    )


async def count(store: Store, window_start_s: int, counts: Mapping[int, int], *, instance: str = "x") -> None:
    await store.add_rates(window_start_s, counts, instance=instance, batch=window_start_s, ttl_s=600)


async def planned(store: Ledger, settings: PlannerSettings, now_s: float = NOW_S, **given: Any) -> Record:
    """One cycle of a planner that has just taken the lead."""
    lease = await store.lead("test", ttl_s=60)
    return await Planner(store, settings, clock=lambda: now_s, **given).cycle(lease.value)


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
    await count(store, OPEN_S - 240 * WINDOW_S, {1: 10**9})  # older than the 240 windows
    record = await planned(store, settings)
    assert (record["decision"], record["version"], record["windows"]) == ("published", 1, 2)
    assert (record["keys"], record["admitted"]) == (4, 3)
    assert record["rate_rps"] == pytest.approx(
        2 * sum(KEYS.values()) / 45, rel=1e-3
    )  # the older half weighs a little less
    assert record["admitted_rate_share"] == pytest.approx(1 - 9 / sum(KEYS.values()))
    assert set(record["durations_ms"]) == {
        "read_rates", "ask_engines", "admit", "place", "judge", "publish",
    }  # fmt: skip
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
    """Bytes that are gone or damaged serve nobody, so they do not stop the next plan."""
    await count(store, OPEN_S, KEYS)
    assert (await planned(store, settings))["version"] == 1
    await store._redis.delete(store._key("plan", 1))
    assert (await planned(store, settings))["version"] == 2
    await store._redis.append(store._key("plan", 2), b"x")
    record = await planned(store, settings)
    assert (record["decision"], record["version"]) == ("published", 3)
    await published(store)


async def test_a_store_that_came_back_empty_gets_a_plan_of_a_higher_epoch(own_valkey: Server, pool: str) -> None:
    """After a loss of all data the next counts lead to version 1 of an epoch above the lost one."""
    store = Ledger(own_valkey.url, pool)
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


async def test_each_cycle_leaves_one_record(store: Racing, settings: PlannerSettings) -> None:
    """What was decided, from which inputs, how large and how long; what changes nothing stays out of the log."""
    assert (await planned(store, settings))["decision"] == "no_rates"
    await count(store, OPEN_S, KEYS)
    done = await planned(store, settings)
    await planned(store, settings)
    newest, before, first = await store.read_cycles()
    assert [r["decision"] for r in (newest, before, first)] == ["unchanged", "published", "no_rates"]
    assert [r["version"] for r in (newest, before, first)] == [1, 1, 0]
    timed = {**done, "durations_ms": {k: v for k, v in done["durations_ms"].items() if k != "publish"}}
    assert before.pop("recorded_at") > time.time() - 60
    assert before == timed, "a publication and its record are one script, so it cannot hold how long that took"
    assert newest["inputs_sha256"] != before["inputs_sha256"], "the plan before is an input"
    assert (newest["keys"], newest["events"], newest["windows"]) == (4, sum(KEYS.values()), 1)
    assert len(await store.read_log()) == 1


async def test_a_judge_decides_and_is_quoted(store: Racing, settings: PlannerSettings) -> None:
    """What the judge says is done: kept, refused, or Flat-LB, which is a plan without keys; its memory comes back."""
    judging, said, heard = settings.model_copy(update={"gate": True}), [], []

    def judge(situation: Situation) -> Verdict:
        heard.append(situation.memory)
        decision = said.pop()
        return Verdict(decision, f"I say {decision}.", {"gain": 1.5, "endless": math.inf}, Memory(NOW_S, 7.0))

    async def cycle(decision: str) -> Record:
        said.append(decision)
        return await planned(store, judging, judge=judge)

    await count(store, OPEN_S, KEYS)
    assert (await cycle("refuse"))["decision"] == "refused"
    assert await store.read_head() == Head()
    assert (await cycle("publish"))["version"] == 1
    assert (await store.read_head()).reason == "I say publish."
    await count(store, OPEN_S, {hash_key(b"new"): 500}, instance="y")
    kept = await cycle("keep")
    assert (kept["decision"], kept["version"], kept["reason"]) == ("kept", 1, "I say keep.")
    assert (await cycle("flat"))["decision"] == "flat"
    plan = await published(store)
    assert (len(plan), plan.endpoints, plan.version) == (0, ("a", "b"), 2)
    assert (await cycle("flat"))["decision"] == "unchanged"
    assert heard == [None, *[Memory(NOW_S, 7.0)] * 4]
    assert all(record["numbers"] == {"gain": 1.5} for record in await store.read_cycles())


async def test_the_real_judge_refuses_what_wins_nothing(store: Racing, settings: PlannerSettings) -> None:
    """With sizes known the gate decides by its prediction: where the cache holds all anyway, Flat-LB stays."""
    await count(store, OPEN_S, KEYS)
    told = {"gate": True, "cache_tokens_per_endpoint": 1e6, "prefix_tokens": 100.0, "unique_tokens": 10.0}
    record = await planned(store, settings.model_copy(update=told))
    assert record["decision"] == "refused"
    assert "Flat-LB stays" in record["reason"]
    assert record["numbers"]["gain_candidate"] < 1.1


async def test_a_lost_endpoint_gets_no_key(store: Racing, settings: PlannerSettings) -> None:
    """Its keys move to the others, the record names it, and the plan has no target there."""
    await count(store, OPEN_S, KEYS)
    await planned(store, settings)
    lease = await store.lead("test", ttl_s=60)
    record = await Planner(store, settings, clock=lambda: NOW_S).cycle(lease.value, trigger="lost: a", lost=["a"])
    assert (record["decision"], record["lost"], record["trigger"], record["endpoints"]) == (
        "published", ["a"], "lost: a", 1,
    )  # fmt: skip
    assert (await published(store)).endpoints == ("b",)


async def refused(store: Ledger, settings: PlannerSettings, now_s: float = NOW_S, **given: Any) -> str:
    """Return the one line of a cycle that could not plan; the published plan stays, and the record has the reason."""
    before, lost = await store.read_head(), given.pop("lost", ())
    lease = await store.lead("test", ttl_s=60)
    with pytest.raises(InvalidPlan) as caught:
        await Planner(store, settings, clock=lambda: now_s, **given).cycle(lease.value, lost=lost)
    assert await store.read_head() == before
    (newest, *_) = await store.read_cycles()
    assert (newest["decision"], newest["reason"], newest["version"]) == ("invalid", str(caught.value), before.version)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; the published plan stays")
    return str(caught.value)


async def test_what_cannot_be_planned_from_leaves_the_plan(
    store: Racing, settings: PlannerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No endpoint is there, another salt, a newer schema, another pool's plan, rates that are none: one line each."""
    await count(store, OPEN_S, KEYS)
    await planned(store, settings)
    assert "none of 2 endpoints is ready" in await refused(store, settings, lost=["a", "b"])
    salted = settings.model_copy(update={"key_salt": "another salt of 16 bytes"})
    assert "CACHEROUTE_KEY_SALT" in await refused(store, salted)
    renamed = settings.model_copy(update={"endpoint": ("x", "y")})
    assert "it is another pool's, or they were renamed" in await refused(store, renamed)
    for rate in (math.nan, math.inf, -1.0):
        wrong = KeyRates(np.array([1, 2], dtype=np.uint64), np.array([1.0, rate]), 1.0)
        monkeypatch.setattr("planner.windows.rates_from_windows", lambda *_, wrong=wrong: wrong)
        assert f"the rate of a key is {rate}" in await refused(store, settings)
    monkeypatch.undo()
    plan, head = await published(store), await store.read_head()
    monkeypatch.setattr("service.plan.SCHEMA", 2)
    await store.publish(plan, expected=head, actor="", reason="")
    monkeypatch.undo()
    assert "plan schema 2 is unknown" in await refused(store, settings)
    assert (await planned(store, settings, anew=True))["decision"] == "published"


async def test_renamed_endpoints_are_taken_once_the_services_know_them(
    store: Racing, settings: PlannerSettings
) -> None:
    """Names that services do not know are refused; those that they know replace the published plan's."""
    await count(store, OPEN_S, KEYS)
    await planned(store, settings)
    renamed = settings.model_copy(update={"endpoint": ("x", "y")})
    views = {name: EndpointView(name, "10.0.0.1:80", True, False, 0) for name in "abxy"}
    await store.write_ack("one", version=1, epoch=1, error="", fleet=[views["a"], views["b"]])
    assert "call them in the planner as the service does" in await refused(store, renamed, anew=True)
    await store.write_ack("one", version=1, epoch=1, error="", fleet=[views["x"], views["y"]])
    assert (await planned(store, renamed))["decision"] == "published"
    assert (await published(store)).endpoints == ("x", "y")


async def test_a_clock_that_goes_back_is_told_once(store: Racing, settings: PlannerSettings) -> None:
    """A cycle before the last one, whichever planner made that, changes nothing; the next goes by the new time."""
    await count(store, OPEN_S, KEYS)
    await planned(store, settings)
    assert "it went back by 10 s" in await refused(store, settings, NOW_S - 10)
    assert (await planned(store, settings, NOW_S - 9))["decision"] in ("published", "unchanged")


async def test_a_freeze_keeps_planners_away_and_no_operator(store: Racing, settings: PlannerSettings) -> None:
    """Set before a cycle or in its middle: nothing is published, and the record says by whom and why."""
    await count(store, OPEN_S, KEYS)
    await store.freeze(actor="me", reason="migration")
    record = await planned(store, settings)
    assert (record["decision"], record["reason"]) == ("frozen", "frozen by me: migration")
    assert await store.read_head() == Head()
    await store.unfreeze(actor="me", reason="")

    def judge(situation: Situation) -> Verdict:
        with redis.Redis.from_url(settings.redis_url) as client:
            client.set(store._key("freeze"), json.dumps({"actor": "you", "reason": "fire", "at": 1, "until": 0}))
        return Verdict("publish", "Published: why not.")

    record = await planned(store, settings.model_copy(update={"gate": True}), judge=judge)
    assert (record["decision"], record["reason"], record["version"]) == ("frozen", "frozen by you: fire", 0)
    await store.publish(one_key(), expected=Head(), actor="operator", reason="")
    assert (await store.read_head()).version == 1


def one_key() -> Plan:
    return Plan(("a",), array("Q", [1]), array("I", [0, 1]), array("I", [0]), array("f", [1.0]), hash_key(KEY_CHECK))


async def test_what_a_planner_without_the_lead_writes_is_refused(store: Racing, settings: PlannerSettings) -> None:
    """A planner that stood still in a cycle until another took over publishes nothing and leaves no record."""
    await count(store, OPEN_S, KEYS)
    stale = await store.lead("sleeper", ttl_s=0.05)

    said: list[Any] = ["keep", "publish"]

    def judge(situation: Situation) -> Verdict:
        time.sleep(0.2)
        with redis.Redis.from_url(settings.redis_url) as client:
            client.set(store._key("leader"), "2 other", px=60_000)
        return Verdict(said.pop(), "So be it.")

    while said:
        planner = Planner(store, settings.model_copy(update={"gate": True}), judge=judge, clock=lambda: NOW_S)
        with pytest.raises(NotLeading) as caught:
            await planner.cycle(stale.value)
        assert caught.value.leader == "other"
    assert await store.read_head() == Head()
    assert await store.read_cycles() == []


async def test_a_term_only_rises(store: Racing) -> None:
    """A lease is renewed by who has it, refused to others until it ends or they force it, and each has its own term."""
    first = await store.lead("one", ttl_s=60)
    again = await store.lead("one", ttl_s=60)
    assert (first.mine, again) == (True, first)
    other = await store.lead("two", ttl_s=60)
    assert (other.mine, other.who, other.value) == (False, "one", first.value)
    assert 0 < other.left_s <= 60
    forced = await store.lead("two", ttl_s=60, force=True)
    assert (forced.mine, int(forced.value.split()[0]) > int(first.value.split()[0])) == (True, True)
    await store.resign("one")
    assert not (await store.lead("one", ttl_s=60)).mine, "who does not have it cannot give it back"
    await store.resign("two")
    assert (await store.lead("one", ttl_s=60)).mine


async def test_the_loop_outlives_redis_and_ends_on_sigterm(own_valkey: Server, pool: str, tmp_path: Path) -> None:
    """One line a cycle; while Redis is away each cycle says so; a plan follows its return; SIGTERM exits 0 at once."""
    loop = PlannerProcess(own_valkey.url, pool, tmp_path / "log", interval_s=0.1, check_s=0.1)
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
        assert loop.process.wait(timeout=30) == 0
        assert loop.events()[-1]["event"] == "planner_stopped"
    finally:
        loop.process.kill()
        loop.process.wait()


async def test_load_and_copies_call_for_a_cycle_once(store: Racing, settings: PlannerSettings) -> None:
    """A look between cycles leaves no record; it calls when the plan bears today's rates worse than after the last."""
    lease = (await store.lead("test", ttl_s=60)).value
    planner = Planner(store, settings, clock=lambda: NOW_S)
    even = {hash_key(name): 45 for name in (b"one", b"two", b"three", b"four")}
    await count(store, OPEN_S, even)
    assert await planner.check() == "", "nothing is published"
    await planner.cycle(lease)
    assert await planner.check() == ""
    await count(store, OPEN_S, {hash_key(b"one"): 60}, instance="y")
    assert (await planner.check()).startswith("imbalance: the most loaded endpoint is at 1.25 times the mean")
    assert await planner.check() == "", "called for once"
    await count(store, OPEN_S, {hash_key(b"one"): 400}, instance="z")
    assert (await planner.check()).startswith("copies: 1 keys need more")
    assert len(await store.read_cycles()) == 1
    assert (await planner.cycle(lease, trigger="copies"))["decision"] == "published"
    assert await planner.check() == ""


async def test_an_operators_plan_is_no_reason_for_a_cycle(store: Racing, settings: PlannerSettings) -> None:
    """What somebody published in between is taken as it is by a look, and judged at the next cycle."""
    lease = (await store.lead("test", ttl_s=60)).value
    planner = Planner(store, settings, clock=lambda: NOW_S)
    await count(store, OPEN_S, {1: 90, 2: 90})
    await planner.cycle(lease)
    await store.publish(one_key(), expected=await store.read_head(), actor="operator", reason="")
    assert await planner.check() == ""
    assert (await planner.cycle(lease))["version"] == 3


async def test_a_slow_redis_delays_cycles_and_never_stacks_them(
    store: Racing, settings: PlannerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When reading takes longer than the interval there is one cycle at a time, each on time after the one before."""
    running, most, cycles = 0, 0, 0
    read = Windows.read

    async def slowly(windows: Windows, now_s: float) -> Any:
        nonlocal running, most, cycles
        running += 1
        most, cycles = max(most, running), cycles + 1
        await asyncio.sleep(0.2)
        running -= 1
        return await read(windows, now_s)

    monkeypatch.setattr(Windows, "read", slowly)
    leader = Leader(store, "one", 15.0)
    await leader.take()
    quick = settings.model_copy(update={"interval_s": 0.02, "check_s": 0.02, "watch_s": 0.02})
    job = asyncio.create_task(Job(store, leader, quick).run())
    deadline = time.monotonic() + 30
    while cycles < 4:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert most == 1
    assert len(await store.read_cycles()) in (cycles - 1, cycles)


async def test_a_jump_of_the_active_set_falls_back_to_flat_lb(store: Racing, settings: PlannerSettings) -> None:
    """The real judge gets the active set from the windows: far more keys than the rates know end the plan at once."""
    judging, ten = settings.model_copy(update={"gate": True, "slots_per_endpoint": 50}), range(1, 11)
    for back in ten:
        await count(store, OPEN_S - back * WINDOW_S, dict.fromkeys(range(200), 10))
    assert (await planned(store, judging))["decision"] == "published"
    later_s = OPEN_S + 11 * WINDOW_S
    for back in ten:
        await count(store, later_s - back * WINDOW_S, dict.fromkeys(range(500), 10))
    record = await planned(store, judging, later_s + 1)
    assert (record["decision"], record["numbers"]["active_ratio"]) == ("flat", 2.5)
    assert "500 keys are active, 2.50 times what the rates know" in record["reason"]
    plan = await published(store)
    assert (len(plan), plan.reason) == (0, record["reason"])
    waiting = await planned(store, judging, later_s + 2)
    assert waiting["decision"] == "refused"
    assert waiting["reason"].startswith("Refused: Flat-LB stays")
