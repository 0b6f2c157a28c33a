"""Keeps this process in step with Redis: takes new plans in, hands counts and load out. Never on the request path.

Following the plan:
1. A published event is a hint, a poll every `plan_poll_s` is the guarantee; both lead to reading the head.
2. A head that is newer (higher epoch, or same epoch and higher version) is fetched, verified and built in a thread.
3. The new table is swapped in by one reference; the old one is freed in the thread, since freeing it takes as long.
4. On any failure the last table stays, the failure is counted by cause, and the ack says it.
5. A head of the version in service that has another digest is such a failure: two plans were published as one.
6. A plan for none of our endpoints is looked at again when the fleet has changed.
7. A plan in service is kept on disk (`service.lastgood`); a start that Redis does not answer serves that one. It
   gives way to whatever plan Redis has, an older one too: the disk may remember a Redis that is no more.

Each task goes on after a failure of the store, and after a fault of ours, which is logged with its trace: routing must
not end because the table cannot be renewed. None of the tasks ends before the process does.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from service.errors import InvalidPlan, StoreUnavailable
from service.fleet import Fleet
from service.keys import KEY_CHECK, hash_key
from service.lastgood import LastGood
from service.plan import Plan
from service.published import EndpointView, Head, verify
from service.rates import Rates
from service.settings import ServiceSettings
from service.store import Store
from service.table import Current, Table, build_table
from service.telemetry import Seldom, Telemetry

ACK_TTL_S = 15

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Feed:
    """The tasks of one process that speak to the store."""

    def __init__(
        self,
        store: Store,
        settings: ServiceSettings,
        fleet: Fleet,
        current: Current,
        rates: Rates,
        telemetry: Telemetry,
        last_good: LastGood | None = None,
    ) -> None:
        """Nothing is read or written before `restore` or `run`."""
        self._store, self._settings = store, settings
        self._fleet, self._current, self._rates, self._telemetry = fleet, current, rates, telemetry
        self._key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
        self._last_good = last_good
        self._unsaved: tuple[bytes, Head] | None = None
        self._hint, self._unsaved_hint = asyncio.Event(), asyncio.Event()
        self._refused: Head | None = None
        self._refused_for: frozenset[str] | None = None
        self._error = ""
        self._down: set[str] = set()
        self._told: set[str] = set()
        self._seldom = Seldom()
        self._dropped = self._sketched = 0
        # Numbers of batches rise within one life only: a restart may find its clock set back.
        self._life = f"{settings.instance}:{secrets.token_hex(4)}"

    async def run(self) -> None:
        """Run until cancelled; then hand out what was counted last and leave the pool."""
        s = self._settings
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._follow())
                tasks.create_task(self._keep())
                tasks.create_task(self._every(s.rate_flush_s, "rates", self._flush))
                tasks.create_task(self._every(s.load_exchange_s, "load", self._exchange))
        finally:
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._flush()
                    await self._store.forget_instance(s.instance)

    async def restore(self) -> None:
        """Serve the last good table of an earlier process, if there is one; to be awaited before the first request.

        Any plan that Redis has replaces it.
        """
        table = await self._last_good.load() if self._last_good is not None else None
        if table is None or self._last_good is None:
            return
        names = {name for targets in set(table.targets.values()) for name in targets}
        try:
            # A fleet that is still to be discovered knows nothing yet.
            if names and self._fleet.by_name:
                self._foreign(table.version, names)
        except InvalidPlan as exc:
            self._last_good.refuse(exc)
            return
        self._current.table = table
        log.info("plan from disk in service", version=table.version, epoch=table.epoch, keys=len(table.targets))

    async def refresh(self) -> None:
        """Serve the published plan if it is newer; raise StoreUnavailable, count and keep everything else."""
        try:
            await self._compare(await self._store.read_head())
        except InvalidPlan as exc:
            self._refuse(Head(), exc)
        table = self._current.table
        await self._store.write_ack(
            self._settings.instance,
            version=table.version,
            epoch=table.epoch,
            error=self._error,
            created_at=table.created_at,
            source=table.source,
            fleet=[EndpointView(e.name, e.address, e.ready, e.draining, e.inflight) for e in self._fleet.endpoints],
            ttl_s=max(ACK_TTL_S, int(3 * self._settings.plan_poll_s)),
        )

    async def _compare(self, head: Head) -> None:
        table = self._current.table
        published, serving = (head.epoch, head.version), (table.epoch, table.version)
        same = published == serving and head.sha256 == table.sha256
        if table.source == "disk" and same:
            self._current.table, self._error = replace(table, source="redis"), ""
        elif published > serving or (table.source == "disk" and head.version):
            await self._take(head)
        elif table.source == "disk":
            self._error = "served from disk, the pool has no plan; publish one"
        elif published < serving and head.version:
            self._error = (
                f"the head went back to version {head.version} of epoch {head.epoch}; the next plan published is "
                "followed, and a restart takes this one"
            )
        elif published == serving and head.version and head.sha256 != table.sha256:
            self._refuse(head, InvalidPlan("diverged", f"another plan was published as version {head.version} too"))
        else:
            self._error = ""

    async def _take(self, head: Head) -> None:
        if head == self._refused and self._refused_for in (None, frozenset(self._fleet.by_name)):
            return  # The same bad plan is not fetched again at every poll; a newer head is.
        try:
            await self._apply(head)
            self._refused, self._error = None, ""
        except InvalidPlan as exc:
            self._refuse(head, exc)

    def _refuse(self, head: Head, exc: InvalidPlan) -> None:
        self._error = str(exc)
        known = head == self._refused
        self._refused_for = frozenset(self._fleet.by_name) if exc.cause == "endpoint" else None
        if known:
            return
        # A plan that is not there yet may come; one that is wrong stays wrong.
        self._refused = None if exc.cause == "missing" else head
        self._telemetry.plan_failures.labels(exc.cause).inc()
        # One that is missing is asked for at every poll; saying so each time would bury everything else.
        if exc.cause != "missing" or self._seldom.may(f"plan {exc.cause}"):
            log.error("plan refused, serving the last one", version=head.version, cause=exc.cause, error=str(exc))

    async def _apply(self, head: Head) -> None:
        data = await self._store.read_plan_bytes(head.version)
        plan, table = await asyncio.to_thread(self._build, data, head)
        if unknown := self._foreign(plan.version, set(plan.endpoints)):
            self._telemetry.plan_unknown.inc(len(unknown))
            log.warning(
                "plan names endpoints that this fleet lacks; their keys use the others",
                endpoints=unknown[:20],
                unknown=len(unknown),
                remedy="call them in the planner as the service does; one that only restarts needs nothing",
            )
        old = [self._current.table]
        self._current.table = table
        older = (head.epoch, head.version) <= (old[0].epoch, old[0].version)
        if self._last_good is not None and older:  # which happens to a table from disk only
            self._last_good.overrule()
        self._telemetry.plan_applied.inc()
        log.info("plan in service", version=plan.version, epoch=plan.epoch, keys=len(plan), actor=plan.actor)
        if self._last_good is not None:
            self._unsaved = data, head
            self._unsaved_hint.set()
        del plan, table
        await asyncio.to_thread(old.clear)

    def _foreign(self, version: int, names: set[str]) -> list[str]:
        """Return which endpoints of a plan the fleet lacks; raise InvalidPlan when it lacks them all."""
        unknown = sorted(names - self._fleet.by_name.keys())
        if unknown and len(unknown) == len(names):
            raise InvalidPlan(
                "endpoint", f"plan {version} names none of this fleet's endpoints but {', '.join(unknown[:5])}"
            )
        return unknown

    async def _keep(self) -> None:
        """Write what came into service; apart from following, since a disk can hang."""
        while not _ending():
            await self._unsaved_hint.wait()
            self._unsaved_hint.clear()
            unsaved, self._unsaved = self._unsaved, None
            if unsaved is not None and self._last_good is not None:
                async with self._surviving("table_file"):
                    await self._last_good.save(*unsaved)

    def _build(self, data: bytes, head: Head) -> tuple[Plan, Table]:
        plan = verify(data, head, key_check=self._key_check)
        return plan, build_table(plan, head.sha256)

    async def _listen(self) -> None:
        while not _ending():
            async with self._surviving("events"):
                async for heard in self._store.events():
                    if _ending():
                        return
                    if heard:
                        self._hint.set()
            await asyncio.sleep(1.0)

    async def _follow(self) -> None:
        while not _ending():
            self._hint.clear()
            async with self._surviving("plan"):
                await self.refresh()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.plan_poll_s):
                    await self._hint.wait()

    async def _flush(self) -> None:
        now_s = time.time()
        try:
            while (batch := self._rates.next_batch(now_s)) is not None:
                await self._store.add_rates(
                    batch.window_start_s,
                    batch.counts,
                    instance=self._life,
                    batch=batch.number,
                    ttl_s=self._settings.rate_keep_s,
                    span=batch.span,
                )
                self._rates.done()
        finally:
            dropped, sketched = self._rates.dropped, self._rates.sketched
            self._telemetry.rates_dropped.inc(dropped - self._dropped)
            self._telemetry.rates_sketched.inc(sketched - self._sketched)
            self._dropped, self._sketched = dropped, sketched

    async def _exchange(self) -> None:
        mine = {e.address: (e.inflight, e.work) for e in self._fleet.endpoints if e.inflight}
        try:
            ttl_ms = max(1000, int(4000 * self._settings.load_exchange_s))
            self._fleet.set_elsewhere(await self._store.exchange_load(self._settings.instance, mine, ttl_ms=ttl_ms))
        except Exception:
            # Old figures of others mislead more than none do.
            self._fleet.set_elsewhere({})
            raise

    async def _every(self, period_s: float, call: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while not _ending():
            await asyncio.sleep(period_s)
            async with self._surviving(call):
                await work()

    @contextlib.asynccontextmanager
    async def _surviving(self, call: str) -> AsyncIterator[None]:
        """Count and log what goes wrong in one round of a task, once until it works again, and go on."""
        try:
            yield
        except StoreUnavailable as exc:
            if self._failed(call):
                log.warning("store unavailable, routing goes on", call=call, error=str(exc))
        except Exception:
            if self._failed(call):
                log.exception("a fault of ours, routing goes on", call=call)
        else:
            self._down.discard(call)
            if call in self._told:
                self._told.discard(call)
                log.info("store is back", call=call)

    def _failed(self, call: str) -> bool:
        """Count it; return whether to say so: once until it works again, and not each time when it comes and goes."""
        self._telemetry.store_failures.labels(call).inc()
        if call in self._down:
            return False
        self._down.add(call)
        if self._seldom.may(call):
            self._told.add(call)
            return True
        return False


def _ending() -> bool:
    """Return whether this task was asked to end: a client that is connecting can turn a cancellation into a timeout."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
