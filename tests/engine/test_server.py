"""`vllm serve` with the endpoint plugin, one API server: orders under traffic, key, control file, metrics, spans."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine_patch.policy import POLICIES
from tests.engine.attached import mixed
from tests.engine.otlp import Collector
from tests.engine.serving import Server, samples, serving

pytestmark = [pytest.mark.newest, pytest.mark.timeout(900)]
KEY = "correct-horse"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def control_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control") / "wakman.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector, control_file: Path) -> Iterator[Server]:
    environ = {
        **collector.environment,
        "VLLM_PLUGINS": "wakman",
        "WAKMAN_CONTROL_FILE": str(control_file),
        "WAKMAN_INTERVAL_S": "1",
        "WAKMAN_DWELL_S": "0",
    }
    with serving(tmp_path_factory.mktemp("server"), environ, api_key=KEY) as found:
        yield found


def order(server: Server, policy: str, **more: str) -> dict[str, Any]:
    """Order a policy and return the only engine's answer."""
    (engine,) = server.engines("policy", {"policy": policy, **more})
    return engine


def eventually(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.1)
    return found


def test_the_key_guards_the_routes(server: Server) -> None:
    """Without the server's key nothing can be read or ordered; /metrics stays open as vLLM has it."""
    for path in ("status", "history", "metrics"):
        assert server.ask(f"/v1/wakman/{path}", headers={})[0] == 401
        assert server.ask(f"/v1/wakman/{path}", headers={"Authorization": "Bearer wrong"})[0] == 401
        assert server.ask(f"/v1/wakman/{path}")[0] == 200
    assert server.ask("/v1/wakman/policy", {"policy": "arc"}, headers={})[0] == 401
    assert server.engines()[0]["policy"] == "lru"
    assert server.ask("/metrics", headers={})[0] == 200


def test_requests_in_flight_go_on(server: Server) -> None:
    """Every policy is ordered while long and short requests run; each answer is the one of the quiet server."""
    prompts = mixed(11, 12)
    long = prompts[0][:100]
    wanted = {tuple(tokens): server.complete(tokens) for tokens in prompts}
    wanted_long = server.complete(long, max_tokens=600)
    ended = threading.Event()

    def client(number: int) -> int:
        count = 0
        while not ended.is_set():
            tokens = prompts[(number + count) % len(prompts)]
            assert server.complete(tokens) == wanted[tuple(tokens)]
            count += 1
        return count

    with ThreadPoolExecutor(4) as threads:
        clients = [threads.submit(client, number) for number in range(3)]
        try:
            in_flight = threads.submit(server.complete, long, 600)
            switched = 0
            for policy in (*POLICIES[1:], "lru", "s3fifo"):
                if in_flight.done():
                    assert in_flight.result() == wanted_long
                    in_flight = threads.submit(server.complete, long, 600)
                eventually(lambda: server.metrics()[running(server)] >= 2)
                told = order(server, policy, reason="a test", actor="mira")
                assert (told["ok"], told["to"], told["status"]["policy"]) == (True, policy, policy)
                switched += 1
            assert in_flight.result() == wanted_long
        finally:
            ended.set()  # The pool waits for its threads, also when something above failed.
        assert all(one.result() > 0 for one in clients)
    (status,) = server.engines()
    assert status["switches"] == switched
    assert (status["faults"], status["self_check_failures"]) == (0, 0)
    assert status["attached"]


def running(server: Server) -> str:
    return next(name for name in server.metrics() if name.startswith("vllm:num_requests_running{"))


def test_the_history_says_who_and_why(server: Server) -> None:
    """Each switch is there with cause, actor and reason; who names no actor is named by address."""
    order(server, "lru", reason="back", actor="mira")
    order(server, "arc")
    (engine,) = server.engines("history")
    last, before = engine["history"][-1], engine["history"][-2]
    assert (before["to"], before["cause"], before["actor"], before["why"]) == ("lru", "manual", "mira", "back")
    assert (last["from"], last["to"], last["actor"]) == ("lru", "arc", "http 127.0.0.1")
    assert abs(last["at"] - time.time()) < 600


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"policy": "lfu"}, 400, "unknown policy 'lfu'; there are auto, lru"),
        ({}, 400, "'policy' is missing"),
        ({"policy": ["arc"]}, 400, "not a string"),
        ({"policy": "arc", "raeson": "?"}, 400, "unknown field"),
        (b"policy=arc", 400, "not JSON"),
        (b"", 400, "not JSON"),
        (b"\xff" * 100, 400, "not JSON"),
        (b" " * 20_000, 413, "more than"),
    ],
)
def test_an_order_that_is_none_changes_nothing(server: Server, body: Any, code: int, words: str) -> None:
    """It is answered in words; an unknown policy with the known ones."""
    before = server.engines()[0]
    found, answer = server.ask("/v1/wakman/policy", body)
    assert (found, code) == (code, found), answer
    assert words in json.loads(answer)["error"]
    if "unknown policy" in words:
        assert json.loads(answer)["policies"] == ["auto", *POLICIES, "off"]
    after = server.engines()[0]
    assert (after["policy"], after["mode"], after["switches"]) == (before["policy"], before["mode"], before["switches"])


