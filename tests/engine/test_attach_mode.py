"""Modes, decisions, history and identity of an attachment, on vLLM's block manager without a model."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from engine_patch import attach
from engine_patch.policy import POLICIES
from tests.engine.attached import DECISION, Ears, bare, serve, started, with_ears


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    return with_ears(monkeypatch)


def test_a_decision_is_obeyed_in_auto_mode_alone(ears: Ears) -> None:
    """Obeyed: a switch from the live policy. Only shown: in a manual mode, of another live policy, without a switch."""
    _, blocks, there = started()
    serve(blocks, 5)
    for decision in (
        dataclasses.replace(DECISION, switch=False, reason="residual"),
        dataclasses.replace(DECISION, live="arc"),
    ):
        ears.decisions.append(decision)
        there.poll(time.monotonic() + 1)
        assert there.status()["policy"] == "lru"
        assert there.status()["last_decision"] == dataclasses.asdict(decision)
    ears.decisions.append(DECISION)
    there.poll(time.monotonic() + 1)
    assert there.status()["policy"] == "s3fifo"
    (entry,) = there.history()
    assert (entry["cause"], entry["why"], entry["rates"], entry["window_s"]) == (
        "auto",
        DECISION.text,
        DECISION.rates,
        60.0,
    )
    assert there.set_mode("lru", "test", "hold")["ok"]
    ears.decisions.append(DECISION)
    there.poll(time.monotonic() + 1)
    assert (there.status()["policy"], there.status()["mode"]) == ("lru", "lru")
    assert there.set_mode("auto", "test", "go")["ok"]
    ears.decisions.append(DECISION)
    there.poll(time.monotonic() + 1)
    assert (there.status()["policy"], there.status()["mode"]) == ("s3fifo", "auto")
    assert [name for _, name, _ in ears.of("policy")] == ["lru", "s3fifo", "lru", "s3fifo"]


def test_the_history_is_bounded(ears: Ears) -> None:
    """A switcher gone wild, or a script, fills no memory: the 256 newest changes are kept."""
    _, _, there = started(WAKMAN_POLICY="lru")
    for number in range(300):
        there.set_mode(("arc", "s3fifo")[number % 2], "test", str(number))
    history = there.history()
    assert len(history) == 256
    assert history[-1]["why"] == "299"
    assert there.status()["switches"] == 300


def test_an_engine_is_attached_to_once(ears: Ears) -> None:
    """A second attach (a plugin loaded under two names) finds the first and changes nothing."""
    scheduler, _, there = started()
    assert attach.attach(scheduler, {"WAKMAN_POLICY": "arc"}) is there
    assert there.status()["policy"] == "lru"
    refused, _, why = started(WAKMAN_POLICY="off")
    assert attach.attach(refused, {}) is why


def test_each_engine_has_its_own(ears: Ears) -> None:
    """Two engines in one process are attached to apart: a switch of one is none of the other; the newest is current."""
    first, _, one = started()
    second, _, two = started()
    two.set_mode("arc", "test", "")
    assert (attach.of(first), attach.of(second), attach.current()) == (one, two, two)
    assert (one.status()["policy"], two.status()["policy"]) == ("lru", "arc")


def test_data_parallel_engines_know_their_number(ears: Ears) -> None:
    """The status carries the engine's index among the data-parallel ones."""
    for name in ("data_parallel_index", "data_parallel_rank"):
        scheduler, _ = bare()
        scheduler.vllm_config.parallel_config = SimpleNamespace(**{name: 3})
        assert attach.attach(scheduler, {}).status()["engine"] == 3


def test_the_environment_chooses_the_first_policy(ears: Ears) -> None:
    """WAKMAN_POLICY=arc starts with ARC, in the history as the start's choice and not as a switch."""
    _, _, there = started(WAKMAN_POLICY="arc")
    status = there.status()
    assert (status["policy"], status["mode"], status["switches"]) == ("arc", "arc", 0)
    (entry,) = there.history()
    assert (entry["from"], entry["to"], entry["cause"], entry["actor"]) == ("lru", "arc", "start", "WAKMAN_POLICY")
    assert [name for _, name, _ in ears.of("policy")] == ["arc"]


def test_an_unknown_mode_is_refused_by_name(ears: Ears) -> None:
    """A mode that is none changes nothing, and the answer lists what there is."""
    _, _, there = started()
    told = there.set_mode("lfu", "test", "")
    assert told["ok"] is False
    assert all(mode in told["error"] for mode in ("auto", "off", *POLICIES))
    assert (there.status()["policy"], there.status()["mode"]) == ("lru", "auto")
