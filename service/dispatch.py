"""Picks the endpoints for one request; pure, so that the offline replay runs this very code.

1. A key with usable targets gets them all, least-loaded first (reason `planned`).
2. Unless even that one would then hold more than `spill_factor` times its share of the usable load and `SPILL_SLACK`
   beyond, and one of `SPILL_CHOICES` random endpoints holds less: that one is put first (reason `spill`).
3. A key whose targets are all unusable is picked like a cold one (reason `fallback`).
4. A key without targets, and a request without a key, gets the less loaded of two random endpoints (reason `cold`).
5. With a subset (the gateway's hint), all of this happens as if the fleet were the subset.
6. One endpoint outside the list follows as a spare, again the less loaded of two: Envoy walks the list when it cannot
   connect, and a list of dead targets would otherwise end in its own fallback.

Ties between targets are broken at random: placement charges each copy with an equal share of the key's rate.

Source: CacheRoute, arXiv 2608.19677, dispatch step. Rules 2, 3, 5 and 6 are ours. Rule 2 is the bounded load of
consistent hashing (Mirrokni et al. 2018) with the planned targets for a home: without it a plan that is balanced by
rate gives its hits back as queueing, because rates do not see how long prompts are. docs/performance.md has figures.
"""

from collections.abc import Collection, Sequence
from operator import attrgetter
from random import Random
from typing import Literal, NamedTuple

from service.errors import NoReadyEndpoint
from service.fleet import ANSWER_WORK, Endpoint, Fleet
from service.table import Table

Reason = Literal["planned", "spill", "fallback", "cold"]
REASONS: tuple[Reason, ...] = ("planned", "spill", "fallback", "cold")

SPILL_FACTOR = 1.25
# Two find an idle endpoint too rarely; all of them would send every process that looks at one moment to the same one.
SPILL_CHOICES = 4
# What one engine step computes of prompts (8,192 tokens of 4 bytes): a target that holds less has no queue to flee.
SPILL_SLACK = 32768


_load = attrgetter("load")


class Pick(NamedTuple):
    """Endpoints in the order Envoy shall try them, never empty, and why the first is first."""

    endpoints: tuple[Endpoint, ...]
    reason: Reason


def pick(
    table: Table,
    fleet: Fleet,
    key_hash: int | None,
    rng: Random,
    work: int = ANSWER_WORK,
    spill_factor: float = SPILL_FACTOR,
    subset: Collection[Endpoint] | None = None,
) -> Pick:
    """Return the endpoints for a request with this key (None: no key); 2 to 4 µs.

    work: of this request (`fleet.request_work`).  spill_factor: 1 or more; infinity never spills.  subset: pick from
    these alone (None: from all).  Raise NoReadyEndpoint when no endpoint is usable.
    """
    usable, usable_load = fleet.usable, fleet.usable_load
    if subset is not None:
        usable = [e for e in usable if e in subset]
        usable_load = sum(e.load for e in usable)
    if not usable:
        raise NoReadyEndpoint(len(fleet.endpoints) if subset is None else len(subset))
    names = table.targets.get(key_hash) if key_hash is not None else None
    if names is None:
        return Pick(_with_spare([_two_choices(usable, rng)], usable, rng), "cold")
    by_name = fleet.by_name
    targets = [e for name in names if (e := by_name.get(name)) is not None and e.usable]
    if subset is not None:
        targets = [e for e in targets if e in subset]
    if not targets:
        return Pick(_with_spare([_two_choices(usable, rng)], usable, rng), "fallback")
    if len(targets) > 1:
        start = int(rng.random() * len(targets))
        targets = targets[start:] + targets[:start]
        targets.sort(key=_load)
    best = targets[0].load
    if best + work > spill_factor * (usable_load / len(usable) + work) + SPILL_SLACK:
        relief = min((usable[int(rng.random() * len(usable))] for _ in range(SPILL_CHOICES)), key=_load)
        if relief.load < best:
            return Pick((relief, *(e for e in targets if e is not relief)), "spill")
    return Pick(_with_spare(targets, usable, rng), "planned")


def _two_choices(endpoints: Sequence[Endpoint], rng: Random) -> Endpoint:
    """Return the less loaded of two distinct random endpoints, the first drawn on a tie (power of two choices)."""
    n = len(endpoints)
    if n == 1:
        return endpoints[0]
    # rng.random() costs a tenth of rng.sample, and its bias at these n is below 1e-13.
    first = int(rng.random() * n)
    second = (first + 1 + int(rng.random() * (n - 1))) % n
    a, b = endpoints[first], endpoints[second]
    return a if a.load <= b.load else b


def _with_spare(chosen: list[Endpoint], usable: Sequence[Endpoint], rng: Random) -> tuple[Endpoint, ...]:
    if len(chosen) < len(usable):
        rest = [e for e in usable if e not in chosen] if len(chosen) > 1 else [e for e in usable if e is not chosen[0]]
        chosen.append(_two_choices(rest, rng))
    return tuple(chosen)
