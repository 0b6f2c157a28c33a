"""LPT: distinct targets, loads that add up, one result for one input, and how far from the best it ends."""

import itertools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.placement import Placement, place

Jobs = list[tuple[float, int]]


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, Jobs, float]:
    """R, keys as (rate, copies) by rate, and the cold load of each endpoint."""
    r = draw(st.integers(1, 8))
    rate = st.one_of(st.sampled_from([0.5, 1.0, 2.0]), st.floats(min_value=1e-6, max_value=1e3))
    jobs = draw(st.lists(st.tuples(rate, st.integers(1, r)), max_size=30))
    return r, sorted(jobs, reverse=True), draw(st.sampled_from([0.0, 0.1, 50.0]))


def placed(r: int, jobs: Jobs, cold: float) -> Placement:
    return place([rate for rate, _ in jobs], [k for _, k in jobs], endpoints=r, cold_load_rps=cold)


def rows(placement: Placement) -> list[list[int]]:
    return [list(placement.targets[a:b]) for a, b in itertools.pairwise(placement.offsets)]


@given(fleets())
def test_every_key_has_its_copies_on_distinct_endpoints_and_loads_add_up(fleet: tuple[int, Jobs, float]) -> None:
    """Each key has exactly `copies` distinct targets, and loads are cold load plus shares, recomputed from targets."""
    r, jobs, cold = fleet
    placement = placed(*fleet)
    loads = [cold] * r
    for (rate, copies), targets in zip(jobs, rows(placement), strict=True):
        assert len(targets) == len(set(targets)) == copies
        for target in targets:
            loads[target] += rate / copies
    assert placement.loads_rps == pytest.approx(loads)


@given(fleets())
def test_each_key_goes_to_the_least_loaded(fleet: tuple[int, Jobs, float]) -> None:
    """Step by step, a key's targets are the endpoints of least load so far, ties to the lowest index."""
    r, jobs, cold = fleet
    loads = [cold] * r
    for (rate, copies), targets in zip(jobs, rows(placed(*fleet)), strict=True):
        assert targets == sorted(range(r), key=lambda i: (loads[i], i))[:copies]
        for target in targets:
            loads[target] += rate / copies


@given(fleets())
def test_the_same_input_gives_the_same_bytes(fleet: tuple[int, Jobs, float]) -> None:
    """Two placements of one input are equal to the last byte."""
    one, two = placed(*fleet), placed(*fleet)
    assert (one.offsets.tobytes(), one.targets.tobytes()) == (two.offsets.tobytes(), two.targets.tobytes())


def test_against_the_best_of_all_placements(record_property: Callable[[str, object], None]) -> None:
    """On up to 6 keys and 3 endpoints LPT is never better than the best of all; how much worse is recorded."""
    rng, worst = Random(0), 1.0
    for _ in range(60):
        r, cold = rng.randint(2, 3), rng.choice([0.0, 1.0])
        jobs = sorted(
            ((rng.uniform(0.1, 10), rng.choice([1, 1, 1, 2])) for _ in range(rng.randint(1, 6))), reverse=True
        )
        options = [list(itertools.combinations(range(r), k)) for _, k in jobs]
        best = min(_highest(r, cold, jobs, choice) for choice in itertools.product(*options))
        ratio = max(placed(r, jobs, cold).loads_rps) / best
        assert ratio > 1 - 1e-12
        worst = max(worst, ratio)
    record_property("worst_lpt_over_best", worst)


def _highest(r: int, cold: float, jobs: Jobs, choice: tuple[tuple[int, ...], ...]) -> float:
    loads = [cold] * r
    for (rate, copies), targets in zip(jobs, choice, strict=True):
        for target in targets:
            loads[target] += rate / copies
    return max(loads)


def test_nothing_to_place() -> None:
    """Without keys every endpoint bears its share of the cold tail, and offsets are those of no row."""
    placement = place([], [], endpoints=3, cold_load_rps=2.0)
    assert (list(placement.offsets), list(placement.targets), placement.loads_rps) == ([0], [], (2.0, 2.0, 2.0))
