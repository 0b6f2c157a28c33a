"""Publish, keep, fall back or refuse: each rule of planner.gate, their order, and what the sentences say."""

import json
import math
from array import array
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.admission import Rules
from planner.build import Built, build, shape_of
from planner.diff import diff
from planner.gate import Economics, Memory, Observed, Situation, Verdict, judge
from planner.rates import KeyRates
from service.errors import InvalidInput
from service.plan import Parameters, Plan

NAMES = ("a", "b", "c", "d")
# Four caches of 10 prefixes for 32 keys: a plan holds 8 on each, Flat-LB all 32 on each.
ECONOMICS = Economics(
    cache_tokens_per_endpoint=11_000, prefix_tokens=1000, unique_tokens=20, output_tokens=10, plan_interval_s=100.0
)
RATES = KeyRates.of(range(32), [0.25] * 32)


def plan_of(rows: dict[int, tuple[int, ...]], endpoints: tuple[str, ...] = NAMES) -> Plan:
    offsets, targets = [0], list[int]()
    for row in rows.values():
        targets += row
        offsets.append(len(targets))
    return Plan(
        endpoints,
        array("Q", rows),
        array("I", offsets),
        array("I", targets),
        array("f", [0.25] * len(rows)),
        key_check=0,
        parameters=Parameters(replica_cap_rps=1.0, rate_rps=8.0, admitted_rate_rps=0.25 * len(rows)),
    )


EVEN = {i: (i % 4,) for i in range(32)}
EMPTY = plan_of({})


def built(plan: Plan) -> Built:
    return Built(plan, shape_of(plan), "even", 0.0, 0.0)


def situation(
    current: Plan | None, candidate: Plan, *, rates: KeyRates = RATES, economics: Economics = ECONOMICS, **seen: object
) -> Situation:
    observed = Observed(**({"now_s": 1000.0} | seen))  # type: ignore[arg-type]
    difference = None if current is None else diff(current, candidate)
    return Situation(rates, current, built(candidate), difference, economics, observed)


def test_a_first_plan_is_judged_by_its_gain_alone() -> None:
    """With nothing in service, None or an empty plan from before, a plan that is expected to win is published."""
    verdict = judge(situation(None, plan_of(EVEN)))
    assert verdict.decision == "publish"
    assert verdict.reason.startswith("Published: predicted gain ")
    assert verdict.numbers["gain_candidate"] > 2
    assert verdict.numbers["hit_rate_flat"] < verdict.numbers["hit_rate_candidate"]


def test_a_plan_that_is_not_expected_to_win_is_refused_with_its_numbers() -> None:
    """Where caches hold everything anyway nothing is won, and the sentence says by how much it falls short."""
    large = replace(ECONOMICS, cache_tokens_per_endpoint=1e6)
    verdict = judge(situation(None, plan_of(EVEN), economics=large))
    assert verdict.decision == "refuse"
    assert "predicted gain 1.00 is below 1.1" in verdict.reason
    assert "of prompt tokens from cache under Flat-LB" in verdict.reason
    assert verdict.reason.endswith("; Flat-LB stays.")


def test_a_hot_key_of_one_copy_is_refused_for_the_endpoint_it_fills() -> None:
    """The hits would pay, but one endpoint would get most of the work: that is no plan, and the sentence says why."""
    rates = KeyRates.of(range(32), [20.0] + [0.25] * 31)
    verdict = judge(situation(None, plan_of(EVEN), rates=rates))
    assert verdict.decision == "refuse"
    assert "whose keys load an endpoint with 3." in verdict.reason
    assert verdict.numbers["hit_rate_candidate"] > verdict.numbers["hit_rate_flat"] + 0.1
    spread = judge(situation(None, plan_of(EVEN | {0: (0, 1, 2, 3)}), rates=rates))
    assert spread.numbers["gain_candidate"] > verdict.numbers["gain_candidate"]


