"""Switching, copies, orphans and faults of the linked queues, each by itself on vLLM's own pool."""

import sys
from typing import Any

import pytest

from engine_patch import free_queue
from engine_patch.policy import POLICIES
from tests.engine.pool_driver import PoolDriver, Running, chain, new_pool, stock_class

KEYED = [policy for policy in POLICIES if policy != "lru"]


def driver(policy: str, size: int = 16, **options: Any) -> PoolDriver:
    """Return a pool under a policy."""
    made = PoolDriver(0, size, **options)
    free_queue.switch(made.queue, made.state, policy)
    return made


def serve(pool: PoolDriver, *path: int) -> list[int]:
    """Run a request over a path of the tree from start to end; return the ids of its blocks."""
    request = pool.start(chain(path), len(path), most=len(path))
    assert request is not None
    pool.finish(request)
    return [block.block_id for block in request.blocks]


def cached(pool: PoolDriver, *path: int) -> int:
    """Return how many blocks of a path are found."""
    return len(pool.lookup(chain(path), len(path)))


def test_lru_adds_nothing_to_vllms_class() -> None:
    """Under LRU what runs is vLLM's code: the class has no method of ours."""
    lru = free_queue.queue_classes(stock_class())["lru"]
    assert lru.__mro__[1] is stock_class()
    assert not [name for name, value in vars(lru).items() if callable(value)]


@pytest.mark.parametrize("after", POLICIES)
@pytest.mark.parametrize("before", POLICIES)
def test_a_switch_loses_no_block_and_nothing_cached(before: str, after: str) -> None:
    """Between any two policies: the same free blocks, everything found as before, and the next eviction works."""
    pool = driver(before)
    for path in ((1, 2, 3), (1, 2, 4), (5, 6), (1, 2, 3)):
        serve(pool, *path)
    free = sorted(block.block_id for block in pool.queue.get_all_free_blocks())
    free_queue.switch(pool.queue, pool.state, after)
    assert pool.state is not None
    assert pool.state.policy == after
    assert sorted(block.block_id for block in pool.queue.get_all_free_blocks()) == free
    assert [cached(pool, *path) for path in ((1, 2, 3), (1, 2, 4), (5, 6))] == [3, 3, 2]
    assert free_queue.check(pool.queue, pool.state, pool.pool) is None
    assert len(pool.pool.get_new_blocks(16)) == 16


@pytest.mark.parametrize("policy", KEYED)
def test_what_a_block_was_before_lru_gave_it_away_is_forgotten(policy: str) -> None:
    """A block that led two chains, taken under LRU and filled after the switch: those chains do not hang on it."""
    pool = driver("lru", 8)
    serve(pool, 1, 2)
    leader = pool.lookup(chain((1,)), 1)[0]
    serve(pool, 1, 3)
    taken = pool.pool.get_new_blocks(8)
    free_queue.switch(pool.queue, pool.state, policy)
    new = Running(chain((9,)), [leader])
    pool.hash_up_to(new, 1)
    pool.pool.free_blocks([block for block in taken if block is not leader])
    pool.finish(new)
    serve(pool, 1, 2)
    serve(pool, 1, 3)
    while pool.lookup(chain((9,)), 1):
        pool.pool.get_new_blocks(1)
    assert pool.state is not None
    assert pool.state.num_front == 0
    assert [cached(pool, *path) for path in ((1, 2), (1, 3))] == [2, 2]


def test_an_unknown_policy_changes_nothing() -> None:
    """The error names the policies; the queue goes on as it was."""
    pool = driver("s3fifo")
    with pytest.raises(ValueError, match="s3fifo-25"):
        free_queue.switch(pool.queue, pool.state, "fifo")
    assert pool.state is not None
    assert pool.state.policy == "s3fifo"


def test_release_gives_vllms_own_class_back() -> None:
    """From any policy: the very class, no attribute left over, all blocks there."""
    for policy in POLICIES:
        pool = driver(policy)
        serve(pool, 1, 2, 3)
        free_queue.release(pool.queue, pool.state)
        assert type(pool.queue) is stock_class()
        assert not hasattr(pool.queue, "wakman")
        assert len(pool.queue.popleft_n(16)) == 16


def test_what_cannot_be_adopted_is_left_alone() -> None:
    """A queue that is ours already, and a pool with another map of hashes, are refused and stay what they are."""
    pool = new_pool(4)
    free_queue.adopt(pool.free_block_queue, pool)
    with pytest.raises(ValueError, match="switchable already"):
        free_queue.adopt(pool.free_block_queue, pool)
    other = new_pool(4)
    other.cached_block_hash_to_block = {}
    with pytest.raises(ValueError, match="map of hashes"):
        free_queue.adopt(other.free_block_queue, other)
    assert type(other.free_block_queue) is stock_class()


@pytest.mark.parametrize("policy", ["s3fifo", "s3fifo-25", "s3fifo-paper-free", "arc"])
def test_what_was_hit_survives_a_scan(policy: str) -> None:
    """A prefix that was hit once outlives a flood of blocks that nobody asks for again; under LRU it does not."""
    for name, kept in ((policy, 2), ("lru", 0)):
        pool = driver(name)
        serve(pool, 1, 2)
        serve(pool, 1, 2)
        for number in range(40):
            serve(pool, 1000 + number, 0)
        assert cached(pool, 1, 2) == kept


