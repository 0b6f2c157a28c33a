"""Assembles one service process and runs it until SIGTERM.

The start: what can be wrong with settings and ports is told first; then the first answers of discovery, leases and disk
are awaited for a while, and then the port is bound: who connects is answered. SIGTERM ends the start at any moment.

End of life:
1. SIGTERM: the health services say NOT_SERVING, but for `liveness`, and so does /healthz. Gateways need a moment to see
   that, so for `drain_notice_s` new requests are answered as before.
2. Then no stream is taken any more; requests in flight keep theirs for up to `drain_s`. Envoy fails open, so a response
   that lasts longer still reaches its client.
3. What was counted last goes to Redis, and the process ends.
A worker whose supervisor has died skips the notice: its port shall be free for the next supervisor at once.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from random import Random
from typing import Any

import structlog
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from service.answers import Answers
from service.discovery import Discovery
from service.extproc import ExternalProcessor
from service.fairness import Fairness
from service.feed import Feed
from service.fleet import Fleet
from service.health import Prober
from service.http import add_load_exchange, build_app, http_port, listen_http, listen_private
from service.keys import KeyReader
from service.lastgood import LastGood
from service.leases import Leases
from service.ports import check_port
from service.rates import Rates
from service.server import CONNECTION_AGE_S, Health, bind, new_server
from service.settings import ServiceSettings, parse_endpoints
from service.store import Store
from service.table import Current
from service.telemetry import Telemetry
from service.tls import Certificates, first_pair
from service.workers import Seat, end_with_supervisor, leave

# How long the background tasks may take to hand out what they hold.
ENDING_S = 4.0
# How long a disk may take before the start goes on without what it holds.
DISK_S = 7.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Life:
    """Whether the process serves, and who wants it to end; `orphaned`: the supervisor died, which allows no notice."""

    def __init__(self) -> None:
        """Listen to SIGTERM and SIGINT of the running loop."""
        self.asked, self.orphaned = asyncio.Event(), asyncio.Event()
        self.started = False
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.asked.set)

    def status(self) -> str:
        """Return ok, starting or draining."""
        return "draining" if self.asked.is_set() else "ok" if self.started else "starting"

    async def awaits(self, work: asyncio.Future[Any]) -> bool:
        """Wait for a part of the start; return False, and end it, when the process shall end."""
        asked = asyncio.create_task(self.asked.wait())
        try:
            await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if self.asked.is_set():
            work.cancel()
            return False
        await work
        return True

    def orphan(self) -> None:
        """End now."""
        self.orphaned.set()
        self.asked.set()


async def _serve_once_known(discovery: Discovery, health: Health, life: Life) -> None:
    """Say SERVING as soon as discovery has found the fleet; then wait without an end, as all background tasks do."""
    await discovery.found.wait()
    if not life.asked.is_set():
        await health.serve()
    await asyncio.Event().wait()


async def serve(settings: ServiceSettings, in_force: Mapping[str, object], seat: Seat | None = None) -> None:
    """Run until SIGTERM or SIGINT; raise InvalidInput when a port is taken or a certificate cannot be used.

    in_force: what to log at the start.  seat: as a worker.
    """
    life = Life()
    if seat is not None:
        structlog.contextvars.bind_contextvars(worker=seat.number)
        end_with_supervisor(life.orphan, within_s=settings.drain_s + 2 * ENDING_S)
    started = time.time()
    store = Store(settings.redis_url, settings.pool) if settings.redis_url else None
    fleet, current = Fleet(parse_endpoints(settings.endpoint), settings.slow_start_s), Current()
    rates = Rates(settings.rate_window_s, settings.rate_keep_s, settings.rate_keys_max, began_s=started)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter that nobody graphs
    telemetry = Telemetry(CollectorRegistry())
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=telemetry.registry)
    telemetry.watch(fleet, current, time.time)
    prober = Prober(fleet, settings, telemetry)
    discovery = Discovery(fleet, settings, telemetry, prober.changed)
    background: list[Callable[[], Coroutine[Any, Any, None]]] = [prober.run, discovery.run]
    fairness = Fairness(settings)
    leases = Leases(store, settings, fairness, telemetry)
    background.append(leases.run)
    feed = None
    if store is not None:
        feed = Feed(store, settings, fleet, current, rates, telemetry, LastGood(settings, telemetry))
        background.append(feed.run)
    answers = Answers(
        fleet,
        current,
        rates,
        telemetry,
        Random(),
        key_reader=KeyReader(settings.key_header, settings.key_max_bytes),
        key_salt=settings.key_salt.encode(),
        prompt_max_bytes=settings.prompt_max_bytes,
        spill_factor=settings.spill_factor,
        fairness=fairness,
        conformance=settings.conformance,
        body_echo=settings.body_echo,
        on_connect_failure=prober.connect_failed,
        on_ejected=prober.ejected,
        on_suspect=prober.suspect,
    )
    processor = ExternalProcessor(answers, telemetry, settings.streams_max)
    certificates = None
    if (pair := seat.pair if seat else first_pair(settings)) is not None:
        certificates = Certificates(settings, telemetry, pair)
        background.append(certificates.run)

    if seat is None:
        check_port(settings.listen)
    app = build_app(fleet, current, telemetry, settings, status=life.status, fairness=fairness)
    if seat is None:
        http = await listen_http(app, settings.http)
    else:
        add_load_exchange(app, fleet, settings.load_exchange_s)
        http = await listen_private(app, seat.http)

    async def prepare() -> None:
        # A worker's certificate is that of its supervisor's start, and may have been replaced.
        renewed = [certificates.refresh()] if certificates is not None else []
        await asyncio.gather(discovery.first(), leases.first(), *renewed)
        if feed is not None:
            try:
                await asyncio.wait_for(feed.restore(), DISK_S)
            except TimeoutError:
                log.error("no table from CACHEROUTE_STATE_DIR, its disk does not answer", waited_s=DISK_S)

    tasks: list[asyncio.Task[None]] = []
    server = health = None
    if await life.awaits(asyncio.create_task(prepare())):
        server = new_server(
            streams_per_connection=settings.streams_per_connection,
            message_max_bytes=settings.message_max_bytes,
            shares_port=seat is not None,
            connection_age_s=CONNECTION_AGE_S if seat or certificates else None,
        )
        server.add_generic_rpc_handlers((processor.rpc(),))
        health = Health(server)
        port = bind(server, settings.listen, shares_port=seat is not None, certificates=certificates)
        await health.serve()
        if not fleet.known:
            # Requests are left to Envoy until somebody is found; one that looks at our health asks elsewhere meanwhile.
            await health.drain()
            background.append(partial(_serve_once_known, discovery, health, life))
        await server.start()
        life.started = True
        ports = {"port": port} if seat else {"port": port, "http_port": http_port(http)}
        log.info("serving", pid=os.getpid(), **ports, **in_force)
        tasks = [asyncio.create_task(work()) for work in background]
        await asyncio.wait([asyncio.create_task(life.asked.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)

    inflight = sum(e.inflight for e in fleet.endpoints)
    log.info("draining", inflight=inflight, drain_notice_s=settings.drain_notice_s, drain_s=settings.drain_s)
    failed = not life.asked.is_set()  # A task that should never end did: health must say so, and so must /healthz.
    life.asked.set()
    if server is not None and health is not None:
        await health.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(settings.drain_notice_s):
                await life.orphaned.wait()
        health.end_watches()
        await server.stop(settings.drain_s)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=ENDING_S)
    if store is not None:
        await store.close()
    await http.cleanup()
    if seat is not None and life.orphaned.is_set():
        leave(seat)
    log.info("stopped", inflight=sum(e.inflight for e in fleet.endpoints))
    if failed:  # Say why, and let whoever supervises us start us again.
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
