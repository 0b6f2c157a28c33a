"""The prefix cache of one engine: KV blocks that are found by chained hashes, as in vLLM V1.

1. A block holds `block_size` tokens. Its hash covers its tokens and its parent's hash, so an equal hash means an equal
   prefix. Only full blocks get a hash; one content may stand in several blocks (no de-duplication), the oldest is hit.
2. A hit is the longest run of known hashes from the first block on, at most (tokens - 1) // block_size blocks, since
   the last token must be computed to have something to sample from.
3. A block in use is counted (`refs`) and not in the free queue; a hit on a free block takes it out of the queue.
4. New blocks come from the queue's eviction end and lose their old hash then, not earlier: free blocks stay hittable.
5. A request's blocks are released tail first; those without a hash go to the eviction end.
6. `reset` forgets every hash. vLLM refuses that while blocks are in use; here blocks in use stay with their requests
   and merely cannot be hit any more. Those requests go on hashing the blocks that they fill afterwards.

vLLM's null block is left out: all `num_blocks` can be used. Nothing here knows time, but `watch` where there is one;
cost is 0.3 to 1 µs a block.
"""

from collections.abc import Hashable, Iterable, Sequence

import xxhash

from engine_patch.lru import LruQueue
from replay.block_watch import BlockWatch

TOKEN_BYTES = 4


def chain_hashes(tokens: bytes, block_size: int = 16, parent: bytes = b"") -> list[bytes]:
    """Return the xxh3-128 digest of each full block of `tokens` (4 bytes a token); about 0.3 µs a block."""
    size = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    hashes: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        parent = digest(parent + tokens[end - size : end])
        hashes.append(parent)
    return hashes


class BlockCache:
    """All KV blocks of an engine; a block is an id in 0 … num_blocks - 1, a hash any hashable value."""

    __slots__ = ("_by_hash", "_hash_of", "_refs", "block_size", "free", "num_blocks", "watch")

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = LruQueue(range(num_blocks))
        self.watch: BlockWatch | None = None
        self._refs = [0] * num_blocks
        self._hash_of: list[Hashable | None] = [None] * num_blocks
        # One block per hash nearly always; a list only while a content stands in several blocks.
        self._by_hash: dict[Hashable, int | list[int]] = {}

    @property
    def num_free(self) -> int:
        """How many blocks are in no request; hittable ones included."""
        return len(self.free)

    @property
    def num_pinned(self) -> int:
        """How many blocks are in at least one request."""
        return self.num_blocks - len(self.free)

    @property
    def num_cached(self) -> int:
        """How many different contents can be hit."""
        return len(self._by_hash)

    def refs(self, block: int) -> int:
        """How many requests use the block."""
        return self._refs[block]

    def lookup(self, hashes: Sequence[Hashable], num_tokens: int) -> list[int]:
        """Return the blocks that hold the longest known prefix of a request of `num_tokens`; changes nothing."""
        by_hash = self._by_hash
        hits: list[int] = []
        for index in range(min(len(hashes), (num_tokens - 1) // self.block_size)):
            block = by_hash.get(hashes[index])
            if block is None:
                break
            hits.append(block if isinstance(block, int) else block[0])
        return hits

    def fits(self, hits: Iterable[int], new_blocks: int) -> bool:
        """Tell whether `new_blocks` are left once `hits` are pinned."""
        refs = self._refs
        return new_blocks + sum(1 for block in hits if not refs[block]) <= len(self.free)

    def pin(self, hits: Sequence[int]) -> None:
        """Use hit blocks for one more request."""
        refs = self._refs
        for block in hits:
            if not refs[block]:
                self.free.remove(block)
            refs[block] += 1
        if self.watch is not None:
            self.watch.hit(hits)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks to be written, in use once each; None, and nothing changed, when fewer are free."""
        if count > len(self.free):
            return None
        blocks = [self.free.evict() for _ in range(count)]
        for block in blocks:
            if self._hash_of[block] is not None:
                self._forget(block)
            self._refs[block] = 1
        if self.watch is not None:
            self.watch.allocated(blocks)
        return blocks

    def commit(self, blocks: Sequence[int], hashes: Sequence[Hashable], first: int, until: int) -> None:
        """Make blocks first … until - 1 of a request hittable; those past the end of `hashes` never are."""
        by_hash = self._by_hash
        for index in range(first, min(until, len(hashes))):
            block, value = blocks[index], hashes[index]
            known = by_hash.get(value)
            if known is None:
                by_hash[value] = block
            elif isinstance(known, int):
                by_hash[value] = [known, block]
            else:
                known.append(block)
            self._hash_of[block] = value

    def release(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks, in prompt order, out of use."""
        refs, hash_of = self._refs, self._hash_of
        for block in reversed(blocks):
            refs[block] -= 1
            if not refs[block] and hash_of[block] is not None:
                self.free.append(block)
        for block in blocks:
            if not refs[block] and hash_of[block] is None:
                self.free.prepend(block)

    def reset(self) -> int:
        """Make nothing hittable; return how many contents were."""
        dropped = len(self._by_hash)
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
        return dropped

    def _forget(self, block: int) -> None:
        value = self._hash_of[block]
        self._hash_of[block] = None
        known = self._by_hash[value]
        if isinstance(known, int):
            del self._by_hash[value]
        else:
            known.remove(block)
            if len(known) == 1:
                self._by_hash[value] = known[0]
