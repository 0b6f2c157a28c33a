"""The Redis layout, and the only file that speaks to Redis.

Keys, all in one cluster slot by their hash tag:

    {cacheroute:<pool>}:head             HASH    version, epoch, sha256, created_at, actor, reason of the published plan
    {cacheroute:<pool>}:plan:<version>   STRING  the plan's bytes (proto/plan.proto), immutable
    {cacheroute:<pool>}:log              STREAM  one entry a publication, newest 1,000
    {cacheroute:<pool>}:rates:<start>    HASH    key hash -> requests in the window that begins at <start> (unix s);
                                                 fields `i:<instance>` hold the last batch applied from that instance
    {cacheroute:<pool>}:load:<instance>  HASH    address -> `requests:work` in flight, expires in a second
    {cacheroute:<pool>}:ack:<instance>   HASH    version, epoch, error of the table that instance serves, expires
    {cacheroute:<pool>}:instances        ZSET    instance -> unix s of its last sign of life
    {cacheroute:<pool>}:events           channel "<epoch>:<version>" at each publication

Publication is one script: compare the published version with the expected one, write bytes, head and log, let the
previous bytes expire (readers may be in the middle of fetching them), publish the event. Nobody sees half of it.
Counting is one script too, with a batch number an instance: what is sent again after a lost answer counts once.
"""

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError

from service.errors import InvalidInput, InvalidPlan, PlanConflict, StoreUnavailable
from service.plan import Plan, decode, encode

# Lua counts in doubles.
COUNTER_MAX = 2**53
HASH_DIGITS = 16
POOL_NAME = re.compile(r"[A-Za-z0-9._-]+")
PREVIOUS_PLAN_TTL_S = 600
LOG_LENGTH = 1000

_PUBLISH = """
local head, plan, log = KEYS[1], KEYS[2], KEYS[3]
local version, epoch = tonumber(ARGV[2]), tonumber(ARGV[3])
local current = tonumber(redis.call('HGET', head, 'version') or '0')
local current_epoch = tonumber(redis.call('HGET', head, 'epoch') or '0')
if current ~= tonumber(ARGV[1]) or epoch < current_epoch then return {0, current} end
if epoch == current_epoch and version <= current then return {0, current} end
-- First what can fail for a foreign type under the key: a script does not roll back.
redis.call('XADD', log, 'MAXLEN', '~', ARGV[10], '*', 'event', 'publish', 'version', ARGV[2], 'epoch', ARGV[3],
           'sha256', ARGV[5], 'actor', ARGV[7], 'reason', ARGV[8], 'keys', ARGV[11])
redis.call('SET', plan, ARGV[4])
redis.call('HSET', head, 'version', ARGV[2], 'epoch', ARGV[3], 'sha256', ARGV[5], 'created_at', ARGV[6],
           'actor', ARGV[7], 'reason', ARGV[8])
if current > 0 then redis.call('EXPIRE', KEYS[4], ARGV[9]) end
redis.call('PUBLISH', ARGV[12], ARGV[3] .. ':' .. ARGV[2])
return {1, version}
"""

_ADD_RATES = """
local seen = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '-1')
if tonumber(ARGV[2]) <= seen then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
for i = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
"""

# A script's argument list is bounded, and 2,000 counts keep one call well under 10 ms of server time.
RATES_PER_CALL = 2000


@dataclass(frozen=True, slots=True)
class Head:
    """Which plan is published; version 0 means none yet."""

    version: int = 0
    epoch: int = 0
    sha256: str = ""
    created_at: float = 0.0
    actor: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ack:
    """What one service process says it serves; `error` is why it refused a newer plan, or empty."""

    instance: str
    version: int
    epoch: int
    error: str
    at: float


@contextlib.contextmanager
def _unavailable(url: str) -> Iterator[None]:
    """Turn the client's many exceptions, and those of reading what we never wrote, into the one callers act upon."""
    try:
        yield
    except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError, KeyError) as exc:
        raise StoreUnavailable(
            f"Redis at {without_password(url)} cannot be used ({type(exc).__name__}: {exc}); "
            "check that it runs and that CACHEROUTE_REDIS_URL / --redis names it"
        ) from exc


def _counter(text: str | bytes) -> int:
    """Return a count as we write it; raise ValueError for what Lua could not count on, or no number at all."""
    value = int(text)
    if not 0 <= value < COUNTER_MAX:
        raise ValueError(f"{value} is not a count of 0 to 2^53")
    return value


def without_password(url: str) -> str:
    """Return a Redis URL as logs and errors may show it: neither user information nor query."""
    scheme, sep, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{sep}{rest.rpartition('@')[2]}" if sep else "(not a URL)"


