"""One policy's shadow of a pool: what a request finds in it, what it must compute, and what is free when it ends.

1. A hit takes the oldest block of each content into use (copies.py). It is in the queue where no request uses the
   content, or where all who use it have copies of their own.
2. What a request computes although the content is there makes a copy, and leaves the oldest block where it is.
3. Blocks behind one that is missing are computed anew; what is still free of them is thrown out of the queue, a copy
   excepted.
"""

from engine_patch.chain_ids import ChainIds, Range, beginning, behind, joined, length
from engine_patch.pins import Pins
from engine_patch.spans import SpanQueue

Copied = dict[int, int]  # content -> id of one request's copy of it, wherever it is one


class Lane:
    """One policy's shadow: its free blocks, and what it has hit so far."""

    __slots__ = ("_ids", "_pins", "hit_blocks", "inserted", "policy", "queue")

    def __init__(self, policy: str, queue: SpanQueue, ids: ChainIds, pins: Pins) -> None:
        self.policy = policy
        self.queue = queue
        self.hit_blocks = 0
        """Hits of counted requests."""
        self.inserted = 0
        """Blocks that came into the pool."""
        self._ids, self._pins = ids, pins

    def admit(
        self, ranges: list[Range], fresh: list[Range], new: int, known: int, limit: int, dropped: int, copied: Copied
    ) -> int:
        """Take a request's hits out of the queue; return how many blocks it hit, those in use among them.

        fresh: those of its blocks that nobody else uses, the last ones; new: the first id that is new with it; known:
        how many of the others are computed. A hit has at most `limit` blocks and goes without the last `dropped` that
        are found. The request is not among the pins yet.
        """
        queue = self.queue
        used, count = length(ranges) - length(fresh), length(ranges)
        pinned = beginning(ranges, used) if queue.copies.contents else []
        there = used + self._free(pinned, fresh)
        hits = max(0, min(known if known < used else there, limit) - dropped)
        for content in self._old(beginning(pinned, hits)):
            queue.take([(content, content + 1)])
        if hits > used:
            queue.take(fresh if hits == there else beginning(fresh, hits - used))
        if hits < count:
            self._compute(ranges, new, hits, there, copied)
        return hits

    def extend(self, before: list[Range], ranges: list[Range], fresh: list[Range], new: int, copied: Copied) -> None:
        """Have a request compute the blocks of its output, behind those `before`; fresh and new: see `admit`."""
        used = length(ranges) - length(fresh)
        pinned = [*before, *beginning(ranges, used)] if self.queue.copies.contents else []
        self._compute(ranges, new, 0, used + self._free(pinned, fresh), copied)

    def returned(self, ranges: list[Range], unused: list[Range], copied: Copied) -> None:
        """Free what a request held alone; it is not among the pins any more, and nobody uses `unused` of its blocks."""
        copies, freed = self.queue.copies, unused
        odd = copies.within(ranges)
        if odd:
            # Those that others use come first in a chain.
            freed = [self._freed(content, copied) for content in odd if self._pins.counts[content]]
            for low, high in unused:
                start = low
                for content in copies.within([(low, high)]):
                    freed += [(start, content), self._freed(content, copied)]
                    start = content + 1
                freed.append((start, high))
            freed = [(low, high) for low, high in freed if low < high]
        if freed:
            self.queue.append(freed)

    def _freed(self, content: int, copied: Copied) -> Range:
        """Return what is free now that a request gave back a content that has copies: its copy, the oldest, nothing."""
        copies, copy = self.queue.copies, copied.get(content, -1)
        if copy in copies.contents:
            copies.freed(copy)
            return copy, copy + 1
        alone = self._pins.counts[content] == copies.in_use(content)
        return content, content + int(alone)

    def vanished(self, ranges: list[Range], copied: Copied) -> None:
        """Forget blocks that a request held and never computed; it is not among the pins any more."""
        copies = self.queue.copies
        for content in copies.within(ranges):
            copy = copied.get(content, -1)
            if copy in copies.contents:
                copies.drop(copy, False)
            elif self._pins.counts[content] == copies.in_use(content):
                self.queue.leave(content)

    def _old(self, ranges: list[Range]) -> list[int]:
        """Return those of the blocks in use whose users all have copies, so that the oldest block is free."""
        copies = self.queue.copies
        return [one for one in copies.within(ranges) if self._pins.counts[one] == copies.in_use(one)]

    def _free(self, pinned: list[Range], ranges: list[Range]) -> int:
        """Return how many blocks are free before the first that is not; `pinned`: those in use ahead of them."""
        old = self._old(pinned) if pinned else []
        if not old:
            return self.queue.prefix(ranges)
        # A span is found by its beginning, which may be one of these.
        return self.queue.prefix(joined([*((one, one + 1) for one in old), *ranges])) - len(old)

    def _compute(self, ranges: list[Range], new: int, first: int, found: int, copied: Copied) -> None:
        """Compute a request's blocks from `first` on, of which those before `found` are there."""
        if first < found:
            for low, high in beginning(behind(ranges, first), found - first):
                for content in range(low, high):
                    self._copy(content, copied)
        rest = [(low, min(high, new)) for low, high in behind(ranges, found) if low < new]
        if rest:
            odd = self.queue.copies.within(rest)
            self.queue.discard(rest)
            for content in odd:
                self.queue.leave(content)
                self._copy(content, copied)

    def _copy(self, content: int, copied: Copied) -> None:
        copy = copied.get(content)
        if copy is None:
            copy = copied[content] = self._ids.nameless()
        self.queue.copies.add(content, copy)
