"""The HTTP port for people and Prometheus: /metrics, /healthz, /fleet, /table, /explain."""

import contextlib
import json
import time
from collections.abc import Callable
from random import Random
from typing import Any

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from service.dispatch import pick
from service.errors import NoReadyEndpoint
from service.fleet import Endpoint, Fleet
from service.keys import format_hash, hash_key, normalise
from service.settings import ServiceSettings
from service.table import Current
from service.telemetry import Telemetry


def build_app(
    fleet: Fleet,
    current: Current,
    telemetry: Telemetry,
    settings: ServiceSettings,
    *,
    draining: Callable[[], bool],
    clock: Callable[[], float] = time.time,
) -> web.Application:
    """Return the application; it only reads, and an explained key is neither counted nor charged."""

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(telemetry.registry), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        return _json({"status": "draining"}, 503) if draining() else _json({"status": "ok"})

    async def fleet_state(_: web.Request) -> web.Response:
        return _json(
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
        return _json(
            {
                "version": table.version,
                "epoch": table.epoch,
                "age_s": round(table.age_s(clock()), 3),
                "keys": len(table.targets),
                "overrides": 0,
            }
        )

    async def explain(request: web.Request) -> web.Response:
        raw = normalise(request.query.get("key", "").encode(errors="surrogateescape"))
        if not raw:
            return _json({"error": "name the key: /explain?key=K"}, 400)
        usable_key = len(raw) <= settings.key_max_bytes
        key_hash, table = hash_key(raw, settings.key_salt.encode()), current.table
        targets = table.targets.get(key_hash, ()) if usable_key else ()
        reason, candidates = "refused", tuple[Endpoint, ...]()
        with contextlib.suppress(NoReadyEndpoint):
            asked = key_hash if usable_key else None
            candidates, reason = pick(table, fleet, asked, Random(), spill_factor=settings.spill_factor)
        return _json(
            {
                "key_hash": format_hash(key_hash),
                "reason": reason,
                "rule": _rule(reason, table.version, len(targets))
                if usable_key
                else f"the key is longer than {settings.key_max_bytes} bytes and not used: less loaded of two",
                "targets": list(targets),
                "candidates": [
                    {"name": e.name, "address": e.address, "ready": e.ready, "inflight": e.inflight} for e in candidates
                ],
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


def _json(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(document).encode() + b"\n", status=status, content_type="application/json")
