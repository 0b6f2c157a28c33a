"""Rates of tenants as the claims are measured on, and how they drift; all seeded.

lognormal: sigma 1.65 and no key above 0.48 %, which has the paper's shape (Gini 0.76, the top 4 % hold 47 %).
whales: the same with 5 keys of 3 to 12 requests/s.  zipf: rank to the power of -s.
walk: each rate times exp(N(0, sigma)) an interval, the total kept: the paper's drift.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.rates import KeyRates

Floats = NDArray[np.float64]
TOTAL_RPS = 100.0


def lognormal(rng: np.random.Generator, keys: int = 128_824) -> Floats:
    rates = np.exp(rng.normal(0, 1.65, keys))
    rates = np.minimum(rates / rates.sum(), 0.0048)
    return rates / rates.sum() * TOTAL_RPS


def whales(rng: np.random.Generator) -> Floats:
    rates, heavy = lognormal(rng), rng.uniform(3, 12, 5)
    rates *= (TOTAL_RPS - heavy.sum()) / TOTAL_RPS
    rates[rng.choice(len(rates), 5, replace=False)] = heavy
    return rates


def zipf(exponent: float, keys: int = 50_000) -> Callable[[np.random.Generator], Floats]:
    rates = np.arange(1, keys + 1) ** -exponent
    return lambda _: rates / rates.sum() * TOTAL_RPS


@dataclass(frozen=True, slots=True)
class Walk:
    """A workload under drift. endpoints: R; slots: W; cap_rps: q_cap."""

    start: Callable[[np.random.Generator], Floats]
    slots: int
    sigma: float = 0.3
    endpoints: int = 30
    cap_rps: float = 4.0

    def rates(self, seed: int, intervals: int) -> Iterator[KeyRates]:
        """Yield the rates of the first plan and of each interval after it."""
        rng = np.random.default_rng(seed)
        rates = self.start(rng)
        # Hashes in no order, as those of real keys are.
        hashes = np.unique(rng.integers(0, 2**63, len(rates) * 2, dtype=np.uint64))[: len(rates)]
        rng.shuffle(hashes)
        for interval in range(intervals + 1):
            if interval:
                rates = rates * np.exp(rng.normal(0, self.sigma, len(rates)))
                rates *= TOTAL_RPS / rates.sum()
            yield KeyRates.of(hashes.tolist(), rates.tolist())
