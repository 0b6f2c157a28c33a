"""Rules of the placement that moves few keys."""

import math
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.placement import Placement, place
from planner.sticky import Limits, Previous, place_sticky

UNLIMITED = Limits(keys_share=1.0, rate_share=1.0, floor=0.0)


def previous_of(rows: list[list[int]]) -> Previous:
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    targets = np.array([t for row in rows for t in row], dtype=np.int64)
    return Previous(offsets, targets)


def targets_of(placement: Placement) -> list[list[int]]:
    return [
        placement.targets[first:last].tolist()
        for first, last in zip(placement.offsets, placement.offsets[1:], strict=False)
    ]


def sticky(
    rates: list[float],
    copies: list[int],
    rows: list[list[int]],
    endpoints: int,
    *,
    cold: float = 0.0,
    limits: Limits = UNLIMITED,
) -> tuple[Placement, str]:
    return place_sticky(
        np.array(rates),
        np.array(copies, dtype=np.int64),
        endpoints=endpoints,
        cold_load_rps=cold,
        previous=previous_of(rows),
        limits=limits,
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[float], list[int], list[list[int]], int, float]:
    endpoints = draw(st.integers(1, 6))
    n = draw(st.integers(0, 30))
    kinds = st.one_of(st.sampled_from([0.1, 1.0, 1.0, 2.0, 10.0, 40.0]), st.floats(1e-3, 50))
    rates = sorted(draw(st.lists(kinds, min_size=n, max_size=n)), reverse=True)
    copies = [draw(st.integers(1, endpoints)) for _ in range(n)]
    rows = [draw(st.lists(st.integers(0, endpoints - 1), unique=True, max_size=endpoints)) for _ in range(n)]
    return rates, copies, rows, endpoints, draw(st.sampled_from([0.0, 0.5, 20.0]))


@given(situations(), st.sampled_from([0.0, 0.02, 0.05, 0.3]))
def test_load_is_within_the_bound_or_as_fresh_lpt(
    situation: tuple[list[float], list[int], list[list[int]], int, float], epsilon: float
) -> None:
    """With budget enough, max / mean is at most 1 + epsilon, or what fresh LPT reaches on the same input; targets are
    as many as copies, distinct, and the loads are their sums.
    """
    rates, copies, rows, endpoints, cold = situation
    made, outcome = sticky(
        rates, copies, rows, endpoints, cold=cold, limits=Limits(epsilon, keys_share=1.0, rate_share=math.inf, floor=0)
    )
    loads = [cold] * endpoints
    for rate, k, targets in zip(rates, copies, targets_of(made), strict=True):
        assert len(set(targets)) == len(targets) == k
        for target in targets:
            loads[target] += rate / k
    assert made.loads_rps == pytest.approx(loads)
    fresh = place(rates, copies, endpoints=endpoints, cold_load_rps=cold)
    mean = sum(loads) / endpoints
    assert outcome in {"even", "fresh"}
    assert max(loads) <= max((1 + epsilon) * mean, *fresh.loads_rps) * (1 + 1e-6)


@given(situations())
def test_the_same_input_gives_the_same_placement(
    situation: tuple[list[float], list[int], list[list[int]], int, float],
) -> None:
    """Nothing depends on anything but the arguments."""
    rates, copies, rows, endpoints, cold = situation
    one, two = (sticky(rates, copies, rows, endpoints, cold=cold) for _ in range(2))
    assert one == two


def test_nothing_moves_when_load_is_even_enough() -> None:
    """Drift inside the bound moves no key, whatever the order of rates has become."""
    rng = Random(1)
    rates = sorted((rng.uniform(0.9, 1.1) for _ in range(600)), reverse=True)
    rows = [[i % 6] for i in range(600)]
    rng.shuffle(rows)
    made, outcome = sticky(rates, [1] * 600, rows, 6)
    assert (targets_of(made), outcome) == (rows, "even")


