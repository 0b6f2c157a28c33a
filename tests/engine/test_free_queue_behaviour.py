"""What vLLM's callers may take for granted of a free-block queue, shown on vLLM's own class and on each of ours."""

from typing import Any

import pytest

from engine_patch import free_queue
from engine_patch.policy import POLICIES
from tests.engine.pool_driver import PoolDriver, chain, stock_class

SIZE = 12
KINDS = ("stock", *POLICIES)


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest) -> PoolDriver:
    """A pool of 12 free blocks, ids 1 to 12, with vLLM's queue or one of ours."""
    made = PoolDriver(0, SIZE, adopted=request.param != "stock")
    if made.state is not None:
        free_queue.switch(made.queue, made.state, request.param)
    return made


def ids(blocks: list[Any]) -> list[int]:
    """Block ids."""
    return [block.block_id for block in blocks]


def free_ids(driver: PoolDriver) -> list[int]:
    """Ids in the list, by vLLM's walker; it must agree with a walk backwards and with the count."""
    queue = driver.queue
    forwards = ids(queue.get_all_free_blocks())
    backwards, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backwards.append(block.block_id)
        block = block.prev_free_block
    assert forwards == backwards[::-1]
    assert queue.num_free_blocks == len(forwards)
    if driver.state is not None:
        assert free_queue.check(queue, driver.state, driver.pool) is None
    return forwards


def test_a_fresh_queue_gives_its_blocks_in_their_order(driver: PoolDriver) -> None:
    """Blocks that were never used go out lowest id first, one by one or many at a time."""
    assert driver.queue.popleft().block_id == 1
    assert ids(driver.queue.popleft_n(3)) == [2, 3, 4]
    assert free_ids(driver) == list(range(5, SIZE + 1))


def test_gives_every_free_block_that_is_asked_for(driver: PoolDriver) -> None:
    """No policy refuses: as many blocks as are free can be had, each once, whatever was hit before."""
    request = driver.start(chain((0, 1, 2, 3, 4)), 5)
    assert request is not None
    driver.finish(request)
    for _ in range(4):
        again = driver.start(chain((0, 1, 2, 3, 4)), 5, most=5)
        assert again is not None
        driver.finish(again)
    assert sorted(ids(driver.pool.get_new_blocks(SIZE))) == list(range(1, SIZE + 1))
    assert free_ids(driver) == []


@pytest.mark.parametrize("count", [0, 1, 2, SIZE])
def test_a_block_is_linked_exactly_while_it_is_free(driver: PoolDriver, count: int) -> None:
    """Blocks that went out have no neighbours; those that stay have two."""
    for block in driver.queue.popleft_n(count):
        assert block.prev_free_block is None
        assert block.next_free_block is None
    for block in driver.queue.get_all_free_blocks():
        assert block.prev_free_block is not None
        assert block.next_free_block is not None
    assert len(free_ids(driver)) == SIZE - count


def test_nothing_is_given_when_nothing_is_asked_for(driver: PoolDriver) -> None:
    """No blocks for 0; ours also for a negative number, which vLLM's class counts as blocks given back."""
    assert driver.queue.popleft_n(0) == []
    if driver.state is not None and driver.state.policy != "lru":
        assert driver.queue.popleft_n(-1) == []
    assert len(free_ids(driver)) == SIZE


def test_more_than_there_is_cannot_be_had(driver: PoolDriver) -> None:
    """Misuse raises what vLLM's class raises, and changes nothing."""
    with pytest.raises(AssertionError):
        driver.queue.popleft_n(SIZE + 1)
    blocks = driver.queue.popleft_n(SIZE)
    with pytest.raises(ValueError, match="No free blocks available"):
        driver.queue.popleft()
    with pytest.raises(RuntimeError, match="remove"):
        driver.queue.remove(blocks[0])
    assert free_ids(driver) == []


@pytest.mark.parametrize("block_id", [1, 6, SIZE])
def test_any_block_can_be_taken_out(driver: PoolDriver, block_id: int) -> None:
    """Head, middle and tail can be removed; the others keep their order."""
    driver.queue.remove(driver.pool.blocks[block_id])
    assert free_ids(driver) == [other for other in range(1, SIZE + 1) if other != block_id]


