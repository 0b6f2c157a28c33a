"""A Redis that is silent, slow, wrong or unwilling: routing goes on, each fault is told once, it heals by itself."""

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any, Protocol

import pytest
import redis
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from service.dispatch import pick
from service.errors import CacheRouteError, InvalidPlan, StoreUnavailable
from service.feed import Feed
from service.fleet import Fleet
from service.keys import KEY_CHECK, hash_key
from service.lease_rows import Report
from service.ledger import Ledger
from service.plan import Plan
from service.published import Head
from service.rates import Rates
from service.settings import load_settings
from service.store import Store
from service.table import Current
from service.telemetry import Telemetry

SECRET = "hunter2"


class Server(Protocol):
    url: str
    port: int

    def kill(self) -> None: ...
    def start(self) -> None: ...


def plan_of(*keys: int) -> Plan:
    return Plan(
        endpoints=("a", "b"),
        key_hashes=array("Q", keys),
        target_offsets=array("I", range(len(keys) + 1)),
        targets=array("I", [0] * len(keys)),
        rates_rps=array("f", [1.0] * len(keys)),
        key_check=hash_key(KEY_CHECK),
    )


# What a broken server, another kind of server, or one that cannot serve says to everything.
SAYINGS = {
    "http": b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n<html>",
    "binary": bytes(range(256)),
    "binary-error": b"-\xff\xfe\r\n",
    "ok": b"+OK\r\n",
    "nil": b"$-1\r\n",
    "nil-array": b"*-1\r\n",
    "number": b":5\r\n",
    "text": b"$3\r\nabc\r\n",
    "array": b"*1\r\n$1\r\na\r\n",
    "nested": b"*2\r\n*1\r\n:1\r\n$1\r\na\r\n",
    "resp3-map": b"%1\r\n+a\r\n+b\r\n",
    "resp3-push": b">2\r\n+a\r\n+b\r\n",
    "huge": b"$99999999999999\r\nabc",
    "negative": b"$-5\r\n",
    "loading": b"-LOADING Redis is loading the dataset in memory\r\n",
    "readonly": b"-READONLY You can't write against a read only replica.\r\n",
    "memory": b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
    "master-down": b"-MASTERDOWN Link with MASTER is down\r\n",
    "cluster-down": b"-CLUSTERDOWN Hash slot not served\r\n",
    "moved": b"-MOVED 1 127.0.0.1:1\r\n",
    "no-script": b"-NOSCRIPT No matching script.\r\n",
    "echo": f"-ERR AUTH {SECRET} called without any password configured\r\n".encode(),
}


