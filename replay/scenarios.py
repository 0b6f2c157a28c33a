"""Names the traffic that policies are compared on: the mixes, six drifts, the curves of one parameter, and own files.

1. `mixes`: the 20 of `replay.mixes`, an hour each.
2. `drift`: two hours each. Traffic that swaps between A = 75/15/10 and B = 0/5/95 every 60, 30, 15 and 7.5 minutes,
   that goes from A to B in one slow line, and that stays at 50/0/50, where the policies hardly differ.
3. `curves`: as Figure 3 of the WAKMan paper (arXiv 2610.36355): 33/33/33 with other numbers of turns and other lengths
   of single-turn input, and 0/50/50 with other gaps between the turns of a conversation. The paper does not give its
   points for the latter.
4. A file is JSON: a list of
   {"name": "mine", "single": 0.5, "multi": 0.25, "agentic": 0.25, "seconds": 3600, "parameters": {"rate": 2.0}}, or
   {"name": "mine", "phases": [{"seconds": 900, "from": [0.75, 0.15, 0.1], "to": [0, 0.05, 0.95]}]}.
   `name`, `seconds`, `parameters` and `to` may be left out. Shares add up to 1. `parameters` are the fields of
   `replay.appendix_f.Parameters`; prompt lengths are lists of [weight, median, sigma].
5. A recorded trace, in Mooncake's JSONL (`replay.traces`), is served in its own blocks of 512 tokens. Its times tick
   every 3 s and are smeared by the seed. What outputs hold is not known, so nothing can hit them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from replay.appendix_f import APPENDIX_F, Parameters
from replay.mixes import MIXES, Mix, Phase, Request, Traffic, block_ids, constant
from replay.traces import BLOCK_TOKENS, read_trace, smear
from service.errors import InvalidInput

ONE, OTHER = Mix(0.75, 0.15, 0.10), Mix(0.0, 0.05, 0.95)
_TWO_HOURS_S = 7200.0
_THIRDS, _HALVES = Mix(1 / 3, 1 / 3, 1 / 3), Mix(0, 0.5, 0.5)
_ENTRY = {"name", "single", "multi", "agentic", "seconds", "parameters", "phases"}
_REMEDY = "see `cacheroute engine evaluate --help` and docs/engine-evaluation.md for the format"


def mixes() -> tuple[Traffic, ...]:
    """Return the 20 mixes."""
    return tuple(constant(mix) for mix in MIXES)


def drift() -> tuple[Traffic, ...]:
    """Return the six drifts."""
    swaps = tuple(_swap(minutes) for minutes in (60, 30, 15, 7.5))
    line = Traffic("drift", (Phase(_TWO_HOURS_S, ONE, OTHER),))
    return (*swaps, line, constant(Mix(0.5, 0, 0.5), _TWO_HOURS_S, name="near-tie"))


def curves() -> tuple[Traffic, ...]:
    """Return the points of the three curves; a name is `turns=8`, `input=512` or `gap=20`."""
    return (
        *(_varied("turns", _THIRDS, "multi_turns_median", turns) for turns in (2, 3, 4, 6, 8)),
        *(_varied("input", _THIRDS, "single_input_mean", tokens) for tokens in (128, 512, 2048, 4096, 8192)),
        *(_varied("gap", _HALVES, "multi_gap_median", gap_s) for gap_s in (10, 20, 40, 60, 90, 120)),
    )


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded trace under the name of its file."""

    path: Path

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def requests(self, seed: int) -> tuple[Request, ...]:
        """Return its requests; InvalidInput for a file that is no trace."""
        found = []
        for number, request in enumerate(smear(read_trace(self.path), Random(seed))):
            full = request.prompt_tokens // BLOCK_TOKENS
            blocks = (request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS
            ids = np.array(request.blocks[:full], dtype=np.uint64)
            # Keys above 2^32, so that no block of an output is taken for one of the trace.
            made = block_ids((number + 1) << 32, blocks)[full:]
            found.append(
                Request(
                    request.at_s,
                    number,
                    "recorded",
                    0,
                    request.prompt_tokens,
                    request.output_tokens,
                    np.concatenate((ids, made)),
                    BLOCK_TOKENS,
                )
            )
        return tuple(found)


def read_traffic(path: Path) -> tuple[Traffic, ...] | tuple[Recorded, ...]:
    """Return the mixes of a JSON file, or the one recorded trace of a JSONL file, told by the ending.

    Raise InvalidInput for a file that is neither.
    """
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        # Read for its faults: a process of the evaluation would die of them unexplained.
        read_trace(path)
        return (Recorded(path),)
    return read_mixes(path)


def read_mixes(path: Path) -> tuple[Traffic, ...]:
    """Return the traffic of a file of rule 4; InvalidInput names the entry and what is wrong with it."""
    try:
        entries = json.loads(path.read_bytes())
    except OSError as exc:
        raise InvalidInput(f"--mixes {path}: {exc.strerror}", "name a readable file") from exc
    except ValueError as exc:
        raise InvalidInput(f"--mixes {path} is not JSON: {exc}", _REMEDY) from exc
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"--mixes {path} is not a list of mixes", _REMEDY)
    found: dict[str, Traffic] = {}
    for number, entry in enumerate(entries, 1):
        try:
            traffic = _read(entry)
            if traffic.name in found:
                raise ValueError(f"the name {traffic.name!r} is taken by another entry")
        except (KeyError, TypeError, ValueError) as exc:
            what = f"{exc.args[0]} is missing" if isinstance(exc, KeyError) else str(exc)
            raise InvalidInput(f"--mixes {path}, entry {number}: {what}", _REMEDY) from exc
        found[traffic.name] = traffic
    return tuple(found.values())


