"""What each cycle of a planner leaves behind: one record, which the next leader can go on from."""

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple, TypedDict

from planner.envelope import Memory


class Engined(TypedDict, total=False):
    """What engines said of themselves; None: not told, or not measured.

    answered, silent: how many engines.  cache_tokens: of the smallest cache.  p99_ttft_s, requests, load_rps: of the
    newest window under the plan in service (planner.latency), and what its p99 was held against.  known_*: what the
    next ones will be.
    """

    answered: int
    silent: int
    cache_tokens: int | None
    p99_ttft_s: float | None
    requests: float | None
    load_rps: float | None
    baseline_p99_ttft_s: float | None
    known_at_s: float | None
    known_p99_s: float | None
    known_load_rps: float | None


class Record(TypedDict):
    """What one cycle did.

    decision: `published`; `flat`, an empty plan was; `unchanged`, the published plan is the same assignment; `kept` or
    `refused`, by the judge; `no_rates`, nobody counted a request; `frozen`, an operator keeps planners away; `invalid`,
    the input cannot be planned from, and `reason` says why.
    at_s: unix s by the planner's clock.  trigger: why there was a cycle.  version, epoch: of the plan that is published
    after it.  lost: endpoints that were left out.  windows: how many held any request, `late` of them after their end.
    inputs_sha256: digest of all that decides: counts, endpoints, parameters, the plan before.  sha256: of the
    candidate's assignment.  numbers, memory: the judge's.  resident_s, cache_tokens: what admission and the judge went
    by, 0: not known; `*_from`: `setting`, `predicted`, `engines`, or empty.  engines: what these said.
    """

    planner: str
    at_s: float
    trigger: str
    decision: str
    reason: str
    version: int
    epoch: int
    keys: int
    endpoints: int
    lost: list[str]
    admitted: int
    admitted_rate_share: float
    max_over_mean: float
    rate_rps: float
    windows: int
    events: int
    late: int
    outcome: str
    inputs_sha256: str
    sha256: str
    resident_s: float
    resident_from: str
    cache_tokens: float
    cache_from: str
    numbers: dict[str, float]
    durations_ms: dict[str, float]
    memory: dict[str, float | None]
    engines: Engined


def blank(planner: str, at_s: float, trigger: str) -> Record:
    """Return the record of a cycle that has just begun."""
    return Record(
        planner=planner,
        at_s=at_s,
        trigger=trigger,
        decision="",
        reason="",
        version=0,
        epoch=0,
        keys=0,
        endpoints=0,
        lost=[],
        admitted=0,
        admitted_rate_share=0.0,
        max_over_mean=1.0,
        rate_rps=0.0,
        windows=0,
        events=0,
        late=0,
        outcome="",
        inputs_sha256="",
        sha256="",
        resident_s=0.0,
        resident_from="",
        cache_tokens=0.0,
        cache_from="",
        numbers={},
        durations_ms={},
        memory={},
        engines={},
    )


def under_version(record: Record, version: int, epoch: int) -> Record:
    """Return the record of a cycle after which this plan is published."""
    changed = record.copy()
    changed["version"], changed["epoch"] = version, epoch
    return changed


def took(record: Record, step: str, began: float) -> None:
    """Note how long a step took that began at this time of `time.perf_counter`."""
    record["durations_ms"][step] = round((time.perf_counter() - began) * 1e3, 3)


def dumps(record: Record) -> str:
    """Return the record as the store keeps it."""
    finite = {name: value for name, value in record["numbers"].items() if math.isfinite(value)}
    return json.dumps({**record, "numbers": finite}, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def digest(*parts: object) -> str:
    """Return one digest of values whose `repr` tells them apart."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Left(NamedTuple):
    """What a record leaves to the next planner: the judge's memory, when it was made (unix s; 0: never), who was lost,
    and what engines said."""

    memory: Memory | None = None
    at_s: float = 0.0
    lost: tuple[str, ...] = ()
    engines: Mapping[str, float | None] = {}


def resumed(records: Sequence[Mapping[str, Any]]) -> Left:
    """Return what the newest record leaves; records: newest first, as read; what is none of ours is nothing."""
    for record in records:
        try:
            at_s = float(record["at_s"])
            memory, lost = record["memory"], record["lost"]
            if math.isfinite(at_s) and isinstance(memory, Mapping) and isinstance(lost, list):
                engines = _numbers(record.get("engines", {}))
                return Left(_memory(memory) if memory else None, at_s, tuple(map(str, lost)), engines)
        except (KeyError, TypeError, ValueError):
            continue
    return Left()


def as_dict(memory: Memory) -> dict[str, float | None]:
    """Return a memory as a record holds it."""
    return asdict(memory)


def _memory(values: Mapping[str, object]) -> Memory:
    known: dict[str, Any] = {}
    for entry in fields(Memory):
        value = values.get(entry.name)
        if value is not None:
            number = _number(entry.name, value)
            known[entry.name] = int(number) if entry.type is int else number
    return Memory(**known)


def _numbers(values: object) -> dict[str, float | None]:
    if not isinstance(values, Mapping):
        raise TypeError("engines is no mapping")
    return {str(name): None if value is None else _number(name, value) for name, value in values.items()}


def _number(name: object, value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name} = {value}")
    return number
