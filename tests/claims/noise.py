"""Plans from Poisson counts at 100 requests/s and measures what noise alone moves; run it for the tables (minutes).

A plan for 30 endpoints is made each 300 s, or each window, from what was counted before. Turnover: admitted keys that
the plan before did not admit, over all admitted. Share: the true rate of the admitted keys, over all; the oracle's is
that of a plan made from the true rates. Two hours, 24 windows of 300 s, is how long services' counts stay by default.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from planner.admission import Rules
from planner.build import build
from planner.rates import KeyRates, Window, half_life_of, rates_from_windows
from service.plan import Plan
from tests.claims.workloads import TOTAL_RPS, Floats, lognormal, zipf

WINDOW_S, WARM = 300, 24
NAMES = tuple(f"endpoint-{i}" for i in range(30))


@dataclass(frozen=True, slots=True)
class Estimator:
    """How rates are made: of the newest `windows`, each half as heavy after `half_life`, anew every `every`."""

    windows: int = WARM
    half_life: float = math.inf
    every: int = 1


def mean_of(windows: int) -> Estimator:
    """A mean over as many windows, replanned when all of them are new."""
    return Estimator(windows, every=windows)


def default_for(slots: int) -> Estimator:
    """What the planner does without further settings; slots: of one endpoint."""
    return Estimator(half_life=half_life_of(len(NAMES) * slots))


@dataclass(frozen=True, slots=True)
class Replan:
    """One plan's admission; shares of 1."""

    turnover: float
    share: float
    oracle: float


@dataclass(frozen=True, slots=True)
class History:
    """What was counted in each window of a workload, and the true rates at its end."""

    hashes: NDArray[np.uint64]
    windows: tuple[Window, ...]
    truths: tuple[Floats, ...]

    @classmethod
    def of(
        cls, seed: int, windows: int, sigma: float = 0.0, start: Callable[[np.random.Generator], Floats] = lognormal
    ) -> "History":
        """sigma: drift each window, as that of `workloads.Walk`."""
        rng = np.random.default_rng(seed)
        rates = start(rng)
        rng.shuffle(rates)  # hashes are in no order of rates
        hashes = np.unique(rng.integers(0, 2**63, len(rates) * 2, dtype=np.uint64))[: len(rates)]
        counted, truths = [], []
        for number in range(windows):
            if sigma:
                rates = rates * np.exp(rng.normal(0, sigma, len(rates)))
                rates *= TOTAL_RPS / rates.sum()
            counts = rng.poisson(rates * WINDOW_S).astype(np.uint32)
            some = np.flatnonzero(counts)
            begins, ends = number * WINDOW_S, (number + 1) * WINDOW_S
            counted.append(
                Window(begins, WINDOW_S, hashes[some], counts[some], float(WINDOW_S), ends, int(counts.sum()), b"")
            )
            truths.append(rates)
        return cls(hashes, tuple(counted), tuple(truths))

    def estimates(self, estimator: Estimator) -> Iterator[tuple[KeyRates, Floats]]:
        """Yield rates as the planner makes them, and the true ones, from when WARM windows have passed."""
        for end in range(WARM, len(self.windows) + 1, estimator.every):
            some = self.windows[max(0, end - estimator.windows) : end]
            yield rates_from_windows(some, end * WINDOW_S, estimator.half_life), self.truths[end - 1]

    def replans(self, estimates: Sequence[tuple[KeyRates, Floats]], slots: int, bonus: float = 0.0) -> list[Replan]:
        """Return what each plan after the first one admitted."""
        rules = Rules(slots_per_endpoint=slots, replica_cap_rps=4.0, incumbent_bonus=bonus)
        plan: Plan | None = None
        found = []
        for rates, truth in estimates:
            made = build(rates, NAMES, rules=rules, key_check=0, previous=plan).plan
            if plan is not None:
                now = np.asarray(made.key_hashes)
                turnover = 1 - len(np.intersect1d(now, np.asarray(plan.key_hashes))) / len(now)
                share = truth[np.searchsorted(self.hashes, now)].sum()
                oracle = np.sort(truth)[-len(NAMES) * slots :].sum()
                found.append(Replan(turnover, float(share / truth.sum()), float(oracle / truth.sum())))
            plan = made
        return found


def main() -> None:
    """Print, over three seeds, mean turnover and share of noise alone, then of noise and drift."""
    rows = [("mean of 300 s", mean_of(1)), ("mean of 900 s", mean_of(3)), ("mean of 3600 s", mean_of(12))]
    rows += [(f"half-life {n},000", Estimator(half_life=n * 1000.0)) for n in (60, 120, 250, 500)]
    for title, sigma, start in (
        ("lognormal, no drift", 0.0, lognormal),
        ("lognormal, sigma 0.3 an hour", 0.3 / math.sqrt(12), lognormal),
        ("lognormal, sigma 0.3 each 300 s", 0.3, lognormal),
        ("Zipf 1.0, no drift", 0.0, zipf(1.0)),
    ):
        print(f"{title}: admission turnover a replan % / admitted share %; seeds 0-2")
        histories = [History.of(seed, 2 * WARM + 1, sigma, start) for seed in range(3)]
        for slots in (128, 512):
            for name, estimator in rows:
                cells, shares, oracle = [], 0.0, 0.0
                made = [(history, list(history.estimates(estimator))) for history in histories]
                for bonus in (0.0, 0.25, 0.5):
                    found = [replan for history, some in made for replan in history.replans(some, slots, bonus)]
                    turnover = statistics.fmean(replan.turnover for replan in found)
                    shares = statistics.fmean(replan.share for replan in found)
                    oracle = statistics.fmean(replan.oracle for replan in found)
                    cells.append(f"bonus {bonus}: {turnover * 100:5.1f} / {shares * 100:.1f}")
                print(f"  W{slots:<4} {name:22} {'   '.join(cells)}   oracle {oracle * 100:.1f}", flush=True)


if __name__ == "__main__":
    main()
