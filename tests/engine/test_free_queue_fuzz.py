"""Random work on vLLM's own block pool: whatever policy is live, list, counts and bytes stay as they must be."""

import pytest

from engine_patch import free_queue
from engine_patch.policy import POLICIES
from tests.engine.pool_driver import PoolDriver

SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.newest) for seed in range(2, 8))]
OPERATIONS = 20_000


def wrong(driver: PoolDriver) -> str | None:
    """Return what is wrong with the pool: the queue's own check, then what vLLM's code takes for granted."""
    pool, queue, state = driver.pool, driver.queue, driver.state
    assert state is not None
    if (found := free_queue.check(queue, state, pool)) is not None:
        return found
    if state.fault is not None:
        return state.fault
    free = queue.get_all_free_blocks()
    in_use = {id(block) for request in driver.running for block in request.blocks}
    if len(free) + len(in_use) != len(pool.blocks) - 1 or any(id(block) in in_use for block in free):
        return f"{len(free)} blocks are free, {len(in_use)} in use"
    for block in free:
        if block.ref_cnt:
            return f"block {block.block_id} is free and in use"
    for block in pool.blocks:
        if block.block_hash is not None and pool.get_cached_block(block.block_hash[:-4], [0]) is None:
            return f"block {block.block_id} has a hash that is not found"
    if state.policy == "lru" and (len(state.ghost) or len(state.ghost_main)):
        return "ghosts under LRU"
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_every_invariant_holds_after_every_operation(seed: int) -> None:
    """20,000 random operations a seed, policies switched among all six meanwhile, checked after each."""
    driver = PoolDriver(seed, num_blocks=(24, 40, 64, 12)[seed % 4])
    rng, live = driver.rng, set()
    for _ in range(OPERATIONS):
        if rng.random() < 0.01:
            assert driver.state is not None
            free_queue.switch(driver.queue, driver.state, rng.choice(POLICIES))
            live.add(driver.state.policy)
        name = driver.step()
        assert (found := wrong(driver)) is None, f"after {driver.operations} operations, {name}: {found}"
    assert live == set(POLICIES)