def test_a_plan_in_service_that_stopped_winning_gives_way_to_flat() -> None:
    """Both below the least gain by more than the band: Flat-LB, with both gains in the sentence."""
    large = replace(ECONOMICS, cache_tokens_per_endpoint=1e6)
    verdict = judge(situation(plan_of(EVEN), plan_of(EVEN), economics=large))
    assert verdict.decision == "flat"
    assert "predicted gain 1.00 is below 1.1" in verdict.reason
    assert "that of the plan in service, 1.00, by more than the band" in verdict.reason


def test_inside_the_band_the_plan_in_service_stays_and_none_comes_back() -> None:
    """A gain between least and least minus band takes no plan away, and brings none back: so nothing flaps."""
    g = judge(situation(None, plan_of(EVEN))).numbers["gain_candidate"]
    above = replace(ECONOMICS, gain_min=g * 1.01, gain_band=g * 0.05)
    assert judge(situation(plan_of(EVEN), plan_of(EVEN), economics=above)).decision == "refuse"
    assert judge(situation(None, plan_of(EVEN), economics=above)).decision == "refuse"
    far_above = replace(ECONOMICS, gain_min=g * 1.10, gain_band=g * 0.05)
    assert judge(situation(plan_of(EVEN), plan_of(EVEN), economics=far_above)).decision == "flat"


def test_a_candidate_that_wins_replaces_a_plan_that_stopped_winning() -> None:
    """The plan in service names keys that nobody asks for any more: no warm-up is weighed against that."""
    old = plan_of({i: (i % 4,) for i in range(100, 132)})
    verdict = judge(situation(old, plan_of(EVEN)))
    assert verdict.decision == "publish"
    assert "has come down to 1.00" in verdict.reason


def test_the_same_assignment_is_kept() -> None:
    """Rates alone are no reason to publish."""
    verdict = judge(situation(plan_of(EVEN), plan_of(EVEN)))
    assert (verdict.decision, verdict.reason) == (
        "keep",
        "Kept: the candidate gives every key the endpoints that it has.",
    )


def test_a_move_that_saves_nothing_is_kept_away() -> None:
    """Another placement that is as good costs its warm-up and saves nothing."""
    verdict = judge(situation(plan_of(EVEN), plan_of({i: ((i + 1) % 4,) for i in range(32)})))
    assert verdict.decision == "keep"
    assert "no more than noise" in verdict.reason


# One key moved off the endpoint of nine: what it saves in an interval is less than the prefix it computes anew.
TILTED = {i: (i % 4 if i else 1,) for i in range(32)}


def test_staleness_has_to_exceed_the_warm_up() -> None:
    """Below the price of warming up the plan is kept, above it the candidate is published; both numbers are said."""
    e = replace(ECONOMICS, imbalance_max=1.2, stale_min=0.0)
    short = judge(situation(plan_of(TILTED), plan_of(EVEN), economics=replace(e, plan_interval_s=5.0)))
    assert short.decision == "keep"
    assert 0 < short.numbers["staleness_tokens"] <= short.numbers["warm_up_tokens"]
    long = judge(situation(plan_of(TILTED), plan_of(EVEN), economics=replace(e, plan_interval_s=5000.0)))
    assert long.decision == "publish"
    assert long.numbers["staleness_tokens"] > long.numbers["warm_up_tokens"]
    assert "staleness is " in long.reason
    assert "warm-up only 1,000" in long.reason


def test_staleness_comes_together_over_cycles() -> None:
    """A little staleness each interval is kept until it has cost the warm-up once, then the candidate is published."""
    e = replace(ECONOMICS, imbalance_max=1.2, stale_min=0.0, plan_interval_s=100.0)
    case = situation(plan_of(TILTED), plan_of(EVEN), economics=e)
    decisions, memory = [], None
    for cycle in range(100):
        verdict = judge(replace(case, observed=Observed(100.0 * cycle), memory=memory))
        decisions.append(verdict.decision)
        memory = verdict.memory
        if verdict.decision == "publish":
            break
    each = verdict.numbers["staleness_next_tokens"]
    assert len(decisions) > 3
    assert decisions == ["keep"] * (len(decisions) - 1) + ["publish"]
    assert len(decisions) == math.floor(verdict.numbers["warm_up_tokens"] / each) + 1
    assert memory is not None
    assert memory.stale_tokens == 0


