"""Tells when a plan in service has to give way to Flat-LB because of what is measured, and when it may come back.

1. A plan is outside the envelope when the measured p99 of TTFT is above `p99_ratio_max` times what it is held against
   (planner.latency), or the active set, the keys asked for in a window, above `active_ratio_max` times the one that the
   rates know.
2. Both follow what is measured with a half-life of an hour, as rates do. So slow growth never leaves the envelope,
   and a lasting step is left to the gain once the rates have it.
3. A plan in service that is outside is taken away at once. It may come back when both measures were inside half of the
   envelope's width for `back_after_s`, without a break; a measure that is missing counts as inside.
4. Each further time it has to be taken away, that time doubles, up to 32 times. It is single again after a plan was in
   service and inside for twice that time.
5. A plan that somebody publishes meanwhile by hand counts as being back.

Source: ours; to fall back to Flat-LB when p99 or the active set leaves its envelope is CacheRoute's advice (section 6).
"""

from dataclasses import dataclass, replace
from typing import Literal

from planner.predict import Economics

ACTIVE_HALF_LIFE_S = 3600.0
LEAVES_MAX = 6


@dataclass(frozen=True, slots=True)
class Observed:
    """What was measured; None: not measured, and the rule that needs it is off.

    now_s: unix s.  ready: names of the endpoints that are ready.  p99_ttft_s: over the last window, None under some
    1,000 requests.  baseline_p99_ttft_s: what it is held against, see planner.latency.  active_keys: different keys
    asked for in one window of any length that stays the same.
    """

    now_s: float = 0.0
    ready: tuple[str, ...] | None = None
    p99_ttft_s: float | None = None
    baseline_p99_ttft_s: float | None = None
    active_keys: float | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """What the judge wants back in the next cycle; plain numbers, so that a record can hold it.

    at_s: when it was made.  stale_tokens: come together since the plan in service went stale (planner.gate).
    active_keys: the active set as the rates know it, None: not known yet.  left_at_s: when a plan was taken away, None:
    it was not, or is back.  inside_since_s: since when the measures are inside.  leaves: how often they were not.
    """

    at_s: float = 0.0
    stale_tokens: float = 0.0
    active_keys: float | None = None
    left_at_s: float | None = None
    inside_since_s: float | None = None
    leaves: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """inside: the other rules decide; left: the plan has to go; waiting: Flat-LB stays. reason: empty when inside."""

    state: Literal["inside", "left", "waiting"]
    reason: str
    numbers: dict[str, float]
    memory: Memory


def watch(memory: Memory, observed: Observed, economics: Economics, *, planned: bool) -> Watched:
    """Return where the pool stands by the rules of this module. planned: a plan with keys is in service."""
    now_s = observed.now_s
    numbers, measured, within, well_within = dict[str, float](), [], True, True
    if observed.p99_ttft_s is not None and observed.baseline_p99_ttft_s:
        before_s = observed.baseline_p99_ttft_s
        ratio = numbers["p99_ratio"] = observed.p99_ttft_s / before_s
        measured.append(f"p99 of TTFT is {observed.p99_ttft_s:.2f} s, {ratio:.2f} times the {before_s:.2f} s before")
        within &= ratio <= economics.p99_ratio_max
        well_within &= ratio <= _half(economics.p99_ratio_max)
    known = memory.active_keys
    if observed.active_keys is not None:
        known = known or observed.active_keys
        ratio = numbers["active_ratio"] = observed.active_keys / known if known else 1.0
        measured.append(f"{observed.active_keys:,.0f} keys are active, {ratio:.2f} times what the rates know")
        within &= ratio <= economics.active_ratio_max
        well_within &= ratio <= _half(economics.active_ratio_max)
        follow = 1 - 0.5 ** (max(0.0, now_s - memory.at_s) / ACTIVE_HALF_LIFE_S)
        known += (observed.active_keys - known) * follow
    memory = replace(memory, at_s=now_s, active_keys=known, left_at_s=None if planned else memory.left_at_s)
    words = "; ".join(measured)
    if planned and not within:
        memory = replace(memory, left_at_s=now_s, inside_since_s=None, leaves=min(memory.leaves + 1, LEAVES_MAX))
        wait_s = _back_after_s(memory, economics)
        return Watched("left", f"{words}; a plan may return after {wait_s:,.0f} s inside", numbers, memory)
    inside = within if memory.left_at_s is None else well_within
    since_s = (now_s if memory.inside_since_s is None else memory.inside_since_s) if inside else None
    inside_s = 0.0 if since_s is None else now_s - since_s
    wait_s = _back_after_s(memory, economics)
    memory = replace(memory, inside_since_s=since_s)
    if memory.left_at_s is None:
        forgotten = planned and inside_s >= 2 * wait_s
        return Watched("inside", "", numbers, replace(memory, leaves=0) if forgotten else memory)
    if since_s is None or inside_s < wait_s:
        waited = f"a plan may return after {wait_s:,.0f} s inside the envelope, and {inside_s:,.0f} s have passed"
        return Watched("waiting", f"{waited}{'; ' if words else ''}{words}", numbers, memory)
    # Being back begins a new time inside.
    return Watched("inside", "", numbers, replace(memory, left_at_s=None, inside_since_s=now_s))


def _half(ratio_max: float) -> float:
    return 1 + (ratio_max - 1) / 2


def _back_after_s(memory: Memory, economics: Economics) -> float:
    return economics.back_after_s * 2.0 ** max(0, memory.leaves - 1)
