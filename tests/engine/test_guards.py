"""Each guard on vLLM's real classes: what it refuses, by its words, and that vLLM's own state is allowed."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patch import guards
from engine_patch.block_manager import VllmBlocks
from engine_patch.guards import Engine, refusal, support
from engine_patch.settings import EngineSettings
from tests.engine.attached import bare

NUM_BLOCKS = 16
THEIRS = {"__module__": "their.cache"}


def scheduler() -> Any:
    return bare(NUM_BLOCKS)[0]


def reason(made: Any, **environ: str) -> str | None:
    return refusal(Engine.of(made, EngineSettings.from_env(environ)))


def test_vllms_own_engine_is_allowed() -> None:
    """Nothing stands against a stock engine, and looking at it changes nothing."""
    made = scheduler()
    pool = made.kv_cache_manager.block_pool
    before = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert reason(made) is None
    assert type(pool.free_block_queue) is FreeKVCacheBlockQueue
    assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == before


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("0.32.0", "tested"),
        ("0.32.1.dev7+gabc.cpu", "tested"),
        ("0.27.1", "tested"),
        ("0.26.0", "best effort"),
        ("0.14.0rc1", "best effort"),
        ("0.13.0", "none"),
        ("0.33.0", "none"),
        ("1.27.0", "none"),
        ("dev", "none"),
        ("", "none"),
        ("0.x", "none"),
    ],
)
def test_versions(version: str, level: str) -> None:
    """0.27 to 0.32 are tested, 0.14 to 0.26 best effort, whatever else is none."""
    assert support(version) == level


@pytest.mark.parametrize("version", ["0.33.0", "0.13.2", "dev"])
def test_another_version_needs_force(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A version out of the range is refused by name, and WAKMAN_FORCE=1 lets it through to the other guards."""
    monkeypatch.setattr(vllm, "__version__", version)
    assert reason(scheduler()) == f"vLLM {version} is not among 0.14 to 0.32 (WAKMAN_FORCE=1 tries it)"
    assert reason(scheduler(), WAKMAN_FORCE="1") is None


def test_faulty_settings_and_off() -> None:
    """A faulty setting is the reason, all of them in one line; so is WAKMAN_POLICY=off."""
    said = reason(scheduler(), WAKMAN_MARGIN="x", WAKMAN_POLICI="lru")
    assert said is not None
    assert "WAKMAN_MARGIN" in said
    assert "WAKMAN_POLICI is no setting" in said
    assert "\n" not in said
    assert reason(scheduler(), WAKMAN_POLICY="off") == "WAKMAN_POLICY=off"


Break = Callable[[Any], None]


def _caching_off(made: Any) -> None:
    made.kv_cache_manager.enable_caching = False


def _pool_caching_off(made: Any) -> None:
    made.kv_cache_manager.block_pool.enable_caching = False


def _two_groups(made: Any) -> None:
    coordinator = made.kv_cache_manager.coordinator
    coordinator.single_type_managers = coordinator.single_type_managers * 2


def _no_group(made: Any) -> None:
    made.kv_cache_manager.coordinator.single_type_managers = ()


def _sliding_window(made: Any) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    coordinator = made.kv_cache_manager.coordinator
    coordinator.single_type_managers = (object.__new__(SlidingWindowManager),)


def _mamba(made: Any) -> None:
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager

    made.kv_cache_manager.coordinator.single_type_managers = (object.__new__(MambaManager),)


def _own_pool(made: Any) -> None:
    made.kv_cache_manager.coordinator.single_type_managers[0].block_pool = VllmBlocks(NUM_BLOCKS)._manager.block_pool


def _transfer(made: Any) -> None:
    made.vllm_config.kv_transfer_config = types.SimpleNamespace(kv_connector="LMCacheConnectorV1")


def _connector(made: Any) -> None:
    made.connector = types.SimpleNamespace()


def _hisparse(made: Any) -> None:
    made.vllm_config.attention_config = types.SimpleNamespace(hisparse_config=object())


def _offloading(made: Any) -> None:
    made.vllm_config.cache_config = types.SimpleNamespace(kv_offloading_size=4.0)


def _no_manager(made: Any) -> None:
    del made.kv_cache_manager


def _scheduler_subclass(made: Any) -> None:
    made.__class__ = type("TheirScheduler", (Scheduler,), THEIRS)


def _queue_subclass(made: Any) -> None:
    made.kv_cache_manager.block_pool.free_block_queue.__class__ = type("TheirQueue", (FreeKVCacheBlockQueue,), THEIRS)


def _pool_subclass(made: Any) -> None:
    made.kv_cache_manager.block_pool.__class__ = type("TheirPool", (BlockPool,), THEIRS)


def _hybrid_coordinator(made: Any) -> None:
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    made.kv_cache_manager.coordinator.__class__ = HybridKVCacheCoordinator


def _instance_patched(made: Any) -> None:
    pool = made.kv_cache_manager.block_pool
    pool.touch = pool.touch


def _one_block_in_use(made: Any) -> None:
    made.kv_cache_manager.block_pool.get_new_blocks(1)