def test_staleness_that_passes_is_forgotten() -> None:
    """When the candidate saves nothing any more, what came together before counts no longer."""
    case = situation(plan_of(EVEN), plan_of({i: ((i + 1) % 4,) for i in range(32)}))
    assert judge(replace(case, memory=Memory(900.0, stale_tokens=1e9))).memory.stale_tokens == 0


def test_a_key_that_needs_more_copies_is_a_trigger() -> None:
    """An overloaded key gets its copy at once; one that needs fewer copies waits for the balance of tokens."""
    rates = KeyRates.of(range(32), [1.2] + [0.25] * 31)
    more = EVEN | {0: (0, 1)}
    verdict = judge(situation(plan_of(EVEN), plan_of(more), rates=rates))
    assert verdict.decision == "publish"
    assert "1 key needs more copies" in verdict.reason
    assert judge(situation(plan_of(more), plan_of(EVEN))).decision == "keep"


def test_imbalance_is_a_trigger_only_when_the_candidate_mends_it() -> None:
    """Above the bound the candidate is published when it comes to the bound or clearly nearer, else it is no reason."""
    tilted = plan_of({i: (i % 4 if i > 3 else 0,) for i in range(32)})
    verdict = judge(situation(tilted, plan_of(EVEN)))
    assert verdict.decision == "publish"
    assert "the most loaded endpoint is at 1.38 times the mean, with the candidate at 1.00" in verdict.reason
    other = plan_of({i: (i % 4 if i > 3 else 1,) for i in range(32)})
    assert judge(situation(tilted, other)).decision == "keep"


def test_a_new_endpoint_and_one_below_its_floor_are_triggers() -> None:
    """Scale-out is used, step by step: the endpoint joins, then is filled while it is far below the mean."""
    three = plan_of({i: (i % 3,) for i in range(32)}, NAMES[:3])
    joined = plan_of({i: (i % 3,) if i > 3 else (3,) for i in range(32)})
    e = replace(ECONOMICS, imbalance_max=2.0, cache_tokens_per_endpoint=16_000)
    verdict = judge(situation(three, joined, economics=e))
    assert verdict.decision == "publish"
    assert "1 endpoint is new, d first" in verdict.reason
    fuller = plan_of({i: (i % 3,) if i > 5 else (3,) for i in range(32)})
    verdict = judge(situation(joined, fuller, economics=e))
    assert verdict.decision == "publish"
    assert "the least loaded endpoint is at 0.50 times the mean, with the candidate at 0.75" in verdict.reason


def test_a_lost_endpoint_is_replaced_at_once() -> None:
    """Gone from the list or not ready, its keys move before anything is judged, even without a gain."""
    worthless = replace(ECONOMICS, cache_tokens_per_endpoint=1e6)
    without_d = {i: (i % 3,) for i in range(32)}
    for candidate, ready in ((plan_of(without_d, NAMES[:3]), None), (plan_of(without_d), NAMES[:3])):
        verdict = judge(situation(plan_of(EVEN), candidate, economics=worthless, ready=ready))
        assert verdict.decision == "publish"
        assert verdict.reason == "Published: the plan in service gives keys to d, gone or not ready."


def test_a_lost_endpoint_that_the_candidate_names_too_is_no_reason() -> None:
    """A candidate with keys for the endpoint that is away would mend nothing."""
    assert judge(situation(plan_of(EVEN), plan_of(EVEN), ready=NAMES[:3])).decision == "keep"


