"""Assembles one service process and runs it until SIGTERM: `python -m service`, or `cacheroute serve`.

End of life: SIGTERM makes `readiness` and the processor's own health service say NOT_SERVING (`liveness` does not)
and stops taking streams; requests in flight keep theirs for up to `drain_s`, then the process ends. Envoy fails open,
so a response that lasts longer still reaches its client.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from random import Random

import grpc
import structlog
import uvloop
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as grpc_health
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from service.errors import CacheRouteError, InvalidInput
from service.extproc import SERVICE, ExternalProcessor
from service.feed import Feed
from service.fleet import Fleet
from service.health import Prober
from service.http import build_app
from service.rates import Rates
from service.settings import ServiceSettings, load_settings, parse_endpoints, split_address
from service.store import Store, without_password
from service.table import Current
from service.telemetry import Telemetry, configure_logging

# How long the background tasks may take to hand out what they hold.
ENDING_S = 4.0

HEALTH_SERVICES = ("", "liveness", "readiness", SERVICE)

log: structlog.stdlib.BoundLogger = structlog.get_logger()


def new_server() -> grpc.aio.Server:
    """Return a gRPC server that fails on a taken port instead of sharing it, and that bears long-lived streams."""
    return grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.http2.min_ping_interval_without_data_ms", 5000)])


def bind(server: grpc.aio.Server, listen: str) -> int:
    """Bind the server; return the port, raise InvalidInput when it cannot be had."""
    host, port = split_address(listen)
    try:
        # Tried first with a plain socket, whose error says why; gRPC's only says that it failed, in a log of its own.
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
        return server.add_insecure_port(listen)
    except (OSError, RuntimeError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else "address cannot be bound"
        raise InvalidInput(f"--listen {listen}: {why}", "free it or choose another one") from exc


def run(settings: ServiceSettings) -> None:
    """Run the service to its end on uvloop, which takes a twentieth off a request's CPU; see `serve`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings))


async def serve(settings: ServiceSettings) -> None:
    """Run the service until SIGTERM or SIGINT; raise InvalidInput when a port is taken."""
    started, salt = time.time(), settings.key_salt.encode()
    store = Store(settings.redis_url, settings.pool) if settings.redis_url else None
    fleet, current = Fleet(parse_endpoints(settings.endpoint)), Current()
    # Numbers begin at the clock: a restarted process of the same name continues above its predecessor's.
    rates = Rates(settings.rate_window_s, settings.rate_keep_s, settings.rate_keys_max, first_batch=int(started * 1000))
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter that nobody graphs
    telemetry = Telemetry(CollectorRegistry())
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=telemetry.registry)
    telemetry.watch(fleet, current, time.time)
    prober = Prober(fleet, settings, telemetry)
    processor = ExternalProcessor(
        fleet,
        current,
        rates,
        telemetry,
        Random(),
        key_headers=settings.key_header,
        key_salt=salt,
        key_max_bytes=settings.key_max_bytes,
        prompt_max_bytes=settings.prompt_max_bytes,
        spill_factor=settings.spill_factor,
        on_connect_failure=prober.connect_failed,
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    server, health = new_server(), grpc_health.HealthServicer()
    server.add_generic_rpc_handlers((processor.rpc(),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    bind(server, settings.listen)
    app = build_app(fleet, current, telemetry, settings, draining=stop.is_set)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    host, port = split_address(settings.http)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as exc:
        await runner.cleanup()
        raise InvalidInput(f"--http {settings.http}: {exc.strerror}", "free it or choose another one") from exc
    await server.start()
    for name in HEALTH_SERVICES:
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    log.info("serving", pid=os.getpid(), **_in_force(settings))

    background = [asyncio.create_task(prober.run())]
    if store is not None:
        background.append(asyncio.create_task(Feed(store, settings, fleet, current, rates, telemetry).run()))
    ends = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([ends, *background], return_when=asyncio.FIRST_COMPLETED)
    log.info("draining", inflight=sum(e.inflight for e in fleet.endpoints), drain_s=settings.drain_s)
    for name in HEALTH_SERVICES[2:]:
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await server.stop(settings.drain_s)
    for task in background:
        task.cancel()
    await asyncio.wait(background, timeout=ENDING_S)
    if store is not None:
        await store.close()
    await runner.cleanup()
    log.info("stopped", inflight=sum(e.inflight for e in fleet.endpoints))
    if ends not in done:  # A task that should never end did: say why, and let the supervisor start us again.
        for task in background:
            if task.done() and not task.cancelled():
                task.result()


def _in_force(settings: ServiceSettings) -> dict[str, object]:
    values = settings.model_dump()
    values["key_salt"] = "set" if settings.key_salt else "none"
    values["redis_url"] = without_password(settings.redis_url)
    return values


def main() -> None:
    """Run with the settings of the environment alone."""
    try:
        settings = load_settings(os.environ)
        configure_logging(settings.log_level)
        with contextlib.suppress(KeyboardInterrupt):
            run(settings)
    except CacheRouteError as exc:
        sys.stderr.write(f"cacheroute: {exc}\n")
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
