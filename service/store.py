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
script too, with a batch number an instance: what is sent again after a lost answer counts once. Signs of life go by
Redis's clock.
"""

import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Callable

from service.counts import Counts
from service.errors import InvalidPlan, NotLeading, PlanConflict, PlanFrozen
from service.instances import Instances
from service.plan import Plan, encode
from service.pool import counter_of
from service.published import Ack, Head, Publication, verify
from service.redis_url import without_password
from service.scripts import PUBLISH

__all__ = ["Ack", "Head", "Store", "verify", "without_password"]

# So many versions can be rolled back to. One that falls out stays for those who read the head just before.
PLANS_KEPT = 10
OLD_PLAN_TTL_S = 600
LOG_LENGTH = 1000


class Store(Counts, Instances):
    """One pool's data: published plans here, counts and instances in their files."""

    async def read_head(self) -> Head:
        """Return which plan is published."""
        async with self._link.asking():
            raw: dict[bytes, bytes] = await self._redis.hgetall(self._key("head"))
        try:
            text = {k.decode(): v.decode() for k, v in raw.items()}
            return Head(
                version=counter_of(text.get("version", "0")),
                epoch=counter_of(text.get("epoch", "0")),
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
                        epoch=counter_of(text["epoch"]),
                        version=counter_of(text["version"]),
                        at=at_s,
                        sha256=text.get("sha256", ""),
                        actor=text.get("actor", ""),
                        reason=text.get("reason", ""),
                        keys=counter_of(text.get("keys", "0")),
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
