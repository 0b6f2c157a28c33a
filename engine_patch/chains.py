"""What S3-FIFO and ARC share: two segments in one queue, blocks that cannot be hit, and orphans of evicted parents.

1. Eviction order by part: front (unhashed blocks, then orphans and copies), then small and main as the policy says.
   ARC's T1 is small here, its T2 main. What is evicted from the front is remembered in no ghost.
2. An unhashed block is put before all others. Blocks of a fresh pool are unhashed.
3. A hit is a contiguous prefix, so a block whose parent's content is in no block cannot be reached. When a block is
   evicted, wherever from, and its content is not elsewhere, its free descendants become orphans: they leave small and
   main for the front's end, in preorder, siblings in the order in which they were linked. Counts and segment end.
   A descendant in use is passed over, and what hangs on it: whoever uses it uses its parents.
4. An orphan can become reachable again, when its parent is computed anew; until it is hit it stays an orphan.
5. A copy, a freed block whose content an older block holds too, cannot be hit before the older one is gone: whoever
   knows that calls `append_copy`, and it goes to the front's end. Counts and segment end.
6. Links are by content, so a child outlives the eviction of one of two copies of its parent. They are made at `append`
   and end at the child's or the parent's eviction: O(1) a block, amortised.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from math import inf
from typing import Any, Final, Generic, TypeVar

from engine_patch.ghost import Ghost

B = TypeVar("B", bound=Hashable)
MAX_FREQ: Final = 3
MAIN: Final = MAX_FREQ + 1  # in a block's state: added to its counted hits when it belongs to main
UNHASHED: Final = object()  # stands where the parent of a block stands when the block cannot be hit


class ChainQueue(Generic[B]):
    """Free blocks in three parts; a policy adds `append`, `evict_many` and what it remembers."""

    __slots__ = ("_contents", "_elsewhere", "_front", "_kids", "_main", "_small", "_state")

    def __init__(self, blocks: Iterable[B], elsewhere: Callable[[B, Hashable], bool] | None) -> None:
        self._front: OrderedDict[B, Any] = OrderedDict.fromkeys(blocks, UNHASHED)
        # block -> its parent's content or None
        self._small: OrderedDict[B, Any] = OrderedDict()
        self._main: OrderedDict[B, Any] = OrderedDict()
        # Only for blocks that were given a content of their own.
        self._contents: dict[B, Hashable] = {}
        # content -> its child, or a dict of several in order of linking; entries are checked when used
        self._kids: dict[Hashable, Any] = {}
        # Only for blocks with a hit or of main: see MAIN.
        self._state: dict[B, int] = {}
        self._elsewhere = elsewhere

    def __len__(self) -> int:
        return len(self._front) + len(self._small) + len(self._main)

    def __contains__(self, block: object) -> bool:
        return block in self._small or block in self._main or block in self._front

    def __iter__(self) -> Iterator[B]:
        yield from self._front
        yield from self._small
        yield from self._main

    def prepend(self, block: B) -> None:
        """Add a freed block that cannot be hit: evicted before all that are here."""
        assert block not in self, f"block {block!r} is free already"
        self._drop_state(block)
        self._front[block] = UNHASHED
        self._front.move_to_end(block, last=False)

    def append_copy(self, block: B, content: Hashable | None = None, parent: Hashable | None = None) -> None:
        """Add a freed block whose content an older block holds too, behind the unhashed blocks and the orphans."""
        assert block not in self, f"block {block!r} is free already"
        self._drop_state(block)
        if content is not None:
            self._contents[block] = content
        self._front[block] = parent

    def remove(self, block: B) -> None:
        """Take out a block that was hit; KeyError when it is not free."""
        if block in self._small:
            del self._small[block]
        elif block in self._main:
            del self._main[block]
        else:
            del self._front[block]

    def discard_all(self, blocks: Sequence[B]) -> None:
        """Take out those of the blocks that are free, no hit counted."""
        for part in (self._front, self._small, self._main):
            if part and not part.keys().isdisjoint(blocks):
                for block in blocks:
                    if block in part:
                        del part[block]

    def prefix(self, blocks: Iterable[B]) -> int:
        """Return how many blocks are free before the first that is not."""
        small, main, front = self._small, self._main, self._front
        count = 0
        for block in blocks:
            if block not in small and block not in main and block not in front:
                break
            count += 1
        return count

    def evict(self) -> B:
        """Take out and return the block that is to be overwritten next; KeyError when none is free."""
        return self.evict_many(1)[0]

    def evict_many(self, count: int) -> list[B]:
        """Evict `count` blocks, in order; KeyError, and nothing changed, when fewer are free."""
        raise NotImplementedError

    def forget(self, block: B) -> None:
        """Put a free block that lost its hash before all others, orphan its descendants; in use: drop its counts."""
        if block not in self:
            self._drop_state(block)
            return
        parent = self._front.get(block)
        if parent is UNHASHED:
            return
        content = self._contents.get(block, block)
        for segment in (self._small, self._main):
            if block in segment:
                self._unlink(segment[block], block)
        self.remove(block)
        if content in self._kids and (self._elsewhere is None or not self._elsewhere(block, content)):
            self._orphan(content)
        self.prepend(block)

    def reset(self) -> None:
        """Make every block an unhashed one, in eviction order; forget all counts and links."""
        blocks = list(self)
        for part in (self._small, self._main, self._contents, self._kids, self._state):
            part.clear()
        self._front = OrderedDict.fromkeys(blocks, UNHASHED)

    def adopt(self, other: "ChainQueue[B]") -> None:
        """Become a copy of another queue's parts and links, and of who belongs to main; counts start anew."""
        self._front, self._small, self._main = other._front.copy(), other._small.copy(), other._main.copy()
        self._contents = other._contents.copy()
        self._kids = {content: dict(kids) if type(kids) is dict else kids for content, kids in other._kids.items()}
        self._state = {block: MAIN for block, state in other._state.items() if state >= MAIN}

    def entries(self) -> Iterator[tuple[B, Hashable | None, Hashable | None]]:
        """Go through (block, content or None for the block itself, parent, or UNHASHED) from the eviction end."""
        for part in (self._front, self._small, self._main):
            for block, parent in part.items():
                yield block, self._contents.get(block), parent

    def _evict_front(self, evicted: list[B]) -> None:
        """Evict the head of the front."""
        block, parent = self._front.popitem(last=False)
        evicted.append(block)
        if parent is not UNHASHED:
            self._state.pop(block, None)
            self._gone(block, parent)

    def _evict_heads(
        self,
        part: OrderedDict[B, Any],
        count: int,
        ghost: Ghost[Hashable] | None,
        evicted: list[B],
        threshold: float = inf,
    ) -> None:
        """Evict `count` heads of a part into a ghost, if any; fewer when one leaves orphans or goes from small to main.

        A head whose state is `threshold` or more goes to main's tail instead, one of main with a hit less.
        """
        pop, state, front, main = part.popitem, self._state, self._front, self._main
        contents, elsewhere, kids = self._contents, self._elsewhere, self._kids
        # A chain leaves tail first: mostly the block before is the only child of this one, and its link goes with it.
        child: Any = None
        child_parent: Any = None
        remembered: list[Hashable] = []
        end = len(evicted) + count
        while len(evicted) < end:
            block, parent = pop(last=False)
            if block in state and (known := state.pop(block)) >= threshold:
                main[block] = parent
                if known < MAIN:
                    state[block] = MAIN
                    break
                state[block] = known - 1
                continue
            evicted.append(block)
            content = contents.pop(block, block) if contents else block
            if child_parent is not None and child_parent != content:
                self._unlink(child_parent, child)
                child_parent = None
            alone = elsewhere is None or not elsewhere(block, content)
            if alone:
                remembered.append(content)
            kid = kids.pop(content, None)
            if kid is not None and kid is not child and kid != child:
                kids[content] = kid
                if child_parent is not None:
                    self._unlink(content, child)
                if alone and content in kids:
                    self._orphan(content)
            child, child_parent = block, parent
            if front:
                break
        if ghost is not None and remembered:
            ghost.add(remembered)
        if child_parent is not None:
            self._unlink(child_parent, child)

    def _gone(self, block: B, parent: Hashable | None) -> None:
        """Take an evicted block that no ghost remembers out of the links."""
        content = self._contents.pop(block, block)
        if parent is not None:
            self._unlink(parent, block)
        if content in self._kids and (self._elsewhere is None or not self._elsewhere(block, content)):
            self._orphan(content)

    def _drop_state(self, block: B) -> None:
        self._contents.pop(block, None)
        self._state.pop(block, None)

    def _link(self, parent: Hashable | None, block: B) -> None:
        """Make a block a child of the content before it, behind the children that are there."""
        if parent is None:
            return
        kids = self._kids.setdefault(parent, block)
        if type(kids) is dict:
            kids[block] = None
        elif kids != block:
            self._kids[parent] = {kids: None, block: None}

    def _unlink(self, parent: Hashable | None, block: B) -> None:
        kids = self._kids.get(parent)
        if type(kids) is dict:
            kids.pop(block, None)
            if not kids:
                del self._kids[parent]
        elif kids is not None and kids == block:
            del self._kids[parent]

    def _orphan(self, content: Hashable) -> None:
        """Move the free descendants of a content that is gone to the front's end; some block was linked to it."""
        links, small, main = self._kids, self._small, self._main
        ahead = [(content, iter(_several(links.pop(content))))]
        while ahead:
            content, siblings = ahead[-1]
            for block in siblings:
                # A link is stale when the block has left this chain meanwhile; then its parent is another.
                if block in small and small[block] == content:
                    del small[block]
                elif block in main and main[block] == content:
                    del main[block]
                else:
                    continue
                self._front[block] = content
                self._state.pop(block, None)
                own = self._contents.get(block, block)
                if own in links:
                    ahead.append((own, iter(_several(links.pop(own)))))
                    break
            else:
                ahead.pop()


def _several(kids: Any) -> Iterable[Any]:
    return kids if type(kids) is dict else (kids,)
