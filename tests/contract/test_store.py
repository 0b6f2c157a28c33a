"""The Redis layout on a real server: publication is all or nothing, counts arrive once, load is shared and expires."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

import pytest

from service.errors import InvalidInput, InvalidPlan, PlanConflict, StoreUnavailable
from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.scripts import Script
from service.store import Head, Store, verify, without_password


class Server(Protocol):
    url: str

    def kill(self) -> None: ...
    def start(self) -> None: ...


def plan_of(*keys: int, endpoints: tuple[str, ...] = ("a", "b")) -> Plan:
    return Plan(
        endpoints=endpoints,
        key_hashes=array("Q", keys),
        target_offsets=array("I", range(len(keys) + 1)),
        targets=array("I", [k % len(endpoints) for k in keys]),
        rates_rps=array("f", [1.0] * len(keys)),
        key_check=hash_key(KEY_CHECK),
    )


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Store]:
    store = Store(valkey.url, pool)
    yield store
    await store.close()


async def test_publish_then_read_back(store: Store, pool: str) -> None:
    """What was published is read back verified, under a version that rises and an epoch that stays."""
    assert await store.read_head() == Head()
    before = time.time()
    first = await store.publish(plan_of(1, 2), expected=Head(), actor="me", reason="first")
    head = await store.read_head()
    assert (head.version, head.epoch, head.actor, head.reason) == (1, first.epoch, "me", "first")
    assert head.epoch >= int(before)
    assert verify(await store.read_plan_bytes(1), head, key_check=hash_key(KEY_CHECK)) == first
    second = await store.publish(plan_of(1), expected=head, actor="me", reason="second")
    prefix = f"{{cacheroute:{pool}}}:"
    assert await store._redis.ttl(f"{prefix}plan:1") == -1, "a superseded plan can be rolled back to"
    assert await store._redis.ttl(f"{prefix}plan:2") == -1, "the published plan never expires"
    assert (second.version, second.epoch) == (2, first.epoch)
    log = [entry for _, entry in await store._redis.xrange(f"{prefix}log")]
    assert [(e[b"version"], e[b"reason"], e[b"keys"]) for e in log] == [(b"1", b"first", b"2"), (b"2", b"second", b"1")]


async def test_the_newest_plans_are_kept_and_older_ones_expire(store: Store, pool: str) -> None:
    """Ten versions stay; one that falls out is still there for who read the head before, and then is gone by itself."""
    prefix, head = f"{{cacheroute:{pool}}}:", Head()
    for key in range(13):
        await store.publish(plan_of(key), expected=head, actor="", reason="")
        head = await store.read_head()
    ttls = {version: await store._redis.ttl(f"{prefix}plan:{version}") for version in range(1, 14)}
    assert {version for version, ttl in ttls.items() if ttl == -1} == set(range(4, 14))
    assert all(0 < ttls[version] <= 600 for version in (1, 2, 3))
    assert await store.read_plan_bytes(1)


async def test_the_slower_of_two_publishers_changes_nothing(store: Store, pool: str) -> None:
    """Publication compares the published version with the expected one; the loser learns which one it is."""
    head = Head()
    await store.publish(plan_of(1), expected=head, actor="fast", reason="")
    with pytest.raises(PlanConflict) as caught:
        await store.publish(plan_of(2), expected=head, actor="slow", reason="")
    assert (caught.value.expected_version, caught.value.published_version) == (0, 1)
    assert (await store.read_head()).actor == "fast"
    assert await store._redis.xlen(f"{{cacheroute:{pool}}}:log") == 1


async def test_racing_publishers_leave_one_winner_each_round(store: Store) -> None:
    """Of many concurrent publications upon one head exactly one succeeds, and its bytes are the published ones."""
    for round_ in range(3):
        head = await store.read_head()
        results = await asyncio.gather(
            *(store.publish(plan_of(100 + i), expected=head, actor=f"p{i}", reason="") for i in range(8)),
            return_exceptions=True,
        )
        winners = [r for r in results if isinstance(r, Plan)]
        assert len(winners) == 1
        assert all(isinstance(r, Plan | PlanConflict) for r in results)
        head = await store.read_head()
        assert head.version == round_ + 1
        assert verify(await store.read_plan_bytes(head.version), head, key_check=hash_key(KEY_CHECK)) == winners[0]


async def test_an_empty_store_opens_a_higher_epoch(store: Store) -> None:
    """After the store was lost, the next plan outranks every plan of the lost one although its version is 1."""
    lost = Head(version=57, epoch=int(time.time()) - 1000)
    published = await store.publish(plan_of(1), expected=await store.read_head(), actor="", reason="")
    assert (published.epoch, published.version) > (lost.epoch, lost.version)


async def test_a_plan_outranks_what_instances_still_serve(store: Store) -> None:
    """When the head went back behind what an instance serves, the next plan opens an epoch that it follows."""
    head = Head()
    for key in (1, 2, 3):
        await store.publish(plan_of(key), expected=head, actor="", reason="")
        head = await store.read_head()
    await store.write_ack("x", version=head.version + 4, epoch=head.epoch, error="")
    published = await store.publish(plan_of(9), expected=head, actor="", reason="")
    assert published.epoch > head.epoch
    head = await store.read_head()
    await store.write_ack("x", version=head.version, epoch=head.epoch, error="")
    assert (await store.publish(plan_of(8), expected=head, actor="", reason="")).epoch == head.epoch


async def test_a_publication_sent_twice_is_no_conflict(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the first answer is lost and the client sends the script again, the publication still succeeded."""
    run = store._link.run

    async def twice(script: Script, **arguments: Any) -> object:
        await run(script, **arguments)
        return await run(script, **arguments)

    monkeypatch.setattr(store._link, "run", twice)
    published = await store.publish(plan_of(1), expected=Head(), actor="", reason="")
    assert (await store.read_head()).version == published.version == 1


