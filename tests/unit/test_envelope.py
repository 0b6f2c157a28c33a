"""When a plan gives way to Flat-LB for what is measured, and how it comes back by itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.envelope import ACTIVE_HALF_LIFE_S, LEAVES_MAX, Memory, Observed, Watched, watch
from planner.predict import Economics

ECONOMICS = Economics(p99_ratio_max=1.25, active_ratio_max=1.5, back_after_s=600.0)


def p99(now_s: float, seconds: float | None, active: float | None = None) -> Observed:
    return Observed(now_s, None, seconds, 2.0, active)


class Pool:
    """A pool that does what is watched for: a plan in service until it has to go, back when it may."""

    def __init__(self, step_s: float = 100.0) -> None:
        self.now_s, self.step_s, self.planned, self.memory = 1000.0, step_s, True, Memory(1000.0)

    def see(self, seconds: float | None = 2.0, active: float | None = None) -> str:
        self.now_s += self.step_s
        found = watch(self.memory, p99(self.now_s, seconds, active), ECONOMICS, planned=self.planned)
        self.memory = found.memory
        self.planned = found.state == "inside"
        return found.state


def test_p99_above_the_envelope_takes_the_plan_away_at_once() -> None:
    """At the bound the plan stays, above it the plan goes, and the sentence has both numbers."""
    memory = Memory(0.0)
    assert watch(memory, p99(1, 2.5), ECONOMICS, planned=True).state == "inside"
    found = watch(memory, p99(1, 2.6), ECONOMICS, planned=True)
    assert found.state == "left"
    assert "p99 of TTFT is 2.60 s, 1.30 times the 2.00 s before" in found.reason
    assert "600 s" in found.reason
    assert found.numbers == {"p99_ratio": 1.3}


def test_what_is_not_measured_decides_nothing() -> None:
    """Without p99, without Flat-LB's, and without active keys the plan stays."""
    for observed in (Observed(1.0), Observed(1.0, p99_ttft_s=9.0), Observed(1.0, baseline_p99_ttft_s=1.0)):
        found = watch(Memory(0.0), observed, ECONOMICS, planned=True)
        assert (found.state, found.numbers) == ("inside", {})


def test_it_comes_back_by_itself_after_the_time_inside() -> None:
    """Flat-LB stays until the measures were inside for 600 s; then the other rules decide again."""
    pool = Pool()
    assert pool.see(3.0) == "left"
    assert [pool.see(2.0) for _ in range(7)] == ["waiting"] * 6 + ["inside"]


def test_half_of_the_width_and_a_break_start_the_time_anew() -> None:
    """1.2 times what was before keeps a plan in service but brings none back; a single such window begins anew."""
    pool = Pool()
    pool.see(3.0)
    assert [pool.see(2.4) for _ in range(20)] == ["waiting"] * 20
    assert [pool.see(2.0) for _ in range(5)] == ["waiting"] * 5
    assert pool.see(2.4) == "waiting"
    assert [pool.see(2.0) for _ in range(7)] == ["waiting"] * 6 + ["inside"]


def test_each_further_time_it_waits_twice_as_long_up_to_a_bound() -> None:
    """A plan that leaves whenever it is back is tried ever more rarely, at last every 32 times 600 s."""
    pool, waits = Pool(), []
    for _ in range(8):
        assert pool.see(3.0) == "left"
        waited = 0
        while pool.see(2.0) == "waiting":
            waited += 1
        waits.append(waited * 100)
    assert waits == [600, 1200, 2400, 4800, 9600, 19200, 19200, 19200]
    assert pool.memory.leaves == LEAVES_MAX


def test_a_plan_that_stays_inside_is_forgiven() -> None:
    """After twice the last waiting time in service and inside, the next time counts as the first."""
    pool = Pool()
    for _ in range(2):
        pool.see(3.0)
        while pool.see(2.0) == "waiting":
            pass
    assert pool.memory.leaves == 2
    assert {pool.see(2.0) for _ in range(23)} == {"inside"}
    assert pool.memory.leaves == 2
    pool.see(2.0)
    assert pool.memory.leaves == 0


def test_a_jump_of_the_active_set_leaves_and_a_lasting_one_comes_back() -> None:
    """Twice the active keys leave the envelope; when they stay, the rates know them in time and the plan may return."""
    pool = Pool()
    assert pool.see(active=1000) == "inside"
    assert pool.see(active=2000) == "left"
    states = [pool.see(active=2000) for _ in range(80)]
    assert "left" not in states
    assert states.index("inside") * pool.step_s == pytest.approx(ACTIVE_HALF_LIFE_S, rel=0.5)
    assert set(states[states.index("inside") :]) == {"inside"}


def test_slow_growth_of_the_active_set_never_leaves() -> None:
    """A set that doubles in three hours, as in a morning, is followed."""
    pool, active = Pool(step_s=300.0), 1000.0
    pool.see(active=active)
    states = set()
    for _ in range(72):
        active *= 2 ** (300 / 10_800)
        states.add(pool.see(active=active))
    assert states == {"inside"}


def test_a_plan_published_by_hand_counts_as_back() -> None:
    """While Flat-LB waits, a plan in service means that somebody decided otherwise; it is watched like any other."""
    pool = Pool()
    pool.see(3.0)
    pool.see(2.0)
    pool.planned = True
    assert pool.see(2.0) == "inside"
    assert pool.see(3.0) == "left"
    assert pool.memory.leaves == 2


def test_without_active_keys_at_first_they_are_taken_as_known() -> None:
    """The first measure is what later ones are held against; zero keys are no ratio."""
    found = watch(Memory(0.0), p99(1, None, 0.0), ECONOMICS, planned=True)
    assert (found.state, found.numbers) == ("inside", {"active_ratio": 1.0})
    assert watch(found.memory, p99(2, None, 50.0), ECONOMICS, planned=True).state == "inside"


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.one_of(st.none(), st.floats(0, 10))), max_size=30),
    st.booleans(),
)
def test_it_is_a_function_of_its_input_and_waits_no_longer_than_it_says(
    steps: list[tuple[float, float | None]], planned: bool
) -> None:
    """The same input gives the same answer, and Flat-LB never stays once the measures were inside long enough."""
    memory, now_s = Memory(0.0), 0.0
    for step_s, seconds in steps:
        now_s += step_s
        observed = p99(now_s, seconds)
        found: Watched = watch(memory, observed, ECONOMICS, planned=planned)
        assert found == watch(memory, observed, ECONOMICS, planned=planned)
        if found.state == "waiting" and found.memory.inside_since_s is not None:
            assert now_s - found.memory.inside_since_s < ECONOMICS.back_after_s * 2 ** (LEAVES_MAX - 1)
        memory, planned = found.memory, found.state == "inside"
