"""The service's tasks against a real server: plans come in quickly, bad ones never, and Redis may go away."""

import asyncio
import contextlib
import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from service.errors import StoreUnavailable
from service.feed import Feed
from service.fleet import Fleet, Found
from service.keys import KEY_CHECK, hash_key
from service.pb import plan_pb2
from service.plan import Plan, encode
from service.published import EndpointView
from service.rates import Rates
from service.settings import load_settings
from service.store import Head, Store
from service.table import Current, Table
from service.telemetry import Telemetry, configure_logging


class Server(Protocol):
    url: str

    def kill(self) -> None: ...
    def start(self) -> None: ...


def plan_of(*keys: int, endpoints: tuple[str, ...] = ("a", "b"), salt: bytes = b"") -> Plan:
    return Plan(
        endpoints=endpoints,
        key_hashes=array("Q", keys),
        target_offsets=array("I", range(len(keys) + 1)),
        targets=array("I", [0] * len(keys)),
        rates_rps=array("f", [1.0] * len(keys)),
        key_check=hash_key(KEY_CHECK, salt),
    )


class Rig:
    def __init__(self, url: str, pool: str) -> None:
        self.settings = load_settings(
            {},
            endpoint=("a=10.0.0.1:80", "b=10.0.0.2:80"),
            pool=pool,
            plan_poll_s=0.3,
            rate_flush_s=0.05,
            load_exchange_s=0.05,
            instance="x",
        )
        self.fleet = Fleet((("a", "10.0.0.1:80"), ("b", "10.0.0.2:80")))
        self.current, self.rates = Current(), Rates(30, 300)
        self.telemetry = Telemetry(CollectorRegistry())
        self.store = Store(url, pool)
        self.feed = Feed(self.store, self.settings, self.fleet, self.current, self.rates, self.telemetry)

    def value(self, name: str, **labels: str) -> float:
        return self.telemetry.registry.get_sample_value(name, labels) or 0.0

    async def until(self, true: Callable[[], bool | Awaitable[bool]]) -> None:
        async with asyncio.timeout(10):
            while True:
                result = true()
                if await result if not isinstance(result, bool) else result:
                    return
                await asyncio.sleep(0.01)

    async def put_raw(self, data: bytes, version: int) -> None:
        """Publish bytes as a broken or foreign planner would."""
        client: Any = self.store._redis
        prefix = f"{{cacheroute:{self.settings.pool}}}:"
        head = await self.store.read_head()
        await client.set(f"{prefix}plan:{version}", data)
        await client.hset(
            f"{prefix}head",
            mapping={"version": version, "epoch": head.epoch or 1, "sha256": hashlib.sha256(data).hexdigest()},
        )
        await client.publish(f"{prefix}events", "x")


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    task = asyncio.create_task(rig.feed.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.store.close()


@pytest.fixture
async def rig(valkey: Server, pool: str) -> AsyncIterator[Rig]:
    async with running(Rig(valkey.url, pool)) as rig:
        yield rig


async def test_a_new_plan_is_served_and_acknowledged(rig: Rig) -> None:
    """Each publication becomes the table, is counted, and shows up as this instance's ack."""
    for version in (1, 2, 3):
        await rig.store.publish(plan_of(*range(version)), expected=await rig.store.read_head(), actor="", reason="")
        await rig.until(lambda v=version: rig.current.table.version == v)  # type: ignore[misc]
        assert len(rig.current.table.targets) == version

    async def acknowledged() -> bool:
        return [(a.instance, a.version, a.error) for a in await rig.store.read_acks()] == [("x", 3, "")]

    await rig.until(acknowledged)
    assert rig.value("cacheroute_plan_applied_total") == 3


@pytest.mark.parametrize(
    ("cause", "data"),
    [
        ("corrupt", b"\xff\xff garbage"),
        ("schema", plan_pb2.Plan(schema=2).SerializeToString()),
        (
            "endpoint",
            encode(plan_of(1, endpoints=("y", "z")).published(version=2, epoch=1, created_at=1, actor="", reason="")),
        ),
        ("salt", encode(plan_of(1, salt=b"s").published(version=2, epoch=1, created_at=1, actor="", reason=""))),
        ("version", encode(plan_of(1).published(version=9, epoch=1, created_at=1, actor="", reason=""))),
    ],
)
async def test_a_bad_plan_never_replaces_the_last_good_one(rig: Rig, cause: str, data: bytes) -> None:
    """A plan that is corrupt, of an unknown schema, for another fleet, salt or version is counted and reported once."""
    await rig.store.publish(plan_of(1, 2), expected=Head(epoch=1), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 1)
    await rig.put_raw(data, 2)
    await rig.until(lambda: rig.value("cacheroute_plan_apply_failures_total", cause=cause) >= 1)

    async def reported() -> bool:
        return any(a.version == 1 and a.error for a in await rig.store.read_acks())

    await rig.until(reported)
    assert (rig.current.table.version, set(rig.current.table.targets)) == (1, {1, 2})
    await asyncio.sleep(0.7)  # two polls: the same bad plan is not fetched again
    assert rig.value("cacheroute_plan_apply_failures_total", cause=cause) == 1
    head = await rig.store.read_head()
    await rig.store.publish(plan_of(5), expected=head, actor="", reason="the cure")
    await rig.until(lambda: rig.current.table.version == 3)


async def test_a_head_that_goes_back_is_not_followed(rig: Rig) -> None:
    """A failover to an older replica shows an older head: the newer table stays."""
    await rig.store.publish(plan_of(1), expected=Head(epoch=1), actor="", reason="")
    await rig.store.publish(plan_of(1, 2), expected=await rig.store.read_head(), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 2)
    await rig.put_raw(encode(plan_of(9).published(version=1, epoch=1, created_at=1, actor="", reason="")), 1)

    async def reported() -> bool:
        # With what ends it.
        said = [a.error for a in await rig.store.read_acks()]
        return any("went back" in error and "the next plan published is followed" in error for error in said)

    await rig.until(reported)
    assert rig.current.table.version == 2

    # What comes next opens an epoch of its own, so that nobody is left behind; and the complaint ends.
    await asyncio.sleep(0.5)  # the ack that says so
    await rig.store.publish(plan_of(7, 8, 9), expected=await rig.store.read_head(), actor="", reason="")
    await rig.until(lambda: len(rig.current.table.targets) == 3)

    async def content() -> bool:
        return [a.error for a in await rig.store.read_acks()] == [""]

    await rig.until(content)


async def test_two_plans_of_one_version_are_noticed(rig: Rig) -> None:
    """When another plan stands under the version in service, the table stays, and ack and metric say so, once."""
    await rig.store.publish(plan_of(1), expected=Head(epoch=1), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 1)
    await rig.put_raw(encode(plan_of(9).published(version=1, epoch=1, created_at=1, actor="", reason="")), 1)

    async def reported() -> bool:
        return any("another plan was published as version 1" in a.error for a in await rig.store.read_acks())

    await rig.until(reported)
    await asyncio.sleep(0.7)
    assert set(rig.current.table.targets) == {1}
    assert rig.value("cacheroute_plan_apply_failures_total", cause="diverged") == 1


async def test_garbage_in_the_head_ends_nothing(rig: Rig) -> None:
    """Bytes in the head that are no text, and types that are none of ours, leave all tasks running."""
    await rig.store.publish(plan_of(1), expected=Head(epoch=1), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 1)
    client, prefix = rig.store._redis, f"{{cacheroute:{rig.settings.pool}}}:"
    await client.hset(f"{prefix}head", "actor", b"\xf6")
    await rig.until(lambda: rig.value("cacheroute_plan_apply_failures_total", cause="head") >= 1)

    async def reported() -> bool:
        return any("is not a head" in a.error for a in await rig.store.read_acks())

    await rig.until(reported)
    await client.delete(f"{prefix}head")
    await client.set(f"{prefix}head", "not a hash")
    await rig.until(lambda: rig.value("cacheroute_store_failures_total", call="plan") >= 1)
    await client.delete(f"{prefix}head")
    await rig.store.publish(plan_of(1, 2), expected=Head(), actor="", reason="")
    await rig.until(lambda: len(rig.current.table.targets) == 2)


async def test_a_fault_of_ours_ends_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody thought of is counted, and the task that met it tries again."""

    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "read_head", broken)
        await rig.until(lambda: rig.value("cacheroute_store_failures_total", call="plan") >= 2)
    await rig.store.publish(plan_of(1), expected=Head(), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 1)


async def test_a_fleet_that_changes_may_take_what_it_refused(rig: Rig) -> None:
    """A plan for endpoints that are not there yet is refused once, and served when discovery has found them."""
    await rig.store.publish(plan_of(1, endpoints=("c", "d")), expected=Head(), actor="", reason="")
    await rig.until(lambda: rig.value("cacheroute_plan_apply_failures_total", cause="endpoint") >= 1)
    await asyncio.sleep(0.7)  # two polls
    assert rig.value("cacheroute_plan_apply_failures_total", cause="endpoint") == 1
    rig.fleet.update([Found("a", "10.0.0.1:80"), Found("e", "10.0.0.9:80")])
    await asyncio.sleep(0.7)
    assert rig.value("cacheroute_plan_apply_failures_total", cause="endpoint") == 1, "still the same complaint"
    rig.fleet.update([Found("a", "10.0.0.1:80"), Found("c", "10.0.0.3:80")])
    await rig.until(lambda: rig.current.table.version == 1)


async def test_an_ack_tells_how_the_fleet_looks(rig: Rig) -> None:
    """Each endpoint as this process sees it, and where its table is from; for longer than the pause between acks."""
    await rig.store.publish(plan_of(1), expected=Head(), actor="", reason="")
    rig.fleet.charge(rig.fleet.by_name["a"], 10)
    rig.fleet.set_draining(rig.fleet.by_name["b"], True)
    rig.fleet.probe_failed(rig.fleet.by_name["b"], allowed=1)
    expected = (EndpointView("a", "10.0.0.1:80", True, False, 1), EndpointView("b", "10.0.0.2:80", False, True, 0))

    async def told() -> bool:
        acks = await rig.store.read_acks(fleets=True)
        return [(a.version, a.source, a.fleet) for a in acks] == [(1, "redis", expected)]

    await rig.until(told)
    assert (await rig.store.read_acks())[0].created_at == rig.current.table.created_at
    assert 3 < await rig.store._redis.ttl(f"{{cacheroute:{rig.settings.pool}}}:ack:x") <= 15


async def test_a_store_that_comes_and_goes_does_not_fill_the_log(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each failure is counted, a line of each call is written once a minute, and what is secret stands in none."""
    exchange_load, turn = rig.store.exchange_load, iter(range(10**9))

    async def flapping(*arguments: Any, **named: Any) -> Any:
        password = "hunter2"  # as a client's frames hold it
        if next(turn) % 2 and password:
            raise ZeroDivisionError
        return await exchange_load(*arguments, **named)

    configure_logging("info")
    try:
        with monkeypatch.context() as patched:
            patched.setattr(rig.store, "exchange_load", flapping)
            await rig.until(lambda: rig.value("cacheroute_store_failures_total", call="load") >= 5)
    finally:
        structlog.reset_defaults()
    lines = [line for line in capsys.readouterr().err.splitlines() if "a fault of ours" in line]
    assert len(lines) == 1
    assert "ZeroDivisionError" in lines[0]
    assert "hunter2" not in lines[0]


async def test_counts_that_never_arrive_are_told(own_valkey: Server, pool: str) -> None:
    """What is dropped while Redis is away shows in the metric while it still is away."""
    async with running(Rig(own_valkey.url, pool)) as rig:
        own_valkey.kill()
        for _ in range(47):
            rig.rates.count(1, time.time() - 1000)
        rig.rates.count(1, time.time())
        await rig.until(lambda: rig.value("cacheroute_rates_dropped_total") == 47)
        await rig.until(lambda: rig.value("cacheroute_store_failures_total", call="rates") >= 1)


async def test_redis_may_come_late_and_go_away(own_valkey: Server, pool: str) -> None:
    """Without Redis the last table stays; counts made meanwhile arrive once it is back, and so does the next plan."""
    async with running(Rig(own_valkey.url, pool)) as rig:
        await rig.store.publish(plan_of(1), expected=Head(), actor="", reason="")
        await rig.until(lambda: rig.current.table.version == 1)
        own_valkey.kill()
        await rig.until(
            lambda: (
                rig.value("cacheroute_store_failures_total", call="rates") >= 0
                and rig.value("cacheroute_store_failures_total", call="load") >= 1
            )
        )
        now = time.time()
        for _ in range(40):
            rig.rates.count(77, now)
        assert rig.current.table.version == 1
        own_valkey.start()

        async def arrived() -> bool:
            with contextlib.suppress(StoreUnavailable):
                return await rig.store.read_rates([int(now) // 30 * 30]) == {int(now) // 30 * 30: {77: 40}}
            return False

        await rig.until(arrived)
        epoch = rig.current.table.epoch
        await asyncio.sleep(1.0)  # the clock names epochs in seconds
        await rig.store.publish(plan_of(1, 2, 3), expected=await rig.store.read_head(), actor="", reason="")
        await rig.until(lambda: len(rig.current.table.targets) == 3)
        assert rig.current.table.version == 1
        assert rig.current.table.epoch > epoch


async def test_counts_are_handed_out_at_the_end(valkey: Server, pool: str) -> None:
    """A process that ends hands out its last counts and leaves the pool."""
    rig = Rig(valkey.url, pool)
    async with running(rig):
        await rig.store.publish(plan_of(1), expected=Head(), actor="", reason="")
        await rig.until(lambda: rig.current.table.version == 1)
        rig.rates.count(5, now := time.time())
    reader, window = Store(valkey.url, pool), int(now) // 30 * 30
    assert await reader.read_rates([window]) == {window: {5: 1}}
    assert await reader.read_acks() == []
    await reader.close()


async def test_a_plan_that_names_a_stranger_is_served_and_counted(rig: Rig) -> None:
    """A plan may name endpoints that are away for a while: it comes into service, and each is counted and told."""
    with capture_logs() as logs:
        plan = plan_of(1, endpoints=("a", "z1", "z2"))
        await rig.store.publish(plan, expected=await rig.store.read_head(), actor="", reason="")
        await rig.until(lambda: rig.current.table.version == 1)
    assert rig.value("cacheroute_plan_endpoints_unknown_total") == 2
    (told,) = [line for line in logs if line["log_level"] == "warning"]
    assert told["endpoints"] == ["z1", "z2"]
    assert told["remedy"]


async def test_a_plan_whose_bytes_are_gone_is_told_once_and_taken_when_they_come(rig: Rig) -> None:
    """Each poll asks for it again and counts; the log says it once, and the plan is served once it is there."""
    plan = plan_of(1, 2)
    published = await rig.store.publish(plan, expected=await rig.store.read_head(), actor="", reason="")
    await rig.until(lambda: rig.current.table.version == 1)
    client: Any = rig.store._redis
    name = f"{{cacheroute:{rig.settings.pool}}}:plan:1"
    data = await client.get(name)
    await client.delete(name)
    rig.current.table = Table()
    with capture_logs() as logs:
        await rig.until(lambda: rig.value("cacheroute_plan_apply_failures_total", cause="missing") >= 3)
    assert [entry["event"] for entry in logs].count("plan refused, serving the last one") == 1
    await client.set(name, data)
    await rig.until(lambda: rig.current.table.version == published.version)
