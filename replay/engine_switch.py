"""The eviction switcher of a simulated engine: the policies, estimator, orders and answers of the engine patch itself.

1. It stands where an `Attachment` (engine_patch.attachment) stands in a real vLLM: same status, history and orders, and
   the same code answers HTTP and writes metrics from them. What is simulated is the engine alone.
2. Mode `auto` obeys the estimator's decisions, between two steps; any other mode holds that policy, and decisions are
   only shown. `off` ends it all: LRU, nothing follows the engine any more.
3. The estimator follows the same events as a real engine's, in VIRTUAL seconds, and runs in this process: here it can
   hold up nobody's GPU. It begins when the mode first becomes `auto`: an engine that is told its policy pays nothing.
   Blocks that requests hold at that moment become known as they are freed. Events wait up to a second for it: were it
   fed where they happen, its cost would stand in each request's time to first token, `speed` times over.
4. Durations are virtual seconds; what people read (`since`, history) is the wall clock. Equal requests at equal virtual
   times give equal switches.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from engine_patch import control
from engine_patch.estimator import Estimator
from engine_patch.events import Hashes, pack
from engine_patch.settings import AUTO, OFF, EngineSettings, known_policies
from replay.block_cache import BlockCache
from replay.engine_request import RequestState

VERSION = "0.32.0+cacheroute.sim"
HISTORY = 256
POLL_S = 1.0
IDLE = "not begun: the mode has not been auto yet"


class EngineSwitch:
    """One engine's switcher; a `Follower` of its model. Every method runs on the engine's own thread."""

    engine = 0

    def __init__(self, cache: BlockCache, settings: EngineSettings) -> None:
        """Begin in mode `settings.policy`: a policy, which `cache` runs already, or `auto`, with LRU."""
        self.settings = settings
        self.attached = True
        self.listeners: list[Callable[[str, Mapping[str, Any]], None]] = []
        self._cache = cache
        self._estimator: Estimator | None = None
        self._events: list[Callable[[Estimator], None]] = []
        self._mode = settings.policy
        self._reason = ""
        self._since = self._mode_since = time.time()
        self._now_s = self._due_s = 0.0
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._switches = 0
        self._last_decision: dict[str, Any] | None = None
        self.control: Any = control.Control(self)
        self.control.start()
        if self._mode == AUTO:
            self._follow(fresh=True)

    def status(self) -> dict[str, Any]:
        """Return what an attachment's status says; `shadow` is this process's own estimator."""
        decided = self._last_decision or {}
        return {
            "attached": self.attached,
            "reason": self._reason,
            "policy": self._cache.policy if self.attached else None,
            "mode": self._mode,
            "since": self._since,
            "mode_since": self._mode_since,
            "policies": list(self.settings.policies),
            "preset": self.settings.preset,
            "num_blocks": self._cache.num_blocks,
            "free_blocks": self._cache.num_free,
            "block_size": self._cache.block_size,
            "switches": self._switches,
            "last_decision": self._last_decision,
            "residual": decided.get("residual"),
            "drops": 0,
            "shadow": {
                "up": self._estimator is not None,
                "reason": "" if self._estimator is not None else self._reason or IDLE,
                "pid": os.getpid(),
                "drops": 0,
            },
            "self_checks": 0,
            "self_check_failures": 0,
            "faults": 0,
            "engine": self.engine,
            "pid": os.getpid(),
            "version": VERSION,
            "support": "simulated",
        }

    def history(self) -> list[dict[str, Any]]:
        """Return the last 256 changes of policy, oldest first."""
        return list(self._history)

    def set_mode(self, mode: str, actor: str, why: str, cause: str = "manual") -> dict[str, Any]:
        """Hold a policy, let the estimator decide (`auto`), or end it all (`off`); refused: {"ok": False, "error"}."""
        known = (AUTO, OFF, *known_policies())
        if mode not in known:
            return {"ok": False, "error": f"unknown policy {mode!r}; there are {', '.join(known)}"}
        if not self.attached:
            return {"ok": False, "error": f"not attached: {self._reason}"}
        before = self._cache.policy
        if mode == OFF:
            self._end(cause, actor, f"switched off by {actor}: {why}")
        elif mode not in (AUTO, before):
            self._switch(mode, cause, actor, why)
        if mode == AUTO and self._estimator is None:
            self._follow(fresh=not self._cache.num_cached)
        if mode != self._mode:
            self._mode, self._mode_since = mode, time.time()
        return {"ok": True, "error": None, "from": before, "to": self._cache.policy, "mode": self._mode}

    def poll(self, now: float) -> None:
        """Do nothing: what is due is done before each step, by virtual time."""

    def answer(self, method: str, *arguments: str) -> dict[str, Any]:
        """Answer what a real engine's `EngineCore` answers to `wakman_status`, `_set_policy` or `_history`."""
        return control.answer(self, self.engine, method, *arguments)

    def admitted(self, now_s: float, state: RequestState, tokens: int, free_blocks: int) -> None:
        """Tell the estimator of a request that got its blocks."""
        if self._estimator is not None:
            request_id, hashes = state.request.request_id, self._hashes(state, tokens // self._cache.block_size)
            hit_tokens, counted = state.computed_before, not state.preemptions
            self._events.append(
                lambda to: to.admitted(
                    now_s, request_id, hashes, tokens, hit_tokens, free_blocks=free_blocks, counted=counted
                )
            )

    def freed(self, now_s: float, state: RequestState, hashed: int) -> None:
        """Tell the estimator of blocks that were given back."""
        if self._estimator is not None:
            request_id, hashes, count = state.request.request_id, self._hashes(state, hashed), len(state.blocks)
            self._events.append(lambda to: to.freed(now_s, request_id, hashes, count))

    def reset(self, now_s: float) -> None:
        """Tell the estimator that nothing can be hit any more."""
        if self._estimator is not None:
            self._events.append(lambda to: to.reset(now_s))

    def before_step(self, now_s: float) -> None:
        """Take a decision that is due, and obey it in mode `auto`."""
        self._now_s = now_s
        if self._estimator is None or now_s < self._due_s:
            return
        self._due_s = now_s + POLL_S
        self._feed()
        decision = self._estimator.decide(now_s)
        if decision is None:
            return
        told = self._last_decision = decision.as_dict()
        self._tell("decision", told)
        if self._mode == AUTO and decision.switch:
            self._switch(decision.policy, "auto", "switcher", decision.text, told)

    def _feed(self) -> None:
        assert self._estimator is not None
        for event in self._events:
            event(self._estimator)
        self._events.clear()

    def _hashes(self, state: RequestState, count: int) -> Hashes:
        return pack(cast("Sequence[bytes]", state.request.hashes[:count]))

    def _follow(self, *, fresh: bool) -> None:
        """Begin to estimate. fresh: the pool is empty, as the estimator's shadows are."""
        s = self.settings
        options: dict[str, Any] = {"live": self._cache.policy}
        if s.preset == "default":
            options |= {"fresh": fresh, "margin": s.margin, "dwell_s": s.dwell_s, "residual": s.residual}
            options["sample"] = s.sample or 1.0
        if s.interval_s:
            options["interval_s"] = s.interval_s
        self._estimator = Estimator(s.preset, s.policies, self._cache.num_blocks, self._cache.block_size, **options)

    def _end(self, cause: str, actor: str, why: str) -> None:
        self._switch("lru", cause, actor, why)
        self._estimator = None
        self._events.clear()
        self.attached, self._reason = False, why

    def _switch(self, policy: str, cause: str, actor: str, why: str, decision: Mapping[str, Any] | None = None) -> None:
        before = self._cache.policy
        started = time.perf_counter()
        self._cache.switch(policy)
        took_s = time.perf_counter() - started
        self._since = time.time()
        self._switches += 1
        if self._estimator is not None:
            self._feed()
            self._estimator.policy(self._now_s, policy, why)
        entry = {
            "at": self._since,
            "from": before,
            "to": policy,
            "cause": cause,
            "actor": actor,
            "why": why,
            "took_s": took_s,
            "window_s": None if decision is None else decision["window_s"],
            "rates": None if decision is None else decision["rates"],
            "decision": decision,
        }
        self._history.append(entry)
        self._tell("switch", entry)

    def _tell(self, event: str, told: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(event, told)
