"""Counts requests by key in windows of wall time, and hands them on in numbered batches.

1. `count` adds to an open batch; a request costs one dictionary update.
2. `next_batch` closes the open batch under a number that rises; nothing is lost between two calls.
3. A batch stays at the head until `done`; sent twice under its number, the store counts it once.
4. While the store is away, closed batches of one window are merged into one that was never sent, and what is older
   than `keep_s` is dropped.
5. All batches together hold at most `keys_max` counts: beyond, the oldest that was not sent is dropped, and new keys of
   a window that alone holds so many. What is dropped is counted as dropped.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """Counts of one window: key hash -> requests; `number` rises over the life of a process."""

    window_start_s: int
    number: int
    counts: dict[int, int]


class Rates:
    """One process's counts. window_s: length of a window; keep_s, keys_max: how long and how many counts stay."""

    def __init__(self, window_s: int, keep_s: int, keys_max: int = 1_000_000, *, first_batch: int = 0) -> None:
        """first_batch: where numbers begin; a restarted process of the same name must begin above its last."""
        self._window_s, self._keep_s, self._keys_max = window_s, keep_s, keys_max
        self._window_start_s = 0
        self._open: dict[int, int] = {}
        self._closed: deque[Batch] = deque()
        self._number = first_batch
        self._sent = False
        self.dropped = 0

    def count(self, key_hash: int, now_s: float) -> None:
        """Count one request."""
        start = int(now_s) // self._window_s * self._window_s
        if start != self._window_start_s:
            self._close()
            self._window_start_s = start
        if key_hash in self._open:
            self._open[key_hash] += 1
        elif len(self._open) < self._keys_max:
            self._open[key_hash] = 1
        else:
            self.dropped += 1

    def next_batch(self, now_s: float) -> Batch | None:
        """Return the oldest batch not yet done, None when nothing was counted; the same until `done` is called."""
        self._close()
        while self._closed and self._closed[0].window_start_s < now_s - self._keep_s:
            self.dropped += sum(self._closed.popleft().counts.values())
            self._sent = False
        if not self._closed:
            return None
        self._sent = True
        return self._closed[0]

    def done(self) -> None:
        """Forget the batch that `next_batch` returned: the store has it."""
        self._closed.popleft()
        self._sent = False

    def _close(self) -> None:
        if not self._open:
            return
        counts, self._open = self._open, {}
        # The head may have reached the store although its answer was lost: it must go out again as it was.
        mergeable = len(self._closed) > (1 if self._sent else 0)
        if mergeable and self._closed[-1].window_start_s == self._window_start_s:
            merged = self._closed[-1].counts
            for key_hash, n in counts.items():
                merged[key_hash] = merged.get(key_hash, 0) + n
        else:
            self._number += 1
            self._closed.append(Batch(self._window_start_s, self._number, counts))
        oldest = 1 if self._sent else 0
        while len(self._closed) > oldest + 1 and sum(len(b.counts) for b in self._closed) > self._keys_max:
            self.dropped += sum(self._closed[oldest].counts.values())
            del self._closed[oldest]
