"""What calls for a cycle before its time: an endpoint lost or back, load that has shifted, a key that needs copies.

1. An endpoint is away while every service that knows it says that it drains or is not ready, or while no service knows
   it any more that did before. One that no service ever knew is taken as there: they may be behind, or none runs.
2. It is lost after being away for `lost_after_s` without a break, and back after being there for as long: a restart of
   seconds moves nobody.
3. Services that say nothing (none lives) change nothing.
4. Load and copies are compared with what they were after the last cycle: what that could not mend calls for no other.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.admission import Rules
from planner.predict import slots_of
from planner.rates import KeyRates
from service.plan import Plan
from service.published import FLEET_SHOWN, Ack

# A change of max / mean that is more than noise.
WORSE = 0.05


class Presence:
    """Which of the planner's endpoints are lost; times are of one clock that never goes back, in s."""

    def __init__(self, endpoints: Iterable[str], lost_after_s: float, lost: Collection[str] = ()) -> None:
        """All are taken as there, but for those that an earlier planner found `lost`."""
        self._lost_after_s = lost_after_s
        self._lost = {name: name in lost for name in endpoints}
        self._since: dict[str, float] = {}
        self._seen: set[str] = set()

    def look(self, acks: Sequence[Ack], now: float) -> None:
        """Take in what the living services say."""
        there = _there(acks)
        whole = any(ack.fleet for ack in acks) and all(len(ack.fleet) < FLEET_SHOWN for ack in acks)
        self._seen |= there.keys()
        for name, lost in self._lost.items():
            away = not there[name] if name in there else (name in self._seen) if whole else None
            if away is None or away == lost:
                self._since.pop(name, None)
            elif now - self._since.setdefault(name, now) >= self._lost_after_s:
                self._lost[name] = away
                del self._since[name]

    @property
    def lost(self) -> tuple[str, ...]:
        """Return the lost endpoints."""
        return tuple(name for name, lost in self._lost.items() if lost)

    @property
    def unsure(self) -> bool:
        """Return whether an endpoint is on its way to be lost or back."""
        return bool(self._since)


def known_to_services(acks: Iterable[Ack]) -> set[str]:
    """Return the names of all endpoints that a living service has."""
    return {view.name for ack in acks for view in ack.fleet}


def _there(acks: Iterable[Ack]) -> dict[str, bool]:
    there: dict[str, bool] = {}
    for ack in acks:
        for view in ack.fleet:
            there[view.name] = there.get(view.name, False) or (view.ready and not view.draining)
    return there


@dataclass(frozen=True, slots=True)
class Pressure:
    """How a plan bears today's rates: highest load over the mean, and how many of its keys need more copies."""

    max_over_mean: float = 1.0
    short_of_copies: int = 0

    def best_of(self, other: "Pressure") -> "Pressure":
        """Return the lower of each."""
        return Pressure(min(self.max_over_mean, other.max_over_mean), min(self.short_of_copies, other.short_of_copies))

    def calls(self, before: "Pressure", imbalance_max: float) -> str:
        """Return why this calls for a cycle, where `before` is what the last one left; empty: it does not."""
        if self.short_of_copies > before.short_of_copies:
            return f"copies: {self.short_of_copies} keys need more than they have"
        if self.max_over_mean > imbalance_max and self.max_over_mean >= before.max_over_mean + WORSE:
            return f"imbalance: the most loaded endpoint is at {self.max_over_mean:.2f} times the mean"
        return ""


def pressure_of(rates: KeyRates, plan: Plan | None, endpoints: Sequence[str], rules: Rules) -> Pressure:
    """Return how `plan` bears these rates on these endpoints; a few ms for 128,824 keys."""
    if plan is None or not len(plan) or not rates.total_rps or not endpoints:
        return Pressure()
    slots = slots_of(rates, plan, endpoints)
    r = len(endpoints)
    cold = max(0.0, rates.total_rps - float(slots.shares_rps.sum())) / r
    loads = np.bincount(slots.targets, weights=slots.shares_rps, minlength=r) + cold
    planned = np.flatnonzero(slots.copies)
    most = min(r, rules.copies_max) if rules.copies_max else r
    with np.errstate(over="ignore"):
        wanted = np.clip(np.ceil(rates.rates_rps[planned] / rules.replica_cap_rps), 1, most)
    short = int((wanted > slots.copies[planned]).sum())
    return Pressure(float(loads.max() / loads.mean()), short)
