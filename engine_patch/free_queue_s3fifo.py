"""vLLM's free-block queue under S3-FIFO; the rules are those of s3fifo.py, block for block.

1. What is usual is done in runs: blocks of small that were never hit, and of main that were not hit since, whose only
   child has just been evicted before them (a request's blocks stand tail first). The rest goes block by block.
2. small gives the victim while len(small) * small_weight >= len(main) * main_weight; how many in a row is known
   beforehand, since only evictions and promotions change the lengths.
"""

from typing import ClassVar

from engine_patch.free_queue_segments import BARE, NOTHING, OF_MAIN, Freed, Segments
from engine_patch.free_queue_state import FREQ, LINKED, MAIN, Block, leave


class S3FifoSegments(Segments):
    """Adds what S3-FIFO decides to the shared part; a variant sets its two numbers."""

    small_percent: ClassVar[int] = 10
    threshold: ClassVar[int] = 1
    hit_enough: ClassVar[bytes] = bytes(range(1, FREQ + 1))  # from the threshold on

    def _choose(self, blocks: list[Block]) -> tuple[list[Block], list[Block], list[Block], list[Block]]:
        state = self.wakman
        mark, ghost, threshold = state.mark, state.ghost, self.threshold
        freed = Freed(state, blocks)
        blocks = freed.blocks
        # As below for all at a time, when new blocks come first, then those hit enough, then those of main.
        known_first = freed.marks.translate(BARE).lstrip(NOTHING)
        main_last = known_first.lstrip(self.hit_enough)
        until = len(blocks) - len(main_last)
        if not main_last.lstrip(OF_MAIN) and ghost.members.isdisjoint([block._block_hash for block in blocks[:until]]):
            new = len(blocks) - len(known_first)
            for block in blocks[new:until]:
                block_id = block.block_id
                mark[block_id] = mark[block_id] & LINKED | MAIN
            return freed.unhashed, freed.surplus, blocks[:new], blocks[new:]
        small: list[Block] = []
        main: list[Block] = []
        for block, known in zip(blocks, freed.marks, strict=True):
            if known & MAIN:
                main.append(block)
                continue
            content = block._block_hash
            found = content in ghost.members
            if found:
                ghost.remove(content)
            if found or known & FREQ >= threshold:
                mark[block.block_id] = known & ~FREQ | MAIN
                main.append(block)
            else:
                small.append(block)
        return freed.unhashed, freed.surplus, small, main

    def _evict(self, count: int, evicted: list[Block]) -> None:
        state = self.wakman
        small_weight, main_weight = 100 - self.small_percent, self.small_percent
        wanted = len(evicted) + count
        head = self.fake_free_list_head
        while (left := wanted - len(evicted)) > 0:
            if state.num_front or head.next_free_block._block_hash is None:
                self._evict_head(left, evicted)
                continue
            main = state.num_main
            small = self.num_free_blocks - main
            if small and small * small_weight >= main * main_weight:
                # The run ends when small is shorter than main * main_weight / small_weight.
                run = small + (-main * main_weight) // small_weight + 1 if main else small
                self._evict_small(min(run, small, left), evicted)
            else:
                run = main - small * small_weight // main_weight if small else main
                self._evict_main(min(max(run, 1), left), evicted)

    def _evict_head(self, count: int, evicted: list[Block]) -> None:
        """Evict blocks of the front, or one that lost its hash at the head of small or main."""
        if self.wakman.num_front:
            self._evict_front(count, evicted)
            return
        block = self.fake_free_list_head.next_free_block
        self.remove(block)
        self.wakman.mark[block.block_id] = 0
        evicted.append(block)

    def _evict_small(self, count: int, evicted: list[Block]) -> None:
        """Evict up to `count` blocks from small's head; fewer when one goes to main, or when orphans come up."""
        state = self.wakman
        mark, child = state.mark, state.child
        cache = state.pool.cached_block_hash_to_block._cache
        remembered: list[bytes] = []
        take, remember = evicted.append, remembered.append
        head = self.fake_free_list_head
        block = head.next_free_block
        below: bytes | None = None
        try:
            for _ in range(count):
                block_id = block.block_id
                content = block._block_hash
                if mark[block_id] or content is None:
                    break
                kid = child[block_id]
                if kid is not below and kid is not None and kid in cache:
                    break
                take(block)
                remember(content)
                below = content
                after = block.next_free_block
                block.prev_free_block = block.next_free_block = None
                block = after
        finally:
            head.next_free_block = block
            block.prev_free_block = head
            taken = len(remembered)
            self.num_free_blocks -= taken
        if taken:
            state.ghost.add(remembered)
            state.ghost.trim(state.capacity)
        if taken < count:
            self._evict_one_small(block, evicted)

    def _evict_one_small(self, block: Block, evicted: list[Block]) -> None:
        """Evict small's head, whatever there is to know of it, or send it to main."""
        state = self.wakman
        block_id, content = block.block_id, block._block_hash
        known = state.mark[block_id]
        self.remove(block)
        if content is not None and known & FREQ >= self.threshold:
            state.mark[block_id] = known & ~FREQ | MAIN
            self._link_main(block)
            return
        evicted.append(block)
        if content is None:
            state.mark[block_id] = 0
        elif leave(state, block, content):
            state.ghost.add([content])
            state.ghost.trim(state.capacity)

    def _evict_main(self, count: int, evicted: list[Block]) -> None:
        """Evict up to `count` blocks from main's head, those with hits get another turn; fewer when orphans come up."""
        state = self.wakman
        mark, child = state.mark, state.child
        cache = state.pool.cached_block_hash_to_block._cache
        block = state.main_first
        before = block.prev_free_block
        below: bytes | None = None
        taken = 0
        while taken < count:
            block_id = block.block_id
            content = block._block_hash
            known = mark[block_id]
            if content is None:
                break
            if known & FREQ:
                block = self._another_turn(block)
                continue
            if known & LINKED:
                break
            kid = child[block_id]
            if kid is not None and kid is not below and kid in cache:
                break
            below = content
            after = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            before.next_free_block = after
            after.prev_free_block = before
            state.main_first = after
            state.num_main -= 1
            self.num_free_blocks -= 1
            mark[block_id] = 0
            evicted.append(block)
            taken += 1
            block = after
        if taken < count:
            content = block._block_hash
            self.remove(block)
            evicted.append(block)
            if content is None:
                mark[block.block_id] = 0
            else:
                leave(state, block, content)

    def _another_turn(self, first: Block) -> Block:
        """Count a hit less for main's blocks from its head on, up to one without, and move them to the tail as a run.

        Returns main's head. When all were hit they are where they would be.
        """
        state = self.wakman
        mark = state.mark
        tail = self.fake_free_list_tail
        block = first
        while block is not tail and block._block_hash is not None and (known := mark[block.block_id]) & FREQ:
            mark[block.block_id] = known - 1
            block = block.next_free_block
        if block is tail:
            return first
        before, last, end = first.prev_free_block, block.prev_free_block, tail.prev_free_block
        before.next_free_block = block
        block.prev_free_block = before
        end.next_free_block = first
        first.prev_free_block = end
        last.next_free_block = tail
        tail.prev_free_block = last
        state.main_first = block
        return block

    def _link_main(self, block: Block) -> None:
        state = self.wakman
        tail = self.fake_free_list_tail
        last = tail.prev_free_block
        last.next_free_block = block
        block.prev_free_block = last
        block.next_free_block = tail
        tail.prev_free_block = block
        if not state.num_main:
            state.main_first = block
        state.num_main += 1
        self.num_free_blocks += 1
