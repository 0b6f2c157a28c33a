"""Judges two policies that served the same requests at the same times: win, tie or lose, and why; pure.

Times are engine seconds. Only latency decides; a hit rate is a means, and imbalance a cost, so both only explain.

1. A measure is TTFT p50 or p99 over the requests that succeeded under both policies. Its ratio is candidate / baseline.
2. It is better (worse) when the ratio is beyond the margin of 5 % and its whole 95 % interval lies on that side of 1.
   The interval is a paired bootstrap: the same requests are drawn for both policies, in blocks of 25 that follow each
   other, because neighbours share one queue and are no independent draws. Everything else is the same.
3. Lose: the candidate failed more requests than the baseline; or p99 is worse; or p50 is worse and p99 not better.
4. Win: no request failed under the candidate, and p99 is better and p50 not worse, or p50 is better and p99 the same.
5. Tie: everything else, so also better p99 against worse p50, and a latency gain with a failed request.
6. The hit rate counts as changed by 1 point or more; work, the prompt tokens that an endpoint had to compute, counts as
   spread otherwise when its max / mean changed by 0.1 or more. Smaller changes explain nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Outcome = Literal["win", "tie", "lose"]

MARGIN = 0.05
HIT_MARGIN = 0.01
BALANCE_MARGIN = 0.1
RESAMPLES = 2000
RESAMPLE_BLOCK = 25
PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class Served:
    """One request under one policy: TTFT in engine seconds (None: failed), its tokens, and who served it."""

    ttft_s: float | None
    prompt_tokens: int
    cached_tokens: int
    endpoint: str | None


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """A policy's figures; None where no request succeeded. max_over_mean: requests per endpoint, all endpoints."""

    policy: str
    requests: int
    failed: int
    token_hit_rate: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    max_over_mean: float | None
    planned_share: float
    plan_version: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure, candidate / baseline, with its 95 % interval."""

    percentile: int
    ratio: float
    low: float
    high: float

    @property
    def change(self) -> int:
        """Return -1 better, 0 the same, 1 worse, by rule 2."""
        if self.ratio <= 1 - MARGIN and self.high < 1:
            return -1
        return int(self.ratio >= 1 + MARGIN and self.low > 1)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for the candidate, one sentence of reason, and the measures behind it (empty: nothing to compare)."""

    outcome: Outcome
    reason: str
    comparisons: tuple[Comparison, ...]


def summarize(
    policy: str, served: Sequence[Served], *, endpoints: int, planned_share: float, plan_version: int
) -> PolicySummary:
    """Return the figures of one pass. endpoints: how many there are, those that served nothing included."""
    succeeded = [request for request in served if request.ttft_s is not None]
    ttft_s = _ttft([request.ttft_s for request in succeeded])
    prompt_tokens = sum(request.prompt_tokens for request in succeeded)
    per_endpoint = Counter(request.endpoint for request in succeeded)
    return PolicySummary(
        policy=policy,
        requests=len(served),
        failed=len(served) - len(succeeded),
        token_hit_rate=sum(r.cached_tokens for r in succeeded) / prompt_tokens if prompt_tokens else None,
        ttft_p50_s=float(np.percentile(ttft_s, 50)) if succeeded else None,
        ttft_p99_s=float(np.percentile(ttft_s, 99)) if succeeded else None,
        max_over_mean=max(per_endpoint.values()) * endpoints / len(succeeded) if succeeded else None,
        planned_share=planned_share,
        plan_version=plan_version,
    )


def judge(
    baseline: tuple[PolicySummary, Sequence[Served]],
    candidate: tuple[PolicySummary, Sequence[Served]],
    *,
    endpoints: int,
    seed: int,
    name: str = "CacheRoute",
) -> Verdict:
    """Return the verdict on `candidate`, whose i-th request is the same as the i-th of `baseline`; about 0.3 s.

    endpoints: how many there are, those that served nothing included.  seed: of the bootstrap; the same input and seed
    give the same verdict.  name: what the reason calls the candidate.
    """
    before, after = baseline[0], candidate[0]
    assert len(baseline[1]) == len(candidate[1])
    pairs = [
        (one.ttft_s, other.ttft_s)
        for one, other in zip(baseline[1], candidate[1], strict=True)
        if one.ttft_s is not None and other.ttft_s is not None
    ]
    if not pairs:
        outcome: Outcome = "lose" if after.failed > before.failed else "tie"
        return Verdict(outcome, "No request succeeded under both policies, so there is nothing to compare.", ())
    comparisons = compare(_ttft([one for one, _ in pairs]), _ttft([other for _, other in pairs]), seed=seed)
    p50, p99 = (comparison.change for comparison in comparisons)
    if after.failed > before.failed or p99 > 0 or (p50 > 0 and p99 == 0):
        outcome = "lose"
    elif after.failed == 0 and ((p99 < 0 and p50 <= 0) or (p99 == 0 and p50 < 0)):
        outcome = "win"
    else:
        outcome = "tie"
    work = work_over_mean(baseline[1], endpoints), work_over_mean(candidate[1], endpoints)
    return Verdict(outcome, f"{name} {_reason(outcome, before, after, comparisons, work)}", comparisons)


