"""Settings of the patch in one engine: one frozen object from the environment; it never raises, its faults are listed.

1. Every name is `WAKMAN_` + a field's name in capitals. An unknown `WAKMAN_*` name is a fault: a misspelt setting that
   is silently ignored is found at night.
2. A fault keeps the patch from attaching (the engine serves on with vLLM's own queue, and the status shows every
   fault): running with half of the intended settings is the worse surprise.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

PREFIX = "WAKMAN_"
AUTO = "auto"
OFF = "off"
PRESETS = ("default", "paper")
SHOWN_CHARACTERS = 80

# What Kubernetes puts into every pod of a namespace for each Service there; one may be called `wakman`.
SERVICE_LINK = re.compile(
    r"WAKMAN_((\w+_)?SERVICE_(HOST|PORT(_\w+)?)|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)


@dataclass(frozen=True)
class EngineSettings:
    """What one engine runs with; units are in the names. `faults`: why it must not attach; empty when all is well."""

    policy: str = AUTO
    """`auto`, `off`, or the policy to hold."""
    policies: tuple[str, ...] = ("lru", "s3fifo", "arc")
    """Among which `auto` decides; holds `lru`, where every engine starts."""
    preset: str = "default"
    """Of the estimator: `default`, or `paper`."""
    interval_s: float = 0.0
    """Between two decisions; 0: what the preset has (60, `paper` 900)."""
    margin: float = 0.01
    """By how much a policy's hit rate must beat the live one's before a switch; 0.01 is one point. Not in `paper`."""
    dwell_s: float = 60.0
    """How long a policy stays live at least. Not in `paper`."""
    residual: float = 0.01
    """Above this gap between the live policy's shadow and the engine's own hit rate nothing is switched."""
    sample: float = 0.0
    """Share of blocks that the shadow follows; 0: all, fewer under load."""
    control_file: str = ""
    """File that names the mode, read about once a second; empty: none."""
    self_check_s: float = 600.0
    """Between two checks of the queue, each O(blocks) (about 50 ms at 262,144); 0: only at switches."""
    force: bool = False
    """Attach to a version of vLLM that nobody tried."""
    faults: tuple[str, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "EngineSettings":
        """Return the settings that `environ` asks for; what is wrong stands in `faults`. Never raises."""
        values: dict[str, Any] = {}
        faults: list[str] = []
        for name in sorted(environ):
            if not name.startswith(PREFIX) or SERVICE_LINK.fullmatch(name):
                continue
            field = name[len(PREFIX) :].lower()
            reader = READERS.get(field)
            if reader is None or name != PREFIX + field.upper():
                faults.append(f"{name} is no setting of this version (there are {', '.join(NAMES)})")
                continue
            text = environ[name].strip()
            try:
                values[field] = reader(text)
            except ValueError as error:
                faults.append(f"{name}={text[:SHOWN_CHARACTERS]!r}: {error}")
        return cls(**values, faults=tuple(faults))


def known_policies() -> tuple[str, ...]:
    """Return the names of all eviction policies."""
    from engine_patch.policy import POLICIES

    return POLICIES


def _policy(text: str) -> str:
    known = (AUTO, OFF, *known_policies())
    if text not in known:
        raise ValueError(f"unknown policy; there are {', '.join(known)}")
    return text


def _policies(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = known_policies()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown policy {unknown[0]!r}; there are {', '.join(known)}")
    if "lru" not in names:
        raise ValueError("must hold lru, where every engine starts")
    if len(names) < 2:
        raise ValueError("must hold two policies at least, or nothing can be decided")
    return names


def _preset(text: str) -> str:
    if text not in PRESETS:
        raise ValueError(f"unknown preset; there are {', '.join(PRESETS)}")
    return text


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("must be 0 or 1")
    return text == "1"


def _path(text: str) -> str:
    if text and not os.path.isabs(text):
        raise ValueError("must be an absolute path: the engine's working directory is not the operator's")
    return text


def _number(low: float, high: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("must be a number") from None
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return value

    return read


def _interval(text: str) -> float:
    return 0.0 if text == "0" else _number(0.1, 86400)(text)


READERS: Mapping[str, Callable[[str], Any]] = {
    "policy": _policy,
    "policies": _policies,
    "preset": _preset,
    "interval_s": _interval,
    "margin": _number(0, 1),
    "dwell_s": _number(0, 86400),
    "residual": _number(0, 1),
    "sample": _number(0, 1),
    "control_file": _path,
    "self_check_s": _number(0, 86400),
    "force": _flag,
}
NAMES = tuple(PREFIX + name.upper() for name in READERS)

assert set(READERS) == {field.name for field in fields(EngineSettings)} - {"faults"}
