"""What a linked free-block queue remembers beside its list: a byte a block, two pointers, the chains, the ghosts.

1. The list stays vLLM's own: head <-> [front | small] <-> [main] <-> tail, every free block in it and nothing else, so
   vLLM's walkers see near-eviction order. ARC's T1 is small here, its T2 main. `front_last` is the last block of the
   front (the list's fake head when there is none), `main_first` the first of main (the fake tail when there is none).
   Blocks have slots, so what is known of a block stands in arrays indexed by block id.
2. The front, evicted before all others: blocks without a hash, then orphans and copies (chains.py). A copy is a block
   freed while an older one holds the same content: only the oldest is ever hit. The oldest is treated as if alone.
3. Chains are by content: `child[b]` is the hash of what follows b's content, `more[b]` the hashes where several do.
   They are made when blocks get their hashes (`hashed`) and looked up in the pool's own map when a parent is evicted,
   so a stale link finds nothing, and a copy or a recomputed child is found like the first. Siblings are orphaned in the
   order of their hashes (the keyed queues': in that of their links), which is the one difference between the two.
4. Whatever a block was evicted from, its content lives on while a copy is free or in use; the copy inherits the links
   and nothing is remembered in a ghost.
5. A hash may vanish while its block is free (`evict_blocks`): the block is evicted in its place, first of all when it
   stands at the head; it leaves no ghost and no orphans, since its content is not known any more.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from engine_patch.ghost import Ghost

# A block's byte: counted hits 0 … 3, and flags.
FREQ = 3
MAIN = 4  # belongs to main, free or in use
FRONT = 8  # free, in the front
COPY = 16  # its content was in several blocks when last looked at
BRANCH = 32  # several contents follow this one
LINKED = COPY | BRANCH
BUMP = tuple(m + 1 if m & FREQ != FREQ else m for m in range(64))  # one more hit
ANEW = bytes(m & LINKED for m in range(256))  # neither counts nor part
UNCOUNTED = bytes(m & ~FREQ for m in range(256))
PRUNE_AT = 16  # hashes of children of one block, before dead ones are looked for

Block = Any  # vLLM's KVCacheBlock
Queue = Any  # vLLM's FreeKVCacheBlockQueue, or our subclass


class LinkedState:
    """The side state of one pool's queue; about 16 bytes a block, and what the ghosts remember."""

    __slots__ = (
        "capacity",
        "child",
        "classes",
        "clears_hashes",
        "fault",
        "front_last",
        "ghost",
        "ghost_main",
        "limits",
        "main_first",
        "mark",
        "more",
        "num_blocks",
        "num_front",
        "num_main",
        "policy",
        "pool",
        "queue",
        "target",
    )

    def __init__(self, queue: Queue, pool: Any, classes: Mapping[str, type], *, clears_hashes: bool = False) -> None:
        self.queue = queue
        self.pool = pool
        self.classes = classes
        self.policy = "lru"
        self.fault: str | None = None
        self.clears_hashes = clears_hashes
        self.num_blocks: int = len(pool.blocks)
        self.capacity = self.num_blocks - 1  # without vLLM's null block
        # A list: CPython 3.11 has an instruction for an item of a list, and none for one of a bytearray.
        self.mark = [0] * self.num_blocks
        self.child: list[bytes | None] = [None] * self.num_blocks
        self.more: dict[int, set[bytes]] = {}
        self.limits: dict[int, int] = {}
        self.ghost: Ghost[bytes] = Ghost()
        self.ghost_main: Ghost[bytes] = Ghost()
        self.target = 0.0
        self.num_front = self.num_main = 0
        self.front_last: Block = queue.fake_free_list_head
        self.main_first: Block = queue.fake_free_list_tail

    def drop_ghosts(self) -> None:
        """Remember no evicted content any more."""
        self.ghost = Ghost()
        self.ghost_main = Ghost()
        self.target = 0.0

    def start_anew(self) -> None:
        """Make all blocks small, but the leading ones without a hash, which are the front."""
        queue = self.queue
        self._drop_stale()
        mark = self.mark
        mark[:] = bytes(mark).translate(ANEW)
        last, tail, count = queue.fake_free_list_head, queue.fake_free_list_tail, 0
        block = last.next_free_block
        while block is not tail and block._block_hash is None:
            mark[block.block_id] = FRONT
            count += 1
            last, block = block, block.next_free_block
        self.num_front, self.front_last = count, last
        self.num_main, self.main_first = 0, tail

    def drop_counts(self) -> None:
        """Forget all hits; who is in which part stays. O(n) bytes."""
        self.mark[:] = bytes(self.mark).translate(UNCOUNTED)

    def _drop_stale(self) -> None:
        """Forget what is kept of blocks that vLLM took while the policy was LRU, and that have no hash again yet."""
        mark, blocks = self.mark, self.pool.blocks
        for block_id in np.flatnonzero(np.frombuffer(bytes(mark), np.uint8) & LINKED).tolist():
            if blocks[block_id]._block_hash is None:
                mark[block_id] = 0
        self.more = {block_id: kids for block_id, kids in self.more.items() if mark[block_id] & BRANCH}
        self.limits = {block_id: self.limits[block_id] for block_id in self.more}

    def reset(self) -> None:
        """All hashes are gone: every free block is one that cannot be hit, in its place. O(n) bytes."""
        queue = self.queue
        self.mark[:] = [FRONT] * self.num_blocks
        self.child = [None] * self.num_blocks
        self.more, self.limits = {}, {}
        self.drop_ghosts()
        self.num_front = queue.num_free_blocks
        self.front_last = queue.fake_free_list_tail.prev_free_block
        self.num_main, self.main_first = 0, queue.fake_free_list_tail