def test_wrong_methods_are_vllms_own_answer(server: Server) -> None:
    """A GET of the order's route and a POST of the status are 405."""
    assert server.ask("/v1/wakman/policy")[0] == 405
    assert server.ask("/v1/wakman/status", {})[0] == 405


def test_metrics_with_one_api_server(server: Server) -> None:
    """vLLM's /metrics shows what the engine says a few seconds later, as /v1/wakman/metrics does at once."""
    for tokens in mixed(12, 20):
        server.complete(tokens, max_tokens=2)
    order(server, "s3fifo")
    page = samples(server.ask("/v1/wakman/metrics")[1].decode())
    assert page['wakman_policy{engine="0",policy="s3fifo"}'] == 1
    eventually(lambda: server.metrics().get('wakman_policy{engine="0",policy="s3fifo"}') == 1)
    found = server.metrics()
    assert found['wakman_attached{engine="0"}'] == 1
    assert found['wakman_shadow_up{engine="0"}'] == 1
    assert found['wakman_automatic{engine="0"}'] == 0
    (status,) = server.engines()
    eventually(lambda: switches(server.metrics()) == status["switches"])
    # The shadow decides every second in this test.
    eventually(lambda: 'wakman_shadow_hit_rate{engine="0",policy="arc"}' in server.metrics())
    eventually(lambda: any(name.startswith("wakman_decisions_total{") for name in server.metrics()))
    assert server.engines()[0]["last_decision"]["text"]


def switches(found: dict[str, float]) -> float:
    return sum(number for name, number in found.items() if name.startswith("wakman_switches_total{"))


def test_the_control_file_over_http(server: Server, control_file: Path) -> None:
    """A file written now outranks the order before it, a later order outranks the file; nonsense is ignored."""
    order(server, "lru", reason="before")
    write(control_file, {"policy": "arc", "reason": "scans", "actor": "helm"})
    eventually(lambda: server.engines()[0]["policy"] == "arc")
    order(server, "s3fifo", reason="after")
    time.sleep(2.5)
    assert server.engines()[0]["policy"] == "s3fifo"
    write(control_file, {"policy": "lfu"})
    file = eventually(lambda: (f := server.engines()[0]["control_file"])["state"] == "ignored" and f)
    assert "unknown policy" in file["why"]
    assert file["obeyed"]["policy"] == "arc"
    assert server.engines()[0]["policy"] == "s3fifo"
    eventually(lambda: server.metrics().get('wakman_control_file_ignored_total{engine="0"}') == 1)


def write(path: Path, content: object) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content))
    new.chmod(0o644)
    new.rename(path)


def test_every_switch_was_a_span(server: Server, collector: Collector) -> None:
    """The collector got one span a switch, from the engine's process, with the attributes of the history."""
    order(server, "lru")
    (engine,) = server.engines("history")
    switches = [
        (entry["from"], entry["to"], entry["cause"]) for entry in engine["history"] if entry["cause"] != "start"
    ]
    eventually(lambda: len(collector.spans) >= len(switches))
    sent = [tuple(span["attributes"][f"wakman.{name}"] for name in ("from", "to", "cause")) for span in collector.spans]
    assert sent == switches
    assert {span["name"] for span in collector.spans} == {"wakman_switch"}
    (status,) = server.engines()
    assert collector.spans[0]["resource"]["process.pid"] == status["pid"]
    assert (status["spans"]["on"], status["spans"]["failed"], status["spans"]["dropped"]) == (True, 0, 0)


def test_off_and_no_way_back(server: Server) -> None:
    """The last order, `off`: refused orders afterwards are 409 with the status, requests are served, metrics say 0."""
    tokens = mixed(13, 1)[0]
    wanted = server.complete(tokens)
    assert order(server, "off", reason="an incident", actor="mira")["ok"]
    code, answer = server.ask("/v1/wakman/policy", {"policy": "arc"})
    assert code == 409
    (engine,) = json.loads(answer)["engines"]
    assert engine["ok"] is False
    assert "an incident" in engine["status"]["reason"]
    assert server.complete(tokens) == wanted
    eventually(lambda: server.metrics()['wakman_attached{engine="0"}'] == 0)
    assert server.metrics()['wakman_policy{engine="0",policy="lru"}'] == 0
    assert "Traceback" not in server.log
