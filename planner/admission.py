"""Decides which keys get warm slots, and on how many endpoints each.

1. A key of rate λ is kept on k = max(1, ⌈λ / replica_cap_rps⌉) endpoints, at most on all R (CacheRoute, eq. 2) and on
   `copies_max`. A key that had more keeps them until λ falls below `SHRINK_AT` of what one copy less would bear:
   rates that wander around a step would otherwise move it at every plan.
2. A key is worth a slot only while it stays resident: λ · τ / k ≥ θ, the requests that one copy sees before the engine
   would have evicted its prefix. Without a measured τ this rule is off.
3. Keys are taken by rate, highest first; ties by key hash, lowest first. Keys of the previous plan count for
   1 + `incumbent_bonus` times their rate, and need that much less in rule 2, since they are warm already.
4. A key is admitted when it still fits the budget; otherwise it is skipped and the next one is tried. Equation 3 of the
   paper stops at the first key that does not fit, its algorithm 1 skips. We skip: it fills the budget, and the two
   differ only when a key of several copies straddles the end.
5. The budget is C = R · W slots, one a copy; or, when the sizes of prefixes are known and `tokens_per_endpoint` is set,
   R · B tokens, a key's prefix once a copy. The order stays that of rates: what a key saves and what it holds grow with
   its prefix alike, so their ratio is its rate.
6. A key without requests is never admitted.

Source: rules 1 and 3 (their first halves), 4 and 6 are CacheRoute's; the others are ours. docs/planner.md has figures.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Of the rate that one copy less would bear; above, a key keeps its copies.
SHRINK_AT = 0.8
# Keys that are looked at before sorting, and how few of all must be wanted for that to pay.
SAMPLE, SAMPLED = 20_000, 16


@dataclass(frozen=True, slots=True)
class Rules:
    """The parameters of admission; 0 switches a rule off where it says so.

    slots_per_endpoint: W ≥ 1.  replica_cap_rps: q_cap, above 0.  copies_max: of one key (0: as many as endpoints).
    incumbent_bonus: 0 or more.  resident_s: τ, how long an unused prefix stays in an engine's cache (0: not known).
    residency: θ.  tokens_per_endpoint: B (0: slots are the budget).
    """

    slots_per_endpoint: int
    replica_cap_rps: float
    copies_max: int = 0
    incumbent_bonus: float = 0.25
    resident_s: float = 0.0
    residency: float = 0.5
    tokens_per_endpoint: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """The admitted keys, by rate, highest first; ties by key hash.

    rows: indexes into the input, length n.  copies: endpoints for each, length n, at least 1.
    """

    rows: NDArray[np.intp]
    copies: NDArray[np.int64]


def admit(
    key_hashes: NDArray[np.uint64],
    rates_rps: NDArray[np.float64],
    *,
    endpoints: int,
    rules: Rules,
    previous_copies: NDArray[np.int64] | None = None,
    prefix_tokens: NDArray[np.float64] | None = None,
) -> Admission:
    """Return the keys that get slots, the same whatever the order of the input.

    key_hashes: distinct, length n.  rates_rps: finite, not negative, length n.  endpoints: R ≥ 1.
    previous_copies: of each key in the plan before, 0 for none, length n.  prefix_tokens: of each key, above 0, length
    n.
    O(n + C log C); about 2 ms for 128,824 keys at C = 3,840. With a token budget all n are sorted.
    """
    by_tokens = rules.tokens_per_endpoint > 0 and prefix_tokens is not None
    scores = rates_rps
    slots = endpoints * rules.slots_per_endpoint
    # Every key before the last admitted one holds a slot, except those of several copies that were skipped.
    several = np.count_nonzero(rates_rps > rules.replica_cap_rps)
    if previous_copies is not None:
        incumbents = np.flatnonzero(previous_copies)
        several += np.count_nonzero(previous_copies[incumbents] > 1)
        if rules.incumbent_bonus:
            scores = rates_rps.copy()
            scores[incumbents] *= 1 + rules.incumbent_bonus
    rows = _candidates(key_hashes, scores, len(scores) if by_tokens else slots + int(several))
    copies = _copies(rates_rps[rows], None if previous_copies is None else previous_copies[rows], endpoints, rules)
    if rules.resident_s > 0:
        resident = scores[rows] * rules.resident_s / copies >= rules.residency
        rows, copies = rows[resident], copies[resident]
    order = np.lexsort((key_hashes[rows], -scores[rows]))
    rows, copies = rows[order], copies[order]
    if by_tokens:
        assert prefix_tokens is not None
        kept = _fill(copies * prefix_tokens[rows], float(endpoints) * rules.tokens_per_endpoint)
    else:
        kept = _fill(copies.astype(np.float64), float(slots))
    rows, copies = rows[kept], copies[kept]
    if scores is not rates_rps:
        order = np.lexsort((key_hashes[rows], -rates_rps[rows]))
        rows, copies = rows[order], copies[order]
    return Admission(rows=rows, copies=copies)


def _copies(
    rates_rps: NDArray[np.float64], previous: NDArray[np.int64] | None, endpoints: int, rules: Rules
) -> NDArray[np.int64]:
    """Rule 1."""
    most = min(endpoints, rules.copies_max) if rules.copies_max else endpoints
    with np.errstate(over="ignore"):  # a cap next to zero: infinite copies are cut
        wanted = np.ceil(rates_rps / rules.replica_cap_rps)
    copies = np.clip(wanted, 1, most).astype(np.int64)
    if previous is not None:
        stays = (copies < previous) & (rates_rps >= (previous - 1) * SHRINK_AT * rules.replica_cap_rps)
        copies = np.where(stays, np.minimum(previous, most), copies)
    return copies


def _fill(costs: NDArray[np.float64], budget: float) -> NDArray[np.intp]:
    """Return the indexes that fit the budget, taken in order, each skipped that no longer fits."""
    if not len(costs):
        return np.arange(0)
    least_after = np.minimum.accumulate(costs[::-1])[::-1]
    chosen, first, left = [], 0, budget
    while first < len(costs) and least_after[first] <= left:
        sums = np.cumsum(costs[first:])
        taken = int(np.searchsorted(sums, left, side="right"))
        chosen.append(np.arange(first, first + taken))
        if taken:
            left -= float(sums[taken - 1])
        first += taken
        if first < len(costs):
            first += int(np.argmax(costs[first:] <= left)) if least_after[first] <= left else len(costs)
    return np.concatenate(chosen) if chosen else np.arange(0)


def _candidates(key_hashes: NDArray[np.uint64], scores: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the rows of the `most` highest scores above zero, in no order; of equal scores the lowest hashes."""
    n = len(scores)
    if most >= n:
        return np.flatnonzero(scores > 0)
    if most < n // SAMPLED:
        # A sample tells a score that about twice as many reach: what is below it need not be sorted out one by one.
        sample = scores[:: max(1, n // SAMPLE)]
        likely = np.partition(sample, at := max(0, len(sample) - 1 - 2 * most * len(sample) // n))[at]
        rows = np.flatnonzero(scores >= likely)
        if likely > 0 and most < len(rows) < n:
            return rows[_candidates(key_hashes[rows], scores[rows], most)]
    threshold = np.partition(scores, n - most)[n - most]
    above = np.flatnonzero(scores > threshold)
    if threshold == 0:
        return above
    equal = np.flatnonzero(scores == threshold)
    missing = most - len(above)
    if missing < len(equal):
        equal = equal[np.argpartition(key_hashes[equal], missing - 1)[:missing]]
    return np.concatenate((above, equal))
