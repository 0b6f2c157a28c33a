"""The rising fit against its definition, and where it crosses a level."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.isotonic import Crossing, crossing, rising

POINTS = st.lists(
    st.tuples(st.floats(0, 1).map(lambda value: round(value, 3)), st.integers(1, 50)), min_size=1, max_size=7
)


def best_of_all_partitions(values: list[float], weights: list[float]) -> list[float]:
    """Return the least squares among all rising fits that are constant on stretches: the optimum is one of them."""
    n = len(values)
    best: tuple[float, list[float]] = (math.inf, [])
    for cuts in range(2 ** (n - 1)):
        edges = [0, *(i + 1 for i in range(n - 1) if cuts >> i & 1), n]
        fit: list[float] = []
        for low, high in pairwise(edges):
            total = sum(weights[low:high])
            mean = sum(v * w for v, w in zip(values[low:high], weights[low:high], strict=True)) / total
            fit += [mean] * (high - low)
        if all(a <= b + 1e-12 for a, b in pairwise(fit)):
            cost = sum(w * (v - f) ** 2 for v, f, w in zip(values, fit, weights, strict=True))
            best = min(best, (cost, fit))
    return best[1]


@given(POINTS)
def test_the_fit_is_the_nearest_rising_sequence(points: list[tuple[float, int]]) -> None:
    """It never falls, keeps the weighted mean, and equals the best of all that are constant on stretches."""
    values, weights = [value for value, _ in points], [float(weight) for _, weight in points]
    fit = rising(values, weights)
    assert all(a <= b + 1e-12 for a, b in pairwise(fit))
    assert fit == pytest.approx(best_of_all_partitions(values, weights), abs=1e-9)
    assert sum(f * w for f, w in zip(fit, weights, strict=True)) == pytest.approx(
        sum(v * w for v, w in zip(values, weights, strict=True))
    )
    assert rising(fit, weights) == pytest.approx(fit)


@given(POINTS, st.floats(0.01, 0.9))
def test_a_crossing_lies_where_the_fit_goes_above_the_level(points: list[tuple[float, int]], level: float) -> None:
    """It lies between the last load whose fit is not above the level and the next, whatever the order of the loads."""
    loads = [1.5 * (i + 1) for i in range(len(points))]
    values, weights = [value for value, _ in points], [float(weight) for _, weight in points]
    found = crossing(loads, values, weights, level)
    turned = crossing(loads[::-1], values[::-1], weights[::-1], level)
    assert found == turned
    fit = rising(values, weights)
    above = [load for load, share in zip(loads, fit, strict=True) if share > level]
    held = [load for load, share in zip(loads, fit, strict=True) if share <= level]
    if not above:
        assert found == Crossing(loads[-1], "above")
    elif not held:
        assert found == Crossing(loads[0], "below")
    else:
        assert found.where == "crossed"
        assert held[-1] <= found.at <= above[0]


def test_between_two_loads_the_logarithm_counts() -> None:
    """From 0.1 % to 10 %, 1 % lies in the middle; a share of 0 counts as half a trial."""
    assert crossing([10, 20], [0.001, 0.1], [1e6, 1e6], 0.01).at == pytest.approx(15)
    assert crossing([10, 20], [0.0, 0.1], [500, 500], 0.01).at == pytest.approx(15)


def test_few_trials_that_were_all_in_time_are_not_interpolated() -> None:
    """When half a trial is more than the level, the last load that held is the answer, not one below it."""
    assert crossing([10, 20], [0.0, 1.0], [5, 5], 0.01) == Crossing(10, "crossed")


def test_equal_loads_are_drawn_together() -> None:
    """Two steps at one load count as one with both their trials."""
    assert crossing([10, 10, 20], [0.0, 0.002, 0.1], [500, 500, 1e6], 0.01).at == pytest.approx(15)
