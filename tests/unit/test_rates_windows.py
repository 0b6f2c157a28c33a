"""Windows become rates: weights by requests, time that was really counted in, nothing negative whatever clocks say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import rates as planner_rates
from planner.rates import KeyRates, Window, half_life_of, rates_from_windows, weight_of
from service.rates import Counted

Spans = tuple[tuple[float, float] | None, ...]
PLAIN = math.inf


def window(start_s: int, counts: dict[int, int], spans: Spans = (), length_s: int = 60) -> Window:
    return Window.of(start_s, length_s, Counted(counts, spans))


def as_dict(rates: KeyRates) -> dict[int, float]:
    return dict(zip(rates.key_hashes.tolist(), rates.rates_rps.tolist(), strict=True))


def rated(*windows: Window, now_s: float, half_life: float = PLAIN) -> dict[int, float]:
    return as_dict(rates_from_windows(windows, now_s, half_life))


def test_requests_are_divided_by_the_time_counted_in() -> None:
    """Requests of all windows over the seconds of all, the open one's until now."""
    old, new = window(60, {1: 30, 2: 6}), window(120, {1: 30})
    assert rated(old, new, now_s=180.0) == {1: 0.5, 2: 0.05}
    assert rated(new, old, now_s=180.0) == {1: 0.5, 2: 0.05}, "in any order"
    assert rated(old, new, now_s=150.0) == {1: pytest.approx(60 / 90), 2: pytest.approx(6 / 90)}


def test_a_window_weighs_half_after_so_many_requests() -> None:
    """By requests of the pool in later windows, whoever made them, and not by time."""
    old, middle, new = window(0, {1: 100}), window(60, {2: 100}), window(120, {2: 50, 3: 50})
    assert [weight_of(n, 100) for n in (0, 100, 200)] == [1, 0.5, 0.25]
    covered = 60 * (1 + 0.5 + 0.25)
    got = rated(old, middle, new, now_s=180.0, half_life=100)
    assert got == {1: pytest.approx(25 / covered), 2: pytest.approx(100 / covered), 3: pytest.approx(50 / covered)}
    silent = (window(at, {}, ((at, at + 60.0),)) for at in range(180, 1020, 60))
    later = rated(old, middle, new, *silent, now_s=1020.0, half_life=100)
    assert later[1] / later[3] == pytest.approx(got[1] / got[3]), "silence makes all rates lower and no window lighter"
    assert later[3] == pytest.approx(50 / (covered + 14 * 60))


def test_windows_that_weigh_next_to_nothing_are_left_out() -> None:
    """Under a hundredth of the newest a window adds neither requests nor time."""
    assert rated(window(0, {1: 5}), window(60, {2: 660}), now_s=120.0, half_life=100).keys() == {1, 2}
    assert rated(window(0, {1: 5}), window(60, {2: 670}), now_s=120.0, half_life=100) == {2: pytest.approx(670 / 60)}


def test_silence_counts_and_absence_does_not() -> None:
    """A window without requests was silence if somebody says that he counted there; else it says nothing."""
    first, last = window(0, {1: 60}, ((0.0, 60.0),)), window(120, {1: 60}, ((120.0, 180.0),))
    assert rated(first, last, now_s=180.0) == {1: 1.0}
    assert rated(first, window(60, {}, ((60.0, 120.0),)), last, now_s=180.0) == {1: pytest.approx(120 / 180)}


def test_counting_that_began_or_ended_inside_a_window_counts_from_there() -> None:
    """The first window from when a process began, the open one until counts were last handed on; lives are united."""
    began = window(0, {1: 10}, ((50.0, 60.0),))
    assert rated(began, now_s=60.0) == {1: 1.0}
    assert rated(began, window(60, {1: 9}, ((60.0, 69.0),)), now_s=70.0) == {1: 1.0}
    restarted = window(60, {1: 30}, ((60.0, 70.0), (100.0, 120.0), (65.0, 68.0)))
    assert rated(restarted, now_s=120.0) == {1: 1.0}
    overlapping = window(60, {1: 90}, ((60.0, 80.0), (70.0, 90.0)))
    assert rated(overlapping, now_s=120.0) == {1: 3.0}
    unsaid = window(60, {1: 60}, ((60.0, 70.0), None))
    assert rated(unsaid, now_s=120.0) == {1: 1.0}, "who does not say when he counted did so all the time"