async def test_nobody_sees_half_a_publication(store: Store, pool: str) -> None:
    """When the log cannot be written, because something else stands under its key, nothing is published."""
    await store._redis.set(f"{{cacheroute:{pool}}}:log", "no stream")
    with pytest.raises(StoreUnavailable):
        await store.publish(plan_of(1), expected=Head(), actor="", reason="")
    assert await store.read_head() == Head()
    with pytest.raises(InvalidPlan):
        await store.read_plan_bytes(1)


@pytest.mark.parametrize("pool", ["", "bad pool!", "a:b", "{x}"])
def test_a_pool_name_is_letters_digits_and_few_signs(pool: str) -> None:
    """What would break the layout of keys is no pool."""
    with pytest.raises(InvalidInput, match="pool name"):
        Store("redis://127.0.0.1:1/0", pool)


async def test_damage_is_noticed_by_the_checksum(store: Store) -> None:
    """Bytes that differ from what was published are refused before they are parsed."""
    await store.publish(plan_of(1), expected=Head(), actor="", reason="")
    head, data = await store.read_head(), await store.read_plan_bytes(1)
    for bad in (data[:-1], data + b"\0", b""):
        with pytest.raises(InvalidPlan) as caught:
            verify(bad, head, key_check=hash_key(KEY_CHECK))
        assert caught.value.cause == "checksum"
    with pytest.raises(InvalidPlan) as caught:
        await store.read_plan_bytes(99)
    assert caught.value.cause == "missing"


async def test_a_published_event_is_heard(store: Store) -> None:
    """A subscriber is woken at once when it starts, and again by each publication."""
    async with aclosing(store.events()) as heard, asyncio.timeout(10):
        assert await anext(heard)
        assert not await anext(heard), "a quiet second is told as such"
        await store.publish(plan_of(1), expected=Head(), actor="", reason="")
        while not await anext(heard):
            pass


