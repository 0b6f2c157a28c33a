"""Predictions from rates: bounds, directions, what stays exact, and what staleness and warm-up count."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.predict import (
    FOREVER_S,
    STEERED,
    Economics,
    Prediction,
    flat_resident_s,
    gain,
    max_over_mean,
    predict,
    slots_of,
    staleness_tokens_per_s,
    warm_up_tokens,
)
from planner.rates import KeyRates
from service.plan import Parameters, Plan

ECONOMICS = Economics(cache_tokens_per_endpoint=10_000, prefix_tokens=1000, unique_tokens=200, output_tokens=50)
NAMES = ("a", "b", "c")


def plan_of(rows: dict[int, tuple[int, ...]], endpoints: tuple[str, ...] = NAMES, cap: float = 1.0) -> Plan:
    """Return a plan that gives each key these targets."""
    offsets, targets = [0], list[int]()
    for row in rows.values():
        targets += row
        offsets.append(len(targets))
    return Plan(
        endpoints,
        array("Q", rows),
        array("I", offsets),
        array("I", targets),
        array("f", [1.0] * len(rows)),
        key_check=0,
        parameters=Parameters(replica_cap_rps=cap),
    )


rates = st.dictionaries(
    st.integers(0, 2**64 - 1),
    st.one_of(st.just(0.0), st.floats(1e-9, 100.0)),
    min_size=1,
    max_size=30,
)
economics = st.builds(
    Economics,
    cache_tokens_per_endpoint=st.floats(1, 1e6),
    prefix_tokens=st.floats(1, 1e5),
    unique_tokens=st.floats(0, 1e4),
    output_tokens=st.floats(0, 1e3),
)


@st.composite
def planned(draw: st.DrawFn) -> tuple[KeyRates, Plan, tuple[str, ...]]:
    """Rates, with or without sizes of their own, and a plan for some of the keys on 1 to 5 endpoints."""
    keys, r = draw(rates), draw(st.integers(1, 5))
    names = tuple(f"endpoint-{i}" for i in range(r))
    sizes = draw(st.one_of(st.none(), st.lists(st.floats(1, 1e4), min_size=len(keys), max_size=len(keys))))
    chosen = draw(st.lists(st.sampled_from(list(keys)), unique=True))
    targets = st.lists(st.integers(0, r - 1), min_size=1, max_size=r, unique=True)
    rows = {key: tuple(draw(targets)) for key in chosen}
    return KeyRates.of(keys, keys.values(), sizes), plan_of(rows, names), names


@given(planned(), economics)
def test_everything_predicted_is_in_its_range(given_: tuple[KeyRates, Plan, tuple[str, ...]], e: Economics) -> None:
    """Hit rates are 0 to 1, times and work not negative, loads add up to the rates, whatever the input."""
    keys, plan, names = given_
    found = predict(keys, plan, names, e)
    assert 0 <= found.hit_rate <= 1
    assert 0 <= found.token_hit_rate <= 1
    assert found.missed_tokens_per_s >= 0
    assert (found.work_tokens_per_s >= 0).all()
    assert (found.resident_s >= 0).all()
    assert found.bottleneck >= 1
    assert math.isfinite(found.service_s)
    assert float(found.loads_rps.sum()) == pytest.approx(keys.total_rps)


@given(planned(), economics, st.floats(1, 100))
def test_a_larger_cache_never_predicts_fewer_hits(
    given_: tuple[KeyRates, Plan, tuple[str, ...]], e: Economics, factor: float
) -> None:
    """τ and hit rates rise with the cache."""
    keys, plan, names = given_
    small = predict(keys, plan, names, e)
    large = predict(
        keys,
        plan,
        names,
        Economics(e.cache_tokens_per_endpoint * factor, e.prefix_tokens, e.unique_tokens, e.output_tokens),
    )
    assert (large.resident_s >= small.resident_s * (1 - 1e-6)).all()
    assert large.hit_rate >= small.hit_rate - 1e-6
    assert large.token_hit_rate >= small.token_hit_rate - 1e-6


@given(planned(), economics)
def test_what_is_touched_within_tau_fills_the_cache(
    given_: tuple[KeyRates, Plan, tuple[str, ...]], e: Economics
) -> None:
    """Rule 3 holds at the τ that is returned: tokens touched within it are the cache, or τ is endless and all fits."""
    keys, plan, names = given_
    found = predict(keys, plan, names, e)
    slots = slots_of(keys, plan, names)
    sizes = np.full(len(keys), e.prefix_tokens) if keys.prefix_tokens is None else keys.prefix_tokens
    cold = slots.copies == 0
    for i, tau in enumerate(found.resident_s.tolist()):
        here = slots.targets == i
        held = np.concatenate((sizes[slots.rows[here]], sizes[cold]))
        seen = np.concatenate((slots.shares_rps[here], keys.rates_rps[cold] / len(names)))
        if tau > FOREVER_S / 2:
            assert held[seen > 0].sum() <= e.cache_tokens_per_endpoint * (1 + 1e-9)
            continue
        touched = (held * -np.expm1(-seen * tau)).sum() + tau * seen.sum() * (e.unique_tokens + e.output_tokens)
        assert touched == pytest.approx(e.cache_tokens_per_endpoint, rel=2e-3)


@given(planned(), economics)
def test_an_empty_plan_gains_nothing(given_: tuple[KeyRates, Plan, tuple[str, ...]], e: Economics) -> None:
    """The plan without keys is Flat-LB, exactly: the gain is 1, and neither is stale against the other."""
    keys, _, names = given_
    flat, empty = predict(keys, None, names, e), predict(keys, plan_of({}, names), names, e)
    assert gain(flat, empty) == 1
    assert staleness_tokens_per_s(flat, empty, e) == 0


@given(planned(), economics)
def test_a_key_alone_on_its_endpoint_is_hit_as_a_poisson_key_is(
    given_: tuple[KeyRates, Plan, tuple[str, ...]], e: Economics
) -> None:
    """Predicted again from the τ returned, key by key without classes, the hit rate is the same within 1e-3."""
    keys, plan, names = given_
    found = predict(keys, plan, names, e)
    slots = slots_of(keys, plan, names)
    hits = (slots.shares_rps * -np.expm1(-slots.shares_rps * found.resident_s[slots.targets])).sum()
    for rate in keys.rates_rps[(slots.copies == 0) & (keys.rates_rps > 0)].tolist():
        each = rate / len(names)
        hits += sum(each * -math.expm1(-each * tau) for tau in found.resident_s.tolist())
    assert found.hit_rate == pytest.approx(hits / keys.total_rps if keys.total_rps else 0.0, abs=1e-3)


def test_affinity_gains_when_flat_cannot_hold_all() -> None:
    """Nine keys on three endpoints: each holds its three for long, while under Flat-LB nine compete in every cache."""
    keys = KeyRates.of(range(9), [0.5] * 9)
    plan = plan_of({i: (i % 3,) for i in range(9)})
    flat, found = predict(keys, None, NAMES, ECONOMICS), predict(keys, plan, NAMES, ECONOMICS)
    assert found.token_hit_rate > flat.token_hit_rate + 0.1
    assert gain(flat, found) == pytest.approx(flat.service_s / found.service_s / found.bottleneck)
    assert gain(flat, found) > 1.2
    two = predict(keys, plan_of({i: (i % 3, (i + 1) % 3) for i in range(9)}), NAMES, ECONOMICS)
    assert gain(flat, two) == pytest.approx(flat.service_s / two.service_s)


def test_a_hot_key_of_one_copy_takes_the_gain_away() -> None:
    """A key with most of the traffic on one endpoint is a bottleneck; on all of them it is none."""
    keys = KeyRates.of(range(4), [9.0, 0.5, 0.5, 0.5])
    flat = predict(keys, None, NAMES, ECONOMICS)
    alone = predict(keys, plan_of({0: (0,)}), NAMES, ECONOMICS)
    everywhere = predict(keys, plan_of({0: (0, 1, 2)}), NAMES, ECONOMICS)
    assert alone.bottleneck > 2
    assert everywhere.bottleneck == 1
    assert gain(flat, alone) < 0.5
    assert gain(flat, everywhere) == pytest.approx(1.0)
    two = predict(keys, plan_of({0: (0, 1)}), NAMES, ECONOMICS)
    assert two.bottleneck == pytest.approx(9.0 / 2 / (10.5 / 3), rel=0.1)


def test_cold_work_is_no_bottleneck() -> None:
    """What is not planned is sent to the endpoint that has time, however uneven the work of the plan is beside it."""
    keys = KeyRates.of(range(4), [9.0, 0.5, 0.5, 0.5])
    found = predict(keys, plan_of({3: (0,)}), NAMES, ECONOMICS)
    assert max_over_mean(found.work_tokens_per_s) > 1.05
    assert found.bottleneck == 1


def busy_at_p99(service_s: float, wait_s: float) -> float:
    """Return the load at which 1 % of requests, all of one length, wait longer: a queue run request by request."""
    rng, low, high = np.random.default_rng(0), 0.1, 1.0
    gaps = rng.exponential(service_s, 200_000)
    for _ in range(8):
        busy = (low + high) / 2
        waits, wait = [], 0.0
        for gap in (gaps / busy).tolist():
            waits.append(wait)
            wait = max(0.0, wait + service_s - gap)
        low, high = (busy, high) if float(np.percentile(waits, 99)) <= wait_s else (low, busy)
    return low


@pytest.mark.parametrize("slo", [2.0, 4.0, 8.0, 16.0])
def test_what_an_endpoint_bears_alone_is_that_of_a_queue(slo: float) -> None:
    """All keys pinned, all work unique: the bottleneck is an M/D/1 queue's, or told worse where waits are short."""
    e = Economics(1e9, prefix_tokens=1, unique_tokens=1000, prefill_tokens_per_s=1000, slo_services=slo)
    keys = KeyRates.of(range(30), [0.01] * 30)
    found = predict(keys, plan_of({i: (i % 3,) for i in range(30)}), NAMES, e)
    queue = STEERED / busy_at_p99(1.0, slo)
    assert 0.98 * queue <= found.bottleneck <= (1.08 if slo >= 8 else 1.5) * queue


