"""The load generator against a small server of our own: what it sends, what it measures, what it survives."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from replay.live import metric_sum, metric_values
from replay.player import PlayedRequest, Progress, play
from replay.workload import PlayRequest

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _event(document: object) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


FIRST = _event({"choices": [{"text": " one"}], "usage": None})
MORE = _event({"choices": [{"text": ' said "usage" and "error"'}], "usage": None})
USAGE = _event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 600, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 512}},
    }
)
DONE = b"data: [DONE]\n\n"


def _request(at_s: float = 0.0, key: str = "tenant-1") -> PlayRequest:
    return PlayRequest(at_s, key, 600, 3, (0, 1))


def _stream(*events: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-cacheroute-served": "e:1"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return answer


@asynccontextmanager
async def _server(answer: Answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


async def _play(answer: Answer, *requests: PlayRequest, timeout_s: float = 30.0) -> tuple[PlayedRequest, ...]:
    async with _server(answer) as url:
        return await play(requests, url, speed=1000.0, model="m", timeout_s=timeout_s)


async def test_sends_the_request_as_the_contract_says() -> None:
    """The request is a streamed completion with usage and its key in the header, its prompt exactly its tokens."""
    seen: list[tuple[str, dict[str, object]]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.headers["x-tenant-id"], await request.json()))
        return await _stream(FIRST, USAGE, DONE)(request)

    await _play(answer, _request())
    [(key, body)] = seen
    assert key == "tenant-1"
    assert body.pop("prompt") == _request().prompt()
    assert body == {
        "model": "m",
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_reads_tokens_and_who_served() -> None:
    """A good stream gives its token counts, the serving endpoint and times in their order."""
    [played] = await _play(_stream(_event({"choices": [{"text": ""}]}), FIRST, MORE, USAGE, DONE), _request())
    assert played.failure is None
    assert (played.status, played.served, played.key) == (200, "e:1", "tenant-1")
    assert (played.prompt_tokens, played.cached_tokens, played.completion_tokens) == (600, 512, 3)
    assert played.first_token_s is not None
    assert played.scheduled_s <= played.sent_s <= played.first_token_s <= played.end_s
    assert played.ttft_s == played.first_token_s - played.sent_s
    assert played.lag_s == played.sent_s - played.scheduled_s


async def test_no_details_means_nothing_cached() -> None:
    """A server that does not report cached tokens counts as having none."""
    usage = _event({"choices": [], "usage": {"prompt_tokens": 600, "completion_tokens": 3}})
    [played] = await _play(_stream(FIRST, usage, DONE), _request())
    assert (played.failure, played.cached_tokens) == (None, 0)


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ((FIRST, USAGE), "the stream ended before [DONE]"),
        ((USAGE, DONE), "the stream ended without a token"),
        ((FIRST, DONE), "the stream ended without usage"),
        ((FIRST, _event({"error": {"message": "no memory"}}), USAGE, DONE), "error in the stream: "),
        ((b"data: {broken\n\n",), "unreadable event: JSONDecodeError"),
        ((_event([1]),), "unreadable event: AttributeError"),
        ((FIRST, _event({"usage": {"prompt_tokens": 1}}), DONE), "unreadable event: KeyError"),
        ((_event({"choices": ["x"]}),), "unreadable event: AttributeError"),
    ],
)
async def test_bad_stream_fails_its_request_only(events: tuple[bytes, ...], failure: str) -> None:
    """A stream that is not whole fails its request with the reason, and the next request is played as usual."""
    answers = iter((_stream(*events), _stream(FIRST, USAGE, DONE)))

    async def answer(request: web.Request) -> web.StreamResponse:
        return await next(answers)(request)

    bad, good = await _play(answer, _request(0.0), _request(50.0))
    assert bad.failure is not None
    assert bad.failure.startswith(failure)
    assert bad.ttft_s is None
    assert good.failure is None


async def test_status_is_a_failure_with_its_words() -> None:
    """Another status than 200 fails the request and keeps what the server said."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no endpoint is ready")

    [played] = await _play(answer, _request())
    assert (played.status, played.failure) == (503, "status 503: no endpoint is ready")


async def test_reset_is_a_failure() -> None:
    """A connection that breaks in the middle of a stream fails the request."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(FIRST)
        assert request.transport is not None
        request.transport.abort()
        return response

    [played] = await _play(answer, _request())
    assert played.failure is not None
    assert played.ttft_s is None


async def test_refused_connection_is_a_failure(unused_tcp_port: int) -> None:
    """A gateway that is not there fails every request and raises nothing."""
    requests = [_request(), _request(1.0)]
    played = await play(requests, f"http://127.0.0.1:{unused_tcp_port}", speed=1000.0, model="m", timeout_s=5.0)
    assert all(one.failure and one.status is None for one in played)


async def test_request_that_does_not_end_is_given_up() -> None:
    """A request lasts `timeout_s` at most."""
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await _stream(FIRST)(request)
        await never.wait()
        return response

    async with _server(answer) as url:
        [played] = await play([_request()], url, speed=1.0, model="m", timeout_s=0.2)
        never.set()
    assert played.failure is not None
    assert played.failure.startswith("no end after")


async def test_loop_is_open() -> None:
    """Requests are sent at their times although none before them was answered, and results keep their order."""
    arrived: list[str] = []
    all_here = asyncio.Event()
    keys = [f"tenant-{i}" for i in range(20)]

    async def answer(request: web.Request) -> web.StreamResponse:
        arrived.append(request.headers["x-tenant-id"])
        if len(arrived) == len(keys):
            all_here.set()
        await all_here.wait()
        return await _stream(FIRST, USAGE, DONE)(request)

    progress = Progress()
    async with _server(answer) as url:
        requests = [_request(float(i), key) for i, key in enumerate(keys)]
        played = await play(requests, url, speed=1000.0, model="m", timeout_s=30.0, progress=progress)
    assert [one.key for one in played] == keys
    assert [one.scheduled_s for one in played] == [i / 1000 for i in range(20)]
    assert all(one.lag_s >= 0 and one.failure is None for one in played)
    assert (progress.total, progress.sent, progress.done, progress.failed) == (20, 20, 20, 0)
    assert (progress.prompt_tokens, progress.cached_tokens) == (20 * 600, 20 * 512)


async def test_cancelling_leaves_nothing() -> None:
    """Cancelling the player ends the requests in flight and leaves no task."""
    here, never = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        here.set()
        await never.wait()
        return web.Response()

    before = asyncio.all_tasks()
    async with _server(answer) as url:
        playing = asyncio.create_task(
            play([_request(), _request(1e9)], url, speed=1000.0, model="m", timeout_s=30.0), name="playing"
        )
        await here.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        never.set()
    assert asyncio.all_tasks() == before


def test_metrics_page_is_read_by_exact_name() -> None:
    """Samples of exactly the named metric are read, with or without labels."""
    page = (
        "# HELP hits_total Hits.\n"
        "# TYPE hits_total counter\n"
        'hits_total{reason="cold"} 3.0\n'
        'hits_total{reason="planned",x="a b"} 1e+06\n'
        "hits_total_created 17\n"
        "hits 5\n"
    )
    assert metric_values(page, "hits_total") == {'reason="cold"': 3.0, 'reason="planned",x="a b"': 1e6}
    assert metric_values(page, "hits") == {"": 5.0}
    assert metric_sum(page, "hits_total") == 1_000_003.0
    assert metric_sum(page, "absent") == 0.0
