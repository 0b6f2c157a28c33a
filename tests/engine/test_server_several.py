"""Two API servers over two data-parallel engines: every engine obeys and is listed, and nothing is counted twice."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.attached import mixed
from tests.engine.serving import Server, samples, serving

pytestmark = [pytest.mark.newest, pytest.mark.timeout(900)]
ASKED = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, {"VLLM_PLUGINS": "wakman"}, api_server_count=2, data_parallel_size=2) as found:
        yield found


def eventually(condition: Callable[[], Any], timeout_s: float = 60) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.1)
    return found


def test_an_order_reaches_every_engine(server: Server) -> None:
    """Whichever API server takes it, both engines switch; each connection is dealt to one of the two."""
    for policy in ("s3fifo", "arc", "lru", "s3fifo"):
        told = server.engines("policy", {"policy": policy, "reason": "a test", "actor": "mira"})
        assert [(one["engine"], one["ok"], one["to"]) for one in told] == [(0, True, policy), (1, True, policy)]
        for _ in range(ASKED):
            found = server.engines()
            assert [(one["engine"], one["policy"], one["attached"]) for one in found] == [
                (0, policy, True),
                (1, policy, True),
            ]
    assert len({one["pid"] for one in server.engines()}) == 2
    histories = server.engines("history")
    assert [[entry["to"] for entry in one["history"]] for one in histories] == [["s3fifo", "arc", "lru", "s3fifo"]] * 2


def test_metrics_count_each_engine_once(server: Server) -> None:
    """/metrics shows each engine's own numbers, the same at every API server, after requests at all of them."""
    for tokens in mixed(21, 8):
        assert server.complete(tokens, max_tokens=2)
    status = server.engines()
    eventually(lambda: total(server.metrics(), "0") == status[0]["switches"])
    for _ in range(ASKED):
        found = server.metrics()
        assert [total(found, engine) for engine in ("0", "1")] == [one["switches"] for one in status]
        assert [found[f'wakman_attached{{engine="{engine}"}}'] for engine in ("0", "1")] == [1, 1]
        assert found['wakman_policy{engine="0",policy="s3fifo"}'] == 1
        assert found['wakman_policy{engine="1",policy="lru"}'] == 0
        assert not any("pid=" in name for name in found if name.startswith("wakman_"))
    own = samples(server.ask("/v1/wakman/metrics")[1].decode())
    assert total(own, "1") == status[1]["switches"]


def total(found: dict[str, float], engine: str) -> float:
    of_it = f'engine="{engine}"'
    return sum(n for name, n in found.items() if name.startswith("wakman_switches_total{") and of_it in name)


def test_an_unknown_policy_reaches_no_engine(server: Server) -> None:
    """It is 400 with the known ones, and both engines stay."""
    before = [one["switches"] for one in server.engines()]
    assert server.ask("/v1/wakman/policy", {"policy": "lfu"})[0] == 400
    assert [one["switches"] for one in server.engines()] == before
    assert "Traceback" not in server.log


def test_an_engine_that_hangs_hides_no_other(server: Server) -> None:
    """While one engine stands still the answer is 503 after 10 s and has the other's status; then both answer again."""
    pid = server.engines()[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        code, body = server.ask("/v1/wakman/status")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert code == 503
    document = json.loads(body)
    there, silent = document["engines"]
    assert (there["engine"], there["attached"]) == (0, True)
    assert (silent["engine"], silent["silent"]) == (1, True)
    assert "engine 1 did not answer" in document["error"]
    eventually(lambda: server.ask("/v1/wakman/status")[0] == 200)
    assert server.complete([5, 6, 7])