async def test_counts_arrive_once_and_add_up(store: Store) -> None:
    """A batch sent again is not counted again; batches of one and of several instances add up."""
    many = dict.fromkeys(range(1, 5001), 2)
    for _ in range(3):
        await store.add_rates(60, many, instance="x", batch=1, ttl_s=100)
    await store.add_rates(60, {1: 1}, instance="x", batch=2, ttl_s=100)
    await store.add_rates(60, {1: 10, 2**64 - 1: 5}, instance="y", batch=1, ttl_s=100)
    await store.add_rates(90, {7: 1}, instance="y", batch=2, ttl_s=100)
    got = await store.read_rates([30, 60, 90])
    assert set(got) == {60, 90}
    assert got[60] == {**many, 1: 13, 2**64 - 1: 5}
    assert got[90] == {7: 1}


async def test_load_of_others_is_summed_and_forgotten(store: Store, valkey: Server, pool: str) -> None:
    """Each process reads the sum of all others, never its own, and a process that left counts no more."""
    assert await store.exchange_load("x", {"10.0.0.1:80": (3, 900)}) == {}
    both = {"10.0.0.1:80": (2, 100), "10.0.0.2:80": (1, 50)}
    assert await store.exchange_load("y", both) == {"10.0.0.1:80": (3, 900)}
    assert await store.exchange_load("z", {}) == {"10.0.0.1:80": (5, 1000), "10.0.0.2:80": (1, 50)}
    await store.forget_instance("y")
    assert await store.exchange_load("z", {}) == {"10.0.0.1:80": (3, 900)}
    many = {f"10.0.0.{n}:80": (n, n) for n in range(5001)}
    await store.exchange_load("x", many, ttl_ms=60_000)
    assert await store.exchange_load("z", {}) == many
    await store.exchange_load("x", {"10.0.0.1:80": (3, 900)}, ttl_ms=20)
    await asyncio.sleep(0.05)
    assert await store.exchange_load("z", {}) == {}


async def test_what_we_never_wrote_is_the_stores_fault(store: Store, pool: str) -> None:
    """Foreign values and types under our keys are one kind of error, so that no task of a service dies of them."""
    client, prefix = store._redis, f"{{cacheroute:{pool}}}:"
    await store.exchange_load("other", {"10.0.0.1:80": (1, 1)})
    for value in ("seven", "1:2:3", "", "-5:1", "1:-5", b"\xff"):
        await client.hset(f"{prefix}load:other", "10.0.0.9:80", value)
        assert await store.exchange_load("x", {}) == {"10.0.0.1:80": (1, 1)}
    await store.add_rates(60, {1: 7}, instance="x", batch=1, ttl_s=10)
    foreign = {"not a hash": 5, "f" * 40: 5, "f" * 16: "9" * 400, "e" * 16: -5, "d" * 16: "x", b"\xff" * 16: 5}
    await client.hset(f"{prefix}rates:60", mapping=foreign)
    assert await store.read_rates([60]) == {60: {1: 7}}
    await client.set(f"{prefix}rates:90", "not even a hash")
    with pytest.raises(StoreUnavailable):
        await store.read_rates([90])
    with pytest.raises(StoreUnavailable):
        await store.add_rates(90, {1: 1}, instance="x", batch=1, ttl_s=10)
    await client.hset(f"{prefix}ack:other", "version", "x")
    await client.zadd(f"{prefix}instances", {b"\xff": time.time(), "stringy": time.time()})
    await client.set(f"{prefix}ack:stringy", "no hash")
    assert await store.read_acks() == [], "rows that no instance wrote are left out, and block no publication"
    await store.publish(plan_of(1), expected=Head(), actor="", reason="")
    bad = (("version", "latest"), ("version", "9" * 30), ("version", -5), ("epoch", "9" * 30), ("actor", b"\xf6"))
    for field, value in (*bad, ("created_at", "then")):
        good = await client.hget(f"{prefix}head", field)
        await client.hset(f"{prefix}head", field, value)
        with pytest.raises(InvalidPlan):
            await store.read_head()
        await client.hset(f"{prefix}head", field, good)
    assert (await store.read_head()).version == 1


