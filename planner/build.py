"""Builds a plan from rates: admission, then placement, then the plan value and a report about it.

The result depends on rates, endpoint names, parameters and the previous plan alone: the same input gives the same
bytes. A previous plan matters in two ways: its keys are favoured in admission, and, with the method `sticky`, stay on
their endpoints. Endpoints are matched by name; those that are to get nothing (draining) are simply not named.
"""

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.admission import Rules, admit
from planner.diff import match
from planner.placement import place
from planner.rates import KeyRates
from planner.sticky import Ints, Limits, Outcome, Previous, place_sticky
from service.errors import InvalidInput, InvalidParameter
from service.plan import Parameters, Plan, check

Method = Literal["sticky", "lpt"]
MAX_SLOTS = 2**32 - 1  # the plan's field


@dataclass(frozen=True, slots=True)
class Shape:
    """What a plan says in numbers.

    max_over_mean: highest expected load of an endpoint over their mean, the cold tail among it; 1 without any load.
    loads_rps, slots: one an endpoint.
    """

    slots_used: int
    admitted: int
    admitted_rate_share: float
    max_copies: int
    max_over_mean: float
    loads_rps: tuple[float, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A plan, its numbers, how its placement ended, and how long its two steps took."""

    plan: Plan
    shape: Shape
    outcome: Outcome
    admit_ms: float
    place_ms: float


def build(
    rates: KeyRates,
    endpoints: Sequence[str],
    *,
    rules: Rules,
    key_check: int,
    previous: Plan | None = None,
    method: Method = "sticky",
    limits: Limits | None = None,
) -> Built:
    """Return the plan for `rates` on the named endpoints; raise InvalidInput for a parameter out of range.

    previous: the plan in service, None: there is none.  limits: of `sticky`.
    About 4 ms for 128,824 keys on 30 endpoints of 128 slots, and as much again for checking the result.
    """
    limits = limits or Limits()
    _refuse(endpoints, rules, limits)
    if previous is not None and previous.key_check != key_check:
        raise InvalidInput("the previous plan was built with another salt", "set the same CACHEROUTE_KEY_SALT")
    began = time.perf_counter()
    admission = admit(
        rates.key_hashes,
        rates.rates_rps,
        endpoints=len(endpoints),
        rules=rules,
        previous_copies=None if previous is None else copies_before(rates, previous),
        prefix_tokens=rates.prefix_tokens,
    )
    admitted_rates = rates.rates_rps[admission.rows]
    admitted_rps = math.fsum(admitted_rates.tolist())
    admitted = time.perf_counter()
    cold_rps = max(0.0, rates.total_rps - admitted_rps) / len(endpoints)
    outcome: Outcome = "fresh"
    if previous is None or method == "lpt" or not len(previous):
        placement = place(
            admitted_rates.tolist(), admission.copies.tolist(), endpoints=len(endpoints), cold_load_rps=cold_rps
        )
    else:
        placement, outcome = place_sticky(
            admitted_rates,
            admission.copies,
            endpoints=len(endpoints),
            cold_load_rps=cold_rps,
            previous=where_they_were(previous, rates.key_hashes[admission.rows], endpoints),
            limits=limits,
        )
    placed = time.perf_counter()
    plan = Plan(
        endpoints=tuple(endpoints),
        key_hashes=array("Q", rates.key_hashes[admission.rows].tobytes()),
        target_offsets=placement.offsets,
        targets=placement.targets,
        rates_rps=array("f", admitted_rates.tolist()),
        key_check=key_check,
        parameters=Parameters(
            method=method,
            slots_per_endpoint=rules.slots_per_endpoint,
            replica_cap_rps=rules.replica_cap_rps,
            keys_seen=len(rates),
            rate_rps=rates.total_rps,
            admitted_rate_rps=admitted_rps,
        ),
    )
    check(plan)
    return Built(plan, shape_of(plan), outcome, admit_ms=(admitted - began) * 1e3, place_ms=(placed - admitted) * 1e3)


def where_they_were(previous: Plan, key_hashes: NDArray[np.uint64], endpoints: Sequence[str]) -> Previous:
    """Return the previous targets of these keys as indexes of today's endpoints, those that are gone left out."""
    index = {name: i for i, name in enumerate(endpoints)}
    renamed = np.array([index.get(name, -1) for name in previous.endpoints], dtype=np.int64)
    hashes = np.asarray(previous.key_hashes, dtype=np.uint64)
    offsets = np.asarray(previous.target_offsets, dtype=np.int64)
    targets = renamed[np.asarray(previous.targets, dtype=np.int64)]
    rows = match(key_hashes, hashes)
    lengths = np.where(rows >= 0, offsets[rows + 1] - offsets[rows], 0)
    # One index into `targets` for each copy: the start of its key's row, and its place in it.
    ends = np.cumsum(lengths)
    flat = np.repeat(offsets[rows] - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
    there = targets[flat]
    of_key = np.repeat(np.arange(len(key_hashes)), lengths)[there >= 0]
    kept = np.bincount(of_key, minlength=len(key_hashes))
    return Previous(np.concatenate(([0], np.cumsum(kept))), there[there >= 0])


def copies_before(rates: KeyRates, previous: Plan) -> Ints:
    """Return how many copies each key has in the plan before, 0 for none."""
    copies = np.zeros(len(rates), dtype=np.int64)
    if len(rates) and len(previous):
        hashes = np.asarray(previous.key_hashes, dtype=np.uint64)
        at = np.minimum(np.searchsorted(rates.key_hashes, hashes), len(rates) - 1)
        found = rates.key_hashes[at] == hashes
        copies[at[found]] = np.diff(np.asarray(previous.target_offsets, dtype=np.int64))[found]
    return copies


def shape_of(plan: Plan) -> Shape:
    """Return a plan's numbers from its columns alone; about 2 ms for 3,840 copies."""
    r, parameters = len(plan.endpoints), plan.parameters
    targets, offsets = np.asarray(plan.targets, dtype=np.int64), np.asarray(plan.target_offsets, dtype=np.int64)
    copies = offsets[1:] - offsets[:-1]
    share_rps = np.asarray(plan.rates_rps, dtype=np.float64) / copies
    cold_rps = max(0.0, parameters.rate_rps - parameters.admitted_rate_rps)
    loads = np.bincount(targets, weights=np.repeat(share_rps, copies), minlength=r) + cold_rps / max(r, 1)
    return Shape(
        slots_used=len(targets),
        admitted=len(plan),
        admitted_rate_share=parameters.admitted_rate_rps / parameters.rate_rps if parameters.rate_rps else 0.0,
        max_copies=int(copies.max(initial=0)),
        max_over_mean=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        loads_rps=tuple(loads.tolist()),
        slots=tuple(np.bincount(targets, minlength=r).tolist()),
    )


def report_of(built: Built) -> dict[str, object]:
    """Return what `plan build` prints; sha256 is that of the file, and of the assignment in every publication of it."""
    parameters, shape = built.plan.parameters, built.shape
    return {
        "keys": parameters.keys_seen,
        "rate_rps": parameters.rate_rps,
        "endpoints": len(built.plan.endpoints),
        "slots_per_endpoint": parameters.slots_per_endpoint,
        "slots_used": shape.slots_used,
        "admitted": shape.admitted,
        "admitted_rate_share": shape.admitted_rate_share,
        "max_copies": shape.max_copies,
        "max_over_mean": shape.max_over_mean,
        "outcome": built.outcome,
        "build_ms": built.admit_ms + built.place_ms,
        "sha256": built.plan.content_sha256(),
    }


def endpoint_names(value: str) -> tuple[str, ...]:
    """Return the names that `--endpoints` means: a number N is endpoint-0 to endpoint-(N-1), else a file of names.

    Raise InvalidInput for a number below 1, and for a file that is missing, empty, or names an endpoint twice.
    """
    try:
        number = int(value)
    except ValueError:
        return _names_from_file(Path(value))
    if number < 1:
        raise InvalidInput(f"--endpoints {value}: there must be at least 1", "give the number of endpoints, or a file")
    return tuple(f"endpoint-{i}" for i in range(number))


def _names_from_file(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as exc:
        raise InvalidInput(f"--endpoints {path} is not UTF-8", "save it as UTF-8, one name a line") from exc
    except OSError as exc:
        raise InvalidInput(
            f"--endpoints {path} cannot be read: {exc.strerror}", "give a number, or a file of one name a line"
        ) from exc
    first: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        name, _, _ = line.strip().partition("=")  # as the service is given them, `NAME=IP:PORT`, or names alone
        if not name:
            continue
        if (before := first.setdefault(name, number)) != number:
            raise InvalidInput(
                f"--endpoints {path} line {number}: {name!r} stands on line {before} too", "keep each name once"
            )
    if not first:
        raise InvalidInput(f"--endpoints {path} names no endpoint", "write one name a line")
    return tuple(first)


def _refuse(endpoints: Sequence[str], rules: Rules, limits: Limits) -> None:
    faults = []
    if not endpoints:
        faults.append("endpoints = 0 is below 1")
    if not 1 <= rules.slots_per_endpoint <= MAX_SLOTS:
        faults.append(f"--slots {rules.slots_per_endpoint} is not 1 to {MAX_SLOTS}")
    if not 0 < rules.replica_cap_rps < float("inf"):
        faults.append(f"--replica-cap {rules.replica_cap_rps:g} is not a number of requests/s above 0")
    wrong = [
        f"{option} {value:g} is not 0 to {most:g}"
        for option, value, most in (
            ("--epsilon", limits.epsilon, 10.0),
            ("--keys-budget", limits.keys_share, 1.0),
            ("--rate-budget", limits.rate_share, 1.0),
            ("--incumbent-bonus", rules.incumbent_bonus, 10.0),
            ("--resident-s", rules.resident_s, 1e9),
            ("--residency", rules.residency, 1e9),
            ("--token-budget", float(rules.tokens_per_endpoint), 1e15),
        )
        if not 0 <= value <= most  # a NaN is refused too
    ]
    if faults:
        raise InvalidInput("; ".join(faults + wrong), "correct it and build again")
    if wrong:
        raise InvalidParameter("; ".join(wrong), "correct it and build again")
