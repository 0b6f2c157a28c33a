"""Orders free KV-cache blocks for eviction: least recently freed first, the order of vLLM's own free-block queue.

1. Every free block is in the queue, hashed (still hittable) or not; every block in the queue may be evicted.
2. A freed block with a hash goes to the tail; the caller frees a request's blocks tail first, so a prefix outlives
   what hangs on it. A freed block without a hash can never be hit again and goes to the head.
3. A hit takes the block out (it is in use); eviction takes the head.
4. A block that loses its hash in place stays there, as it does in vLLM; a copy is a block like any other. There are no
   orphans to look for: a prefix outlives what hangs on it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic

from engine_patch.chains import UNHASHED, B


class LruQueue(Generic[B]):
    """The free blocks in eviction order; all operations are O(1) per block (about 0.1 µs)."""

    __slots__ = ("_contents", "_order")

    def __init__(self, blocks: Iterable[B] = ()) -> None:
        # block -> the content before it in its chain, or None
        self._order: OrderedDict[B, Any] = OrderedDict.fromkeys(blocks, UNHASHED)
        self._contents: dict[B, Hashable] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order

    def __iter__(self) -> Iterator[B]:
        return iter(self._order)

    def append(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block that can still be hit: evicted after all that are here."""
        assert block not in self._order, f"block {block} is free already"
        if content is not None:
            self._contents[block] = content
        self._order[block] = parent

    def append_chain(
        self, blocks: Sequence[B], contents: Sequence[Hashable] | None = None, parent: Hashable | None = None
    ) -> None:
        """Add a request's freed blocks, given in prompt order, tail first; `parent` is the content before blocks[0]."""
        if contents is not None:
            self._contents.update(zip(blocks, contents, strict=True))
        names: Sequence[Hashable] = blocks if contents is None else contents
        order = self._order
        for at in range(len(blocks) - 1, 0, -1):
            order[blocks[at]] = names[at - 1]
        if blocks:
            order[blocks[0]] = parent

    def append_copy(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block whose content an older block holds too; vLLM makes no difference."""
        self.append(block, content, parent)

    def prepend(self, block: B) -> None:
        """Add a freed block that cannot be hit: evicted before all that are here."""
        assert block not in self._order, f"block {block} is free already"
        self._contents.pop(block, None)
        self._order[block] = UNHASHED
        self._order.move_to_end(block, last=False)

    def remove(self, block: B) -> None:
        """Take out a block that was hit; KeyError when it is not free."""
        del self._order[block]

    def hit(self, block: B) -> None:
        """Learn of a hit on a block, free or in use; the order does not depend on it."""

    def take(self, blocks: Iterable[B]) -> int:
        """Take out those blocks of a request's hits that are free; return how many were."""
        order = self._order
        free = len(order)
        for block in blocks:
            if block in order:
                del order[block]
        return free - len(order)

    def discard_all(self, blocks: Sequence[B]) -> None:
        """Take out those of the blocks that are free."""
        order = self._order
        if not order.keys().isdisjoint(blocks):
            for block in blocks:
                if block in order:
                    del order[block]

    def prefix(self, blocks: Iterable[B]) -> int:
        """Return how many blocks are free before the first that is not."""
        order = self._order
        count = 0
        for block in blocks:
            if block not in order:
                break
            count += 1
        return count

    def evict(self) -> B:
        """Take out and return the block that is to be overwritten next; KeyError when none is free."""
        block = self._order.popitem(last=False)[0]
        self._contents.pop(block, None)
        return block

    def evict_many(self, count: int) -> list[B]:
        """Evict `count` blocks, in order; KeyError, and nothing changed, when fewer are free."""
        if count > len(self._order):
            raise KeyError(f"{count} blocks are asked for, {len(self._order)} are free")
        pop = self._order.popitem
        evicted = [pop(False)[0] for _ in range(count)]
        if self._contents:
            for block in evicted:
                self._contents.pop(block, None)
        return evicted

    def forget(self, block: B) -> None:
        """Learn that a block lost its hash in place; it keeps its place."""
        self._contents.pop(block, None)
        if block in self._order:
            self._order[block] = UNHASHED

    def reset(self) -> None:
        """Learn that all contents are gone: the blocks stay in their order."""
        self._order = OrderedDict.fromkeys(self._order, UNHASHED)
        self._contents.clear()

    def adopt(self, entries: Iterable[tuple[B, Hashable | None, Hashable | None]]) -> None:
        """Fill an empty queue with the entries of another, in their order."""
        for block, content, parent in entries:
            self._order[block] = parent
            if content is not None:
                self._contents[block] = content

    def entries(self) -> Iterator[tuple[B, Hashable | None, Hashable | None]]:
        """Go through (block, content, parent) from the head; content None: the block itself; parent may be UNHASHED."""
        for block, parent in self._order.items():
            yield block, self._contents.get(block), parent