def test_a_short_newest_window_adds_as_little_as_it_is_long() -> None:
    """Three requests in the first 0.1 s of a window do not make a rate of 30/s."""
    past, new = window(0, {1: 60}, ((0.0, 60.0),)), window(60, {2: 3}, ((60.0, 60.1),))
    assert rated(past, new, now_s=60.2) == {1: pytest.approx(60 / 60.1), 2: pytest.approx(3 / 60.1)}
    assert rated(new, now_s=60.2) == {2: 3.0}, "alone it counts as a second"


def test_a_window_from_the_future_waits() -> None:
    """What a clock that is ahead has written is not read before its time, then once."""
    now, ahead = window(60, {1: 60}), window(120, {1: 600})
    assert rated(now, ahead, now_s=119.0) == {1: pytest.approx(60 / 59)}
    assert rated(now, ahead, now_s=180.0) == {1: pytest.approx(660 / 120)}
    assert rated(ahead, now_s=30.0) == {}


def test_spans_of_wrong_clocks_stay_inside_the_window() -> None:
    """A span that begins before the window, ends after it or lies outside covers at most the window."""
    assert window(60, {1: 1}, ((0.0, 500.0),)).covered_s == 60
    assert window(60, {1: 1}, ((0.0, 50.0),)).covered_s == 0
    assert window(60, {1: 1}, ((500.0, 600.0),)).covered_s == 0
    assert rated(window(60, {1: 5}, ((500.0, 600.0),)), now_s=120.0) == {1: 5.0}


@given(
    st.lists(
        st.tuples(
            st.integers(-3, 20),
            st.dictionaries(st.integers(0, 5), st.integers(0, 2**40), max_size=4),
            st.lists(st.one_of(st.none(), st.tuples(st.floats(0, 2000), st.floats(0, 2000))), max_size=3),
        ),
        max_size=12,
        unique_by=lambda row: row[0],
    ),
    st.floats(0, 2000),
    st.sampled_from([1, 10, 1000, PLAIN]),
)
def test_nothing_is_negative_or_infinite(
    rows: list[tuple[int, dict[int, int], list[tuple[float, float] | None]]], now_s: float, half_life: float
) -> None:
    """Whatever windows and clocks say, rates are finite, and no more than the requests in a second."""
    windows = [window(at * 60, counts, tuple(spans)) for at, counts, spans in rows]
    rates = rates_from_windows(windows, now_s, half_life)
    assert np.isfinite(rates.rates_rps).all()
    assert (rates.rates_rps > 0).all()
    for key, rate in as_dict(rates).items():
        assert rate <= sum(counts.get(key, 0) for _, counts, _ in rows) + 1e-9
    assert all(0 <= w.covered_by(now_s) <= 60 for w in windows)


def test_no_windows_are_no_rates() -> None:
    """Without any window there are no keys and no error."""
    rates = rates_from_windows([], 100.0, 1000)
    assert (len(rates), rates.total_rps) == (0, 0.0)
    assert len(rates_from_windows([window(0, {})], 100.0, 1000)) == 0


def test_adding_up_in_lots_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few counts are added up at a time, keys are distinct and the sums the same up to rounding."""
    rng = np.random.default_rng(0)
    windows = [
        window(at * 60, dict(zip(rng.integers(0, 500, 300).tolist(), rng.integers(1, 9, 300).tolist(), strict=True)))
        for at in range(20)
    ]
    whole = rates_from_windows(windows, 1200.0, 5000)
    monkeypatch.setattr(planner_rates, "MERGED_AT", 700)
    lots = rates_from_windows(windows, 1200.0, 5000)
    assert lots.key_hashes.tolist() == whole.key_hashes.tolist() == sorted(set(whole.key_hashes.tolist()))
    assert lots.rates_rps == pytest.approx(whole.rates_rps, rel=1e-12)


def test_the_half_life_grows_with_the_slots() -> None:
    """250,000 requests, or three arrivals at the cut: 16 a slot."""
    assert (half_life_of(0), half_life_of(3840), half_life_of(100_000)) == (250_000, 250_000, 1_600_000)
