"""Predictions against simulated fleets; run it for the tables of docs/planner.md (half an hour).

SEEN: looked at while the bottleneck of the gain, and `gain_min`, were chosen; HOT are those made for the bottleneck.
HELD_OUT: made afterwards, and nothing was changed for them. Hit rates were predicted before any fleet was simulated;
nothing in them is fitted.
Each fleet is planned twice: by slots alone (theta 0), and with the residency threshold (theta 0.5, and the τ that is
predicted for Flat-LB). Capacity is the highest load, by bisection to 3 %, whose p99 of TTFT is within 8 times the time
a request takes by itself without a cache; it is given over that of Flat-LB, which is what the gain predicts.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.admission import Rules
from planner.build import Built, build
from planner.predict import Economics, Floats, Prediction, flat_resident_s, gain, predict
from planner.rates import KeyRates
from tests.claims.fleet import Outcome, simulate

BUSY = 0.6
SLO = Economics().slo_services
THETAS = (0.0, 0.5)
THREAD = (2.64, 20.0)


@dataclass(frozen=True, slots=True)
class Fleet:
    """A workload on a fleet. zipf: exponent of the rates by rank, or sigma: of lognormal ones.

    spread: sigma of lognormal prefix sizes (0: all alike).  filled: share of the cache that slots are counted for.
    cap: replica_cap_rps as a share of an endpoint's mean load.  copies: at most.
    """

    keys: int
    cache: int
    prefix: int
    unique: int
    output: int
    zipf: float = 0.0
    sigma: float = 1.65
    spread: float = 0.0
    endpoints: int = 16
    filled: float = 0.9
    cap: float = 0.5
    copies: int = 0

    def economics(self) -> Economics:
        return Economics(
            cache_tokens_per_endpoint=self.cache,
            prefix_tokens=self.prefix,
            unique_tokens=self.unique,
            output_tokens=self.output,
        )

    def rates(self, seed: int) -> tuple[KeyRates, float]:
        """Return rates at which the fleet without a cache would be `BUSY`, and the seconds of a request then."""
        rng = np.random.default_rng(seed)
        ranks = np.arange(1, self.keys + 1, dtype=np.float64)
        weights = ranks**-self.zipf if self.zipf else np.exp(rng.normal(0, self.sigma, self.keys))
        sizes = self.prefix * np.exp(rng.normal(0, self.spread, self.keys) - self.spread**2 / 2)
        weights /= weights.sum()
        economics = self.economics()
        prompt = float((weights * sizes).sum()) + self.unique
        service_s = prompt / economics.prefill_tokens_per_s + self.output / economics.decode_tokens_per_s
        rates = weights * BUSY * self.endpoints / service_s
        order = rng.permutation(self.keys)
        return KeyRates.of(order.tolist(), rates.tolist(), sizes.tolist() if self.spread else None), service_s


SEEN = {
    "A 129k keys": Fleet(128_824, 640_000, 1000, 500, 100),
    "B same, small cache": Fleet(128_824, 100_000, 1000, 500, 100),
    "C mostly unique": Fleet(20_000, 400_000, 300, 1500, 150),
    "D 2k keys": Fleet(2_000, 640_000, 4000, 400, 20),
    "E 300 keys, skewed": Fleet(300, 640_000, 4000, 400, 100, zipf=1.2),
    "F flat rates": Fleet(40_000, 400_000, 1000, 500, 100, sigma=0.5),
    "G tiny cache": Fleet(5_000, 40_000, 1000, 400, 50, zipf=0.9),
    "H 20k keys": Fleet(20_000, 640_000, 1500, 500, 100),
    "I sizes differ": Fleet(30_000, 400_000, 1200, 600, 80, spread=0.8),
    "J long prefixes": Fleet(1_000, 640_000, 7168, 512, 16, sigma=1.0),
    "K short, many": Fleet(60_000, 200_000, 192, 1200, 120, sigma=1.3),
    "L 30 endpoints": Fleet(4_000, 300_000, 3000, 300, 60, zipf=0.8, endpoints=30),
    "M cold-heavy": Fleet(100_000, 300_000, 2000, 600, 60, zipf=0.6),
    "N 8 endpoints": Fleet(10_000, 300_000, 1000, 300, 60, zipf=1.0, endpoints=8),
}
# For the bottleneck: hot keys with enough copies, with too few, and with one.
HOT = {
    "O hot, many copies": Fleet(400, 400_000, 3000, 600, 80, zipf=1.1, cap=0.3),
    "P hot, cap 1": Fleet(400, 400_000, 3000, 600, 80, zipf=1.1, cap=1.0),
    "Q hot, one copy": Fleet(400, 400_000, 3000, 600, 80, zipf=1.1, cap=100.0),
    "R warm, one copy": Fleet(3_000, 400_000, 2000, 600, 80, zipf=0.8, cap=100.0),
    "S hot, 30 endpoints": Fleet(5_000, 400_000, 1500, 600, 80, zipf=0.9, cap=100.0, endpoints=30),
    "T hot, few slots": Fleet(5_000, 400_000, 1500, 600, 80, zipf=0.9, cap=100.0, endpoints=30, filled=0.2),
    "hot, 2 copies": Fleet(300, 640_000, 4000, 400, 100, zipf=1.2, copies=2),
}
HELD_OUT = {
    "U sizes, small cache": Fleet(15_000, 150_000, 1500, 400, 120, sigma=1.3, spread=1.0, endpoints=12),
    "V 60 endpoints": Fleet(20_000, 200_000, 2000, 300, 30, zipf=0.9, endpoints=60),
    "W long outputs": Fleet(5_000, 500_000, 3000, 500, 600, zipf=1.0),
    "X 4 endpoints": Fleet(3_000, 250_000, 1200, 800, 100, sigma=2.0, endpoints=4),
    "Y everything fits": Fleet(150, 600_000, 3000, 300, 60, zipf=0.7),
    "Z heavy head, cap 2": Fleet(10_000, 300_000, 2500, 700, 40, zipf=1.3, cap=2.0, endpoints=24),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet's rates, its plan (None: Flat-LB) and what is predicted of it."""

    fleet: Fleet
    rates: KeyRates
    service_s: float
    built: Built | None
    predicted: Prediction

    def simulated(
        self, requests: int, seed: int, scale: float = 1.0, thread: tuple[float, float] = (1.0, 0.0)
    ) -> Outcome:
        """Return what the simulation meets at `scale` times the rates."""
        targets = {}
        if self.built is not None:
            plan = self.built.plan
            rows = np.searchsorted(self.rates.key_hashes, np.asarray(plan.key_hashes, dtype=np.uint64)).tolist()
            offsets, places = plan.target_offsets, plan.targets
            targets = {row: tuple(places[offsets[i] : offsets[i + 1]]) for i, row in enumerate(rows)}
        sizes: Floats = (
            np.full(len(self.rates), float(self.fleet.prefix))
            if self.rates.prefix_tokens is None
            else self.rates.prefix_tokens
        )
        return simulate(
            self.rates.rates_rps * scale,
            sizes,
            targets,
            endpoints=self.fleet.endpoints,
            economics=self.fleet.economics(),
            requests=requests,
            seed=seed,
            thread=thread,
        )

    def capacity(self, requests: int, seed: int) -> float:
        """Return the highest scale of the rates whose p99 is within the SLO."""
        low, high = 0.0, 0.4
        while high < 40 and self.simulated(requests, seed, high).p99_s <= SLO * self.service_s:
            low, high = high, high * 1.6
        while high - low > 0.03 * high:
            middle = (low + high) / 2
            if self.simulated(requests, seed, middle).p99_s <= SLO * self.service_s:
                low = middle
            else:
                high = middle
        return low


