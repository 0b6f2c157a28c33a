"""The endpoint plugin `wakman` of vLLM's API server: `/v1/wakman/…` for operators, and the metrics on `/metrics`.

1. vLLM loads it only where `VLLM_PLUGINS` names `wakman`. The paths begin with `/v1`, so `--api-key` guards them.
2. `GET status`, `GET history` and `GET metrics` ask every data-parallel engine and list each; `POST policy` orders all.
3. Answers: 200; 400 a body or a policy that is none (with the known ones); 409 an engine refused, none or some changed,
   see each; 413 too long; 503 an engine does not answer within `ANSWER_S`, see the others.
4. A call waits for the engine's current step, never the other way round.
5. A task asks the engines every `ASK_S` and exports what they say (engine_patch.metrics), in the first API server.
   While they do not answer it asks ever more rarely, up to `ASK_RARELY_S`: vLLM logs a traceback for each such call.
6. Nothing here may stop the server: what fails at the start is logged, and then there are no such routes or metrics.

vLLM asks plugins to reach the engine through `EngineClient`, which offers no call to the scheduler's process; its
`engine_core.call_utility…` is what the server itself uses. A server without an engine (render) answers 503.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any

from engine_patch import metrics
from engine_patch.control_file import MAX_BYTES, parsed_order

ANSWER_S = 10.0
ASK_S = 5.0
ASK_RARELY_S = 300.0
PATH = "/v1/wakman"

logger = logging.getLogger("vllm.wakman")


class Silent(Exception):
    """An engine does not answer; says why."""


class Engines:
    """All engines behind one API server."""

    def __init__(self, engine_client: Any) -> None:
        """engine_client: vLLM's `EngineClient`, None on a server without an engine."""
        self._core: Any = getattr(engine_client, "engine_core", None)

    @property
    def client_index(self) -> int:
        """Return the number of this process among the API servers."""
        return int(getattr(self._core, "client_index", 0) or 0)

    async def ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        """Call an `EngineCore` method in every engine; one that is silent gets an answer with `silent` and why.

        Silent when none answers.
        """
        if self._core is None:
            raise Silent("there is no engine behind this server")
        answers = await self._ask(method, *arguments)
        if all(answer.get("silent") for answer in answers):
            raise Silent(answers[0]["error"] if answers else "there is no engine behind this server")
        return answers

    async def _ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        # The public call to all engines (0.32; before, it answers for the first one only) waits for the slowest: one
        # engine that hangs would hide the others when they matter most. So each is asked by the call below it.
        core: Any = self._core
        one, engines = getattr(core, "_call_utility_async", None), getattr(core, "core_engines", None)
        if one is not None and engines:
            calls = [
                _answered(int.from_bytes(engine, "little"), one(method, *arguments, engine=engine))
                for engine in engines
            ]
            return list(await asyncio.gather(*calls))
        return [await _answered(0, core.call_utility_async(method, *arguments))]


async def _answered(engine: int, call: Awaitable[Any]) -> dict[str, Any]:
    """Return what an engine answers within `ANSWER_S`, or why it is silent."""
    # Not `wait_for`: up to Python 3.10 it raises another TimeoutError than the built-in one, and either could as well
    # be vLLM's own, raised at once.
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait({task}, timeout=ANSWER_S)
        if task.done():
            answer = task.result()
            return answer if isinstance(answer, dict) else {"engine": engine, "error": f"answered {answer!r}"}
        why = f"engine {engine} did not answer within {ANSWER_S:g} s"
    except Exception as exc:  # vLLM's: the engine died, is shutting down, or does not know the method
        why = f"{type(exc).__name__}: {exc}".removesuffix(": ")
        if "has no attribute" in why:
            why = "the engine's process has not loaded the patch; see its log for `wakman:`"
        elif type(exc).__name__ == "EngineDeadError":  # it says "see above", which is in the log
            why = f"engine {engine} has died; the server's log says of what"
    finally:
        task.cancel()
    return {"engine": engine, "silent": True, "error": why}