def work_over_mean(served: Sequence[Served], endpoints: int) -> float:
    """Return max / mean over `endpoints` of the prompt tokens that each had to compute; 1 when there were none."""
    work: Counter[str | None] = Counter()
    for request in served:
        work[request.endpoint] += request.prompt_tokens - request.cached_tokens
    total = sum(work.values())
    return max(work.values()) * endpoints / total if total else 1.0


def compare(before_s: NDArray[np.float64], after_s: NDArray[np.float64], *, seed: int) -> tuple[Comparison, ...]:
    """Return the ratio and interval of each percentile of paired TTFTs (shape n each, in order of arrival, n >= 1)."""
    rng = np.random.default_rng(seed)
    n = len(before_s)
    block = min(RESAMPLE_BLOCK, n)
    ratios = np.empty((RESAMPLES, len(PERCENTILES)))
    for row in range(RESAMPLES):
        starts = rng.integers(0, n, -(-n // block))
        drawn = ((starts[:, None] + np.arange(block)) % n).ravel()[:n]
        ratios[row] = _ratio(before_s[drawn], after_s[drawn])
    low, high = np.percentile(ratios, (2.5, 97.5), axis=0)
    point = _ratio(before_s, after_s)
    return tuple(
        Comparison(percentile, float(point[i]), float(low[i]), float(high[i]))
        for i, percentile in enumerate(PERCENTILES)
    )


def _ratio(before_s: NDArray[np.float64], after_s: NDArray[np.float64]) -> NDArray[np.float64]:
    # A simulated engine may answer in no time at all; a microsecond is below anything measured.
    quotient: NDArray[np.float64] = (np.percentile(after_s, PERCENTILES) + 1e-6) / (
        np.percentile(before_s, PERCENTILES) + 1e-6
    )
    return quotient


def _ttft(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def _reason(
    outcome: Outcome,
    before: PolicySummary,
    after: PolicySummary,
    comparisons: Sequence[Comparison],
    work: tuple[float, float],
) -> str:
    """Return what latency did, then what stands behind it; a sentence but for who it is about."""
    verb = {"win": "won", "tie": "tied", "lose": "lost"}[outcome]
    latency = ", ".join(_latency(comparison, before, after) for comparison in reversed(comparisons))
    return f"{verb}: {latency}; {'; '.join(_causes(before, after, work))}."


def _latency(comparison: Comparison, before: PolicySummary, after: PolicySummary) -> str:
    name = f"ttft_p{comparison.percentile}_s"
    word = {-1: "better", 0: "no clear difference", 1: "worse"}[comparison.change]
    return (
        f"TTFT p{comparison.percentile} {getattr(before, name):.2f} s → {getattr(after, name):.2f} s "
        f"({word}: ×{comparison.ratio:.2f}, 95 % interval {comparison.low:.2f} to {comparison.high:.2f})"
    )


def _causes(before: PolicySummary, after: PolicySummary, work: tuple[float, float]) -> list[str]:
    causes: list[str] = []
    if after.failed:
        causes.append(f"{after.failed} of its requests failed ({before.failed} under {before.policy})")
    hit_before, hit_after = before.token_hit_rate or 0.0, after.token_hit_rate or 0.0
    hits = f"{100 * hit_after:.1f} % of prompt tokens came from cache instead of {100 * hit_before:.1f} %"
    if abs(hit_after - hit_before) < HIT_MARGIN:
        causes.append(f"cache hits made no difference ({hits})")
    else:
        causes.append(hits if hit_after > hit_before else f"only {hits}")
    work_before, work_after = work
    if work_after - work_before >= BALANCE_MARGIN:
        causes.append(f"the busiest engine had {work_after:.2f}× the mean work instead of {work_before:.2f}×")
    elif work_before - work_after >= BALANCE_MARGIN:
        causes.append(f"work was spread more evenly ({work_after:.2f}× the mean at most instead of {work_before:.2f}×)")
    if after.planned_share < 0.5:
        causes.append(f"only {100 * after.planned_share:.0f} % of its requests were routed by the plan")
    return causes
