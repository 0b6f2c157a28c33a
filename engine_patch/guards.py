"""Decides whether an engine may be attached to: each guard looks at one thing and returns a reason against it, or None.

1. The guards run in order, from what needs nothing to what reads the queue block by block; the first reason wins. A
   guard that fails itself is a reason too: what cannot be looked at is unknown.
2. Versions: 0.27 to 0.32 are tested, 0.14 to 0.26 best effort, others only by `WAKMAN_FORCE=1`. All other guards
   hold for a forced version as well: they look at the code that is really there.
3. Classes must be vLLM's very own and unpatched (another plugin that changes them would be undone or doubled by ours),
   with the methods and parameters that the hooks and the queue rely on, and no public queue method that we do not know.
4. Only one group of full attention: with several groups, or with a sliding window, blocks are worth keeping together in
   ways that no policy here knows. What counts is the kind of manager, not the model: a hybrid one whose sliding layers
   vLLM keeps as if they were full (`disable_hybrid_kv_cache_manager`) is one chain of whole blocks like any other.
   No KV connector, HiSparse or lazy offload: they read the order of the free blocks.

Cost: O(blocks) once, at start (about 40 ms at 262,144 blocks). Source: our reading of vLLM 0.11 to 0.32.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from engine_patch.settings import OFF, EngineSettings

TESTED = ((0, 27), (0, 32))
BEST_EFFORT = ((0, 14), (0, 26))

# Methods that are wrapped, called or overridden, with the parameters that are relied on.
QUEUE = {
    "popleft": (),
    "popleft_n": ("n",),
    "remove": ("block",),
    "append": ("block",),
    "append_n": ("blocks",),
    "get_all_free_blocks": (),
}
# Later versions have these as well: prepend_n since 0.23, iter_blocks_after since 0.26.
QUEUE_LATER = {"prepend_n": ("blocks",), "iter_blocks_after": ("cursor",)}
QUEUE_ATTRIBUTES = {"num_free_blocks", "fake_free_list_head", "fake_free_list_tail"}
POOL = {
    "touch": ("blocks",),
    "free_blocks": ("ordered_blocks",),
    "get_new_blocks": ("num_blocks",),
    "cache_full_blocks": ("request", "blocks", "num_cached_blocks", "num_full_blocks"),
    "evict_blocks": ("block_ids",),
    "reset_prefix_cache": (),
}
COORDINATOR = {"allocate_new_computed_blocks": ("request_id", "new_computed_blocks")}
MANAGER = {"free": ("request",), "get_computed_blocks": ("request",)}
SCHEDULER = {"schedule": ()}


@dataclass(frozen=True)
class Engine:
    """The parts of one engine that the patch reads or wraps, and what it asks of them."""

    settings: EngineSettings
    version: str
    scheduler: Any
    manager: Any
    coordinator: Any
    pool: Any
    queue: Any

    @classmethod
    def of(cls, scheduler: Any, settings: EngineSettings) -> "Engine":
        """Return the parts of `scheduler`; a part that is not there is None."""
        import vllm

        manager = getattr(scheduler, "kv_cache_manager", None)
        pool = getattr(manager, "block_pool", None)
        return cls(
            settings=settings,
            version=str(getattr(vllm, "__version__", "unknown")),
            scheduler=scheduler,
            manager=manager,
            coordinator=getattr(manager, "coordinator", None),
            pool=pool,
            queue=getattr(pool, "free_block_queue", None),
        )


Guard = Callable[[Engine], "str | None"]


def refusal(engine: Engine, guards: Sequence[Guard] | None = None) -> str | None:
    """Return why `engine` must be left alone, in one line; None when it may be attached to. Never raises."""
    for guard in GUARDS if guards is None else guards:
        try:
            reason = guard(engine)
        except Exception as error:
            return f"the check `{guard.__name__}` failed ({type(error).__name__}: {error})"
        if reason is not None:
            return reason
    return None


def support(version: str) -> str:
    """Return how far `version` is supported: `tested`, `best effort`, or `none`."""
    parts = release(version)
    if parts is not None and TESTED[0] <= parts <= TESTED[1]:
        return "tested"
    if parts is not None and BEST_EFFORT[0] <= parts <= BEST_EFFORT[1]:
        return "best effort"
    return "none"


def drops_a_block(engine: Engine) -> bool:
    """Return whether the engine computes the last block of each hit anew (EAGLE and its like)."""
    groups = getattr(engine.coordinator, "eagle_group_ids", None)
    if groups is not None:
        return 0 in groups
    # Before such groups there was one flag for all.
    return bool(getattr(engine.coordinator, "use_eagle", False) or getattr(engine.manager, "use_eagle", False))


def release(version: str) -> tuple[int, int] | None:
    """Return (major, minor) of a version such as `0.32.1.dev3+cpu`; None when there is none in it."""
    major, _, rest = version.partition(".")
    minor = rest.split(".", 1)[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def settings_are_sound(engine: Engine) -> str | None:
    return "; ".join(engine.settings.faults) or None


def wanted(engine: Engine) -> str | None:
    return "WAKMAN_POLICY=off" if engine.settings.policy == OFF else None


def version_is_known(engine: Engine) -> str | None:
    if engine.settings.force or support(engine.version) != "none":
        return None
    low, high = (".".join(map(str, end)) for end in (BEST_EFFORT[0], TESTED[1]))
    return f"vLLM {engine.version} is not among {low} to {high} (WAKMAN_FORCE=1 tries it)"


def parts_are_there(engine: Engine) -> str | None:
    names = ("manager", "coordinator", "pool", "queue")
    missing = [name for name in names if getattr(engine, name) is None]
    return f"this scheduler has no {missing[0]} where vLLM's has one" if missing else None


def prefix_caching_is_on(engine: Engine) -> str | None:
    on = engine.manager.enable_caching and engine.pool.enable_caching
    return None if on else "prefix caching is off"


def one_full_attention_group(engine: Engine) -> str | None:
    managers = engine.coordinator.single_type_managers
    if not managers:
        return "the model has no KV cache"
    if len(managers) != 1:
        kinds = ", ".join(dict.fromkeys(_spec(manager) for manager in managers))
        return f"the model has {len(managers)} KV cache groups ({kinds}); only one is supported"
    name = type(managers[0]).__name__
    if name != "FullAttentionManager":
        return f"the model's KV cache is no full attention ({name} of {_spec(managers[0])})"
    if managers[0].block_pool is not engine.pool:
        return "the KV cache group has a block pool of its own"
    return None


def no_connector(engine: Engine) -> str | None:
    config = engine.scheduler.vllm_config
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is not None or getattr(engine.scheduler, "connector", None) is not None:
        name = getattr(transfer, "kv_connector", None) or type(engine.scheduler.connector).__name__
        return f"a KV connector is configured ({name})"
    if getattr(getattr(config, "attention_config", None), "hisparse_config", None) is not None:
        return "HiSparse is configured"
    if getattr(getattr(config, "cache_config", None), "kv_offloading_size", None):
        return "KV offloading is configured"
    return None


def classes_are_exact(engine: Engine) -> str | None:
    expected = {
        "scheduler": ("vllm.v1.core.sched.", ("Scheduler", "AsyncScheduler")),
        "manager": ("vllm.v1.core.kv_cache_manager", ("KVCacheManager",)),
        "coordinator": ("vllm.v1.core.kv_cache_coordinator", ("UnitaryKVCacheCoordinator",)),
        "pool": ("vllm.v1.core.block_pool", ("BlockPool",)),
        "queue": ("vllm.v1.core.kv_cache_utils", ("FreeKVCacheBlockQueue",)),
    }
    for part, (module, names) in expected.items():
        kind = type(getattr(engine, part))
        if not kind.__module__.startswith(module) or kind.__name__ not in names:
            return f"the {part} is a {kind.__module__}.{kind.__qualname__}, not vLLM's {' or '.join(names)}"
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
            return f"another plugin replaced {kind.__module__}.{kind.__name__}"
    return None


def methods_are_stock(engine: Engine) -> str | None:
    for part, methods in _methods(engine):
        kind = type(part)
        for name, parameters in methods.items():
            function = getattr(kind, name, None)
            if function is None:
                return f"vLLM's {kind.__name__} has no {name}"
            if name in vars(part) or not _is_vllms(function):
                return f"another plugin patched {kind.__name__}.{name}"
            known = inspect.signature(function).parameters
            missing = [parameter for parameter in parameters if parameter not in known]
            if missing:
                return f"vLLM's {kind.__name__}.{name} takes no {missing[0]}"
    return None


def queue_has_nothing_unknown(engine: Engine) -> str | None:
    known = QUEUE.keys() | QUEUE_LATER.keys() | QUEUE_ATTRIBUTES
    there = {name for name in dir(type(engine.queue)) if not name.startswith("_")} | vars(engine.queue).keys()
    if there - known:
        return f"vLLM's free-block queue has a new part: {min(there - known)}"
    missing = QUEUE_ATTRIBUTES - vars(engine.queue).keys()
    return f"vLLM's free-block queue has no {min(missing)}" if missing else None


def every_block_is_free(engine: Engine) -> str | None:
    linked = len(engine.queue.get_all_free_blocks())
    counted, all_but_null = engine.queue.num_free_blocks, engine.pool.num_gpu_blocks - 1
    if linked == counted == all_but_null:
        return None
    return f"of {all_but_null} blocks {linked} are linked as free and {counted} counted as free, before any request"


def class_can_be_flipped(engine: Engine) -> str | None:
    stock = type(engine.queue)
    probe = type(stock.__name__, (stock,), {"__slots__": ()})
    try:
        engine.queue.__class__ = probe
    except TypeError as error:
        return f"the class of the free-block queue cannot be changed ({error})"
    engine.queue.__class__ = stock
    return None


GUARDS: tuple[Guard, ...] = (
    settings_are_sound,
    wanted,
    version_is_known,
    parts_are_there,
    prefix_caching_is_on,
    no_connector,
    one_full_attention_group,
    classes_are_exact,
    methods_are_stock,
    queue_has_nothing_unknown,
    every_block_is_free,
    class_can_be_flipped,
)


def _methods(engine: Engine) -> list[tuple[Any, Mapping[str, tuple[str, ...]]]]:
    later = {name: parameters for name, parameters in QUEUE_LATER.items() if hasattr(type(engine.queue), name)}
    return [
        (engine.queue, {**QUEUE, **later}),
        (engine.pool, POOL),
        (engine.coordinator, COORDINATOR),
        (engine.manager, MANAGER),
        (engine.scheduler, SCHEDULER),
    ]


def _spec(manager: Any) -> str:
    return type(getattr(manager, "kv_cache_spec", None)).__name__


def _is_vllms(function: Any) -> bool:
    """Whether `function` was written in the vLLM file that it claims: a wrapper may copy the name, not the code."""
    module = getattr(function, "__module__", "") or ""
    if not module.startswith("vllm.") or hasattr(function, "__wrapped__"):
        return False
    if not isinstance(function, FunctionType):
        # Compiled: there is no code to look at.
        return True
    return function.__code__.co_filename == getattr(sys.modules.get(module), "__file__", None)
