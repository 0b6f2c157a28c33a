"""Which blocks requests use: the same under every eviction policy, so counted once for all shadows.

A request pins its chain from the first block on, so what others pin of it is a beginning.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine_patch.chain_ids import Mask, Range


class Pins:
    """How many requests use each block; ids of chain_ids.py."""

    __slots__ = ("counts",)

    def __init__(self, size: int) -> None:
        self.counts: npt.NDArray[np.int32] = np.zeros(size, dtype=np.int32)

    def add(self, ranges: Sequence[Range]) -> None:
        """Count one user more."""
        for low, high in ranges:
            self.counts[low:high] += 1

    def remove(self, ranges: Sequence[Range]) -> None:
        """Count one user less."""
        for low, high in ranges:
            self.counts[low:high] -= 1

    def unused(self, ranges: Sequence[Range]) -> tuple[int, list[Range]]:
        """Return how many blocks of a chain are in use, which are its first ones, and the others."""
        used = 0
        for at, (low, high) in enumerate(ranges):
            pinned = int(np.count_nonzero(self.counts[low:high]))
            used += pinned
            if pinned < high - low:
                return used, [(low + pinned, high), *ranges[at + 1 :]]
        return used, []

    def renumber(self, wanted: Mask, size: int) -> None:
        """Follow a renumbering of the ids."""
        counts = np.zeros(size, dtype=np.int32)
        kept = self.counts[: len(wanted)][wanted]
        counts[: len(kept)] = kept
        self.counts = counts
