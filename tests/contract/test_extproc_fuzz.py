"""A short run of tests/fuzz; `python -m tests.fuzz.fuzz_process` is the long one."""

import pytest

from tests.fuzz.fuzz_process import Broken, fuzz


def test_nothing_breaks_leaks_or_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 mutated messages, some through real gRPC, break none of the rules, and meet every kind of outcome."""
    monkeypatch.setattr("tests.fuzz.fuzz_process.MESSAGES_A_RIG", 2_000)  # so that every setting is drawn
    seen = fuzz(20_000, seed=1, wire_share=0.02)
    assert seen["messages"] >= 20_000
    met = (
        "answered list",
        "answered 503",
        "answered 429",
        "answered request_body",
        "malformed",
        "cancelled",
        "shadow no",
    )
    assert all(seen[outcome] for outcome in (*met, "wire: ended")), seen


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("service.answers.Answers._release", lambda *_: None),
        ("service.fairness.Fairness.release", lambda *_: None),
        ("service.answers.served_by", lambda _: 1 / 0),
        ("service.answers.CONTINUE", {}),
        ("service.answers.status", lambda request: 100 * request.ByteSize()),
    ],
)
def test_a_processor_that_is_broken_is_found_out(monkeypatch: pytest.MonkeyPatch, where: str, what: object) -> None:
    """A charge or a place that is not taken back, a fault, a label of the client's: the fuzzer sees each of them."""
    monkeypatch.setattr(where, what)
    monkeypatch.setattr("tests.fuzz.fuzz_process.MESSAGES_A_RIG", 500)  # so that every setting is drawn
    with pytest.raises(Broken):
        fuzz(5_000, seed=2, wire_share=0.0)
