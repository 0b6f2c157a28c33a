"""The part of a linked queue that S3-FIFO and ARC share: what is linked where, whoever calls.

1. Each method does what vLLM's does for its callers: the same blocks go in and out, `num_free_blocks` counts them, a
   block is linked exactly while it is free, the same misuse raises the same errors.
2. A policy decides first (`_choose`) and links afterwards; when it fails, nothing is half done: the queue becomes an
   LRU queue, serves the call as such, and `state.fault` says why.
3. Fewer than one block asked for gives none (vLLM's would count them as freed).
4. Evicted blocks leave without their hashes where that is what vLLM would do next (free_queue_clear.py).
"""

import re
from typing import Any

from engine_patch.free_queue_clear import clear_hashes
from engine_patch.free_queue_state import COPY, FREQ, FRONT, LINKED, MAIN, Block, LinkedState, add_to_front, leave

# The public methods of vLLM's queue that are known, 0.14 to 0.32; a later one might move blocks unseen by us.
KNOWN_METHODS = frozenset(
    {
        "append",
        "append_n",
        "get_all_free_blocks",
        "iter_blocks_after",
        "popleft",
        "popleft_n",
        "prepend_n",
        "remove",
    }
)

NOTHING = b"\0"  # the byte of a block of which nothing is known
OF_MAIN = bytes(range(MAIN, MAIN + FREQ + 1))  # the bytes of main's blocks, but for LINKED
BARE = bytes(m & ~LINKED for m in range(256))
UNHASHED = 64  # in the bytes of freed blocks only: has no hash
TO_LOOK_AT = re.compile(b"[" + re.escape(bytes(m for m in range(128) if m & (COPY | FRONT | UNHASHED))) + b"]")


class Freed:
    """Freed blocks that a policy decides about, and their bytes; beside them those that it does not."""

    __slots__ = ("blocks", "marks", "surplus", "unhashed")

    def __init__(self, state: LinkedState, blocks: list[Block]) -> None:
        """Sort out blocks without a hash, and copies of a content whose oldest copy is another."""
        mark = state.mark
        self.unhashed: list[Block] = []
        self.surplus: list[Block] = []
        marks = bytes([UNHASHED if block._block_hash is None else mark[block.block_id] for block in blocks])
        if TO_LOOK_AT.search(marks):
            self._look_at(state, blocks, marks)
            if self.unhashed or self.surplus:
                blocks = [block for block in blocks if not mark[block.block_id] & FRONT]
            marks = bytes([mark[block.block_id] for block in blocks])
        self.blocks = blocks
        self.marks = marks

    def _look_at(self, state: LinkedState, blocks: list[Block], marks: bytes) -> None:
        """Correct the bytes of blocks that had copies when last looked at; what goes to the front gets FRONT."""
        mark, cache = state.mark, state.pool.cached_block_hash_to_block._cache
        for found in TO_LOOK_AT.finditer(marks):
            at = found.start()
            block, known = blocks[at], marks[at] & ~FRONT
            if known == UNHASHED:
                known = FRONT
                self.unhashed.append(block)
            elif known & COPY:
                copies = cache.get(block._block_hash)
                if type(copies) is not dict or len(copies) < 2:
                    known &= ~COPY
                elif next(iter(copies.values())) is not block:
                    known |= FRONT
                    self.surplus.append(block)
            mark[block.block_id] = known


