"""vLLM's free-block queue under another eviction policy, switched on the live without moving a block.

1. A policy is a subclass of vLLM's own queue class. To switch is to give the queue object another class over the list
   as it stands: `queue.__class__`. Under `lru` the subclass adds nothing, so what runs is vLLM's code.
2. What the policies know beside the list is a LinkedState (free_queue_state.py), reachable as `queue.wakman`.
3. A switch does what `policy.converted` says. From LRU: blocks without a hash at the head are the front, all others
   small (T1), which takes a few copies of an array and a step for each of the former. (A block that lost its hash
   further back is left there and evicted when it comes up.) Among the others the parts stay; between S3-FIFO and ARC
   counts are dropped. To LRU: nothing but the class. Ghosts are dropped always.
4. vLLM versions 0.14 to 0.32: a block's hash is `_block_hash`, the pool's map of hashes is
   `cached_block_hash_to_block._cache` (hash -> block, or {id: block} for copies, oldest first).

Called on the engine's own thread only, as everything that touches the queue.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from engine_patch.free_queue_arc import ArcSegments
from engine_patch.free_queue_check import Sweep, check
from engine_patch.free_queue_clear import can_clear
from engine_patch.free_queue_s3fifo import S3FifoSegments
from engine_patch.free_queue_segments import KNOWN_METHODS
from engine_patch.free_queue_state import BUMP, FREQ, Block, LinkedState, Queue, hashed
from engine_patch.policy import POLICIES, S3FIFO

__all__ = [
    "KNOWN_METHODS",
    "LinkedState",
    "Sweep",
    "adopt",
    "cached",
    "check",
    "hit",
    "queue_classes",
    "release",
    "reset",
    "switch",
]


def queue_classes(stock: type) -> Mapping[str, type]:
    """Return policy -> a subclass of vLLM's queue class; made once for each `stock`."""
    known = _CLASSES.get(stock)
    if known is None:
        known = {"lru": type("LruFreeBlockQueue", (stock,), {"__doc__": "vLLM's queue as it is."})}
        for policy in POLICIES:
            if policy in S3FIFO:
                percent, threshold = S3FIFO[policy]
                members = {
                    "__doc__": S3FifoSegments.__doc__,
                    "small_percent": percent,
                    "threshold": threshold,
                    "hit_enough": bytes(range(threshold, FREQ + 1)),
                }
                known[policy] = type("S3FifoFreeBlockQueue", (S3FifoSegments, stock), members)
            elif policy == "arc":
                known[policy] = type("ArcFreeBlockQueue", (ArcSegments, stock), {"__doc__": ArcSegments.__doc__})
        _CLASSES[stock] = known
    return known


_CLASSES: dict[type, dict[str, type]] = {}


def adopt(queue: Queue, pool: Any) -> LinkedState:
    """Make vLLM's queue an LRU one that can be switched; raises ValueError, and changes nothing, when it cannot be."""
    stock = type(queue)
    if any(stock in classes.values() for classes in _CLASSES.values()):
        raise ValueError("the free-block queue is switchable already")
    if not isinstance(getattr(pool.cached_block_hash_to_block, "_cache", None), dict):
        raise ValueError("the block pool's map of hashes is not the known one")
    if any(block.block_id != at for at, block in enumerate(pool.blocks)):
        raise ValueError("the block pool's blocks are not numbered from 0")
    classes = queue_classes(stock)
    state = LinkedState(queue, pool, classes, clears_hashes=can_clear(pool))
    # A dict of its own: CPython 3.11 reads attributes of an instance whose class was changed slowly otherwise.
    queue.__dict__ = {**queue.__dict__, "wakman": state}
    try:
        queue.__class__ = classes["lru"]
    except TypeError as error:
        del queue.wakman
        raise ValueError(f"the class of the free-block queue cannot be changed: {error}") from error
    return state


def release(queue: Queue, state: LinkedState) -> None:
    """Give the queue vLLM's own class back, whatever its state; the blocks stay in their order."""
    queue.__class__ = state.classes["lru"].__mro__[1]
    queue.__dict__.pop("wakman", None)


def switch(queue: Queue, state: LinkedState, policy: str) -> None:
    """Evict by another policy from now on; ValueError, and nothing changed, for a name that is none."""
    if policy not in state.classes:
        raise ValueError(f"no eviction policy is called {policy!r}; there are {', '.join(state.classes)}")
    if policy == state.policy:
        return
    if state.policy == "lru":
        state.start_anew()
    elif (state.policy == "arc") != (policy == "arc"):
        state.drop_counts()
    state.drop_ghosts()
    state.policy = policy
    queue.__class__ = state.classes[policy]


def hit(state: LinkedState, blocks: Sequence[Block]) -> None:
    """Count one request's hits, on free blocks before vLLM takes them out as on blocks in use; about 40 ns a block."""
    if state.policy == "lru":
        return
    mark = state.mark
    for block in blocks:
        block_id = block.block_id
        mark[block_id] = BUMP[mark[block_id]]


def cached(
    state: LinkedState, request_blocks: Sequence[Block], first: int, until: int, grown: int | None = None
) -> None:
    """Learn that blocks first … until - 1 of a request got their hashes; request_blocks: all it has, in prompt order.

    grown: by how many contents the pool's map grew in that call of vLLM's `cache_full_blocks`, where known: as many as
    blocks means that no copies were made, which saves a look-up a block.
    """
    hashed(state, request_blocks, first, until, grown)


def reset(state: LinkedState) -> None:
    """Learn that vLLM dropped all hashes (`reset_prefix_cache` succeeded)."""
    state.reset()
