"""A drifting workload planned by the gate, at every interval, and never again; run it for the table of docs/planner.md.

What the planner sees are counts of an hour with their noise (an EWMA of windows of 300 s); what is charged are the true
rates: prefix tokens computed anew as predicted, and warm-up at each publication. A fleet of 30 with 641,000 cache
tokens each, prefixes of 4,000, 500 unique and 50 output tokens, 100 requests/s.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.admission import Rules
from planner.build import build
from planner.diff import diff
from planner.gate import Economics, Memory, Observed, Situation, judge
from planner.predict import max_over_mean, predict, warm_up_tokens
from planner.rates import KeyRates
from service.plan import Plan
from tests.claims.workloads import Walk, lognormal, whales, zipf

ECONOMICS = Economics(cache_tokens_per_endpoint=641_000, prefix_tokens=4000, unique_tokens=500, output_tokens=50)
INTERVALS = 8
NEW = 0.083  # the weight of a window of 300 s in an hour's average
WALKS = {
    "lognormal, no drift": Walk(lognormal, 128, sigma=0.0),
    "lognormal, 0.3": Walk(lognormal, 128),
    "whales, 0.3": Walk(whales, 128),
    "Zipf 1.2, no drift": Walk(zipf(1.2), 256, sigma=0.0),
    "Zipf 1.2, 0.1": Walk(zipf(1.2), 256, sigma=0.1),
    "Zipf 1.2, 0.3": Walk(zipf(1.2), 256),
}
Policy = Literal["never", "always", "gate"]


@dataclass(frozen=True, slots=True)
class Bill:
    """missed, warm_up: tokens over all intervals.  published: plans after the first.  worst: of load over the mean."""

    missed: float
    warm_up: float
    published: int
    worst: float
    reasons: tuple[str, ...]


def bill(walk: Walk, seed: int, policy: Policy) -> Bill:
    """Return what the policy cost."""
    rng = np.random.default_rng(seed + 1000)
    names = tuple(f"endpoint-{i}" for i in range(walk.endpoints))
    rules = Rules(slots_per_endpoint=walk.slots, replica_cap_rps=walk.cap_rps, resident_s=150.0)
    plan: Plan | None = None
    memory: Memory | None = None
    counted = None
    missed = warm_up = worst = 0.0
    published, reasons = 0, list[str]()
    for interval, true in enumerate(walk.rates(seed, INTERVALS)):
        if counted is None:
            counted = rng.poisson(true.rates_rps * 3600) / 3600
        else:
            counted = (1 - NEW) * counted + NEW * rng.poisson(true.rates_rps * 300) / 300
        seen = KeyRates(true.key_hashes, counted, float(counted.sum()))
        candidate = build(seen, names, rules=rules, key_check=0, previous=plan)
        difference = None if plan is None else diff(plan, candidate.plan)
        observed = Observed(300.0 * interval)
        verdict = judge(Situation(seen, plan, candidate, difference, ECONOMICS, observed, memory))
        memory = verdict.memory
        if plan is None:
            plan = candidate.plan
        elif policy == "always" or (policy == "gate" and verdict.decision == "publish"):
            warm_up += warm_up_tokens(true, plan, candidate.plan, names, ECONOMICS)
            plan, published = candidate.plan, published + 1
        reasons.append(verdict.reason)
        now = predict(true, plan, names, ECONOMICS)
        missed += now.missed_tokens_per_s * ECONOMICS.plan_interval_s
        worst = max(worst, max_over_mean(now.loads_rps))
    return Bill(missed, warm_up, published, worst, tuple(reasons))


def main(seeds: int = 3) -> None:
    """Print the bills, means over seeds."""
    print(f"seeds 0 to {seeds - 1}, {INTERVALS} intervals after the first; tokens in millions")
    print(f"{'':22}{'policy':8}{'missed':>9}{'warm-up':>9}{'published':>11}{'worst load':>12}")
    for name, walk in WALKS.items():
        for policy in ("never", "always", "gate"):
            rows = [bill(walk, seed, policy) for seed in range(seeds)]
            missed, warm_up, published = (
                float(np.mean([getattr(row, field) for row in rows])) for field in ("missed", "warm_up", "published")
            )
            worst = max(row.worst for row in rows)
            print(
                f"{name:22}{policy:8}{missed / 1e6:9.1f}{warm_up / 1e6:9.3f}{published:11.1f}{worst:12.2f}", flush=True
            )


if __name__ == "__main__":
    main()