class Segments:
    """Goes before vLLM's queue class among the bases; adds no attribute but `wakman`, its state."""

    wakman: LinkedState
    num_free_blocks: int
    fake_free_list_head: Block
    fake_free_list_tail: Block

    def _choose(self, blocks: list[Block]) -> tuple[list[Block], list[Block], list[Block], list[Block]]:
        """Split freed blocks into those without a hash, copies, and those for small and main; set their bytes."""
        raise NotImplementedError

    def _evict(self, count: int, evicted: list[Block]) -> None:
        """Unlink `count` blocks and add them to `evicted`; num_free_blocks is right whenever it can fail."""
        raise NotImplementedError

    def popleft(self) -> Block:
        """Evict one block; ValueError when none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Evict n blocks; AssertionError when fewer are free."""
        if n <= 0:
            return []
        assert self.num_free_blocks >= n
        evicted: list[Block] = []
        try:
            self._evict(n, evicted)
        except Exception as error:
            stock = self._become_lru(error)
            evicted += stock.popleft_n(self, n - len(evicted))
        if self.wakman.clears_hashes:
            try:
                clear_hashes(self.wakman.pool, evicted)
            except Exception as error:
                # What was left is vLLM's to do, as it would do it.
                self._become_lru(error)
        return evicted

    def append(self, block: Block) -> None:
        """Add one freed block."""
        self.append_n([block])

    def append_n(self, blocks: list[Block]) -> None:
        """Add freed blocks, the first one first to go within its segment; one without a hash goes before all others."""
        try:
            unhashed, copies, small, main = self._choose(blocks)
        except Exception as error:
            self._become_lru(error).append_n(self, blocks)
            return
        state = self.wakman
        if small:
            after = state.main_first
            last = after.prev_free_block
            for block in small:
                last.next_free_block = block
                block.prev_free_block = last
                last = block
            last.next_free_block = after
            after.prev_free_block = last
        if main:
            tail = self.fake_free_list_tail
            last = tail.prev_free_block
            if not state.num_main:
                state.main_first = main[0]
            for block in main:
                last.next_free_block = block
                block.prev_free_block = last
                last = block
            last.next_free_block = tail
            tail.prev_free_block = last
            state.num_main += len(main)
        for block in copies:
            add_to_front(state, block)
        self.num_free_blocks += len(copies) + len(small) + len(main)
        if unhashed:
            self.prepend_n(unhashed)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add freed blocks that cannot be hit before all others, blocks[0] at the head."""
        if not blocks:
            return
        state = self.wakman
        mark = state.mark
        last = self.fake_free_list_head
        after = last.next_free_block
        if not state.num_front:
            state.front_last = blocks[-1]
        for block in blocks:
            mark[block.block_id] = FRONT
            block.prev_free_block = last
            last.next_free_block = block
            last = block
        last.next_free_block = after
        after.prev_free_block = last
        state.num_front += len(blocks)
        self.num_free_blocks += len(blocks)

    def remove(self, block: Block) -> None:
        """Take out a free block that goes into use; RuntimeError when it is not free."""
        before = block.prev_free_block
        after = block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        mark = self.wakman.mark[block.block_id]
        if mark > FREQ:
            state = self.wakman
            if mark & MAIN:
                state.num_main -= 1
                if block is state.main_first:
                    state.main_first = after
            elif mark & FRONT:
                state.num_front -= 1
                state.mark[block.block_id] = mark & ~FRONT
                if block is state.front_last:
                    state.front_last = before

    def _evict_front(self, count: int, evicted: list[Block]) -> None:
        """Evict up to `count` of the blocks that cannot be hit."""
        state = self.wakman
        mark, child = state.mark, state.child
        cache = state.pool.cached_block_hash_to_block._cache
        head = self.fake_free_list_head
        left = count
        while left and state.num_front:
            block = head.next_free_block
            below: bytes | None = None
            content: bytes | None = None
            taken = 0
            try:
                for _ in range(min(left, state.num_front)):
                    block_id = block.block_id
                    content = block._block_hash
                    if content is not None:
                        # Usual is a block whose only child, if it lives, has just been evicted before it.
                        kid = child[block_id]
                        if mark[block_id] & LINKED or (kid is not below and kid is not None and kid in cache):
                            break
                        below = content
                    mark[block_id] = 0
                    evicted.append(block)
                    taken += 1
                    after = block.next_free_block
                    block.prev_free_block = block.next_free_block = None
                    block = after
                    content = None
            finally:
                head.next_free_block = block
                block.prev_free_block = head
                state.num_front -= taken
                self.num_free_blocks -= taken
                if not state.num_front:
                    state.front_last = head
            left -= taken
            if content is not None:
                left -= 1
                self.remove(block)
                evicted.append(block)
                leave(state, block, content)

    def _become_lru(self, error: Exception) -> Any:
        """Go on as vLLM's own queue with the list as it stands, which is whole; return vLLM's class."""
        state = self.wakman
        state.fault = f"{state.policy}: {type(error).__name__}: {error}"
        state.policy = "lru"
        self.__class__ = state.classes["lru"]
        return state.classes["lru"]
