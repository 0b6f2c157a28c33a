"""An engine as vLLM makes it and one with the patch: what both answer, and how near the shadow is to the latter."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.scheduler import Scheduler

from engine_patch import free_queue
from engine_patch.attachment import Attachment
from engine_patch.estimator import Estimator
from engine_patch.events import pack
from engine_patch.guards import drops_a_block
from tests.engine.attached import Ears, attached, attachment_of, environment, no_hook_left, queue_of, scheduler_of

Engines = Callable[..., Any]
POLICIES = ("lru", "s3fifo", "arc")


class Served(NamedTuple):
    """What one policy made of some traffic, from an empty cache on."""

    policy: str
    done: list[Any]
    residual: float
    """Hit rate of this policy's shadow less the engine's own, over the requests that count."""
    hit_rate: float


def without_the_patch(engines: Engines, **changes: Any) -> Any:
    """Start an engine whose scheduler is built by vLLM's own constructor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "__init__", inspect.unwrap(Scheduler.__init__))
        return engines(**changes)


def with_the_patch(engines: Engines, **changes: Any) -> Any:
    """Start an engine with the plugin loaded, in mode `auto`."""
    with pytest.MonkeyPatch.context() as patch, environment(patch):
        return engines(**changes)


def left_alone(llm: Any) -> str:
    """Return why an engine is not attached to, and see that nothing of ours is in it."""
    there = attachment_of(llm)
    assert not there.status()["attached"]
    assert type(queue_of(llm)) is FreeKVCacheBlockQueue
    assert no_hook_left(llm) == []
    reason = str(there.status()["reason"])
    assert there.set_mode("arc", "test", "") == {"ok": False, "error": f"not attached: {reason}"}
    return reason


def tokens_and_hits(done: Sequence[Any]) -> list[tuple[tuple[int, ...], int]]:
    """Return of each of vLLM's outputs the answer and the prompt tokens that were read from the cache."""
    return [(tuple(one.outputs[0].token_ids), one.num_cached_tokens or 0) for one in done]


def tokens(done: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return of each of vLLM's outputs the answer."""
    return [tuple(one.outputs[0].token_ids) for one in done]


def under_each_policy(llm: Any, ears: Ears, serve: Callable[[Any], list[Any]]) -> Iterator[Served]:
    """Serve the same traffic under one policy after the other, switched on the live; the queue is checked each time."""
    patch, manager = attached(llm), scheduler_of(llm).kv_cache_manager
    for policy in POLICIES:
        assert llm.reset_prefix_cache()
        assert patch.set_mode(policy, "test", "try it")["ok"]
        ears.told.clear()
        done = serve(llm)
        status = patch.status()
        assert (status["attached"], status["faults"], status["self_check_failures"]) == (True, 0, 0), status["reason"]
        assert status["free_blocks"] == status["num_blocks"] - 1
        assert free_queue.check(queue_of(llm), queue_of(llm).wakman, manager.block_pool) is None
        told = [one for one in ears.of("admitted") if one[5]]
        hit_rate = sum(one[4] for one in told) / sum(one[3] for one in told)
        yield Served(policy, done, residual(ears, policy, patch), hit_rate)


def residual(ears: Ears, policy: str, patch: Attachment) -> float:
    """Return what the shadow process would measure over all that was told since the cache was empty."""
    pool, dropped = patch.status(), int(drops_a_block(patch._engine))
    estimator = Estimator("default", [policy], pool["num_blocks"] - 1, pool["block_size"], live=policy, dropped=dropped)
    for kind, request, hashes, *rest in (one for one in ears.told if one[0] in {"admitted", "freed"}):
        if kind == "admitted":
            length, hits, counted, free = rest
            estimator.admitted(0.0, request, pack(hashes), length, hits, counted=counted, free_blocks=free)
        else:
            held, free = rest
            estimator.freed(0.0, request, pack(hashes), held, free_blocks=free)
    decision = estimator.decide(1000.0)
    assert decision is not None
    assert decision.residual is not None
    return decision.residual
