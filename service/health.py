"""Probes each endpoint's `/health` and tells the fleet; what requests meet brings the next probe forward.

1. One task an endpoint, so that one that hangs delays nobody's probe but its own. Tasks come and go with the fleet.
2. A connection that Envoy could not make takes the endpoint out at once; a good probe, asked for now, brings it back.
3. Answers that the fleet takes for faults of the endpoint (`Fleet.answered`) take it out until its next regular probe:
   with `/health` good and requests refused, each interval lets a few requests try again.
4. A request that ended without any response may be a client's cancel or an engine's reset: it only asks for a probe.
5. One that connects for us and not for Envoy (mutual TLS, a network policy between them) would come back at once and
   fail the next request, for ever: out again within `SETTLED_S` of coming back, it stays out for longer each time.
6. A probe that fails for want of our own means (file descriptors, memory) says nothing about the endpoint.
7. Whatever an endpoint answers, probing goes on. It is not followed elsewhere: a redirect is no sign of health.
"""

import asyncio
import contextlib
import errno

import aiohttp
import structlog

from service.fleet import Changes, Endpoint, Fleet
from service.settings import ServiceSettings
from service.telemetry import Seldom, Telemetry

# Many requests can meet the same dead endpoint: one probe in this time answers them all.
GAP_S = 0.05
# The same for requests that may have met nothing but an impatient client.
SUSPECT_GAP_S = 0.25
# How often slow starts take a step.
REFRESH_S = 1.0
SETTLED_S = 10.0
HELD_MAX_S = 30.0
# Faults of this machine, not of the endpoint.
OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
REASON_MAX = 200

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class _Watched:
    """An endpoint's probing: its task, the wish for a probe now, and when the last one began."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.soon = asyncio.Event()
        self.probed_s = 0.0
        # Rule 5: when it came back last, how often it went again soon after, and until when it has to stay out.
        self.back_s = float("-inf")
        self.relapses = 0
        self.held_until_s = float("-inf")


class Prober:
    """The probes of all endpoints."""

    def __init__(self, fleet: Fleet, settings: ServiceSettings, telemetry: Telemetry) -> None:
        """Nothing is probed before `run`."""
        self._fleet, self._settings, self._telemetry = fleet, settings, telemetry
        self._watched: dict[Endpoint, _Watched] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None
        self._seldom = Seldom()
        self._panic = False

    async def run(self) -> None:
        """Probe until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as self._session,
            asyncio.TaskGroup() as tasks,
        ):
            self._tasks = tasks
            try:
                self._follow()
                while True:
                    await asyncio.sleep(REFRESH_S)
                    self._fleet.refresh()
                    self._tell_panic()
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
            now = asyncio.get_running_loop().time()
            watched.relapses = watched.relapses + 1 if now - watched.back_s < SETTLED_S else 0
            if watched.relapses:
                held_s = min(self._settings.probe_interval_s * 2.0 ** min(watched.relapses - 1, 16), HELD_MAX_S)
                watched.held_until_s = now + held_s
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
        loop = asyncio.get_running_loop()
        # A cancellation can be lost in a timeout that comes with it, so it is not all that ends this.
        while self._tasks is not None and self._watched.get(endpoint) is watched:
            watched.soon.clear()
            watched.probed_s = loop.time()
            failure, refused = await self._probe(endpoint)
            if failure is None:
                pass
            elif not failure:
                if loop.time() >= watched.held_until_s and self._fleet.probe_succeeded(endpoint):
                    watched.back_s = loop.time()
                    self._tell(endpoint, "ready", "probe")
            elif self._fleet.probe_failed(endpoint, allowed=self._settings.probe_failures, refused=refused):
                self._tell(endpoint, "unready", "probe", failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.probe_interval_s):
                    await watched.soon.wait()
                    await asyncio.sleep(GAP_S)

    async def _probe(self, endpoint: Endpoint) -> tuple[str | None, bool]:
        """Return why the endpoint is not healthy, empty when it is, None when that is not known; and whether nobody
        listens there.
        """
        assert self._session is not None
        url = f"http://{endpoint.address}{self._settings.probe_path}"
        try:
            async with self._session.get(url, allow_redirects=False) as response:
                return ("" if response.status < 300 else f"status {response.status}"), False
        except Exception as exc:  # What an endpoint sends can make the client raise anything.
            number = exc.errno if isinstance(exc, OSError) else None
            if number in OUR_OWN:
                if self._seldom.may("own"):
                    remedy = "raise the limit of open files (ulimit -n), or the memory"
                    log.warning("probes are not possible, endpoints stay as they are", error=str(exc), remedy=remedy)
                return None, False
            return f"{type(exc).__name__}: {exc}"[:REASON_MAX], number == errno.ECONNREFUSED

    def _tell_panic(self) -> None:
        if self._fleet.panic and not self._panic:
            log.warning(
                "hardly any endpoint is ready: all are used except where nobody listens",
                remedy="see why probes fail: /fleet, CACHEROUTE_PROBE_PATH, network policies between here and there",
            )
        elif self._panic and not self._fleet.panic:
            log.info("enough endpoints are ready again")
        self._panic = self._fleet.panic

    def _tell(self, endpoint: Endpoint, to: str, cause: str, why: str = "") -> None:
        self._telemetry.readiness_changes.labels(endpoint.name, to, cause).inc()
        level = log.info if to == "ready" else log.warning
        level(f"endpoint {to}", endpoint=endpoint.name, address=endpoint.address, cause=cause, error=why)
