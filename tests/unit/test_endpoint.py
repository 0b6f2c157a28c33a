"""How the endpoint plugin reaches the engines of every vLLM it supports, and what it says when they do not answer."""

import asyncio
from typing import Any

import pytest

from engine_patch import endpoint, metrics
from engine_patch.endpoint import Engines, Silent, WakmanEndpoint, answer_policy, answer_status, export


class Client:
    """A client of several engines, as vLLM 0.26 to 0.32 have it; an answer that is an exception is raised."""

    client_index = 0

    def __init__(self, *answers: Any) -> None:
        self.core_engines = [n.to_bytes(2, "little") for n in range(len(answers))]
        self.answers = dict(zip(self.core_engines, answers, strict=True))
        self.calls: list[tuple[str, ...]] = []

    async def _call_utility_async(self, method: str, *arguments: str, engine: bytes) -> Any:
        self.calls.append((method, *arguments))
        if isinstance(self.answers[engine], BaseException):
            raise self.answers[engine]
        return self.answers[engine]

    async def call_utility_async(self, method: str, *arguments: str) -> Any:
        raise AssertionError("answers for the first engine only")


class OneClient:
    """A client that knows of one engine."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def call_utility_async(self, method: str, *arguments: str) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Holder:
    """An `EngineClient`."""

    def __init__(self, core: Any) -> None:
        self.engine_core = core


def engines(core: Any) -> Engines:
    return Engines(Holder(core))


STATUS = {"engine": 0, "attached": True, "policy": "lru", "mode": "auto"}


async def test_every_engine_is_asked() -> None:
    """Each data-parallel engine is called once and listed; a client that knows of one engine has one."""
    core = Client(STATUS, {**STATUS, "engine": 1})
    code, body = await answer_status(engines(core))
    assert (code, [one["engine"] for one in body["engines"]]) == (200, [0, 1])
    assert core.calls == [("wakman_status",)] * 2
    one = await engines(OneClient(STATUS)).ask("wakman_status")
    assert one == [STATUS]


async def test_an_order_names_its_actor_or_where_it_came_from() -> None:
    """Policy, actor and reason reach the engine in this order; who names no actor is known by address."""
    core = Client({"engine": 0, "ok": True, "error": None})
    for body in (b'{"policy": "arc", "actor": "mira", "reason": "scans"}', b'{"policy": "lru"}'):
        assert (await answer_policy(engines(core), body, "10.0.0.7"))[0] == 200
    assert core.calls == [
        ("wakman_set_policy", "arc", "mira", "scans"),
        ("wakman_set_policy", "lru", "http 10.0.0.7", ""),
    ]


async def test_a_body_that_is_none_reaches_no_engine() -> None:
    """What is no order, or longer than any can be, is refused here."""
    core = Client(STATUS)
    for body, code in ((b"policy=arc", 400), (b'{"policy": ""}', 400), (b" " * 20_000 + b'{"policy": "arc"}', 413)):
        found, answer = await answer_policy(engines(core), body, "")
        assert found == code
        assert answer["error"]
    assert core.calls == []


async def test_one_engine_of_two_refuses() -> None:
    """The answer is 409, says how many, and lists what each did."""
    core = Client({"engine": 0, "ok": True, "error": None}, {"engine": 1, "ok": False, "error": "not attached: x"})
    code, body = await answer_policy(engines(core), b'{"policy": "arc"}', "")
    assert (code, body["error"]) == (409, "1 of 2 engines refused: not attached: x")
    assert [one["ok"] for one in body["engines"]] == [True, False]


async def test_one_engine_of_two_is_silent() -> None:
    """The answer is 503 and has what the other says; its metrics go on; an order to both may yet be obeyed by it."""
    core = Client(STATUS, RuntimeError("dead"))
    code, body = await answer_status(engines(core))
    assert (code, body["error"]) == (503, "RuntimeError: dead")
    assert body["engines"] == [STATUS, {"engine": 1, "silent": True, "error": "RuntimeError: dead"}]
    page = metrics.text(metrics.families(body["engines"], 1.0))
    assert 'wakman_attached{engine="0"} 1.0' in page
    assert 'engine="1"' not in page
    code, body = await answer_policy(engines(core), b'{"policy": "arc"}', "")
    assert code == 503
    assert "may obey yet" in body["error"]
    assert body["engines"][0] == STATUS


@pytest.mark.parametrize(
    ("core", "words"),
    [
        (None, "no engine behind this server"),
        (OneClient(RuntimeError("EngineCore encountered an issue")), "RuntimeError: EngineCore encountered an issue"),
        (OneClient(Exception("'EngineCoreProc' object has no attribute 'wakman_status'")), "has not loaded the patch"),
    ],
)
async def test_a_silent_engine_is_503(core: Any, words: str) -> None:
    """A server without an engine, a dead one, one without the patch: each is said; an order may yet be obeyed."""
    with pytest.raises(Silent, match=words):
        await engines(core).ask("wakman_status")
    code, body = await answer_policy(engines(core), b'{"policy": "arc"}', "")
    assert code == 503
    assert words in body["error"]


class Hangs:
    """A client whose engine never answers; `given_up` once nobody waits for it any more."""

    def __init__(self) -> None:
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()

    async def call_utility_async(self, method: str, *arguments: str) -> Any:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()


async def test_an_engine_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `ANSWER_S` the call is given up, and ended."""
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.01)
    core = Hangs()
    with pytest.raises(Silent, match=r"engine 0 did not answer within 0\.01 s"):
        await engines(core).ask("wakman_status")
    await asyncio.wait_for(core.given_up.wait(), 20)