class WakmanEndpoint:
    """What vLLM's `vllm.endpoint_plugins` asks for."""

    name = "wakman"
    required_tasks = None

    def attach_router(self, app: Any) -> None:
        """Add the routes. Never raises."""
        try:
            _add_routes(app)
        except Exception:
            logger.exception("wakman: no HTTP control: the routes cannot be added")

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Remember the engines, and begin to export their metrics. Never raises."""
        engines = state.wakman = Engines(engine_client)
        if engine_client is None or not metrics.exports(engines.client_index):
            return
        try:
            # The reference keeps the task alive as long as the application.
            state.wakman_export = asyncio.create_task(export(engines, metrics.Exporter()))
        except Exception as exc:
            logger.warning("wakman: not on /metrics (%s: %s); see %s/metrics", type(exc).__name__, exc, PATH)


async def export(engines: Engines, exporter: metrics.Exporter) -> None:
    """Show what the engines say, every `ASK_S`, until cancelled; one log line when they fall silent."""
    wait_s = ASK_S
    while True:
        try:
            exporter.show(metrics.families(await engines.ask("wakman_status"), time.time()))
            wait_s = ASK_S
        except Exception as exc:
            if wait_s == ASK_S:
                logger.warning("wakman: metrics stand still: %s", exc)
            wait_s = min(2 * wait_s, ASK_RARELY_S)
        await asyncio.sleep(wait_s)


async def answer_status(engines: Engines) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of `GET status`."""
    return _read(await engines.ask("wakman_status"))


async def answer_history(engines: Engines) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of `GET history`."""
    return _read(await engines.ask("wakman_history"))


async def answer_policy(engines: Engines, body: bytes, peer: str) -> tuple[int, dict[str, Any]]:
    """Return HTTP status and body of `POST policy`. peer: who calls, for an order that names no actor."""
    if len(body) > MAX_BYTES:
        return 413, {"error": f"a body of more than {MAX_BYTES} bytes"}
    try:
        order = parsed_order(body)
    except ValueError as exc:
        return 400, {"error": f"the body is {exc}" if str(exc).startswith("not") else str(exc)}
    try:
        found = await engines.ask("wakman_set_policy", order.policy, order.actor or f"http {peer}", order.reason)
    except Silent as exc:
        return 503, {"error": f"{exc}; it may obey yet: read {PATH}/status"}
    silent = [str(answer["error"]) for answer in found if answer.get("silent")]
    if silent:
        return 503, {"error": f"{silent[0]}; it may obey yet: read {PATH}/status", "engines": found}
    unknown = [answer for answer in found if answer.get("unknown")]
    if unknown:
        return 400, {"error": unknown[0]["error"], "policies": unknown[0]["policies"]}
    refused = [str(answer["error"]) for answer in found if answer.get("error")]
    if refused:
        return 409, {"error": f"{len(refused)} of {len(found)} engines refused: {refused[0]}", "engines": found}
    return 200, {"engines": found}


def _read(found: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    failed = [answer for answer in found if answer.get("error")]
    if not failed:
        return 200, {"engines": found}
    code = 503 if any(answer.get("silent") for answer in failed) else 500
    return code, {"error": str(failed[0]["error"]), "engines": found}


def _add_routes(app: Any) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, PlainTextResponse

    def engines_of(request: Any) -> Engines:
        found: Engines | None = getattr(request.app.state, "wakman", None)
        if found is None:
            raise Silent("the server is starting")
        return found

    def silent(exc: Exception) -> Any:
        return JSONResponse({"error": str(exc)}, 503)

    async def status(request: Request) -> Any:
        """How the eviction policy of each engine is chosen, and why."""
        try:
            code, body = await answer_status(engines_of(request))
        except Silent as exc:
            return silent(exc)
        return JSONResponse(body, code)

    async def history(request: Request) -> Any:
        """The switches of each engine, oldest first."""
        try:
            code, body = await answer_history(engines_of(request))
        except Silent as exc:
            return silent(exc)
        return JSONResponse(body, code)

    async def policy(request: Request) -> Any:
        """Hold a policy in every engine, or `auto`."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BYTES:
                break
        peer = request.client.host if request.client else "somebody"
        try:
            code, answer = await answer_policy(engines_of(request), bytes(body), peer)
        except Silent as exc:
            return silent(exc)
        return JSONResponse(answer, code)

    async def exposition(request: Request) -> Any:
        """The patch's metrics, asked of the engines at this moment."""
        try:
            found = await engines_of(request).ask("wakman_status")
        except Silent as exc:
            return PlainTextResponse(f"# {exc}\n", 503)
        page = metrics.text(metrics.families(found, time.time()))
        return PlainTextResponse(page, headers={"Content-Type": metrics.CONTENT_TYPE})

    routes: Mapping[str, tuple[Any, str]] = {
        "status": (status, "GET"),
        "history": (history, "GET"),
        "policy": (policy, "POST"),
        "metrics": (exposition, "GET"),
    }
    for name, (answer, method) in routes.items():
        app.add_api_route(f"{PATH}/{name}", answer, methods=[method], tags=["wakman"], response_model=None)
