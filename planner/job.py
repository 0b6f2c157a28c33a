"""The planner job: who leads plans again and again, and at once when something calls for it.

1. Only the leader plans (`planner.leader`); the others wait. A leader that is new begins with a cycle.
2. Each `watch_s` it looks how services see the endpoints; one that is lost, or back, calls for a cycle
   (`planner.triggers`).
3. Each `check_s` it looks how the published plan bears today's rates; load or copies may call for one.
4. Otherwise there is one each `interval_s`, after the end of the one before if that took longer.
5. One task does all of this, one thing after the other: a slow Redis delays cycles and never stacks them.

The loop outlives whatever is wrong with Redis or with what it holds: it says so in one line and goes on, after a fault
of Redis soon, after input that cannot be planned from with the next interval. It may end at any point
(`planner.cycle`).
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import structlog

from planner.cycle import Planner
from planner.gate import Judge, judge
from planner.leader import Leader, ending
from planner.record import Record
from planner.settings import PlannerSettings
from planner.triggers import Presence
from service.errors import CacheRouteError, InvalidPlan, NotLeading
from service.ledger import Ledger
from service.telemetry import Seldom

log: structlog.stdlib.BoundLogger = structlog.get_logger()


async def once(settings: PlannerSettings, *, force: bool = False, anew: bool = False) -> Record:
    """Run one cycle and return its record; raise NotLeading when another planner leads, unless forced.

    An endpoint that is away is looked at for `lost_after_s` before its keys move.  anew: see `planner.cycle.Planner`.
    """
    ledger = Ledger(settings.redis_url, settings.pool)
    leader = Leader(ledger, settings.name, settings.lease_s)
    try:
        lease = await leader.take(force=force)
        async with _meanwhile(leader):
            planner = Planner(ledger, settings, anew=anew)
            presence = Presence(settings.endpoint, settings.lost_after_s, await planner.resume())
            await _settle(presence, ledger, settings)
            return await planner.cycle(lease.value, trigger="once", lost=presence.lost)
    finally:
        await leader.leave()
        await ledger.close()


async def run(settings: PlannerSettings, judge: Judge = judge) -> None:
    """Lead and plan, or stand by, until SIGTERM or SIGINT; raise InvalidInput for a Redis URL that is none."""
    ledger = Ledger(settings.redis_url, settings.pool)
    leader = Leader(ledger, settings.name, settings.lease_s)
    looping = asyncio.create_task(Job(ledger, leader, settings, judge).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, looping.cancel)
    try:
        async with _meanwhile(leader):
            await looping
    except asyncio.CancelledError:
        log.info("planner_stopped")
    finally:
        await leader.leave()
        await ledger.close()


class Job:
    """The loop of one process."""

    def __init__(self, ledger: Ledger, leader: Leader, settings: PlannerSettings, judge: Judge = judge) -> None:
        """Nothing is read before `run`."""
        self._ledger, self._leader, self._settings, self._judge = ledger, leader, settings, judge
        self._seldom = Seldom()
        self._term = self._other = ""
        self._begin()

    async def run(self) -> None:
        """Go on until cancelled."""
        s = self._settings
        log.info("planner_started", pool=s.pool, endpoints=len(s.endpoint), interval_s=s.interval_s, name=s.name)
        while not ending():
            began = time.monotonic()
            await self._survive(began)
            pause_s = min(s.watch_s, s.check_s, s.interval_s) - (time.monotonic() - began)
            await asyncio.sleep(max(0.01, pause_s))

    def _begin(self) -> None:
        """Forget what an earlier lead knew; the first cycle is due now."""
        s = self._settings
        self._planner = Planner(self._ledger, s, judge=self._judge)
        self._presence = Presence(s.endpoint, s.lost_after_s)
        self._planned_without: tuple[str, ...] = ()
        self._due = self._check_at = 0.0
        self._first = True

    async def _survive(self, now: float) -> None:
        try:
            await self._tick(now)
        except NotLeading as exc:
            self._leader.lost()
            log.warning("planner_lost_the_lead", leader=exc.leader)
        except CacheRouteError as exc:
            if self._seldom.may(type(exc).__name__):
                log.warning("plan_cycle_failed", error=type(exc).__name__, message=str(exc))
        except Exception:
            if self._seldom.may("fault"):
                log.exception("a fault of ours, the published plan stays")

    async def _tick(self, now: float) -> None:
        lease = self._leader.lease
        if lease is None:
            if self._leader.other not in ("", self._other):
                self._other, self._term = self._leader.other, ""
                log.info("planner_stands_by", leader=self._other)
            return
        if lease.value != self._term:
            self._begin()
            self._planned_without = await self._planner.resume()
            self._presence = Presence(self._settings.endpoint, self._settings.lost_after_s, self._planned_without)
            self._term, self._other = lease.value, ""
            log.info("planner_leads", lease=lease.value)
        self._presence.look(await self._ledger.read_acks(fleets=True), now)
        lost = self._presence.lost
        trigger = await self._trigger(now, lost)
        if not trigger:
            return
        s = self._settings
        # What is wrong with Redis may pass soon.
        self._due = now + min(s.check_s, s.interval_s)
        try:
            record = await self._planner.cycle(lease.value, trigger=trigger, lost=lost)
            log.info(
                "plan_cycle", **{name: value for name, value in record.items() if name not in ("memory", "planner")}
            )
        except InvalidPlan:
            self._planned_without, self._due = lost, now + s.interval_s
            raise
        self._planned_without, self._first, self._due = lost, False, now + s.interval_s
        self._check_at = time.monotonic() + s.check_s

    async def _trigger(self, now: float, lost: tuple[str, ...]) -> str:
        """Return why there is to be a cycle now, empty: it has time."""
        before = set(self._planned_without)
        if gone := sorted(set(lost) - before):
            return f"lost: {', '.join(gone)}"
        if back := sorted(before - set(lost)):
            return f"back: {', '.join(back)}"
        if now >= self._due:
            return "lead" if self._first else "timer"
        if now < self._check_at:
            return ""
        self._check_at = now + self._settings.check_s
        return await self._planner.check(lost)


@contextlib.asynccontextmanager
async def _meanwhile(leader: Leader) -> AsyncIterator[None]:
    """Keep the lead during the block."""
    following = asyncio.create_task(leader.follow())
    try:
        yield
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def _settle(presence: Presence, ledger: Ledger, settings: PlannerSettings) -> None:
    """Look until no endpoint is on its way to be lost or back."""
    deadline = time.monotonic() + settings.lost_after_s + settings.watch_s
    while True:
        now = time.monotonic()
        presence.look(await ledger.read_acks(fleets=True), now)
        if not presence.unsure or now >= deadline:
            return
        await asyncio.sleep(min(settings.watch_s, 0.5))