def _swap(minutes: float) -> Traffic:
    phases = tuple(Phase(60 * minutes, mix, mix) for mix in (ONE, OTHER) * math.ceil(_TWO_HOURS_S / (120 * minutes)))
    return Traffic(f"swap-{minutes:g}", phases)


def _varied(name: str, mix: Mix, parameter: str, value: float) -> Traffic:
    changed: Mapping[str, Any] = {parameter: value}
    return constant(mix, parameters=replace(APPENDIX_F, **changed), name=f"{name}={value:g}")


def _read(entry: Any) -> Traffic:
    if not isinstance(entry, dict):
        raise TypeError("is not an object")
    if unknown := sorted(set(entry) - _ENTRY):
        raise ValueError(f"unknown field {unknown[0]!r}; there are {', '.join(sorted(_ENTRY))}")
    parameters = _parameters(entry.get("parameters", {}))
    if "phases" in entry:
        if mixed := sorted(set(entry) & {"single", "multi", "agentic", "seconds"}):
            raise ValueError(f"{mixed[0]!r} and 'phases' exclude each other")
        phases = tuple(_phase(phase) for phase in entry["phases"])
        if not phases:
            raise ValueError("'phases' is empty")
        return Traffic(str(entry["name"]), phases, parameters)
    mix = _mix([entry["single"], entry["multi"], entry["agentic"]])
    return constant(mix, _positive("seconds", entry.get("seconds", 3600)), parameters, str(entry.get("name", "")))


def _phase(phase: Any) -> Phase:
    start = _mix(phase["from"])
    return Phase(_positive("seconds", phase["seconds"]), start, _mix(phase["to"]) if "to" in phase else start)


def _mix(shares: Any) -> Mix:
    single, multi, agentic = (_number("a share", share) for share in shares)
    if min(single, multi, agentic) < 0 or abs(single + multi + agentic - 1) > 1e-3:
        raise ValueError(f"shares {single:g}, {multi:g}, {agentic:g} are not at least 0 and 1 in all")
    total = single + multi + agentic
    return Mix(single / total, multi / total, agentic / total)


def _parameters(given: Any) -> Parameters:
    if not isinstance(given, dict):
        raise TypeError("'parameters' is not an object")
    known = {field.name: getattr(APPENDIX_F, field.name) for field in fields(Parameters)}
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"unknown parameter {name!r}; there are {', '.join(known)}")
        if isinstance(known[name], tuple):
            changed[name] = tuple(_component(name, component) for component in value)
            if not changed[name]:
                raise ValueError(f"{name!r} is empty")
        elif isinstance(known[name], int):
            changed[name] = int(_positive(name, value))
        else:
            changed[name] = _number(name, value)
            if changed[name] < 0 or (name == "rate" and not changed[name]):
                raise ValueError(f"{name!r} is {value}, too small")
    return replace(APPENDIX_F, **changed)


def _component(name: str, component: Any) -> tuple[float, float, float]:
    weight, median, sigma = (_number(name, part) for part in component)
    return _positive(name, weight), _positive(name, median), sigma


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if number <= 0:
        raise ValueError(f"{name!r} is {value}, not above 0")
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name!r} is {value!r}, not a number")
    return float(value)
