"""CPU and memory of a replan at a million and ten million keys: admission, then placement upon the plan before.

Rates are lognormal (sigma 1.65) and drift by exp(N(0, 0.3)) between the two plans, R = 30. CPU is process time of the
two steps of `build` together, without reading rates and without checking the result.
"""

import resource
import statistics
import time

import numpy as np

from planner.admission import Rules, admit
from planner.build import build, copies_before, where_they_were
from planner.placement import place
from planner.rates import KeyRates
from planner.sticky import Limits, place_sticky
from tests.bench.stats import machine

R, CAP_RPS, RUNS = 30, 4.0, 7
NAMES = tuple(f"endpoint-{i}" for i in range(R))


def rates_of(keys: int, rng: np.random.Generator, before: KeyRates | None = None) -> KeyRates:
    if before is None:
        hashes = (
            np.sort(rng.choice(2**62, keys, replace=False).astype(np.uint64)) if keys <= 10**6 else _hashes(keys, rng)
        )
        rates = np.exp(rng.normal(0, 1.65, keys))
        rates = np.minimum(rates / rates.sum(), 0.0048)
    else:
        hashes, rates = before.key_hashes, before.rates_rps * np.exp(rng.normal(0, 0.3, keys))
    rates *= 100.0 / rates.sum()
    return KeyRates(hashes, rates, float(rates.sum()))


def _hashes(keys: int, rng: np.random.Generator) -> np.ndarray:
    """Rising and distinct, without a table of all of them."""
    return np.cumsum(rng.integers(1, 2**62 // keys, keys, dtype=np.uint64))


def main() -> None:
    """Print min/median/max of the CPU of a replan."""
    print(f"replan, R = {R}, CPU ms, min / median / max of {RUNS} ({machine()})")
    for keys in (128_824, 1_000_000, 10_000_000):
        rng = np.random.default_rng(0)
        first = rates_of(keys, rng)
        second = rates_of(keys, rng, first)
        for w in (128, 512):
            rules = Rules(slots_per_endpoint=w, replica_cap_rps=CAP_RPS)
            plan = build(first, NAMES, rules=rules, key_check=0).plan
            parts: dict[str, list[float]] = {"admit": [], "place": [], "both": [], "fresh LPT instead": []}
            for _ in range(RUNS):
                began = time.process_time()
                copies = copies_before(second, plan)
                admission = admit(second.key_hashes, second.rates_rps, endpoints=R, rules=rules, previous_copies=copies)
                admitted = time.process_time()
                rows, rates = admission.rows, second.rates_rps[admission.rows]
                cold = (second.total_rps - float(rates.sum())) / R
                previous = where_they_were(plan, second.key_hashes[rows], NAMES)
                place_sticky(
                    rates, admission.copies, endpoints=R, cold_load_rps=cold, previous=previous, limits=Limits()
                )
                placed = time.process_time()
                place(rates.tolist(), admission.copies.tolist(), endpoints=R, cold_load_rps=cold)
                fresh = time.process_time()
                parts["admit"].append(admitted - began)
                parts["place"].append(placed - admitted)
                parts["both"].append(placed - began)
                parts["fresh LPT instead"].append(fresh - placed)
            shown = "  ".join(
                f"{name} {min(v) * 1e3:.1f}/{statistics.median(v) * 1e3:.1f}/{max(v) * 1e3:.1f}"
                for name, v in parts.items()
            )
            print(f"{keys:>11,} keys  W={w:<4} {shown}", flush=True)
        del first, second
    print(f"peak memory of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
