"""Whether list and state are what they should be: asked of all at once, or a part at a time between an engine's steps.

1. `check` walks the list: what is linked, in which order, where the parts begin. It is exact, and holds the engine up
   for 0.3 to 0.5 µs a block: tests use it.
2. `Sweep` looks at the pool's blocks by their ids, some between two steps. Whatever moves meanwhile, each block must
   stand right among its neighbours: linked both ways or not at all, linked exactly while nobody uses it, its part not
   before that of the block ahead, a part's first or last block the one that the state names. A list that is right
   everywhere is one chain from its head to its tail, and perhaps a ring that nothing leads to.
3. When all ids were seen, what is counted is compared with what is there at that moment, in a few columns of bytes.
4. What is wrong is said in one sentence. Neither changes anything.
"""

from typing import Any

import numpy as np

from engine_patch.free_queue_state import FRONT, MAIN, Block, LinkedState, Queue

SLICE = 2048  # blocks between two steps, about 1 ms


def check(queue: Queue, state: LinkedState, pool: Any) -> str | None:
    """Return what is wrong with list and state, None when nothing is; O(n), 0.3 to 0.5 µs a block."""
    wrong = _ends(queue, state, pool)
    if wrong is not None:
        return wrong
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    linked = bytearray(len(pool.blocks))
    count, before, block = 0, head, head.next_free_block
    lru = state.policy == "lru"
    part, parts = 0, [0, 0, 0]
    while block is not tail:
        if block is None or block.prev_free_block is not before:
            return f"the list is broken after block {before.block_id}"
        block_id = block.block_id
        if not 0 <= block_id < len(linked) or pool.blocks[block_id] is not block:
            return f"block {block_id} is not the pool's"
        if linked[block_id]:
            return f"block {block_id} is in the list twice"
        if block.ref_cnt or block.is_null:
            return f"block {block_id} is in the list, in use {block.ref_cnt} times"
        linked[block_id] = 1
        count += 1
        if not lru:
            now = _part(state, block_id)
            if now < part:
                return f"block {block_id} of part {now} stands behind part {part}"
            if now == 2 and not parts[2] and block is not state.main_first:
                return f"main starts at block {block_id}, not where it should"
            part = now
            parts[now] += 1
            if now == 0 and parts[0] == state.num_front and block is not state.front_last:
                return f"the front ends at block {block_id}, not where it should"
        before, block = block, block.next_free_block
    if tail.prev_free_block is not before:
        return "the list's end does not lead back"
    if count != queue.num_free_blocks:
        return f"{count} blocks are in the list, {queue.num_free_blocks} are counted"
    for block in pool.blocks:
        if not linked[block.block_id] and (block.prev_free_block is not None or block.next_free_block is not None):
            return f"block {block.block_id} is linked but not in the list"
    return None if lru else _parts(state, queue, parts[0], parts[2])


class Sweep:
    """One look at every block of the pool, in slices."""

    def __init__(self, queue: Queue, state: LinkedState, pool: Any) -> None:
        self._queue = queue
        self._state = state
        self._pool = pool
        self._at = 0
        self.done = False

    def step(self, count: int = SLICE) -> str | None:
        """Look at the next `count` blocks; return what is wrong. About 0.5 µs a block.

        After the last block: 30 ns for each block of the pool (2 ms for 65,536, 7 to 15 ms for 262,144), and `done`.
        """
        wrong = _ends(self._queue, self._state, self._pool)
        blocks = self._pool.blocks[self._at : self._at + count]
        for block in blocks:
            if wrong is not None:
                break
            wrong = self._look_at(block)
        self._at += len(blocks)
        if wrong is None and self._at >= len(self._pool.blocks):
            wrong = self._count()
            self.done = True
        return wrong

    def _look_at(self, block: Block) -> str | None:
        before, after = block.prev_free_block, block.next_free_block
        block_id = block.block_id
        if before is None or after is None:
            if before is not after:
                return f"the list is broken at block {block_id}"
            if not block.ref_cnt and not block.is_null:
                return f"block {block_id} is neither in the list nor in use"
            return None
        if block.ref_cnt or block.is_null:
            return f"block {block_id} is in the list, in use {block.ref_cnt} times"
        if before.next_free_block is not block or after.prev_free_block is not block:
            return f"the list is broken at block {block_id}"
        state = self._state
        if state.policy == "lru":
            return None
        part = _part(state, block_id)
        ahead = 0 if before is self._queue.fake_free_list_head else _part(state, before.block_id)
        if part < ahead:
            return f"block {block_id} of part {part} stands behind part {ahead}"
        starts = part == 2 and (ahead != 2 or before is self._queue.fake_free_list_head)
        if starts != (block is state.main_first):
            return f"main starts at block {block_id}, or should"
        ends = part == 0 and (after is self._queue.fake_free_list_tail or _part(state, after.block_id) != 0)
        if ends != (block is state.front_last):
            return f"the front ends at block {block_id}, or should"
        return None

    def _count(self) -> str | None:
        state, queue, pool = self._state, self._queue, self._pool
        free = np.frombuffer(bytes([not block.ref_cnt for block in pool.blocks]), np.uint8).astype(bool)
        free[pool.null_block.block_id] = False
        count = int(np.count_nonzero(free))
        if count != queue.num_free_blocks:
            return f"{count} blocks are not in use, {queue.num_free_blocks} are counted"
        if state.policy == "lru":
            return None
        marks = np.frombuffer(bytes(state.mark), np.uint8)[free]
        return _parts(state, queue, int(np.count_nonzero(marks & FRONT)), int(np.count_nonzero(marks & MAIN)))


def _part(state: LinkedState, block_id: int) -> int:
    """Return in which part a free block stands: 0 front, 1 small, 2 main."""
    mark = state.mark[block_id]
    return 0 if mark & FRONT else 2 if mark & MAIN else 1


def _ends(queue: Queue, state: LinkedState, pool: Any) -> str | None:
    """Return what is wrong with queue and state as such."""
    if queue.wakman is not state or pool.free_block_queue is not queue or state.pool is not pool:
        return "the queue is not the pool's, or the state not the queue's"
    if type(queue) is not state.classes[state.policy]:
        return f"the queue's class is {type(queue).__name__}, its policy {state.policy}"
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    if head.prev_free_block is not None or tail.next_free_block is not None:
        return "the list goes on beyond its ends"
    if head.next_free_block.prev_free_block is not head or tail.prev_free_block.next_free_block is not tail:
        return "the list's ends do not lead back"
    return None


def _parts(state: LinkedState, queue: Queue, front: int, main: int) -> str | None:
    """Return what is wrong with the parts' counts and ends, where `front` and `main` blocks are in them."""
    if (front, main) != (state.num_front, state.num_main):
        return f"front and main hold {front} and {main} blocks, {state.num_front} and {state.num_main} are counted"
    head, tail = queue.fake_free_list_head, queue.fake_free_list_tail
    if (not state.num_front and state.front_last is not head) or (not state.num_main and state.main_first is not tail):
        return "an empty part is not where it should be"
    if max(len(state.ghost), len(state.ghost_main)) > 2 * state.capacity:
        return "more is remembered than should be"
    return None
