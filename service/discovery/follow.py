"""Keeps the fleet what its source says, and keeps it as it is when the source says nothing usable.

1. `first` asks once, before requests come, and waits a few seconds at most. Whoever is found first is taken as ready
   and warm: a restart of this process says nothing about the servers.
2. `run` follows from there. A failure is counted by its cause and told with its remedy once a minute; the source is
   asked again after `discover_interval_s`, doubled for each failure in a row up to PAUSE_MAX_S, minus a random part.
3. A fault of ours is treated alike, with its trace in the log. Neither ends the process.
4. A part of an answer that cannot be used is counted and told, the rest is used.
5. Kubernetes may say that there are no endpoints; then the fleet is empty and requests are answered 503. While nobody
   has said anything yet, requests are left to Envoy.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable

import structlog

from service.discovery.sighting import Sighting, Skipped, Source, settle
from service.errors import DiscoveryFailed, InvalidInput
from service.fleet import Changes, Fleet
from service.settings import ServiceSettings, parse_discover
from service.telemetry import Seldom, Telemetry

FIRST_S = 4.0
PAUSE_MAX_S = 30.0
# Counters of endpoints that left are kept for this many, so that a scrape or two still sees their last figures.
NAMES_KEPT = 1000

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Discovery:
    """Follows one source; with `endpoint` settings instead of `discover` there is nothing to follow."""

    def __init__(
        self, fleet: Fleet, settings: ServiceSettings, telemetry: Telemetry, on_change: Callable[[Changes], None]
    ) -> None:
        """on_change: called after each change of the fleet.  Raise InvalidInput when the source cannot be used here."""
        self._fleet, self._settings, self._telemetry, self._on_change = fleet, settings, telemetry, on_change
        self._source = _source(settings)
        self._seldom = Seldom()
        self._told = False
        # Set once somebody has said who is there; from the start where nothing is to be discovered.
        self.found = asyncio.Event()
        if self._source is None:
            self.found.set()
        fleet.known = self.found.is_set()
        self._left: dict[str, None] = {}

    async def first(self) -> None:
        """Find the endpoints now if that can be within seconds; never raise for a source that is away."""
        if self._source is None:
            return
        try:
            async with asyncio.timeout(FIRST_S):
                self._use(await self._source.find())
        except DiscoveryFailed as exc:
            self._failed(exc)
        except TimeoutError:
            self._failed(DiscoveryFailed("timeout", f"no answer in {FIRST_S:g} s", "see that it can be reached"))
        except Exception:
            self._fault()

    async def run(self) -> None:
        """Follow until cancelled."""
        if self._source is None:
            await asyncio.Event().wait()
            return
        failures = 0 if self.found.is_set() else 1
        try:
            while True:
                await self._pause(failures)
                try:
                    self._use(await (self._source.wait() if self.found.is_set() else self._source.find()))
                    failures = 0
                except DiscoveryFailed as exc:
                    self._failed(exc)
                    failures += 1
                except Exception:
                    self._fault()
                    failures += 1
                    with contextlib.suppress(Exception):
                        await self._source.close()
        finally:
            with contextlib.suppress(Exception):
                await self._source.close()

    async def _pause(self, failures: int) -> None:
        if failures:
            longest = max(PAUSE_MAX_S, self._settings.discover_interval_s)
            pause_s = min(self._settings.discover_interval_s * 2.0 ** min(failures - 1, 16), longest)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    def _use(self, sighting: Sighting) -> None:
        found, conflicts = settle(sighting.found)
        changes = self._fleet.update(found, warm=not self.found.is_set())
        self._fleet.known = True
        self.found.set()
        self._tell((*sighting.skipped, *conflicts))
        for change, names in zip(changes._fields, changes, strict=True):
            self._telemetry.discovery_changes.labels(change).inc(len(names))
        if any(changes):
            shown = {change: names[:20] for change, names in zip(changes._fields, changes, strict=True) if names}
            log.info("fleet changed", endpoints=len(found), **shown)
            self._forget(changes)
        self._on_change(changes)

    def _failed(self, exc: DiscoveryFailed) -> None:
        self._tell([Skipped(exc.cause, str(exc), exc.remedy)])

    def _tell(self, skipped: Iterable[Skipped]) -> None:
        fine = True
        for cause, what, remedy in skipped:
            fine = False
            self._telemetry.discovery_failures.labels(cause).inc()
            if self._seldom.may(cause):
                known = len(self._fleet.endpoints)
                log.warning("discovery", cause=cause, error=what, remedy=remedy, endpoints=known)
        if fine and self._told:
            log.info("discovery has recovered", endpoints=len(self._fleet.endpoints))
        self._told = not fine

    def _fault(self) -> None:
        self._telemetry.discovery_failures.labels("fault").inc()
        if self._seldom.may("fault"):
            log.exception("discovery failed by a fault of its own, the last fleet stays")
        self._told = True

    def _forget(self, changes: Changes) -> None:
        """Drop the metrics of endpoints that left long ago: pods have new names for ever."""
        for name in changes.added:
            self._left.pop(name, None)
        self._left.update(dict.fromkeys(changes.removed))
        while len(self._left) > NAMES_KEPT:
            name = next(iter(self._left))
            del self._left[name]
            self._telemetry.forget_endpoint(name)


def _source(settings: ServiceSettings) -> Source | None:
    """Return where to look, imported only now: most fleets need one of these libraries, or none."""
    if not settings.discover:
        return None
    if parse_discover(settings.discover)[0] != "k8s":
        from service.discovery.names import Names

        return Names(settings)
    try:
        from service.discovery.api_server import ApiServer
    except ModuleNotFoundError as exc:
        if not (exc.name or "").startswith("kubernetes_asyncio"):
            raise
        raise InvalidInput(
            f"--discover {settings.discover} needs a package that is not installed",
            "pip install 'cacheroute[kubernetes]'",
        ) from exc
    return ApiServer(settings)
