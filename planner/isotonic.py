"""Finds where a measured share crosses a level, from noisy steps whose true shares only rise with the load.

1. Among all sequences that never fall, `rising` is the one with the least sum of weight · (value - fit)². Neighbours
   that are out of order are drawn together into their weighted mean until none is left (pool adjacent violators; Ayer
   et al. 1955). For shares weighted by their number of trials it is also the most likely one.
2. The crossing lies between the last point whose fit is at most the level and the first one above it. In between the
   logarithm of the share is taken as linear in the load: a share that goes from 0.1 % to 40 % crosses 1 % early, and a
   straight line would say at once. A share of 0 counts as half a trial.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Where = Literal["crossed", "below", "above"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where the level is crossed: `at`, or outside of what was measured, then `at` is the end that is nearest.

    where: `below`, the lowest point is above the level already; `above`, the highest one is not above it.
    """

    at: float
    where: Where


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the fit to `values`, as many; weights: above 0. O(n)."""
    assert len(values) == len(weights)
    means: list[float] = []
    sums: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        assert weight > 0
        mean, total, count = float(value), float(weight), 1
        while means and means[-1] >= mean:
            before = sums.pop()
            mean = (means.pop() * before + mean * total) / (before + total)
            total += before
            count += counts.pop()
        means.append(mean)
        sums.append(total)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]


def crossing(loads: Sequence[float], shares: Sequence[float], trials: Sequence[float], level: float) -> Crossing:
    """Return where the fit to `shares` crosses `level`.

    loads: in any order, at least one; equal ones are drawn together.  shares: 0 to 1.  trials, level: above 0.
    """
    at, weights, values = _by_load(loads, shares, trials)
    fit = rising(values, weights)
    above = next((i for i, share in enumerate(fit) if share > level), None)
    if above is None:
        return Crossing(at[-1], "above")
    if above == 0:
        return Crossing(at[0], "below")
    low, high = (max(fit[i], 0.5 / weights[i]) for i in (above - 1, above))
    if low >= level:  # so few trials that half of one is more than the level
        return Crossing(at[above - 1], "crossed")
    part = math.log(level / low) / math.log(high / low)
    return Crossing(at[above - 1] + part * (at[above] - at[above - 1]), "crossed")


def _by_load(
    loads: Sequence[float], shares: Sequence[float], trials: Sequence[float]
) -> tuple[list[float], list[float], list[float]]:
    """Return distinct loads in order, their trials, and their shares."""
    at: list[float] = []
    weights: list[float] = []
    values: list[float] = []
    for load, share, trial in sorted(zip(loads, shares, trials, strict=True)):
        if at and load == at[-1]:
            values[-1] = (values[-1] * weights[-1] + share * trial) / (weights[-1] + trial)
            weights[-1] += trial
        else:
            at.append(load)
            weights.append(trial)
            values.append(share)
    return at, weights, values
