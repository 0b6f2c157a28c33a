"""What replanning costs: churn under drift and on membership change, in ranges over seeds (whole table: churn.py)."""

import statistics

import numpy as np
import pytest

from planner.admission import Rules
from planner.build import Built, build
from planner.diff import diff
from planner.rates import KeyRates
from planner.sticky import Limits
from service.plan import Plan
from tests.claims.churn import HELD_OUT, WALKS, Replan, replans
from tests.claims.workloads import Walk, lognormal

SEEDS = range(3)
UNLIMITED = Limits(keys_share=1.0, rate_share=1.0)


def mean(rows: list[Replan], field: str) -> float:
    return statistics.fmean(getattr(row, field) for row in rows)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("lognormal W128", 0.01),
        ("lognormal W512", 0.01),
        ("whales W128", 0.05),
        ("whales W512", 0.05),
        ("Zipf 1.0", 0.06),
        ("Zipf 1.2", 0.10),
    ],
)
def test_few_keys_change_under_drift(name: str, most: float) -> None:
    """Drift of sigma 0.3 an interval changes on average no more than this share of the keys that stay admitted."""
    rows = [row for seed in SEEDS for row in replans(WALKS[name], seed)]
    assert len(rows) == 6 * len(SEEDS)
    assert mean(rows, "keys") <= most
    assert max(row.keys for row in rows) <= 0.15


@pytest.mark.parametrize("name", ["whales W128", "Zipf 1.0", "Zipf 1.2"])
def test_imbalance_is_within_epsilon_or_fresh_lpt(name: str) -> None:
    """With no budget in the way, max / mean never exceeds the larger of 1 + epsilon and what fresh LPT reaches."""
    rows = [row for seed in SEEDS for row in replans(WALKS[name], seed, limits=UNLIMITED)]
    assert max(row.excess for row in rows) <= 1e-6
    assert {row.outcome for row in rows} == {"even"}


@pytest.mark.parametrize("name", list(HELD_OUT))
def test_other_shapes_and_seeds_behave_alike(name: str) -> None:
    """Held out: shapes and seeds that were not looked at while the rules were made; fresh LPT moves nearly all keys."""
    rows = [row for seed in (100, 101) for row in replans(HELD_OUT[name], seed)]
    assert mean(rows, "keys") <= 0.10
    assert min(row.keys for row in replans(HELD_OUT[name], 100, "lpt")) >= 0.8


RULES = Rules(slots_per_endpoint=128, replica_cap_rps=4.0)


def replanned(rates: KeyRates, previous: Plan, endpoints: tuple[str, ...]) -> Built:
    return build(rates, endpoints, rules=RULES, key_check=0, previous=previous)


@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_endpoint_moves_its_own_keys(lost: int, seed: int) -> None:
    """Losing 1 or 3 of 30 endpoints changes the keys that were there, hardly any other, and leaves the rest even."""
    rates = next(Walk(lognormal, 128).rates(seed, 0))
    names = tuple(f"endpoint-{i}" for i in range(30))
    before = build(rates, names, rules=RULES, key_check=0).plan
    after = replanned(rates, before, names[lost:])
    moved = diff(before, after.plan)
    there = sum(not set(before.target_names(row)).isdisjoint(names[:lost]) for row in range(len(before)))
    assert there - moved.dropped <= moved.keys_changed <= there + 0.002 * len(before)
    assert moved.keys_changed_fraction == pytest.approx(lost / 30, rel=0.35)
    assert after.shape.max_over_mean <= 1.05


@pytest.mark.parametrize("seed", SEEDS)
def test_a_new_endpoint_fills_in_steps_within_the_budget(seed: int) -> None:
    """A 31st endpoint gets keys that had no slot before, and few others, until it is at the floor, where it stays."""
    rates, rules = next(Walk(lognormal, 512).rates(seed, 0)), Rules(slots_per_endpoint=512, replica_cap_rps=4.0)
    names = tuple(f"endpoint-{i}" for i in range(31))
    plan, shares, changed = build(rates, names[:30], rules=rules, key_check=0).plan, list[float](), list[float]()
    for _ in range(6):
        made = build(rates, names, rules=rules, key_check=0, previous=plan)
        changed.append(diff(plan, made.plan).keys_changed_fraction)
        shares.append(made.shape.loads_rps[30] / float(np.mean(made.shape.loads_rps)))
        plan = made.plan
    assert shares == sorted(shares)
    assert 0.8 <= shares[-1] <= 1.05
    assert max(changed) <= 0.10
