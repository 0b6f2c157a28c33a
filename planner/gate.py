"""Decides whether a new plan is published, the one in service kept, or Flat-LB (an empty plan) put in its place.

The rules, in this order; the first that applies decides:

1. Without a ready endpoint, or without any rate, nothing is changed: there is nothing to judge by.
2. When an endpoint that the plan in service gives keys to is gone or not ready, and the candidate gives it none, the
   candidate is published at once. Its gain is judged in the next cycle.
3. A plan in service that leaves the envelope of measured p99 and active set gives way to Flat-LB, which stays for as
   long as planner.envelope says; then the rules below bring a plan back.
4. When the cache's size or the prefix is not known, nothing can be predicted. Then the candidate is "not judged": it is
   published when no plan is in service, on the triggers of rule 7, and when its keys carry `ADMITTED_SHARE` more of the
   traffic than those of the plan in service.
5. A candidate with a predicted gain below `gain_min` is refused. If the plan in service is below it by more than
   `gain_band` too, Flat-LB replaces it. The candidate must reach `gain_min` itself to come back, so it does not flap.
6. With no plan in service, or one that is below `gain_min` by more than the band, a candidate that is not refused is
   published.
7. So it is on a trigger: a key needs more copies than it has; the most loaded endpoint is above `imbalance_max` times
   the mean at today's rates, and the candidate lowers that by `BETTER` or to the bound; an endpoint is new to the plan,
   or below `UNDER_USED` of the mean and the candidate raises it by `BETTER`. A key that needs fewer copies is no hurry.
8. Otherwise the plan in service is kept until its staleness exceeds the warm-up of the candidate, both in prefill
   tokens (planner.predict, rules 6 and 7). Staleness is what comes together in the next interval, and what already did
   since the plan in service went stale: as with skis, one rents until the rent has come to the price, so that never
   more than twice is paid of what had been best in hindsight. Less than `stale_min` of all prompt tokens is noise.

The judge is pure: what it has to know of earlier cycles is in `Memory`, which it returns for the next one. A new leader
may begin without; when it finds Flat-LB published, it waits as after leaving the envelope. Anything that takes a
Situation and returns a Verdict can stand in its place, as a full replay.
Source: ours; the gate, the envelope and the rule of staleness are what CacheRoute (3.2, 5.3, 5.4, 6) asks for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from planner.build import Built
from planner.diff import Difference
from planner.envelope import Memory, Observed, watch
from planner.predict import (
    Economics,
    Floats,
    Prediction,
    Slots,
    gain,
    max_over_mean,
    predict,
    sizes_of,
    slots_of,
    staleness_tokens_per_s,
    warm_up_tokens,
)
from planner.rates import KeyRates
from service.errors import InvalidInput
from service.plan import Plan

__all__ = ["Economics", "Judge", "Memory", "Observed", "Situation", "Verdict", "judge"]

Decision = Literal["publish", "keep", "flat", "refuse"]
ADMITTED_SHARE = 0.05
BETTER = 0.05
UNDER_USED = 0.7


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a judge may look at.

    current: the plan in service, None or one without keys: Flat-LB.  difference: of current and candidate, for the
    numbers only.  memory: of the verdict before, None in a leader's first cycle.
    """

    rates: KeyRates
    current: Plan | None
    candidate: Built
    difference: Difference | None
    economics: Economics
    observed: Observed
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """publish: the candidate; flat: an empty plan; keep and refuse: nothing, the candidate being fine or not.

    reason: one sentence with the numbers that decided.  numbers: all that was predicted or compared, by name.
    """

    decision: Decision
    reason: str
    numbers: dict[str, float] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)


Judge = Callable[[Situation], Verdict]


def judge(situation: Situation) -> Verdict:
    """Return what to do by the rules of this module; about 60 ms for 128,824 keys and 3,840 slots.

    Raise InvalidInput that names the value for anything that is not finite, or below 0.
    """
    _refuse(situation)
    return _Cycle(situation).verdict()


