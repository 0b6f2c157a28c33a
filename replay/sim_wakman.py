"""The `/v1/wakman/…` routes and the `wakman_*` metrics of a simulated engine.

Answers, statuses and metrics are those of `engine_patch.endpoint` and `engine_patch.metrics`, by their code. Only the
way in differs: aiohttp, and one engine in this process instead of some behind RPC.
"""

import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from engine_patch import metrics
from engine_patch.endpoint import PATH, Engines, answer_history, answer_policy, answer_status
from replay.engine_switch import EngineSwitch


class OneEngine(Engines):
    """The engines behind this server: one, brought up to now before it is asked."""

    def __init__(self, switch: EngineSwitch, advance: Callable[[], None]) -> None:
        super().__init__(None)
        self._switch = switch
        self._advance = advance

    async def ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Return the engine's answer."""
        self._advance()
        return [self._switch.answer(method, *arguments)]


def routes(engines: OneEngine) -> list[web.RouteDef]:
    """Return the routes."""

    async def status(_: web.Request) -> web.Response:
        code, body = await answer_status(engines)
        return web.json_response(body, status=code)

    async def history(_: web.Request) -> web.Response:
        code, body = await answer_history(engines)
        return web.json_response(body, status=code)

    async def policy(http: web.Request) -> web.Response:
        code, body = await answer_policy(engines, await http.read(), http.remote or "somebody")
        return web.json_response(body, status=code)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=await page(engines), headers={"Content-Type": metrics.CONTENT_TYPE})

    return [
        web.get(f"{PATH}/status", status),
        web.get(f"{PATH}/history", history),
        web.post(f"{PATH}/policy", policy),
        web.get(f"{PATH}/metrics", exposition),
    ]


async def page(engines: OneEngine) -> bytes:
    """Return the metrics in Prometheus' text format."""
    return metrics.text(metrics.families(await engines.ask("wakman_status"), time.time())).encode()
