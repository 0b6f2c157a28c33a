"""The two ways to look at a queue: all at once, and in slices while the pool goes on working."""

from collections.abc import Callable
from typing import Any

import pytest

from engine_patch import free_queue
from engine_patch.policy import POLICIES
from tests.engine.pool_driver import PoolDriver, chain


def swept(pool: PoolDriver, slice_: int = 4, between: Callable[[], Any] = lambda: None) -> str | None:
    """Return what a whole sweep finds, with something done between two slices."""
    sweep = free_queue.Sweep(pool.queue, pool.state, pool.pool)
    while not sweep.done:
        if (wrong := sweep.step(slice_)) is not None:
            return wrong
        between()
    return None


def at_once(pool: PoolDriver) -> str | None:
    return free_queue.check(pool.queue, pool.state, pool.pool)


def used(policy: str) -> PoolDriver:
    """Return a pool of 16 with all three parts in it: blocks 5 … 1 small or main, the others in front."""
    pool = PoolDriver(0, 16)
    free_queue.switch(pool.queue, pool.state, policy)
    for path in ((1, 2, 3), (1, 2, 4, 5), (1, 2, 3)):
        request = pool.start(chain(path), len(path), most=len(path))
        assert request is not None
        pool.finish(request)
    assert pool.state is not None
    assert pool.state.num_front
    assert pool.state.num_main
    assert pool.queue.num_free_blocks > pool.state.num_front + pool.state.num_main
    return pool


def unlink(pool: PoolDriver, block: Any) -> None:
    """Take a block out of the list, and of the count, as if it were in use."""
    block.prev_free_block.next_free_block = block.next_free_block
    block.next_free_block.prev_free_block = block.prev_free_block
    block.prev_free_block = block.next_free_block = None
    pool.queue.num_free_blocks -= 1


def swap(pool: PoolDriver) -> None:
    """Put the last block of all before the first one."""
    head, tail = pool.queue.fake_free_list_head, pool.queue.fake_free_list_tail
    last, first = tail.prev_free_block, head.next_free_block
    tail.prev_free_block = last.prev_free_block
    last.prev_free_block.next_free_block = tail
    head.next_free_block = first.prev_free_block = last
    last.prev_free_block, last.next_free_block = head, first


def first_free(pool: PoolDriver) -> Any:
    return pool.queue.fake_free_list_head.next_free_block


HARM: dict[str, tuple[Callable[[PoolDriver], Any], str]] = {
    "count": (lambda pool: setattr(pool.queue, "num_free_blocks", 3), "counted"),
    "half a link": (lambda pool: setattr(first_free(pool).next_free_block, "prev_free_block", None), "broken"),
    "a link to another": (
        lambda pool: setattr(first_free(pool).next_free_block, "prev_free_block", pool.queue.fake_free_list_tail),
        "broken",
    ),
    "in use": (lambda pool: setattr(first_free(pool), "ref_cnt", 2), "in use 2 times"),
    "main's count": (lambda pool: setattr(pool.state, "num_main", 9), "counted"),
    "the front's count": (lambda pool: setattr(pool.state, "num_front", 1), "front"),
    "the front's last": (lambda pool: setattr(pool.state, "front_last", first_free(pool)), "front"),
    "main's first": (lambda pool: setattr(pool.state, "main_first", first_free(pool)), "main"),
    "order": (swap, "block"),
    "class": (lambda pool: setattr(pool.state, "policy", "lru"), "class"),
    "ends": (lambda pool: setattr(pool.queue.fake_free_list_tail, "next_free_block", pool.pool.blocks[3]), "ends"),
}


@pytest.mark.parametrize("look", [at_once, swept])
@pytest.mark.parametrize("harm", HARM)
def test_each_kind_of_damage_is_found_and_said(harm: str, look: Callable[[PoolDriver], str | None]) -> None:
    """Both ways find nothing in a queue that is whole, and name what is not."""
    pool = used("s3fifo")
    assert look(pool) is None
    do, found = HARM[harm]
    do(pool)
    said = look(pool)
    assert said is not None
    assert found in said


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_that_got_lost_is_found(policy: str) -> None:
    """A block that is neither free nor in use, though everything else adds up."""
    pool = PoolDriver(0, 16)
    free_queue.switch(pool.queue, pool.state, policy)
    unlink(pool, first_free(pool).next_free_block)
    assert "neither in the list nor in use" in str(swept(pool))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_found_while_the_pool_works_between_the_slices(seed: int) -> None:
    """400 sweeps with random operations between slices of two blocks, under every policy."""
    pool = PoolDriver(seed, 24)
    for number in range(400):
        free_queue.switch(pool.queue, pool.state, POLICIES[number % len(POLICIES)])
        assert swept(pool, 2, lambda: [pool.step() for _ in range(3)]) is None
        assert pool.state is not None
        assert pool.state.fault is None


def test_a_sweep_sees_every_block_once() -> None:
    """As many slices as the pool has blocks for, the last one may be short."""
    pool = PoolDriver(0, 16)
    sweep = free_queue.Sweep(pool.queue, pool.state, pool.pool)
    slices = 0
    while not sweep.done:
        assert sweep.step(5) is None
        slices += 1
    assert slices == 4
