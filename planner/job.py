"""The planner job: from the counts that services left in Redis to a published plan, again and again.

One cycle:

1. Read which plan is published, and the counts of the newest windows; without any count nothing is done.
2. Admit and place.
3. Publish, unless the published plan gives every key the same targets (rates alone are no reason to make every service
   build its table again). When somebody else published meanwhile, the cycle is
   done again from the start, once; the second time the conflict is the caller's.

Every cycle leaves a record. The loop outlives whatever is wrong with Redis or with what it holds: it says so in one
line and tries again after the next interval. A publication is one script in Redis, so the loop may end at any point.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import TypedDict

import structlog

from planner.admission import Rules
from planner.build import Built, build
from planner.rates import KeyRates, rates_from_windows
from planner.settings import PlannerSettings
from service.errors import CacheRouteError, InvalidPlan, PlanConflict
from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.store import Head, Store, verify

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Record(TypedDict):
    """What one cycle did; sha256 is that of the assignment, `windows` how many held any request.

    decision: `published`; `unchanged`, the published plan is the same assignment; `no_rates`, nobody counted a request.
    version, epoch: the plan that is published after the cycle.
    """

    decision: str
    version: int
    epoch: int
    keys: int
    admitted: int
    admitted_rate_share: float
    max_over_mean: float
    rate_rps: float
    windows: int
    durations_ms: dict[str, float]
    sha256: str


def window_starts(now_s: float, window_s: int, count: int) -> Sequence[int]:
    """Return the starts of the newest `count` windows, the open one among them, oldest first."""
    newest = int(now_s) // window_s * window_s
    return range(newest - (count - 1) * window_s, newest + 1, window_s)


async def cycle(store: Store, settings: PlannerSettings, *, clock: Callable[[], float] = time.time) -> Record:
    """Run one cycle and return its record; raise what the store raises, PlanConflict when it happens twice.

    clock: unix s, as the services' windows are named.
    """
    try:
        return await _attempt(store, settings, clock)
    except PlanConflict as exc:
        log.info("plan_conflict", expected=exc.expected_version, published=exc.published_version)
        return await _attempt(store, settings, clock)


async def once(settings: PlannerSettings) -> Record:
    """Run one cycle on a connection of its own."""
    store = Store(settings.redis_url, settings.pool)
    try:
        return await cycle(store, settings)
    finally:
        await store.close()


async def run(settings: PlannerSettings) -> None:
    """Run a cycle each `interval_s` until SIGTERM or SIGINT; raise InvalidInput for a Redis URL that is none."""
    store = Store(settings.redis_url, settings.pool)
    looping = asyncio.create_task(_loop(store, settings))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, looping.cancel)
    try:
        await looping
    except asyncio.CancelledError:
        log.info("planner_stopped")
    finally:
        await store.close()


async def _loop(store: Store, settings: PlannerSettings) -> None:
    log.info("planner_started", pool=settings.pool, endpoints=len(settings.endpoint), interval_s=settings.interval_s)
    while True:
        began = time.monotonic()
        try:
            log.info("plan_cycle", **await cycle(store, settings))
        except CacheRouteError as exc:
            log.warning("plan_cycle_failed", error=type(exc).__name__, message=str(exc))
        await asyncio.sleep(max(0.0, settings.interval_s - (time.monotonic() - began)))


async def _attempt(store: Store, settings: PlannerSettings, clock: Callable[[], float]) -> Record:
    key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
    began = time.perf_counter()
    head = await store.read_head()
    now_s = clock()
    windows = await store.read_rates(window_starts(now_s, settings.rate_window_s, settings.windows))
    rates = rates_from_windows(windows, now_s=now_s)
    durations_ms = {"read_rates": _ms_since(began)}
    if not len(rates):
        return _record("no_rates", head.version, head.epoch, rates, len(windows), durations_ms, None)

    published_plan = await _published_plan(store, head, key_check)
    built = build(
        rates,
        settings.endpoint,
        rules=Rules(slots_per_endpoint=settings.slots_per_endpoint, replica_cap_rps=settings.replica_cap_rps),
        key_check=key_check,
        previous=published_plan,
    )
    durations_ms |= {"admit": built.admit_ms, "place": built.place_ms}
    comparing = time.perf_counter()
    same = published_plan is not None and published_plan.assigns_as(built.plan)
    durations_ms["compare"] = _ms_since(comparing)
    if same:
        return _record("unchanged", head.version, head.epoch, rates, len(windows), durations_ms, built)

    publishing = time.perf_counter()
    reason = f"{settings.windows} windows of {settings.rate_window_s} s"
    published = await store.publish(built.plan, expected=head, actor=settings.actor, reason=reason)
    durations_ms["publish"] = _ms_since(publishing)
    return _record("published", published.version, published.epoch, rates, len(windows), durations_ms, built)


async def _published_plan(store: Store, head: Head, key_check: int) -> Plan | None:
    """Return the published plan; None when there is none that a service would take."""
    if not head.version:
        return None
    try:
        return verify(await store.read_plan_bytes(head.version), head, key_check=key_check)
    except InvalidPlan as exc:
        log.warning("published_plan_unusable", version=head.version, cause=exc.cause, message=str(exc))
        return None


def _record(
    decision: str,
    version: int,
    epoch: int,
    rates: KeyRates,
    windows: int,
    durations_ms: dict[str, float],
    built: Built | None,
) -> Record:
    return Record(
        decision=decision,
        version=version,
        epoch=epoch,
        keys=len(rates),
        admitted=built.shape.admitted if built else 0,
        admitted_rate_share=built.shape.admitted_rate_share if built else 0.0,
        max_over_mean=built.shape.max_over_mean if built else 1.0,
        rate_rps=rates.total_rps,
        windows=windows,
        durations_ms={step: round(ms, 3) for step, ms in durations_ms.items()},
        sha256=built.plan.content_sha256() if built else "",
    )


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3
