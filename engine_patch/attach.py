"""Attaches to each engine of a process right after its scheduler is built, or says why it did not.

1. `install` wraps `Scheduler.__init__`; `attach` runs when vLLM's own has returned: the pool is complete and nothing is
   queued yet. Whatever happens here, the scheduler is built as without us.
2. The guards decide. Refused: one line `wakman: not attached: REASON`, `attached` is false, vLLM stays as it is.
3. A process may build several engines, one after another or side by side: each has its own attachment, kept by its
   scheduler and going with it. `of` finds it; `current` is the newest that lives.
"""

import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from engine_patch.attachment import Attachment
from engine_patch.guards import Engine, refusal, support
from engine_patch.settings import OFF, EngineSettings

MARK = "_wakman_wraps"
PLACE = "_wakman"
NO_ENGINE = "no vLLM scheduler was built in this process"

logger = logging.getLogger("vllm.wakman")


class NotAttached:
    """Stands where an engine was left alone, and in a process without one, and says why."""

    control: Any = None
    attached = False

    def __init__(self, reason: str, engine: int = 0, version: str = "") -> None:
        self.engine = engine
        self._reason = reason
        self._version = version

    def status(self) -> dict[str, Any]:
        """Return why this engine is not attached to."""
        return {
            "attached": False,
            "reason": self._reason,
            "policy": None,
            "mode": OFF,
            "engine": self.engine,
            "pid": os.getpid(),
            "version": self._version,
            "support": support(self._version),
        }

    def set_mode(self, mode: str, actor: str, why: str, cause: str = "manual") -> dict[str, Any]:
        """Refuse: there is nothing to steer."""
        return {"ok": False, "error": f"not attached: {self._reason}"}

    def history(self) -> list[dict[str, Any]]:
        """Return nothing: vLLM's own policy was live all the time."""
        return []

    def poll(self, now: float) -> None:
        """Do nothing."""

    def detach(self, why: str, cause: str = "fault") -> None:
        """Do nothing."""


_attached: "list[weakref.ref[Attachment]]" = []
# The newest refusal, alone.
_refused: "deque[NotAttached]" = deque([NotAttached(NO_ENGINE)], maxlen=1)


def install() -> None:
    """Wrap `Scheduler.__init__`, here and in what is forked from here. Idempotent; imports vLLM's scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler.__init__
    if getattr(stock, MARK, False):
        return

    @functools.wraps(stock)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        attach(self)

    setattr(build, MARK, True)
    Scheduler.__init__ = build


def attach(scheduler: Any, environ: Mapping[str, str] = os.environ) -> "Attachment | NotAttached":
    """Attach to the engine of `scheduler`, once; what stands in the way is logged and returned. Never raises."""
    if PLACE in vars(scheduler):
        return of(scheduler)
    outcome: Attachment | NotAttached
    try:
        outcome = _attach(scheduler, environ)
    except Exception as error:
        logger.debug("wakman: attaching failed", exc_info=True)
        outcome = NotAttached(f"attaching failed ({type(error).__name__}: {error})")
    vars(scheduler)[PLACE] = outcome
    if isinstance(outcome, Attachment):
        _attached[:] = [known for known in _attached if known() is not None]
        _attached.append(weakref.ref(outcome))
        logger.info("wakman: attached: %s", outcome.describe())
    else:
        _refused.append(outcome)
        logger.warning("wakman: not attached: %s", outcome.status()["reason"])
    return outcome


def of(scheduler: Any) -> "Attachment | NotAttached":
    """Return what was made of this scheduler's engine."""
    found: Attachment | NotAttached | None = vars(scheduler).get(PLACE)
    return NotAttached("the scheduler was built before the plugin was loaded") if found is None else found


def current() -> "Attachment | NotAttached":
    """Return the newest attachment whose engine lives, else the last refusal."""
    for known in reversed(_attached):
        if (attachment := known()) is not None:
            return attachment
    return _refused[-1]


def _attach(scheduler: Any, environ: Mapping[str, str]) -> "Attachment | NotAttached":
    engine = Engine.of(scheduler, EngineSettings.from_env(environ))
    index = _index(scheduler)
    reason = refusal(engine)
    if reason is not None:
        return NotAttached(reason, index, engine.version)
    return Attachment(engine, index)


def _index(scheduler: Any) -> int:
    """Return the engine's number among the data-parallel ones; 0 when there is one."""
    parallel = getattr(getattr(scheduler, "vllm_config", None), "parallel_config", None)
    for name in ("data_parallel_index", "data_parallel_rank"):
        index = getattr(parallel, name, None)
        if isinstance(index, int):
            return index
    return 0