def test_copies_share_a_key_and_are_hit_less_often() -> None:
    """A key of k copies is seen at λ / k on each, so with the same τ each copy is asked again later."""
    keys = KeyRates.of(range(100), [0.1] * 100)
    rows = {i: (i % 3,) for i in range(99)}
    flat, one = predict(keys, None, NAMES, ECONOMICS), predict(keys, plan_of(rows), NAMES, ECONOMICS)
    three = predict(keys, plan_of(dict.fromkeys(rows, (0, 1, 2))), NAMES, ECONOMICS)
    assert one.hit_rate > 2 * three.hit_rate
    assert three.hit_rate == pytest.approx(flat.hit_rate, rel=1e-3)
    assert three.loads_rps.tolist() == pytest.approx([10 / 3] * 3)


def test_targets_that_are_gone_and_keys_without_rates_are_left_out() -> None:
    """A plan's copies count on today's endpoints only; a key that lost all of them is cold."""
    keys = KeyRates.of([1, 2, 3], [1.0, 2.0, 0.0])
    plan = plan_of({1: (0, 1), 2: (0,), 3: (1,), 4: (2,)})
    slots = slots_of(keys, plan, ("b", "c"))
    assert slots.copies.tolist() == [1, 0, 0]
    assert slots.targets.tolist() == [0]
    assert slots.shares_rps.tolist() == [1.0]


