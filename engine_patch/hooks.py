"""Wraps methods of one engine's scheduler, KV cache manager and block pool; never a class, and never a copy of theirs.

1. A hook is an attribute on the instance that calls the stock method with the very arguments, before or after its own
   body. Other engines and other pools in the process (a CPU tier has one) keep their stock methods.
2. Hits are counted where a request is admitted (`allocate_new_computed_blocks`), in use or free, once a request: a
   look-up is repeated until there is room, and a pool's `touch` also serves pins. A request resumed after a preemption
   hits its own blocks, which says nothing: it is not counted.
3. What the shadow is told: the admission with the hit tokens that vLLM counts (`record_prefix_cache_stats`; before 0.27
   the step's list of new and resumed requests), each give-back of blocks, at the end or at a preemption, with the
   hashes that the blocks really have (`free`; an abort in mid-prefill has fewer than its prompt), and a reset of the
   cache that succeeded. Two kinds hold blocks but are not counted, as vLLM leaves them out of its own figures: resumed
   requests, and those that read no cache (prompt logprobs). A request that ends while it waits holds nothing.
4. `schedule` looks at the clock, about 0.3 µs a step; what is due runs before the step, on the engine's own thread.
5. A body that raises never reaches the engine: the fault is reported once, which takes all hooks out of work. The stock
   method runs whatever happened to the body, and its own exceptions pass unchanged.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine_patch import free_queue
from engine_patch.guards import Engine

Body = Callable[..., None]


class Recorder(Protocol):
    """Who is told of admissions, of blocks given back, and of resets; times are monotonic seconds."""

    def admitted(
        self,
        t: float,
        request_id: str,
        hashes: Sequence[bytes],
        num_prompt_tokens: int,
        hit_tokens: int | None,
        block_size: int,
        *,
        counted: bool,
        free_blocks: int,
    ) -> None: ...

    def freed(
        self, t: float, request_id: str, hashes: Sequence[bytes], num_blocks: int, *, free_blocks: int
    ) -> None: ...

    def reset(self, t: float) -> None: ...


class Hooks:
    """All hooks of one engine. `poll` is called once `due` (monotonic seconds) has come; `fault` with what failed."""

    def __init__(
        self,
        engine: Engine,
        state: free_queue.LinkedState,
        recorder: Recorder | None,
        poll: Callable[[float], None],
        close: Callable[[], None],
        fault: Callable[[str, Exception], None],
    ) -> None:
        self.due = 0.0
        self.live = False
        self._engine = engine
        self._state = state
        self._recorder = recorder
        self._poll = poll
        self._close = close
        self._fault = fault
        self._installed: list[tuple[Any, str, Callable[..., Any]]] = []

    def install(self) -> None:
        """Put every hook in place. Raises when a method is missing; `remove` then takes out those that are in."""
        engine = self._engine
        self._before(engine.coordinator, "allocate_new_computed_blocks", self._hit)
        self._caching(engine.pool, "cache_full_blocks")
        self._after(engine.pool, "reset_prefix_cache", self._reset)
        if self._recorder is not None:
            self._record(self._recorder)
        if hasattr(engine.scheduler, "shutdown"):
            self._before(engine.scheduler, "shutdown", self._shutdown)
        self._clock(engine.scheduler, "schedule")
        self.live = True

    def _record(self, recorder: Recorder) -> None:
        manager, group = self._engine.manager, self._engine.coordinator.single_type_managers[0]
        block_size: int = group.block_size

        def admitted(request: Any, hit_tokens: int | None) -> None:
            first = request.num_preemptions == 0
            tokens = request.num_prompt_tokens if first else request.num_tokens
            recorder.admitted(
                time.monotonic(),
                request.request_id,
                request.block_hashes[: tokens // block_size],
                tokens,
                hit_tokens,
                block_size,
                counted=first and not getattr(request, "skip_reading_prefix_cache", False),
                free_blocks=self._engine.queue.num_free_blocks,
            )

        def recorded(_: None, request: Any, num_hits: int, *__: Any, **___: Any) -> None:
            admitted(request, num_hits)

        def scheduled(output: Any, *_: Any, **__: Any) -> None:
            requests = self._engine.scheduler.requests
            for new in output.scheduled_new_reqs:
                if (request := requests.get(new.req_id)) is not None:
                    admitted(request, new.num_computed_tokens)
            for request_id in getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()):
                if (request := requests.get(request_id)) is not None:
                    # Some may be its own from before; how many this version does not say.
                    admitted(request, None)

        def freed(request: Any, *_: Any, **__: Any) -> None:
            request_id = request.request_id
            if blocks := group.req_to_blocks.get(request_id):
                hashed = group.num_cached_block.get(request_id, 0)
                recorder.freed(
                    time.monotonic(),
                    request_id,
                    request.block_hashes[:hashed],
                    len(blocks),
                    free_blocks=self._engine.queue.num_free_blocks,
                )

        self._before(manager, "free", freed)
        if hasattr(manager, "record_prefix_cache_stats"):
            self._after(manager, "record_prefix_cache_stats", recorded)
        else:
            self._after(self._engine.scheduler, "schedule", scheduled)

    def remove(self) -> None:
        """Give every instance its stock method back; a hook under somebody else's wrapper stays, out of work."""
        self.live = False
        for owner, name, hook in reversed(self._installed):
            if vars(owner).get(name) is not hook:
                continue
            below = hook.__dict__["below"]
            if below is None:
                delattr(owner, name)
            else:
                setattr(owner, name, below)
        self._installed.clear()

    def _before(self, owner: Any, name: str, body: Body) -> None:
        stock = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.live:
                try:
                    body(*args, **kwargs)
                except Exception as error:
                    self._failed(name, error)
            return stock(*args, **kwargs)

        self._put(owner, name, hook)

    def _after(self, owner: Any, name: str, body: Body) -> None:
        stock = getattr(owner, name)

        def hook(*args: Any, **kwargs: Any) -> Any:
            result = stock(*args, **kwargs)
            if self.live:
                try:
                    body(result, *args, **kwargs)
                except Exception as error:
                    self._failed(name, error)
            return result

        self._put(owner, name, hook)

    def _clock(self, owner: Any, name: str) -> None:
        stock = getattr(owner, name)
        monotonic = time.monotonic

        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.live and (now := monotonic()) >= self.due:
                try:
                    self._poll(now)
                except Exception as error:
                    self._failed("poll", error)
            return stock(*args, **kwargs)

        self._put(owner, name, hook)

    def _caching(self, pool: Any, name: str) -> None:
        stock = getattr(pool, name)

        def hook(
            request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
        ) -> Any:
            # Looked up each time: a reset of the prefix cache makes another map.
            before = len(pool.cached_block_hash_to_block)
            result = stock(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
            if self.live and num_cached_blocks < num_full_blocks:
                try:
                    grown = len(pool.cached_block_hash_to_block) - before
                    free_queue.cached(self._state, blocks, num_cached_blocks, num_full_blocks, grown)
                except Exception as error:
                    self._failed(name, error)
            return result

        self._put(pool, name, hook)

    def _put(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        hook.__dict__["below"] = vars(owner).get(name)
        setattr(owner, name, hook)
        self._installed.append((owner, name, hook))

    def _failed(self, name: str, error: Exception) -> None:
        self.live = False
        self._fault(name, error)

    def _hit(self, request_id: str, new_computed_blocks: Sequence[Sequence[Any]], *_: Any, **__: Any) -> None:
        blocks = new_computed_blocks[0]
        if not blocks:
            return
        request = self._engine.scheduler.requests.get(request_id)
        if request is None or request.num_preemptions == 0:
            free_queue.hit(self._state, blocks)

    def _reset(self, done: bool, *_: Any, **__: Any) -> None:
        if done:
            free_queue.reset(self._state)
            if self._recorder is not None:
                self._recorder.reset(time.monotonic())

    def _shutdown(self, *_: Any, **__: Any) -> None:
        self._close()
