"""The Redis layout, and what services and planner read and write there.

Keys, all in one cluster slot by their hash tag:

    {cacheroute:<pool>}:head             HASH    version, epoch, sha256, created_at, actor, reason of the published plan
    {cacheroute:<pool>}:plan:<version>   STRING  the plan's bytes (proto/plan.proto), immutable, of the newest 10
    {cacheroute:<pool>}:log              STREAM  one entry a publication or freeze, newest 1,000
    {cacheroute:<pool>}:cycles           STREAM  one record a planner's cycle, newest 1,000 (`service.ledger`)
    {cacheroute:<pool>}:leader           STRING  `<term> <who>`, the planner that may publish, expires
    {cacheroute:<pool>}:terms            STRING  how often the lead was taken
    {cacheroute:<pool>}:freeze           STRING  JSON of who keeps planners away and why, may expire
    {cacheroute:<pool>}:rates:<start>    HASH    key hash -> requests in the window that begins at <start> (unix s);
                                                 `i:<life>:<part>` the last batch applied of an instance's life,
                                                 `s:<life>` from when until when it counted there (unix s), `revision`
                                                 how many batches were applied
    {cacheroute:<pool>}:load:<instance>  HASH    address -> `requests:work` in flight, expires in a second
    {cacheroute:<pool>}:leases           HASH    instance -> what it has and may have in flight of its keys (lease_rows)
    {cacheroute:<pool>}:ack:<instance>   HASH    version, epoch, error of the table that instance serves, expires
    {cacheroute:<pool>}:instances        ZSET    instance -> unix s of its last sign of life
    {cacheroute:<pool>}:events           channel "<epoch>:<version>" at each publication

Publication is one script (`service.scripts`): compare the published version with the expected one, and for a planner
the lease that it holds; write bytes, head, log and the planner's record; let the bytes that fall out of the newest 10
expire (readers may be in the middle of fetching them), publish the event. Nobody sees half of it. Counting is one
script too, with a batch number an instance: what is sent again after a lost answer counts once.
"""

import contextlib
import hashlib
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from service.connect import Link
from service.errors import InvalidInput, InvalidPlan, NotLeading, PlanConflict, PlanFrozen
from service.lease_rows import LEASE, Answer, Report, pack, unpack
from service.plan import Plan, encode
from service.published import Ack, EndpointView, Head, Publication, decode_fleet, encode_fleet, verify
from service.rates import Counted
from service.redis_url import without_password
from service.scripts import ADD_RATES, PUBLISH

__all__ = ["Ack", "Head", "Store", "verify", "without_password"]

# Lua counts in doubles.
COUNTER_MAX = 2**53
HASH_DIGITS = 16
POOL_NAME = re.compile(r"[A-Za-z0-9._-]+")
# So many versions can be rolled back to. One that falls out stays for those who read the head just before.
PLANS_KEPT = 10
OLD_PLAN_TTL_S = 600
LOG_LENGTH = 1000

# A script's argument list is bounded, and 2,000 counts keep one call well under 10 ms of server time.
RATES_PER_CALL = 2000
# Fields that one step of reading a window asks for: see docs/performance.md.
RATES_PER_SCAN = 2000
WINDOWS_PER_CALL = 500


def _counter(text: str | bytes) -> int:
    """Return a count as we write it; raise ValueError for what Lua could not count on, or no number at all."""
    value = int(text)
    if not 0 <= value < COUNTER_MAX:
        raise ValueError(f"{value} is not a count of 0 to 2^53")
    return value


