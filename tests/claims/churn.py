"""Replans a drifting workload and measures what moves; run it for the table of docs/planner.md (minutes)."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.admission import Rules
from planner.build import Method, build
from planner.diff import diff
from planner.sticky import Limits
from tests.claims.workloads import Walk, lognormal, whales, zipf

INTERVALS = 6
EPSILON = 0.05
WALKS = {
    "lognormal W128": Walk(lognormal, 128),
    "lognormal W512": Walk(lognormal, 512),
    "whales W128": Walk(whales, 128),
    "whales W512": Walk(whales, 512),
    "Zipf 1.0": Walk(zipf(1.0), 256),
    "Zipf 1.2": Walk(zipf(1.2), 256),
}
# Shapes that were not looked at while the rules of planner.sticky were made.
HELD_OUT = {
    "lognormal R100": Walk(lognormal, 128, endpoints=100),
    "Zipf 1.2, cap 2": Walk(zipf(1.2), 256, cap_rps=2.0),
    "Zipf 1.4": Walk(zipf(1.4), 256),
    "Zipf 1.1, R60": Walk(zipf(1.1, 20_000), 128, endpoints=60),
    "whales, sigma 0.6": Walk(whales, 128, sigma=0.6),
}


@dataclass(frozen=True, slots=True)
class Replan:
    """One replan; shares of 1.  excess: of max/mean over the larger of 1 + epsilon and fresh LPT's."""

    keys: float
    rate: float
    slots: float
    max_over_mean: float
    excess: float
    place_ms: float
    outcome: str


def replans(walk: Walk, seed: int, method: Method = "sticky", limits: Limits | None = None) -> list[Replan]:
    """Return what each of the intervals' replans did."""
    names = tuple(f"endpoint-{i}" for i in range(walk.endpoints))
    limits, plan, found = limits or Limits(epsilon=EPSILON), None, []
    rules = Rules(slots_per_endpoint=walk.slots, replica_cap_rps=walk.cap_rps)
    for rates in walk.rates(seed, INTERVALS):
        built = build(rates, names, rules=rules, key_check=0, previous=plan, method=method, limits=limits)
        if plan is not None:
            fresh = build(rates, names, rules=rules, key_check=0, previous=plan, method="lpt")
            moved = diff(plan, built.plan)
            worst = built.shape.max_over_mean
            found.append(
                Replan(
                    moved.keys_changed_fraction,
                    moved.rate_moved_fraction,
                    moved.slots_new_fraction,
                    worst,
                    worst - max(1 + limits.epsilon, fresh.shape.max_over_mean),
                    built.place_ms,
                    built.outcome,
                )
            )
        plan = built.plan
    return found


def main() -> None:
    """Print means and worst values over seeds."""
    print("seeds 0-2, then held out: seeds 100-105; each 6 intervals; mean (worst)")
    print(
        f"{'':22}{'method':8}{'keys changed %':>18}{'rate moved %':>16}{'new slots %':>14}{'max/mean':>16}{'excess':>9}"
    )
    for walks, seeds in ((WALKS, range(3)), (WALKS | HELD_OUT, range(100, 106))):
        for name, walk in walks.items():
            for method in ("lpt", "sticky"):
                began = time.perf_counter()
                rows = [row for seed in seeds for row in replans(walk, seed, method)]  # type: ignore[arg-type]

                def shown(field: str, scale: float = 100.0) -> str:
                    values = [getattr(row, field) * scale for row in rows]  # noqa: B023
                    return f"{sum(values) / len(values):.2f} ({max(values):.2f})"

                print(
                    f"{name:22}{method:8}{shown('keys'):>18}{shown('rate'):>16}{shown('slots'):>14}"
                    f"{shown('max_over_mean', 1):>16}{max(row.excess for row in rows):>9.4f}"
                    f"  {time.perf_counter() - began:.0f} s",
                    flush=True,
                )
        print()


if __name__ == "__main__":
    main()
