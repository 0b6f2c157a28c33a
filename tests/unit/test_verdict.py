"""Win, tie or lose: each rule of the verdict, on figures made for it."""

import numpy as np
import pytest

from replay.verdict import PolicySummary, Served, Verdict, judge, summarize

N = 900


def _ttft(seed: int = 0) -> list[float]:
    return list(np.random.default_rng(seed).lognormal(0, 0.6, N))


def _pass(
    ttft_s: list[float] | list[float | None], *, hit: float = 0.05, endpoints: int = 6, share: float = 0.0
) -> tuple[PolicySummary, list[Served]]:
    served = [Served(value, 1000, round(1000 * hit), f"e{i % endpoints}") for i, value in enumerate(ttft_s)]
    return summarize("p", served, endpoints=6, planned_share=share, plan_version=1), served


def _judge(before: list[float], after: list[float] | list[float | None], **kind: float) -> Verdict:
    return judge(_pass(before), _pass(after, share=1.0, **kind), endpoints=6, seed=0)  # type: ignore[arg-type]


def test_summary_counts_what_succeeded() -> None:
    """Rates and percentiles are those of requests that succeeded; failures are counted beside them."""
    served = [
        Served(1.0, 100, 10, "a"),
        Served(3.0, 300, 110, "a"),
        Served(2.0, 200, 0, "b"),
        Served(None, 100, 100, "b"),
    ]
    summary = summarize("flat-lb", served, endpoints=3, planned_share=0.25, plan_version=4)
    assert (summary.requests, summary.failed, summary.plan_version, summary.planned_share) == (4, 1, 4, 0.25)
    assert summary.token_hit_rate == pytest.approx(0.2)
    assert summary.ttft_p50_s == 2.0
    assert summary.ttft_p99_s == pytest.approx(2.98)
    assert summary.max_over_mean == pytest.approx(2.0)


def test_summary_of_nothing_served() -> None:
    """Without a success there are no figures, and no division by zero."""
    summary = summarize("p", [Served(None, 0, 0, None)], endpoints=2, planned_share=0.0, plan_version=0)
    assert (summary.failed, summary.token_hit_rate, summary.ttft_p99_s, summary.max_over_mean) == (1, None, None, None)


def test_faster_everywhere_wins() -> None:
    """A clear gain in both percentiles is a win, and the sentence says what stands behind it."""
    ttft_s = _ttft()
    verdict = _judge(ttft_s, [0.7 * value for value in ttft_s], hit=0.2)
    assert verdict.outcome == "win"
    assert "20.0 % of prompt tokens came from cache instead of 5.0 %" in verdict.reason


def test_slower_everywhere_loses() -> None:
    """A clear loss in both percentiles loses, and the sentence names imbalance and missing hits."""
    ttft_s = _ttft()
    verdict = _judge(ttft_s, [1.4 * value for value in ttft_s], endpoints=3)
    assert verdict.outcome == "lose"
    assert "cache hits made no difference" in verdict.reason
    assert "busiest engine had 2.00× the mean work instead of 1.00×" in verdict.reason


@pytest.mark.parametrize("factor", [0.96, 1.0, 1.04])
def test_within_the_margin_ties(factor: float) -> None:
    """A difference of less than 5 % is a tie, however certain."""
    ttft_s = _ttft()
    verdict = _judge(ttft_s, [factor * value for value in ttft_s], hit=0.5)
    assert verdict.outcome == "tie"
    assert all(comparison.change == 0 for comparison in verdict.comparisons)


def test_noise_ties() -> None:
    """Another draw of the same distribution is a tie: percentiles differ, but not beyond chance."""
    assert _judge(_ttft(0), _ttft(3)).outcome == "tie"


def test_worse_tail_loses_whatever_the_median_does() -> None:
    """The tail is what promises are made on: a better median does not outweigh a worse p99."""
    ttft_s = _ttft()
    cut = float(np.percentile(ttft_s, 95))
    verdict = _judge(ttft_s, [2 * value if value > cut else 0.7 * value for value in ttft_s])
    assert verdict.outcome == "lose"


def test_better_tail_against_worse_median_ties() -> None:
    """A gain in the tail that the median pays for is no win and no loss."""
    ttft_s = _ttft()
    cut = float(np.percentile(ttft_s, 95))
    verdict = _judge(ttft_s, [0.5 * value if value > cut else 1.3 * value for value in ttft_s])
    assert [comparison.change for comparison in verdict.comparisons] == [1, -1]
    assert verdict.outcome == "tie"


def test_better_median_with_same_tail_wins() -> None:
    """A better median wins when the tail is no worse."""
    ttft_s = _ttft()
    cut = float(np.percentile(ttft_s, 90))
    assert _judge(ttft_s, [value if value > cut else 0.7 * value for value in ttft_s]).outcome == "win"


def test_failed_request_never_wins() -> None:
    """More failures than before lose; as many as before are a tie at best."""
    ttft_s = _ttft()
    after: list[float | None] = [0.5 * value for value in ttft_s]
    after[17] = None
    verdict = _judge(ttft_s, after)
    assert verdict.outcome == "lose"
    assert "1 of its requests failed" in verdict.reason
    before: list[float | None] = list(ttft_s)
    before[3] = None
    assert judge(_pass(before), _pass(after, share=1.0), endpoints=6, seed=0).outcome == "tie"


def test_nothing_to_compare() -> None:
    """Without a pair of successes there is a verdict on failures only."""
    assert _judge([1.0, 2.0], [None, None]).outcome == "lose"


def test_single_request_is_judged() -> None:
    """One pair is enough to compute with; percentiles and interval are then that pair's."""
    assert _judge([1.0], [0.5]).outcome == "win"


def test_unplanned_requests_are_named() -> None:
    """A pass that mostly went without the plan says so."""
    ttft_s = _ttft()
    verdict = judge(_pass(ttft_s), _pass(ttft_s, share=0.3), endpoints=6, seed=0)
    assert "only 30 % of its requests were routed by the plan" in verdict.reason


def test_verdict_is_seeded() -> None:
    """The same passes and seed give the same verdict to the last digit."""
    assert _judge(_ttft(0), _ttft(1)) == _judge(_ttft(0), _ttft(1))
