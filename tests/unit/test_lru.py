"""The LRU order of free blocks."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patch.lru import LruQueue


def test_evicts_the_block_that_was_freed_first() -> None:
    """Blocks leave in the order in which they came."""
    queue = LruQueue([3, 1, 2])
    queue.append(0)
    assert [queue.evict() for _ in range(4)] == [3, 1, 2, 0]


def test_a_block_that_was_hit_is_not_evicted_and_comes_back_last() -> None:
    """A hit takes a block out; freed again, it is the youngest."""
    queue = LruQueue(range(3))
    queue.remove(0)
    assert 0 not in queue
    queue.append(0)
    assert list(queue) == [1, 2, 0]


def test_a_block_without_a_hash_goes_first() -> None:
    """A prepended block is evicted before all others."""
    queue = LruQueue(range(3))
    queue.prepend(7)
    assert queue.evict() == 7


def test_refuses_a_block_twice_and_one_that_is_not_there() -> None:
    """Freeing twice, hitting a block in use and evicting from nothing are faults of the caller."""
    queue = LruQueue([1])
    for free in (queue.append, queue.prepend):
        with pytest.raises(AssertionError, match="free already"):
            free(1)
    assert queue.evict() == 1
    with pytest.raises(KeyError):
        queue.evict()
    with pytest.raises(KeyError):
        queue.remove(1)


@given(st.lists(st.tuples(st.sampled_from(["append", "prepend", "remove", "evict"]), st.integers(0, 7))))
def test_agrees_with_a_plain_list(operations: list[tuple[str, int]]) -> None:
    """Whatever is done to it, the queue holds what a deque would."""
    queue, model = LruQueue(), deque[int]()
    for name, block in operations:
        if name in ("append", "prepend") and block not in model:
            getattr(queue, name)(block)
            model.append(block) if name == "append" else model.appendleft(block)
        elif name == "remove" and block in model:
            queue.remove(block)
            model.remove(block)
        elif name == "evict" and model:
            assert queue.evict() == model.popleft()
        assert list(queue) == list(model)
        assert len(queue) == len(model)
        assert (block in queue) == (block in model)
