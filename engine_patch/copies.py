"""Copies: further blocks of a content that a shadow's pool holds already, which vLLM makes and never shares.

1. vLLM computes anew what it does not hit: the last block of a block-aligned prompt, what it drops of a hit (EAGLE),
   an answer given before, what another request is just computing. Only the oldest block of a content is ever hit.
2. The oldest block goes by the content's own id; each younger one, a copy, by an id that no hash has (chain_ids.py).
   A copy is held by the one request that computed it. Freed, it takes room: LRU's at the tail, the others' in front.
3. When the oldest is evicted the next one, where it stands or in use, takes its id: the content lives on, so that no
   ghost remembers it and nobody is orphaned.
"""

from collections.abc import Iterable, Sequence

from engine_patch.chain_ids import Numbers, Range


class Copies:
    """The copies of one queue's pool, free and in use; a step a copy, and next to nothing where there are none."""

    __slots__ = ("_in_use", "_odd", "_younger", "contents")

    def __init__(self, size: int) -> None:
        self.contents: dict[int, int] = {}
        """copy -> its content."""
        self._younger: dict[int, dict[int, None]] = {}  # content -> its copies, the eldest first
        self._in_use: dict[int, int] = {}
        self._odd = bytearray(size)

    def within(self, ranges: Sequence[Range]) -> list[int]:
        """Return, in order, the copies in these ranges and the contents that have some."""
        found: list[int] = []
        if self.contents:
            find = self._odd.find
            for low, high in ranges:
                at = find(1, low, high)
                while at >= 0:
                    found.append(at)
                    at = find(1, at + 1, high)
        return found

    def add(self, content: int, copy: int) -> None:
        """A request computed a content that was there."""
        self.contents[copy] = content
        self._younger.setdefault(content, {})[copy] = None
        self._in_use[content] = self._in_use.get(content, 0) + 1
        self._odd[content] = self._odd[copy] = 1

    def freed(self, copy: int) -> None:
        """The request that held a copy has ended."""
        self._in_use[self.contents[copy]] -= 1

    def in_use(self, content: int) -> int:
        """Return how many copies of a content requests hold: all who use it, when the oldest block is free."""
        return self._in_use[content]

    def younger(self, content: int) -> Iterable[int]:
        """Go through a content's copies, the eldest first."""
        return self._younger.get(content, ())

    def drop(self, copy: int, free: bool) -> None:
        """A copy is no more, or is the oldest block now."""
        content = self.contents.pop(copy)
        self._odd[copy] = 0
        younger = self._younger[content]
        del younger[copy]
        if not free:
            self._in_use[content] -= 1
        if not younger:
            self._odd[content] = 0
            del self._younger[content], self._in_use[content]

    def adopt(self, other: "Copies") -> None:
        """Become the same as another queue's."""
        self.contents = other.contents.copy()
        self._younger = {content: younger.copy() for content, younger in other._younger.items()}
        self._in_use = other._in_use.copy()
        self._odd = other._odd.copy()

    def renumber(self, new: Numbers, size: int) -> None:
        """Follow a renumbering of the ids."""
        self.contents = {int(new[copy]): int(new[content]) for copy, content in self.contents.items()}
        self._younger = {
            int(new[content]): {int(new[copy]): None for copy in younger} for content, younger in self._younger.items()
        }
        self._in_use = {int(new[content]): count for content, count in self._in_use.items()}
        self._odd = bytearray(size)
        for odd in (*self.contents, *self._younger):
            self._odd[odd] = 1