def test_nothing_is_evicted_when_everything_fits_and_nothing_else_comes() -> None:
    """Without unique and output tokens, τ is infinite where all prefixes fit, and every request is a hit."""
    e = Economics(cache_tokens_per_endpoint=3000, prefix_tokens=1000)
    found = predict(KeyRates.of([1, 2, 3], [1.0, 2.0, 0.1]), None, NAMES, e)
    assert np.isinf(found.resident_s).all()
    assert found.hit_rate == found.token_hit_rate == 1
    assert found.service_s == 0


def test_a_plan_keeps_prefixes_longer_than_flat_does() -> None:
    """The τ of Flat-LB is a safe one for admission: under a plan of hits fewer tokens come in, and stay longer."""
    keys = KeyRates.of(range(90), [0.2] * 90)
    plan = plan_of({i: (i % 3,) for i in range(24)})
    tau = flat_resident_s(keys, NAMES, ECONOMICS)
    assert 0 < tau < predict(keys, plan, NAMES, ECONOMICS).resident_s.min()
    assert tau == predict(keys, None, NAMES, ECONOMICS).resident_s[0]


def test_warm_up_counts_new_targets_of_keys_that_were_planned() -> None:
    """A moved key costs its prefix times the chance of a request there; a new or a kept one costs nothing."""
    keys = KeyRates.of([1, 2, 3], [0.01, 5.0, 5.0], [1000, 400, 7000])
    old, new = plan_of({1: (0,), 2: (1,)}), plan_of({1: (1,), 2: (1,), 3: (2,)})
    cost = warm_up_tokens(keys, old, new, NAMES, ECONOMICS)
    assert cost == pytest.approx(1000 * (1 - math.exp(-0.01 * 300)))
    assert warm_up_tokens(keys, None, new, NAMES, ECONOMICS) == 0
    assert warm_up_tokens(keys, new, new, NAMES, ECONOMICS) == 0


