"""Probes each endpoint's `/health` and tells the fleet; what requests meet brings the next probe forward.

1. One task an endpoint, so that one that hangs delays nobody's probe but its own. Tasks come and go with the fleet.
2. A connection that Envoy could not make takes the endpoint out at once; a good probe, asked for now, brings it back.
3. Answers that the fleet takes for faults of the endpoint (`Fleet.answered`) take it out until its next regular probe:
   with `/health` good and requests refused, each interval lets a few requests try again.
4. A request that ended without any response may be a client's cancel or an engine's reset: it only asks for a probe.
"""

import asyncio
import contextlib

import aiohttp
import structlog

from service.fleet import Changes, Endpoint, Fleet
from service.settings import ServiceSettings
from service.telemetry import Telemetry

# Many requests can meet the same dead endpoint: one probe in this time answers them all.
GAP_S = 0.05
# The same for requests that may have met nothing but an impatient client.
SUSPECT_GAP_S = 0.25
# How often slow starts take a step.
REFRESH_S = 1.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _Watched:
    """An endpoint's probing: its task, the wish for a probe now, and when the last one began."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.soon = asyncio.Event()
        self.probed_s = 0.0


class Prober:
    """The probes of all endpoints."""

    def __init__(self, fleet: Fleet, settings: ServiceSettings, telemetry: Telemetry) -> None:
        """Nothing is probed before `run`."""
        self._fleet, self._settings, self._telemetry = fleet, settings, telemetry
        self._watched: dict[Endpoint, _Watched] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Probe until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as self._session,
            asyncio.TaskGroup() as tasks,
        ):
            self._tasks = tasks
            try:
                self._follow()
                while True:
                    await asyncio.sleep(REFRESH_S)
                    self._fleet.refresh()
            finally:
                self._tasks = None

    def changed(self, changes: Changes) -> None:
        """Probe those who joined and no longer those who left; to be called after each change of the fleet."""
        if any(changes) and self._tasks is not None:
            self._follow()

    def connect_failed(self, endpoint: Endpoint) -> None:
        """Take an endpoint that Envoy could not reach out of picks until a probe succeeds."""
        watched = self._watched.get(endpoint)
        if watched is None:
            return
        if self._fleet.connect_failed(endpoint):
            self._tell(endpoint, "unready", "connect")
        watched.soon.set()

    def ejected(self, endpoint: Endpoint) -> None:
        """Tell that the fleet took an endpoint out for its answers."""
        self._tell(endpoint, "unready", "status")

    def suspect(self, endpoint: Endpoint) -> None:
        """Probe an endpoint now that ended a request without a response, or whose client did."""
        watched = self._watched.get(endpoint)
        if watched is not None and asyncio.get_running_loop().time() - watched.probed_s >= SUSPECT_GAP_S:
            watched.soon.set()

    def _follow(self) -> None:
        assert self._tasks is not None
        here = set(self._fleet.endpoints)
        for endpoint in [e for e in self._watched if e not in here]:
            if (task := self._watched.pop(endpoint).task) is not None:
                task.cancel()
        for endpoint in self._fleet.endpoints:
            if endpoint not in self._watched:
                watched = self._watched[endpoint] = _Watched()
                watched.task = self._tasks.create_task(self._watch(endpoint, watched))

    async def _watch(self, endpoint: Endpoint, watched: _Watched) -> None:
        while True:
            watched.soon.clear()
            watched.probed_s = asyncio.get_running_loop().time()
            failure = await self._probe(endpoint)
            if not failure:
                if self._fleet.probe_succeeded(endpoint):
                    self._tell(endpoint, "ready", "probe")
            elif self._fleet.probe_failed(endpoint, allowed=self._settings.probe_failures):
                self._tell(endpoint, "unready", "probe", failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_interval_s):
                    await watched.soon.wait()
                    await asyncio.sleep(GAP_S)

    async def _probe(self, endpoint: Endpoint) -> str:
        """Return why the endpoint is not healthy, empty when it is."""
        assert self._session is not None
        try:
            async with self._session.get(f"http://{endpoint.address}{self._settings.probe_path}") as response:
                return "" if response.status < 400 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            return f"{type(exc).__name__}: {exc}"

    def _tell(self, endpoint: Endpoint, to: str, cause: str, why: str = "") -> None:
        self._telemetry.readiness_changes.labels(endpoint.name, to, cause).inc()
        level = log.info if to == "ready" else log.warning
        level(f"endpoint {to}", endpoint=endpoint.name, address=endpoint.address, cause=cause, error=why)
