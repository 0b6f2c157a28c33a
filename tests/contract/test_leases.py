"""The lease script on a real server: it grants as its model does, forgets who is gone, bears what no instance wrote."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any, Protocol

import pytest
import structlog
from prometheus_client import CollectorRegistry

from service.fairness import KEY_CONCURRENCY, Fairness
from service.lease_rows import NO_KEY, REST, Answer, Ask, Report, unpack
from service.leases import TTL_MIN_S, Leases
from service.settings import load_settings
from service.store import Store
from service.telemetry import Telemetry
from tests.unit.lease_model import LeaseModel

PATIENCE_S = 20.0
KEY = 0xFEDCBA9876543210


class Server(Protocol):
    url: str
    pid: int

    def kill(self) -> None: ...
    def start(self) -> None: ...


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Store]:
    store = Store(valkey.url, pool)
    yield store
    await store.close()


def report(*asks: Ask, inflight: int = 0, allowance: int = 0) -> Report:
    return Report(inflight, 0, allowance, asks)


def wants(cap: int, *, key: int = KEY, inflight: int = 0, share: int = 0, limit: int = 0) -> Ask:
    return Ask(key, inflight, cap, 1.0, cap, share, limit)


async def test_the_script_grants_as_its_model_does(store: Store) -> None:
    """On random reports of several instances the script and its model in Python grant and return the same."""
    rng, model = Random(0), LeaseModel()
    keys = [NO_KEY, REST, 1, 2**63, KEY]
    for _ in range(300):
        instance, cap = f"p{rng.randrange(4)}", rng.choice((0, 5, 2**31))
        asks = tuple(
            Ask(
                key,
                rng.randrange(9),
                rng.choice((0, 7, 2**32 - 1)),
                rng.choice((0.1, 1.0, 1e9)),
                rng.randrange(12),
                rng.randrange(12),
                rng.choice((3, 20, 2**32 - 1)),
            )
            for key in rng.sample(keys, rng.randrange(len(keys) + 1))
        )
        told = Report(rng.randrange(50), rng.randrange(50), rng.randrange(4), asks)
        answer = await store.lease(instance, told, cap=cap, ttl_ms=60_000)
        expected = model.lease(instance, told, cap=cap, ttl_ms=60_000, now_ms=0)
        assert answer.grants == expected.grants
        assert answer.others == expected.others
        assert abs(answer.now_ms / 1000 - time.time()) < PATIENCE_S


async def test_slots_are_given_once(store: Store) -> None:
    """Many instances that ask for all slots at the same time are granted no more than there are, and all there are."""
    answers = await asyncio.gather(
        *(store.lease(f"p{i}", report(wants(100, share=100, limit=40)), cap=60, ttl_ms=60_000) for i in range(20))
    )
    assert sum(a.grants[0][0] for a in answers) == 60
    assert sum(a.grants[0][1] for a in answers) == 40


async def test_leases_end_with_their_time_or_their_instance(store: Store) -> None:
    """The slots of an instance that says nothing any more are free after its time, those of one that leaves at once."""
    await store.lease("short", report(wants(4)), cap=10, ttl_ms=200)
    await store.lease("long", report(wants(4)), cap=10, ttl_ms=60_000)
    assert (await store.lease("me", report(wants(9)), cap=10, ttl_ms=60_000)).grants[0][0] == 2
    await asyncio.sleep(0.25)
    answer = await store.lease("me", report(wants(9)), cap=10, ttl_ms=60_000)
    assert (answer.grants[0][0], set(answer.others)) == (6, {"long"})
    await store.forget_instance("long")
    answer = await store.lease("me", report(wants(10)), cap=10, ttl_ms=60_000)
    assert (answer.grants[0][0], set(answer.others)) == (10, set())


async def test_what_no_instance_wrote_holds_nothing(store: Store, pool: str) -> None:
    """Foreign values under the key are dropped, none of them stops the exchange or reaches anybody's figures."""
    name = f"{{cacheroute:{pool}}}:leases"
    await store.lease("good", report(wants(3), inflight=3), cap=10, ttl_ms=60_000)
    good = await store._redis.hget(name, "good")
    cases = [b"", b"x", b"x" * 24, good[:-1], good + b"x", b"\0" * len(good), good[:4] + b"\xff" * (len(good) - 4)]
    await store._redis.hset(name, mapping={f"bad{i}": value for i, value in enumerate(cases)})
    answer = await store.lease("me", report(wants(10)), cap=10, ttl_ms=60_000)
    assert (answer.grants[0][0], set(answer.others)) == (7, {"good"})
    assert await store._redis.hlen(name) == 2
    # A head that is right with rows that are not: bytes of a weight that is no number, or none.
    for weight in (b"\x7f\xf8" + b"\0" * 6, b"\xff\xf0" + b"\0" * 6, b"\0" * 8):
        await store._redis.hset(name, "odd", good[:24] + good[24:40] + weight + good[48:])
        answer = await store.lease("me", report(wants(10)), cap=10, ttl_ms=60_000)
        assert set(answer.others) == {"good"}
    assert 0 < await store._redis.pttl(name) <= 600_000, "a pool that is not used any more leaves nothing behind"