async def test_a_client_that_goes_takes_its_call_along() -> None:
    """Whoever asked and went (an HTTP client that closed its connection) leaves no call behind."""
    core = Hangs()
    asking = asyncio.create_task(engines(core).ask("wakman_status"))
    await core.asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(core.given_up.wait(), 20)


class EngineDeadError(Exception):
    """As vLLM's is called."""


async def test_a_dead_engine_is_called_dead() -> None:
    """vLLM's own sentence points at a stack trace above it, which who asks does not see."""
    dead = EngineDeadError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    code, body = await answer_status(engines(Client(STATUS, dead)))
    assert (code, body["error"]) == (503, "engine 1 has died; the server's log says of what")


class OldTimeoutError(Exception):
    """As `asyncio.TimeoutError` is up to Python 3.10: no child of the built-in one."""


OldTimeoutError.__name__ = "TimeoutError"


@pytest.mark.parametrize("kind", [TimeoutError, OldTimeoutError])
async def test_a_timeout_of_vllms_own_is_not_taken_for_ours(kind: type[Exception]) -> None:
    """On every Python a call that raises some TimeoutError at once is told as it is, not as ten seconds of silence."""
    for error, words in ((kind(), "TimeoutError"), (kind("no reply"), "TimeoutError: no reply")):
        code, body = await answer_status(engines(Client(STATUS, error)))
        assert (code, body["error"]) == (503, words)


async def test_an_answer_that_is_none_is_a_fault_of_that_engine() -> None:
    """What is no dictionary, or says error, is 500 with all answers; it is no exception."""
    for told in (None, {"engine": 0, "error": "RuntimeError: broken"}):
        code, body = await answer_status(engines(OneClient(told)))
        assert code == 500
        assert body["error"]
        assert len(body["engines"]) == 1


async def test_metrics_follow_and_rest_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `ASK_S` the exporter gets what the engines say; while they fail, the waits double up to `ASK_RARELY_S`."""
    waits: list[float] = []
    shown: list[list[metrics.Family]] = []
    core = OneClient(STATUS)

    class Exporter:
        def show(self, found: list[metrics.Family]) -> None:
            shown.append(found)

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        core.answer = RuntimeError("dead") if 2 <= len(waits) < 12 else STATUS
        if len(waits) == 14:
            raise asyncio.CancelledError

    monkeypatch.setattr(endpoint.asyncio, "sleep", sleep)
    exporter: Any = Exporter()
    with pytest.raises(asyncio.CancelledError):
        await export(engines(core), exporter)
    assert waits[:2] == [endpoint.ASK_S] * 2
    assert waits[2:4] == [2 * endpoint.ASK_S, 4 * endpoint.ASK_S]
    assert waits[11] == endpoint.ASK_RARELY_S
    assert waits[12:] == [endpoint.ASK_S] * 2
    assert len(shown) == 4


async def test_only_the_first_api_server_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several API servers one writes metrics, and a server without an engine none; all of them answer."""
    made: list[int] = []
    monkeypatch.setattr(metrics, "Exporter", lambda: made.append(1))
    monkeypatch.setattr(endpoint, "export", lambda *_: asyncio.sleep(0))

    class State:
        wakman: Any = None

    for index in (0, 1, 2):
        core = Client(STATUS)
        core.client_index = index
        state = State()
        await WakmanEndpoint().init_state(Holder(core), state, None)
        assert state.wakman.client_index == index
    await WakmanEndpoint().init_state(None, State(), None)
    assert made == [1]


async def test_nothing_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that takes no routes, or metrics that cannot be registered, leave the server to start without."""

    def fails(*_: Any) -> Any:
        raise ValueError("Duplicated timeseries")

    class App:
        add_api_route = fails

    class State:
        wakman: Any = None

    monkeypatch.setattr(metrics, "Exporter", fails)
    plugin = WakmanEndpoint()
    plugin.attach_router(App())
    state = State()
    await plugin.init_state(Holder(Client(STATUS)), state, None)
    assert (await answer_status(state.wakman))[0] == 200
    assert (plugin.name, plugin.required_tasks) == ("wakman", None)
