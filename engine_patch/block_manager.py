"""Drives vLLM's own KVCacheManager without a model: what it would find, write and free for requests known by hashes.

1. A request is its block hashes, its prompt tokens and its tokens in all; no tokens, no scheduler, no GPU.
2. Start, as the scheduler does it: look up, allocate the prompt in one step, record the statistics. When the prompt
   does not fit nothing changes.
3. End: the blocks of the output are allocated and cached, then all are freed, tail first. Where the output does not fit
   (vLLM would have preempted somebody by then) its blocks are left out, and counted.
4. The free-block queue is adopted by our policies the way that the engine's is: hits are counted where they are
   allocated, parents where blocks are cached. `policy="stock"` leaves vLLM's own queue untouched.

Runs in an environment that holds vLLM (0.27 to 0.32 known), 2 to 5 µs a block. Nothing here is used inside an engine.
"""

from collections.abc import Sequence
from typing import Any

BLOCK_TOKENS = 16
_NO_LIMIT = 1 << 24
_CACHE_FULL_BLOCKS = ("request", "blocks", "num_cached_blocks", "num_full_blocks")


class _Request:
    """The fields of vLLM's Request that its block manager reads."""

    def __init__(self, request_id: str, hashes: list[bytes], prompt_tokens: int) -> None:
        self.request_id = request_id
        self.block_hashes = hashes
        self.num_tokens = self.num_prompt_tokens = prompt_tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.num_in_flight_tokens = 0
        self.shared_prefix_boundary = 0
        self.skip_reading_prefix_cache = False
        self.status = None
        self.kv_cache_report_mode = "incremental"
        self.lora_request = None
        self.cache_salt = None


class VllmBlocks:
    """The KV blocks of one engine, by vLLM's own code; vLLM's null block comes on top of `num_blocks`."""

    def __init__(self, num_blocks: int, policy: str = "stock", block_tokens: int = BLOCK_TOKENS) -> None:
        """Build the manager; ImportError without vLLM, ValueError for a policy that is not there."""
        self._manager = _kv_cache_manager(num_blocks + 1, block_tokens)
        self._pool = self._manager.block_pool
        self._running: dict[str, _Request] = {}
        self.num_blocks = num_blocks
        self.outputs_left_out = 0
        self._adopted: _Adopted | None = None
        if policy != "stock":
            self._adopted = _Adopted(self._manager)
            self._adopted.switch(policy)

    @property
    def num_free(self) -> int:
        """How many blocks are in no request."""
        return int(self._pool.free_block_queue.num_free_blocks)

    @staticmethod
    def hashes(blocks: bytes) -> list[bytes]:
        """Return 8-byte ids, written one after another, as the hashes that `start` and `finish` take."""
        return [blocks[at : at + 8] for at in range(0, len(blocks), 8)]

    def start(self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int) -> int | None:
        """Take in a request; return how many prompt tokens were read from the cache, None when it does not fit.

        hashes: of the prompt's full blocks.
        """
        request = _Request(request_id, list(hashes), prompt_tokens)
        computed = self._manager.get_computed_blocks(request)
        found, hit_tokens = computed[0], computed[1]
        got = self._manager.allocate_slots(
            request, prompt_tokens - hit_tokens, hit_tokens, found, full_sequence_must_fit=True
        )
        if got is None:
            return None
        self._manager.record_prefix_cache_stats(request, hit_tokens)
        request.num_computed_tokens = prompt_tokens
        self._running[request_id] = request
        return int(hit_tokens)

    def finish(self, request_id: str, hashes: Sequence[bytes], tokens: int) -> None:
        """End a request of `tokens` in all, output included; hashes: of all its full blocks."""
        request = self._running.pop(request_id)
        made = tokens - request.num_tokens
        request.block_hashes = list(hashes)
        request.num_tokens = tokens
        if made > 0 and self._manager.allocate_slots(request, made) is None:
            self.outputs_left_out += 1
        self._manager.free(request)

    def switch(self, policy: str) -> None:
        """Make another policy the live one; nothing that is cached is lost."""
        assert self._adopted is not None, "a stock queue cannot be switched"
        self._adopted.switch(policy)

    def check(self) -> str | None:
        """Return what is wrong with the adopted queue; None when nothing is. O(num_blocks)."""
        return self._adopted.check() if self._adopted is not None else None


class _Adopted:
    """Our linked queue in the place of vLLM's, with the three calls that an attached engine makes."""

    def __init__(self, manager: Any) -> None:
        from engine_patch import free_queue

        self._code = free_queue
        self._pool = manager.block_pool
        self._queue = self._pool.free_block_queue
        self._state = free_queue.adopt(self._queue, self._pool)
        coordinator, state = manager.coordinator, self._state
        taken, cached = coordinator.allocate_new_computed_blocks, self._pool.cache_full_blocks

        def allocate_new_computed_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks = kwargs["new_computed_blocks"] if "new_computed_blocks" in kwargs else args[1]
            free_queue.hit(state, blocks[0])
            return taken(*args, **kwargs)

        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:
            contents = self._pool.cached_block_hash_to_block  # another one after a reset
            before = len(contents)
            done = cached(*args, **kwargs)
            given = dict(zip(_CACHE_FULL_BLOCKS, args, strict=False)) | kwargs
            first, until = given["num_cached_blocks"], given["num_full_blocks"]
            if first < until:
                free_queue.cached(state, given["blocks"], first, until, len(contents) - before)
            return done

        coordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
        self._pool.cache_full_blocks = cache_full_blocks

    def switch(self, policy: str) -> None:
        self._code.switch(self._queue, self._state, policy)

    def check(self) -> str | None:
        return self._code.check(self._queue, self._state, self._pool)


def _kv_cache_manager(num_blocks: int, block_tokens: int) -> Any:
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    return KVCacheManager(
        config,
        max_model_len=_NO_LIMIT,
        scheduler_block_size=block_tokens,
        hash_block_size=block_tokens,
        enable_caching=True,
        log_stats=True,
    )
