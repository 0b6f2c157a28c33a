"""p99 of TTFT out of engines' pages: what is added up, what is not, and what it is held against."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from planner.latency import (
    HALF_LIFE_S,
    LOADED,
    QUICK_S,
    EnginePage,
    Known,
    Measured,
    TtftWindow,
    baseline_s,
    counted_since,
    followed,
    least_cache_tokens,
    quantile,
    read_page,
    without_future,
)

BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Engine:
    """A histogram as an engine exports it."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name, text = "vllm:time_to_first_token_seconds", "TTFT"
        self._family = Histogram(name, text, ("model_name", "engine"), buckets=BOUNDS, registry=self.registry)

    def serve(self, *seconds: float, rank: str = "0") -> None:
        for value in seconds:
            self._family.labels("m", rank).observe(value)

    def page(self) -> EnginePage:
        return read_page(generate_latest(self.registry).decode())


def page(counts: dict[float, float], born: float = 0.0) -> EnginePage:
    return EnginePage(counts, born)


def test_a_page_is_read_bucket_by_bucket_over_all_ranks() -> None:
    """Cumulative counts of each label set become requests in each bucket, and all sets are added up."""
    engine = Engine()
    engine.serve(0.05, 0.3, 9.0)
    engine.serve(0.3, 0.4, rank="1")
    found = engine.page()
    assert found.counts == {0.1: 1, 0.25: 0, 0.5: 3, 1.0: 0, 2.5: 0, 5.0: 0, math.inf: 1}
    assert found.born > 1e9
    assert found.cache_tokens is None


def test_the_cache_is_that_of_all_ranks_once_each_has_one() -> None:
    """Blocks times block size are summed; one rank that has not sized its cache leaves it unknown; the least counts."""
    rank = 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{}",engine="{}"}} 1\n'
    assert read_page(rank.format(1000, 0) + rank.format(500, 1)).cache_tokens == 24_000
    assert read_page(rank.format(1000, 0) + rank.format("None", 1)).cache_tokens is None
    pages = [EnginePage({}, 0.0, tokens) for tokens in (None, 24_000, 16_000)]
    assert least_cache_tokens(pages) == 16_000
    assert least_cache_tokens(pages[:1]) is None


@pytest.mark.parametrize(
    "text",
    [
        'vllm:time_to_first_token_seconds_bucket{le="1"} NaN',
        'vllm:time_to_first_token_seconds_bucket{le="1"} -1',
        'vllm:time_to_first_token_seconds_bucket{le="1"} +Inf',
        'vllm:time_to_first_token_seconds_bucket{le="nan"} 1',
        'vllm:time_to_first_token_seconds_bucket{le="-1"} 1',
        'vllm:time_to_first_token_seconds_bucket{le="1"} 2\nvllm:time_to_first_token_seconds_bucket{le="2"} 1',
        "vllm:time_to_first_token_seconds_created NaN",
        'vllm:time_to_first_token_seconds_bucket{le="x"} 1',
        "vllm:time_to_first_token_seconds_bucket{",
    ],
)
def test_a_page_that_cannot_be_right_is_refused(text: str) -> None:
    """No number that is none gets into a sum."""
    with pytest.raises(ValueError, match=r"\S"):
        read_page(text)


def test_the_rest_of_a_page_is_not_even_parsed() -> None:
    """Only the two metrics that are asked for matter, whatever stands beside them."""
    assert read_page("garbage {{{\nvllm:num_requests_running{} 1\n") == EnginePage({})
    assert read_page("") == EnginePage({})


def test_the_difference_of_two_pages_is_what_was_served_between() -> None:
    """Each bucket's new requests, and none of the old."""
    engine = Engine()
    engine.serve(0.05, 3.0)
    before = engine.page()
    engine.serve(0.3, 3.0)
    assert {b: n for b, n in counted_since(before, engine.page()).items() if n} == {0.5: 1, 5.0: 1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (page({1.0: 10, 2.0: 5}), page({1.0: 11, 2.0: 4})),
        (page({1.0: 10}, born=100.0), page({1.0: 20}, born=200.0)),
        (page({1.0: 10, 2.0: 5}), page({4.0: 20})),
    ],
)
def test_an_engine_that_began_anew_adds_all_it_served_since(before: EnginePage, after: EnginePage) -> None:
    """A bucket that fell, another birth or other buckets: the new page counts whole, and nothing is below 0."""
    assert counted_since(before, after) == after.counts


def test_p99_lies_inside_its_bucket() -> None:
    """1,000 requests, 20 of them from 2.5 to 5 s: the 990th is half way through that bucket."""
    assert quantile({1.0: 980, 2.5: 0, 5.0: 20, math.inf: 0}) == pytest.approx(3.75)
    assert quantile({1.0: 100}) == pytest.approx(0.99)
    assert quantile({1.0: 90, math.inf: 10}) == 1.0, "beyond the last bound is told as that bound"
    assert quantile({}) is None
    assert quantile({1.0: 0, math.inf: 0}) is None
    assert quantile({math.inf: 5}) is None, "a page without bounds tells nothing"


