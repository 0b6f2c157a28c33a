"""Whatever fails in the patch: vLLM's queue and methods are back at once, one line is logged, the status says why."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from engine_patch import attach, free_queue
from engine_patch.attachment import Attachment
from tests.engine.attached import BLOCK, DECISION, Ears, serve, started, with_ears


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    return with_ears(monkeypatch)


@pytest.fixture(autouse=True)
def log() -> Iterator[list[str]]:
    """The warnings that the patch logs, as an operator sees them."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.wakman")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def stock_again(scheduler: Any) -> None:
    """Check that nothing of the patch is left on this engine."""
    manager = scheduler.kv_cache_manager
    queue = manager.block_pool.free_block_queue
    assert type(queue) is FreeKVCacheBlockQueue
    assert set(vars(queue)) == {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"}
    for owner in (scheduler, manager, manager.coordinator, manager.block_pool):
        left = [name for name, value in vars(owner).items() if getattr(value, "__module__", "") == "engine_patch.hooks"]
        assert left == [], owner


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("boom")


Fault = Callable[[pytest.MonkeyPatch, Ears, Any], None]


def _hit(patch: pytest.MonkeyPatch, ears: Ears, there: Attachment) -> None:
    patch.setattr(free_queue, "hit", boom)


def _cached(patch: pytest.MonkeyPatch, ears: Ears, there: Attachment) -> None:
    patch.setattr(free_queue, "cached", boom)


def _admitted(patch: pytest.MonkeyPatch, ears: Ears, there: Attachment) -> None:
    patch.setattr(ears, "admitted", boom)


def _freed(patch: pytest.MonkeyPatch, ears: Ears, there: Attachment) -> None:
    patch.setattr(ears, "freed", boom)


@pytest.mark.parametrize("fault", [_hit, _cached, _admitted, _freed])
def test_a_hook_that_fails_detaches(monkeypatch: pytest.MonkeyPatch, ears: Ears, log: list[str], fault: Fault) -> None:
    """The request in whose middle a hook fails is served as if there were no hook; from then on the engine is stock."""
    scheduler, blocks, there = started(WAKMAN_POLICY="s3fifo")
    serve(blocks, 3)
    fault(monkeypatch, ears, there)
    assert serve(blocks, 20, first=3) == [2 * BLOCK] * 20
    stock_again(scheduler)
    status = there.status()
    assert (status["attached"], status["policy"], status["mode"], status["faults"]) == (False, None, "off", 1)
    assert "(RuntimeError: boom)" in status["reason"]
    (line,) = log
    assert line.startswith("wakman: not attached: a fault in ")
    assert there.history()[-1]["cause"] == "fault"
    assert ears.closed == 1
    assert blocks.num_free == 16


def _link(patch: pytest.MonkeyPatch, ears: Ears, there: Any) -> None:
    patch.setattr(ears, "poll", boom)


def _control(patch: pytest.MonkeyPatch, ears: Ears, there: Any) -> None:
    patch.setattr(there.control, "poll", boom)


def _check(patch: pytest.MonkeyPatch, ears: Ears, there: Any) -> None:
    patch.setattr(free_queue.Sweep, "step", boom)


def _switch(patch: pytest.MonkeyPatch, ears: Ears, there: Any) -> None:
    patch.setattr(free_queue, "switch", boom)


@pytest.mark.parametrize("fault", [_link, _control, _check, _switch])
def test_a_poll_that_fails_detaches(monkeypatch: pytest.MonkeyPatch, ears: Ears, log: list[str], fault: Fault) -> None:
    """What fails between two steps (the link, the control, a check, a switch) ends the same way, and raises nothing."""
    scheduler, blocks, there = started(WAKMAN_SELF_CHECK_S="0.001")
    serve(blocks, 3)
    fault(monkeypatch, ears, there)
    ears.decisions.append(DECISION)
    there.poll(time.monotonic() + 1)
    there.poll(time.monotonic() + 2)
    stock_again(scheduler)
    assert "a fault in poll (RuntimeError: boom)" in there.status()["reason"]
    assert len(log) == 1
    assert serve(blocks, 20, first=3) == [2 * BLOCK] * 20


def test_an_order_whose_switch_fails_detaches(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """A manual switch that fails inside answers with the reason, and leaves the engine stock."""
    scheduler, _, there = started()
    monkeypatch.setattr(free_queue, "switch", boom)
    told = there.set_mode("arc", "test", "")
    assert told == {"ok": False, "error": "not attached: a fault in the switch to arc (RuntimeError: boom)"}
    stock_again(scheduler)


def test_a_policy_that_fails_inside_is_found_out(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """The queue itself goes on as LRU; the next poll detaches and says which policy failed."""
    scheduler, blocks, there = started(WAKMAN_POLICY="s3fifo")
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    serve(blocks, 3)
    monkeypatch.setattr(type(queue), "_choose", boom)
    assert serve(blocks, 5, first=3) == [2 * BLOCK] * 5
    there.poll(time.monotonic() + 1)
    assert "s3fifo: RuntimeError: boom" in there.status()["reason"]
    stock_again(scheduler)


def test_a_release_that_fails_still_gives_the_class_back(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """The way back does not hang on any of our own code working."""
    scheduler, blocks, there = started(WAKMAN_POLICY="arc")
    monkeypatch.setattr(free_queue, "release", boom)
    monkeypatch.setattr(ears, "close", boom)
    monkeypatch.setattr(there.control, "close", boom)
    there.detach("test")
    queue = scheduler.kv_cache_manager.block_pool.free_block_queue
    assert type(queue) is FreeKVCacheBlockQueue
    assert not there.attached
    serve(blocks, 10)


@pytest.mark.parametrize("where", ["engine_patch.free_queue.adopt", "engine_patch.hooks.Hooks.install"])
def test_a_start_that_fails_leaves_vllm_untouched(
    monkeypatch: pytest.MonkeyPatch, ears: Ears, log: list[str], where: str
) -> None:
    """When attaching itself fails, however far it came, the engine is stock and says so in one line."""
    monkeypatch.setattr(where, boom)
    scheduler, blocks, there = started(WAKMAN_POLICY="s3fifo")
    assert isinstance(there, attach.NotAttached)
    assert log == ["wakman: not attached: attaching failed (RuntimeError: boom)"]
    stock_again(scheduler)
    assert serve(blocks, 5) == [0, *[2 * BLOCK] * 4]
    assert attach.of(scheduler) is there


def test_hooks_that_go_in_by_half_come_out(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """An install that fails at the last hook takes out the first ones."""
    from engine_patch.hooks import Hooks

    monkeypatch.setattr(Hooks, "_clock", boom)
    scheduler, _, there = started()
    assert isinstance(there, attach.NotAttached)
    stock_again(scheduler)


@pytest.mark.parametrize("where", ["engine_patch.link.ShadowLink", "engine_patch.events.Recorder"])
def test_without_a_shadow_the_policy_stays(monkeypatch: pytest.MonkeyPatch, log: list[str], where: str) -> None:
    """A shadow that cannot be made is no reason not to attach: orders work, nothing is decided, the status says so."""
    monkeypatch.setattr(where, boom)
    _, blocks, there = started()
    assert there.attached
    assert there.status()["shadow"] == {"up": False, "error": "RuntimeError: boom"}
    assert log == ["wakman: no shadow, so nothing is decided (RuntimeError: boom)"]
    assert there.set_mode("s3fifo", "test", "")["ok"]
    assert serve(blocks, 10) == [0, *[2 * BLOCK] * 9]
    there.poll(time.monotonic() + 1)
    assert there.attached


def test_without_control_the_engine_is_attached(monkeypatch: pytest.MonkeyPatch, ears: Ears) -> None:
    """A control that cannot start costs the file and the spans, nothing else."""
    monkeypatch.setattr("engine_patch.control.started", boom)
    _, blocks, there = started(WAKMAN_POLICY="s3fifo")
    assert there.attached
    assert there.control is None
    there.poll(time.monotonic() + 1)
    serve(blocks, 5)
    assert there.attached


def test_a_listener_that_fails_hurts_nobody(ears: Ears) -> None:
    """Metrics and spans hang on listeners: one that raises is passed over, the next hears."""
    heard: list[str] = []
    _, _, there = started()
    there.listeners[:] = [boom, lambda event, told: heard.append(event)]
    assert there.set_mode("arc", "test", "")["ok"]
    assert heard == ["switch"]


def test_a_second_plugin_that_patches_the_queue(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    """Another plugin's queue class stays in charge, and the log says so in one line."""
    their_queue = type("TheirQueue", (FreeKVCacheBlockQueue,), {"__module__": "their.plugin"})
    monkeypatch.setattr("vllm.v1.core.block_pool.FreeKVCacheBlockQueue", their_queue)
    scheduler, blocks, there = started()
    assert not there.attached
    assert log == ["wakman: not attached: the queue is a their.plugin.TheirQueue, not vLLM's FreeKVCacheBlockQueue"]
    assert type(scheduler.kv_cache_manager.block_pool.free_block_queue) is their_queue
    serve(blocks, 5)


def test_a_second_plugin_that_wraps_our_hook_later(ears: Ears) -> None:
    """A wrapper that somebody put over our hook stays when we leave; our hook under it only passes on."""
    scheduler, blocks, there = started(WAKMAN_POLICY="s3fifo")
    pool = scheduler.kv_cache_manager.block_pool
    ours, seen = pool.cache_full_blocks, []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return ours(*args, **kwargs)

    pool.cache_full_blocks = theirs
    serve(blocks, 2)
    there.detach("test")
    assert pool.cache_full_blocks is theirs
    assert serve(blocks, 5, first=2) == [2 * BLOCK] * 5
    assert len(seen) == 7
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
