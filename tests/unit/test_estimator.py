"""The estimator switches when another policy is clearly better, says why or why not, and always decides alike."""

import json

import pytest

from engine_patch.decision import BEST, BETTER, DWELL, EVIDENCE, MARGIN, REASONS, RESIDUAL, WARMING, Decision
from engine_patch.estimator import Estimator
from tests.unit.switched_engine import STEP_S, Engine, popular, recency, unrelated


def test_the_better_policy_becomes_live_and_back() -> None:
    """Popular prompts bring S3-FIFO, young sessions bring LRU back, within a few minutes each."""
    engine = Engine(0).serve(popular, 1200)
    assert engine.estimator.live == "s3fifo"
    assert engine.switches[0].t <= 360
    engine.serve(recency, 1200)
    assert engine.estimator.live == "lru"
    assert len(engine.switches) <= 4


@pytest.mark.parametrize("seed", range(3))
def test_the_residual_is_nothing_even_right_after_switches(seed: int) -> None:
    """The shadow that is compared with the engine goes through every switch with it: it hits what the engine hits."""
    engine = Engine(seed)
    for kind in (popular, recency, popular, recency):
        engine.serve(kind, 600)
    assert len(engine.switches) >= 2
    known = [decision.residual for decision in engine.decisions if decision.residual is not None]
    assert len(known) >= len(engine.decisions) - 1
    assert max(map(abs, known)) < 0.004


def test_nothing_is_switched_above_one_point_of_residual() -> None:
    """An engine whose own hit rate is more than a point from its shadow's is left alone; the reason is named."""
    engine = Engine(0)
    engine.off = 16
    engine.serve(popular, 900)
    assert engine.switches == []
    assert engine.decisions[-1].reason == RESIDUAL
    assert engine.decisions[-1].residual is not None
    assert engine.decisions[-1].residual < -0.01
    assert "points" in engine.decisions[-1].text


def test_an_engine_that_cannot_say_its_hits_is_switched_all_the_same() -> None:
    """Without hit statistics the residual is unknown (None), which is no reason to hold."""
    engine = Engine(0)
    engine.off = None
    engine.serve(popular, 900)
    assert engine.estimator.live == "s3fifo"
    assert {decision.residual for decision in engine.decisions} == {None}


def test_a_margin_holds_small_advantages() -> None:
    """Nothing is switched for an advantage up to the margin; above it is."""
    held = Engine(0, margin=0.9).serve(popular, 900)
    assert held.switches == []
    assert held.decisions[-1].reason == MARGIN
    assert 0 < held.decisions[-1].advantage <= 0.9
    assert Engine(0, margin=0.0).serve(popular, 900).switches


def test_a_policy_stays_for_its_dwell() -> None:
    """However good another is, a policy that went live stays for dwell_s."""
    engine = Engine(0, dwell_s=500.0).serve(popular, 1000)
    assert any(decision.reason == DWELL for decision in engine.decisions)
    assert engine.switches[0].t >= 500
    engine.serve(recency, 900)
    for first, second in zip(engine.switches, engine.switches[1:], strict=False):
        assert second.t - first.t >= 500


def test_little_evidence_decides_nothing() -> None:
    """Few requests, however telling, switch nothing."""
    engine = Engine(0, min_requests=10_000).serve(popular, 300)
    assert {decision.reason for decision in engine.decisions} == {EVIDENCE}


def test_equal_policies_leave_the_live_one() -> None:
    """On a tie the live policy stays, LRU at the start, whatever the order of the candidates."""
    engine = Engine(0, policies=("arc", "s3fifo", "lru"), margin=0.0, min_requests=1, min_blocks=1)
    engine.serve(unrelated, 300)
    assert engine.switches == []
    assert {decision.reason for decision in engine.decisions} == {BEST}
    assert engine.decisions[-1].advantage == 0


def test_alternating_traffic_is_not_flip_flopped() -> None:
    """When the traffic changes each 90 s, dwell and decayed rates keep switches to one in two windows at most."""
    engine = Engine(1)
    for at in range(20):
        engine.serve((popular, recency)[at % 2], 90)
    assert len(engine.switches) <= len(engine.decisions) / 2


def test_lost_events_stop_switching_until_the_shadows_are_warm() -> None:
    """After a gap nothing is switched before a whole pool of blocks has come in, and the residual is unknown."""
    engine = Engine(0)
    engine.obey = False
    engine.serve(popular, 300)
    engine.estimator.lost()
    at = len(engine.decisions)
    engine.serve(lambda rng, past: ([1, 2, 3],) * 2, 120)
    assert {decision.reason for decision in engine.decisions[at:]} <= {WARMING, EVIDENCE}
    assert engine.decisions[-1].residual is None
    engine.serve(popular, 600)
    assert engine.decisions[-1].reason != WARMING
    assert engine.decisions[-1].residual is not None


