"""S3-FIFO and ARC over spans; the rules are those of s3fifo.py and arc.py, by the numbers used there."""

import math
from collections.abc import Sequence

import numpy as np

from engine_patch.chain_ids import ChainIds, Mask, Numbers, Range
from engine_patch.policy import POLICIES, S3FIFO
from engine_patch.span_ghost import Ghost
from engine_patch.spans import FRONT, IN_MAIN, MAIN, SMALL, SpanQueue

MAX_FREQ = 3


class SegmentedSpans(SpanQueue):
    """What both share: orphans, and the way blocks of one range go to different parts."""

    __slots__ = ()

    def _gone(self, low: int, high: int) -> None:
        self.state[low:high] = 0
        self._orphans(low, high)

    def _without_copies(self, ranges: Sequence[Range]) -> Sequence[Range]:
        """Put the copies among freed blocks in front; return the others, the last first."""
        copies = self.copies.contents
        if not copies:
            return ranges[::-1]
        rest = []
        for low, high in reversed(ranges):
            if low in copies:
                self._put(self._parts[FRONT], low, high, FRONT)
            else:
                rest.append((low, high))
        return rest

    def _spread(self, low: int, high: int, up: Mask) -> None:
        """Append a range, the last first: `up` to main (freq kept; 0 for who comes new), the rest to small."""
        count = int(np.count_nonzero(up))
        if not count:
            self._put(self._parts[SMALL], low, high, SMALL)
            return
        state = self.state[low:high]
        if count == high - low:
            np.maximum(state, IN_MAIN, out=state)
            self._put(self._parts[MAIN], low, high, MAIN)
            return
        state[up] = np.maximum(state[up], IN_MAIN)
        ends = [0, *(np.flatnonzero(up[1:] != up[:-1]) + 1).tolist(), high - low]
        for at in range(len(ends) - 2, -1, -1):
            part = MAIN if up[ends[at]] else SMALL
            self._put(self._parts[part], low + ends[at], low + ends[at + 1], part)


