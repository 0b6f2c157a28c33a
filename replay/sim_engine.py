"""One simulated vLLM: an OpenAI-compatible HTTP server over the engine model, `speed` times faster than the real thing.

1. Virtual time is wall time since the start times `speed`. The model is advanced when a request comes or goes, when
   metrics are read, and by one timer set to the model's next first token or end: an idle engine does nothing.
2. A streamed answer is opened at once; its first token is sent when it is there, later ones together every
   `stream_interval_s` of wall time, the last ones at the end.
3. A client that goes away ends its request. SIGTERM: no new connection, requests in flight get `drain_s` to end.
4. Answers have exactly `max_tokens` tokens, cut out of one text made from the seed at a place that the prompt decides:
   equal prompts get equal answers from every engine of equal seed.
5. It evicts KV blocks by LRU, by another policy, or by that which the engine patch's switcher picks (`auto`), and is
   steered under `/v1/wakman` as a vLLM with the patch is. The switcher's times are virtual.
"""

import asyncio
import contextlib
import errno
import json
import random
import signal
import sys
import time

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from engine_patch.settings import AUTO, EngineSettings
from replay import sim_wakman
from replay.block_cache import chain_hashes
from replay.block_watch import BlockWatch
from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest, RequestState
from replay.engine_switch import VERSION, EngineSwitch
from replay.openai_api import (
    DONE,
    TOKEN_BYTES,
    Answer,
    Ask,
    Usage,
    error_document,
    model_document,
    models_document,
    parse,
)
from replay.presets import find_preset
from replay.sim_engine_settings import SimEngineSettings
from replay.sim_metrics import SimMetrics
from service.errors import InvalidInput
from service.settings import split_address

WORDS = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "who boy did its let put say she too use dad mom big end far few got own run sea sun top war yes air arm art ask "
    "bag bar bed bit box bus buy car cat cow cry cup cut dog dry due ear eat egg eye fan fat fit fly fun gas gun hat "
)
PASSAGE_TOKENS = 1 << 16
BODY_LIMIT_BYTES = 64 << 20


class _Call:
    """A request in flight: its state in the model, and how its handler learns of news."""

    __slots__ = ("finished", "first", "state")

    def __init__(self, state: RequestState, loop: asyncio.AbstractEventLoop) -> None:
        self.state = state
        self.first: asyncio.Future[None] = loop.create_future()
        self.finished: asyncio.Future[None] = loop.create_future()