@pytest.mark.parametrize(
    "url",
    ["redis://user:hunter2@h:1/0", "redis://h:1/0?password=hunter2", "redis://h/0?a=b&password=hunter2", "hunter2"],
)
def test_no_password_is_shown(url: str) -> None:
    """However a URL carries its password, logs and errors do not."""
    assert "hunter2" not in without_password(url)


async def test_acks_tell_who_serves_what(store: Store) -> None:
    """Each instance's last ack is read back with its error, without the ones that expired or left."""
    await store.write_ack("b", version=2, epoch=1, error="")
    await store.write_ack("a", version=1, epoch=1, error="schema")
    await store.write_ack("gone", version=1, epoch=1, error="")
    await store.forget_instance("gone")
    assert [(a.instance, a.version, a.error) for a in await store.read_acks()] == [("a", 1, "schema"), ("b", 2, "")]


@pytest.mark.parametrize("wrong_s", [-3600.0, 3600.0])
async def test_a_host_with_a_wrong_clock_hides_nobody(
    store: Store, monkeypatch: pytest.MonkeyPatch, wrong_s: float
) -> None:
    """A host an hour ahead or behind sees all instances and is seen by them: signs of life go by Redis's clock."""
    one = {"10.0.0.1:80": (1, 10)}
    await store.exchange_load("right", one, ttl_ms=60_000)
    await store.write_ack("right", version=1, epoch=1, error="")
    right_s = time.time
    monkeypatch.setattr(time, "time", lambda: right_s() + wrong_s)
    assert await store.exchange_load("wrong", one, ttl_ms=60_000) == one
    await store.write_ack("wrong", version=1, epoch=1, error="")
    assert [ack.instance for ack in await store.read_acks()] == ["right", "wrong"]
    monkeypatch.undo()
    assert await store.exchange_load("right", one) == one
    assert [ack.instance for ack in await store.read_acks()] == ["right", "wrong"]


async def test_who_gives_no_sign_of_life_is_left_out(store: Store, pool: str) -> None:
    """A minute without one takes an instance out at the next exchange, and so does a sign of the future."""
    names, now_s = f"{{cacheroute:{pool}}}:instances", (await store._redis.time())[0]
    await store._redis.zadd(
        names, {"dead": now_s - 100, "future": now_s + 100, "quiet": now_s - 30, "ahead": now_s + 30}
    )
    await store.exchange_load("x", {})
    assert set(await store._redis.zrange(names, 0, -1)) == {b"quiet", b"ahead", b"x"}


async def test_a_dead_server_is_one_error_soon(own_valkey: Server, pool: str) -> None:
    """Every call fails with StoreUnavailable, within seconds, naming the server but no password."""
    store = Store(own_valkey.url.replace("redis://", "redis://user:hunter2@"), pool)
    own_valkey.kill()
    started = time.monotonic()
    for call in (
        store.read_head(),
        store.read_plan_bytes(1),
        store.publish(plan_of(1), expected=Head(), actor="", reason=""),
        store.add_rates(0, {1: 1}, instance="x", batch=1, ttl_s=1),
        store.read_rates([0]),
        store.exchange_load("x", {}),
        store.read_acks(),
        anext(store.events()),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            await call
        assert "hunter2" not in str(caught.value)
    assert time.monotonic() - started < 30
    await store.close()


async def test_a_url_that_is_none_is_told() -> None:
    """A Redis URL of another shape is an input error with the right shape as remedy."""
    with pytest.raises(InvalidInput, match="redis://"):
        Store("127.0.0.1:6379", "p")
