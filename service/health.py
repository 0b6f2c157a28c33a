"""Probes each endpoint's `/health` and tells the fleet; a failure that Envoy met brings the next probe forward."""

import asyncio
import contextlib

import aiohttp
import structlog

from service.fleet import Endpoint, Fleet
from service.settings import ServiceSettings
from service.telemetry import Telemetry

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Prober:
    """One task an endpoint, so that an endpoint that hangs delays nobody's probe but its own."""

    def __init__(self, fleet: Fleet, settings: ServiceSettings, telemetry: Telemetry) -> None:
        """Nothing is probed before `run`."""
        self._fleet, self._settings, self._telemetry = fleet, settings, telemetry
        self._soon = {e.name: asyncio.Event() for e in fleet.endpoints}

    async def run(self) -> None:
        """Probe until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for endpoint in self._fleet.endpoints:
                tasks.create_task(self._watch(session, endpoint))

    def connect_failed(self, endpoint: Endpoint) -> None:
        """Take an endpoint that Envoy could not reach out of picks until a probe succeeds."""
        if self._fleet.connect_failed(endpoint):
            self._changed(endpoint, "unready", "connect")
        self._soon[endpoint.name].set()

    async def _watch(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        soon = self._soon[endpoint.name]
        while True:
            soon.clear()
            failure = await self._probe(session, endpoint)
            if not failure:
                if self._fleet.probe_succeeded(endpoint):
                    self._changed(endpoint, "ready", "probe")
            elif self._fleet.probe_failed(endpoint, allowed=self._settings.probe_failures):
                self._changed(endpoint, "unready", "probe", failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_interval_s):
                    await soon.wait()
                    # Many requests can meet the same dead endpoint; one probe in 50 ms answers them all.
                    await asyncio.sleep(0.05)

    async def _probe(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
        """Return why the endpoint is not healthy, empty when it is."""
        try:
            async with session.get(f"http://{endpoint.address}{self._settings.probe_path}") as response:
                return "" if response.status < 400 else f"status {response.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            return f"{type(exc).__name__}: {exc}"

    def _changed(self, endpoint: Endpoint, to: str, cause: str, why: str = "") -> None:
        self._telemetry.readiness_changes.labels(endpoint.name, to, cause).inc()
        level = log.info if to == "ready" else log.warning
        level(f"endpoint {to}", endpoint=endpoint.name, address=endpoint.address, cause=cause, error=why)
