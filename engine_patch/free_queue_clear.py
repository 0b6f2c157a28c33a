"""Takes the hashes of evicted blocks out of the pool's map at once, where vLLM would do it block by block.

1. vLLM calls some seven functions for each block that it has taken from the queue, to drop what the map of hashes knows
   of it. A block without a hash is done with after three. So one that comes out of the queue without its hash is
   nothing new to vLLM (`evict_blocks` makes such), and cheaper to take.
2. Done for what is plain: one content, in this one block. Contents with copies, and everything while events, block
   metrics or partly filled blocks are in use, are left to vLLM.
3. Only where vLLM's functions are word for word those that were read (0.27 to 0.32, `KNOWN`). Others, and a pool that
   somebody patched, get their blocks as they are: slower, and right.
"""

import hashlib
import inspect
from typing import Any

from engine_patch.free_queue_state import Block

# Function -> the first digits of the SHA-256 of its source, as it stands in vLLM.
KNOWN = {
    "get_new_blocks": {"ea37a4877e4f8296", "6888cbb60aa07f07", "ab54592edae48a7c"},
    "_maybe_evict_cached_block": {"84aa55d24b100ea0", "9d7fec709e2b25d9"},
    "_remove_cached_block_hashes": {"6fa2ab7286e56f01"},
    "reset_hash": {"0dc260d67ce17351"},
    "pop": {"37b8bdebf61a5076", "ca7b5985228ea547"},
}


def can_clear(pool: Any) -> bool:
    """Return whether what vLLM does with a block that it took from the queue is what was read. Reads vLLM's source."""
    try:
        return all(source_digest(_function(pool, name)) in digests for name, digests in KNOWN.items())
    except Exception:
        # No source, or no such function: not what was read.
        return False


def source_digest(function: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a function's source. OSError without a source."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def _function(pool: Any, name: str) -> Any:
    """Return the function that runs when the pool, a block of it, or its map of hashes is told `name`."""
    owner = {"reset_hash": pool.blocks[0], "pop": pool.cached_block_hash_to_block}.get(name, pool)
    return getattr(owner, name).__func__


def clear_hashes(pool: Any, blocks: list[Block]) -> None:
    """Drop the hashes of blocks that were just taken out of the queue; 0.2 to 0.3 µs a block, and vLLM saves more."""
    if pool.enable_kv_cache_events or pool.metrics_collector or pool.cached_block_hashes_by_block:
        return
    cache = pool.cached_block_hash_to_block._cache
    take = cache.pop
    for block in blocks:
        content = block._block_hash
        if content is not None:
            found = take(content, None)
            if found is block:
                block._block_hash = block._block_hash_num_tokens = None
            elif found is not None:
                cache[content] = found