def hashed(state: LinkedState, blocks: Sequence[Block], first: int, until: int, grown: int | None = None) -> None:
    """Learn that blocks first … until - 1 of a request got their hashes just now; blocks: all that it has, in order.

    grown: by how many contents the pool's map grew meanwhile, when known; it saves looking for copies. Under
    0.1 µs a block, 0.2 µs when copies must be looked for.
    """
    run = blocks[first:until]
    if not run:
        return
    mark, child = state.mark, state.child
    if first:
        _link(state, blocks[first - 1].block_id, run[0]._block_hash)
        if mark[blocks[first - 1].block_id] & COPY:
            copies = state.pool.cached_block_hash_to_block._cache.get(blocks[first - 1]._block_hash)
            if type(copies) is dict:
                _link(state, next(iter(copies)), run[0]._block_hash)
    block_id = run[0].block_id
    if state.policy == "lru":
        # vLLM's own queue does not clear the byte of a block that it gives away; ours do.
        mark[block_id] = 0
        for block in run[1:]:
            child[block_id] = block._block_hash
            block_id = block.block_id
            mark[block_id] = 0
    else:
        for block in run[1:]:
            child[block_id] = block._block_hash
            block_id = block.block_id
    child[block_id] = None
    if grown == len(run):
        return
    cache = state.pool.cached_block_hash_to_block._cache
    for at, block in enumerate(run):
        copies = cache.get(block._block_hash)
        if type(copies) is dict:
            # The older of three or more are marked already: a content may stand in thousands of blocks.
            for copy in copies.values() if len(copies) == 2 else (block,):
                mark[copy.block_id] |= COPY
            if block is not run[-1]:
                _link(state, next(iter(copies)), run[at + 1]._block_hash)


def _link(state: LinkedState, parent: int, content: bytes | None) -> None:
    """Add a content that follows that of block `parent`."""
    known = state.child[parent]
    if content is None or known == content:
        return
    cache = state.pool.cached_block_hash_to_block._cache
    if not state.mark[parent] & BRANCH:
        if known is None or known not in cache:
            state.child[parent] = content
            return
        state.mark[parent] |= BRANCH
        state.more[parent] = {known, content}
        state.limits[parent] = PRUNE_AT
        return
    kids = state.more[parent]
    kids.add(content)
    if len(kids) > state.limits[parent]:
        state.more[parent] = kids = {kid for kid in kids if kid in cache}
        state.limits[parent] = max(PRUNE_AT, 2 * len(kids))


def leave(state: LinkedState, block: Block, content: bytes) -> bool:
    """Take note that an unlinked block with a hash is evicted; return whether its content lives in no other block.

    If so, its free descendants become orphans. Clears the block's byte.
    """
    mark, cache = state.mark, state.pool.cached_block_hash_to_block._cache
    block_id = block.block_id
    kids = _kids(state, block_id)
    if mark[block_id] & BRANCH:
        del state.more[block_id], state.limits[block_id]
    mark[block_id] = 0
    copies = cache.get(content)
    if type(copies) is dict:
        # The newest first: it is the likeliest to live, and a content may stand in thousands of blocks.
        for copy in reversed(copies.values()):
            # A block evicted in this very call is still in the map, but neither linked nor in use.
            if copy is not block and (copy.ref_cnt or copy.next_free_block is not None):
                for kid in kids:
                    _link(state, copy.block_id, kid)
                return False
    if kids:
        _orphan(state, kids)
    return True


def _kids(state: LinkedState, block_id: int) -> Collection[bytes]:
    """Return the contents that follow a block's."""
    if state.mark[block_id] & BRANCH:
        return state.more[block_id]
    only = state.child[block_id]
    return () if only is None else (only,)


def _orphan(state: LinkedState, kids: Collection[bytes]) -> None:
    """Move the free descendants of a content that is gone to the front's end, in preorder."""
    mark, cache = state.mark, state.pool.cached_block_hash_to_block._cache
    ahead = [iter(sorted(kids))]
    while ahead:
        for kid in ahead[-1]:
            found = cache.get(kid)
            if found is None:
                continue
            own: set[bytes] = set()
            for block in found.values() if type(found) is dict else (found,):
                block_id = block.block_id
                if block.next_free_block is not None and not mark[block_id] & FRONT:
                    own.update(_kids(state, block_id))
                    _to_front(state, block)
            if own:
                ahead.append(iter(sorted(own)))
                break
        else:
            ahead.pop()


def _to_front(state: LinkedState, block: Block) -> None:
    """Move a free block of small or main to the front's end; counts and segment end."""
    before, after = block.prev_free_block, block.next_free_block
    if state.mark[block.block_id] & MAIN:
        state.num_main -= 1
        if block is state.main_first:
            state.main_first = after
    before.next_free_block = after
    after.prev_free_block = before
    add_to_front(state, block)


def add_to_front(state: LinkedState, block: Block) -> None:
    """Link an unlinked block at the front's end."""
    last = state.front_last
    after = last.next_free_block
    last.next_free_block = block
    block.prev_free_block = last
    block.next_free_block = after
    after.prev_free_block = block
    state.front_last = block
    state.num_front += 1
    state.mark[block.block_id] = state.mark[block.block_id] & LINKED | FRONT