class Moody:
    """A server between us and a real one, which passes everything on or misbehaves as it is told."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._mood = "pass"
        self._writers: set[asyncio.StreamWriter] = set()
        # Keeps connections and passes nothing on, like a host that is gone.
        self.deaf = False

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._listener.close()
        self.turn("close")
        await asyncio.sleep(0)

    def turn(self, mood: str) -> None:
        """Be like that from now on: pass, silent, close, trickle, endless, slow, or one of SAYINGS."""
        self._mood = mood
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            if self._mood in ("pass", "slow"):
                await self._pass_on(reader, writer)
            elif self._mood != "close":
                await self._misbehave(reader, writer)
        self._writers.discard(writer)
        writer.close()

    async def _misbehave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mood = self._mood
        while await reader.read(65536):
            if mood == "trickle":
                for byte in b"$1000000\r\n" + bytes(1000):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.05)
            elif mood == "endless":
                writer.write(b"*1000000\r\n")
                while True:
                    writer.write(b"$1\r\na\r\n" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0.01)
            elif mood != "silent":
                writer.write(SAYINGS[mood])
            await writer.drain()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.add(inner_writer)
        delay_s = 0.2 if self._mood == "slow" else 0.0
        self.deaf = False

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, delay_s: float = 0.0) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    await asyncio.sleep(delay_s)
                    if not self.deaf:
                        sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer, delay_s))
        self._writers.discard(inner_writer)


@pytest.fixture
async def moody(valkey: Server) -> AsyncIterator[Moody]:
    moody = Moody(valkey.port)
    await moody.start()
    yield moody
    await moody.stop()


async def first_event(store: Store) -> bool:
    async with contextlib.aclosing(store.events()) as events:
        return await anext(events)


CALLS: dict[str, Callable[[Ledger], Awaitable[object]]] = {
    "read_head": lambda store: store.read_head(),
    "read_plan_bytes": lambda store: store.read_plan_bytes(1),
    "publish": lambda store: store.publish(plan_of(1), expected=Head(), actor="", reason=""),
    "read_log": lambda store: store.read_log(),
    "events": first_event,
    "add_rates": lambda store: store.add_rates(0, {1: 1}, instance="x", batch=1, ttl_s=1),
    "read_rates": lambda store: store.read_rates([0]),
    "read_window": lambda store: store.read_window(0),
    "read_revisions": lambda store: store.read_revisions([0]),
    "write_ack": lambda store: store.write_ack("x", version=1, epoch=1, error=""),
    "read_acks": lambda store: store.read_acks(fleets=True),
    "exchange_load": lambda store: store.exchange_load("x", {"10.0.0.1:80": (1, 9)}),
    "lease": lambda store: store.lease("x", Report(0, 0, 1, ()), cap=1, ttl_ms=1000),
    "forget_instance": lambda store: store.forget_instance("x"),
    "lead": lambda ledger: ledger.lead("x", ttl_s=60),
    "record": lambda ledger: ledger.record("1 x", "{}"),
    "resign": lambda ledger: ledger.resign("x"),
    "read_cycles": lambda ledger: ledger.read_cycles(),
    "read_events": lambda ledger: ledger.read_events(),
    "freeze": lambda ledger: ledger.freeze(actor="x", reason="x", ttl_s=60),
    "read_freeze": lambda ledger: ledger.read_freeze(),
    "unfreeze": lambda ledger: ledger.unfreeze(actor="x", reason="x"),
}


@pytest.mark.parametrize("scheme", ["redis://", f"redis://:{SECRET}@", "redis+cluster://", "redis+sentinel://"])
async def test_nothing_but_its_own_errors_leaves_the_store(moody: Moody, pool: str, scheme: str) -> None:
    """Whatever is answered, a call returns, or says that Redis or the plan cannot be used; no password is repeated."""
    assert CALLS.keys() == {name for name in dir(Ledger) if not name.startswith("_")} - {"close"}
    for mood in ("close", *SAYINGS):
        moody.turn(mood)
        master = "/m" if "sentinel" in scheme else ""
        store = Ledger(f"{scheme}127.0.0.1:{moody.port}{master}?socket_timeout=0.1", pool)
        async with asyncio.timeout(30):
            said = await asyncio.gather(*(told(call(store)) for call in CALLS.values()))
        assert SECRET not in scheme or SECRET not in str(said), mood
        await store.close()


async def told(work: Awaitable[object]) -> str:
    """Return the words of the error of ours that it raised, or none."""
    try:
        await work
    except (StoreUnavailable, InvalidPlan) as exc:
        return str(exc)
    return ""


@pytest.mark.parametrize("mood", ["silent", "trickle", "endless", "huge"])
async def test_no_answer_is_an_error_soon(moody: Moody, pool: str, mood: str) -> None:
    """A server that keeps the connection and never ends its answer holds each call for seconds, not for ever."""
    moody.turn(mood)
    store = Ledger(f"redis://127.0.0.1:{moody.port}/0", pool)
    async with asyncio.timeout(20):
        said = await asyncio.gather(*(call(store) for call in CALLS.values()), return_exceptions=True)
    assert [type(error) for error in said] == [StoreUnavailable] * len(CALLS)
    await store.close()


class Rig:
    """The tasks of one service, and picks beside them."""

    def __init__(self, url: str, pool: str) -> None:
        self.settings = load_settings(
            {},
            endpoint=("a=10.0.0.1:80", "b=10.0.0.2:80"),
            pool=pool,
            plan_poll_s=0.1,
            rate_flush_s=0.05,
            load_exchange_s=0.05,
            instance="x",
        )
        self.fleet = Fleet((("a", "10.0.0.1:80"), ("b", "10.0.0.2:80")))
        self.current, self.rates = Current(), Rates(30, 3600, first_batch=int(time.time() * 1000))
        self.telemetry = Telemetry(CollectorRegistry())
        self.store = Store(url, pool)
        self.feed = Feed(self.store, self.settings, self.fleet, self.current, self.rates, self.telemetry)
        self.windows: set[int] = set()
        self.picks = 0

    def failures(self, call: str) -> float:
        return self.telemetry.registry.get_sample_value("cacheroute_store_failures_total", {"call": call}) or 0.0

    async def picking(self) -> None:
        """Decide as the request path does, all the time."""
        while True:
            await asyncio.sleep(0.005)
            if self.current.table.version:
                _, reason = pick(self.current.table, self.fleet, 1, Random(0), spill_factor=2.0)
                assert reason == "planned"
                self.picks += 1

    def count(self, key: int) -> None:
        now = time.time()
        self.windows.add(int(now) // 30 * 30)
        self.rates.count(key, now)


@contextlib.asynccontextmanager
async def following(rig: Rig) -> AsyncIterator[Rig]:
    tasks = [asyncio.create_task(rig.feed.run()), asyncio.create_task(rig.picking())]
    try:
        yield rig
        assert not any(task.done() for task in tasks), "no task ends, and no pick fails"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rig.store.close()


async def until(true: Callable[[], Awaitable[bool] | bool], what: str) -> None:
    async with asyncio.timeout(40):
        while True:
            with contextlib.suppress(CacheRouteError):
                result = true()
                if result if isinstance(result, bool) else await result:
                    return
            await asyncio.sleep(0.02)
    pytest.fail(what)


async def outlives(
    rig: Rig, admin: Store, begin: Callable[[], object], end: Callable[[], object], calls: set[str]
) -> Any:
    """Go through a fault that fails those calls; return the log lines about it.

    The last table stays in service, each call is told once however often it fails, and after the fault the next plan
    arrives, counts made meanwhile arrive once, and load is shared again.
    """
    with capture_logs() as lines:
        await admin.publish(plan_of(1), expected=await admin.read_head(), actor="", reason="")
        await until(lambda: rig.current.table.version == 1, "no first plan")
        rig.count(7)
        begin()
        rig.count(9)
        for call in calls:
            before = rig.failures(call)
            await until(lambda call=call, before=before: rig.failures(call) >= before + 3, f"{call} does not fail")  # type: ignore[misc]
        rig.count(8)
        before = rig.picks
        await until(lambda: rig.picks > before + 10, "no picks")
        assert set(rig.current.table.targets) == {1}
        assert set(rig.fleet.by_address) == {"10.0.0.1:80", "10.0.0.2:80"}
        told = [line for line in lines if line["log_level"] in ("warning", "error")]
    end()
    await admin.publish(plan_of(1, 2), expected=await admin.read_head(), actor="", reason="")
    await until(lambda: len(rig.current.table.targets) == 2, "the plan after the fault never arrived")

    async def arrived() -> bool:
        found = await admin.read_rates(sorted(rig.windows))
        return [sum(counts.get(key, 0) for counts in found.values()) for key in (7, 8)] == [1, 1]

    async def shared() -> bool:
        await admin.exchange_load("other", {"10.0.0.2:80": (3, 30)})
        return rig.fleet.by_name["b"].work_elsewhere == 30

    await until(arrived, "a count is lost or doubled")
    await until(shared, "load is not shared")
    assert sorted(line["call"] for line in told) == sorted(calls), told
    return told


ALL = {"plan", "events", "rates", "load"}


@pytest.mark.parametrize("mood", ["close", "silent", "trickle", "http", "binary", "loading", "moved"])
async def test_a_redis_that_misbehaves(moody: Moody, valkey: Server, pool: str, mood: str) -> None:
    """Silence, garbage and refusals of all kinds: planned picks go on, one line and a counter a call, then it heals."""
    url, admin = f"redis://127.0.0.1:{moody.port}/0?socket_timeout=0.1", Store(valkey.url, pool)
    async with following(Rig(url, pool)) as rig:
        told = await outlives(rig, admin, lambda: moody.turn(mood), lambda: moody.turn("pass"), ALL)
    for line in told:
        assert "CACHEROUTE_REDIS_URL" in line["error"]
        assert line["event"] == "store unavailable, routing goes on"
    await admin.close()


async def test_a_redis_that_is_slow(moody: Moody, valkey: Server, pool: str) -> None:
    """A server that takes its time, but less than the timeout, is followed without an error."""
    moody.turn("slow")
    admin = Store(valkey.url, pool)
    async with following(Rig(f"redis://127.0.0.1:{moody.port}/0?socket_timeout=5", pool)) as rig:
        await admin.publish(plan_of(1), expected=Head(), actor="", reason="")
        await until(lambda: rig.current.table.version == 1, "no plan")
        rig.count(7)
        await until(lambda: rig.picks > 10, "no picks")
        assert [rig.failures(call) for call in ALL] == [0, 0, 0, 0]
    await admin.close()


async def test_a_replica_that_refuses_writes(own_valkey: Server, pool: str) -> None:
    """A master that was made a replica is read and not written: the plan stays known, the rest waits for a master."""
    admin = Store(own_valkey.url, pool)
    with redis.Redis(port=own_valkey.port) as server:
        async with following(Rig(own_valkey.url, pool)) as rig:
            told = await outlives(
                rig,
                admin,
                lambda: server.replicaof("127.0.0.1", 1),
                lambda: server.replicaof("NO", "ONE"),
                {"plan", "rates", "load"},
            )
    assert all("read only" in line["error"] and "may be written to" in line["error"] for line in told)
    await admin.close()


async def test_a_redis_without_memory(own_valkey: Server, pool: str) -> None:
    """A server that is full refuses writes in words of its own; it is served from again when there is room."""
    admin = Store(own_valkey.url, pool)
    with redis.Redis(port=own_valkey.port) as server:
        server.config_set("maxmemory-policy", "noeviction")
        async with following(Rig(own_valkey.url, pool)) as rig:
            await outlives(
                rig,
                admin,
                lambda: server.config_set("maxmemory", 1),
                lambda: server.config_set("maxmemory", 0),
                {"plan", "rates", "load"},
            )
    await admin.close()


async def test_a_silent_end_of_a_subscription_is_noticed(moody: Moody, pool: str, monkeypatch: Any) -> None:
    """When events stop because the server vanished without a word, the subscription ends, to be made anew."""
    monkeypatch.setattr("service.connect.QUIET_S", 1)
    store = Store(f"redis://127.0.0.1:{moody.port}/0", pool)
    async with contextlib.aclosing(store.events()) as events, asyncio.timeout(30):
        assert await anext(events)
        for _ in range(4):
            assert not await anext(events), "a quiet server that answers is not taken for a dead one"
        moody.deaf = True
        with pytest.raises(StoreUnavailable, match="subscription is dead"):
            [heard async for heard in events]
    await store.close()
