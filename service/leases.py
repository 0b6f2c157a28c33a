"""Carries the messages of `service.fairness` to Redis and back; never on the request path.

1. Every `load_exchange_s` one exchange. Its leases end after twelve periods, at least 3 s: here as from when it was
   sent, in Redis as from when it came, so that nobody fills slots which others have been given.
2. When exchanges fail, leases stay to their end. From then on this process keeps to its own part, and goes on asking.
3. Without Redis it keeps to its own part from the start.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from service.errors import StoreUnavailable
from service.fairness import Fairness
from service.settings import ServiceSettings
from service.store import Store
from service.telemetry import Telemetry

TTL_MIN_S, TTL_PERIODS = 3.0, 12
# How long the first exchange may take, before anything is served.
FIRST_S = 1.0
LEAST_S = 0.05
SAME_S = 0.001

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Leases:
    """The exchange of one process."""

    def __init__(
        self,
        store: Store | None,
        settings: ServiceSettings,
        fairness: Fairness,
        telemetry: Telemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is sent before `first` or `run`; without a store nothing ever is."""
        self._store, self._settings, self._fairness, self._telemetry = store, settings, fairness, telemetry
        self._clock = clock
        self._ttl_s = max(TTL_MIN_S, TTL_PERIODS * settings.load_exchange_s)
        self._leased_at: float | None = None
        self._down = False
        if fairness.enabled:
            telemetry.watch_limits(fairness, self.age_s)

    def age_s(self) -> float:
        """Return how long ago leases were given, infinity when they never were."""
        return self._clock() - self._leased_at if self._leased_at is not None else float("inf")

    async def first(self) -> None:
        """Exchange once, so that this process knows of the others before it serves; Redis may be away."""
        if self._fairness.enabled:
            await self._surviving(FIRST_S)

    async def run(self) -> None:
        """Run until cancelled."""
        if not self._fairness.enabled:
            await asyncio.Event().wait()
        while not _ending():
            await self._surviving(self._ttl_s / 2)
            await asyncio.sleep(min(self._settings.load_exchange_s, max(LEAST_S, self._ttl_s - self.age_s())))

    async def exchange(self, timeout_s: float) -> None:
        """Report and be granted; raise StoreUnavailable, then with leases as they were or, if those ended, alone."""
        sent = self._clock()
        report = self._fairness.report(sent)
        if self._store is None:
            self._fairness.alone()
            return
        # Redis gives these slots away when their time is over, whether or not an answer is on its way.
        timeout_s = (
            max(LEAST_S, min(timeout_s, self._ttl_s - self.age_s())) if self._leased_at is not None else timeout_s
        )
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._store.lease(
                    self._settings.instance, report, cap=self._fairness.key_max, ttl_ms=int(1000 * self._ttl_s)
                )
        except (StoreUnavailable, TimeoutError) as exc:
            if self.age_s() >= self._ttl_s - SAME_S:
                self._fairness.alone()
            if isinstance(exc, TimeoutError):
                raise StoreUnavailable(f"no answer within {timeout_s:g} s; see that Redis is not overloaded") from exc
            raise
        self._fairness.apply(answer)
        self._leased_at = sent

    async def _surviving(self, timeout_s: float) -> None:
        """Exchange; count what goes wrong, log it once until it works again."""
        try:
            await self.exchange(timeout_s)
        except StoreUnavailable as exc:
            self._telemetry.store_failures.labels("lease").inc()
            if not self._down:
                log.warning("store unavailable, each process keeps to its part of the limits", error=str(exc))
            self._down = True
        except Exception:
            self._telemetry.store_failures.labels("lease").inc()
            if not self._down:
                log.exception("a fault of ours, limits stay as they are")
            self._down = True
        else:
            if self._down:
                log.info("store is back", call="lease")
            self._down = False


def _ending() -> bool:
    """Return whether this task was asked to end: a client that is connecting can turn a cancellation into a timeout."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
