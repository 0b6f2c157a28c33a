"""Blocks that leave the queue without their hashes: only where vLLM does the same, and nobody sees a difference."""

from functools import partial
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from engine_patch import free_queue, free_queue_segments
from engine_patch.free_queue_clear import can_clear
from engine_patch.policy import POLICIES
from tests.engine.pool_driver import PoolDriver, chain, new_pool

KEYED = [policy for policy in POLICIES if policy != "lru"]


def test_the_versions_that_are_tested_are_known() -> None:
    """What this vLLM does with an evicted block is what was read; a version with another code is to be read first."""
    assert can_clear(new_pool(8))


@pytest.mark.parametrize("name", ["get_new_blocks", "_maybe_evict_cached_block", "_remove_cached_block_hashes"])
def test_a_function_that_is_not_vllms_own_is_left_to_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the class was patched or the pool: blocks are given with their hashes."""
    stock = getattr(BlockPool, name)
    patched = new_pool(8)
    setattr(patched, name, partial(stock, patched))
    assert not can_clear(patched)

    def theirs(self: Any, *args: Any) -> Any:
        return stock(self, *args)

    monkeypatch.setattr(BlockPool, name, theirs)
    assert not can_clear(new_pool(8))
    assert not PoolDriver(0, 8).state.clears_hashes


def test_a_map_of_hashes_that_is_not_vllms_own_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who follows what leaves the map does so in its `pop`, which is not called for what leaves with our blocks."""
    pool = new_pool(8)
    stock = type(pool.cached_block_hash_to_block).pop

    def theirs(self: Any, *args: Any) -> Any:
        return stock(self, *args)

    monkeypatch.setattr(type(pool.cached_block_hash_to_block), "pop", theirs)
    assert not can_clear(pool)


@pytest.mark.parametrize("policy", KEYED)
def test_a_fault_while_hashes_are_taken_out_loses_no_block(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks are given all the same, vLLM takes out what is left, and the queue goes on as vLLM's own."""
    pool = PoolDriver(0, 8)
    free_queue.switch(pool.queue, pool.state, policy)
    request = pool.start(chain((1, 2, 3)), 3)
    assert request is not None
    pool.finish(request)

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(free_queue_segments, "clear_hashes", fail)
    blocks = pool.pool.get_new_blocks(8)
    assert sorted(block.block_id for block in blocks) == list(range(1, 9))
    assert not pool.pool.cached_block_hash_to_block._cache
    assert pool.state is not None
    assert "broken" in str(pool.state.fault)
    assert type(pool.queue) is pool.state.classes["lru"]


@pytest.mark.parametrize("policy", KEYED)
@pytest.mark.parametrize("seed", range(2))
def test_a_pool_that_clears_does_what_one_does_that_leaves_it_to_vllm(policy: str, seed: int) -> None:
    """The same random work: after each operation the same blocks free, in the same order, the same map of hashes."""
    clearing, leaving = PoolDriver(seed, 32), PoolDriver(seed, 32)
    assert clearing.state is not None
    assert clearing.state.clears_hashes
    assert leaving.state is not None
    leaving.state.clears_hashes = False
    for pool in (clearing, leaving):
        free_queue.switch(pool.queue, pool.state, policy)
    for _ in range(3000):
        names = [pool.step() for pool in (clearing, leaving)]
        assert names[0] == names[1]
        assert seen(clearing) == seen(leaving)


def seen(pool: PoolDriver) -> tuple[Any, ...]:
    """Return what vLLM can see of a pool."""
    known = {
        content: list(found) if isinstance(found, dict) else [found.block_id]
        for content, found in pool.pool.cached_block_hash_to_block._cache.items()
    }
    blocks = [(block.block_hash, block.ref_cnt) for block in pool.pool.blocks]
    return [block.block_id for block in pool.queue.get_all_free_blocks()], known, blocks


class Collector:
    """A collector of block metrics that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda block=None: self.told.append((name, block.block_id, block.block_hash is None))


@pytest.mark.parametrize("listener", ["events", "metrics"])
@pytest.mark.parametrize("policy", KEYED)
def test_events_and_metrics_are_told_all_they_are_told_without_us(policy: str, listener: str) -> None:
    """Where somebody listens, vLLM evicts by itself: the same events of removed blocks, the same calls."""
    told = []
    for clears in (True, False):
        pool = PoolDriver(0, 16)
        assert pool.state is not None
        pool.state.clears_hashes = clears
        collector = Collector()
        if listener == "metrics":
            pool.pool.metrics_collector = collector
        free_queue.switch(pool.queue, pool.state, policy)
        for at in range(12):
            pool.pool.enable_kv_cache_events = False
            request = pool.start(chain((at % 5, at % 3, 1)), 3)
            assert request is not None
            pool.finish(request)
            pool.pool.enable_kv_cache_events = listener == "events"
            pool.pool.free_blocks(pool.pool.get_new_blocks(7))
        removed = [event for event in pool.pool.take_events() if type(event).__name__ == "BlockRemoved"]
        assert removed if listener == "events" else collector.told
        told.append((removed, collector.told))
    assert told[0] == told[1]


@pytest.mark.parametrize("policy", KEYED)
def test_of_two_copies_the_one_that_stays_is_found(policy: str) -> None:
    """A content that is in two blocks is vLLM's to take out of the map: the other block stays in it."""
    pool = PoolDriver(0, 4)
    free_queue.switch(pool.queue, pool.state, policy)
    for _ in range(2):
        request = pool.start(chain((1, 2)), 2, most=1)
        assert request is not None
        pool.finish(request)
    assert len(pool.pool.cached_block_hash_to_block._cache[chain((1, 2))[1] + b"\0\0\0\0"]) == 2
    pool.pool.get_new_blocks(2)
    assert len(pool.lookup(chain((1, 2)), 2)) == 2
