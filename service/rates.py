"""Counts requests by key in windows of wall time, and hands them on in numbered batches.

1. `count` adds to an open batch; a request costs one dictionary update.
2. `next_batch` closes the open batch under a number that rises; nothing is lost between two calls.
3. A batch stays at the head until `done`; sent twice under its number, the store counts it once.
4. While the store is away, closed batches of one window are merged into one that was never sent, and what is older
   than `keep_s` is dropped.
5. Batches also tell from when until when this process counted, with or without requests: only so can a reader tell
   silence from nobody there. After a gap of more than `GAP_S` the process stood still or the clock was set; nothing is
   said of such a time.
6. Up to `keys_max` keys of a window are counted exactly. Further ones go through a sketch (`service.sketch`), and one
   whose estimate leaves the noise and reaches `PROMOTE_AT` gets that as its count and is exact from there on; those
   are at most a quarter of `keys_max` more. All batches together hold about as much: beyond, the oldest that was not
   sent is dropped. What is dropped, or stayed in the sketch, is counted as dropped.
"""

import math
from collections import deque
from dataclasses import dataclass

from service.sketch import Sketch

# Two ways to be silent for this long: the store's time limits and the longest `rate_flush_s` together stay below it.
GAP_S = 120.0
PROMOTE_AT = 4
# 4 MB; a quarter of `keys_max` below that.
SKETCH_WIDTH_MAX = 2**18


@dataclass(frozen=True, slots=True)
class Batch:
    """Counts of one window: key hash -> requests; `number` rises over the life of a process.

    span: unix s from when until when the process counted, inside the window; None: nothing new is told.
    """

    window_start_s: int
    number: int
    counts: dict[int, int]
    span: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Counted:
    """What all processes counted in one window: key hash -> requests, at least 0.

    spans: of each life of a process, unix s from when until when it counted; None: it did not say.
    """

    counts: dict[int, int]
    spans: tuple[tuple[float, float] | None, ...] = ()


class Rates:
    """One process's counts. window_s: length of a window; keep_s, keys_max: how long and how many counts stay.

    dropped, sketched: requests whose count never went out, and those that went through the sketch.
    """

    def __init__(
        self, window_s: int, keep_s: int, keys_max: int = 1_000_000, *, first_batch: int = 0, began_s: float = -math.inf
    ) -> None:
        """first_batch: where numbers begin.  began_s: since when this process counts; by default since the first
        call."""
        self._window_s, self._keep_s, self._keys_max = window_s, keep_s, keys_max
        self._window_start_s = 0
        self._open: dict[int, int] = {}
        self._closed: deque[Batch] = deque()
        self._number = first_batch
        self._sent = False
        self._told_s = began_s
        self._room = keys_max
        self._sketch: Sketch | None = None
        self._promoted: set[int] = set()
        self._credited = 0
        self.dropped = self.sketched = 0

    def count(self, key_hash: int, now_s: float) -> None:
        """Count one request."""
        start = int(now_s) // self._window_s * self._window_s
        if start != self._window_start_s:
            self._turn(start, now_s)
        if key_hash in self._open:
            self._open[key_hash] += 1
        elif self._room:
            self._room -= 1
            self._open[key_hash] = 1
        else:
            self._overflow(key_hash)

    def next_batch(self, now_s: float) -> Batch | None:
        """Return the oldest batch not yet done, None when nothing is new; the same until `done` is called.

        Call it with one `now_s` until it returns None: a later one is news by itself.
        """
        start = int(now_s) // self._window_s * self._window_s
        if start != self._window_start_s:
            self._turn(start, now_s)
        else:
            self._close(now_s)
        while self._closed and self._closed[0].window_start_s < now_s - self._keep_s:
            self._forget(0)
            self._sent = False
        if not self._closed:
            return None
        self._sent = True
        return self._closed[0]

    def done(self) -> None:
        """Forget the batch that `next_batch` returned: the store has it."""
        self._closed.popleft()
        self._sent = False

    def _overflow(self, key_hash: int) -> None:
        if key_hash in self._promoted:
            self._open[key_hash] = 1
            return
        if self._sketch is None:
            self._sketch = Sketch(min(SKETCH_WIDTH_MAX, 1 << max(4, (self._keys_max // 4).bit_length() - 1)))
        self.sketched += 1
        estimate = self._sketch.add(key_hash)
        if estimate >= PROMOTE_AT and estimate > self._sketch.noise and 4 * len(self._promoted) < self._keys_max:
            self._promoted.add(key_hash)
            self._open[key_hash] = estimate
            self._credited += estimate

    def _turn(self, start_s: int, now_s: float) -> None:
        """Go on to another window: the next one, or an earlier one when the clock was set back."""
        self._close(now_s)
        self._window_start_s, self._room = start_s, self._keys_max
        if self._sketch is not None:
            self.dropped += max(0, self._sketch.added - self._credited)
            self._sketch, self._promoted, self._credited = None, set(), 0

    def _close(self, now_s: float) -> None:
        if self._open:
            counts, self._open = self._open, {}
            self._append(self._window_start_s, counts, None)
        since, self._told_s = self._told_s, now_s
        if since < now_s <= since + GAP_S:
            start = int(since) // self._window_s * self._window_s
            while start < now_s:
                self._append(start, {}, (max(since, start), min(now_s, start + self._window_s)))
                start += self._window_s
        oldest = 1 if self._sent else 0
        while len(self._closed) > oldest + 1 and (
            sum(1 + len(b.counts) for b in self._closed) > self._keys_max
            or self._closed[oldest].window_start_s < now_s - self._keep_s
        ):
            self._forget(oldest)

    def _append(self, start_s: int, counts: dict[int, int], span: tuple[float, float] | None) -> None:
        # The head may have reached the store although its answer was lost: it must go out again as it was.
        mergeable = len(self._closed) > (1 if self._sent else 0)
        if not mergeable or self._closed[-1].window_start_s != start_s:
            self._number += 1
            self._closed.append(Batch(start_s, self._number, counts, span))
            return
        last = self._closed[-1]
        merged = last.counts or counts
        if merged is not counts:
            for key_hash, n in counts.items():
                merged[key_hash] = merged.get(key_hash, 0) + n
        self._closed[-1] = Batch(start_s, last.number, merged, _union(last.span, span))

    def _forget(self, index: int) -> None:
        self.dropped += sum(self._closed[index].counts.values())
        del self._closed[index]


def _union(one: tuple[float, float] | None, other: tuple[float, float] | None) -> tuple[float, float] | None:
    if one is None or other is None:
        return one or other
    return min(one[0], other[0]), max(one[1], other[1])
