"""One attached engine: its policy, its mode, what its shadow says, and the way back; all on the engine's own thread.

1. Attached, the free-block queue's class is ours (`lru` first: vLLM's behaviour over the same linked list), the hooks
   are on the engine's instances, the shadow process runs, and the mode is WAKMAN_POLICY.
2. Mode `auto` obeys the shadow's decisions, between two steps; any other mode holds that policy, and decisions are only
   shown. A decision about a policy that is no longer live is dropped. `off` detaches for good.
3. The queue is checked after each switch and every WAKMAN_SELF_CHECK_S: 2,048 blocks before each step (about 1 ms), in
   the end all are counted before one (free_queue_check.py). A mismatch, like any fault in a hook, ends with `detach`:
   stock class, stock methods, one log line, and the engine serves on as vLLM made it.
4. Without a shadow (it cannot start, or died too often) the live policy stays, and the status says so.
5. Durations by time.monotonic; what people read by the wall clock.
"""

import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from engine_patch import free_queue
from engine_patch.guards import Engine, drops_a_block, support
from engine_patch.hooks import Hooks
from engine_patch.self_check import SelfCheck
from engine_patch.settings import AUTO, OFF, known_policies

POLL_S = 0.1
HISTORY = 256

logger = logging.getLogger("vllm.wakman")


