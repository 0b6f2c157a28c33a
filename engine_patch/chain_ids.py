"""Small consecutive numbers for chained block hashes, so that a prompt of hundreds of blocks is a few ranges.

1. A chain that is new gets consecutive ids; where it leaves a known chain, a new range begins. Only the first hash of a
   range is looked up by hash, the rest are compared with what stands there: a nanosecond a block.
2. An id is the child of the id before it unless it starts a range; the parents of such starts are kept.
3. Ids are never given twice until `compact`, which renumbers those still wanted and forgets the rest. An id whose
   parent is forgotten starts a range without parent.
4. `nameless` gives an id that no chain finds: that of a copy (copies.py).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_patch.events import Hashes

Range = tuple[int, int]
Mask = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
NOBODY = 2**64 - 1  # in the place of the hash of a nameless id


class ChainIds:
    """hash of a block <-> id; chains are given whole, from their first block on."""

    __slots__ = ("_starts", "_with_branch", "branches", "is_start", "names", "used")

    def __init__(self, size: int) -> None:
        self.names: Hashes = np.zeros(size, dtype=np.uint64)
        self.is_start: Mask = np.zeros(size, dtype=np.bool_)
        self.used = 0
        """Ids 0 … used - 1 are given."""
        self.branches: dict[int, list[int]] = {}
        """id -> the starts of the ranges whose parent it is."""
        self._with_branch: Mask = np.zeros(size, dtype=np.bool_)
        self._starts: dict[int, int] = {}

    @property
    def size(self) -> int:
        """How many ids there is room for."""
        return len(self.names)

    def ranges(self, hashes: Hashes, before: int = -1) -> list[Range]:
        """Return the ids of a chain as ranges; `before`: id of the block before hashes[0], or -1. New hashes get ids.

        There must be room for len(hashes) more.
        """
        made: list[Range] = []
        names, at, count = self.names, 0, len(hashes)
        while at < count:
            first = int(hashes[at])
            start = before + 1
            if not (0 < start < self.used and int(names[start]) == first):
                known = self._starts.get(first)
                if known is None:
                    start = self._add(hashes[at:], first, before)
                    length = count - at
                else:
                    start = known
                    length = self._alike(start, hashes[at:])
            else:
                length = self._alike(start, hashes[at:])
            if made and made[-1][1] == start:
                made[-1] = (made[-1][0], start + length)
            else:
                made.append((start, start + length))
            at += length
            before = start + length - 1
        return made

    def nameless(self) -> int:
        """Return a new id that has no hash, parent or child. There must be room."""
        made = self.used
        self.used += 1
        self.names[made] = NOBODY
        self.is_start[made] = True
        return made

    def children(self, low: int, high: int) -> list[int]:
        """Return the children of low … high - 1 that are outside of it; cheap when there are none."""
        found = [high] if high < self.used and not self.is_start[high] else []
        marked = self._with_branch[low:high]
        if marked.any():
            for parent in (np.flatnonzero(marked) + low).tolist():
                found += self.branches[parent]
        return found

    def compact(self, wanted: Mask, renumbered: Numbers, size: int) -> None:
        """Keep the wanted ids, under new numbers (in the old order), and make room for `size` in all."""
        old = np.flatnonzero(wanted)
        starts = self.is_start[old]
        starts[0:1] = True
        starts[1:] |= np.diff(old) != 1
        fresh = ChainIds(size)
        fresh.used = len(old)
        fresh.names[: len(old)] = self.names[old]
        fresh.is_start[: len(old)] = starts
        at = np.flatnonzero(starts)
        fresh._starts = dict(zip(fresh.names[at].tolist(), at.tolist(), strict=True))
        for parent, children in self.branches.items():
            if wanted[parent]:
                kept = [int(renumbered[child]) for child in children if wanted[child]]
                if kept:
                    new = int(renumbered[parent])
                    fresh.branches[new] = kept
                    fresh._with_branch[new] = True
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def _alike(self, start: int, hashes: Hashes) -> int:
        count = min(len(hashes), self.used - start)
        same = self.names[start : start + count] == hashes[:count]
        return count if same.all() else int(same.argmin())

    def _add(self, hashes: Hashes, first: int, before: int) -> int:
        start = self.used
        self.used += len(hashes)
        self.names[start : self.used] = hashes
        if before < 0 or before != start - 1:
            self.is_start[start] = True
            self._starts[first] = start
            if before >= 0:
                self.branches.setdefault(before, []).append(start)
                self._with_branch[before] = True
        return start


def length(ranges: Sequence[Range]) -> int:
    """Return how many blocks the ranges have."""
    return sum([high - low for low, high in ranges])


def beginning(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return the ranges of the first `count` blocks."""
    kept: list[Range] = []
    for low, high in ranges:
        if count <= 0:
            break
        kept.append((low, min(high, low + count)))
        count -= high - low
    return kept


def behind(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return the ranges behind the first `count` blocks."""
    rest: list[Range] = []
    for low, high in ranges:
        if count < high - low:
            rest.append((low + max(0, count), high))
        count -= high - low
    return rest


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Return the ranges with those that follow on each other made one."""
    made: list[Range] = []
    for low, high in ranges:
        if made and made[-1][1] == low:
            made[-1] = (made[-1][0], high)
        else:
            made.append((low, high))
    return made
