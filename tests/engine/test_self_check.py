"""The checks of an attached engine's queue: when they are made, what a mismatch does, and that they come to an end."""

import gc
import time

import pytest

from engine_patch import attach, free_queue
from engine_patch.attachment import Attachment
from tests.engine.attached import BLOCK, Ears, bare, serve, started, with_ears
from tests.engine.test_faults import ears, log, stock_again

__all__ = ["ears", "log"]


def test_a_mismatch_in_the_self_check_returns_to_lru(ears: Ears, log: list[str]) -> None:
    """A queue that does not add up is counted, told, and handed back to vLLM's own class."""
    scheduler, blocks, there = started(WAKMAN_POLICY="s3fifo", WAKMAN_SELF_CHECK_S="0.001")
    serve(blocks, 10)
    there.poll(time.monotonic() + 1)
    assert there.attached
    scheduler.kv_cache_manager.block_pool.free_block_queue.wakman.num_main += 1
    there.poll(time.monotonic() + 2)
    status = there.status()
    assert (status["self_check_failures"], status["attached"], status["faults"]) == (1, False, 0)
    assert "failed its self-check" in status["reason"]
    assert there.history()[-1]["cause"] == "self-check"
    assert len(log) == 1
    stock_again(scheduler)
    assert serve(blocks, 10, first=10) == [2 * BLOCK] * 10


def test_a_switch_is_checked(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """Each switch is followed by a check; when that finds something the order is answered with it."""
    scheduler, _, there = started()
    monkeypatch.setattr(free_queue.Sweep, "step", lambda _: "block 7 is in the list twice")
    told = there.set_mode("s3fifo", "test", "")
    assert told["ok"] is False
    assert "block 7 is in the list twice" in told["error"]
    stock_again(scheduler)


def test_the_check_of_a_large_pool_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 blocks before each step, so no step waits for the whole; damage in the last slice is found with it."""
    with_ears(monkeypatch)
    scheduler, blocks = bare(5000)
    there = attach.attach(scheduler, {})
    assert isinstance(there, Attachment)
    pool = scheduler.kv_cache_manager.block_pool
    now = time.monotonic()
    assert there.set_mode("s3fifo", "test", "")["ok"]
    checks = []
    for step in range(2):
        serve(blocks, 1, first=step)
        assert there._hooks is not None
        assert there._hooks.due <= now
        there.poll(now)
        checks.append(there.status()["self_checks"])
    assert checks == [0, 1]
    assert there._hooks.due > now
    pool.blocks[4999].next_free_block = None
    assert there.set_mode("arc", "test", "")["ok"]
    there.poll(now)
    assert there.attached
    there.poll(now)
    assert not there.attached
    assert "the list is broken at block 4999" in there.status()["reason"]


def test_a_check_that_is_due_lets_the_one_under_way_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more slices than steps between two checks each is finished all the same, and the next one follows."""
    with_ears(monkeypatch)
    scheduler, _ = bare(5000)
    there = attach.attach(scheduler, {"WAKMAN_SELF_CHECK_S": "1"})
    assert isinstance(there, Attachment)
    now = time.monotonic()
    for step in range(12):
        there.poll(now + 2 * step)
    assert there.attached
    assert there.status()["self_checks"] == 5


def test_who_is_detached_keeps_nothing_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known of blocks and evicted contents is given back, in the middle of a check as at any time."""
    with_ears(monkeypatch)
    scheduler, blocks = bare(5000)
    there = attach.attach(scheduler, {})
    assert isinstance(there, Attachment)
    pool = scheduler.kv_cache_manager.block_pool

    def kept() -> int:
        gc.collect()
        return sum(type(one) is free_queue.LinkedState and one.pool is pool for one in gc.get_objects())

    assert there.set_mode("arc", "test", "")["ok"]
    serve(blocks, 3)
    assert kept() == 1
    assert there.set_mode("off", "test", "")["ok"]
    assert kept() == 0
    assert there.status()["self_checks"] == 0
    serve(blocks, 3, first=3)
