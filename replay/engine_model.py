"""One vLLM engine in virtual time: continuous batching over a real prefix cache, no clock, no I/O, deterministic.

1. An engine works in steps. A step is planned when it starts and lasts as long as the preset says (replay.presets);
   a request that comes meanwhile joins at the next boundary, one that comes to an idle engine starts a step by itself.
2. Decodes first: every decoding request computes one token. One that needs a block when none is free preempts the
   youngest running request (itself if it is that): its blocks are freed, it waits at the front and is computed anew.
3. Then prefill, first come first served, in chunks, until `max_batched_tokens` are in the step or `max_seqs` requests
   run. A request is admitted when all its blocks fit at that moment; it is given those of its chunk. None is admitted
   in a step that preempted. The prefix cache is asked at admission.
4. Blocks become hittable when the step that fills them is planned, so requests of one step share, as in vLLM.
5. At the end of a step each decoding request, and each whose prefill is complete, has one more token; a request ends
   after exactly `output_tokens`. The last token is never computed, hence is in no block.
6. Hits count for the eviction policy at a first admission only: who was preempted merely takes back what it had.
   A `follower` is told of admissions, freed blocks and resets, and is asked before each step.

Ours: an abort frees blocks at once, not at the step's end. Not modelled: tokenising, HTTP, speculative decoding, the
time that admission itself takes.
Cost: 1 µs a step of decodes plus 0.1 µs a decoding request (6 µs for 64); 1 µs a block of a new request.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush

from replay.block_cache import BlockCache
from replay.engine_request import EngineRequest, Follower, RequestState, StepClock
from replay.presets import Preset
from service.errors import InvalidInput


class EngineModel:
    """An engine; give it requests and times, in order of time.

    Counters since the start: `steps`, `queried_tokens` and `hit_tokens` (prompt tokens looked up and found at first
    admissions), `prompt_tokens` (of requests with a first token), `generation_tokens`, `preemptions`, `busy_s` (time
    in steps). Raises InvalidInput when no request could run.
    """

    def __init__(
        self,
        preset: Preset,
        kv_blocks: int | None = None,
        block_size: int = 16,
        max_batched_tokens: int = 8192,
        max_seqs: int = 1024,
        policy: str = "lru",
    ) -> None:
        if max_seqs < 1 or max_batched_tokens < max_seqs:
            raise InvalidInput(
                f"max_batched_tokens {max_batched_tokens} with max_seqs {max_seqs}",
                "each running request needs a token a step: raise the first or lower the second, to 1 at least",
            )
        if block_size < 1 or (kv_blocks is not None and kv_blocks < 1):
            raise InvalidInput(f"{kv_blocks} KV blocks of {block_size} tokens", "give at least 1 of each")
        self.preset = preset
        try:
            self.cache = BlockCache(preset.kv_blocks if kv_blocks is None else kv_blocks, block_size, policy)
        except ValueError as exc:
            raise InvalidInput(str(exc), "choose one of these") from exc
        self.follower: Follower | None = None
        self.max_batched_tokens = max_batched_tokens
        self.max_seqs = max_seqs
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.preemptions = 0
        self.busy_s = 0.0
        self._clock = StepClock()
        self._order = 0
        self._live: dict[str, RequestState] = {}
        self._waiting: deque[RequestState] = deque()
        self._running: dict[str, RequestState] = {}  # in order of admission
        # Decoding requests by the step, modulo block size, at which each needs its next block.
        self._slots: list[dict[str, RequestState]] = [{} for _ in range(block_size)]
        self._decoding = 0
        self._context = 0  # computed tokens of all decoding requests
        self._finishes: list[tuple[int, int, RequestState]] = []  # heap; entries of requests that left stay until met
        self._prefills: list[RequestState] = []  # those with a chunk in the step in progress
        self._now_s = 0.0  # up to when all has happened
        self._step_start_s = 0.0
        self._step_end_s: float | None = None
        # The first waiting request does not fit, and nothing that could change that has happened since: no block was
        # freed, no prompt computed, and no decode has filled the next block that it would hit.
        self._blocked = False
        self._wanted: Hashable | None = None
        self._changed: list[RequestState] = []

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        return self._clock.steps

    @property
    def capacity_tokens(self) -> int:
        """How many tokens fit into the KV cache."""
        return self.cache.num_blocks * self.cache.block_size

    @property
    def num_running(self) -> int:
        """How many requests hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """How many requests wait for admission, preempted ones included."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Which share of the blocks is in use, 0 to 1; cached free ones count as free."""
        return self.cache.num_pinned / self.cache.num_blocks

    def submit(self, request: EngineRequest, now_s: float) -> RequestState:
        """Queue a request; its state is kept up to date until it ends. InvalidInput when it can never run."""
        prompt, output, capacity = request.prompt_tokens, request.output_tokens, self.capacity_tokens
        what = f"request {request.request_id}: {prompt} prompt and {output} output tokens"
        if prompt < 1 or output < 1:
            raise InvalidInput(what, "both must be at least 1")
        if prompt + output - 1 > capacity:
            raise InvalidInput(
                f"{what} are more than the KV cache of {capacity} tokens", "shorten it or give the engine more blocks"
            )
        if request.request_id in self._live:
            raise InvalidInput(f"request {request.request_id} is in flight already", "give each request its own id")
        self._process(now_s)
        state = RequestState(request, now_s, self._order, self._clock)
        self._order += 1
        self._live[request.request_id] = state
        self._waiting.append(state)
        if self._step_end_s is None:
            self._plan(now_s)
        return state

    def abort(self, request_id: str, now_s: float) -> None:
        """Drop a request and free its blocks; nothing happens when it ended by `now_s` or is unknown."""
        self._process(now_s)
        state = self._live.pop(request_id, None)
        if state is None:
            return
        self._now_s = max(self._now_s, now_s)
        if state.status == "waiting":
            self._waiting.remove(state)
            self._blocked = False
        else:
            self._stop(state)
        state.status = "aborted"

    def advance(self, now_s: float) -> list[RequestState]:
        """Process all steps that end by `now_s`; return who got a first token or ended since the last call, in order.

        A request for which both happened stands in the list twice.
        """
        self._process(now_s)
        changed, self._changed = self._changed, []
        return changed

    def next_event_s(self) -> float | None:
        """Return when to call `advance` next if nothing is submitted: the next first token or end; None when idle.

        While prompts are computed this is the end of the step; in a stretch of decodes it is computed ahead, in O(1),
        and may turn out too early when somebody is preempted.
        """
        end_s = self._step_end_s
        if end_s is None or self._prefills or self._admissible():
            return end_s
        while self._finishes and self._finishes[0][2].finish_at != self._finishes[0][0]:
            heappop(self._finishes)
        if not self._finishes:
            return end_s
        more = self._finishes[0][0] - self._clock.steps - 1
        if not more:
            return end_s
        batch = self._decoding
        first_s = self._duration_s(batch, batch, self._context + batch, 0.0)
        return end_s + more * first_s + self.preset.kv_s * batch * (more * (more - 1) // 2)

    def reset_prefix_cache(self) -> int:
        """Make no block hittable; return how many contents were."""
        if self.follower is not None:
            self.follower.reset(self._now_s)
        return self.cache.reset()

    def _admissible(self) -> bool:
        return bool(self._waiting) and not self._blocked and len(self._running) < self.max_seqs

    def _process(self, now_s: float) -> None:
        while (end_s := self._step_end_s) is not None and end_s <= now_s:
            self._complete(end_s)
            self._plan(end_s)

    def _complete(self, end_s: float) -> None:
        """Give each request of the step its token."""
        self._now_s = end_s
        self.busy_s += end_s - self._step_start_s
        clock = self._clock
        clock.steps += 1
        self._context += self._decoding
        self.generation_tokens += self._decoding
        finishes = self._finishes
        while finishes and finishes[0][0] <= clock.steps:
            at, _, state = heappop(finishes)
            if state.finish_at == at:
                self._finish(state, end_s)
        for state in self._prefills:
            request = state.request
            if state.status != "running" or state.computed_before < request.prompt_tokens + state.generated_before:
                continue
            state.generated_before += 1
            self.generation_tokens += 1
            if state.first_token_s is None:
                state.first_token_s = end_s
                self.prompt_tokens += request.prompt_tokens
                self._changed.append(state)
            if state.generated_before == request.output_tokens:
                self._finish(state, end_s)
            else:
                self._start_decoding(state)

    def _start_decoding(self, state: RequestState) -> None:
        steps = self._clock.steps
        state.decode_from = steps
        state.finish_at = steps + state.request.output_tokens - state.generated_before
        state.slot = (steps - state.computed_before) % self.cache.block_size
        self._slots[state.slot][state.request.request_id] = state
        self._decoding += 1
        self._context += state.computed_before
        heappush(self._finishes, (state.finish_at, state.order, state))

    def _finish(self, state: RequestState, end_s: float) -> None:
        self._stop(state)
        del self._live[state.request.request_id]
        state.status = "finished"
        state.finished_s = end_s
        self._changed.append(state)

    def _stop(self, state: RequestState) -> None:
        """Take a running request out of the batch and free its blocks; what it has generated stays."""
        request_id = state.request.request_id
        if state.decode_from >= 0:
            del self._slots[state.slot][request_id]
            self._decoding -= 1
            self._context -= state.computed
            state.generated_before = state.generated
            state.decode_from = state.finish_at = -1
        if self.follower is not None:
            self.follower.freed(self._now_s, state, self.cache.num_hashed(state.blocks))
        state.computed_before = 0
        del self._running[request_id]
        self.cache.release(state.blocks)
        state.blocks = []
        self._blocked = False

    def _plan(self, start_s: float) -> None:
        """Fill the next step, or fall idle."""
        self._now_s = start_s
        if self.follower is not None:
            self.follower.before_step(start_s)
        if self.cache.watch is not None:
            self.cache.watch.now_s = start_s
        preempted = self._grow_decodes()
        batch = self._decoding
        tokens, pairs = batch, 0.0
        partial = self._prefills[-1] if self._prefills else None
        self._prefills = []
        if partial is not None and partial.status == "running" and partial.decode_from < 0:
            count = self._chunk(partial, self.max_batched_tokens - tokens)
            if count:
                tokens += count
                pairs += count * (partial.computed_before - count / 2)
            else:
                preempted = True
        while not preempted and tokens < self.max_batched_tokens and self._admissible():
            state = self._waiting[0]
            if not self._admit(state, start_s):
                break
            count = self._chunk(state, self.max_batched_tokens - tokens)
            tokens += count
            pairs += count * (state.computed_before - count / 2)
        if not tokens:
            assert not self._waiting, "a request that fits in an empty cache waits on an idle engine"
            self._step_end_s = None
            return
        self._step_start_s = start_s
        self._step_end_s = start_s + self._duration_s(tokens, batch + len(self._prefills), self._context, pairs)

    def _duration_s(self, tokens: int, sequences: int, context: int, pairs: float) -> float:
        p = self.preset
        dense_s = max(p.floor_s, p.base_s + p.token_s * tokens)
        return dense_s + p.pair_s2 * pairs + p.kv_s * context + p.seq_s * sequences

    def _grow_decodes(self) -> bool:
        """Give each decoding request room for its next token; return whether somebody was preempted for it."""
        cache, steps = self.cache, self._clock.steps
        preempted = False
        growing = self._slots[steps % cache.block_size]
        for state in list(growing.values()) if growing else ():
            while state.decode_from >= 0:
                block = cache.allocate(1)
                if block is not None:
                    state.blocks += block
                    break
                self._preempt()
                preempted = True
        for state in self._slots[(steps + 1) % cache.block_size].values():
            index = state.computed // cache.block_size
            hashes = state.request.hashes
            cache.commit(state.blocks, hashes, index, index + 1)
            if self._blocked and index < len(hashes) and hashes[index] == self._wanted:
                self._blocked = False
        return preempted

    def _preempt(self) -> None:
        state = next(reversed(self._running.values()))
        self._stop(state)
        state.status = "waiting"
        state.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(state)

    def _admit(self, state: RequestState, start_s: float) -> bool:
        """Move the first waiting request to the running ones, with the blocks it hits, if all of it fits."""
        cache, request = self.cache, state.request
        length = request.prompt_tokens + state.generated_before
        hits = cache.lookup(request.hashes, length)
        if not cache.fits(hits, -(-length // cache.block_size) - len(hits)):
            self._blocked = True
            self._wanted = request.hashes[len(hits)] if len(hits) < len(request.hashes) else None
            return False
        cache.pin(hits, counted=not state.preemptions)
        self._waiting.popleft()
        self._running[request.request_id] = state
        state.status = "running"
        state.blocks = hits
        state.computed_before = len(hits) * cache.block_size
        if state.admitted_s is None:
            state.admitted_s = start_s
            state.cached_tokens = state.computed_before
            self.queried_tokens += request.prompt_tokens
            self.hit_tokens += state.computed_before
        if self.follower is not None:
            self.follower.admitted(start_s, state, length, cache.num_free)
        return True

    def _chunk(self, state: RequestState, budget: int) -> int:
        """Put up to `budget` tokens of a prefill into the step; return how many, 0 when it had to be preempted."""
        cache, request = self.cache, state.request
        count = min(request.prompt_tokens + state.generated_before - state.computed_before, budget)
        filled, until = state.computed_before // cache.block_size, state.computed_before + count
        blocks = cache.allocate(-(-until // cache.block_size) - len(state.blocks))
        if blocks is None:
            # A request in the middle of its prefill is always the youngest running one.
            self._preempt()
            return 0
        state.blocks += blocks
        cache.commit(state.blocks, request.hashes, filled, until // cache.block_size)
        state.computed_before = until
        self._prefills.append(state)
        self._blocked = False
        return count
