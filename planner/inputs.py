"""Refuses what cannot be planned from, in one clear line each, and leaves the published plan as it is. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from planner.rates import KeyRates
from planner.triggers import known_to_services
from service.errors import InvalidPlan
from service.plan import Plan
from service.published import Ack

# Clocks that are kept in step go back by less.
CLOCK_BACK_S = 2.0


def check_clock(now_s: float, last_s: float) -> None:
    """Raise InvalidPlan when the clock went back since the cycle before (unix s); the next one goes by the new time."""
    if now_s < last_s - CLOCK_BACK_S:
        raise InvalidPlan(
            "clock",
            f"this clock says {now_s:.0f}, but the cycle before was at {last_s:.0f}: it went back by "
            f"{last_s - now_s:.0f} s; keep clocks in step (the next cycle goes by the new time)",
        )


def check_pool(published: Plan, version: int, ours: Collection[str], acks: Sequence[Ack]) -> None:
    """Raise InvalidPlan for a published plan of which we know no endpoint, unless services know ours by now."""
    if published.endpoints and not set(ours) & set(published.endpoints) and not set(ours) & known_to_services(acks):
        raise InvalidPlan(
            "endpoint",
            f"published plan {version} names none of this planner's endpoints but {published.endpoints[0]}, and no "
            "service knows ours: it is another pool's, or they were renamed; correct --pool or --endpoint, or plan "
            "once with --anew",
        )


def usable(ours: Sequence[str], acks: Sequence[Ack], lost: Collection[str]) -> tuple[str, ...]:
    """Return the endpoints that may get keys; raise InvalidPlan when there is none, or services know none of ours."""
    theirs = known_to_services(acks)
    if theirs and not theirs.intersection(ours):
        raise InvalidPlan(
            "endpoint",
            f"the services know none of this planner's endpoints, {ours[0]} first, but {min(theirs)}: call them in the "
            "planner as the service does (--endpoint)",
        )
    there = tuple(name for name in ours if name not in lost)
    if not there:
        raise InvalidPlan("not_ready", f"none of {len(ours)} endpoints is ready")
    return there


def check_rates(rates: KeyRates) -> None:
    """Raise InvalidPlan for a rate that is negative or not finite."""
    sound = np.isfinite(rates.rates_rps) & (rates.rates_rps >= 0)
    if not sound.all() or not math.isfinite(rates.total_rps):
        worst = rates.total_rps if sound.all() else rates.rates_rps[~sound][0]
        raise InvalidPlan("rate", f"the rate of a key is {worst}, which is none; look at what counts requests")


def with_prefixes(rates: KeyRates, prefix_tokens: float) -> KeyRates:
    """Return the rates with one length for all prefixes, unless each has its own; 0: not known."""
    if rates.prefix_tokens is not None or not prefix_tokens:
        return rates
    return replace(rates, prefix_tokens=np.full(len(rates), prefix_tokens))
