"""What calibration finds against what the engine model bears; run it for the table of docs/planner.md (minutes).

The ladder runs on the engine model itself, in virtual time, without HTTP: an endpoint that never sleeps and a client
that is never late. The truth is the crossing of steps of 15,000 requests each around it.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from planner.ladder import Limits, Step, find, interval, next_step
from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest
from replay.presets import find_preset

WARM_UP = 0.1
SEEDS = 8
TRUE_REQUESTS = 15_000
CASES = (("70b-fp8-tp2", 1.0, 1800.0), ("70b-fp8-tp2", 1.0, 3600.0), ("8b-bf16-tp1", 0.5, 1800.0))


class ModelledEndpoint:
    """One tenant's traffic on an engine model: 2,048 shared tokens, 512 of each request's own, 128 of answer."""

    def __init__(self, preset: str, seed: int) -> None:
        self.model = EngineModel(find_preset(preset))
        self.rng = np.random.default_rng(seed)
        self.now_s = 0.0
        self.sent = 0
        self.prefix = tuple(("prefix", block) for block in range(128))

    def step(self, rate_rps: float, duration_s: float) -> Step:
        """Offer a load, let all end, and return what came of it."""
        end_s = self.now_s + duration_s
        states, at_s = [], self.now_s
        while True:
            at_s += float(self.rng.exponential(1 / rate_rps))
            if at_s > end_s:
                break
            self.sent += 1
            own = tuple((self.sent, block) for block in range(32))
            states.append(self.model.submit(EngineRequest(str(self.sent), 2560, 128, self.prefix + own), at_s))
            self.model.advance(at_s)
        start_s = self.now_s + WARM_UP * duration_s
        self.now_s = end_s + 10_000
        self.model.advance(self.now_s)
        counted = [state for state in states if state.arrived_s >= start_s]
        ttft = [state.first_token_s - state.arrived_s for state in counted if state.first_token_s is not None]
        return Step(rate_rps, duration_s, {"ttft": np.array(ttft)})


def ladder(preset: str, slos: Mapping[str, float], total_s: float, seed: int) -> list[Step]:
    """Return the steps of one calibration."""
    endpoint, steps, left_s = ModelledEndpoint(preset, seed), list[Step](), total_s
    limits = Limits(start_rps=0.25, max_rps=1000, least_s=10 * max(2.0, *slos.values()), total_s=total_s)
    while (asked := next_step(steps, slos, limits, left_s)) is not None:
        steps.append(endpoint.step(asked.rate_rps, asked.duration_s))
        left_s -= asked.duration_s
    return steps


def truth(preset: str, slos: Mapping[str, float], near_rps: float) -> float:
    """Return where the SLO is crossed in the long run."""
    endpoint = ModelledEndpoint(preset, 10**6)
    rates = near_rps * np.linspace(0.88, 1.08, 11)
    return find([endpoint.step(float(rate), TRUE_REQUESTS / float(rate)) for rate in rates], slos).rate_rps


def main() -> None:
    """Print one row a case."""
    print("preset        SLO s  budget s  truth  error of the crossing: mean, sd, min, max  chance  CPU s")
    for preset, slo_s, total_s in CASES:
        slos = {"ttft": slo_s}
        began = time.process_time()
        runs = [ladder(preset, slos, total_s, seed) for seed in range(SEEDS)]
        cpu_s = (time.process_time() - began) / SEEDS
        found = np.array([find(steps, slos).rate_rps for steps in runs])
        true_rps = truth(preset, slos, float(np.median(found)))
        errors = found / true_rps - 1
        # How often the interval holds what such runs find on average.
        inside = sum(low <= found.mean() <= high for low, high in (interval(steps, slos, 0, 200) for steps in runs))
        print(
            f"{preset:12s}  {slo_s:5.2g}  {total_s:8.0f}  {true_rps:5.2f}  {errors.mean():+.3f} {errors.std():.3f} "
            f"{errors.min():+.3f} {errors.max():+.3f}  {inside} of {SEEDS}  {cpu_s:.1f}"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