def test_warm_up_of_one_more_copy_is_its_share_alone() -> None:
    """A key that gets a second copy computes its prefix there once, at λ / 2."""
    keys = KeyRates.of([1], [0.02])
    cost = warm_up_tokens(keys, plan_of({1: (0,)}), plan_of({1: (0, 2)}), NAMES, ECONOMICS)
    assert cost == pytest.approx(1000 * (1 - math.exp(-0.01 * 300)))


def prediction(missed: float, work: list[float], cold: float = 0.0) -> Prediction:
    total = np.array(work)
    return Prediction(0, 0, missed, 0, 0, 1, np.zeros(len(work)), total, total - cold, np.zeros(len(work)))


def test_staleness_is_misses_and_work_beyond_the_bound() -> None:
    """Work up to imbalance_max times the mean queues nothing; beyond, it counts, less what the other plan has of it."""
    e = Economics(imbalance_max=1.1)
    even, tilted = prediction(100, [100.0, 100.0]), prediction(130, [150.0, 50.0])
    assert staleness_tokens_per_s(tilted, even, e) == pytest.approx(30 + 40)
    assert staleness_tokens_per_s(even, tilted, e) == pytest.approx(-70)
    assert staleness_tokens_per_s(prediction(100, [109.0, 91.0]), even, e) == 0


def test_cold_work_does_not_queue_behind_an_imbalance() -> None:
    """What is not planned goes to another endpoint, so only planned work beyond the bound is counted."""
    e = Economics(imbalance_max=1.1)
    tilted = prediction(100, [150.0, 50.0], cold=30.0)
    assert staleness_tokens_per_s(tilted, prediction(100, [100.0, 100.0]), e) == pytest.approx(10)


def test_max_over_mean_of_nothing_is_one() -> None:
    """An idle fleet is even."""
    assert max_over_mean(np.zeros(3)) == 1
    assert max_over_mean(np.array([3.0, 1.0])) == 1.5