class Store:
    """One pool's data in Redis. Every call raises StoreUnavailable within about a second when Redis does not answer."""

    def __init__(self, url: str, pool: str, *, timeout_s: float = 0.5) -> None:
        """Connect lazily; raise InvalidInput for a URL that is none."""
        if not POOL_NAME.fullmatch(pool):
            raise InvalidInput(f"pool name {pool!r} is not one", "use letters, digits, dots, dashes and underscores")
        self.url, self.pool = url, pool
        self._prefix = f"{{cacheroute:{pool}}}:"
        try:
            # The client's defaults retry ten times with five seconds each: a planner would look hung, not failed.
            # Any: its types say `bytes | str` of every reply, ours are bytes, and each method states what it reads.
            self._redis: Any = aioredis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(ConstantBackoff(0.05), 1),
                health_check_interval=15,
            )
        except ValueError as exc:
            raise InvalidInput(
                f"Redis URL {without_password(url)!r} is not one ({exc})", "use redis://[:password@]host:port/db"
            ) from exc
        self._publish = self._redis.register_script(_PUBLISH)
        self._add_rates = self._redis.register_script(_ADD_RATES)

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(map(str, parts))

    # -- plans ---------------------------------------------------------------------------------------------------------

    async def read_head(self) -> Head:
        """Return which plan is published."""
        with _unavailable(self.url):
            raw: dict[bytes, bytes] = await self._redis.hgetall(self._key("head"))
        try:
            text = {k.decode(): v.decode() for k, v in raw.items()}
            return Head(
                version=_counter(text.get("version", "0")),
                epoch=_counter(text.get("epoch", "0")),
                sha256=text.get("sha256", ""),
                created_at=float(text.get("created_at", 0)),
                actor=text.get("actor", ""),
                reason=text.get("reason", ""),
            )
        except ValueError as exc:
            raise InvalidPlan("head", f"{self._key('head')} is not a head: {exc}; delete it and publish again") from exc

    async def read_plan_bytes(self, version: int) -> bytes:
        """Return the bytes of a published plan; raise InvalidPlan when that version is gone or never was."""
        with _unavailable(self.url):
            data: bytes | None = await self._redis.get(self._key("plan", version))
        if data is None:
            raise InvalidPlan(
                "missing", f"plan version {version} is not in pool {self.pool!r}; `plan show` names the published one"
            )
        return data

    async def publish(self, plan: Plan, *, expected: Head, actor: str, reason: str) -> Plan:
        """Publish `plan` as the successor of `expected`; return it as published.

        When the head is older than what an instance serves (an empty store, a failover to an old replica), the plan
        opens an epoch named by the clock: it outranks what was lost, and readers that serve it follow.

        Raise PlanConflict, with nothing changed, when another plan was published since `expected` was read.
        """
        now = time.time()
        served = max(((a.epoch, a.version) for a in await self.read_acks()), default=(0, 0))
        epoch = expected.epoch or int(now)
        if served > (expected.epoch, expected.version):
            epoch = max(int(now), served[0] + 1)
        version = expected.version + 1
        published = plan.published(version=version, epoch=epoch, created_at=now, actor=actor, reason=reason)
        data = encode(published)
        sha256 = hashlib.sha256(data).hexdigest()
        with _unavailable(self.url):
            done, current = await self._publish(
                keys=[
                    self._key("head"),
                    self._key("plan", version),
                    self._key("log"),
                    self._key("plan", expected.version),
                ],
                args=[
                    expected.version,
                    version,
                    published.epoch,
                    data,
                    sha256,
                    repr(published.created_at),
                    actor,
                    reason,
                    PREVIOUS_PLAN_TTL_S,
                    LOG_LENGTH,
                    len(plan),
                    self._key("events"),
                ],
            )
        if not done and (await self.read_head()).sha256 != sha256:
            # Otherwise it was this very publication, whose first answer was lost and which the client sent again.
            raise PlanConflict(expected.version, current)
        return published

    async def events(self) -> AsyncGenerator[bool, None]:
        """Yield True for each publication heard of, False after each second without one.

        True is a hint only, since a subscription can lose messages; the first one stands for all before it.
        """
        with _unavailable(self.url):
            async with self._redis.pubsub() as pubsub:
                await pubsub.subscribe(self._key("events"))
                yield True
                while True:
                    yield await pubsub.get_message(ignore_subscribe_messages=True, timeout=1.0) is not None

    # -- rates ---------------------------------------------------------------------------------------------------------

    async def add_rates(
        self, window_start_s: int, counts: Mapping[int, int], *, instance: str, batch: int, ttl_s: int
    ) -> None:
        """Add one instance's counts to a window, once however often the same `batch` is sent.

        counts: key hash -> requests.  Batches of an instance rise.  Larger mappings go in several calls, numbered
        inside the batch, so a failure in the middle is repaired by sending the whole batch again.
        """
        items = list(counts.items())
        for part, first in enumerate(range(0, len(items), RATES_PER_CALL)):
            flat: list[int | str] = []
            for key_hash, count in items[first : first + RATES_PER_CALL]:
                flat += (f"{key_hash:016x}", count)
            with _unavailable(self.url):
                await self._add_rates(
                    keys=[self._key("rates", window_start_s)],
                    args=[f"i:{instance}:{part}", batch, ttl_s, *flat],
                )

    async def read_rates(self, window_starts_s: Iterable[int]) -> dict[int, dict[int, int]]:
        """Return window start -> key hash -> requests, for those windows that hold any."""
        found: dict[int, dict[int, int]] = {}
        for start in window_starts_s:
            counts: dict[int, int] = {}
            cursor = 0
            while True:
                with _unavailable(self.url):
                    # HSCAN in steps: HGETALL of a large window would hold the server for hundreds of milliseconds.
                    cursor, chunk = await self._redis.hscan(self._key("rates", start), cursor, count=5000)
                for field, count in chunk.items():
                    with contextlib.suppress(ValueError):  # an instance's batch number, or what no instance wrote
                        if len(field) == HASH_DIGITS:
                            counts[int(field, 16)] = _counter(count)
                if not cursor:
                    break
            if counts:
                found[start] = counts
        return found

    # -- instances -----------------------------------------------------------------------------------------------------

    async def write_ack(self, instance: str, *, version: int, epoch: int, error: str, ttl_s: int = 15) -> None:
        """Say which table this instance serves, and why not a newer one."""
        now = time.time()
        with _unavailable(self.url):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hset(
                    self._key("ack", instance),
                    mapping={"version": version, "epoch": epoch, "error": error, "at": repr(now)},
                )
                pipe.expire(self._key("ack", instance), ttl_s)
                pipe.zadd(self._key("instances"), {instance: now})
                await pipe.execute()

    async def read_acks(self) -> list[Ack]:
        """Return what each living instance serves, by instance name; rows that no instance wrote are left out."""
        with _unavailable(self.url):
            names = sorted(await self._redis.zrangebyscore(self._key("instances"), time.time() - 60, "+inf"))
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(self._key("ack", name.decode(errors="replace")))
                rows = await pipe.execute(raise_on_error=False) if names else []
        acks = []
        for name, row in zip(names, rows, strict=True):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                version, epoch, at = int(row[b"version"]), int(row[b"epoch"]), float(row[b"at"])
                acks.append(Ack(name.decode(), version, epoch, row[b"error"].decode(), at))
        return acks

    async def exchange_load(
        self, instance: str, inflight: Mapping[str, tuple[int, int]], *, ttl_ms: int = 1000
    ) -> dict[str, tuple[int, int]]:
        """Publish what this process has in flight; return the sum of all other processes'.

        Both map an address to (requests, work); work in bytes, see `service.fleet`.
        """
        key, now = self._key("load", instance), time.time()
        with _unavailable(self.url):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(key)
                if inflight:
                    pipe.hset(key, mapping={address: f"{n}:{work}" for address, (n, work) in inflight.items()})
                    pipe.pexpire(key, ttl_ms)
                pipe.zadd(self._key("instances"), {instance: now})
                pipe.zremrangebyscore(self._key("instances"), 0, now - 60)
                pipe.zrange(self._key("instances"), 0, -1)
                *_, names = await pipe.execute()
            others = [n.decode() for n in names if n.decode() != instance]
            if not others:
                return {}
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in others:
                    pipe.hgetall(self._key("load", name))
                rows = await pipe.execute()
        elsewhere: dict[str, tuple[int, int]] = {}
        for row in rows:
            for address, value in row.items():
                with contextlib.suppress(ValueError):  # what no instance wrote
                    n, work = map(_counter, value.split(b":"))
                    before = elsewhere.get(address.decode(), (0, 0))
                    elsewhere[address.decode()] = (before[0] + n, before[1] + work)
        return elsewhere

    async def forget_instance(self, instance: str) -> None:
        """Take a process that ends out of the pool at once instead of by expiry."""
        with _unavailable(self.url):
            await self._redis.delete(self._key("load", instance), self._key("ack", instance))
            await self._redis.zrem(self._key("instances"), instance)


def verify(data: bytes, head: Head, *, key_check: int | None) -> Plan:
    """Return the plan whose bytes and head were read; raise InvalidPlan on digest, schema, rules or version.

    key_check: as in `plan.decode`.
    """
    if hashlib.sha256(data).hexdigest() != head.sha256:
        raise InvalidPlan("checksum", f"plan version {head.version} does not match its sha256 {head.sha256[:12]}…")
    plan = decode(data, key_check=key_check)
    if (plan.version, plan.epoch) != (head.version, head.epoch):
        raise InvalidPlan(
            "version",
            f"plan says it is {plan.version} of epoch {plan.epoch}, the head says {head.version} of {head.epoch}",
        )
    return plan