class Store:
    """One pool's data in Redis. Every call raises StoreUnavailable within seconds when Redis does not answer."""

    def __init__(self, url: str, pool: str) -> None:
        """Connect lazily; raise InvalidInput for a URL that is none, see `service.connect`."""
        if not POOL_NAME.fullmatch(pool):
            raise InvalidInput(f"pool name {pool!r} is not one", "use letters, digits, dots, dashes and underscores")
        self.pool = pool
        self._prefix = f"{{cacheroute:{pool}}}:"
        self._link = Link(url)
        self._redis = self._link.client

    async def close(self) -> None:
        """Close all connections."""
        await self._link.close()

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(map(str, parts))

    # -- plans ---------------------------------------------------------------------------------------------------------

    async def read_head(self) -> Head:
        """Return which plan is published."""
        async with self._link.asking():
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
        except (ValueError, AttributeError) as exc:
            raise InvalidPlan("head", f"{self._key('head')} is not a head: {exc}; delete it and publish again") from exc

    async def read_plan_bytes(self, version: int) -> bytes:
        """Return the bytes of a published plan; raise InvalidPlan when that version is gone or never was."""
        async with self._link.asking():
            data: bytes | None = await self._redis.get(self._key("plan", version))
            if not isinstance(data, bytes | None):
                raise TypeError("a plan that is no bytes")
        if data is None:
            raise InvalidPlan(
                "missing", f"plan version {version} is not in pool {self.pool!r}; `plan show` names the published one"
            )
        return data

    async def publish(
        self,
        plan: Plan,
        *,
        expected: Head,
        actor: str,
        reason: str,
        lease: str = "",
        record: Callable[[Plan], str] | None = None,
    ) -> Plan:
        """Publish `plan` as the successor of `expected`; return it as published.

        When the head is older than what an instance serves (an empty store, a failover to an old replica), the plan
        opens an epoch named by the clock: it outranks what was lost, and readers that serve it follow.

        lease: what a planner holds, see `service.ledger`; empty: an operator publishes.  record: of the plan as it will
        be published, written to the cycles with it, both or none.
        Raise PlanConflict, with nothing changed, when another plan was published since `expected` was read, and for a
        planner NotLeading or PlanFrozen.
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
        async with self._link.asking():
            outcome, told = await self._link.run(
                PUBLISH,
                keys=[
                    self._key("head"),
                    self._key("plan", version),
                    self._key("log"),
                    self._key("plan", max(0, version - PLANS_KEPT)),
                    self._key("leader"),
                    self._key("freeze"),
                    self._key("cycles"),
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
                    OLD_PLAN_TTL_S,
                    LOG_LENGTH,
                    len(plan),
                    self._key("events"),
                    lease,
                    "" if record is None else record(published),
                    LOG_LENGTH,
                ],
            )
        if outcome == 2:
            raise NotLeading(told.decode(errors="replace").partition(" ")[2])
        if outcome == 3:
            raise PlanFrozen("the plan was frozen while this one was built")
        if not outcome and (await self.read_head()).sha256 != sha256:
            # Otherwise it was this very publication, whose first answer was lost and which the client sent again.
            raise PlanConflict(expected.version, told)
        return published

    async def read_log(self, limit: int = LOG_LENGTH) -> list[Publication]:
        """Return the newest publications, newest first; entries that no publisher wrote are left out."""
        async with self._link.asking():
            entries = list(await self._redis.xrevrange(self._key("log"), count=limit))
        found = []
        for name, fields in entries:
            with contextlib.suppress(ValueError, KeyError):
                at_s = int(name.split(b"-")[0]) / 1000
                text = {k.decode(): v.decode(errors="replace") for k, v in fields.items()}
                found.append(
                    Publication(
                        epoch=_counter(text["epoch"]),
                        version=_counter(text["version"]),
                        at=at_s,
                        sha256=text.get("sha256", ""),
                        actor=text.get("actor", ""),
                        reason=text.get("reason", ""),
                        keys=_counter(text.get("keys", "0")),
                    )
                )
        return found

    async def events(self) -> AsyncGenerator[bool, None]:
        """Yield True for each publication heard of, False after each second without one.

        True is a hint only, since a subscription can lose messages; the first one stands for all before it.
        """
        async with contextlib.aclosing(self._link.messages(self._key("events"))) as messages:
            async for heard in messages:
                yield heard

    # -- rates ---------------------------------------------------------------------------------------------------------

    async def add_rates(
        self,
        window_start_s: int,
        counts: Mapping[int, int],
        *,
        instance: str,
        batch: int,
        ttl_s: int,
        span: tuple[float, float] | None = None,
    ) -> None:
        """Add one instance's counts to a window, once however often the same `batch` is sent.

        counts: key hash -> requests; may be empty.  Batches of an instance rise; an instance that starts again takes
        another name or goes on above its last number.  Larger mappings go in several calls, numbered inside the batch,
        so a failure in the middle is repaired by sending the whole batch again.  span: unix s from when until when the
        instance counted.
        """
        items = list(counts.items())
        # A time with an exponent or a sign is none of a clock's.
        told = () if span is None else tuple(f"{max(0.0, at_s):.3f}" for at_s in span)
        for part, first in enumerate(range(0, max(1, len(items)), RATES_PER_CALL)):
            flat: list[int | str] = []
            for key_hash, count in items[first : first + RATES_PER_CALL]:
                flat += (f"{key_hash:016x}", count)
            spanned = (f"s:{instance}", *told) if told and not part else ("", "", "")
            async with self._link.asking():
                await self._link.run(
                    ADD_RATES,
                    keys=[self._key("rates", window_start_s)],
                    args=[f"i:{instance}:{part}", batch, ttl_s, *spanned, *flat],
                )

    async def read_revisions(self, window_starts_s: Iterable[int]) -> dict[int, int]:
        """Return window start -> a number that every batch raises, for those windows that somebody counted in."""
        found: dict[int, int] = {}
        starts = list(window_starts_s)
        for first in range(0, len(starts), WINDOWS_PER_CALL):
            some = starts[first : first + WINDOWS_PER_CALL]
            async with self._link.asking(), self._redis.pipeline(transaction=False) as pipe:
                for start in some:
                    pipe.hget(self._key("rates", start), "revision")
                values = await pipe.execute()
            for start, value in zip(some, values, strict=True):
                with contextlib.suppress(ValueError, TypeError):  # absent, or what no instance wrote
                    found[start] = _counter(value)
        return found

    async def read_window(self, window_start_s: int) -> Counted:
        """Return what was counted in one window; nothing when it is not there.

        Not a snapshot: what is added meanwhile may be in it or not, each field once.
        """
        counts: dict[int, int] = {}
        spans: dict[str, tuple[float, float] | None] = {}
        cursor = 0
        while True:
            async with self._link.asking():
                # HSCAN in steps: HGETALL of a large window would hold the server for hundreds of milliseconds.
                cursor, chunk = await self._redis.hscan(
                    self._key("rates", window_start_s), cursor, count=RATES_PER_SCAN
                )
            for field, value in chunk.items():
                try:
                    if len(field) == HASH_DIGITS and field[1:2] != b":":
                        counts[int(field, 16)] = _counter(value)
                    elif field[:2] == b"s:":
                        began, until = map(float, value.split(b" "))
                        if 0 <= began <= until < math.inf:
                            spans[field[2:].decode(errors="replace")] = began, until
                    elif field[:2] == b"i:":
                        spans.setdefault(field[2:].decode(errors="replace").rpartition(":")[0], None)
                except ValueError:  # what no instance wrote
                    continue
            if not cursor:
                return Counted(counts, tuple(spans.values()))

    async def read_rates(self, window_starts_s: Iterable[int]) -> dict[int, dict[int, int]]:
        """Return window start -> key hash -> requests, for those windows that hold any."""
        windows = {start: await self.read_window(start) for start in window_starts_s}
        return {start: window.counts for start, window in windows.items() if window.counts}

    # -- instances -----------------------------------------------------------------------------------------------------

    async def write_ack(
        self,
        instance: str,
        *,
        version: int,
        epoch: int,
        error: str,
        created_at: float = 0.0,
        source: str = "",
        fleet: Iterable[EndpointView] = (),
        ttl_s: int = 15,
    ) -> None:
        """Say which table this instance serves, why not a newer one, and how it sees its fleet; see `Ack`."""
        now = time.time()
        ack = {
            "version": version,
            "epoch": epoch,
            "error": error,
            "at": repr(now),
            "created_at": repr(created_at),
            "source": source,
            "fleet": encode_fleet(fleet),
        }
        async with self._link.asking(), self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key("ack", instance), mapping=ack)
            pipe.expire(self._key("ack", instance), ttl_s)
            pipe.zadd(self._key("instances"), {instance: now})
            await pipe.execute()

    async def read_acks(self, *, fleets: bool = False) -> list[Ack]:
        """Return what each living instance serves, by instance name; rows that no instance wrote are left out.

        fleets: with how each sees its fleet, which is most of the bytes.
        """
        fields = ["version", "epoch", "error", "at", "created_at", "source", *(["fleet"] if fleets else [])]
        async with self._link.asking():
            names = sorted(await self._redis.zrangebyscore(self._key("instances"), time.time() - 60, "+inf"))
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(self._key("ack", name.decode(errors="replace")), fields)
                rows = await pipe.execute(raise_on_error=False) if names else []
        acks = []
        for name, row in zip(names, rows, strict=True):
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # gone, or what no instance wrote
                version, epoch, error, at, created_at, source, *fleet = row
                acks.append(
                    Ack(
                        name.decode(),
                        int(version),
                        int(epoch),
                        error.decode(),
                        float(at),
                        float(created_at or 0),
                        (source or b"").decode(),
                        decode_fleet(fleet[0] or b"[]") if fleet else (),
                    )
                )
        return acks

    async def exchange_load(
        self, instance: str, inflight: Mapping[str, tuple[int, int]], *, ttl_ms: int = 1000
    ) -> dict[str, tuple[int, int]]:
        """Publish what this process has in flight; return the sum of all other processes'.

        Both map an address to (requests, work); work in bytes, see `service.fleet`.
        """
        key, now = self._key("load", instance), time.time()
        async with self._link.asking():
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

    async def lease(self, instance: str, report: Report, *, cap: int, ttl_ms: int) -> Answer:
        """Tell the others of this process's keys, be granted slots of them: `service.lease_rows`; cap: of each key."""
        totals, rows = pack(report)
        keys, args = [self._key("leases")], [instance, ttl_ms, cap, totals, rows]
        async with self._link.asking():
            return unpack(await self._link.run(LEASE, keys=keys, args=args))

    async def forget_instance(self, instance: str) -> None:
        """Take a process that ends out of the pool at once instead of by expiry."""
        async with self._link.asking():
            await self._redis.delete(self._key("load", instance), self._key("ack", instance))
            await self._redis.zrem(self._key("instances"), instance)
            await self._redis.hdel(self._key("leases"), instance)
