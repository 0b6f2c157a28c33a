"""LRU and S3-FIFO as libcachesim 0.3 runs them, request for request: what our own queues are compared with.

A cache of `capacity` unit objects; each request names one id, is a hit or not, and is inserted when it is not.
LRU: a hit moves the id to the young end; a miss in a full cache evicts the old end first.
S3-FIFO (threshold 2; small = ⌊0.1 capacity⌋, main = capacity - small, ghost = ⌊0.9 capacity⌋):
1. Found in small or main: freq + 1, without bound. Else the id is taken out of the ghost if it is there.
2. Miss: while small and main hold `capacity`, evict. Then to main if the id was in the ghost, or if nothing was ever
   evicted and small is full; else to small. freq := 0.
3. Evict: from main if it holds more than its size or small is empty; else from small. Small: heads with freq >= 2 go to
   main's tail with freq 0, until one has less; that one goes to the ghost, whose oldest leaves first when it is full.
   Main: heads with freq >= 1 go to the tail with min(freq, 3) - 1, until one has 0; that one is gone.

Rule 2's second case, the missing bound in rule 1 and the sizes are in no paper; without them hits differ. libcachesim
is a test dependency only (GPL); nothing of it is used here. Pure Python, 0.1 to 0.3 µs a request.
"""

from collections import OrderedDict
from collections.abc import Iterable

POLICIES = ("lru", "s3fifo")
THRESHOLD = 2
MAX_FREQ = 3
MIN_S3FIFO_CAPACITY = 20  # libcachesim inserts nothing into a small queue of one object


def hits(policy: str, ids: Iterable[int], capacity: int) -> bytearray:
    """Return 1 for each request that hits and 0 for each that does not; ValueError for what libcachesim cannot run."""
    if capacity < 1:
        raise ValueError(f"a cache holds 1 block or more, not {capacity}")
    if policy == "lru":
        return _lru(ids, capacity)
    if policy == "s3fifo":
        if capacity < MIN_S3FIFO_CAPACITY:
            raise ValueError(f"libcachesim's S3-FIFO needs a capacity of {MIN_S3FIFO_CAPACITY} or more, not {capacity}")
        return _s3fifo(ids, capacity)
    raise ValueError(f"the oracle knows {' and '.join(POLICIES)}, not {policy!r}")


def _lru(ids: Iterable[int], capacity: int) -> bytearray:
    order: OrderedDict[int, None] = OrderedDict()
    found = bytearray()
    for name in ids:
        if name in order:
            order.move_to_end(name)
            found.append(1)
        else:
            if len(order) >= capacity:
                order.popitem(last=False)
            order[name] = None
            found.append(0)
    return found


def _s3fifo(ids: Iterable[int], capacity: int) -> bytearray:
    # id -> freq, oldest first
    small: OrderedDict[int, int] = OrderedDict()
    main: OrderedDict[int, int] = OrderedDict()
    ghost: OrderedDict[int, None] = OrderedDict()
    small_size, ghost_size = int(capacity * 0.1), int(capacity * 0.9)
    main_size = capacity - small_size
    evicting = False
    found = bytearray()
    for name in ids:
        if name in small:
            small[name] += 1
            found.append(1)
            continue
        if name in main:
            main[name] += 1
            found.append(1)
            continue
        found.append(0)
        returning = name in ghost
        if returning:
            del ghost[name]
        while len(small) + len(main) >= capacity:
            evicting = True
            if len(main) > main_size or not small:
                _evict_main(main)
            elif (victim := _evict_small(small, main)) is not None:
                if len(ghost) >= ghost_size:
                    ghost.popitem(last=False)
                ghost[victim] = None
        if returning or (not evicting and len(small) >= small_size):
            main[name] = 0
        else:
            small[name] = 0
    return found


def _evict_small(small: OrderedDict[int, int], main: OrderedDict[int, int]) -> int | None:
    """Drop the oldest that was not hit often enough; None when small ran empty before one was found."""
    while small:
        name, freq = small.popitem(last=False)
        if freq < THRESHOLD:
            return name
        main[name] = 0
    return None


def _evict_main(main: OrderedDict[int, int]) -> None:
    while True:
        name, freq = main.popitem(last=False)
        if freq == 0:
            return
        main[name] = min(freq, MAX_FREQ) - 1