@given(
    st.dictionaries(st.sampled_from(BOUNDS), st.integers(0, 10_000), min_size=1),
    st.integers(0, 100),
    st.floats(0.01, 1.0),
)
def test_a_quantile_has_its_share_below_and_rises(counts: dict[float, int], beyond: int, share: float) -> None:
    """The bucket it lies in holds the request of that rank, whatever the counts."""
    full: dict[float, float] = {**counts, math.inf: beyond}
    found, rank = quantile(full, share), share * sum(full.values())
    if not sum(counts.values()):
        assert found is None or found == max(counts)
        return
    assert found is not None
    bounds = [0.0, *sorted(full)]
    holding = next(i for i in range(1, len(bounds)) if sum(full[b] for b in bounds[1 : i + 1]) >= rank * (1 - 1e-9))
    assert bounds[holding - 1] * (1 - 1e-9) <= found <= bounds[holding] or found == max(counts)
    assert found <= (quantile(full, min(1.0, share + 0.1)) or 0.0) * (1 + 1e-9)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.floats(0, 9), max_size=5)), max_size=12))
def test_no_request_counts_twice_or_below_zero(steps: list[tuple[bool, list[float]]]) -> None:
    """However an engine restarts, what is added up is what it served after its first page."""
    engine, window, served = Engine(), TtftWindow(least_requests=math.inf), 0
    window.take({"e": engine.page()}, 0.0)
    for at_s, (restart, seconds) in enumerate(steps, start=1):
        if restart:
            engine = Engine()
        engine.serve(*seconds)
        served += len(seconds)
        window.take({"e": engine.page()}, float(at_s))
        assert sum(window._counts.values()) == served
        assert min(window._counts.values(), default=0) >= 0


def test_a_window_goes_on_until_it_holds_enough() -> None:
    """Few requests tell no p99; they wait for more, and then a new window begins."""
    window = TtftWindow(least_requests=100)
    assert window.take({"a": page({1.0: 5000}), "b": page({1.0: 0})}, 0.0) is None, "what was before is not counted"
    assert window.take({"a": page({1.0: 5060}), "b": page({1.0: 0})}, 10.0) is None
    assert window.take({"a": page({1.0: 5080}), "b": page({1.0: 20})}, 20.0) == Measured(0.99, 100, 100 / 40)
    assert window.take({"a": page({1.0: 5090}), "b": page({1.0: 20})}, 30.0) is None


def test_an_engine_that_is_silent_begins_anew() -> None:
    """What it served while nobody could ask is left out, and its time too; the others count."""
    window = TtftWindow(least_requests=20)
    window.take({"a": page({1.0: 0}), "b": page({1.0: 0})}, 0.0)
    assert window.take({"b": page({1.0: 10})}, 10.0) is None
    assert window.take({"a": page({1.0: 900}), "b": page({1.0: 20})}, 20.0) == Measured(0.99, 20, 1.0)


def test_a_new_plan_begins_a_new_window() -> None:
    """Requests until the last page are of the plan before."""
    window = TtftWindow(least_requests=10)
    window.take({"a": page({1.0: 0, 5.0: 0})}, 0.0)
    window.take({"a": page({1.0: 0, 5.0: 9})}, 1.0)
    window.begin()
    assert window.take({"a": page({1.0: 10, 5.0: 9})}, 2.0) == Measured(0.99, 10, 10.0)


def test_what_is_known_follows_with_its_half_life() -> None:
    """The first window is taken as it is; later ones move it half of the way in an hour; p99 and load alike."""
    known = followed(None, Measured(2.0, 1000, 10.0), 0.0)
    assert known == Known(0.0, 2.0, 10.0)
    assert followed(known, Measured(4.0, 1000, 20.0), HALF_LIFE_S) == Known(HALF_LIFE_S, 3.0, 15.0)
    assert followed(known, Measured(4.0, 1000, 20.0), -5.0).p99_s == 2.0
    assert without_future(known, -5.0) == Known(-5.0, 2.0, 10.0)
    assert without_future(None, 0.0) is None


def test_a_p99_is_held_against_what_is_known_at_such_a_load() -> None:
    """Never against less than the SLO or what is quick anyway; against nothing at first, and under more load."""
    known, measured = Known(0.0, 2.0, 10.0), Measured(9.0, 1000, 10.0)
    assert baseline_s(None, measured, 3.0) is None
    assert baseline_s(known, measured, 0.0) == 2.0
    assert baseline_s(known, measured, 3.0) == 3.0
    assert baseline_s(Known(0.0, 0.02, 10.0), measured, 0.0) == QUICK_S
    assert baseline_s(known, Measured(9.0, 1000, 10.0 * LOADED), 0.0) == 2.0
    assert baseline_s(known, Measured(9.0, 1000, 10.1 * LOADED), 3.0) is None