class SimEngine:
    """Drives an engine model by the wall clock and answers HTTP; one per event loop."""

    def __init__(self, settings: SimEngineSettings) -> None:
        preset = find_preset(settings.preset)
        self.settings = settings
        self.engine = EngineModel(
            preset,
            settings.kv_blocks,
            settings.block_size,
            settings.max_batched_tokens,
            settings.max_seqs,
            "lru" if settings.eviction_policy == AUTO else settings.eviction_policy,
        )
        self.switch = EngineSwitch(
            self.engine.cache,
            EngineSettings(
                policy=settings.eviction_policy,
                preset=settings.eviction_preset,
                interval_s=settings.eviction_interval_s or 0.0,
                dwell_s=settings.eviction_interval_s or EngineSettings.dwell_s,
            ),
        )
        self.engine.follower = self.switch
        self.metrics = SimMetrics(
            self.engine, settings.model, settings.name, settings.speed, kv_cache_metrics=settings.kv_cache_metrics
        )
        if settings.kv_cache_metrics:
            self.engine.cache.watch = BlockWatch(
                settings.kv_cache_metrics_sample, self.metrics.observe_eviction, random.Random(settings.seed)
            )
        self.max_model_len = min(settings.max_model_len or preset.max_model_len, self.engine.capacity_tokens)
        self._passage = "".join(
            f"{word} " for word in random.Random(settings.seed).choices(WORDS.split(), k=PASSAGE_TOKENS)
        )
        self._fingerprint = f"cacheroute-sim-{settings.name}"
        self._created_s = int(time.time())
        self._calls: dict[str, _Call] = {}
        self._serial = 0
        self._loop = asyncio.get_running_loop()
        self._start_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._wakman = sim_wakman.OneEngine(self.switch, self._advance)

    def now_s(self) -> float:
        """Return the virtual time."""
        return (self._loop.time() - self._start_s) * self.settings.speed

    def application(self) -> web.Application:
        """Return the routes."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/reset_prefix_cache", self._reset),
                *sim_wakman.routes(self._wakman),
            ]
        )
        return app

    def close(self) -> None:
        """Stop the timer and the switcher's spans."""
        if self._timer is not None:
            self._timer.cancel()
        self.switch.control.close()

    def _advance(self) -> None:
        """Bring the model up to now, tell the handlers, and set the timer to what comes next."""
        for state in self.engine.advance(self.now_s()):
            call = self._calls.get(state.request.request_id)
            if call is None:
                continue
            if not call.first.done():
                self.metrics.observe_first_token(state)
                call.first.set_result(None)
            if state.status == "finished" and not call.finished.done():
                self.metrics.observe_finish(state)
                call.finished.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        next_s = self.engine.next_event_s()
        self._timer = (
            None if next_s is None else self._loop.call_at(self._start_s + next_s / self.settings.speed, self._advance)
        )

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, chat=True)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, chat=False)

    async def _answer(self, http: web.Request, chat: bool) -> web.StreamResponse:
        try:
            ask = parse(await http.read(), chat)
            if ask.model not in ("", self.settings.model):
                return _error(404, f"The model `{ask.model}` does not exist.", "model")
            self._check_length(ask)
        except InvalidInput as exc:
            return _error(400, str(exc))
        self._serial += 1
        request_id = f"{self.settings.name}-{self._serial}"
        prompt_tokens = len(ask.tokens) // TOKEN_BYTES
        start = xxhash.xxh3_64_intdigest(ask.tokens, self.settings.seed)
        text = self._text(start, ask.max_tokens)
        hashes = chain_hashes(ask.tokens + text.encode(), self.settings.block_size)
        state = self.engine.submit(EngineRequest(request_id, prompt_tokens, ask.max_tokens, hashes), self.now_s())
        call = self._calls[request_id] = _Call(state, self._loop)
        self._advance()
        answer = Answer(ask, request_id, self.settings.model, int(time.time()), self._fingerprint)
        try:
            if ask.stream:
                return await self._stream(http, ask, call, answer, text)
            await call.finished
            return web.json_response(answer.whole(text, _usage(state)))
        finally:
            del self._calls[request_id]
            if state.finished_s is None:
                self.engine.abort(request_id, self.now_s())
                self.metrics.observe_abort()
                self._advance()

    async def _stream(self, http: web.Request, ask: Ask, call: _Call, answer: Answer, text: str) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        # A client that hung up is no fault of ours; leaving this function ends the request.
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(http)
            await call.first
            sent = 0
            while True:
                last = call.finished.done()
                upto = call.state.generated
                if upto > sent or last:
                    event = answer.chunk(text[sent * TOKEN_BYTES : upto * TOKEN_BYTES], first=not sent, last=last)
                    sent = upto
                    if last:
                        break
                    await response.write(event)
                await asyncio.wait((call.finished,), timeout=self.settings.stream_interval_s)
                if not call.finished.done():
                    self._advance()
            if ask.include_usage:
                event += answer.usage_chunk(_usage(call.state))
            await response.write(event + DONE)
            await response.write_eof()
        return response

    def _check_length(self, ask: Ask) -> None:
        prompt_tokens = len(ask.tokens) // TOKEN_BYTES
        if prompt_tokens + ask.max_tokens > self.max_model_len:
            raise InvalidInput(
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{ask.max_tokens} output tokens and your prompt contains {prompt_tokens} input tokens",
                "reduce the length of the prompt or max_tokens",
            )

    def _text(self, start: int, tokens: int) -> str:
        """Return that many tokens of the passage, read from `start` on and round again."""
        first = start % PASSAGE_TOKENS
        rounds = (first + tokens) // PASSAGE_TOKENS + 1
        passage = self._passage if rounds == 1 else self._passage * rounds
        return passage[first * TOKEN_BYTES : (first + tokens) * TOKEN_BYTES]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(models_document(self.settings.model, self._created_s, self.max_model_len))

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name != self.settings.model:
            return _error(404, f"The model `{name}` does not exist.", "model")
        return web.json_response(model_document(name, self._created_s, self.max_model_len))

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics(self, _: web.Request) -> web.Response:
        self._advance()
        body = self.metrics.render() + await sim_wakman.page(self._wakman)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _reset(self, _: web.Request) -> web.Response:
        self._advance()
        self.engine.reset_prefix_cache()
        return web.Response()


def _usage(state: RequestState) -> Usage:
    return Usage(state.request.prompt_tokens, state.generated, state.cached_tokens)


def _error(status: int, message: str, param: str | None = None) -> web.Response:
    return web.json_response(error_document(status, message, param), status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as exc:
        return _error(exc.status, exc.text or exc.reason)


async def serve(settings: SimEngineSettings, stop: asyncio.Event | None = None) -> None:
    """Serve until SIGTERM, SIGINT or `stop`; one JSON line on standard error tells the address once it listens.

    Raises InvalidInput when the address cannot be listened on.
    """
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine = SimEngine(settings)
    runner = web.AppRunner(
        engine.application(), access_log=None, handler_cancellation=True, shutdown_timeout=settings.drain_s
    )
    await runner.setup()
    try:
        host, port = split_address(settings.listen)
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as exc:
            reason = "the port is in use" if exc.errno == errno.EADDRINUSE else exc.strerror or str(exc)
            raise InvalidInput(
                f"--listen {settings.listen}: {reason}", "stop what listens there or choose another address"
            ) from exc
        host, port = runner.addresses[0][:2]
        line = {"event": "listening", "engine": settings.name, "address": f"{host}:{port}", "preset": settings.preset}
        print(json.dumps(line), file=sys.stderr, flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
        engine.close()


def run(settings: SimEngineSettings) -> None:
    """Serve in an event loop of its own; returns after SIGTERM or SIGINT."""
    asyncio.run(serve(settings))
