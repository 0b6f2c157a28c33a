"""Auto mode on a live engine with its real shadow process: it switches by itself and outlives its shadow's bad days."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from engine_patch.attachment import Attachment
from tests.engine.attached import answers, attached, environment, hot_hit_rate, mixed, outputs

Engines = Callable[..., Any]
PATIENCE_S = 180


@pytest.fixture(scope="module")
def llm(engines: Engines) -> Any:
    """An engine that decides every second."""
    quick = {"WAKMAN_INTERVAL_S": "1", "WAKMAN_DWELL_S": "0", "WAKMAN_MARGIN": "0.005", "WAKMAN_SELF_CHECK_S": "0.5"}
    with pytest.MonkeyPatch.context() as patch, environment(patch, **quick):
        return engines()


def serve_until(llm: Any, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Serve hot prefixes between one-off prompts until the status is as wanted; return it."""
    ends = time.monotonic() + PATIENCE_S
    while True:
        outputs(llm, mixed(11, 30))
        status = there(llm).status()
        if reached(status):
            return status
        assert status["attached"], status["reason"]
        assert time.monotonic() < ends, status


def there(llm: Any) -> Attachment:
    return attached(llm)


def test_auto_switches_where_another_policy_hits_more(llm: Any) -> None:
    """Hot prefixes between one-off prompts: the engine leaves LRU by itself, hits more, and its shadow is exact."""
    before = hot_hit_rate(outputs(llm, mixed(11, 30)))
    status = serve_until(llm, lambda status: status["policy"] != "lru")
    (entry,) = there(llm).history()[:1]
    assert (entry["from"], entry["to"], entry["cause"], entry["actor"]) == ("lru", status["policy"], "auto", "switcher")
    rates = entry["rates"]
    assert rates[entry["to"]] > rates["lru"] + 0.005
    assert entry["why"] == entry["decision"]["text"]
    status = serve_until(llm, lambda now: now["last_decision"]["live"] != "lru")
    assert abs(status["residual"]) < 0.01
    outputs(llm, mixed(11, 30))
    assert hot_hit_rate(outputs(llm, mixed(11, 30))) > before
    assert (status["faults"], status["self_check_failures"], status["drops"]) == (0, 0, 0)
    assert status["self_checks"] > 1


def test_a_manual_policy_stops_the_switcher(llm: Any) -> None:
    """Held by hand the policy stays, whatever the shadow says; auto takes over again."""
    assert there(llm).set_mode("lru", "test", "hold")["ok"]
    heard = there(llm).status()["shadow"]["decisions"]
    status = serve_until(llm, lambda now: now["shadow"]["decisions"] > heard + 2)
    assert (status["policy"], status["mode"]) == ("lru", "lru")
    assert there(llm).set_mode("auto", "test", "go on")["ok"]
    assert serve_until(llm, lambda now: now["policy"] != "lru")["mode"] == "auto"


def test_a_killed_shadow_is_started_again(llm: Any) -> None:
    """The engine serves on with the live policy, the status says that the shadow is down, and a new one decides."""
    policy, shadow = there(llm).status()["policy"], there(llm).status()["shadow"]
    os.kill(shadow["pid"], signal.SIGKILL)
    # Pid reuse aside the same number is never up again; the next one is.
    status = serve_until(llm, lambda now: now["shadow"]["starts"] > shadow["starts"] and now["shadow"]["up"])
    assert status["shadow"]["pid"] != shadow["pid"]
    assert status["policy"] == policy
    heard = status["shadow"]["decisions"]
    serve_until(llm, lambda now: now["shadow"]["decisions"] > heard)


def test_a_stopped_shadow_holds_nobody_up(llm: Any) -> None:
    """A shadow that reads nothing makes events wait, then drop; requests are answered as before."""
    stock = answers(llm, mixed(21, 30))
    pid = there(llm).status()["shadow"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            assert answers(llm, mixed(21, 30)) == stock
        assert there(llm).attached
    finally:
        os.kill(pid, signal.SIGCONT)
    heard = there(llm).status()["shadow"]["decisions"]
    serve_until(llm, lambda now: now["shadow"]["decisions"] > heard)


def test_the_shadow_ends_with_the_attachment(llm: Any) -> None:
    """Detached, the process is gone."""
    pid = there(llm).status()["shadow"]["pid"]
    there(llm).detach("test")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    answers(llm, mixed(21, 5))
