"""Lets operators see and steer one engine: three methods for vLLM's `EngineCore`, and the control file's orders.

1. vLLM's utility calls look methods up by name and run them on the engine's own thread between two steps, idle or not.
   So `wakman_status`, `wakman_set_policy` and `wakman_history` may touch the queue; nothing else may.
2. They answer plain dictionaries (msgpack carries nothing else) and never raise; a fault is `{"error": SENTENCE}`.
3. Precedence: the newest order wins. `WAKMAN_POLICY` is the start's; a control file that is there at the start is
   newer; after that each write of the file and each command is an order of its own time. A command is forgotten at a
   restart, the file is not.
4. Orders of the file are taken in `Control.poll`, which the attachment calls as the engine steps. Each method has it
   polled before it answers, so that an idle engine obeys once it is asked.
5. An engine that did not attach answers why, and refuses orders; it serves on as vLLM made it.
6. The last order that was obeyed stands in the status: the history has switches only, and who holds the policy that was
   live anyway, or lets the engine choose again, switches nothing.
"""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from engine_patch.control_file import ControlFile, Order, parsed_order, plain_text
from engine_patch.settings import AUTO, OFF, known_policies

__all__ = ["Control", "ControlFile", "Order", "install", "modes", "parsed_order", "plain", "started"]

METHODS = ("wakman_status", "wakman_set_policy", "wakman_history")

logger = logging.getLogger("vllm.wakman")