def cases(fleet: Fleet, seed: int) -> list[Case]:
    """Return Flat-LB, then the plan for each theta."""
    rates, service_s = fleet.rates(seed)
    economics, names = fleet.economics(), tuple(f"endpoint-{i}" for i in range(fleet.endpoints))
    flat = predict(rates, None, names, economics)
    found = [Case(fleet, rates, service_s, None, flat)]
    rules = Rules(
        slots_per_endpoint=max(1, int(fleet.filled * fleet.cache / fleet.prefix)),
        replica_cap_rps=fleet.cap * BUSY / service_s,
        resident_s=flat_resident_s(rates, names, economics),
        copies_max=fleet.copies,
    )
    for theta in THETAS:
        built = build(rates, names, rules=replace(rules, residency=theta), key_check=0)
        found.append(Case(fleet, rates, service_s, built, predict(rates, built.plan, names, economics)))
    return found


def compare(fleet: Fleet, requests: int, seed: int) -> list[tuple[Case, Outcome, float]]:
    """Return Flat-LB and the plan for each theta: the prediction, what was met, and capacity over Flat-LB's."""
    these = cases(fleet, seed)
    bears = [case.capacity(requests, seed) for case in these]
    return [(case, case.simulated(requests, seed), each / bears[0]) for case, each in zip(these, bears, strict=True)]


def main(requests: int = 150_000, seeds: int = 1) -> None:
    """Print hit rates predicted and met, the gain predicted, and what capacity became."""
    print(f"{requests} requests, seeds 0 to {seeds - 1}; hit rates in % of prompt tokens, predicted / met")
    print(
        f"{'':22}{'Flat-LB':>15}", *(f"{f'theta {theta}':>15}{'keys':>8}{'g':>6}{'capacity':>10}" for theta in THETAS)
    )
    for title, fleets in (("seen", SEEN), ("hot keys", HOT), ("held out", HELD_OUT)):
        points, ratios = [], []
        for name, fleet in fleets.items():
            runs = [compare(fleet, requests, seed) for seed in range(seeds)]
            line = f"{name:22}"
            for i in range(len(THETAS) + 1):
                predicted = float(np.mean([run[i][0].predicted.token_hit_rate for run in runs]))
                met = float(np.mean([run[i][1].token_hit_rate for run in runs]))
                points.append(100 * (predicted - met))
                line += f"{f'{100 * predicted:.1f} / {100 * met:4.1f}':>15}"
                if i:
                    g = float(np.mean([gain(run[0][0].predicted, run[i][0].predicted) for run in runs]))
                    capacity = float(np.mean([run[i][2] for run in runs]))
                    ratios.append(capacity / g)
                    built = runs[0][i][0].built
                    line += f"{len(built.plan) if built else 0:>8}{g:6.2f}{capacity:10.2f} "
            print(line, flush=True)
        print(
            f"{title}: hit rates {np.mean(points):+.1f} points, {max(points, key=abs):+.1f} at most; "
            f"capacity over g {min(ratios):.2f} to {max(ratios):.2f}\n",
            flush=True,
        )
    print(f"conversations of 2.64 requests, 20 s apart (no Poisson process); {requests // 4} requests, seed 0")
    for name, fleet in (SEEN | HELD_OUT).items():
        flat, _, plan = cases(fleet, 0)
        met_flat, met_plan = (case.simulated(requests // 4, 0, thread=THREAD).token_hit_rate for case in (flat, plan))
        print(
            f"{name:22}{100 * flat.predicted.token_hit_rate:8.1f} / {100 * met_flat:4.1f}"
            f"{100 * plan.predicted.token_hit_rate:8.1f} / {100 * met_plan:4.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
