"""What a policy remembers of evicted contents, oldest first: a set, and a log of the order in which they came.

1. Contents come in runs and go in runs, by the set's own bulk operations; an OrderedDict takes twice the time, since
   each of its entries is cold memory several times over.
2. A content that was found again leaves the set at once; its place in the log is counted as stale, and skipped when its
   turn comes. When more than half of the log is stale it is written anew, so the log follows the set's size: O(1) for
   each content, amortised.
3. Contents must be new to the ghost when they are added: a block that comes back takes its content out (`remove`). One
   that is not counts once, and is forgotten in its first place's turn or earlier.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

C = TypeVar("C")
RUN = 64  # contents up to which runs in the log are put together
STALE = 256  # stale places that are never too many


class Ghost(Generic[C]):
    """Remembered contents, oldest first; `members` is for look-ups only."""

    __slots__ = ("_log", "_num_stale", "_stale", "members")

    def __init__(self) -> None:
        self.members: set[C] = set()
        self._log: deque[list[C]] = deque()
        self._stale: dict[C, int] = {}  # content -> how many of its places in the log do not count, the first ones
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, content: object) -> bool:
        return content in self.members

    def __iter__(self) -> Iterator[C]:
        stale = self._stale.copy()
        for run in self._log:
            for content in run:
                if content in stale:
                    _count_down(stale, content)
                else:
                    yield content

    def add(self, contents: list[C]) -> None:
        """Remember contents, the last one as the youngest; the list is the ghost's from now on."""
        self.members.update(contents)
        log = self._log
        if len(contents) < RUN and log and len(log[-1]) < RUN:
            log[-1] += contents
        else:
            log.append(contents)

    def remove(self, content: C) -> None:
        """Forget a content that is remembered."""
        self.members.remove(content)
        self._stale[content] = self._stale.get(content, 0) + 1
        self._num_stale += 1
        if self._num_stale > len(self.members) + STALE:
            self._rewrite()

    def trim(self, count: int) -> None:
        """Forget the oldest until `count` (0 or more) are left."""
        members, log, stale = self.members, self._log, self._stale
        while (excess := len(members) - count) > 0:
            run = log[0]
            if stale and not stale.keys().isdisjoint(run):
                self._trim_run(run, excess)
            elif len(run) <= excess:
                members.difference_update(run)
                log.popleft()
            else:
                members.difference_update(run[:excess])
                del run[:excess]

    def clear(self) -> None:
        """Forget everything."""
        self.members, self._log, self._stale, self._num_stale = set(), deque(), {}, 0

    def _trim_run(self, run: list[C], excess: int) -> None:
        """Forget the oldest run, or as much of it as `excess` contents that count."""
        members, stale = self.members, self._stale
        for at, content in enumerate(run):
            if content in stale:
                _count_down(stale, content)
                self._num_stale -= 1
            elif excess:
                members.discard(content)
                excess -= 1
            else:
                del run[:at]
                return
        self._log.popleft()

    def _rewrite(self) -> None:
        """Leave what is stale out of the log; about 0.05 µs for each place."""
        stale, log = self._stale, self._log
        for _ in range(len(log)):
            run = log.popleft()
            kept = []
            for content in run:
                if content in stale:
                    _count_down(stale, content)
                else:
                    kept.append(content)
            if kept:
                log.append(kept)
        self._num_stale = 0


def _count_down(stale: dict[C, int], content: C) -> None:
    count = stale[content]
    if count == 1:
        del stale[content]
    else:
        stale[content] = count - 1
