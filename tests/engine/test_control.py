"""Orders to a real engine in this process: methods of `EngineCore`, the control file under traffic, refusals."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from engine_patch import plugin
from engine_patch.control import METHODS, install
from engine_patch.policy import POLICIES
from tests.engine.attached import answers, environment, mixed, queue_of

Engines = Callable[..., Any]


def core_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def called(llm: Any, method: str, *arguments: str) -> dict[str, Any]:
    """Call as vLLM's own utility dispatch does: by name, arguments converted by the method's signature."""
    found = getattr(core_of(llm), method)
    answer: dict[str, Any] = found(*EngineCoreProc._convert_msgspec_args(found, arguments))
    json.dumps(answer, allow_nan=False)
    return answer


def write(path: Path, content: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(content)
    new.chmod(0o644)
    new.rename(path)


def test_the_methods_are_added_once() -> None:
    """Registered twice, `EngineCore` and the class that runs in its own process have the methods of the first time."""
    plugin.register()
    first = {name: getattr(EngineCore, name) for name in METHODS}
    install()
    assert {name: getattr(EngineCoreProc, name) for name in METHODS} == first


@pytest.fixture(scope="module")
def llm(engines: Engines) -> Any:
    """One engine for the tests before those that start another; the last of them detaches it."""
    with pytest.MonkeyPatch.context() as patch, environment(patch):
        return engines()


def test_orders_and_answers(llm: Any) -> None:
    """Each policy is live once ordered, the history has who and why, and every answer is plain."""
    status = called(llm, "wakman_status")
    assert (status["attached"], status["policy"], status["mode"], status["engine"]) == (True, "lru", "auto", 0)
    assert (status["num_blocks"], status["free_blocks"], status["control_file"]) == (64, 63, None)
    before = "lru"
    for policy in (*POLICIES[1:], "lru"):
        told = called(llm, "wakman_set_policy", policy, "mira", f"try {policy}")
        assert (told["ok"], told["error"], told["from"], told["to"], told["mode"]) == (
            True,
            None,
            before,
            policy,
            policy,
        )
        assert told["status"]["policy"] == policy
        before = policy
        answers(llm, mixed(3, 6))
    history = called(llm, "wakman_history")["history"]
    assert [(entry["from"], entry["to"], entry["cause"]) for entry in history] == [
        (old, new, "manual") for old, new in zip(POLICIES, (*POLICIES[1:], "lru"), strict=True)
    ]
    assert [(entry["actor"], entry["why"]) for entry in history] == [
        ("mira", f"try {policy}") for policy in (*POLICIES[1:], "lru")
    ]
    assert all(abs(entry["at"] - time.time()) < 600 and entry["took_s"] >= 0 for entry in history)
    status = called(llm, "wakman_status")
    assert status["switches"] == sum(row["count"] for row in status["switch_counts"]) == len(history)
    told = called(llm, "wakman_set_policy", "auto")
    assert (told["ok"], told["mode"], told["to"]) == (True, "auto", "lru")
    assert (told["status"]["order"]["mode"], told["status"]["order"]["actor"]) == ("auto", "somebody")
    told = called(llm, "wakman_set_policy", "lfu", "mira", "?")
    assert (told["ok"], told["unknown"]) == (False, True)
    assert called(llm, "wakman_status")["mode"] == "auto"


def test_no_fault_of_ours_reaches_the_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attachment that cannot be found, or a status that fails, is an answer with an error; requests are served."""
    prompts = mixed(6, 4)
    wanted = answers(llm, prompts)

    def fails(_: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr("engine_patch.attach.of", fails)
        status = called(llm, "wakman_status")
        assert (status["attached"], status["reason"]) == (False, "RuntimeError: broken")
        assert "RuntimeError: broken" in called(llm, "wakman_set_policy", "arc", "a", "b")["error"]
    with monkeypatch.context() as patch:
        patch.setattr("engine_patch.attachment.Attachment.status", fails)
        assert called(llm, "wakman_status")["error"] == "RuntimeError: broken"
    assert answers(llm, prompts) == wanted
    assert called(llm, "wakman_status")["attached"] is True


def test_off_is_for_good(llm: Any) -> None:
    """`off` gives vLLM its queue back and says who wanted it; later orders are refused, the engine serves on."""
    called(llm, "wakman_set_policy", "s3fifo")
    prompts = mixed(4, 6)
    wanted = answers(llm, prompts)
    assert type(queue_of(llm)) is not FreeKVCacheBlockQueue
    told = called(llm, "wakman_set_policy", "off", "mira", "an incident")
    assert told["ok"]
    assert told["status"]["attached"] is False
    assert "mira" in told["status"]["reason"]
    assert "an incident" in told["status"]["reason"]
    assert type(queue_of(llm)) is FreeKVCacheBlockQueue
    told = called(llm, "wakman_set_policy", "arc", "mira", "again")
    assert told["ok"] is False
    assert "not attached" in told["error"]
    assert answers(llm, prompts) == wanted
    last = called(llm, "wakman_history")["history"][-1]
    assert (last["cause"], last["actor"]) == ("manual", "mira")


def test_the_control_file_under_traffic(engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file replaced, broken and removed while requests run: obeyed, ignored and kept, and no answer differs."""
    monkeypatch.setattr("engine_patch.control_file.LOOK_S", 0.05)
    path = tmp_path / "wakman.json"
    write(path, '{"policy": "arc", "reason": "from the start", "actor": "helm"}')
    with environment(monkeypatch, WAKMAN_CONTROL_FILE=str(path), WAKMAN_POLICY="s3fifo"):
        llm = engines()
    prompts = mixed(5, 30)
    serve(llm, prompts, lambda: called(llm, "wakman_status")["policy"] == "arc")
    wanted = answers(llm, prompts)
    write(path, '{"policy": "lru", "actor": "mira"}')
    assert serve(llm, prompts, lambda: called(llm, "wakman_status")["policy"] == "lru") == wanted
    for content, why in (
        ('{"policy": "l', "not JSON"),
        ('{"policy": "lfu"}', "unknown policy"),
        ('{"polcy": "arc"}', "unknown field"),
    ):
        write(path, content)
        file = {}
        assert serve(llm, prompts, lambda: file_says(llm, file, why)) == wanted  # noqa: B023
        assert file["state"] == "ignored"
        assert file["obeyed"]["policy"] == "lru"
        assert called(llm, "wakman_status")["policy"] == "lru"
    called(llm, "wakman_set_policy", "s3fifo", "someone", "a newer order")
    path.unlink()
    assert serve(llm, prompts, lambda: file_says(llm, {}, "removed")) == wanted
    assert called(llm, "wakman_status")["policy"] == "s3fifo"
    write(path, '{"policy": "auto"}')
    assert serve(llm, prompts, lambda: called(llm, "wakman_status")["mode"] == "auto") == wanted
    status = called(llm, "wakman_status")
    assert status["control_file"]["ignored"] == 3
    history = called(llm, "wakman_history")["history"]
    assert [(e["to"], e["cause"], e["actor"]) for e in history if e["cause"] != "start"] == [
        ("arc", "file", "helm"),
        ("lru", "file", "mira"),
        ("s3fifo", "manual", "someone"),
    ]


def file_says(llm: Any, file: dict[str, Any], why: str) -> bool:
    file.clear()
    file.update(called(llm, "wakman_status")["control_file"])
    return why in file["why"]


def serve(llm: Any, prompts: list[list[int]], done: Callable[[], bool]) -> list[tuple[int, ...]]:
    """Serve these prompts again and again until `done`; return the last answers."""
    until = time.monotonic() + 60
    while True:
        found = answers(llm, prompts)
        if done():
            return found
        assert time.monotonic() < until, called(llm, "wakman_status")


def test_an_engine_that_is_left_alone_says_why(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without prefix caching the methods are there, say why nothing is attached, refuse, and read no file."""
    with environment(monkeypatch, WAKMAN_CONTROL_FILE=str(tmp_path / "wakman.json")):
        llm = engines(enable_prefix_caching=False)
    status = called(llm, "wakman_status")
    assert status["attached"] is False
    assert status["reason"]
    told = called(llm, "wakman_set_policy", "arc", "mira", "?")
    assert (told["ok"], told["error"]) == (False, f"not attached: {status['reason']}")
    assert called(llm, "wakman_history")["history"] == []
    assert all(thread.name != "wakman-control-file" for thread in threading.enumerate())