class _Cycle:
    """One judgement: the situation, what is derived from it, and the numbers and memory as they come together."""

    def __init__(self, situation: Situation) -> None:
        self.rates, self.economics, self.observed = situation.rates, situation.economics, situation.observed
        self.candidate = situation.candidate.plan
        self.endpoints = self.candidate.endpoints
        # A plan without keys is Flat-LB.
        self.current = situation.current if situation.current is not None and len(situation.current) else None
        self.was = slots_of(self.rates, self.current, self.endpoints)
        self.new = slots_of(self.rates, self.candidate, self.endpoints)
        now_s = self.observed.now_s
        begin = Memory(now_s)
        if situation.current is not None and self.current is None:
            begin = Memory(now_s, left_at_s=now_s, leaves=1)
        self.memory = situation.memory or begin
        self.elapsed_s = max(0.0, now_s - self.memory.at_s)
        self.numbers: dict[str, float] = {}
        if situation.difference is not None:
            self.numbers["keys_changed_fraction"] = situation.difference.keys_changed_fraction
            self.numbers["rate_moved_fraction"] = situation.difference.rate_moved_fraction

    def verdict(self) -> Verdict:
        ready = self.observed.ready
        if ready is not None and not set(ready).intersection(self.endpoints):
            return self._say("keep", f"none of {len(self.endpoints)} endpoints is ready, so nothing would be better")
        if not self.rates.total_rps:
            return self._say("keep", "no key has a rate, so there is nothing to judge by")
        if lost := self._lost():
            names = ", ".join(lost[:3]) + (f" and {len(lost) - 3} more" if len(lost) > 3 else "")
            return self._publish(f"the plan in service gives keys to {names}, gone or not ready")
        watched = watch(self.memory, self.observed, self.economics, planned=self.current is not None)
        self.memory, e = watched.memory, self.economics
        self.numbers |= watched.numbers
        if watched.state == "left":
            return self._flat(watched.reason)
        if watched.state == "waiting":
            return self._say("refuse", f"Flat-LB stays: {watched.reason}")
        if not len(self.candidate):
            if self.current is None:
                return self._say("refuse", "the candidate admits no key, which is Flat-LB")
            return self._flat("the candidate admits no key")
        if not e.cache_tokens_per_endpoint or not sizes_of(self.rates, e).any():
            return self._not_judged()
        return self._judged()

    def _judged(self) -> Verdict:
        """Rules 5 to 8."""
        e = self.economics
        flat = predict(self.rates, None, self.endpoints, e)
        new = predict(self.rates, self.candidate, self.endpoints, e)
        g_new = self._note("candidate", flat, new)
        self.numbers["hit_rate_flat"] = flat.token_hit_rate
        hits = f"{_percent(flat.token_hit_rate)} of prompt tokens from cache under Flat-LB"
        with_new = f"{_percent(new.token_hit_rate)} with the candidate"
        if new.bottleneck > 1 + BETTER:
            with_new += f", whose keys load an endpoint with {new.bottleneck:.2f} times what it bears"
        short = f"the candidate's predicted gain {g_new:.2f} is below {e.gain_min:g} ({hits}, {with_new})"
        if self.current is None:
            if g_new < e.gain_min:
                return self._say("refuse", f"{short}; Flat-LB stays")
            return self._publish(f"predicted gain {g_new:.2f} of at least {e.gain_min:g} ({hits}, {with_new})")
        now = predict(self.rates, self.current, self.endpoints, e)
        g_now = self._note("current", flat, now)
        lost_it = g_now < e.gain_min - e.gain_band
        if g_new < e.gain_min:
            if lost_it:
                return self._flat(f"{short}, and that of the plan in service, {g_now:.2f}, by more than the band")
            return self._say("refuse", f"{short}; the plan in service, at {g_now:.2f}, stays")
        if lost_it:
            return self._publish(f"predicted gain {g_new:.2f} where the plan in service has come down to {g_now:.2f}")
        if why := self._trigger():
            return self._publish(f"{why} (predicted gain {g_new:.2f}, in service {g_now:.2f})")
        return self._stale(now, new)

    def _stale(self, now: Prediction, new: Prediction) -> Verdict:
        """Rule 8."""
        e = self.economics
        assert self.current is not None
        if self._pairs(self.was) == self._pairs(self.new):
            self.memory = replace(self.memory, stale_tokens=0.0)
            return self._say("keep", "the candidate gives every key the endpoints that it has")
        per_s = staleness_tokens_per_s(now, new, e)
        coming = per_s * e.plan_interval_s
        warm_up = warm_up_tokens(self.rates, self.current, self.candidate, self.endpoints, e)
        together = max(0.0, self.memory.stale_tokens + per_s * min(self.elapsed_s, e.plan_interval_s))
        noise = e.stale_min * now.prompt_tokens_per_s * e.plan_interval_s
        total = together + max(0.0, coming)
        self.numbers |= {"staleness_tokens": total, "staleness_next_tokens": coming, "warm_up_tokens": warm_up}
        costs = f"{total:,.0f} prefill tokens ({coming:,.0f} of them in the next {e.plan_interval_s:g} s)"
        if coming <= noise:
            self.memory = replace(self.memory, stale_tokens=0.0)
            return self._say(
                "keep",
                f"the candidate would save {max(0.0, coming):,.0f} prefill tokens in {e.plan_interval_s:g} s, no more "
                f"than noise ({noise:,.0f})",
            )
        if total <= warm_up:
            self.memory = replace(self.memory, stale_tokens=together)
            return self._say("keep", f"staleness is {costs}, the candidate's warm-up {warm_up:,.0f}")
        return self._publish(f"staleness is {costs}, the candidate's warm-up only {warm_up:,.0f}")

    def _not_judged(self) -> Verdict:
        """Rule 4."""
        why = "not judged, since the cache's size or the prefix is not known"
        shares = [float(slots.shares_rps.sum()) / self.rates.total_rps for slots in (self.was, self.new)]
        self.numbers |= {"admitted_share_current": shares[0], "admitted_share_candidate": shares[1]}
        if self.current is None:
            return self._publish(f"no plan is in service; {why}")
        if trigger := self._trigger():
            return self._publish(f"{trigger}; {why}")
        carry = f"the candidate's keys carry {_percent(shares[1])} of requests, those in service {_percent(shares[0])}"
        return (self._publish if shares[1] - shares[0] >= ADMITTED_SHARE else self._keep)(f"{carry}; {why}")

    def _lost(self) -> list[str]:
        """Return the endpoints of rule 2, by name."""
        if self.current is None:
            return []
        here = set(self.endpoints) if self.observed.ready is None else set(self.observed.ready)
        here &= set(self.endpoints)
        given = {self.endpoints[target] for target in set(self.candidate.targets)}
        return sorted({self.current.endpoints[target] for target in set(self.current.targets)} - here - given)

    def _trigger(self) -> str:
        """Return what rule 7 finds, empty: nothing."""
        assert self.current is not None
        more = int(((self.new.copies > self.was.copies) & (self.was.copies > 0)).sum())
        loads, loads_new = self._loads(self.was), self._loads(self.new)
        worst, worst_new = max_over_mean(loads), max_over_mean(loads_new)
        mean = float(loads.mean())
        least, least_new = float(loads.min()) / mean, float(loads_new.min()) / mean
        self.numbers |= {
            "keys_need_copies": float(more),
            "max_over_mean_current": worst,
            "max_over_mean_candidate": worst_new,
            "min_over_mean_current": least,
            "min_over_mean_candidate": least_new,
        }
        bound = self.economics.imbalance_max
        if more:
            return f"{more} key{'s need' if more > 1 else ' needs'} more copies"
        if worst > bound and worst_new <= max(bound, worst - BETTER):
            return f"the most loaded endpoint is at {worst:.2f} times the mean, with the candidate at {worst_new:.2f}"
        if joined := sorted(set(self.endpoints) - set(self.current.endpoints)):
            return f"{len(joined)} endpoint{'s are' if len(joined) > 1 else ' is'} new, {joined[0]} first"
        if least < UNDER_USED and least_new >= least + BETTER:
            return f"the least loaded endpoint is at {least:.2f} times the mean, with the candidate at {least_new:.2f}"
        return ""

    def _loads(self, slots: Slots) -> Floats:
        r = len(self.endpoints)
        cold = max(0.0, self.rates.total_rps - float(slots.shares_rps.sum())) / r
        return np.bincount(slots.targets, weights=slots.shares_rps, minlength=r).astype(np.float64) + cold

    def _pairs(self, slots: Slots) -> bytes:
        return np.sort(slots.rows * len(self.endpoints) + slots.targets).tobytes()

    def _note(self, whose: str, flat: Prediction, plan: Prediction) -> float:
        g = gain(flat, plan)
        self.numbers |= {
            f"gain_{whose}": g,
            f"hit_rate_{whose}": plan.token_hit_rate,
            f"bottleneck_{whose}": plan.bottleneck,
            f"work_over_mean_{whose}": max_over_mean(plan.work_tokens_per_s),
            f"resident_s_{whose}": float(np.median(plan.resident_s)),
        }
        return g

    def _publish(self, reason: str) -> Verdict:
        self.memory = replace(self.memory, stale_tokens=0.0)
        return self._say("publish", reason)

    def _keep(self, reason: str) -> Verdict:
        return self._say("keep", reason)

    def _flat(self, reason: str) -> Verdict:
        self.memory = replace(self.memory, stale_tokens=0.0)
        return self._say("flat", reason)

    def _say(self, decision: Decision, reason: str) -> Verdict:
        # inf (nothing is ever evicted) is no JSON.
        numbers = {name: value for name, value in self.numbers.items() if math.isfinite(value)}
        words = {"publish": "Published", "keep": "Kept", "flat": "Fell back to Flat-LB", "refuse": "Refused"}
        return Verdict(decision, f"{words[decision]}: {reason}.", numbers, self.memory)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _refuse(situation: Situation) -> None:
    faults = []
    for source in (situation.economics, situation.observed, situation.memory):
        if source is None:
            continue
        for entry in fields(source):
            value = getattr(source, entry.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                faults.append(f"{type(source).__name__.lower()} {entry.name} = {value}")
    e = situation.economics
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "slo_services", "plan_interval_s"):
        if getattr(e, name) == 0:
            faults.append(f"economics {name} = 0")
    for name in ("gain_min", "imbalance_max", "p99_ratio_max", "active_ratio_max"):
        if getattr(e, name) < 1:
            faults.append(f"economics {name} = {getattr(e, name)} below 1")
    rates = situation.rates
    for name, column in (("rates_rps", rates.rates_rps), ("prefix_tokens", rates.prefix_tokens)):
        if column is not None and not (np.isfinite(column).all() and (column >= 0).all()):
            faults.append(f"rates {name} of a key = {column[~(np.isfinite(column) & (column >= 0))][0]}")
    if not math.isfinite(rates.total_rps):
        faults.append(f"rates total_rps = {rates.total_rps}")
    if faults:
        raise InvalidInput("; ".join(faults), "give finite numbers, 0 or more (rates and the interval above 0)")
