"""Serves a trace on one simulated engine whose KV blocks are real: what an eviction policy, or WAKMan, would hit.

1. First come, first served. A request starts when the one before it has been prefilled and its prompt fits into the
   blocks that are free; until then requests end and free theirs.
2. Prefill takes (prompt - hit) / `PREFILL_TOKENS_S`, one request at a time; then each output token takes `TPOT_S`, with
   no limit to how many are made side by side. Prompt blocks can be hit once the request has started, output blocks once
   it has ended. Nobody is preempted.
3. The hit rate is vLLM's own: prompt tokens that were read from the cache, of all prompt tokens.
4. With a `Decider` the policy is switched on the live: it is told of each start and each end as an attached engine
   would tell it, and asked at each start.

A prompt that is larger than all blocks is refused, and counted in neither. The block code (`Blocks`) is vLLM's own
(`engine_patch.block_manager`) or ours (`OwnBlocks`).
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from replay.mixes import BLOCK_TOKENS, Request

PREFILL_TOKENS_S = 20_000.0
TPOT_S = 0.02


class Blocks(Protocol):
    """The KV blocks of one engine; a request is known by its id and its block hashes."""

    num_blocks: int
    outputs_left_out: int

    @property
    def num_free(self) -> int:
        """How many blocks are in no request."""

    @staticmethod
    def hashes(blocks: bytes) -> list[Any]:
        """Return 8-byte ids, written one after another, as hashes of its kind."""

    def start(self, request_id: str, hashes: Sequence[Any], prompt_tokens: int) -> int | None:
        """Return the hit tokens, or None when the prompt does not fit now."""

    def finish(self, request_id: str, hashes: Sequence[Any], tokens: int) -> None:
        """Cache the output and free all."""

    def switch(self, policy: str) -> None:
        """Make another policy the live one."""


class Decider(Protocol):
    """What picks the policy; times are seconds of the trace."""

    def started(self, at_s: float, number: int, request: Request, hit_tokens: int, free_blocks: int) -> str | None:
        """Tell of a start; the policy to switch to, or None."""

    def ended(self, at_s: float, number: int, request: Request) -> None:
        """Tell of an end."""


@dataclass(slots=True)
class Served:
    """What came of it. Tokens are prompt tokens; `switches` are (second, policy)."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    refused: int = 0
    outputs_left_out: int = 0
    waited_s: float = 0.0
    free_sum: int = 0
    started: int = 0
    switches: list[tuple[float, str]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens read from the cache, of all; 0 when there were none."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_free(self) -> float:
        """How many blocks were free at a start, on average."""
        return self.free_sum / self.started if self.started else 0.0


def serve(
    trace: Sequence[Request],
    hashes: Sequence[Sequence[Any]],
    blocks: Blocks,
    decider: Decider | None = None,
    told: Callable[[float, int, int], None] | None = None,
) -> Served:
    """Serve all requests; `hashes` are those of each request's full blocks, as `blocks.hashes` makes them.

    told: called at each start with its time, the request's number and its hit tokens. About 1 to 5 µs a block.
    """
    served = Served()
    running: list[tuple[float, int]] = []
    free_from_s = 0.0

    def end() -> float:
        at_s, number = heapq.heappop(running)
        request = trace[number]
        blocks.finish(str(number), hashes[number][: request.cached_blocks], request.computed_tokens)
        if decider is not None:
            decider.ended(at_s, number, request)
        return at_s

    for number, request in enumerate(trace):
        now_s = max(request.at_s, free_from_s)
        while running and running[0][0] <= now_s:
            end()
        prompt = hashes[number][: request.prompt_blocks]
        hit_tokens = blocks.start(str(number), prompt, request.prompt_tokens)
        while hit_tokens is None and running:
            now_s = max(now_s, end())
            hit_tokens = blocks.start(str(number), prompt, request.prompt_tokens)
        if hit_tokens is None:
            served.refused += 1
            continue
        free = blocks.num_free
        served.started += 1
        served.free_sum += free
        served.prompt_tokens += request.prompt_tokens
        served.hit_tokens += hit_tokens
        served.waited_s += now_s - request.at_s
        free_from_s = now_s + (request.prompt_tokens - hit_tokens) / PREFILL_TOKENS_S
        heapq.heappush(running, (free_from_s + request.output_tokens * TPOT_S, number))
        if told is not None:
            told(now_s, number, hit_tokens)
        if decider is not None:
            chosen = decider.started(now_s, number, request, hit_tokens, free)
            if chosen is not None:
                blocks.switch(chosen)
                served.switches.append((now_s, chosen))
    while running:
        end()
    served.outputs_left_out = blocks.outputs_left_out
    return served


class OwnBlocks:
    """The KV blocks of one engine, by `replay.block_cache`; where there is no vLLM, and faster."""

    def __init__(self, num_blocks: int, policy: str = "lru", block_tokens: int = BLOCK_TOKENS) -> None:
        """`policy` as in `engine_patch.policy`; ValueError when there is none of that name."""
        from replay.block_cache import BlockCache

        self._cache = BlockCache(num_blocks, block_tokens, policy)
        self._running: dict[str, tuple[list[int], int]] = {}
        self._block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.outputs_left_out = 0

    @property
    def num_free(self) -> int:
        """How many blocks are in no request."""
        return self._cache.num_free

    @staticmethod
    def hashes(blocks: bytes) -> list[int]:
        """Return 8-byte ids, written one after another, as integers."""
        import numpy as np

        found: list[int] = np.frombuffer(blocks, dtype=np.uint64).tolist()
        return found

    def start(self, request_id: str, hashes: Sequence[Hashable], prompt_tokens: int) -> int | None:
        """Return the hit tokens, or None when the prompt does not fit now."""
        cache = self._cache
        hits = cache.lookup(hashes, prompt_tokens)
        new = -(-prompt_tokens // self._block_tokens) - len(hits)
        if not cache.fits(hits, new):
            return None
        cache.pin(hits)
        made = cache.allocate(new)
        assert made is not None, "the blocks that fit are not there"
        blocks = hits + made
        cache.commit(blocks, hashes, len(hits), len(hashes))
        self._running[request_id] = (blocks, len(hashes))
        return len(hits) * self._block_tokens

    def finish(self, request_id: str, hashes: Sequence[Hashable], tokens: int) -> None:
        """Cache the output and free all; output blocks that do not fit are left out."""
        cache = self._cache
        blocks, committed = self._running.pop(request_id)
        full = len(hashes)
        made = cache.allocate(-(-tokens // self._block_tokens) - len(blocks))
        if made is None:
            self.outputs_left_out += 1
            full = min(full, len(blocks))
        else:
            blocks += made
        cache.commit(blocks, hashes, committed, full)
        cache.release(blocks)

    def switch(self, policy: str) -> None:
        """Make another policy the live one."""
        self._cache.switch(policy)
