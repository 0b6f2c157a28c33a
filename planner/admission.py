"""Decides which keys get warm slots, and on how many endpoints each.

1. A key of rate λ is kept on k = max(1, ⌈λ / replica_cap_rps⌉) endpoints, at most on all R (CacheRoute, eq. 2).
2. Keys are taken by rate, highest first; ties by key hash, lowest first.
3. A key is admitted when its k copies still fit into the C = R · W slots of the fleet; otherwise it is skipped and the
   next one is tried. Equation 3 of the paper stops at the first key that does not fit, its algorithm 1 skips. We skip:
   it fills C, and the two differ only when a key of several copies straddles the end.
4. A key without requests is never admitted.

k never rises along rule 2, so rule 3 is one division for each run of equal k instead of a step for each key; and no
more than C keys of one copy can be admitted, so all others are left out before sorting.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """The admitted keys, by rate, highest first.

    rows: indexes into the input, length n.  copies: endpoints for each, length n, at least 1, never rising.
    """

    rows: NDArray[np.intp]
    copies: NDArray[np.int64]


def admit(
    key_hashes: NDArray[np.uint64],
    rates_rps: NDArray[np.float64],
    *,
    endpoints: int,
    slots_per_endpoint: int,
    replica_cap_rps: float,
) -> Admission:
    """Return the keys that get slots, the same whatever the order of the input.

    key_hashes: distinct, length n.  rates_rps: finite, not negative, length n.  endpoints: R ≥ 1.
    slots_per_endpoint: W ≥ 1.  replica_cap_rps: above 0.
    O(n + C log C); about 2 ms for 128,824 keys at C = 3,840.
    """
    slots = endpoints * slots_per_endpoint
    rows = _candidates(key_hashes, rates_rps, slots + int(np.count_nonzero(rates_rps > replica_cap_rps)))
    rows = rows[np.lexsort((key_hashes[rows], -rates_rps[rows]))]
    with np.errstate(over="ignore"):  # a cap next to zero: infinite copies are cut to R
        wanted = np.ceil(rates_rps[rows] / replica_cap_rps)
    copies = np.clip(wanted, 1, endpoints).astype(np.int64)

    ends = np.append(np.flatnonzero(np.diff(copies)) + 1, len(copies))
    chosen, first, left = [], 0, slots
    for end in ends.tolist():
        if first == end:
            break
        each = int(copies[first])
        taken = min(end - first, left // each)
        chosen.append(np.arange(first, first + taken))
        left -= taken * each
        first = end
    kept = np.concatenate(chosen) if chosen else np.arange(0)
    return Admission(rows=rows[kept], copies=copies[kept])


def _candidates(key_hashes: NDArray[np.uint64], rates_rps: NDArray[np.float64], most: int) -> NDArray[np.intp]:
    """Return the rows of the `most` highest rates above zero, in no order; of equal rates the lowest hashes."""
    n = len(rates_rps)
    if most >= n:
        return np.flatnonzero(rates_rps > 0)
    threshold = np.partition(rates_rps, n - most)[n - most]
    above = np.flatnonzero(rates_rps > threshold)
    if threshold == 0:
        return above
    equal = np.flatnonzero(rates_rps == threshold)
    missing = most - len(above)
    if missing < len(equal):
        equal = equal[np.argpartition(key_hashes[equal], missing - 1)[:missing]]
    return np.concatenate((above, equal))
