"""What S3-FIFO and ARC remember of evicted blocks, as ranges: the newest so many.

A block is forgotten by its own stamp, so that nothing is looked for in the middle of the queue. Ranges of which nothing
is remembered are dropped in their turn, or when they are more than what is remembered.
"""

from collections import deque

import numpy as np

from engine_patch.chain_ids import Mask, Numbers

Span = list[int]  # low, high, and what belongs to it
FORGOTTEN = 64  # ranges that are never too many


class Ghost:
    """Remembered blocks, oldest first; a stamp tells whether an entry of the queue still stands."""

    __slots__ = ("_order", "_stamp", "_stamps", "count")

    def __init__(self, size: int) -> None:
        # 64 bits: 32 are used up in weeks, at a thousand evictions a second.
        self._stamps = np.zeros(size, dtype=np.int64)
        self._order: deque[Span] = deque()
        self._stamp = 0
        self.count = 0

    def add(self, low: int, high: int) -> None:
        """Remember blocks, high - 1 as the oldest of them; none is remembered yet."""
        self._stamp += 1
        self._stamps[low:high] = self._stamp
        self._order.append([low, high, self._stamp])
        self.count += high - low
        if len(self._order) > 2 * self.count + FORGOTTEN:
            self._order = deque(span for span in self._order if (self._stamps[span[0] : span[1]] == span[2]).any())

    def take(self, low: int, high: int) -> Mask | None:
        """Forget those of the range, and return which they were; None for none."""
        if not self.count:
            return None
        stamps = self._stamps[low:high]
        there: Mask = stamps > 0
        found = int(np.count_nonzero(there))
        if not found:
            return None
        stamps[:] = 0
        self.count -= found
        return there

    def among(self, low: int, high: int) -> Mask | None:
        """Return which of the range are remembered; None for none."""
        if not self.count:
            return None
        there: Mask = self._stamps[low:high] > 0
        return there if there.any() else None

    def trim(self, count: int) -> None:
        """Forget the oldest until `count` are left."""
        while self.count > max(0, count):
            span = self._order[0]
            cut = min(self.count - count, span[1] - span[0])
            stamps = self._stamps[span[1] - cut : span[1]]
            stands = stamps == span[2]
            self.count -= int(np.count_nonzero(stands))
            stamps[stands] = 0
            span[1] -= cut
            if span[0] == span[1]:
                self._order.popleft()

    def mark(self, wanted: Mask) -> None:
        """Mark what must keep an id."""
        wanted |= self._stamps[: len(wanted)] > 0

    def renumber(self, wanted: Mask, new: Numbers, size: int) -> None:
        """Follow a renumbering."""
        stamps = np.zeros(size, dtype=np.int64)
        kept = self._stamps[: len(wanted)][wanted]
        stamps[: len(kept)] = kept
        order: deque[Span] = deque()
        for low, high, stamp in self._order:
            stands = np.flatnonzero(self._stamps[low:high] == stamp) + low
            # From the high end down, one entry for each run of new numbers.
            for run in reversed(np.split(new[stands], np.flatnonzero(np.diff(new[stands]) != 1) + 1)):
                if len(run):
                    order.append([int(run[0]), int(run[-1]) + 1, stamp])
        self._stamps, self._order = stamps, order
