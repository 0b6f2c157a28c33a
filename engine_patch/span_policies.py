"""S3-FIFO and ARC over spans; the rules are those of s3fifo.py and arc.py, by the numbers used there."""

import math
from collections.abc import Sequence

import numpy as np

from engine_patch.chain_ids import ChainIds, Mask, Range
from engine_patch.policy import POLICIES, S3FIFO
from engine_patch.spans import FRONT, IN_MAIN, MAIN, SMALL, Ghost, Numbers, SpanQueue

MAX_FREQ = 3


class SegmentedSpans(SpanQueue):
    """What both share: orphans, and the way blocks of one range go to different parts."""

    __slots__ = ()

    def _gone(self, low: int, high: int) -> None:
        self.state[low:high] = 0
        self._orphans(low, high)

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
        for low, high in reversed(ranges):
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
                self._gone(high - run, high)
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
        once, often, size = self._once_ghost, self._often_ghost, self.num_blocks
        for low, high in reversed(ranges):
            up: Mask = self.state[low:high] > 0
            before = once.count, often.count
            recent, frequent = once.take(low, high), often.take(low, high)
            if recent is not None or frequent is not None:
                self._adapt(*before, recent, frequent)
                for remembered in (recent, frequent):
                    if remembered is not None:
                        up = up | remembered
            self._spread(low, high, up)
        once.trim(size - self._sizes[SMALL])
        often.trim(2 * size - self._sizes[SMALL] - self._sizes[MAIN] - once.count)

    def _adapt(self, once: int, often: int, recent: Mask | None, frequent: Mask | None) -> None:
        """Move the target by one remembered block after another; once, often: what B1 and B2 held."""
        size, target = float(self.num_blocks), self._target
        if recent is not None:
            for _ in range(int(np.count_nonzero(recent))):
                target = min(size, target + max(1.0, often / once))
                once -= 1
        if frequent is not None:
            for _ in range(int(np.count_nonzero(frequent))):
                target = max(0.0, target - max(1.0, once / often))
                often -= 1
        self._target = target

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
