"""What an engine answers operators, and whose order is obeyed, against a stand-in for the attachment."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_patch.control import METHODS, Control, answer, modes, plain, started
from engine_patch.control_file import ControlFile
from engine_patch.policy import POLICIES
from engine_patch.settings import EngineSettings


class Attached:
    """An attachment that obeys, and remembers who ordered what."""

    def __init__(self, control_file: str = "") -> None:
        self.settings = EngineSettings(control_file=control_file)
        self.engine = 0
        self.control: Any = None
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        self.policy = "lru"
        self.mode = "auto"
        self.orders: list[tuple[str, str, str, str]] = []
        self.refuses = ""
        self.polls = 0

    def status(self) -> dict[str, Any]:
        return {"attached": True, "reason": "", "policy": self.policy, "mode": self.mode}

    def history(self) -> list[dict[str, Any]]:
        return [{"at": np.float64(1.5), "from": "lru", "to": "arc", "rates": {"lru": math.nan}}]

    def set_mode(self, mode: str, actor: str, why: str, cause: str = "manual") -> dict[str, Any]:
        if mode not in modes():
            return {"error": f"unknown policy {mode!r}"}
        if self.refuses:
            return {"error": self.refuses}
        self.orders.append((mode, actor, why, cause))
        if mode not in {"auto", self.policy}:
            entry = {"from": self.policy, "to": mode, "cause": cause, "actor": actor, "why": why}
            self.policy = mode
            for listener in self.listeners:
                listener("switch", entry)
        self.mode = mode
        return self.status()

    def poll(self, now: float) -> None:
        self.polls += 1
        if self.control is not None:
            self.control.poll(now)


class Broken:
    """An attachment whose every method fails."""

    control = None

    def poll(self, now: float) -> None:
        raise RuntimeError("broken")


class Left:
    """An engine that was left alone."""

    control = None

    def poll(self, now: float) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"attached": False, "reason": "prefix caching is off", "policy": None, "mode": "off"}

    def history(self) -> list[dict[str, Any]]:
        return []


def write(path: Path, policy: str) -> None:
    path.write_text(json.dumps({"policy": policy, "actor": "mira", "reason": "scans"}))
    path.chmod(0o644)


def test_every_answer_is_plain() -> None:
    """Whatever a status holds leaves as JSON and msgpack know it; what is no number becomes null."""

    @dataclass
    class Decision:
        rates: dict[str, float]

    value = {"a": np.float32(0.5), "b": (1, True), "c": Decision({"lru": math.inf}), "d": np.arange(2), 3: {4}}
    assert plain(value) == {"a": 0.5, "b": [1, True], "c": {"rates": {"lru": None}}, "d": [0, 1], "3": [4]}
    history = answer(Attached(), 2, "wakman_history")
    assert history == {"engine": 2, "history": [{"at": 1.5, "from": "lru", "to": "arc", "rates": {"lru": None}}]}
    json.dumps(history, allow_nan=False)


def test_an_order_is_obeyed_and_answered_with_what_it_changed() -> None:
    """The answer says from, to and mode, and has the status after; actor and reason arrive as they were given."""
    attachment = Attached()
    told = answer(attachment, 1, "wakman_set_policy", "arc", "mira", "scans")
    assert told == {
        "engine": 1,
        "ok": True,
        "error": None,
        "from": "lru",
        "to": "arc",
        "mode": "arc",
        "status": told["status"],
    }
    assert told["status"]["policy"] == "arc"
    assert attachment.orders == [("arc", "mira", "scans", "manual")]
    assert answer(attachment, 1, "wakman_set_policy", "auto")["mode"] == "auto"


@pytest.mark.parametrize("name", ["lfu", "", "LRU", "arc\n", "x" * 9999])
def test_an_unknown_policy_names_the_known(name: str) -> None:
    """Nothing is ordered, and the answer lists what there is."""
    attachment = Attached()
    told = answer(attachment, 0, "wakman_set_policy", name, "mira", "?")
    if name.strip() in POLICIES:
        assert attachment.orders
        return
    assert (told["ok"], told["unknown"], told["policies"]) == (False, True, ["auto", *POLICIES, "off"])
    assert len(told["error"]) < 600
    assert attachment.orders == []


def test_an_engine_that_is_not_attached_refuses() -> None:
    """The status says why it is not, and an order is refused with that reason."""
    assert answer(Left(), 0, "wakman_status")["reason"] == "prefix caching is off"
    told = answer(Left(), 0, "wakman_set_policy", "arc", "mira", "?")
    assert (told["ok"], told["error"]) == (False, "not attached: prefix caching is off")
    assert told["status"]["attached"] is False


def test_a_refusal_of_the_engine_is_passed_on() -> None:
    """A switch that fails is an answer with an error, and the status after it."""
    attachment = Attached()
    attachment.refuses = "the switch to arc failed"
    told = answer(attachment, 0, "wakman_set_policy", "arc")
    assert (told["ok"], told["error"], told["status"]["policy"]) == (False, "the switch to arc failed", "lru")


@pytest.mark.parametrize("method", [*METHODS, "wakman_nothing"])
def test_no_answer_ever_raises(method: str) -> None:
    """A fault of ours, or a call that is none, is an answer with an error."""
    assert answer(Broken(), 3, method)["error"] == "RuntimeError: broken"
    assert answer(Broken(), 3, method)["engine"] == 3
    assert "error" in answer(Attached(), 0, method, "one", "too", "many", "by", "far")


def test_an_idle_engine_does_what_is_due_when_it_is_asked() -> None:
    """Each call polls first: the idle take no steps in which a control file or a decision would be obeyed."""
    attachment = Attached()
    for method in METHODS:
        answer(attachment, 0, method)
    assert attachment.polls == 3


def test_the_newest_order_wins(tmp_path: Path) -> None:
    """The file outranks the start's setting, a command outranks an older file, a new write outranks the command."""
    path = tmp_path / "wakman.json"
    attachment = Attached(str(path))
    file = ControlFile(str(path))
    attachment.control = Control(attachment, file)
    write(path, "arc")
    file.look()
    assert answer(attachment, 0, "wakman_status")["policy"] == "arc"
    answer(attachment, 0, "wakman_set_policy", "s3fifo", "someone", "trying")
    file.look()
    assert answer(attachment, 0, "wakman_status")["policy"] == "s3fifo"
    write(path, "lru")
    file.look()
    status = answer(attachment, 0, "wakman_status")
    assert status["policy"] == "lru"
    assert attachment.orders == [
        ("arc", "mira", "scans", "file"),
        ("s3fifo", "someone", "trying", "manual"),
        ("lru", "mira", "scans", "file"),
    ]
    assert status["control_file"]["obeyed"]["policy"] == "lru"


