"""The patch on a live vLLM in this process: attached late, switched while serving, same answers, no trace left."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patch import attach, plugin
from engine_patch.policy import POLICIES
from tests.engine.attached import (
    Ears,
    answers,
    attached,
    attachment_of,
    environment,
    hot_hit_rate,
    mixed,
    no_hook_left,
    outputs,
    queue_of,
    scheduler_of,
    with_ears,
)

Engines = Callable[..., Any]
# Few blocks for eight answers that grow: requests are preempted all the time.
TIGHT = {"max_model_len": 512, "num_gpu_blocks_override": 26}
PROMPTS = mixed(7, 60)
GROWING = [tokens[:150] for tokens in mixed(3, 24)]
STOCK = {
    (owner, name): vars(owner)[name]
    for owner in (BlockPool, KVCacheCoordinator, KVCacheManager, FreeKVCacheBlockQueue, Scheduler)
    for name in vars(owner)
    if callable(vars(owner)[name]) and name != "__init__"
}


@pytest.fixture(scope="module")
def stock(engines: Engines) -> dict[str, Any]:
    """What vLLM's own engine answers, with the plugin loaded and WAKMAN_POLICY=off."""
    with pytest.MonkeyPatch.context() as patch, environment(patch, WAKMAN_POLICY="off"):
        llm = engines()
    return {
        "status": attachment_of(llm).status(),
        "order": attachment_of(llm).set_mode("s3fifo", "test", ""),
        "queue": type(queue_of(llm)),
        "hooks": no_hook_left(llm),
        "answers": answers(llm, PROMPTS),
        "growing": answers(llm, GROWING, max_tokens=120),
    }


@pytest.fixture(scope="module")
def ears() -> Iterator[Ears]:
    with pytest.MonkeyPatch.context() as patch:
        yield with_ears(patch)


@pytest.fixture(scope="module")
def llm(engines: Engines, stock: dict[str, Any], ears: Ears) -> Any:
    """One attached engine, with ears for a shadow; the tests below go on where the one before left it."""
    with pytest.MonkeyPatch.context() as patch, environment(patch):
        return engines()


def test_register_twice_wraps_once() -> None:
    """However often the plugin is loaded, the scheduler's constructor is wrapped once, and keeps its signature."""
    import inspect

    plugin.register()
    first = Scheduler.__init__
    plugin.register()
    assert Scheduler.__init__ is first
    assert "vllm_config" in inspect.signature(Scheduler.__init__).parameters


def test_off_leaves_vllm_as_it_is(stock: dict[str, Any]) -> None:
    """With WAKMAN_POLICY=off the engine has vLLM's own queue and methods, and status and refusals say why."""
    assert (stock["status"]["attached"], stock["status"]["reason"]) == (False, "WAKMAN_POLICY=off")
    assert stock["queue"] is FreeKVCacheBlockQueue
    assert stock["hooks"] == []
    assert stock["order"] == {"ok": False, "error": "not attached: WAKMAN_POLICY=off"}


def test_answers_are_the_same_whatever_policy_is_live(llm: Any, stock: dict[str, Any]) -> None:
    """Under heavy eviction every policy, switched to on the live, gives the answers of stock vLLM, token for token."""
    patch = attached(llm)
    assert (patch.status()["policy"], patch.status()["mode"]) == ("lru", "auto")
    for policy in (*POLICIES, "lru", "arc", "s3fifo", "lru"):
        assert patch.set_mode(policy, "test", "try all")["ok"]
        assert answers(llm, PROMPTS) == stock["answers"], policy
    status = patch.status()
    assert (status["faults"], status["self_check_failures"], status["free_blocks"]) == (0, 0, 63)
    assert status["self_checks"] == status["switches"] == len(POLICIES) + 3
    assert {vars(owner)[name] is method for (owner, name), method in STOCK.items()} == {True}


def test_the_live_policy_decides_what_is_kept(llm: Any) -> None:
    """Hot prefixes between one-off prompts are hit more often under S3-FIFO than under LRU, there and back."""
    patch, prompts, rate = attached(llm), mixed(11, 90), {}
    for phase, policy in enumerate(("s3fifo", "lru", "s3fifo")):
        patch.set_mode(policy, "test", "")
        rate[phase, policy] = hot_hit_rate(outputs(llm, prompts))
    assert min(rate[0, "s3fifo"], rate[2, "s3fifo"]) > rate[1, "lru"] + 0.05, rate


def test_detached_nothing_is_left(llm: Any, stock: dict[str, Any], ears: Ears) -> None:
    """`off` gives the very stock class and methods back, keeps what is cached, stops the shadow, and is final."""
    patch = attached(llm)
    patch.set_mode("s3fifo", "test", "")
    answers(llm, PROMPTS[:30])
    free = [block.block_id for block in queue_of(llm).get_all_free_blocks()]
    told = patch.set_mode("off", "test", "enough")
    assert told == {"ok": True, "error": None, "from": "s3fifo", "to": "lru", "mode": "off"}
    assert type(queue_of(llm)) is FreeKVCacheBlockQueue
    assert set(vars(queue_of(llm))) == {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"}
    assert [block.block_id for block in queue_of(llm).get_all_free_blocks()] == free
    assert no_hook_left(llm) == []
    assert ears.closed == 1
    heard = len(ears.told)
    assert answers(llm, PROMPTS) == stock["answers"]
    assert len(ears.told) == heard
    status = patch.status()
    assert (status["attached"], status["policy"], status["reason"]) == (False, None, "switched off by test: enough")
    assert patch.history()[-1]["cause"] == "manual"
    assert patch.set_mode("arc", "test", "")["ok"] is False


def test_answers_are_the_same_under_preemption(
    engines: Engines, stock: dict[str, Any], ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where requests are preempted and resumed, answers are those of an engine with room; all blocks come back."""
    with environment(monkeypatch, WAKMAN_POLICY="s3fifo"):
        tight = engines(**TIGHT)
    for policy in ("s3fifo", "arc"):
        ears.told.clear()
        assert attached(tight).set_mode(policy, "test", "")["ok"]
        assert answers(tight, GROWING, max_tokens=120) == stock["growing"]
        assert any(not counted for *_, counted, _ in ears.of("admitted")), "nothing was preempted"
    assert attached(tight).status()["free_blocks"] == TIGHT["num_gpu_blocks_override"] - 1


def test_an_engine_that_ends_takes_its_attachment_along(
    engines: Engines, ears: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutdown stops the shadow, and nothing of ours keeps a dead engine alive; the next one has its own."""
    with environment(monkeypatch):
        llm = engines()
    gone, closed = weakref.ref(scheduler_of(llm)), ears.closed
    assert attach.current() is attached(llm)
    del llm
    with environment(monkeypatch, WAKMAN_POLICY="off"):
        second = engines()
    gc.collect()
    assert ears.closed > closed
    assert gone() is None
    assert attachment_of(second).status()["reason"] == "WAKMAN_POLICY=off"
