"""A policy that fails inside: the queue goes on as vLLM's own, and no block is lost."""

from typing import Any

import pytest

from engine_patch import free_queue
from engine_patch.free_queue_state import FRONT, MAIN
from tests.engine.pool_driver import chain, stock_class
from tests.engine.test_free_queue_switch import KEYED, driver, serve


@pytest.mark.parametrize("policy", KEYED)
@pytest.mark.parametrize("method", ["_choose", "_evict"])
def test_a_fault_inside_a_policy_ends_in_lru(policy: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue whose policy fails serves the call as vLLM's own class, goes on as that, and says why."""
    pool = driver(policy)
    serve(pool, 1, 2, 3)

    def fail(*_: Any) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(free_queue.queue_classes(stock_class())[policy], method, fail)
    serve(pool, 4, 5, 6)
    state = pool.state
    assert state is not None
    assert state.fault is not None
    assert policy in state.fault
    assert state.policy == "lru"
    assert free_queue.check(pool.queue, state, pool.pool) is None
    assert len(pool.pool.get_new_blocks(16)) == 16


def test_a_fault_in_the_middle_of_an_eviction_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks are out when the policy fails: they count as given, the rest comes from vLLM's code."""
    from engine_patch import free_queue_s3fifo

    pool = driver("s3fifo", size=8)
    serve(pool, 1, 2, 3, 4, 5)
    serve(pool, 1, 2, 9)

    def fail(*_: Any) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(free_queue_s3fifo, "leave", fail)
    assert sorted(block.block_id for block in pool.queue.popleft_n(8)) == list(range(1, 9))
    assert pool.state is not None
    assert pool.state.fault == "s3fifo: RuntimeError: broken"
    assert pool.queue.num_free_blocks == 0


@pytest.mark.parametrize("policy", KEYED)
def test_a_fault_at_any_block_of_a_run_loses_no_block(policy: str) -> None:
    """Wherever in front, small or main a run of evictions fails: each block is given once, and counted."""
    faults = set()
    for block_id in range(1, 17):
        pool = driver(policy)
        for path in ((1, 2, 3), (1, 2, 4), (1, 2, 3), (6, 7, 8), (9,)):
            serve(pool, *path)
        pool.start(chain((6, 7, 8)), 3, most=1)
        pool.finish(pool.running[0])
        state = pool.state
        assert state is not None
        assert any(block.block_hash is not None for block in pool.pool.blocks if state.mark[block.block_id] & FRONT)
        part = state.mark[block_id] & (FRONT | MAIN)
        state.child = Failing(state.child, block_id)
        assert sorted(block.block_id for block in pool.queue.popleft_n(16)) == list(range(1, 17))
        assert pool.queue.num_free_blocks == 0
        assert free_queue.check(pool.queue, state, pool.pool) is None
        if state.fault is not None:
            faults.add(part)
    assert faults == {FRONT, MAIN, 0}


class Failing(list[Any]):
    """A list of which one item cannot be read."""

    def __init__(self, items: list[Any], at: int) -> None:
        super().__init__(items)
        self._at = at

    def __getitem__(self, at: Any) -> Any:
        if at == self._at:
            raise RuntimeError("broken")
        return super().__getitem__(at)