def test_without_a_ready_endpoint_nothing_is_changed() -> None:
    """No plan helps a fleet that is away, nor does taking one away; the sentence says so."""
    large = replace(ECONOMICS, cache_tokens_per_endpoint=1e6)
    verdict = judge(situation(plan_of(EVEN), plan_of(EVEN), economics=large, ready=()))
    assert (verdict.decision, verdict.numbers.get("gain_current")) == ("keep", None)
    assert "none of 4 endpoints is ready" in verdict.reason


def test_without_rates_nothing_is_changed() -> None:
    """Keys without requests are nothing to judge by."""
    assert judge(situation(None, EMPTY, rates=KeyRates.of([1], [0.0]))).decision == "keep"
    assert judge(situation(plan_of(EVEN), EMPTY, rates=KeyRates.of([], []))).decision == "keep"


def test_a_candidate_without_keys_is_flat() -> None:
    """It is refused where Flat-LB serves already and replaces a plan otherwise."""
    assert judge(situation(None, EMPTY)).decision == "refuse"
    assert judge(situation(plan_of(EVEN), EMPTY)).decision == "flat"


def test_leaving_the_envelope_falls_back_and_comes_back_by_itself() -> None:
    """A sequence: published, p99 leaves, Flat-LB for the waiting time, then published again by the gain."""
    service: Plan | None = None
    memory, log = None, list[str]()
    for cycle in range(16):
        p99_s = 3.0 if cycle == 3 else 1.0
        case = situation(
            service, plan_of(EVEN), now_s=100.0 * cycle, p99_ttft_s=p99_s, baseline_p99_ttft_s=1.0, active_keys=30.0
        )
        verdict = judge(replace(case, memory=memory))
        memory = verdict.memory
        if verdict.decision == "publish":
            service = plan_of(EVEN)
        elif verdict.decision == "flat":
            service = EMPTY
        log.append(verdict.decision)
    assert log == ["publish", "keep", "keep", "flat"] + ["refuse"] * 6 + ["publish"] + ["keep"] * 5
    assert memory == Memory(**json.loads(json.dumps(asdict(memory))))


def test_a_new_leader_that_finds_flat_published_waits() -> None:
    """Its memory is gone, so it takes an empty plan in service for one that left the envelope just now."""
    verdict = judge(situation(EMPTY, plan_of(EVEN)))
    assert verdict.decision == "refuse"
    assert "Flat-LB stays: a plan may return after 600 s" in verdict.reason
    later = situation(EMPTY, plan_of(EVEN), now_s=1600.0)
    assert judge(replace(later, memory=verdict.memory)).decision == "publish"


def test_with_an_unknown_cache_nothing_is_judged() -> None:
    """Then a first plan is published, triggers and a much larger admitted share publish, and all else is kept."""
    for unknown in (replace(ECONOMICS, cache_tokens_per_endpoint=0), replace(ECONOMICS, prefix_tokens=0)):
        first = judge(situation(None, plan_of(EVEN), economics=unknown))
        assert first.decision == "publish"
        assert "not judged" in first.reason
        assert judge(situation(plan_of(TILTED), plan_of(EVEN), economics=unknown)).decision == "publish"
        moved = plan_of({i: ((i + 1) % 4,) for i in range(32)})
        kept = judge(situation(plan_of(EVEN), moved, economics=unknown))
        assert kept.decision == "keep"
        assert "not judged" in kept.reason
        half = plan_of({i: (i % 4,) for i in range(16)})
        wider = judge(situation(half, plan_of(EVEN), economics=replace(unknown, imbalance_max=9.0)))
        assert wider.decision == "publish"
        assert "carry 100.0 % of requests, those in service 50.0 %" in wider.reason