class S3FifoSpans(SegmentedSpans):
    """S3-FIFO."""

    __slots__ = ("_ghost", "_main_weight", "_small_weight", "_threshold")

    def __init__(self, ids: ChainIds, num_blocks: int, small_percent: int, threshold: int) -> None:
        super().__init__(ids, num_blocks)
        self._small_weight, self._main_weight = 100 - small_percent, small_percent
        self._threshold = threshold
        self._ghost = Ghost(ids.size)

    def hit(self, ranges: Sequence[Range]) -> None:
        """Rule 1."""
        for low, high in ranges:
            state = self.state[low:high]
            state += (state & MAX_FREQ) != MAX_FREQ

    def append(self, ranges: Sequence[Range]) -> None:
        """Rule 2."""
        for low, high in self._without_copies(ranges):
            up: Mask = self.state[low:high] >= self._threshold
            remembered = self._ghost.take(low, high)
            self._spread(low, high, up if remembered is None else up | remembered)

    def evict(self, count: int) -> None:
        """Rule 3."""
        while count > 0:
            count -= self._pop_front(count)
            small, main = self._victims(count)
            # Main first: its evictions make orphans, which go before what small would give.
            done = self._pop_main(main)
            if not self._sizes[FRONT]:
                done += self._pop(SMALL, small, self._ghost)
                self._ghost.trim(self.num_blocks)
            count -= done

    def _victims(self, count: int) -> tuple[int, int]:
        """How many of the next `count` victims small and main give."""
        small, main = self._sizes[SMALL], self._sizes[MAIN]
        light, heavy = self._small_weight, self._main_weight
        from_small = from_main = 0
        while count and (small or main):
            over = small * light - main * heavy
            if small and over >= 0:
                step = min(count, small, over // light + 1)
                small -= step
                from_small += step
            else:
                step = min(count, main, -(over // heavy) if small else main)
                main -= step
                from_main += step
            count -= step
        return from_small, from_main

    def _pop_main(self, count: int) -> int:
        queue, done = self._parts[MAIN], 0
        while done < count and queue:
            span = queue[0]
            low, high, _ = span
            if low == high:
                queue.popleft()
                continue
            unhit = self.state[low:high] == IN_MAIN
            ends_unhit = bool(unhit[-1])
            others = np.flatnonzero(unhit != ends_unhit)
            run = high - low - (int(others[-1]) + 1 if len(others) else 0)
            if ends_unhit:
                run = min(run, count - done)
                done += run
                self._cut(span, run)
                self._evicted(high - run, high, None)
                if self._sizes[FRONT]:
                    break
            else:
                self.state[high - run : high] -= 1
                self._cut(span, run)
                self._put(queue, high - run, high, MAIN)
        return done

    def mark(self, wanted: Mask) -> None:
        """Mark what must keep an id."""
        super().mark(wanted)
        self._ghost.mark(wanted)

    def renumber(self, wanted: Mask, new: Numbers, size: int) -> None:
        """Follow a renumbering."""
        super().renumber(wanted, new, size)
        self._ghost.renumber(wanted, new, size)


class ArcSpans(SegmentedSpans):
    """ARC."""

    __slots__ = ("_often_ghost", "_once_ghost", "_target")

    def __init__(self, ids: ChainIds, num_blocks: int) -> None:
        super().__init__(ids, num_blocks)
        self._target = 0.0
        self._once_ghost, self._often_ghost = Ghost(ids.size), Ghost(ids.size)

    def hit(self, ranges: Sequence[Range]) -> None:
        """Rule 1."""
        for low, high in ranges:
            state = self.state[low:high]
            np.maximum(state, 1, out=state)

    def append(self, ranges: Sequence[Range]) -> None:
        """Rule 2."""
        for low, high in self._without_copies(ranges):
            end = high
            while low < end:
                first = self._remembered_alike(low, end)
                self._append_run(first, end)
                end = first

    def _remembered_alike(self, low: int, high: int) -> int:
        """Return the first of the last blocks that the same ghost, or none, remembers."""
        for ghost in (self._once_ghost, self._often_ghost):
            there = ghost.among(low, high)
            if there is not None:
                other = np.flatnonzero(there != there[-1])
                low += int(other[-1]) + 1 if len(other) else 0
        return low

    def _append_run(self, low: int, high: int) -> None:
        """Append blocks that one ghost, or none, remembers."""
        once, often, size = self._once_ghost, self._often_ghost, float(self.num_blocks)
        before_once, before_often = once.count, often.count
        up: Mask = self.state[low:high] > 0
        if once.take(low, high) is not None:
            for left in range(before_once, before_once - (high - low), -1):
                self._target = min(size, self._target + max(1.0, before_often / left))
            up = np.ones_like(up)
        elif often.take(low, high) is not None:
            for left in range(before_often, before_often - (high - low), -1):
                self._target = max(0.0, self._target - max(1.0, before_once / left))
            up = np.ones_like(up)
        self._spread(low, high, up)
        once.trim(self.num_blocks - self._sizes[SMALL])
        often.trim(2 * self.num_blocks - self._sizes[SMALL] - self._sizes[MAIN] - once.count)

    def evict(self, count: int) -> None:
        """Rule 3."""
        while count > 0:
            count -= self._pop_front(count)
            over = math.ceil(self._sizes[SMALL] - self._target)
            if over > 0 or not self._sizes[MAIN]:
                count -= self._pop(SMALL, min(count, over if self._sizes[MAIN] else count), self._once_ghost)
            else:
                count -= self._pop(MAIN, count, self._often_ghost)

    def mark(self, wanted: Mask) -> None:
        """Mark what must keep an id."""
        super().mark(wanted)
        self._once_ghost.mark(wanted)
        self._often_ghost.mark(wanted)

    def renumber(self, wanted: Mask, new: Numbers, size: int) -> None:
        """Follow a renumbering."""
        super().renumber(wanted, new, size)
        self._once_ghost.renumber(wanted, new, size)
        self._often_ghost.renumber(wanted, new, size)


def new_spans(policy: str, ids: ChainIds, num_blocks: int) -> SpanQueue:
    """Return an empty queue; ValueError, naming the policies, for a name that is none."""
    if policy == "lru":
        return SpanQueue(ids, num_blocks)
    if policy == "arc":
        return ArcSpans(ids, num_blocks)
    if policy in S3FIFO:
        return S3FifoSpans(ids, num_blocks, *S3FIFO[policy])
    raise ValueError(f"no eviction policy is called {policy!r}; there are {', '.join(POLICIES)}")
