"""Which loads are tried, and what is read from them, on curves that are known."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from planner.ladder import AROUND, BROKEN, LATE, Limits, Step, find, interval, next_step

SLOS = {"ttft": 1.0}
LIMITS = Limits(start_rps=0.5, max_rps=1000.0, least_s=10.0, total_s=3600.0)


def step(rate: float, share: float, *, requests: int = 1000, late: bool = False, name: str = "ttft") -> Step:
    """Return a step of which that share is later than 1 s, spread evenly."""
    over = np.diff(np.floor(np.arange(requests + 1) * share + 1e-9)) > 0
    return Step(rate, 10.0, {name: np.where(over, 2.0, 0.5)}, late=late)


def climb(share_at: Callable[[float], float], limits: Limits = LIMITS, late_above: float = math.inf) -> list[Step]:
    """Take steps on a curve of share over load until the ladder has enough."""
    steps: list[Step] = []
    left_s = limits.total_s
    while (asked := next_step(steps, SLOS, limits, left_s)) is not None:
        assert 0 < asked.rate_rps <= limits.max_rps
        assert limits.least_s <= asked.duration_s <= left_s
        requests = max(1, int(asked.rate_rps * asked.duration_s))
        steps.append(
            step(asked.rate_rps, share_at(asked.rate_rps), requests=requests, late=asked.rate_rps > late_above)
        )
        left_s -= asked.duration_s
        assert len(steps) < 100, "the ladder does not end"
    return steps


def knee(at: float, steepness: float = 30.0) -> Callable[[float], float]:
    """Return a curve that passes 1 % at `at`."""
    return lambda rate: min(1.0, LATE * (rate / at) ** steepness)


@pytest.mark.parametrize("at", [0.7, 3.0, 15.0, 120.0])
@pytest.mark.parametrize("steepness", [8.0, 60.0])
def test_the_crossing_is_found_wherever_it_is(at: float, steepness: float) -> None:
    """Loads rise to a clearly broken one, then ten steps close in; the crossing is found within 3 %."""
    steps = climb(knee(at, steepness), replace(LIMITS, total_s=36_000))
    broken = next(i for i, taken in enumerate(steps) if taken.share_over(SLOS) > BROKEN)
    up = [taken.rate_rps for taken in steps[: broken + 1]]
    assert up == sorted(up)
    assert up[0] == LIMITS.start_rps
    assert all(later <= 1.5 * earlier * (1 + 1e-9) for earlier, later in pairwise(up))
    assert len(steps) - broken - 1 == AROUND
    assert find(steps, SLOS).where == "crossed"
    assert find(steps, SLOS).rate_rps == pytest.approx(at, rel=0.03)
    assert all(abs(taken.rate_rps / at - 1) < 0.25 for taken in steps[-6:])


def test_a_first_load_that_is_broken_is_gone_below() -> None:
    """When the first load is too much already, lower ones are tried, and the crossing below it is found."""
    assert find(climb(knee(0.2, 8.0)), SLOS).rate_rps == pytest.approx(0.2, rel=0.05)


def test_an_endpoint_that_bears_nothing_ends_the_ladder() -> None:
    """After five halvings that are all broken it is over, and the lowest load is said to be too much."""
    steps = climb(lambda rate: 1.0)
    assert len(steps) == 6
    found = find(steps, SLOS)
    assert (found.where, found.rate_rps) == ("below", 0.5 / 32)


def test_never_more_than_the_highest_load_allowed() -> None:
    """The ladder ends at the highest load when that holds; all that is known is that the endpoint bears as much."""
    steps = climb(knee(50.0), Limits(0.5, 10.0, 10.0, 3600.0))
    assert max(taken.rate_rps for taken in steps) == 10.0
    found = find(steps, SLOS)
    assert (found.where, found.rate_rps) == ("above", 10.0)


def test_a_late_client_ends_the_ladder_and_its_steps_do_not_count() -> None:
    """A client that cannot send in time says nothing: the load is tried again, then the ladder ends."""
    steps = climb(knee(50.0), late_above=10.0)
    late = [taken for taken in steps if taken.late]
    assert 2 <= len(late) <= 5
    assert not any(taken.usable for taken in late)
    found = find([taken for taken in steps if taken.usable], SLOS)
    assert found.where == "above"
    assert found.rate_rps <= 10.0


def test_no_step_without_the_time_for_it() -> None:
    """A ladder out of time ends, whatever it knows by then."""
    assert next_step([], SLOS, LIMITS, LIMITS.least_s - 1) is None
    assert next_step([step(1.0, 0.0)], SLOS, LIMITS, 0.0) is None


def test_the_slo_that_breaks_first_bounds() -> None:
    """Of two SLOs the lower crossing counts, and is named."""
    both = [
        Step(rate, 10.0, {"ttft": step(rate, ttft).latencies_s["ttft"], "itl": step(rate, itl).latencies_s["ttft"]})
        for rate, ttft, itl in ((10.0, 0.001, 0.001), (20.0, 0.005, 0.1), (30.0, 0.2, 0.5))
    ]
    found = find(both, {"ttft": 1.0, "itl": 1.0})
    assert found.bound_by == "itl"
    assert found.rate_rps == pytest.approx(15, rel=0.01)


def test_failed_requests_come_too_late() -> None:
    """A request that failed is later than any SLO."""
    steps = [
        Step(rate, 10.0, {"ttft": np.array([0.1] * n + [np.inf] * bad)}) for rate, n, bad in ((1, 99, 0), (2, 90, 9))
    ]
    assert find(steps, {"ttft": 1e9}).where == "crossed"


def test_the_interval_holds_the_crossing_and_shrinks_with_requests() -> None:
    """More requests make it narrower; the same seed gives the same interval."""
    loads = [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    few, many = ([step(at, knee(14.6, 15)(at), requests=n) for at in loads] for n in (400, 20_000))
    wide, narrow = interval(few, SLOS, 3, 200), interval(many, SLOS, 3, 200)
    assert wide == interval(few, SLOS, 3, 200)
    assert wide[0] <= find(few, SLOS).rate_rps <= wide[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]


def test_requests_that_are_late_together_make_the_interval_wider() -> None:
    """Queues make neighbours late together; an interval that draws them singly would be too narrow."""
    loads = [12.0, 13.0, 14.0, 15.0, 16.0]
    spread = [step(at, knee(14.6, 15)(at), requests=2000) for at in loads]
    bunched = [Step(s.rate_rps, 10.0, {"ttft": np.sort(s.latencies_s["ttft"])}) for s in spread]
    even, uneven = interval(spread, SLOS, 0, 200), interval(bunched, SLOS, 0, 200)
    assert uneven[1] - uneven[0] > 2 * (even[1] - even[0])


def test_a_late_step_around_the_crossing_is_taken_again() -> None:
    """One hiccup of the client costs its time, and no step of the ten."""
    steps = climb(knee(15.0))
    broken = next(i for i, taken in enumerate(steps) if taken.share_over(SLOS) > BROKEN)
    late = replace(steps[broken + 1], late=True)
    before, after = steps[: broken + 1], [*steps[: broken + 1], late]
    assert next_step(after, SLOS, LIMITS, 1000.0) == next_step(before, SLOS, LIMITS, 1000.0)


def test_a_load_that_is_just_too_much_at_the_highest_allowed_closes_in_as_well() -> None:
    """3 % late at the highest load is a crossing below it: ten steps more, none above, and it is found."""
    steps = climb(knee(9.0, 10.0), Limits(0.5, 10.0, 10.0, 36_000))
    top = next(i for i, taken in enumerate(steps) if taken.rate_rps == 10.0)
    assert LATE < steps[top].share_over(SLOS) < BROKEN
    assert len(steps) - top - 1 == AROUND
    assert find(steps, SLOS).rate_rps == pytest.approx(9.0, rel=0.03)


def test_a_first_load_that_is_just_too_much_is_gone_below() -> None:
    """It need not be clearly broken: without a load that held there is no crossing."""
    steps = climb(knee(0.45, 10.0), Limits(0.5, 0.5, 10.0, 36_000))
    assert LATE < steps[0].share_over(SLOS) < BROKEN
    assert steps[1].rate_rps == 0.25
    assert find(steps, SLOS).rate_rps == pytest.approx(0.45, rel=0.03)


def test_one_slow_request_at_a_low_load_is_a_hiccup() -> None:
    """1 of 12 is more than 5 %, and no reason to look for the crossing there: the ladder goes on up, with care."""
    hiccup = [step(0.5, 0.0, requests=8), step(0.75, 1 / 12, requests=12)]
    asked = next_step(hiccup, SLOS, LIMITS, 1000.0)
    assert asked is not None
    assert asked.rate_rps == pytest.approx(0.75 * 1.2)
    above = [*hiccup, *(step(at, knee(14.6, 15)(at)) for at in (5.0, 10.0, 14.0, 15.0, 16.0))]
    assert find(above, SLOS).rate_rps == pytest.approx(14.6, rel=0.03)
    sure = [step(0.5, 0.0, requests=8), step(0.75, 0.5, requests=12)]
    between = next_step(sure, SLOS, LIMITS, 1000.0)
    assert between is not None
    assert 0.5 <= between.rate_rps < 0.75
