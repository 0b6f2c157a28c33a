"""S3-FIFO for KV-cache blocks: what is hit again moves from a small queue to a main one; the rest passes through small.

State of a block: freq 0 to 3, and whether it belongs to main; kept while it is in use, cleared when it is evicted or
has lost its hash. Of the pool: small, main, and the ghost: contents evicted from small, oldest first, at most
`num_blocks`.
1. Hit (block free or in use): freq := min(3, freq + 1).
2. Free (`append`): a block of main goes to main's tail, freq kept. Else its content is taken out of the ghost if it is
   there; if it was, or freq >= threshold, the block goes to main's tail and freq := 0; else to small's tail.
3. Evict: the front (unhashed blocks, orphans, copies: chains.py) from its head. Then, as long as nothing is evicted:
   small is not empty and holds >= small_percent % of small and main together -> take small's head:
     freq >= threshold (possible after a switch) -> main's tail, freq := 0; else evicted, and its content remembered as
     the ghost's youngest, unless another block holds the same content;
   else -> take main's head: freq > 0 -> main's tail, freq - 1; else evicted, not remembered.
   (100 * len(small) >= small_percent * (len(small) + len(main)) in whole numbers; true when main is empty.)
4. What is evicted with its content nowhere else leaves its free descendants as orphans, whatever part it came from.

Sources: Yang et al., FIFO queues are all you need for cache eviction, SOSP'23; the variant of WAKMan, section 2 (free
sizes of small and main, 2-bit counter, main at the first hit). Ours: the rule that says which queue gives the victim
(WAKMan's text has none; `small_percent=0` takes small while it is not empty), hits counted on blocks in use, a block
that was hit leaves the queue and comes back at a tail (it was pinned meanwhile), duplicates and orphans.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from engine_patch.chains import MAIN, MAX_FREQ, B, ChainQueue
from engine_patch.ghost import Ghost


class S3FifoQueue(ChainQueue[B]):
    """The free blocks of a pool under S3-FIFO; O(1) amortised a block, 0.2 to 0.5 µs for a block's whole life."""

    __slots__ = ("_ghost", "_main_weight", "_num_blocks", "_small_weight", "_threshold")

    def __init__(
        self,
        num_blocks: int,
        blocks: Iterable[B] = (),
        elsewhere: Callable[[B, Hashable], bool] | None = None,
        *,
        small_percent: int = 10,
        threshold: int = 1,
    ) -> None:
        super().__init__(blocks, elsewhere)
        self._num_blocks = num_blocks
        self._small_weight = 100 - small_percent
        self._main_weight = small_percent
        self._threshold = threshold
        self._ghost: Ghost[Hashable] = Ghost()

    def hit(self, block: B) -> None:
        """Count a hit on a block, free or in use."""
        state = self._state.get(block, 0)
        if state & MAX_FREQ != MAX_FREQ:
            self._state[block] = state + 1

    def append(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block that can still be hit (rule 2)."""
        assert block not in self, f"block {block!r} is free already"
        self.append_chain((block,), None if content is None else (content,), parent)

    def append_chain(
        self, blocks: Sequence[B], contents: Sequence[Hashable] | None = None, parent: Hashable | None = None
    ) -> None:
        """Add a request's freed blocks, given in prompt order, tail first; `parent` is the content before blocks[0].

        Cheapest in two calls, first the blocks behind the hits, then the hits: new blocks need no look at each.
        """
        names: Sequence[Hashable] = blocks if contents is None else contents
        small, main, kids, state = self._small, self._main, self._kids, self._state
        ghost, threshold = self._ghost, self._threshold
        if contents is not None:
            self._contents.update(zip(blocks, contents, strict=True))
        new = state.keys().isdisjoint(blocks) and ghost.members.isdisjoint(names)
        befores = [*names[-2::-1], parent] if blocks else []
        for block, content, before in zip(reversed(blocks), reversed(names), befores, strict=True):
            if new:
                small[block] = before
            elif (known := state.get(block, 0)) >= MAIN:
                main[block] = before
            else:
                if content in ghost.members:
                    ghost.remove(content)
                    known = threshold
                if known >= threshold:
                    state[block] = MAIN
                    main[block] = before
                else:
                    small[block] = before
            if before is not None:
                kid = kids.setdefault(before, block)
                if kid is not block and kid != block:
                    self._link(before, block)

    def take(self, blocks: Iterable[B]) -> int:
        """Count one request's hits and take out those blocks that are free; return how many were."""
        small, main, front, state = self._small, self._main, self._front, self._state
        free = len(small) + len(main) + len(front)
        for block in blocks:
            known = state.get(block, 0)
            if known & MAX_FREQ != MAX_FREQ:
                state[block] = known + 1
            if block in main:
                del main[block]
            elif block in small:
                del small[block]
            elif block in front:
                del front[block]
        return free - len(small) - len(main) - len(front)

    def evict_many(self, count: int) -> list[B]:
        """Evict `count` blocks, in order (rules 3 and 4); KeyError, and nothing changed, when fewer are free."""
        if count > len(self):
            raise KeyError(f"{count} blocks are asked for, {len(self)} are free")
        small, main, ghost = self._small, self._main, self._ghost
        small_weight, main_weight = self._small_weight, self._main_weight
        evicted: list[B] = []
        while (wanted := count - len(evicted)) > 0:
            # Runs from one queue: as many as the rule gives it while nothing goes to main and nobody is orphaned.
            over = len(small) - max(1, -(-len(main) * main_weight // small_weight))
            if self._front:
                self._evict_front(evicted)
            elif over >= 0:
                self._evict_heads(small, min(wanted, over + 1), ghost, evicted, self._threshold)
            else:
                over = len(main) - (len(small) * small_weight // main_weight if small else 0)
                self._evict_heads(main, min(wanted, over), None, evicted, MAIN + 1)
        ghost.trim(self._num_blocks)
        return evicted

    def reset(self) -> None:
        """Make every block an unhashed one, in eviction order; forget all counts, links and ghosts."""
        super().reset()
        self._ghost.clear()

    def adopt(self, other: ChainQueue[B]) -> None:
        """Become a copy of another queue; of an S3-FIFO with the counts. The ghost stays empty."""
        super().adopt(other)
        if isinstance(other, S3FifoQueue):
            self._state = other._state.copy()

    def ghosts(self) -> Iterator[Hashable]:
        """Go through the remembered contents, oldest first."""
        return iter(self._ghost)