def test_sizes_of_the_keys_replace_an_unknown_prefix() -> None:
    """When the rates know each key's prefix, the mean is not needed."""
    rates = KeyRates.of(range(32), [0.25] * 32, [1000.0] * 32)
    verdict = judge(situation(None, plan_of(EVEN), rates=rates, economics=replace(ECONOMICS, prefix_tokens=0)))
    assert verdict == judge(situation(None, plan_of(EVEN)))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (
            "economics cache_tokens_per_endpoint = nan",
            {"economics": replace(ECONOMICS, cache_tokens_per_endpoint=math.nan)},
        ),
        ("economics prefix_tokens = -1", {"economics": replace(ECONOMICS, prefix_tokens=-1.0)}),
        ("economics plan_interval_s = 0", {"economics": replace(ECONOMICS, plan_interval_s=0.0)}),
        ("economics gain_min = 0.5", {"economics": replace(ECONOMICS, gain_min=0.5)}),
        ("observed p99_ttft_s = inf", {"p99_ttft_s": math.inf}),
        ("observed active_keys = nan", {"active_keys": math.nan}),
        ("observed now_s = nan", {"now_s": math.nan}),
        ("rates rates_rps of a key = nan", {"rates": KeyRates.of([1, 2], [1.0, math.nan])}),
        ("rates rates_rps of a key = inf", {"rates": KeyRates.of([1, 2], [1.0, math.inf])}),
        ("rates prefix_tokens of a key = nan", {"rates": KeyRates.of([1], [1.0], [math.nan])}),
    ],
)
def test_a_value_that_is_none_is_refused_by_name(name: str, case: dict[str, object]) -> None:
    """NaN, infinity and numbers out of range stop the cycle with the value's name; nothing is decided by them."""
    with pytest.raises(InvalidInput, match=name):
        judge(situation(None, plan_of(EVEN), **case))  # type: ignore[arg-type]


def test_a_memory_that_is_none_is_refused_by_name() -> None:
    """A record that was read back wrong is no memory."""
    case = replace(situation(None, plan_of(EVEN)), memory=Memory(0.0, stale_tokens=math.nan))
    with pytest.raises(InvalidInput, match="memory stale_tokens = nan"):
        judge(case)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Plans as they are built, over rates that drifted, with any economics, measures and memory."""
    n = draw(st.integers(1, 40))
    before, after = (draw(st.lists(st.floats(0, 20), min_size=n, max_size=n)) for _ in range(2))
    names = NAMES[: draw(st.integers(1, 4))]
    rules = Rules(slots_per_endpoint=draw(st.integers(1, 20)), replica_cap_rps=draw(st.floats(0.1, 50)))
    current = None
    if draw(st.booleans()):
        current = build(KeyRates.of(range(n), before), NAMES, rules=rules, key_check=0).plan
    rates = KeyRates.of(range(n), after)
    candidate = build(rates, names, rules=rules, key_check=0, previous=current)
    e = Economics(
        draw(st.floats(0, 1e5)),
        draw(st.floats(0, 1e4)),
        draw(st.floats(0, 1e4)),
        draw(st.floats(0, 1e3)),
        gain_min=1.05,
    )
    ready = draw(st.one_of(st.none(), st.sets(st.sampled_from(NAMES))))
    observed = Observed(
        draw(st.floats(0, 1e5)),
        None if ready is None else tuple(sorted(ready)),
        draw(st.one_of(st.none(), st.floats(0, 100))),
        draw(st.one_of(st.none(), st.floats(0, 100))),
        draw(st.one_of(st.none(), st.floats(0, 1e6))),
    )
    memory = draw(st.one_of(st.none(), st.builds(Memory, st.floats(0, 1e5), st.floats(0, 1e9))))
    difference = None if current is None else diff(current, candidate.plan)
    return Situation(rates, current, candidate, difference, e, observed, memory)


@given(situations())
def test_whatever_the_situation_there_is_one_verdict_with_a_reason(case: Situation) -> None:
    """Judging twice is judging once; the reason is one sentence, and numbers and memory go into a record as JSON."""
    verdict: Verdict = judge(case)
    assert verdict == judge(case)
    assert verdict.reason.endswith(".")
    assert "nan" not in verdict.reason
    json.dumps(verdict.numbers, allow_nan=False)
    json.dumps(asdict(verdict.memory), allow_nan=False)
    if verdict.decision == "flat":
        assert case.current is not None
        assert len(case.current)