def test_a_pool_that_was_not_empty_at_the_start_must_warm_up() -> None:
    """A shadow attached to a pool in use is cold (fresh=False): its first decisions switch nothing."""
    engine = Engine(0, fresh=False, interval_s=10.0, min_requests=1, min_blocks=1).serve(popular, 600)
    assert engine.decisions[0].reason == WARMING
    assert engine.switches


def test_a_live_policy_that_is_no_candidate_is_shadowed_too() -> None:
    """An operator may hold a policy that the switcher would not choose; residual and comparison still stand."""
    engine = Engine(0)
    engine.switch("s3fifo-25")
    engine.obey = False
    engine.serve(recency, 600)
    last = engine.decisions[-1]
    assert last.live == "s3fifo-25"
    assert set(last.rates) == {"lru", "s3fifo", "s3fifo-25"}
    assert last.residual is not None
    assert abs(last.residual) < 0.004
    engine.switch("arc")
    engine.serve(recency, 120)
    assert set(engine.decisions[-1].rates) == {"lru", "s3fifo", "arc"}
    engine.switch("lru")
    engine.serve(recency, 600)
    assert [lane.policy for lane in engine.estimator._warm.shadow.lanes] == ["lru", "s3fifo"]  # type: ignore[union-attr]


def test_a_policy_held_for_the_second_time_is_compared_as_at_the_first() -> None:
    """What a policy that is no candidate hit when it was live before is not taken off its rate; nor is it behind."""
    engine = Engine(0)
    engine.obey = False
    for name in ("s3fifo-25", "lru", "s3fifo-25"):
        engine.switch(name)
        before = len(engine.decisions)
        engine.serve(recency, 570)
        for decision in engine.decisions[before:]:
            assert min(*decision.rates.values(), *decision.window_rates.values()) >= 0
        if name != "lru":
            first = engine.decisions[before]
            assert first.live == name
            assert first.rates[name] > 0.5 * first.rates["lru"] > 0


def test_every_decision_explains_itself() -> None:
    """Rates of all candidates, margin, window, counts, a reason of the closed list and a sentence; JSON and back."""
    engine = Engine(0, policies=("lru", "s3fifo", "arc")).serve(popular, 620)
    assert len(engine.decisions) == 10
    for decision in engine.decisions:
        assert set(decision.rates) == set(decision.window_rates) == {"lru", "s3fifo", "arc"}
        assert all(0 <= rate <= 1 for rate in decision.rates.values())
        assert decision.reason in REASONS
        assert decision.switch == (decision.reason == BETTER) == (decision.policy != decision.live)
        assert decision.window_s == pytest.approx(60, abs=STEP_S)
        assert decision.requests == pytest.approx(60, abs=2)
        assert decision.blocks > 500
        assert decision.live in decision.text
        assert Decision.from_dict(json.loads(decision.to_json())) == decision
    switch = engine.switches[0]
    assert switch.advantage > switch.margin
    assert switch.text.startswith(f"Switch from lru to {switch.policy} (")


def test_the_same_events_give_the_same_decisions() -> None:
    """There is no clock and no chance in it."""
    assert Engine(3).serve(popular, 600).decisions == Engine(3).serve(popular, 600).decisions


def test_a_quiet_hour_is_one_window() -> None:
    """No decision is made up for windows without events: the one that is due says how long it was."""
    engine = Engine(0).serve(popular, 90)
    engine.t += 3600
    engine.decide()
    assert [round(decision.window_s) for decision in engine.decisions] == [60, 3629]


def test_a_sample_still_finds_the_better_policy_and_says_that_it_is_one() -> None:
    """With a quarter of the blocks the same policy wins; the residual is not measured, and the sentence says why."""
    engine = Engine(0, sample=0.25).serve(popular, 900)
    assert engine.estimator.live == "s3fifo"
    assert engine.decisions[-1].sample == 0.25
    assert engine.decisions[-1].residual is None
    assert "25.00 % of the blocks" in engine.decisions[-1].text
    engine.estimator.set_sample(1.0)
    at = len(engine.decisions)
    engine.serve(lambda rng, past: ([1, 2, 3],) * 2, 120)
    assert {decision.reason for decision in engine.decisions[at:]} <= {WARMING, EVIDENCE}


@pytest.mark.parametrize(("preset", "policies"), [("other", ("lru",)), ("default", ("lru", "lfu")), ("paper", ("x",))])
def test_unknown_names_are_refused(preset: str, policies: tuple[str, ...]) -> None:
    """An unknown preset or policy raises ValueError that names the known ones, before the first event."""
    with pytest.raises(ValueError, match="there are"):
        Estimator(preset, policies, 100, 16)
