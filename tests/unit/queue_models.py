"""S3-FIFO and ARC written down once more, from the rules alone: plain lists, nothing fast, one block at a time.

Contents are strings; a content's parent is the string without its last letter. `Pool` says which block holds what.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise

from hypothesis import strategies as st

CONTENTS = ("a", "ab", "abc", "abx", "ae", "aef", "b", "bc")
BLOCKS = 6


def parent_of(content: str) -> str | None:
    return content[:-1] or None


class Pool:
    """Which content each block holds, in use or free; the truth behind `elsewhere`."""

    def __init__(self) -> None:
        self.content: dict[int, str] = {}
        self.gone: set[str] = set()

    def elsewhere(self, block: int, content: object) -> bool:
        return any(other != block and held == content for other, held in self.content.items())

    def lose(self, block: int) -> None:
        held = self.content.pop(block, None)
        if held is not None and held not in self.content.values():
            self.gone.add(held)


class ModelQueue:
    """Rules of engine_patch/chains.py; the policies add `place` and `victim`."""

    def __init__(self, num_blocks: int, blocks: Iterable[int], elsewhere: Callable[[int, object], bool]) -> None:
        self.num_blocks = num_blocks
        self.front, self.unhashed = list(blocks), set(blocks)
        self.small: list[int] = []
        self.main: list[int] = []
        self.freq: dict[int, int] = {}
        self.of_main: set[int] = set()
        self.content: dict[int, str] = {}
        self.links: list[tuple[str, int]] = []
        self.elsewhere = elsewhere

    def order(self) -> list[int]:
        return self.front + self.small + self.main

    def place(self, block: int, content: str) -> None:
        raise NotImplementedError

    def victim(self) -> int | None:
        """Evict one block of small or main, or None when a block was only moved."""
        raise NotImplementedError

    def append(self, block: int, content: str) -> None:
        self.content[block] = content
        self.place(block, content)
        parent = parent_of(content)
        if parent is not None and (parent, block) not in self.links:
            self.links.append((parent, block))

    def append_copy(self, block: int, content: str) -> None:
        self.clear(block)
        self.content[block] = content
        self.front.append(block)

    def prepend(self, block: int) -> None:
        self.clear(block)
        self.front.insert(0, block)
        self.unhashed.add(block)

    def remove(self, block: int) -> None:
        for part in (self.front, self.small, self.main):
            if block in part:
                part.remove(block)

    def hit(self, block: int) -> None:
        self.freq[block] = min(3, self.freq.get(block, 0) + 1)

    def evict(self) -> int:
        if self.front:
            block = self.front.pop(0)
            if block in self.unhashed:
                self.unhashed.discard(block)
                return block
            self.leave(block)
            return block
        while (found := self.victim()) is None:
            pass
        return found

    def leave(self, block: int) -> str | None:
        """Forget an evicted block; return its content when no other block holds it."""
        content = self.content[block]
        self.clear(block)
        self.unlink(block, content)
        if self.elsewhere(block, content):
            return None
        self.orphan(content)
        return content

    def forget(self, block: int) -> None:
        if block not in self.order():
            self.clear(block)
            return
        if block in self.unhashed:
            return
        content = self.content[block]
        if block not in self.front:
            self.unlink(block, content)
        self.remove(block)
        if not self.elsewhere(block, content):
            self.orphan(content)
        self.prepend(block)

    def orphan(self, content: str) -> None:
        children = [block for parent, block in self.links if parent == content]
        self.links = [link for link in self.links if link[0] != content]
        for block in children:
            held = self.content.get(block)
            if (block in self.small or block in self.main) and held is not None and parent_of(held) == content:
                self.remove(block)
                self.front.append(block)
                self.freq.pop(block, None)
                self.of_main.discard(block)
                self.orphan(held)

    def unlink(self, block: int, content: str) -> None:
        self.links = [link for link in self.links if link != (parent_of(content), block)]

    def clear(self, block: int) -> None:
        self.freq.pop(block, None)
        self.of_main.discard(block)
        self.content.pop(block, None)

    def reset(self) -> None:
        self.__init__(self.num_blocks, self.order(), self.elsewhere)  # type: ignore[misc]


class ModelS3Fifo(ModelQueue):
    percent, threshold = 10, 1

    def __init__(self, num_blocks: int, blocks: Iterable[int], elsewhere: Callable[[int, object], bool]) -> None:
        super().__init__(num_blocks, blocks, elsewhere)
        self.ghost: list[str] = []

    def place(self, block: int, content: str) -> None:
        if block in self.of_main:
            self.main.append(block)
            return
        known = content in self.ghost
        if known:
            self.ghost.remove(content)
        if known or self.freq.get(block, 0) >= self.threshold:
            self.to_main(block)
        else:
            self.small.append(block)

    def to_main(self, block: int) -> None:
        self.of_main.add(block)
        self.freq[block] = 0
        self.main.append(block)

    def victim(self) -> int | None:
        total = len(self.small) + len(self.main)
        if self.small and 100 * len(self.small) >= self.percent * total:
            block = self.small.pop(0)
            if self.freq.get(block, 0) >= self.threshold:
                self.to_main(block)
                return None
            content = self.leave(block)
            if content is not None:
                self.ghost = [*self.ghost, content][-self.num_blocks :]
            return block
        block = self.main.pop(0)
        if self.freq.get(block, 0):
            self.freq[block] -= 1
            self.main.append(block)
            return None
        self.leave(block)
        return block


class ModelArc(ModelQueue):
    def __init__(self, num_blocks: int, blocks: Iterable[int], elsewhere: Callable[[int, object], bool]) -> None:
        super().__init__(num_blocks, blocks, elsewhere)
        self.b1: list[str] = []
        self.b2: list[str] = []
        self.p = 0.0

    def place(self, block: int, content: str) -> None:
        if block not in self.of_main and content in self.b1:
            self.p = min(self.num_blocks, self.p + max(1, len(self.b2) / len(self.b1)))
            self.b1.remove(content)
            self.of_main.add(block)
        elif block not in self.of_main and content in self.b2:
            self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))
            self.b2.remove(content)
            self.of_main.add(block)
        if block in self.of_main or self.freq.get(block, 0):
            self.of_main.add(block)
            self.main.append(block)
        else:
            self.small.append(block)
        while self.b1 and len(self.small) + len(self.b1) > self.num_blocks:
            self.b1.pop(0)
        while self.b2 and len(self.small + self.main + self.b1 + self.b2) > 2 * self.num_blocks:
            self.b2.pop(0)

    def victim(self) -> int | None:
        once = bool(self.small) and (len(self.small) > self.p or not self.main)
        block = (self.small if once else self.main).pop(0)
        content = self.leave(block)
        if content is not None:
            (self.b1 if once else self.b2).append(content)
        return block


# (what, which block, which content): what cannot be done in the state at hand is left out by the test.
operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["append"] * 6 + ["evict"] * 4 + ["hit"] * 3 + ["remove"] * 3 + ["copy", "prepend", "forget", "reset"]
        ),
        st.integers(0, BLOCKS - 1),
        st.sampled_from(CONTENTS),
    ),
    max_size=60,
)


def ancestors(content: str) -> list[str]:
    """Return the proper prefixes of a content, and nothing for a first block."""
    return [content[:end] for end, _ in pairwise(range(1, len(content) + 1))]