def test_few_middling_keys_move_off_an_overloaded_endpoint() -> None:
    """Of one heavy, some middling and many light keys, the middling one that is just enough moves."""
    rates = [6.0, 1.5, 1.0, *[0.01] * 50, *[1.0] * 7]
    order = sorted(range(len(rates)), key=lambda i: -rates[i])
    rows = [[0]] * 53 + [[1]] * 7
    made, _ = sticky([rates[i] for i in order], [1] * 60, [rows[i] for i in order], 2, limits=Limits(0.1, 1, 1, 0))
    moved = [rates[i] for i, targets in zip(order, targets_of(made), strict=True) if targets != rows[i]]
    assert moved == [1.0]


def test_heavy_keys_that_grew_are_parted() -> None:
    """Two keys that one endpoint cannot carry together part, though every other endpoint is full of light keys."""
    rates = [5.0, 5.0, *[0.1] * 100]
    rows = [[0], [0], *([1 + i % 2] for i in range(100))]
    made, outcome = sticky(rates, [1] * 102, rows, 3, limits=Limits(0.2, 1, 1, 0))
    targets = targets_of(made)
    assert outcome == "even"
    assert targets[0] != targets[1]
    assert max(made.loads_rps) <= 1.2 * 20 / 3 * (1 + 1e-9)


def test_a_lost_endpoint_moves_only_what_was_there() -> None:
    """Keys without a previous endpoint are dealt out; all others stay."""
    rows = [[i % 5] for i in range(100)]
    left = [row if row != [4] else [] for row in rows]
    made, _ = sticky([1.0] * 100, [1] * 100, left, 4)
    assert [t for t, row in zip(targets_of(made), left, strict=True) if row] == [row for row in left if row]
    assert made.loads_rps == (25, 25, 25, 25)


def test_a_new_endpoint_fills_over_a_few_cycles() -> None:
    """Each cycle gives a new endpoint a part of the mean, with few and heavy keys, until it is at the floor."""
    rates = sorted((Random(3).lognormvariate(0, 1) for _ in range(400)), reverse=True)
    rows = [[i % 4] for i in range(400)]
    mean, limits, shares = sum(rates) / 5, Limits(0.5, 0.1, 0.2, floor=0.9, fill=0.25), list[float]()
    for _ in range(6):
        made, _ = sticky(rates, [1] * 400, rows, 5, limits=limits)
        moved = sum(a != b for a, b in zip(targets_of(made), rows, strict=True))
        assert moved <= 40
        rows = targets_of(made)
        shares.append(made.loads_rps[4] / mean)
    assert shares[0] == pytest.approx(0.25, abs=0.05)
    assert shares[1] == pytest.approx(0.5, abs=0.05)
    assert shares[-1] == pytest.approx(0.9, abs=0.05)


def test_the_budget_ends_the_levelling() -> None:
    """No more than the budget's keys and rate move for balance, and the outcome says so; the next cycle goes on."""
    rates = [1.0] * 400
    rows = [[0]] * 200 + [[1 + i % 3] for i in range(200)]
    for limits, most in ((Limits(0.05, 0.1, 1.0, 0), 40), (Limits(0.05, 1.0, 0.05, 0), 20)):
        made, outcome = sticky(rates, [1] * 400, rows, 4, limits=limits)
        assert outcome == "budget"
        assert sum(a != b for a, b in zip(targets_of(made), rows, strict=True)) == most
    made, outcome = sticky(rates, [1] * 400, rows, 4)
    assert outcome == "even"


def test_a_key_with_fewer_copies_leaves_its_most_loaded_endpoint() -> None:
    """What is given up is the copy whose endpoint needs relief most; the others stay in their order."""
    made, _ = sticky([4.0, 3.0], [1, 2], [[1], [0, 1, 2]], 3, limits=Limits(9.0, 1, 1, 0))
    assert targets_of(made) == [[1], [0, 2]]