class Attachment:
    """One attached engine. Its public methods run on the engine's thread, between or inside steps, and never raise."""

    def __init__(self, engine: Engine, index: int) -> None:
        """Attach to `engine`, which the guards allowed. When this raises, `engine` is as it was."""
        self.settings = engine.settings
        self.engine = index
        self.control: Any = None
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        self._engine = engine
        self._stock = type(engine.queue)
        self._state: Any = None
        self._hooks: Hooks | None = None
        self._link: Any = None
        self._recorder: Any = None
        self._no_shadow = ""
        self._mode = AUTO
        self._policy = "lru"
        self._since = self._mode_since = time.time()
        self._reason = ""
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._switches = self._faults = 0
        self._last_decision: dict[str, Any] | None = None
        self._check: Any = None
        self._poll_due = 0.0
        try:
            self._begin()
        except BaseException:
            self._undo()
            raise

    @property
    def attached(self) -> bool:
        """Whether the engine runs on our queue."""
        return self._state is not None

    def describe(self) -> str:
        """Return the line that the log gets."""
        pool, version = self._engine.pool, self._engine.version
        return (
            f"vLLM {version} ({self._support()}), engine {self.engine}, {pool.num_gpu_blocks} blocks, mode {self._mode}"
        )

    def status(self) -> dict[str, Any]:
        """Return what is live and how it does, as plain values. O(1)."""
        engine = self._engine
        shadow = {"up": False, "error": self._no_shadow} if self._link is None else self._link.status()
        decided = self._last_decision or {}
        return {
            "attached": self.attached,
            "reason": self._reason,
            "policy": self._policy if self.attached else None,
            "mode": self._mode,
            "since": self._since,
            "mode_since": self._mode_since,
            "policies": list(self.settings.policies),
            "preset": self.settings.preset,
            "num_blocks": engine.pool.num_gpu_blocks,
            "free_blocks": engine.queue.num_free_blocks,
            "block_size": engine.coordinator.single_type_managers[0].block_size,
            "switches": self._switches,
            "last_decision": self._last_decision,
            "residual": decided.get("residual"),
            "drops": shadow.get("dropped", 0),
            "shadow": shadow,
            "self_checks": self._check.ended,
            "self_check_failures": self._check.failed,
            "faults": self._faults,
            "engine": self.engine,
            "pid": os.getpid(),
            "version": engine.version,
            "support": self._support(),
        }

    def history(self) -> list[dict[str, Any]]:
        """Return the last 256 changes of policy, oldest first."""
        return list(self._history)

    def set_mode(self, mode: str, actor: str, why: str, cause: str = "manual") -> dict[str, Any]:
        """Hold a policy, let the switcher decide (`auto`), or detach for good (`off`). Refused: `ok` is false."""
        known = (AUTO, OFF, *known_policies())
        if mode not in known:
            return {"ok": False, "error": f"unknown policy {mode!r}; there are {', '.join(known)}"}
        if not self.attached:
            return {"ok": False, "error": f"not attached: {self._reason}"}
        before = self._policy
        try:
            if mode == OFF:
                self.detach(f"switched off by {actor}: {why}", cause, actor)
            elif mode not in (AUTO, before):
                self._switch(mode, cause, actor, why)
        except Exception as error:
            self._fault(f"the switch to {mode}", error)
        if self._hooks is None and mode != OFF:
            return {"ok": False, "error": f"not attached: {self._reason}"}
        if mode != self._mode:
            self._mode, self._mode_since = mode, time.time()
        return {"ok": True, "error": None, "from": before, "to": self._policy, "mode": self._mode}

    def poll(self, now: float) -> None:
        """Do what is due at `now` (monotonic seconds): orders, the shadow's decisions, the self-check."""
        if self._hooks is None:
            return
        try:
            if self._state.fault is not None:
                raise RuntimeError(self._state.fault)
            between_slices = self._check.under_way and now < self._poll_due
            self._checked(self._check.go_on())
            if self.attached and not between_slices:
                self._poll_due = now + POLL_S
                self._poll(now)
        except Exception as error:
            self._fault("poll", error)
        if self._hooks is not None:
            self._hooks.due = now if self._check.under_way else self._poll_due

    def _poll(self, now: float) -> None:
        if self.control is not None:
            self.control.poll(now)
        for decision in () if self._link is None else self._link.poll():
            self._decided(asdict(decision))
        if self.attached and self._check.is_due(now):
            self._checked(self._check.begin())

    def detach(self, why: str, cause: str = "fault", actor: str = "wakman") -> None:
        """Give the engine its stock class and methods back; stop shadow and control file. Once."""
        if not self.attached:
            return
        before, self._reason = self._policy, why
        self._undo()
        self._mode, self._mode_since = OFF, time.time()
        self._policy, self._since = "lru", time.time()
        logger.warning("wakman: not attached: %s (detached from %s)", why, before)
        self._note(before, "lru", cause, actor, why, 0.0, None)

    def close(self) -> None:
        """Stop the shadow and the control file: the engine shuts down. The queue stays as it is."""
        _close(self._link)
        _close(self.control)

    def _begin(self) -> None:
        engine, wanted = self._engine, self.settings.policy
        self._state = free_queue.adopt(engine.queue, engine.pool)
        every_s = self.settings.self_check_s
        self._check = SelfCheck(engine.queue, self._state, engine.pool, every_s, time.monotonic())
        self._start_shadow()
        self._hooks = Hooks(engine, self._state, self._recorder, self.poll, self.close, self._fault)
        self._hooks.install()
        self._mode = wanted
        try:
            from engine_patch import control

            self.control = control.started(self)
        except Exception as error:
            logger.warning("wakman: no control file and no spans (%s: %s)", type(error).__name__, error)
        if wanted in (AUTO, "lru"):
            self._tell_policy("start")
        else:
            self._switch(wanted, "start", "WAKMAN_POLICY", "the environment says so")

    def _start_shadow(self) -> None:
        try:
            from engine_patch.events import Recorder
            from engine_patch.link import ShadowLink

            group = self._engine.coordinator.single_type_managers[0]
            self._recorder = Recorder()
            self._link = ShadowLink(
                self.settings,
                self._recorder,
                num_blocks=self._engine.pool.num_gpu_blocks - 1,
                block_size=group.block_size,
                engine=self.engine,
                policy=self._policy,
                dropped=int(drops_a_block(self._engine)),
            )
            self._link.start()
            weakref.finalize(self, _close, self._link)
        except Exception as error:
            self._link = self._recorder = None
            self._no_shadow = f"{type(error).__name__}: {error}"
            logger.warning("wakman: no shadow, so nothing is decided (%s)", self._no_shadow)

    def _switch(self, policy: str, cause: str, actor: str, why: str, decision: Mapping[str, Any] | None = None) -> None:
        """Make `policy` the live one, check the queue, and tell everybody. Raises before a change, or not."""
        before = self._policy
        started = time.perf_counter()
        free_queue.switch(self._engine.queue, self._state, policy)
        took = time.perf_counter() - started
        self._policy, self._since = policy, time.time()
        self._switches += cause != "start"
        self._tell_policy(why)
        logger.info("wakman: %s -> %s in %.1f ms (%s, %s): %s", before, policy, took * 1e3, cause, actor, why)
        self._note(before, policy, cause, actor, why, took, decision)
        self._checked(self._check.begin())

    def _decided(self, decision: dict[str, Any]) -> None:
        self._last_decision = decision
        self._tell("decision", decision)
        policy, live = decision["policy"], decision["live"]
        if self._mode == AUTO and decision["switch"] and live == self._policy != policy and self.attached:
            self._switch(policy, "auto", "switcher", decision["text"], decision)

    def _checked(self, wrong: str | None) -> None:
        if wrong is not None:
            self.detach(f"the free-block queue failed its self-check: {wrong}", "self-check")
        elif self._hooks is not None and self._check.under_way:
            self._hooks.due = 0.0

    def _fault(self, where: str, error: Exception) -> None:
        self._faults += 1
        logger.debug("wakman: fault in %s", where, exc_info=error)
        try:
            self.detach(f"a fault in {where} ({type(error).__name__}: {error})")
        except Exception:
            logger.debug("wakman: detaching failed", exc_info=True)

    def _undo(self) -> None:
        """Take out whatever is in, however far it came; the stock class comes back whatever else fails."""
        state, self._state = self._state, None
        queue = self._engine.queue
        try:
            if state is not None:
                free_queue.release(queue, state)
        except Exception:
            logger.debug("wakman: the queue was released the hard way", exc_info=True)
        finally:
            if type(queue) is not self._stock:
                queue.__class__ = self._stock
            if self._hooks is not None:
                self._hooks.remove()
            if self._check is not None:
                self._check.stop()
            self.close()
            self._hooks = None

    def _tell_policy(self, why: str) -> None:
        if self._recorder is not None:
            self._recorder.policy(time.monotonic(), self._policy, why)

    def _note(
        self,
        before: str,
        policy: str,
        cause: str,
        actor: str,
        why: str,
        took_s: float,
        decision: Mapping[str, Any] | None,
    ) -> None:
        entry: dict[str, Any] = {
            "at": time.time(),
            "from": before,
            "to": policy,
            "cause": cause,
            "actor": actor,
            "why": why,
            "took_s": took_s,
            "window_s": None if decision is None else decision.get("window_s"),
            "rates": None if decision is None else decision.get("rates"),
            "decision": decision,
        }
        self._history.append(entry)
        self._tell("switch", entry)

    def _tell(self, event: str, told: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            try:
                listener(event, told)
            except Exception:
                logger.debug("wakman: a listener failed", exc_info=True)

    def _support(self) -> str:
        level = support(self._engine.version)
        return "forced" if level == "none" else level


def _close(part: Any) -> None:
    if part is not None:
        try:
            part.close()
        except Exception:
            logger.debug("wakman: %r did not close", part, exc_info=True)
