"""A shadow hits what the pool of an engine hits: against an independent model of vLLM's pool, block by block."""

from random import Random

import numpy as np
import pytest

from engine_patch.policy import POLICIES
from engine_patch.shadow import PoolShadow
from tests.unit.pool_model import BLOCK, Pool, Running, Traffic

SIZE = 800


class Side:
    """A pool and a shadow on the same traffic."""

    def __init__(self, policy: str, concurrency: int, seed: int, aligned: float = 0.0, sample: float = 1.0) -> None:
        self.pool = Pool(policy, SIZE)
        self.shadow = PoolShadow([policy], SIZE, BLOCK, sample)
        self.concurrency, self.aligned, self.sample = concurrency, aligned, sample
        self.rng = Random(seed)
        self.running: list[tuple[Running, list[int], int, int]] = []
        self.differing = self.requests = 0

    def end_one(self) -> None:
        """Finish a request that runs, any of them."""
        request, full, tokens, known = self.running.pop(self.rng.randrange(len(self.running)))
        free = len(self.pool.queue) + len(request.blocks)
        self.pool.finish(request, full, tokens)
        done, free = min(len(full), len(request.blocks)), free - len(request.blocks)
        self.shadow.freed(request.number, full[known:done], done, len(request.blocks), free)

    def serve(self, traffic: Traffic, count: int) -> None:
        """Admit `count` requests and compare each one's hit."""
        lane = self.shadow.lanes[0]
        for prompt, full in traffic.prompts(count):
            number = self.requests = self.requests + 1
            tokens = len(prompt) * BLOCK + (0 if self.rng.random() < self.aligned else self.rng.randint(1, 15))
            while len(self.running) >= self.concurrency or (got := self.pool.start(number, prompt, tokens)) is None:
                self.end_one()
            request, hit_tokens = got
            before = lane.hit_blocks
            self.shadow.admitted(number, prompt, tokens, True, hit_tokens, len(self.pool.queue))
            self.differing += (lane.hit_blocks - before) * BLOCK != hit_tokens
            self.running.append((request, full, tokens + BLOCK * (len(full) - len(prompt)), len(prompt)))

    @property
    def rates(self) -> tuple[float, float]:
        """Hit tokens per prompt token: the pool's, the shadow's."""
        queries = self.pool.queries
        return self.pool.hits / queries, self.shadow.lanes[0].hit_blocks * BLOCK / queries


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "s3fifo-25", "s3fifo-paper-free"])
@pytest.mark.parametrize("seed", range(3))
def test_every_hit_is_the_pools(policy: str, seed: int) -> None:
    """Where each content is in one block, LRU hits what the pool hits, one by one; S3-FIFO within 0.1 points."""
    side = Side(policy, 1, seed)
    side.serve(Traffic(seed), 1200)
    assert side.pool.copies == 0
    assert side.pool.hits > 0
    pool, shadow = side.rates
    if policy == "lru":
        assert side.differing == 0
    assert side.differing <= 8
    assert abs(pool - shadow) < 0.001


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("concurrency", [1, 8])
def test_copies_are_followed(policy: str, concurrency: int) -> None:
    """Prompts that end with a block, equal ones at once, answers given again: LRU is exact, others to 0.2 points."""
    side = Side(policy, concurrency, 5, aligned=0.5)
    side.serve(Traffic(5, again_share=1 / 3), 2000)
    assert side.pool.copies > 500
    pool, shadow = side.rates
    assert abs(pool - shadow) < 0.002
    assert side.differing <= (0 if policy == "lru" else 40)


def test_blocks_in_use_take_room() -> None:
    """What requests hold, with a hash or without, cannot hold anything else."""
    shadow = PoolShadow(["lru"], 10, BLOCK)
    lane = shadow.lanes[0]
    shadow.admitted("a", [1, 2, 3, 4], 4 * BLOCK + 1)
    assert shadow.in_use == 5
    shadow.freed("a", [], 4, 5)
    assert (shadow.in_use, len(lane.queue)) == (0, 4)
    shadow.admitted("b", [11, 12, 13, 14, 15, 16], 7 * BLOCK)
    assert (shadow.in_use, len(lane.queue)) == (7, 3)
    assert shadow.contents(lane) == [3, 2, 1]  # 4, the tail, went first


def test_a_hit_stops_at_the_first_block_that_is_missing_and_before_the_last_token() -> None:
    """Hits are a contiguous prefix of at most (tokens - 1) // block_size blocks."""
    shadow = PoolShadow(["lru"], 100, BLOCK)
    lane = shadow.lanes[0]
    shadow.admitted("a", [1, 2, 3, 4], 4 * BLOCK)
    shadow.freed("a", [], 4, 4)
    for number, (hashes, tokens, hits) in enumerate(
        [([1, 2, 3, 4], 4 * BLOCK, 3), ([1, 2, 3, 4], 4 * BLOCK + 1, 4), ([1, 2, 8, 4], 65, 2), ([9, 2, 3], 49, 0)]
    ):
        before = lane.hit_blocks
        shadow.admitted(number, hashes, tokens)
        assert lane.hit_blocks - before == hits, hashes
        shadow.freed(number, [], len(hashes), len(hashes))