class Rig:
    """The limits of one process and their exchange, on a store that may go away."""

    def __init__(self, url: str, pool: str, instance: str, **settings: Any) -> None:
        self.settings = load_settings(
            {}, endpoint=("a=10.0.0.1:80",), pool=pool, instance=instance, load_exchange_s=0.05, **settings
        )
        self.telemetry = Telemetry(CollectorRegistry())
        self.fairness = Fairness(self.settings)
        self.store = Store(url, pool) if url else None
        self.leases = Leases(self.store, self.settings, self.fairness, self.telemetry)

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0

    def admitted(self, key: int, tries: int) -> int:
        """Try so often; return how many are in flight, and let them end."""
        taken = [self.fairness.admit(key) for _ in range(tries)].count("")
        for _ in range(taken):
            self.fairness.release(key)
        return taken


async def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.02)


async def test_processes_exchange_slots(valkey: Server, pool: str) -> None:
    """Two processes know each other after an exchange, share a key's slots, and one takes what the other leaves."""
    rigs = [Rig(valkey.url, pool, f"p{i}", key_inflight_max=10) for i in range(2)]
    for rig in rigs:
        await rig.leases.first()
    assert rigs[1].admitted(KEY, 20) == 5
    tasks = [asyncio.create_task(rig.leases.run()) for rig in rigs]
    await until(lambda: rigs[0].fairness.processes == 2, "both know of each other")
    await until(lambda: rigs[0].admitted(KEY, 20) == 10, "all slots are where the key is")
    assert rigs[1].admitted(KEY, 20) == 0
    await until(lambda: rigs[1].admitted(KEY, 20) == rigs[0].admitted(KEY, 20) == 5, "both have what both want")
    assert rigs[0].value("cacheroute_fair_processes") == 2
    assert rigs[0].value("cacheroute_fair_keys") == 1
    assert rigs[0].value("cacheroute_lease_age_seconds") < PATIENCE_S
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for rig in rigs:
        assert rig.store is not None
        await rig.store.close()


@pytest.mark.parametrize("away", ["killed", "hung"])
async def test_redis_goes_away_and_comes_back(own_valkey: Server, pool: str, away: str) -> None:
    """Leases stay to their end and no longer, then each process keeps to its part; it is counted, said once, and over
    by itself.
    """
    rigs = [Rig(own_valkey.url, pool, f"p{i}", key_inflight_max=10) for i in range(2)]
    with structlog.testing.capture_logs() as logs:
        tasks = [asyncio.create_task(rig.leases.run()) for rig in rigs]
        await until(lambda: all(rig.fairness.processes == 2 for rig in rigs), "both know of each other")
        await until(lambda: rigs[0].admitted(KEY, 20) == 10, "all slots are where the key is")
        pid = own_valkey.pid
        os.kill(pid, signal.SIGSTOP) if away == "hung" else own_valkey.kill()
        await until(lambda: rigs[0].admitted(KEY, 20) == 5, "the half of two processes")
        assert TTL_MIN_S - 0.01 <= rigs[0].leases.age_s() < TTL_MIN_S + 1, "when its leases had ended"
        await until(lambda: rigs[1].admitted(KEY, 20) == 5, "the half of two processes")
        assert rigs[0].value("cacheroute_store_failures_total", call="lease") >= 1
        os.kill(pid, signal.SIGCONT) if away == "hung" else own_valkey.start()
        await until(lambda: rigs[0].admitted(KEY, 20) == 10, "all slots again")
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for rig in rigs:
        assert rig.store is not None
        await rig.store.close()
    events = [entry["event"] for entry in logs]
    assert events.count("store is back") == 2
    assert len(events) == 4, logs


@pytest.mark.parametrize("url", ["", "redis://127.0.0.1:1/0"], ids=["no redis", "dead redis"])
async def test_a_start_without_redis(pool: str, url: str) -> None:
    """Without Redis a process begins with its part of the limits, its siblings counted in."""
    rig = Rig(url, pool, "p0", key_inflight_max=10, workers=2)
    await asyncio.wait_for(rig.leases.first(), PATIENCE_S)
    assert rig.admitted(KEY, 20) == 5
    assert rig.fairness.admit(KEY) == ""
    task = asyncio.create_task(rig.leases.run())
    await until(lambda: rig.fairness.explain(KEY).leased, "it divides by itself")
    assert rig.fairness.explain(KEY).cap == 5
    assert [rig.fairness.admit(KEY) for _ in range(5)] == [""] * 4 + [KEY_CONCURRENCY]
    task.cancel()
    await asyncio.wait([task])
    if rig.store is not None:
        await rig.store.close()


async def test_switched_off_nothing_is_exchanged(valkey: Server, pool: str) -> None:
    """Without limits no message is sent, no metric exported, and the task stays until it is cancelled."""
    rig = Rig(valkey.url, pool, "p0")
    assert rig.store is not None
    await rig.leases.first()
    task = asyncio.create_task(rig.leases.run())
    await asyncio.sleep(0.2)
    assert not task.done()
    assert not await rig.store._redis.exists(f"{{cacheroute:{pool}}}:leases")
    assert rig.telemetry.registry.get_sample_value("cacheroute_fair_keys") is None
    task.cancel()
    await asyncio.wait([task])
    await rig.store.close()


def test_a_reply_that_is_none_is_the_stores_fault() -> None:
    """What the script would never answer is one error, which the store turns into its own."""
    for reply in (None, [], [1, b"", []] * 2, [1, b"x", []], [1, b"", [b"p", b"short"]], [1, b"", [b"p"]], [1, b"", 7]):
        with pytest.raises(ValueError, match="lease script"):
            unpack(reply)
    assert unpack([5, b"", []]) == Answer(5, (), {})