def test_the_last_order_that_was_obeyed_stands_in_the_status(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who holds a policy that is live already switches nothing, and yet the status and the log name them, by command
    and by file; what was refused is no order."""
    caplog.set_level("INFO", "vllm.wakman")
    path = tmp_path / "wakman.json"
    attachment = Attached(str(path))
    attachment.control = Control(attachment, ControlFile(str(path)))
    assert answer(attachment, 0, "wakman_status")["order"] is None
    answer(attachment, 0, "wakman_set_policy", "lru", "someone", "an incident")
    answer(attachment, 0, "wakman_set_policy", "lfu", "nobody", "?")
    found = answer(attachment, 0, "wakman_status")
    assert found["switch_counts"] == []
    assert {**found["order"], "at": 0} == {
        "mode": "lru",
        "cause": "manual",
        "actor": "someone",
        "why": "an incident",
        "at": 0,
    }
    assert "mode lru (manual, someone): an incident" in caplog.text
    write(path, "auto")
    attachment.control._file.look()
    order = answer(attachment, 0, "wakman_status")["order"]
    assert (order["mode"], order["cause"], order["actor"], order["why"]) == ("auto", "file", "mira", "scans")


def test_a_file_that_the_engine_refuses_is_ignored(tmp_path: Path) -> None:
    """An unknown policy in the file, or a switch that fails, leaves what is live and is said in the status."""
    path = tmp_path / "wakman.json"
    attachment = Attached(str(path))
    attachment.control = Control(attachment, ControlFile(str(path)))
    for policy, refuses, why in (("lfu", "", "unknown policy"), ("arc", "it failed", "it failed")):
        attachment.refuses = refuses
        write(path, policy)
        attachment.control._file.look()
        status = answer(attachment, 0, "wakman_status")
        assert status["policy"] == "lru"
        assert status["control_file"]["state"] == "ignored"
        assert why in status["control_file"]["why"]
    assert status["control_file"]["ignored"] == 2


def test_an_attachment_that_raises_on_an_order_is_survived(tmp_path: Path) -> None:
    """`poll` runs inside the engine's step: even a fault of the attachment becomes an ignored order."""
    path = tmp_path / "wakman.json"
    attachment = Attached(str(path))
    control = Control(attachment, ControlFile(str(path)))

    def fails(*_: Any, **__: Any) -> dict[str, Any]:
        raise RuntimeError("broken")

    attachment.set_mode = fails  # type: ignore[method-assign]
    write(path, "arc")
    control._file.look()  # type: ignore[union-attr]
    control.poll(0.0)
    assert control.status()["control_file"]["why"] == "RuntimeError: broken"


def test_switches_and_decisions_are_counted() -> None:
    """Counts go by from, to and cause, and by the decision's reason; the start's setting is no switch."""
    attachment = Attached()
    control = started(attachment)
    for listener in attachment.listeners:
        for reason in ("margin", "margin", "residual"):
            listener("decision", {"reason": reason})
        listener("switch", {"from": "lru", "to": "arc", "cause": "start"})
        for _ in range(2):
            listener("switch", {"from": "lru", "to": "arc", "cause": "auto"})
    status = control.status()
    assert status["decisions"] == {"margin": 2, "residual": 1}
    assert status["switch_counts"] == [{"from": "lru", "to": "arc", "cause": "auto", "count": 2}]
    assert status["control_file"] is None
    control.close()
    control.close()