def test_an_engine_that_drops_the_end_of_a_hit_hits_less() -> None:
    """With EAGLE the last block found is computed anew: a hit of three blocks counts two, one of one block none."""
    shadow = PoolShadow(["lru"], 16, BLOCK, dropped=1)
    for number, (length, hits) in enumerate(((4, 0), (4, 2), (1, 2), (2, 2))):
        shadow.admitted(number, [1, 2, 3, 4][:length], BLOCK * length)
        shadow.freed(number, [], length, length)
        assert shadow.lanes[0].hit_blocks == hits


def test_a_request_hits_what_another_holds() -> None:
    """Blocks in use are hit like free ones, and stay until their last user ends."""
    shadow = PoolShadow(["lru", "s3fifo"], 20, BLOCK)
    shadow.admitted("a", [1, 2, 3], 50)
    shadow.admitted("b", [1, 2, 3, 4], 70)
    assert [lane.hit_blocks for lane in shadow.lanes] == [3, 3]
    shadow.freed("a", [], 3, 4)
    assert all(len(lane.queue) == 0 for lane in shadow.lanes)
    shadow.freed("b", [5], 5, 6)
    assert [sorted(shadow.contents(lane)) for lane in shadow.lanes] == [[1, 2, 3, 4, 5]] * 2


def test_what_is_not_counted_changes_no_rate() -> None:
    """A lookup that the engine leaves out counts neither as a query nor as a hit, but its blocks are held and kept."""
    shadow = PoolShadow(["lru", "arc"], 20, BLOCK)
    shadow.admitted("a", [1, 2, 3], 50)
    queried = shadow.queried_blocks
    shadow.freed("a", [], 3, 4)
    shadow.admitted("a", [1, 2, 3], 50, counted=False)
    assert shadow.queried_blocks == queried
    assert [lane.hit_blocks for lane in shadow.lanes] == [0, 0]
    assert shadow.in_use == 4


def test_blocks_that_were_never_computed_are_not_kept() -> None:
    """A request that ends in the middle of its prompt leaves only the blocks that it says have a hash."""
    shadow = PoolShadow(["lru"], 20, BLOCK)
    shadow.admitted("a", [1, 2, 3, 4], 70)
    shadow.freed("a", [], 2, 3)
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, 2]
    assert shadow.in_use == 0


def test_reset_forgets_contents_and_keeps_what_is_held() -> None:
    """After a reset nothing hits, and the blocks that requests hold are still theirs until they end."""
    shadow = PoolShadow(["lru", "s3fifo", "arc"], 20, BLOCK)
    shadow.admitted("a", [1, 2], 40)
    shadow.freed("a", [], 2, 3)
    shadow.admitted("b", [5, 6], 40)
    shadow.reset()
    assert shadow.in_use == 3
    shadow.freed("b", [7], 3, 4)
    assert shadow.in_use == 0
    shadow.admitted("c", [1, 2, 5], 50)
    assert [lane.hit_blocks for lane in shadow.lanes] == [0, 0, 0]


def test_requests_that_never_end_do_not_take_the_pool_for_ever() -> None:
    """When what is held exceeds two pools, the oldest requests are taken as ended: their end was lost."""
    shadow = PoolShadow(["lru"], 50, BLOCK)
    for number in range(100):
        shadow.admitted(number, [1000 * number + at for at in range(10)], 160)
    assert shadow.in_use <= 100
    shadow.lost()
    assert shadow.in_use == 0
    assert shadow.open_requests == 0
    assert len(shadow.lanes[0].queue) <= 50


def test_freeing_the_unknown_and_admitting_twice_are_harmless() -> None:
    """Events that do not fit each other leave no block in use that nobody holds."""
    shadow = PoolShadow(["lru", "s3fifo", "arc"], 50, BLOCK)
    shadow.freed("stranger", [1, 2, 3], 3, 4)
    shadow.admitted("a", [1, 2, 3], 50)
    assert [lane.hit_blocks for lane in shadow.lanes] == [3, 3, 3]
    shadow.admitted("a", [1, 2, 3], 50)
    shadow.freed("a", [], 3, 4)
    shadow.freed("a", [], 3, 4)
    assert shadow.in_use == 0
    assert [sorted(shadow.contents(lane)) for lane in shadow.lanes] == [[1, 2, 3]] * 3


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_a_sample_estimates_the_rate(policy: str) -> None:
    """A quarter of the blocks, in a quarter of the pool, hits about what the whole hits (3 points here, 800 blocks)."""
    side = Side(policy, 4, 3, sample=0.25)
    side.serve(Traffic(3), 3000)
    lane, shadow = side.shadow.lanes[0], side.shadow
    assert 0.2 < shadow.queried_blocks * BLOCK / side.pool.queries < 0.3
    assert lane.hit_blocks / shadow.queried_blocks == pytest.approx(side.pool.hits / side.pool.queries, abs=0.03)
    while side.running:
        side.end_one()
    assert shadow.in_use == 0


def test_arrays_and_lists_are_the_same() -> None:
    """Hashes may come as an array of uint64 or as integers."""
    lanes = []
    for kind in (np.array, list):
        shadow = PoolShadow(["s3fifo"], 30, BLOCK)
        for number in range(6):
            hashes = [2**63 + at for at in range(number % 3, 8)]
            given = kind(hashes, dtype=np.uint64) if kind is np.array else hashes
            shadow.admitted(number, given, 200)
            shadow.freed(number, given[8:], len(hashes), 13)
        lanes.append((shadow.lanes[0].hit_blocks, shadow.contents(shadow.lanes[0])))
    assert lanes[0] == lanes[1]