def _counter_inflated(made: Any) -> None:
    made.kv_cache_manager.block_pool.free_block_queue.num_free_blocks += 1


def _new_attribute(made: Any) -> None:
    made.kv_cache_manager.block_pool.free_block_queue.heap = []


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_caching_off, "prefix caching is off"),
        (_pool_caching_off, "prefix caching is off"),
        (_two_groups, "the model has 2 KV cache groups (FullAttentionSpec); only one is supported"),
        (_no_group, "the model has no KV cache"),
        (_sliding_window, "the model's KV cache is no full attention (SlidingWindowManager of NoneType)"),
        (_mamba, "the model's KV cache is no full attention (MambaManager of NoneType)"),
        (_own_pool, "the KV cache group has a block pool of its own"),
        (_transfer, "a KV connector is configured (LMCacheConnectorV1)"),
        (_connector, "a KV connector is configured (SimpleNamespace)"),
        (_hisparse, "HiSparse is configured"),
        (_offloading, "KV offloading is configured"),
        (_no_manager, "this scheduler has no manager where vLLM's has one"),
        (_scheduler_subclass, "the scheduler is a their.cache.TheirScheduler, not vLLM's Scheduler or AsyncScheduler"),
        (_queue_subclass, "the queue is a their.cache.TheirQueue, not vLLM's FreeKVCacheBlockQueue"),
        (_pool_subclass, "the pool is a their.cache.TheirPool, not vLLM's BlockPool"),
        (_hybrid_coordinator, "HybridKVCacheCoordinator, not vLLM's UnitaryKVCacheCoordinator"),
        (_instance_patched, "another plugin patched BlockPool.touch"),
        (_one_block_in_use, "of 16 blocks 15 are linked as free and 15 counted as free, before any request"),
        (_counter_inflated, "of 16 blocks 16 are linked as free and 17 counted as free, before any request"),
        (_new_attribute, "vLLM's free-block queue has a new part: heap"),
    ],
)
def test_what_is_unknown_is_refused(break_it: Break, said: str) -> None:
    """Each engine that is not the plain one is refused, and the reason says which part."""
    made = scheduler()
    break_it(made)
    told = reason(made)
    assert told is not None
    assert said in told


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (BlockPool, "touch"),
        (BlockPool, "free_blocks"),
        (BlockPool, "get_new_blocks"),
        (BlockPool, "cache_full_blocks"),
        (FreeKVCacheBlockQueue, "popleft_n"),
        (FreeKVCacheBlockQueue, "append_n"),
        (Scheduler, "schedule"),
    ],
)
def test_a_class_that_another_plugin_patched_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """A replaced method is seen, also when its wrapper copies the stock one's name and module."""
    stock = getattr(owner, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    made = scheduler()
    monkeypatch.setattr(owner, name, theirs)
    assert reason(made) == f"another plugin patched {owner.__name__}.{name}"
    theirs.__module__, theirs.__name__, theirs.__qualname__ = stock.__module__, stock.__name__, stock.__qualname__
    assert reason(made) == f"another plugin patched {owner.__name__}.{name}"


def test_a_class_that_another_plugin_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the name in vLLM's module stands for somebody else's class, the engine is left alone."""
    import vllm.v1.core.kv_cache_utils as module

    made = scheduler()
    monkeypatch.setattr(module, "FreeKVCacheBlockQueue", type("FreeKVCacheBlockQueue", (), {}))
    assert reason(made) == "another plugin replaced vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue"


def test_a_new_public_method_of_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue method that we do not know may be called on blocks that we order: refused."""
    monkeypatch.setattr(FreeKVCacheBlockQueue, "pin_n", lambda self, blocks: None, raising=False)
    assert reason(scheduler()) == "vLLM's free-block queue has a new part: pin_n"


def test_a_renamed_parameter_or_missing_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hooks pass on by name must be there by name."""
    made = scheduler()
    monkeypatch.setitem(guards.POOL, "touch", ("pages",))
    assert reason(made) == "vLLM's BlockPool.touch takes no pages"
    monkeypatch.setitem(guards.POOL, "touch_all", ())
    monkeypatch.delitem(guards.POOL, "touch")
    assert reason(made) == "vLLM's BlockPool has no touch_all"


def test_a_guard_that_fails_is_a_reason() -> None:
    """What cannot be looked at is not attached to, and nothing is raised."""

    def broken(engine: Engine) -> str | None:
        raise KeyError("num_gpu_blocks")

    engine = Engine.of(scheduler(), EngineSettings())
    assert refusal(engine, [broken]) == "the check `broken` failed (KeyError: 'num_gpu_blocks')"


def test_a_queue_whose_class_is_fixed_is_refused() -> None:
    """Where the class of the instance cannot be assigned (a compiled queue) nothing is tried."""

    made = Engine.of(scheduler(), EngineSettings())
    fixed = dataclasses.replace(made, queue=7)
    assert guards.class_can_be_flipped(made) is None
    assert "the class of the free-block queue cannot be changed" in str(guards.class_can_be_flipped(fixed))