class Control:
    """What one attached engine is told and what it counts; everything runs on the engine's thread."""

    def __init__(self, attachment: Any, file: ControlFile | None = None) -> None:
        """attachment: an `attach.Attachment`, whose switches and decisions are counted from now on."""
        from engine_patch.switch_spans import SwitchSpans

        self._attachment = attachment
        self._file = file
        self._spans = SwitchSpans()
        self._switches: Counter[tuple[str, str, str]] = Counter()
        self._decisions: Counter[str] = Counter()
        self._order: dict[str, Any] | None = None
        attachment.listeners.append(self._heard)

    def start(self) -> None:
        """Begin to watch the file and to send spans, in threads of their own; returns at once."""
        if self._file is not None:
            self._file.start()
        self._spans.start()

    def poll(self, now: float) -> None:
        """Obey the file when it has a new order; below 1 µs when not. Never raises."""
        if self._file is None:
            return
        order = self._file.take()
        if order is None:
            return
        actor, why = order.actor or "control file", order.reason or "the control file says so"
        try:
            error = str(self._attachment.set_mode(order.policy, actor, why, cause="file").get("error") or "")
            if not error:
                self.obeyed(order.policy, "file", actor, why)
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
        self._file.answered(order, error)

    def obeyed(self, mode: str, cause: str, actor: str, why: str) -> None:
        """Take note of an order that the engine runs by from now on; one line in the log."""
        self._order = {"mode": mode, "cause": cause, "actor": actor, "why": why, "at": time.time()}
        logger.info("wakman: mode %s (%s, %s): %s", mode, cause, actor, why)

    def status(self) -> dict[str, Any]:
        """Return the last order, None before the first, and what is counted here, for the engine's status."""
        return {
            "order": self._order,
            "control_file": None if self._file is None else self._file.status(),
            "switch_counts": [
                {"from": old, "to": new, "cause": cause, "count": count}
                for (old, new, cause), count in sorted(self._switches.items())
            ],
            "decisions": dict(sorted(self._decisions.items())),
            "spans": self._spans.status(),
        }

    def close(self) -> None:
        """Stop reading the file and sending spans; what was counted stays readable."""
        if self._file is not None:
            self._file.close()
        self._spans.close()

    def _heard(self, event: str, told: Mapping[str, Any]) -> None:
        if event == "decision":
            self._decisions[str(told.get("reason", ""))] += 1
        elif event == "switch" and told.get("cause") != "start":
            self._switches[(str(told.get("from")), str(told.get("to")), str(told.get("cause")))] += 1
            self._spans.switched(told, self._attributes(told))

    def _attributes(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a span says beyond the history's entry: where, and by which rates."""
        found: dict[str, Any] = {"wakman.engine": self._attachment.engine, "wakman.window_s": told.get("window_s")}
        rates = told.get("rates") or {}
        return found | {f"wakman.hit_rate.{name}": rate for name, rate in rates.items()}


def started(attachment: Any) -> Control:
    """Return the control of an engine that has just attached; its file, where one is set, is watched from now on."""
    path = attachment.settings.control_file
    control = Control(attachment, ControlFile(path) if path else None)
    control.start()
    return control


def install() -> None:
    """Add the methods to `EngineCore`, in this process and for whoever is forked from it. Idempotent."""
    from vllm.v1.engine.core import EngineCore

    for name, method in zip(METHODS, (_core_status, _core_set_policy, _core_history), strict=True):
        if name not in vars(EngineCore):
            setattr(EngineCore, name, method)


def modes() -> tuple[str, ...]:
    """Return what an engine can be told to be."""
    return (AUTO, *known_policies(), OFF)


def plain(value: Any) -> Any:
    """Return `value` of what JSON and msgpack know: numpy's numbers become numbers, NaN and infinity None."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Iterable):
        return [plain(part) for part in value]
    return str(value)


def answer(attachment: Any, index: int, method: str, *arguments: str) -> dict[str, Any]:
    """Return what `method`, one of `METHODS`, answers for an attachment (or a `NotAttached`). Never raises.

    index: the engine's number among the data-parallel ones. What is due is done first: an idle engine takes no steps in
    which it would be.
    """
    try:
        attachment.poll(time.monotonic())
        found = ANSWERS[method](attachment, *arguments)
        told: dict[str, Any] = plain({**found, "engine": index})
        return told
    except Exception as exc:
        logger.warning("wakman: %s failed (%s: %s)", method, type(exc).__name__, exc)
        return {"engine": index, "ok": False, "error": f"{type(exc).__name__}: {exc}"}


def _status(attachment: Any) -> dict[str, Any]:
    control = attachment.control
    return {"pid": os.getpid(), **attachment.status(), **({} if control is None else control.status())}


def _set_policy(attachment: Any, mode: str, actor: str = "", why: str = "") -> dict[str, Any]:
    mode, actor, why = (plain_text(str(text)) for text in (mode, actor, why))
    if mode not in modes():
        error = f"unknown policy {mode!r}; there are {', '.join(modes())}"
        return {"ok": False, "unknown": True, "error": error, "policies": modes()}
    before = attachment.status()
    if not before.get("attached"):
        error = f"not attached: {before.get('reason') or 'unknown reason'}"
        return {"ok": False, "error": error, "status": _status(attachment)}
    actor = actor or "somebody"
    refused = attachment.set_mode(mode, actor, why, cause="manual").get("error") or None
    if refused is None and attachment.control is not None:
        attachment.control.obeyed(mode, "manual", actor, why)
    after = _status(attachment)
    moved = {"from": before.get("policy"), "to": after.get("policy"), "mode": after.get("mode")}
    return {"ok": refused is None, "error": refused, **moved, "status": after}


def _history(attachment: Any) -> dict[str, Any]:
    return {"history": attachment.history()}


ANSWERS: Mapping[str, Callable[..., dict[str, Any]]] = dict(zip(METHODS, (_status, _set_policy, _history), strict=True))


# vLLM counts a method's parameters before it calls: each has its own signature.
def _core_status(core: Any) -> dict[str, Any]:
    return _answered(core, "wakman_status")


def _core_set_policy(core: Any, mode: str, actor: str = "", why: str = "") -> dict[str, Any]:
    return _answered(core, "wakman_set_policy", mode, actor, why)


def _core_history(core: Any) -> dict[str, Any]:
    return _answered(core, "wakman_history")


def _answered(core: Any, method: str, *arguments: str) -> dict[str, Any]:
    try:
        attachment, index = _attachment(core), _index(core)
    except Exception as exc:
        attachment, index = _Failed(f"{type(exc).__name__}: {exc}"), 0
    return answer(attachment, index, method, *arguments)


def _attachment(core: Any) -> Any:
    from engine_patch import plugin

    failure = getattr(plugin, "failure", "")
    if failure:
        return _Failed(failure)
    from engine_patch import attach

    return attach.of(core.scheduler)


class _Failed:
    """Stands for the attachment of an engine whose scheduler could not even be wrapped."""

    control = None

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def poll(self, now: float) -> None:
        """Do nothing."""

    def status(self) -> dict[str, Any]:
        return {"attached": False, "reason": self._reason, "policy": None, "mode": OFF}

    def history(self) -> list[dict[str, Any]]:
        return []


def _index(core: Any) -> int:
    if hasattr(core, "engine_index"):
        return int(core.engine_index)
    return int(getattr(core.vllm_config.parallel_config, "data_parallel_rank", 0))
