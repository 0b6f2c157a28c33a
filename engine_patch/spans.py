"""Eviction queues over ranges of chained blocks: what LRU, S3-FIFO and ARC share when a shadow runs them.

They keep the rules of policy.py's queues, told there block by block; here one step moves a whole run of a chain, so
that a request costs a few steps and not hundreds. A block is an id of chain_ids.py.
1. A span is a run low … high - 1 in one part of the queue (front, small, main). It is evicted from its high end,
   since a request's blocks come tail first; in the front from its low end, since orphans come parent first.
2. A request walks a chain from its start, so what it finds of a span is the span's beginning: spans are found by
   their low id alone, and a hit takes a beginning away. A span emptied in the middle of a queue is skipped when its
   turn comes, or dropped when most are empty: where everything is hit nothing is evicted, and no turn ever comes.
3. Blocks whose parent is evicted are orphans: with all their descendants they move to the front's end, without counts.
4. LRU knows no orphans and has none, as a parent is always freed behind its children; unless it took over the blocks of
   another policy, where main may be ahead of small, or a request ended before all its blocks were computed.
5. A copy (copies.py) is a span of its own. S3-FIFO and ARC free it into the front, LRU like any other block.

Where several parts give victims for one request, how many each gives is as block by block, but one part gives all of
its own before the next, unless it leaves orphans, which go first; orphans with many branches come in another order. LRU
is exact; what the others differ by is bounded in tests/unit/test_shadow.py.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from engine_patch.chain_ids import ChainIds, Mask, Numbers, Range
from engine_patch.copies import Copies
from engine_patch.span_ghost import Ghost, Span

FRONT, SMALL, MAIN = 0, 1, 2
IN_MAIN = 4  # state of a block: freq 0 to 3, plus this when it belongs to main
EMPTY = 64  # spans in one part that are never too many
Bytes = npt.NDArray[np.uint8]


class SpanQueue:
    """LRU, and the ground of the others."""

    __slots__ = ("_at", "_ids", "_parts", "_sizes", "copies", "num_blocks", "state")

    def __init__(self, ids: ChainIds, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.state: Bytes = np.zeros(ids.size, dtype=np.uint8)
        self.copies = Copies(ids.size)
        self._ids = ids
        self._at: dict[int, Span] = {}
        self._parts: tuple[deque[Span], deque[Span], deque[Span]] = (deque(), deque(), deque())
        self._sizes = [0, 0, 0]

    def __len__(self) -> int:
        return sum(self._sizes)

    def blocks(self) -> Numbers:
        """Return the ids, near the order of eviction."""
        runs = [np.arange(low, high)[:: 1 if part == FRONT else -1] for low, high, part in self.spans()]
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)

    def spans(self) -> Iterator[Span]:
        """Go through the spans, near the order of eviction."""
        for part in self._parts:
            for span in part:
                if span[0] < span[1]:
                    yield span

    def prefix(self, ranges: Sequence[Range]) -> int:
        """Return how many blocks are here before the first that is not."""
        at, found = self._at, 0
        for low, high in ranges:
            here = low
            while here < high:
                span = at.get(here)
                if span is None:
                    return found + here - low
                here = span[1]
            found += high - low
        return found

    def take(self, ranges: Sequence[Range]) -> int:
        """Take out the free blocks up to the first that is not here; return how many. Hits are counted by `hit`."""
        at, sizes, found = self._at, self._sizes, 0
        for low, high in ranges:
            here = low
            while here < high:
                span = at.pop(here, None)
                if span is None:
                    return found + here - low
                end = span[1]
                if end > high:
                    end = span[0] = high
                    at[high] = span
                else:
                    span[0] = end
                sizes[span[2]] -= end - here
                here = end
            found += high - low
        return found

    def discard(self, ranges: Sequence[Range]) -> None:
        """Take out what is left of these blocks behind one that is missing: orphans, and see rule 4."""
        at = self._at
        for low, high in ranges:
            if not at.keys().isdisjoint(range(low, high)):
                for here in range(low, high):
                    if here in at:
                        self.take([(here, high)])

    def hit(self, ranges: Sequence[Range]) -> None:
        """Count a request's hits."""

    def append(self, ranges: Sequence[Range]) -> None:
        """Add freed blocks that can still be hit, the last first."""
        for low, high in reversed(ranges):
            self._put(self._parts[SMALL], low, high, SMALL)

    def evict(self, count: int) -> None:
        """Evict so many, which are here."""
        self._pop(SMALL, count, None)

    def mark(self, wanted: Mask) -> None:
        """Mark what must keep an id."""
        for low, high, _ in self.spans():
            wanted[low:high] = True

    def renumber(self, wanted: Mask, new: Numbers, size: int) -> None:
        """Follow a renumbering of the ids."""
        state = np.zeros(size, dtype=np.uint8)
        kept = self.state[: len(wanted)][wanted]
        state[: len(kept)] = kept
        self.state = state
        self.copies.renumber(new, size)
        self._at = {}
        for part in self._parts:
            alive = [span for span in part if span[0] < span[1]]
            part.clear()
            for low, high, kind in alive:
                span = [int(new[low]), int(new[high - 1]) + 1, kind]
                part.append(span)
                self._at[span[0]] = span

    def adopt(self, other: "SpanQueue") -> None:
        """Take over another queue's blocks, as policy.converted does."""
        ours, theirs = type(self) is not SpanQueue, type(other) is not SpanQueue
        self.copies.adopt(other.copies)
        for low, high, part in other.spans():
            kind = part if ours and theirs else SMALL
            self._put(self._parts[kind], low, high, kind)
        if ours and theirs:
            same = type(self) is type(other)
            self.state = other.state.copy() if same else (other.state & IN_MAIN).astype(np.uint8)

    def _put(self, part: deque[Span], low: int, high: int, kind: int) -> None:
        span = [low, high, kind]
        part.append(span)
        self._at[low] = span
        self._sizes[kind] += high - low
        if len(part) > 2 * len(self._at) + EMPTY:
            alive = [span for span in part if span[0] < span[1]]
            part.clear()
            part.extend(alive)

    def _pop(self, part: int, count: int, ghost: Ghost | None) -> int:
        """Evict up to `count` blocks from a part's head into a ghost; return how many."""
        queue, done = self._parts[part], 0
        while done < count and queue:
            span = queue[0]
            low, high, _ = span
            if low == high:
                queue.popleft()
                continue
            cut = min(count - done, high - low)
            done += cut
            self._cut(span, cut)
            self._evicted(high - cut, high, ghost)
            if self._sizes[FRONT]:
                break
        return done

    def _pop_front(self, count: int) -> int:
        queue, done = self._parts[FRONT], 0
        while done < count and queue:
            span = queue[0]
            low, high, _ = span
            if low == high:
                queue.popleft()
                continue
            cut = min(count - done, high - low)
            done += cut
            del self._at[low]
            self._sizes[FRONT] -= cut
            span[0] = low + cut
            if span[0] < high:
                self._at[span[0]] = span
            self._evicted(low, low + cut, None)
        return done

    def _cut(self, span: Span, count: int) -> None:
        """Take the last blocks off a span."""
        span[1] -= count
        self._sizes[span[2]] -= count
        if span[0] == span[1]:
            del self._at[span[0]]

    def _evicted(self, low: int, high: int, ghost: Ghost | None) -> None:
        """Take note that blocks were evicted, into a ghost if any: a copy, or a content that has some, into none."""
        if self.copies.contents:
            for odd in reversed(self.copies.within(((low, high),))):
                if odd + 1 < high:
                    self._evicted(odd + 1, high, ghost)
                self.leave(odd)
                high = odd
        if low < high:
            if ghost is not None:
                ghost.add(low, high)
            self._gone(low, high)

    def leave(self, odd: int) -> None:
        """Take note that a copy is no more, or the oldest block of a content that has some: the eldest succeeds it."""
        copies = self.copies
        self.state[odd] = 0
        if odd in copies.contents:
            copies.drop(odd, True)
            return
        heir = next(iter(copies.younger(odd)))
        span = self._at.pop(heir, None)
        if span is not None:
            span[0], span[1] = odd, odd + 1
            self._at[odd] = span
        copies.drop(heir, span is not None)

    def _gone(self, low: int, high: int) -> None:
        """Forget the counts of evicted blocks and make their free descendants orphans (LRU: there are none)."""

    def _orphans(self, low: int, high: int) -> None:
        ahead = self._ids.children(low, high)[::-1]
        while ahead:
            child = ahead.pop()
            span = self._at.get(child)
            if span is None or span[2] == FRONT:
                continue
            _, end, kind = span
            self._sizes[kind] -= end - child
            span[0] = end
            self._put(self._parts[FRONT], child, end, FRONT)
            self.state[child:end] = 0
            ahead += self._ids.children(child, end)[::-1]
