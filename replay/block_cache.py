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
7. Which free block is overwritten next is the eviction policy's to say (`engine_patch.policy`). It is told of hits,
   once a request, whether the blocks were free or in use; of content and chain of what is freed, and which of it are
   copies of what an older block holds. `switch` changes the policy at any time; every block keeps its content.

vLLM's null block is left out: all `num_blocks` can be used. Nothing here knows time, but `watch` where there is one;
cost is 0.3 to 1 µs a block.
"""

from collections.abc import Hashable, Iterable, Sequence

from engine_patch.policy import EvictionQueue, converted, new_queue
from replay.block_watch import BlockWatch

TOKEN_BYTES = 4


def chain_hashes(tokens: bytes, block_size: int = 16, parent: bytes = b"") -> list[bytes]:
    """Return the xxh3-128 digest of each full block of `tokens` (4 bytes a token); about 0.3 µs a block."""
    import xxhash  # not everywhere where a cache is: hashes of a trace come with it

    size = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    hashes: list[bytes] = []
    for end in range(size, len(tokens) + 1, size):
        parent = digest(parent + tokens[end - size : end])
        hashes.append(parent)
    return hashes


class BlockCache:
    """All KV blocks of an engine; a block is an id in 0 … num_blocks - 1, a hash any hashable value."""

    __slots__ = ("_by_hash", "_copied", "_hash_of", "_refs", "block_size", "free", "num_blocks", "policy", "watch")

    def __init__(self, num_blocks: int, block_size: int = 16, policy: str = "lru") -> None:
        """Start with nothing cached; ValueError, naming the policies, for a policy that is none."""
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.policy = policy
        self.free: EvictionQueue[int] = new_queue(policy, num_blocks, range(num_blocks), self._elsewhere)
        self.watch: BlockWatch | None = None
        self._refs = [0] * num_blocks
        self._hash_of: list[Hashable | None] = [None] * num_blocks
        # One block per hash nearly always; a list only while a content stands in several blocks.
        self._by_hash: dict[Hashable, int | list[int]] = {}
        self._copied = 0  # how many contents stand in several blocks

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

    def num_hashed(self, blocks: Iterable[int]) -> int:
        """How many of these can be hit."""
        hash_of = self._hash_of
        return sum(hash_of[block] is not None for block in blocks)

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

    def pin(self, hits: Sequence[int], *, counted: bool = True) -> None:
        """Use hit blocks for one more request; not `counted`: it only takes back what it had before."""
        refs = self._refs
        if counted:
            self.free.take(hits)
        else:
            for block in hits:
                if not refs[block]:
                    self.free.remove(block)
        for block in hits:
            refs[block] += 1
        if self.watch is not None:
            self.watch.hit(hits)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks to be written, in use once each; None, and nothing changed, when fewer are free."""
        if count > len(self.free):
            return None
        refs, hash_of = self._refs, self._hash_of
        if self._copied and self.policy != "lru":
            # The policy asks whether a content is elsewhere, and what is evicted just before no longer counts.
            blocks = []
            for _ in range(count):
                blocks.append(block := self.free.evict())
                if hash_of[block] is not None:
                    self._forget(block)
        else:
            blocks = self.free.evict_many(count)
        for block in blocks:
            if hash_of[block] is not None:
                self._forget(block)
            refs[block] = 1
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
                self._copied += 1
            else:
                known.append(block)
            self._hash_of[block] = value

    def release(self, blocks: Sequence[int]) -> None:
        """Take a request's blocks, in prompt order, out of use."""
        refs, hash_of = self._refs, self._hash_of
        for block in blocks:
            refs[block] -= 1
        values = [hash_of[block] for block in blocks]
        first, end = 0, len(blocks)
        while first < end and refs[blocks[first]]:
            first += 1
        while end > first and values[end - 1] is None:
            end -= 1
        if (
            (self._copied and self.policy != "lru")
            or None in values[first:end]
            or any(map(refs.__getitem__, blocks[first:]))
        ):
            self._release_parts(blocks, values)
            return
        self.free.append_chain(blocks[first:end], values[first:end], values[first - 1] if first else None)
        for block in blocks[end:]:
            self.free.prepend(block)

    def _release_parts(self, blocks: Sequence[int], values: Sequence[Hashable | None]) -> None:
        """Put those that nobody uses any more into the queue, whatever is between them."""
        unhashed: list[int] = []
        told = self.policy != "lru"
        end = len(blocks)  # blocks[at + 1 : end] go together; behind them all is told
        for at in range(end - 1, -1, -1):
            block, value = blocks[at], values[at]
            used = self._refs[block]
            if used or value is None or (told and self._is_copy(block, value)):
                if at + 1 < end:
                    self.free.append_chain(blocks[at + 1 : end], values[at + 1 : end], value)
                end = at
                if used:
                    continue
                if value is None:
                    unhashed.append(block)
                else:
                    self.free.append_copy(block, value, values[at - 1] if at else None)
        if end:
            self.free.append_chain(blocks[:end], values[:end])
        for block in reversed(unhashed):
            self.free.prepend(block)

    def reset(self) -> int:
        """Make nothing hittable; return how many contents were."""
        dropped = len(self._by_hash)
        self._by_hash.clear()
        self._copied = 0
        self._hash_of = [None] * self.num_blocks
        self.free.reset()
        return dropped

    def switch(self, policy: str) -> None:
        """Evict by another policy from now on, O(n); ValueError, and nothing changed, when none has that name."""
        if policy != self.policy:
            self.free = converted(self.free, policy, self.num_blocks, self._elsewhere)
            self.policy = policy

    def _is_copy(self, block: int, value: Hashable) -> bool:
        known = self._by_hash[value]
        return not isinstance(known, int) and known[0] != block

    def _elsewhere(self, block: int, content: Hashable) -> bool:
        """Tell whether another block holds what `block`, which is being evicted, holds."""
        known = self._by_hash.get(content)
        return known is not None and known != block

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
                self._copied -= 1
