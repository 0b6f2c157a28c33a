"""Plays requests against an OpenAI-compatible gateway at their times, whatever the gateway does: an open loop.

1. A request is sent at start + at_s / speed, answered or not those before it. A generator that cannot keep up sends
   late; `PlayedRequest.lag_s` says by how much, and TTFT counts from the time at which it was really sent.
2. Prompts stream back as server-sent events; the first event with text is the first token, the last event with `usage`
   gives the token counts.
3. A request fails when its status is not 200, its stream breaks, says `error`, ends without `[DONE]`, usage or a token,
   or lasts longer than `timeout_s`. A failed request never stops the others.
4. Cancelling `play` (Ctrl-C) closes all requests in flight and leaves no task behind.

Seconds here are wall seconds from the start of the pass; engine seconds are these times `speed`.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

KEY_HEADER = "x-tenant-id"
SERVED_HEADER = "x-cacheroute-served"
CONNECT_TIMEOUT_S = 10.0
LINE_BYTES_MAX = 1 << 20


class Playable(Protocol):
    """A request to be sent: engine seconds from the start, key, most tokens of the answer, and its text."""

    @property
    def at_s(self) -> float: ...

    @property
    def key(self) -> str: ...

    @property
    def output_tokens(self) -> int: ...

    def prompt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlayedRequest:
    """What became of one request; times in wall seconds from the start of the pass, None: it never came to that."""

    key: str
    scheduled_s: float
    sent_s: float
    first_token_s: float | None
    end_s: float
    status: int | None
    failure: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    served: str | None

    @property
    def lag_s(self) -> float:
        """How late it was sent: the generator's own delay, no engine's."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time from sending to the first token; None when the request failed, whatever had come before."""
        return None if self.failure or self.first_token_s is None else self.first_token_s - self.sent_s


@dataclass(slots=True)
class Progress:
    """Counts of a pass while it runs, for whoever watches; `play` is the only writer."""

    total: int = 0
    sent: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    played: list[PlayedRequest] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Requests that ended, failed ones included."""
        return len(self.played)

    def add(self, result: PlayedRequest) -> None:
        """Count a request that ended."""
        self.played.append(result)
        self.failed += result.failure is not None
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens


async def play(
    requests: Sequence[Playable],
    gateway_url: str,
    *,
    speed: float,
    model: str,
    timeout_s: float,
    progress: Progress | None = None,
) -> tuple[PlayedRequest, ...]:
    """Send every request at its time and return what became of each, in the order of `requests`.

    gateway_url: scheme, host and port.  speed: engine seconds per wall second.  timeout_s: wall seconds that a request
    may last.  progress: updated as requests are sent and end.  Never raises for a request's sake.
    """
    watched = progress or Progress()
    watched.total = len(requests)
    # A limit or a shared deadline would turn the open loop into a closed one.
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(
            gateway_url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout, read_bufsize=LINE_BYTES_MAX
        ) as client,
        asyncio.TaskGroup() as running,
    ):
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        tasks: list[asyncio.Task[PlayedRequest]] = []
        for request in requests:
            scheduled_s = request.at_s / speed
            body = _body(request, model)  # made while there is time: a long prompt takes milliseconds
            await asyncio.sleep(max(0.0, start_s + scheduled_s - loop.time()))
            tasks.append(running.create_task(_play_one(client, request, body, scheduled_s, start_s, watched)))
    return tuple(task.result() for task in tasks)


@dataclass(slots=True)
class _Reading:
    """What a stream has said so far."""

    first_token_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None
    complete: bool = False


def _body(request: Playable, model: str) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": request.prompt(),
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def _play_one(
    client: aiohttp.ClientSession,
    request: Playable,
    body: bytes,
    scheduled_s: float,
    start_s: float,
    progress: Progress,
) -> PlayedRequest:
    loop = asyncio.get_running_loop()
    headers = {KEY_HEADER: request.key, "content-type": "application/json"}
    reading = _Reading()
    status: int | None = None
    served: str | None = None
    failure: str | None = None
    progress.sent += 1
    sent_s = loop.time() - start_s
    try:
        async with client.post("/v1/completions", data=body, headers=headers) as response:
            status, served = response.status, response.headers.get(SERVED_HEADER)
            if status == 200:
                async for line in response.content:
                    _read_line(line, reading, loop.time() - start_s)
                failure = _fault(reading)
            else:
                failure = f"status {status}: {(await response.content.read(200)).decode(errors='replace').strip()}"
    except TimeoutError:
        failure = f"no end after {loop.time() - start_s - sent_s:.1f} s"
    except (aiohttp.ClientError, OSError) as exc:
        failure = f"{type(exc).__name__}: {exc}"
    except (ValueError, LookupError, TypeError, AttributeError) as exc:
        # An answer of another shape than OpenAI's fails its own request, not the pass.
        failure = f"unreadable event: {type(exc).__name__}: {exc}"
    result = PlayedRequest(
        key=request.key,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        first_token_s=reading.first_token_s,
        end_s=loop.time() - start_s,
        status=status,
        failure=failure,
        prompt_tokens=reading.prompt_tokens,
        cached_tokens=reading.cached_tokens,
        completion_tokens=reading.completion_tokens,
        served=served,
    )
    progress.add(result)
    return result


def _read_line(line: bytes, reading: _Reading, now_s: float) -> None:
    """Take one line of the stream; only the few lines that say something new are parsed."""
    if not line.startswith(b"data:"):
        return
    payload = line[5:].strip()
    if payload == b"[DONE]":
        reading.complete = True
        return
    if reading.first_token_s is not None and b'"usage"' not in payload and b'"error"' not in payload:
        return
    document = json.loads(payload)
    if document.get("error"):
        reading.error = json.dumps(document["error"])[:200]
    if usage := document.get("usage"):
        reading.prompt_tokens = int(usage["prompt_tokens"])
        reading.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        reading.completion_tokens = int(usage["completion_tokens"])
    if reading.first_token_s is None and any(choice.get("text") for choice in document.get("choices") or ()):
        reading.first_token_s = now_s


def _fault(reading: _Reading) -> str | None:
    if reading.error:
        return f"error in the stream: {reading.error}"
    if not reading.complete:
        return "the stream ended before [DONE]"
    if reading.first_token_s is None:
        return "the stream ended without a token"
    return None if reading.prompt_tokens else "the stream ended without usage"
