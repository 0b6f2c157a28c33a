"""The HTTP port for people and Prometheus: /metrics, /healthz, /fleet, /table, /explain."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from random import Random
from typing import Any
from urllib.parse import parse_qsl

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from service.dispatch import pick
from service.errors import InvalidInput, NoReadyEndpoint
from service.fairness import Fairness
from service.fleet import Endpoint, Fleet
from service.keys import KeyReader, format_hash, hash_key, normalise
from service.settings import ServiceSettings, split_address
from service.table import Current
from service.telemetry import Telemetry

# How long a page that is being read may hold the end of the process up.
ENDING_S = 1.0
# Of workers that share a port: never on a port that others reach.
LOAD_PATH = "/load"


def build_app(
    fleet: Fleet,
    current: Current,
    telemetry: Telemetry,
    settings: ServiceSettings,
    *,
    status: Callable[[], str],
    fairness: Fairness | None = None,
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """Return the application; it only reads, and an explained key is neither counted nor charged.

    status: ok while new requests are welcome, else another word.  fairness: None: nobody is refused for others' sake.
    """

    read_key = KeyReader(("key",), settings.key_max_bytes).read

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(telemetry.registry), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        now = status()
        return reply_json({"status": now}, 200 if now == "ok" else 503)

    async def fleet_state(_: web.Request) -> web.Response:
        return reply_json(
            {
                "endpoints": [
                    {
                        "name": e.name,
                        "address": e.address,
                        "ready": e.ready,
                        "draining": e.draining,
                        "inflight": e.inflight,
                        "inflight_elsewhere": e.inflight_elsewhere,
                        "warming": e.joined_s is not None,
                    }
                    for e in fleet.endpoints
                ]
            }
        )

    async def table_state(_: web.Request) -> web.Response:
        table = current.table
        return reply_json(
            {
                "version": table.version,
                "epoch": table.epoch,
                "age_s": round(table.age_s(clock()), 3),
                "keys": len(table.targets),
                "overrides": 0,
                "source": table.source,
            }
        )

    async def explain(request: web.Request) -> web.Response:
        # Not `request.query`, which has replaced what is not UTF-8.
        query = dict(parse_qsl(request.rel_url.raw_query_string, errors="surrogateescape"))
        raw = normalise(query.get("key", "").encode(errors="surrogateescape"))
        if not raw:
            return reply_json({"error": "name the key: /explain?key=K"}, 400)
        _, rejected = read_key({"key": raw})
        usable_key = not rejected
        key_hash, table = hash_key(raw, settings.key_salt.encode()), current.table
        targets = table.targets.get(key_hash, ()) if usable_key else ()
        reason, candidates = "refused", tuple[Endpoint, ...]()
        with contextlib.suppress(NoReadyEndpoint):
            asked = key_hash if usable_key else None
            candidates, reason = pick(table, fleet, asked, Random(), spill_factor=settings.spill_factor)
        return reply_json(
            {
                "key_hash": format_hash(key_hash),
                "reason": reason,
                "rule": _rejected(rejected, settings.key_max_bytes)
                if rejected and candidates
                else _rule(reason, table.version, len(targets)),
                "targets": list(targets),
                "candidates": [
                    {"name": e.name, "address": e.address, "ready": e.ready, "inflight": e.inflight} for e in candidates
                ],
                "fairness": asdict(fairness.explain(key_hash if usable_key else None))
                if fairness is not None and fairness.enabled
                else None,
            }
        )

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/fleet", fleet_state)
    app.router.add_get("/table", table_state)
    app.router.add_get("/explain", explain)
    return app


def _rule(reason: str, version: int, targets: int) -> str:
    match reason:
        case "planned":
            return f"plan {version} gives the key {targets} target(s): the least loaded usable one first, then a spare"
        case "spill":
            return f"plan {version} gives the key {targets} target(s), all above the bound: a less loaded one first"
        case "fallback":
            return f"plan {version} gives the key {targets} target(s), none of them usable: less loaded of two others"
        case "cold" if version:
            return f"plan {version} does not admit the key: less loaded of two random endpoints"
        case "cold":
            return "no plan yet: less loaded of two random endpoints"
        case _:
            return "no endpoint is usable: requests are answered 503"


def _rejected(cause: str, max_bytes: int) -> str:
    why = f"is longer than {max_bytes} bytes" if cause == "too_long" else "is not UTF-8"
    return f"the key {why} and not used: less loaded of two random endpoints"


def reply_json(document: Any, status: int = 200) -> web.Response:
    """Return a document as a response, one line."""
    return web.Response(body=json.dumps(document).encode() + b"\n", status=status, content_type="application/json")


async def listen_http(app: web.Application, address: str) -> web.AppRunner:
    """Serve an application at `host:port`; return what to clean up, raise InvalidInput when the port is taken."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=ENDING_S)
    await runner.setup()
    host, port = split_address(address)
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as exc:
        await runner.cleanup()
        # asyncio rewords the errors of the system, which are numbers above 0.
        why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror
        raise InvalidInput(f"--http {address}: {why}", "free it or choose another one") from exc
    return runner


def http_port(runner: web.AppRunner) -> int:
    """Return the port that `listen_http` listens on."""
    return int(runner.addresses[0][1])


async def listen_private(app: web.Application, path: str) -> web.AppRunner:
    """Serve an application on a Unix socket; return what to clean up."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=ENDING_S)
    await runner.setup()
    await web.UnixSite(runner, path).start()
    return runner


def add_load_exchange(app: web.Application, fleet: Fleet, period_s: float) -> None:
    """Let a supervisor tell this worker the others' load and hear of its own; period_s: how often it does."""
    forget: list[asyncio.TimerHandle] = []

    async def exchange(request: web.Request) -> web.Response:
        fleet.set_elsewhere({address: (n, work) for address, (n, work) in (await request.json()).items()})
        for handle in forget:
            handle.cancel()
        # Old figures of others mislead more than none do.
        lasts_s = max(1.0, 4 * period_s)
        forget[:] = [asyncio.get_running_loop().call_later(lasts_s, fleet.set_elsewhere, {})]
        return reply_json({e.address: (e.inflight, e.work) for e in fleet.endpoints if e.inflight})

    app.router.add_post(LOAD_PATH, exchange)
