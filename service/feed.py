"""Keeps this process in step with Redis: takes new plans in, hands counts and load out. Never on the request path.

Following the plan:
1. A published event is a hint, a poll every `plan_poll_s` is the guarantee; both lead to reading the head.
2. A head that is newer (higher epoch, or same epoch and higher version) is fetched, verified and built in a thread.
3. The new table is swapped in by one reference; the old one is freed in the thread, since freeing it takes as long.
4. On any failure the last table stays, the failure is counted by cause, and the ack says it.
5. A head of the version in service that has another digest is such a failure: two plans were published as one.

Each task goes on after a failure of the store, and after a fault of ours, which is logged with its trace: routing must
not end because the table cannot be renewed. None of the tasks ends before the process does.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import structlog

from service.errors import InvalidPlan, StoreUnavailable
from service.fleet import Fleet
from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.rates import Rates
from service.settings import ServiceSettings
from service.store import Head, Store, verify
from service.table import Current, Table, build_table
from service.telemetry import Telemetry

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
    ) -> None:
        """Nothing is read or written before `run`."""
        self._store, self._settings = store, settings
        self._fleet, self._current, self._rates, self._telemetry = fleet, current, rates, telemetry
        self._key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
        self._hint = asyncio.Event()
        self._refused: Head | None = None
        self._error = ""
        self._down: set[str] = set()
        self._dropped = 0

    async def run(self) -> None:
        """Run until cancelled; then hand out what was counted last and leave the pool."""
        s = self._settings
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                tasks.create_task(self._follow())
                tasks.create_task(self._every(s.rate_flush_s, "rates", self._flush))
                tasks.create_task(self._every(s.load_exchange_s, "load", self._exchange))
        finally:
            with contextlib.suppress(StoreUnavailable, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._flush()
                    await self._store.forget_instance(s.instance)

    async def refresh(self) -> None:
        """Serve the published plan if it is newer; raise StoreUnavailable, count and keep everything else."""
        try:
            await self._compare(await self._store.read_head())
        except InvalidPlan as exc:
            self._refuse(Head(), exc)
        table = self._current.table
        await self._store.write_ack(
            self._settings.instance, version=table.version, epoch=table.epoch, error=self._error
        )

    async def _compare(self, head: Head) -> None:
        table = self._current.table
        published, serving = (head.epoch, head.version), (table.epoch, table.version)
        if published > serving:
            await self._take(head)
        elif published < serving and head.version:
            self._error = f"the head went back to version {head.version} of epoch {head.epoch}"
        elif published == serving and head.version and head.sha256 != table.sha256:
            self._refuse(head, InvalidPlan("diverged", f"another plan was published as version {head.version} too"))
        else:
            self._error = ""

    async def _take(self, head: Head) -> None:
        if head == self._refused:
            return  # The same bad plan is not fetched again at every poll; a newer head is.
        try:
            await self._apply(head)
            self._refused, self._error = None, ""
        except InvalidPlan as exc:
            self._refuse(head, exc)

    def _refuse(self, head: Head, exc: InvalidPlan) -> None:
        self._error = str(exc)
        if head == self._refused:
            return
        # A plan that is not there yet may come; one that is wrong stays wrong.
        self._refused = None if exc.cause == "missing" else head
        self._telemetry.plan_failures.labels(exc.cause).inc()
        log.error("plan refused, serving the last one", version=head.version, cause=exc.cause, error=str(exc))

    async def _apply(self, head: Head) -> None:
        data = await self._store.read_plan_bytes(head.version)
        plan, table = await asyncio.to_thread(self._build, data, head)
        unknown = sorted(set(plan.endpoints) - self._fleet.by_name.keys())
        if unknown and len(unknown) == len(plan.endpoints):
            raise InvalidPlan(
                "endpoint", f"plan {plan.version} names none of this fleet's endpoints but {', '.join(unknown[:5])}"
            )
        if unknown:
            log.warning("plan names endpoints that this fleet lacks; their keys use the others", endpoints=unknown)
        old = [self._current.table]
        self._current.table = table
        self._telemetry.plan_applied.inc()
        log.info("plan in service", version=plan.version, epoch=plan.epoch, keys=len(plan), actor=plan.actor)
        del plan, table
        await asyncio.to_thread(old.clear)

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
        try:
            while (batch := self._rates.next_batch(time.time())) is not None:
                await self._store.add_rates(
                    batch.window_start_s,
                    batch.counts,
                    instance=self._settings.instance,
                    batch=batch.number,
                    ttl_s=self._settings.rate_keep_s,
                )
                self._rates.done()
        finally:
            self._telemetry.rates_dropped.inc(self._rates.dropped - self._dropped)
            self._dropped = self._rates.dropped

    async def _exchange(self) -> None:
        mine = {e.address: (e.inflight, e.work) for e in self._fleet.endpoints if e.inflight}
        try:
            ttl_ms = max(1000, int(4000 * self._settings.load_exchange_s))
            self._fleet.set_elsewhere(await self._store.exchange_load(self._settings.instance, mine, ttl_ms=ttl_ms))
        except StoreUnavailable:
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
            self._telemetry.store_failures.labels(call).inc()
            if call not in self._down:
                self._down.add(call)
                log.warning("store unavailable, routing goes on", call=call, error=str(exc))
        except Exception:
            self._telemetry.store_failures.labels(call).inc()
            if call not in self._down:
                self._down.add(call)
                log.exception("a fault of ours, routing goes on", call=call)
        else:
            if call in self._down:
                self._down.discard(call)
                log.info("store is back", call=call)


def _ending() -> bool:
    """Return whether this task was asked to end: a client that is connecting can turn a cancellation into a timeout."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