def test_blocks_that_were_never_hit_go_in_the_order_in_which_they_came(driver: PoolDriver) -> None:
    """Two requests without hits: the first one's blocks go first, each one's tail first; unused blocks before them."""
    for path in ((1, 2, 3), (4, 5, 6)):
        request = driver.start(chain(path), 3)
        assert request is not None
        driver.finish(request)
    assert free_ids(driver) == [*range(7, SIZE + 1), 3, 2, 1, 6, 5, 4]
    assert ids(driver.pool.get_new_blocks(SIZE)) == [*range(7, SIZE + 1), 3, 2, 1, 6, 5, 4]


def test_one_block_comes_back_as_many_do(driver: PoolDriver) -> None:
    """`append` is `append_n` of one block."""
    blocks = driver.queue.popleft_n(2)
    for block in blocks:
        driver.queue.append(block)
    assert sorted(free_ids(driver)) == list(range(1, SIZE + 1))


@pytest.mark.skipif(not hasattr(stock_class(), "prepend_n"), reason="vLLM has it since 0.23")
def test_prepended_blocks_are_the_next_to_go(driver: PoolDriver) -> None:
    """Blocks put before all others leave first, in the order given; none is an order too."""
    blocks = driver.queue.popleft_n(3)
    driver.queue.prepend_n([])
    driver.queue.prepend_n(blocks)
    assert ids(driver.queue.popleft_n(4)) == [1, 2, 3, 4]


def test_blocks_without_a_hash_go_before_those_that_can_be_hit(driver: PoolDriver) -> None:
    """A request's blocks: the last, partly filled one is overwritten first."""
    request = driver.start(chain((1, 2)), 2, extra=SIZE - 2)
    assert request is not None
    driver.finish(request)
    hashed = ids(request.blocks[1::-1])
    if hasattr(stock_class(), "prepend_n") or (driver.state is not None and driver.state.policy != "lru"):
        assert free_ids(driver)[-2:] == hashed


@pytest.mark.skipif(not hasattr(stock_class(), "iter_blocks_after"), reason="vLLM has it since 0.26")
def test_a_walk_sees_every_free_block_from_any_cursor(driver: PoolDriver) -> None:
    """vLLM's iterator works on our lists: from the start, and after any block."""
    request = driver.start(chain((1, 2, 3)), 3)
    assert request is not None
    driver.finish(request)
    whole = free_ids(driver)
    assert ids(list(driver.queue.iter_blocks_after(None))) == whole
    for at, block_id in enumerate(whole):
        assert ids(list(driver.queue.iter_blocks_after(driver.pool.blocks[block_id]))) == whole[at + 1 :]


def test_blocks_hit_while_free_and_while_in_use_come_back(driver: PoolDriver) -> None:
    """Shared blocks leave the list at the first use and come back at the last, once."""
    first = driver.start(chain((1, 2, 3)), 3)
    second = driver.start(chain((1, 2, 3, 4)), 4)
    assert first is not None
    assert second is not None
    assert ids(second.blocks[:3]) == ids(first.blocks)
    driver.finish(first)
    assert len(free_ids(driver)) == SIZE - 4
    driver.finish(second)
    assert sorted(free_ids(driver)) == list(range(1, SIZE + 1))


def test_a_reset_leaves_every_block_free(driver: PoolDriver) -> None:
    """After a reset of the prefix cache nothing is found, and all blocks can be had."""
    request = driver.start(chain((1, 2, 3)), 3)
    assert request is not None
    driver.finish(request)
    assert driver.pool.reset_prefix_cache()
    if driver.state is not None:
        free_queue.reset(driver.state)
    assert driver.lookup(chain((1, 2, 3)), 3) == []
    assert len(free_ids(driver)) == SIZE
    assert len(driver.queue.popleft_n(SIZE)) == SIZE


def test_every_public_method_is_known() -> None:
    """A method of vLLM's queue that is not in the list of known ones might move blocks behind our back."""
    public = {name for name in vars(stock_class()) if not name.startswith("_")}
    assert public <= free_queue.KNOWN_METHODS
