"""What an eviction policy is to the rest: a queue of the free KV-cache blocks of one pool, and the policies by name.

1. A block is any hashable: the id of a physical block, or the hash of its content where nobody cares which block holds
   it. What it holds is its content (a chained hash: equal content means equal prefix); by default the block itself.
2. The queue holds the blocks that no request uses. Every one of them can be evicted, whatever the policy thinks of it.
3. A request's hits are counted (`hit`) whether the block was free or in use, then the free ones taken out (`remove`);
   when the request ends, its blocks come back tail first (`append`), those without a hash by `prepend`.
4. Counts and segments of a block are kept while it is in use and end when it is evicted.
5. `elsewhere(block, content)`, given at construction, tells whether another block than `block` holds `content`, in use
   or free. It is asked at an eviction, when it matters, before the caller has made the evicted block unfindable.
   Without it every content is taken to be in one block only.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Protocol

from engine_patch.arc import ArcQueue
from engine_patch.chains import UNHASHED, B, ChainQueue
from engine_patch.lru import LruQueue
from engine_patch.s3fifo import S3FifoQueue

Elsewhere = Callable[[B, Hashable], bool]


class EvictionQueue(Protocol[B]):
    """The free blocks in eviction order."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def __iter__(self) -> Iterator[B]:
        """Go through the blocks from the eviction end; near the order of eviction where a policy has second chances."""

    def append(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block that can still be hit; `parent` is the content before it in its chain, None for a first."""

    def append_copy(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block whose content an older block holds too: it cannot be hit before that one is gone."""

    def append_chain(
        self, blocks: Sequence[B], contents: Sequence[Hashable] | None = None, parent: Hashable | None = None
    ) -> None:
        """Add a request's freed blocks, given in prompt order, tail first; `parent` is the content before blocks[0]."""

    def prepend(self, block: B) -> None:
        """Add a freed block that cannot be hit: evicted before all that are here."""

    def remove(self, block: B) -> None:
        """Take out a free block that goes into use; KeyError when it is not free."""

    def hit(self, block: B) -> None:
        """Count a hit on a block, free or in use; at most once a request, before `remove`."""

    def take(self, blocks: Iterable[B]) -> int:
        """Count one request's hits and take out those blocks that are free; return how many were."""

    def discard_all(self, blocks: Sequence[B]) -> None:
        """Take out those of the blocks that are free, without a hit."""

    def prefix(self, blocks: Iterable[B]) -> int:
        """Return how many blocks are free before the first that is not; changes nothing."""

    def evict(self) -> B:
        """Take out and return the block that is to be overwritten next; KeyError when none is free."""

    def evict_many(self, count: int) -> list[B]:
        """Evict `count` blocks, in order; KeyError, and nothing changed, when fewer are free."""

    def forget(self, block: B) -> None:
        """Learn that a block lost its hash in place: it cannot be hit any more and leaves no ghost."""

    def reset(self) -> None:
        """Learn that all contents are gone: the blocks stay, in eviction order, and nothing else is remembered."""

    def entries(self) -> Iterator[tuple[B, Hashable | None, Hashable | None]]:
        """Go through (block, content or None for the block itself, parent, or UNHASHED) from the eviction end."""


# name -> (share of the free blocks that small may hold before it gives the victim, in percent; hits that lead to main)
S3FIFO = {
    "s3fifo": (10, 1),
    "s3fifo-25": (25, 1),
    "s3fifo-t2": (10, 2),
    "s3fifo-paper-free": (0, 1),
}
POLICIES: tuple[str, ...] = ("lru", *S3FIFO, "arc")


def new_queue(
    policy: str, num_blocks: int, blocks: Iterable[B] = (), elsewhere: "Elsewhere[B] | None" = None
) -> EvictionQueue[B]:
    """Return an empty queue of a policy, or one that holds `blocks` without contents (a fresh pool), first one first.

    num_blocks: size of the whole pool, which bounds what is remembered of evicted blocks.
    Raises ValueError, naming the policies, for a name that is none.
    """
    if num_blocks < 1:
        raise ValueError(f"a pool has 1 block or more, not {num_blocks}")
    if policy == "lru":
        return LruQueue(blocks)
    if policy == "arc":
        return ArcQueue(num_blocks, blocks, elsewhere)
    if policy in S3FIFO:
        small_percent, threshold = S3FIFO[policy]
        return S3FifoQueue(num_blocks, blocks, elsewhere, small_percent=small_percent, threshold=threshold)
    raise ValueError(f"no eviction policy is called {policy!r}; there are {', '.join(POLICIES)}")


def converted(
    queue: EvictionQueue[B], policy: str, num_blocks: int, elsewhere: "Elsewhere[B] | None" = None
) -> EvictionQueue[B]:
    """Return a queue of another policy with the same blocks; `queue` is only read. O(n), about 0.1 to 0.3 µs a block.

    1. From LRU: unhashed blocks to the front, the others to small (ARC: T1), both in their order; nobody has counts.
    2. To LRU: front, small, main, each in its order.
    3. Else the parts stay what they are, T1 = small and T2 = main, and blocks in use stay blocks of main; between two
       kinds of S3-FIFO counts stay too.
    4. Ghosts are forgotten, ARC's p starts at 0.
    """
    fresh = new_queue(policy, num_blocks, (), elsewhere)
    if isinstance(queue, ChainQueue) and isinstance(fresh, ChainQueue):
        fresh.adopt(queue)
        return fresh
    if isinstance(fresh, LruQueue):
        fresh.adopt(queue.entries())
        return fresh
    unhashed: list[B] = []
    for block, content, parent in queue.entries():
        if parent is not UNHASHED:
            fresh.append(block, content, parent)
        else:
            unhashed.append(block)
    for block in reversed(unhashed):
        fresh.prepend(block)
    return fresh
