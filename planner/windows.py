"""Reads the windows that services count in, and keeps what it read, so that a cycle reads only what has changed.

1. Windows are looked at from the newest back: at most `windows` of them, and none that would weigh less than
   `planner.rates.LEAST_WEIGHT`.
2. Every batch raises its window's revision. One command a window asks for all of them; a window is read when its
   revision is not the one that was read, however old it is: so counts that come late are taken, and none twice.
3. Of two readings of a window the one with more requests stands. A store that lost counts, or fell back to an old
   replica, has fewer, and those that were lost had been counted. What was read stays until it falls out of 1.

What is kept is 12 bytes a key and window, and so at most 12 bytes a request of the newest 6.7 half-lives: 20 MB at the
default of 250,000. The bound of 1M keys in each of 240 windows, 2.9 GB, needs a half-life of 36M requests.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.rates import LEAST_WEIGHT, KeyRates, Window, half_life_of, rates_from_windows, weight_of
from service.store import Store

# The active set is the mean of so many windows, and is not told when it is smaller than this.
ACTIVE_WINDOWS = 10
LEAST_ACTIVE = 100


class Reading(Protocol):
    """What of the settings matters here."""

    @property
    def rate_window_s(self) -> int:
        """Return the length of a window."""

    @property
    def windows(self) -> int:
        """Return how many of the newest may be read."""

    @property
    def half_life_events(self) -> int:
        """Return after how many requests one counts half; 0: by the number of slots."""

    @property
    def endpoint(self) -> Sequence[str]:
        """Return the endpoints."""

    @property
    def slots_per_endpoint(self) -> int:
        """Return W."""


@dataclass(frozen=True, slots=True)
class WindowsRead:
    """What rates were made of.

    windows: how many that hold a request; events: the requests in them.  sha256: digest of all that decides the rates.
    late: windows that changed although they had been read after their end.  newest_s: unix s until when was counted; 0:
    nobody did.
    """

    windows: int
    events: int
    sha256: str
    late: int
    newest_s: int


def window_starts(now_s: float, window_s: int, count: int) -> Sequence[int]:
    """Return the starts of the newest `count` windows, the open one among them, oldest first."""
    newest = int(now_s) // window_s * window_s
    return range(newest - (count - 1) * window_s, newest + 1, window_s)


class Windows:
    """The windows of one pool as one planner knows them."""

    def __init__(self, store: Store, settings: Reading) -> None:
        """Nothing is read before `read`."""
        self._store, self._settings = store, settings
        self._kept: dict[int, tuple[int, Window]] = {}
        self._read_until_s = 0.0

    @property
    def half_life_events(self) -> int:
        """Return after how many requests one counts half."""
        s = self._settings
        return s.half_life_events or half_life_of(len(s.endpoint) * s.slots_per_endpoint)

    async def read(self, now_s: float) -> tuple[KeyRates, WindowsRead]:
        """Return the rates at `now_s` (unix s, as windows are named); raise StoreUnavailable, then nothing is changed.

        The sums are made in a thread.
        """
        length_s, half_life = self._settings.rate_window_s, self.half_life_events
        starts = window_starts(now_s, length_s, self._settings.windows)
        revisions = await self._store.read_revisions(starts)
        kept: dict[int, tuple[int, Window]] = {}
        late = events = 0
        for start in reversed(starts):
            before = self._kept.get(start)
            if start in revisions and (before is None or before[0] != revisions[start]):
                late += start + length_s <= self._read_until_s
                window = await self._read_one(start)
                if before is not None and before[1].requests > window.requests:
                    window = before[1]
                kept[start] = revisions[start], window
            elif before is not None:
                kept[start] = before
            else:
                continue
            events += kept[start][1].requests
            if weight_of(events, half_life) < LEAST_WEIGHT:
                break
        self._kept, self._read_until_s = kept, now_s
        windows = [window for _, window in kept.values()]
        rates = await asyncio.to_thread(rates_from_windows, windows, now_s, half_life)
        return rates, self._told(windows, now_s, late)

    def active_keys(self, now_s: float) -> float | None:
        """Return how many different keys a window asks for, the mean of the newest whole ones that were read.

        None: it cannot be said yet, or they are so few that chance alone would double them.
        """
        length_s = self._settings.rate_window_s
        whole = [window for start, (_, window) in self._kept.items() if start + length_s <= now_s][:ACTIVE_WINDOWS]
        keys = sum(len(window.key_hashes) for window in whole)
        return keys / len(whole) if keys >= LEAST_ACTIVE * len(whole) > 0 else None

    async def _read_one(self, start: int) -> Window:
        return Window.of(start, self._settings.rate_window_s, await self._store.read_window(start))

    def _told(self, windows: Sequence[Window], now_s: float, late: int) -> WindowsRead:
        digest = hashlib.sha256(str(self.half_life_events).encode())
        for window in windows:
            digest.update(window.sha256)
            digest.update(repr(window.covered_by(now_s)).encode())
        return WindowsRead(
            windows=sum(window.requests > 0 for window in windows),
            events=sum(window.requests for window in windows),
            sha256=digest.hexdigest(),
            late=late,
            newest_s=int(max((min(window.until_s, now_s) for window in windows), default=0)),
        )
