"""Keeps one planner of a pool in the lead, so that two never fight.

1. The lead is a lease in Redis that ends by Redis's clock. Who has it renews it at a third of its time; who has not
   asks again when it ends, and each second.
2. Whoever has it stops believing so one lease time after the last renewal that was answered, by its own monotonic
   clock: not later than Redis does.
3. What is written under it is checked there (`service.ledger`), so a planner that stood still cannot do harm.
4. A planner that ends gives the lead back.
"""

import asyncio
import contextlib
import secrets
import time

import structlog

from service.errors import CacheRouteError, NotLeading, StoreUnavailable
from service.ledger import Lease, Ledger
from service.telemetry import Seldom

ASK_EACH_S = 1.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Leader:
    """One process's claim to the lead."""

    def __init__(self, ledger: Ledger, name: str, lease_s: float) -> None:
        """Nothing is asked before `take` or `follow`."""
        self._ledger, self._lease_s = ledger, lease_s
        # A process that is started again under the same name is another one.
        self.who = f"{name}:{secrets.token_hex(4)}"
        self._lease: Lease | None = None
        self._until = 0.0
        # Who leads instead, as of the last answer.
        self.other = ""
        self._ends_in_s = 0.0
        self._ask, self._seldom = asyncio.Event(), Seldom()

    @property
    def lease(self) -> Lease | None:
        """Return the lease that this process has, None: it does not lead."""
        return self._lease if time.monotonic() < self._until else None

    async def take(self, *, force: bool = False) -> Lease:
        """Take or renew the lead; raise NotLeading when it is another's."""
        asked = time.monotonic()
        lease = await self._ledger.lead(self.who, ttl_s=self._lease_s, force=force)
        self._ends_in_s = lease.left_s
        if not lease.mine:
            self._lease, self.other = None, lease.who
            raise NotLeading(lease.who)
        self._lease, self._until, self.other = lease, asked + self._lease_s, ""
        return lease

    def lost(self) -> None:
        """Take note that the store knows of no such lease; `follow` asks at once."""
        self._lease = None
        self._ask.set()

    async def follow(self) -> None:
        """Keep the lead, or try to get it, until cancelled."""
        while not ending():
            pause_s = self._lease_s / 3
            try:
                await self.take()
            except NotLeading:
                pause_s = min(ASK_EACH_S, pause_s, self._ends_in_s)
            except StoreUnavailable as exc:
                pause_s = min(ASK_EACH_S, pause_s)
                if self._seldom.may("store"):
                    log.warning("lead_unknown", message=str(exc))
            self._ask.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.05, pause_s)):
                    await self._ask.wait()

    async def leave(self) -> None:
        """Give the lead back, within seconds or not at all; also one whose answer was not waited for."""
        self._lease = None
        with contextlib.suppress(CacheRouteError, TimeoutError):
            async with asyncio.timeout(2.0):
                await self._ledger.resign(self.who)


def ending() -> bool:
    """Return whether this task was asked to end: a client that is connecting can turn a cancellation into a timeout."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
