"""vLLM's free-block queue under ARC; the rules are those of arc.py, block for block.

1. A block belongs to T2 (MAIN in its byte) or not; a hit counts in FREQ and sends it to T2 when it comes back.
   T1 is small.
2. What is usual is done in runs, as in free_queue_s3fifo.py: T1 gives the victim while it is longer than p, then T2.
"""

import math

from engine_patch.free_queue_segments import BARE, NOTHING, OF_MAIN, Freed, Segments
from engine_patch.free_queue_state import FREQ, LINKED, MAIN, Block, leave
from engine_patch.ghost import Ghost

COUNTED = bytes(range(1, FREQ + 1))  # the bytes of blocks that were hit and are not of T2 yet, but for BRANCH


class ArcSegments(Segments):
    """Adds what ARC decides to the shared part; `state.ghost` is B1, `state.ghost_main` B2, `state.target` p."""

    def _choose(self, blocks: list[Block]) -> tuple[list[Block], list[Block], list[Block], list[Block]]:
        state = self.wakman
        mark, once_ghost, often_ghost, size = state.mark, state.ghost, state.ghost_main, state.capacity
        freed = Freed(state, blocks)
        blocks = freed.blocks
        free = self.num_free_blocks - state.num_front
        # As below for all at a time, when new blocks come first, then those that were hit, then those of T2: of the
        # last ones no content is in a ghost.
        seen_last = freed.marks.translate(BARE).lstrip(NOTHING)
        often_last = seen_last.lstrip(COUNTED)
        until = len(blocks) - len(often_last)
        unknown = [block._block_hash for block in blocks[:until]]
        if (
            not often_last.lstrip(OF_MAIN)
            and once_ghost.members.isdisjoint(unknown)
            and often_ghost.members.isdisjoint(unknown)
        ):
            new = len(blocks) - len(seen_last)
            over = min(new, free - state.num_main + new + len(once_ghost) - size)
            if over > 0:
                once_ghost.trim(max(0, len(once_ghost) - over))
            for block in blocks[new:until]:
                block_id = block.block_id
                mark[block_id] = mark[block_id] & LINKED | MAIN
            self._trim(free + len(blocks))
            return freed.unhashed, freed.surplus, blocks[:new], blocks[new:]
        once: list[Block] = []
        often: list[Block] = []
        for block, known in zip(blocks, freed.marks, strict=True):
            content = block._block_hash
            if content in once_ghost.members:
                ratio = len(often_ghost) / len(once_ghost)
                once_ghost.remove(content)
                state.target = min(float(size), state.target + max(1.0, ratio))
            elif content in often_ghost.members:
                ratio = len(once_ghost) / len(often_ghost)
                often_ghost.remove(content)
                state.target = max(0.0, state.target - max(1.0, ratio))
            elif not known & (MAIN | FREQ):
                once.append(block)
                if once_ghost and free - state.num_main + len(once) + len(once_ghost) > size:
                    once_ghost.trim(len(once_ghost) - 1)
                self._trim(free + len(once) + len(often))
                continue
            often.append(block)
            mark[block.block_id] = known & ~FREQ | MAIN
            self._trim(free + len(once) + len(often))
        return freed.unhashed, freed.surplus, once, often

    def _trim(self, free: int) -> None:
        """Keep what is free with a hash and what is remembered within two pools."""
        state = self.wakman
        ghost = state.ghost_main
        if ghost and free + len(state.ghost) + len(ghost) > 2 * state.capacity:
            ghost.trim(max(0, 2 * state.capacity - free - len(state.ghost)))

    def _evict(self, count: int, evicted: list[Block]) -> None:
        state = self.wakman
        wanted = len(evicted) + count
        head = self.fake_free_list_head
        while (left := wanted - len(evicted)) > 0:
            if state.num_front:
                self._evict_front(left, evicted)
                continue
            often = state.num_main
            once = self.num_free_blocks - often
            block = head.next_free_block
            if block._block_hash is None:
                self._evict_one(block, None, evicted)
            elif once and (once > state.target or not often):
                run = math.ceil(once - state.target) if often else once
                self._evict_run(block, min(run, left), 0, evicted)
            else:
                self._evict_run(state.main_first, min(often, left), MAIN, evicted)

    def _evict_run(self, block: Block, count: int, segment: int, evicted: list[Block]) -> None:
        """Evict up to `count` blocks of T1 (segment 0) or T2 (MAIN) from `block` on; fewer when orphans come up."""
        state = self.wakman
        mark, child = state.mark, state.child
        ghost = state.ghost_main if segment else state.ghost
        cache = state.pool.cached_block_hash_to_block._cache
        remembered: list[bytes] = []
        take, remember = evicted.append, remembered.append
        before = block.prev_free_block
        below: bytes | None = None
        try:
            for _ in range(count):
                block_id = block.block_id
                content = block._block_hash
                if content is None or mark[block_id] & LINKED:
                    break
                kid = child[block_id]
                if kid is not below and kid is not None and kid in cache:
                    break
                take(block)
                remember(content)
                mark[block_id] = 0
                below = content
                after = block.next_free_block
                block.prev_free_block = block.next_free_block = None
                block = after
        finally:
            before.next_free_block = block
            block.prev_free_block = before
            taken = len(remembered)
            self.num_free_blocks -= taken
            if segment:
                state.num_main -= taken
                state.main_first = block
        if taken:
            ghost.add(remembered)
        if taken < count:
            self._evict_one(block, ghost, evicted)

    def _evict_one(self, block: Block, ghost: Ghost[bytes] | None, evicted: list[Block]) -> None:
        """Evict a block, whatever there is to know of it."""
        content = block._block_hash
        self.remove(block)
        evicted.append(block)
        if content is None:
            self.wakman.mark[block.block_id] = 0
        elif leave(self.wakman, block, content) and ghost is not None:
            ghost.add([content])