@pytest.mark.parametrize("policy", KEYED)
def test_a_hit_on_a_block_in_use_counts(policy: str) -> None:
    """A prefix shared by two requests at a time, never free in between, is a prefix that was hit."""
    pool = driver(policy)
    first = pool.start(chain((1, 2)), 2)
    others = [pool.start(chain((1, 2, 10 + number)), 3) for number in range(3)]
    assert first is not None
    for request in (first, *others):
        assert request is not None
        pool.finish(request)
    for number in range(40):
        serve(pool, 1000 + number, 0)
    assert cached(pool, 1, 2) == 2


@pytest.mark.parametrize("policy", KEYED)
def test_a_copy_goes_first_and_leaves_no_ghost(policy: str) -> None:
    """A prompt of whole blocks sent again makes a copy of its last block: the copy is the next to go, unremembered."""
    pool = driver(policy, size=6)
    serve(pool, 1, 2)
    again = pool.start(chain((1, 2)), 2, most=1)
    assert again is not None
    pool.finish(again)
    copy = again.blocks[1]
    unused = [block for block in pool.queue.get_all_free_blocks() if block.block_hash is None]
    taken = pool.pool.get_new_blocks(len(unused) + 1)
    assert taken[-1] is copy
    assert pool.state is not None
    assert not pool.state.ghost
    assert cached(pool, 1, 2) == 2


@pytest.mark.parametrize("policy", KEYED)
def test_the_oldest_copy_is_treated_as_if_it_were_alone(policy: str) -> None:
    """Content that is hot keeps its place in main although a copy of it was made and freed."""
    pool = driver(policy)
    for _ in range(3):
        serve(pool, 1, 2)
        again = pool.start(chain((1, 2)), 2, most=1)
        assert again is not None
        pool.finish(again)
    for number in range(40):
        serve(pool, 1000 + number, 0)
    assert cached(pool, 1, 2) == 2


@pytest.mark.parametrize("policy", KEYED)
def test_what_hangs_on_an_evicted_parent_is_evicted_next(policy: str) -> None:
    """Blocks that cannot be reached go before all that can, and are not remembered."""
    pool = driver(policy, size=6)
    # The parent in main without a count left, its descendants in small; then main gives the victim.
    serve(pool, 1)
    serve(pool, 1)
    serve(pool, 1, 2, 3)
    parent, child, grandchild = pool.lookup(chain((1, 2, 3)), 3)
    serve(pool, 7, 8)
    state = pool.state
    assert state is not None
    pool.queue.remove(parent)
    free_queue_leave(pool, parent)
    order = pool.queue.get_all_free_blocks()
    unused = [block for block in order if block.block_hash is None]
    assert order[len(unused) : len(unused) + 2] == [child, grandchild]
    assert free_queue.check(pool.queue, state, pool.pool) is None
    pool.pool.get_new_blocks(len(unused) + 2)
    assert cached(pool, 7, 8) == 2
    assert not state.ghost
    assert not state.ghost_main


def free_queue_leave(pool: PoolDriver, block: Any) -> None:
    """Evict one block by hand, wherever it stood, as the queues and the pool do."""
    from engine_patch.free_queue_state import leave

    leave(pool.state, block, block._block_hash)
    block.ref_cnt = 1
    pool.pool._maybe_evict_cached_block(block)


@pytest.mark.parametrize("policy", KEYED)
def test_a_hash_that_vanished_leaves_no_ghost(policy: str) -> None:
    """`evict_blocks` on a free block: it is evicted like any other, and nothing is remembered of it."""
    pool = driver(policy, size=4)
    blocks = serve(pool, 1, 2, 3, 4)
    pool.pool.evict_blocks(set(blocks))
    assert sorted(block.block_id for block in pool.pool.get_new_blocks(4)) == sorted(blocks)
    assert pool.state is not None
    assert not pool.state.ghost
    assert not pool.state.ghost_main


@pytest.mark.parametrize("policy", KEYED)
def test_a_reset_forgets_counts_ghosts_and_links(policy: str) -> None:
    """After a reset the queue is as new: a block of main is as good as any."""
    pool = driver(policy, size=6)
    serve(pool, 1, 2)
    serve(pool, 1, 2)
    for number in range(8):
        serve(pool, 1000 + number)
    assert pool.pool.reset_prefix_cache()
    free_queue.reset(pool.state)
    state = pool.state
    assert state is not None
    assert not state.ghost
    assert not state.ghost_main
    assert free_queue.check(pool.queue, state, pool.pool) is None
    for number in range(6):
        serve(pool, 1000 + number)
    assert [cached(pool, 1000 + number) for number in range(6)] == [1] * 6


def lines_run(of: Any) -> int:
    """Return how many lines of the queue's code a call runs."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("engine_patch."):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        of()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_content_in_a_thousand_blocks_costs_no_more_than_one_in_ten(policy: str) -> None:
    """A prompt that comes again and again leaves a copy of its last block each time; nothing walks over all of them."""
    cost = []
    for copies in (10, 1000):
        pool = driver("lru", 1100)
        for _ in range(copies):
            request = pool.start(chain((1, 2)), 2, most=1)
            assert request is not None
            pool.finish(request)
        free_queue.switch(pool.queue, pool.state, policy)
        once = lines_run(lambda pool=pool: pool.finish(pool.start(chain((1, 2)), 2, most=1)))
        pool.allocate(Running([]), 1100 - copies - 2)
        evicted = lines_run(lambda pool=pool, half=copies // 2: pool.allocate(Running([]), half))
        cost.append((once, evicted / (copies // 2)))
        assert free_queue.check(pool.queue, pool.state, pool.pool) is None
    (hashed_few, evicted_few), (hashed_many, evicted_many) = cost
    assert hashed_many <= hashed_few + 20
    assert evicted_many <= 2 * evicted_few
