"""The prefix cache: chained hashes, hits, pins, eviction, reset."""

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patch.policy import POLICIES, EvictionQueue, converted, new_queue
from replay.block_cache import BlockCache, chain_hashes

TOKENS = bytes(range(256)) * 2  # 128 tokens: 8 blocks of 16


def serve(cache: BlockCache, hashes: Sequence[Hashable], tokens: int) -> tuple[int, list[int]]:
    """Admit a request that computes all its tokens at once; return its hit blocks and its block table."""
    hits = cache.lookup(hashes, tokens)
    cache.pin(hits)
    new = cache.allocate(-(-tokens // cache.block_size) - len(hits))
    assert new is not None
    blocks = hits + new
    cache.commit(blocks, hashes, len(hits), tokens // cache.block_size)
    return len(hits), blocks


def test_a_hash_covers_its_block_and_all_before() -> None:
    """Equal hashes mean equal prefixes: one other byte changes its block's hash and all later ones, none before."""
    hashes = chain_hashes(TOKENS)
    assert len(hashes) == 8
    changed = bytearray(TOKENS)
    changed[3 * 64] ^= 1
    other = chain_hashes(bytes(changed))
    assert other[:3] == hashes[:3]
    assert not set(other[3:]) & set(hashes)
    assert chain_hashes(TOKENS[64:], parent=hashes[0]) == hashes[1:]


def test_only_full_blocks_have_hashes() -> None:
    """The last, partial block is left out."""
    assert len(chain_hashes(TOKENS[:-1])) == 7
    assert chain_hashes(b"") == []


def test_a_hit_leaves_the_last_token_to_compute() -> None:
    """A resent block-aligned prompt recomputes its last block, as in vLLM."""
    cache = BlockCache(16)
    hashes = chain_hashes(TOKENS)
    _, blocks = serve(cache, hashes, 128)
    cache.release(blocks)
    assert len(cache.lookup(hashes, 128)) == 7
    assert len(cache.lookup(hashes, 129)) == 8


def test_a_hit_ends_at_the_first_gap() -> None:
    """Blocks behind one that is gone are not hit though they are there."""
    cache = BlockCache(4)
    serve(cache, "abcd", 64)
    assert len(cache.lookup("abXd", 80)) == 2
    assert cache.lookup("Xbcd", 80) == []


def test_the_tail_is_evicted_first() -> None:
    """New blocks overwrite a released request's last blocks, so its prefix stays hittable longest."""
    cache = BlockCache(4)
    _, blocks = serve(cache, "abcd", 64)
    cache.release(blocks)
    assert cache.allocate(1) == [blocks[3]]
    assert len(cache.lookup("abcd", 80)) == 3
    assert cache.allocate(2) == [blocks[2], blocks[1]]
    assert len(cache.lookup("abcd", 80)) == 1


def test_blocks_without_a_hash_are_evicted_before_cached_ones() -> None:
    """The partial block of a released request goes first, whatever was released before it."""
    cache = BlockCache(3)
    _, first = serve(cache, "a", 16)
    _, second = serve(cache, "b", 20)
    cache.release(first)
    cache.release(second)
    assert cache.allocate(1) == [second[1]]
    assert len(cache.lookup("a", 17)) == len(cache.lookup("b", 17)) == 1


def test_blocks_in_use_are_hit_but_never_evicted() -> None:
    """A pinned block is shared by counting, and allocation fails rather than take it."""
    cache = BlockCache(2)
    _, blocks = serve(cache, "ab", 32)
    assert cache.allocate(1) is None
    hits = cache.lookup("ab", 33)
    assert hits == blocks
    assert cache.fits(hits, 0)
    assert not cache.fits(hits, 1)
    cache.pin(hits)
    cache.release(blocks)
    assert cache.num_pinned == 2
    cache.release(hits)
    assert cache.num_free == 2


def test_hits_on_free_blocks_count_against_the_free_ones() -> None:
    """What is hit cannot also be overwritten."""
    cache = BlockCache(3)
    _, blocks = serve(cache, "ab", 32)
    cache.release(blocks)
    hits = cache.lookup("ab", 48)
    assert cache.fits(hits, 1)
    assert not cache.fits(hits, 2)


def test_a_second_copy_is_hit_once_the_first_is_gone() -> None:
    """One content may stand in two blocks; it stays known until the last copy is overwritten."""
    cache = BlockCache(2)
    _, first = serve(cache, "a", 16)
    _, second = serve(cache, "a", 16)
    assert first != second
    assert cache.num_cached == 1
    cache.release(first)
    cache.release(second)
    assert cache.allocate(1) == first
    assert cache.lookup("a", 17) == second
    assert cache.allocate(1) == second
    assert cache.lookup("a", 17) == []
    assert cache.num_cached == 0


def test_reset_forgets_free_and_pinned_blocks_alike() -> None:
    """After a reset nothing is hit, while requests keep their blocks and release them as usual."""
    cache = BlockCache(4)
    _, gone = serve(cache, "ab", 32)
    cache.release(gone)
    _, used = serve(cache, "cd", 32)
    assert cache.reset() == 4
    assert cache.lookup("ab", 33) == cache.lookup("cd", 33) == []
    assert cache.num_pinned == 2
    cache.release(used)
    assert cache.num_free == 4
    assert cache.allocate(4) is not None


@dataclass
class NaiveCache:
    """Rules 1 to 5 in the plainest way: one list of free blocks, hashes searched one by one."""

    size: int
    free: list[int] = field(default_factory=list)
    content: dict[int, Hashable] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    age: list[int] = field(default_factory=list)  # blocks in the order in which their content was committed

    def __post_init__(self) -> None:
        self.free = list(range(self.size))

    def find(self, value: Hashable) -> int | None:
        return next((block for block in self.age if self.content.get(block) == value), None)

    def admit(self, hashes: Sequence[Hashable], tokens: int, block_size: int) -> tuple[int, list[int]] | None:
        hits: list[int] = []
        for value in hashes[: (tokens - 1) // block_size]:
            block = self.find(value)
            if block is None:
                break
            hits.append(block)
        need = -(-tokens // block_size) - len(hits)
        left = [block for block in self.free if block not in hits]
        if need > len(left):
            return None
        blocks = hits + left[:need]
        self.free = left[need:]
        for block in left[:need]:
            self.content.pop(block, None)
            if block in self.age:
                self.age.remove(block)
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
        for index in range(len(hits), min(tokens // block_size, len(hashes))):
            self.content[blocks[index]] = hashes[index]
            self.age.append(blocks[index])
        return len(hits), blocks

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        idle = [block for block in reversed(blocks) if not self.users[block]]
        self.free = [b for b in idle if b not in self.content] + self.free + [b for b in idle if b in self.content]


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.tuples(PROMPTS, st.integers(0, 3)), st.integers(0, 9)), max_size=40))
def test_agrees_with_the_plain_cache(steps: list[tuple[list[int], int] | int]) -> None:
    """Hits, block tables, eviction order and counts are those of the naive cache; no block is lost or used twice."""
    block_size, cache, naive = 4, BlockCache(9, 4), NaiveCache(9)
    live: list[list[int]] = []
    for step in steps:
        if isinstance(step, int):
            if live:
                blocks = live.pop(step % len(live))
                cache.release(blocks)
                naive.release(blocks)
        else:
            parts, rest = step
            # The hash of a block is its whole prefix.
            hashes = [tuple(parts[: n + 1]) for n in range(len(parts))]
            tokens = max(1, len(parts) * block_size + rest - 3)
            expected = naive.admit(hashes, tokens, block_size)
            hits = cache.lookup(hashes, tokens)
            need = -(-tokens // block_size) - len(hits)
            assert cache.fits(hits, need) == (expected is not None)
            if expected is None:
                continue
            cache.pin(hits)
            new = cache.allocate(need)
            assert new is not None
            cache.commit(hits + new, hashes, len(hits), tokens // block_size)
            assert (len(hits), hits + new) == expected
            live.append(hits + new)
        assert list(cache.free) == naive.free
        used = {block for blocks in live for block in blocks}
        assert cache.num_pinned == len(used)
        assert cache.num_free + cache.num_pinned == cache.num_blocks
        assert set(cache.free).isdisjoint(used)
        for block in range(cache.num_blocks):
            assert cache.refs(block) == sum(blocks.count(block) for blocks in live)


def test_another_policy_is_refused_by_name() -> None:
    """A policy that is none is named together with those that are, and a refused switch changes nothing."""
    with pytest.raises(ValueError, match=r"'mru'.*lru.*s3fifo.*arc"):
        BlockCache(4, policy="mru")
    cache = BlockCache(4)
    with pytest.raises(ValueError, match="'mru'"):
        cache.switch("mru")
    assert cache.policy == "lru"
    assert cache.allocate(4) == [0, 1, 2, 3]


def test_what_was_hit_once_outlives_a_scan_under_s3fifo() -> None:
    """A prefix with one hit outlives more one-off blocks than the cache has; under LRU it is gone."""
    left = {}
    for policy in ("lru", "s3fifo"):
        cache = BlockCache(20, policy=policy)
        for _ in range(2):
            _, blocks = serve(cache, "ab", 33)
            cache.release(blocks)
        for n in range(30):
            _, blocks = serve(cache, [("scan", n)], 16)
            cache.release(blocks)
        left[policy] = len(cache.lookup("ab", 33))
    assert left == {"lru": 0, "s3fifo": 2}


def test_a_hit_on_a_block_in_use_counts() -> None:
    """What is hit while somebody uses it is kept like what is hit when free; taking back counts for nothing."""
    kept = {}
    for counted in (True, False):
        cache = BlockCache(20, policy="s3fifo")
        _, first = serve(cache, "ab", 33)
        hits = cache.lookup("ab", 33)
        cache.pin(hits, counted=counted)
        cache.release(first)
        cache.release(hits)
        for n in range(30):
            _, blocks = serve(cache, [("scan", n)], 16)
            cache.release(blocks)
        kept[counted] = len(cache.lookup("ab", 33))
    assert kept == {True: 2, False: 0}


@dataclass
class PlainCache:
    """The same cache over the same queue, one block at a time: what the batches must amount to."""

    size: int
    policy: str
    content: dict[int, Hashable] = field(default_factory=dict)
    users: dict[int, int] = field(default_factory=dict)
    age: list[int] = field(default_factory=list)  # blocks in the order in which their content was committed

    def __post_init__(self) -> None:
        self.free: EvictionQueue[int] = new_queue(self.policy, self.size, range(self.size), self.elsewhere)

    def elsewhere(self, block: int, value: Hashable) -> bool:
        return any(self.content[other] == value for other in self.age if other != block)

    def find(self, value: Hashable) -> int | None:
        return next((block for block in self.age if self.content[block] == value), None)

    def switch(self, policy: str) -> None:
        if policy != self.policy:
            self.free = converted(self.free, policy, self.size, self.elsewhere)
            self.policy = policy

    def admit(self, hashes: Sequence[Hashable], tokens: int, block_size: int) -> list[int] | None:
        hits: list[int] = []
        for value in hashes[: (tokens - 1) // block_size]:
            block = self.find(value)
            if block is None:
                break
            hits.append(block)
        need = -(-tokens // block_size) - len(hits)
        if need > len(self.free) - sum(block in self.free for block in hits):
            return None
        for block in hits:
            self.free.hit(block)
            if block in self.free:
                self.free.remove(block)
        new = []
        for _ in range(need):
            block = self.free.evict()
            self.content.pop(block, None)
            if block in self.age:
                self.age.remove(block)
            new.append(block)
        blocks = hits + new
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
        for index in range(len(hits), min(tokens // block_size, len(hashes))):
            self.content[blocks[index]] = hashes[index]
            self.age.append(blocks[index])
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
        for at in reversed(range(len(blocks))):
            block = blocks[at]
            if self.users[block] or block not in self.content:
                continue
            value = self.content[block]
            parent = self.content.get(blocks[at - 1]) if at else None
            if self.find(value) == block:
                self.free.append(block, value, parent)
            else:
                self.free.append_copy(block, value, parent)
        for block in blocks:
            if not self.users[block] and block not in self.content:
                self.free.prepend(block)

    def reset(self) -> None:
        self.content.clear()
        self.age.clear()
        self.free.reset()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1_000_000), st.sampled_from(POLICIES), st.sampled_from([0.0, 0.02]))
def test_every_policy_is_told_all_it_needs(seed: int, policy: str, upset: float) -> None:
    """Over any requests, releases, resets and switches, blocks are those of the queue told one block at a time."""
    rng, block_size, size = random.Random(seed), 4, 9 + seed % 24
    cache, plain = BlockCache(size, block_size, policy), PlainCache(size, policy)
    live: list[list[int]] = []
    for _ in range(250):
        drawn = rng.random()
        if drawn < upset:
            cache.reset()
            plain.reset()
        elif drawn < 2 * upset:
            to = rng.choice(POLICIES)
            cache.switch(to)
            plain.switch(to)
        elif live and rng.random() < len(live) / 4:
            blocks = live.pop(rng.randrange(len(live)))
            cache.release(blocks)
            plain.release(blocks)
        else:
            parts = [min(int(rng.expovariate(1.0)), 3) for _ in range(rng.randint(1, 5))]
            hashes = [tuple(parts[: n + 1]) for n in range(len(parts))]
            tokens = max(1, len(parts) * block_size + rng.choice((-3, 0, 0, 1)))
            expected = plain.admit(hashes, tokens, block_size)
            hits = cache.lookup(hashes, tokens)
            need = -(-tokens // block_size) - len(hits)
            assert cache.fits(hits, need) == (expected is not None)
            if expected is None:
                continue
            cache.pin(hits)
            new = cache.allocate(need)
            assert new is not None
            cache.commit(hits + new, hashes, len(hits), tokens // block_size)
            assert hits + new == expected
            live.append(hits + new)
        assert list(cache.free) == list(plain.free)
        used = {block for blocks in live for block in blocks}
        assert cache.num_pinned == len(used)
        assert cache.num_free + cache.num_pinned == cache.num_blocks
        assert set(cache.free).isdisjoint(used)
