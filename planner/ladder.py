"""Chooses the loads at which an endpoint is measured, and reads from them how much it bears; pure, no clock, seeded.

A load is broken when more than `LATE` of its requests come later than an SLO, so when their p99 does. Requests that
failed came too late. A step during which the client itself could not send in time says nothing and is left out.

1. Up: from a load that is next to nothing, by `GROWTH` a step, by `CAREFUL` once the level is passed, until a step is
   clearly broken (`BROKEN`, and `SURE` requests at least), or the highest load allowed is reached. While no step held,
   down by half, at most `DOWN` times.
2. Around: `AROUND` steps more. While the neighbours of the crossing are further apart than `NEAR`, the next step is
   between them; then the steps lie around the crossing, at `SPREAD`. Each is given an equal part of the time left, and
   at most `REQUESTS` requests.
3. The crossing is read from all steps together (planner.isotonic), for each SLO by itself; the lowest one counts.
4. The interval is a bootstrap: steps are drawn, and of each the `STRETCHES` stretches of consecutive requests. Requests
   that wait in one queue are late together; drawn one by one, they would give an interval that is too narrow.

The interval is of chance alone. A step ends before a queue at the brink has grown, so the crossing comes out high: on a
modelled engine by 5 % in half an hour, by 2 % in one hour (standard deviation 1 %; tests/claims/calibration.py). In
simulations of M/G/c servers the isotonic crossing was 2 to 3 % high, kneedle -13 to +61 %. Hence the headroom that
`calibrate` takes off. Source: ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.isotonic import Crossing, Where, crossing

Floats = NDArray[np.float64]

LATE = 0.01
BROKEN = 0.05
SURE = 5
GROWTH = 1.5
CAREFUL = 1.2
DOWN = 5
AROUND = 10
NEAR = 1.2
SPREAD = (-0.06, 0.06, -0.03, 0.03, 0.0, -0.09, 0.09, -0.045, 0.045, 0.015)
REQUESTS = 5000
UP_REQUESTS = 1000
UP_PART = 1 / 40
LATE_STEPS = 2
STRETCHES = 20
DRAWS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One load and what came of it; times in the endpoint's seconds.

    latencies_s: by name of SLO, one a request in order of sending, warm-up left out; infinite: it failed.
    lag_p99_s: how late the client sent.  late: so late that the step is left out.  cut: ended early, being broken.
    """

    rate_rps: float
    duration_s: float
    latencies_s: Mapping[str, Floats]
    lag_p99_s: float = 0.0
    late: bool = False
    cut: bool = False

    @property
    def requests(self) -> int:
        """How many requests count."""
        return max((len(values) for values in self.latencies_s.values()), default=0)

    @property
    def usable(self) -> bool:
        """Whether the step says something."""
        return not self.late and self.requests > 0

    def share_over(self, slos: Mapping[str, float]) -> float:
        """Return the share of requests that came later than the SLO which most of them missed."""
        return max(float(np.mean(self.latencies_s[name] > limit_s)) for name, limit_s in slos.items())

    def broken(self, slos: Mapping[str, float]) -> bool:
        """Tell whether it is clearly broken: one slow request among the few of a low load is a hiccup."""
        share = self.share_over(slos)
        return share > BROKEN and share * self.requests >= SURE


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ladder may do.

    start_rps: of the first step.  max_rps: never more.  least_s: shortest time that a step may take.  total_s: all
    together.
    """

    start_rps: float
    max_rps: float
    least_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Next:
    """The step to take next."""

    rate_rps: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """Where the first SLO is crossed: load, how it lies, and which SLO it is."""

    rate_rps: float
    where: Where
    bound_by: str


def next_step(steps: Sequence[Step], slos: Mapping[str, float], limits: Limits, left_s: float) -> Next | None:
    """Return the step to take after these, None: enough is known, or no more can be.

    left_s: how much time is left.
    """
    if left_s < limits.least_s:
        return None
    usable = [step for step in steps if step.usable]
    if sum(step.late for step in steps) >= LATE_STEPS + len(usable) // 4:
        return None
    if _bracketed(usable, slos, limits):
        return _around(steps, usable, slos, limits, left_s)
    if not usable:
        rate_rps = limits.start_rps if not steps else steps[-1].rate_rps
    elif not any(step.share_over(slos) <= LATE for step in usable):
        lowest = min(step.rate_rps for step in usable)
        if lowest <= limits.start_rps / 2**DOWN:
            return None
        rate_rps = lowest / 2
    else:
        top = max(usable, key=lambda step: step.rate_rps)
        if top.rate_rps >= limits.max_rps:
            return None
        rate_rps = top.rate_rps * (GROWTH if top.share_over(slos) <= LATE else CAREFUL)
    rate_rps = min(rate_rps, limits.max_rps)
    most_s = min(limits.total_s * UP_PART, UP_REQUESTS / rate_rps)
    return Next(rate_rps, min(left_s, max(limits.least_s, most_s)))


def _bracketed(usable: Sequence[Step], slos: Mapping[str, float], limits: Limits) -> bool:
    """Tell whether one step held and one was clearly broken, or at least too much and the highest allowed."""
    held = any(step.share_over(slos) <= LATE for step in usable)
    return held and any(
        step.broken(slos) or (step.rate_rps >= limits.max_rps and step.share_over(slos) > LATE) for step in usable
    )


def _around(
    steps: Sequence[Step], usable: Sequence[Step], slos: Mapping[str, float], limits: Limits, left_s: float
) -> Next | None:
    """Rule 2."""
    first = next(n for n in range(1, len(steps) + 1) if _bracketed([s for s in steps[:n] if s.usable], slos, limits))
    done = sum(step.usable for step in steps[first:])
    if done >= AROUND:
        return None
    at = find(usable, slos).rate_rps
    below = max((step.rate_rps for step in usable if step.rate_rps < at), default=at)
    above = min((step.rate_rps for step in usable if step.rate_rps > at), default=at)
    rate_rps = at * (1 + SPREAD[done]) if above <= below * NEAR else math.sqrt(below * above)
    rate_rps = min(rate_rps, limits.max_rps)
    return Next(rate_rps, min(left_s, max(limits.least_s, min(left_s / (AROUND - done), REQUESTS / rate_rps))))


def find(steps: Sequence[Step], slos: Mapping[str, float]) -> Found:
    """Return the lowest crossing of the SLOs; steps: usable ones, at least one."""
    found = [(_crossing(steps, name, limit_s), name) for name, limit_s in slos.items()]
    # Of two that end at the same load, one that is crossed there says more than one that may lie beyond.
    least, name = min(found, key=lambda pair: (pair[0].at, ("below", "crossed", "above").index(pair[0].where)))
    return Found(least.at, least.where, name)


def _crossing(steps: Sequence[Step], name: str, limit_s: float) -> Crossing:
    shares = [float(np.mean(step.latencies_s[name] > limit_s)) for step in steps]
    return crossing([step.rate_rps for step in steps], shares, [len(step.latencies_s[name]) for step in steps], LATE)


def interval(steps: Sequence[Step], slos: Mapping[str, float], seed: int, draws: int = DRAWS) -> tuple[float, float]:
    """Return the 95 % interval of the crossing; its ends lie within the loads measured. About 1 s for 20 steps."""
    rng = np.random.default_rng(seed)
    sums = {name: [_stretches(step.latencies_s[name] > limit_s) for step in steps] for name, limit_s in slos.items()}
    found = np.empty(draws)
    for draw in range(draws):
        rows = rng.integers(0, len(steps), len(steps)).tolist()
        loads = [steps[row].rate_rps for row in rows]
        chosen = [rng.integers(0, STRETCHES, STRETCHES) for _ in rows]
        found[draw] = min(_drawn(loads, [sums[name][row] for row in rows], chosen) for name in slos)
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _stretches(over: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return, of each stretch of consecutive requests, how many there are and how many were late."""
    edges = np.linspace(0, len(over), STRETCHES + 1).astype(int)
    late = np.concatenate(([0], np.cumsum(over)))
    return np.diff(edges).astype(float), np.diff(late[edges]).astype(float)


def _drawn(loads: Sequence[float], sums: Sequence[tuple[Floats, Floats]], chosen: Sequence[NDArray[np.int64]]) -> float:
    counts = [max(1.0, float(n[rows].sum())) for (n, _), rows in zip(sums, chosen, strict=True)]
    shares = [float(k[rows].sum()) / n for (_, k), rows, n in zip(sums, chosen, counts, strict=True)]
    return crossing(loads, shares, counts, LATE).at
