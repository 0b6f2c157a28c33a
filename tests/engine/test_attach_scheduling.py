"""Ways to schedule on a live engine: each is attached, answers as stock vLLM does, and its shadow agrees with it.

vLLM's CPU platform turns asynchronous scheduling off, whatever is asked for, and its workers run no pipeline. Here the
platform is kept from the first: the scheduler then plans a step while the one before it runs. The second is its half in
the engine, two batches in flight.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.attached import Ears, attached, mixed, outputs, scheduler_of, with_ears
from tests.engine.side_by_side import tokens, under_each_policy, with_the_patch, without_the_patch
from tests.engine.tiny_model import prompt
from tests.engine.tiny_variants import eagle_head

Engines = Callable[..., Any]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.newest

# Prompts that share prefixes, and answers that grow until requests are preempted: eight take 72 blocks of 63.
SHORT, LONG = mixed(7, 40), [asked[:150] for asked in mixed(3, 16)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def serve(llm: Any) -> list[Any]:
    return [*outputs(llm, SHORT), *outputs(llm, LONG, max_tokens=120)]


def abort(engine: Any) -> None:
    """Abort eight requests of which some are in a step that runs and some wait."""
    for number, asked in enumerate(SHORT[:8]):
        engine.add_request(f"abort-{number}", prompt(*asked), SamplingParams(max_tokens=16))
    engine.step()
    engine.step()
    engine.abort_request([f"abort-{number}" for number in range(8)])
    while engine.has_unfinished_requests():
        engine.step()


@pytest.fixture(scope="module")
def stock(engines: Engines) -> list[tuple[int, ...]]:
    """The answers of vLLM without the patch, one step after the other, with room for all."""
    return tokens(serve(without_the_patch(engines, num_gpu_blocks_override=256)))


@pytest.fixture(scope="module")
def ears() -> Iterator[Ears]:
    with pytest.MonkeyPatch.context() as patch:
        yield with_ears(patch)


@pytest.fixture(autouse=True)
def _numba_hidden() -> Iterator[None]:
    """vLLM's CPU build fails to start a second engine in a process that has seen n-grams: it trips over this module."""
    yield
    sys.modules.pop("llvmlite.binding.ffi", None)


def eagle() -> dict[str, Any]:
    """Return the settings of an engine that drafts by EAGLE, and computes the last block of each hit anew."""
    draft = {"method": "eagle", "model": eagle_head(), "num_speculative_tokens": 2}
    return {"async_scheduling": True, "speculative_config": draft}


def as_it_is(patch: Patch) -> None:
    """Leave vLLM as it is."""


def asynchronous(patch: Patch) -> None:
    """Keep the CPU platform from turning asynchronous scheduling off."""
    stock = current_platform.check_and_update_config

    def kept(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        stock(config)
        config.scheduler_config.async_scheduling = asked

    patch.setattr(current_platform, "check_and_update_config", kept)


def two_batches(patch: Patch) -> None:
    """Have two batches in flight, as a pipeline of two stages has."""
    patch.setattr(VllmConfig, "max_concurrent_batches", 2)


@pytest.mark.parametrize(
    ("before", "changes", "kind", "in_flight"),
    [
        (as_it_is, {"enable_chunked_prefill": False}, Scheduler, 1),
        (asynchronous, {"async_scheduling": True}, AsyncScheduler, 2),
        (asynchronous, eagle, AsyncScheduler, 2),
        (two_batches, {"max_num_batched_tokens": 128}, Scheduler, 2),
        (as_it_is, {"speculative_config": NGRAM}, Scheduler, 1),
    ],
    ids=["whole prompts", "async", "async with EAGLE", "two batches of chunks", "n-grams"],
)
def test_attached_and_true(
    engines: Engines,
    stock: list[tuple[int, ...]],
    ears: Ears,
    monkeypatch: Patch,
    before: Callable[[Patch], None],
    changes: "dict[str, Any] | Callable[[], dict[str, Any]]",
    kind: type,
    in_flight: int,
) -> None:
    """Under each policy, with preemptions and after aborts, the answers are stock vLLM's; the residual is small."""
    before(monkeypatch)
    llm = with_the_patch(engines, **(changes() if callable(changes) else changes))
    assert type(scheduler_of(llm)) is kind
    assert llm.llm_engine.vllm_config.parallel_config.distributed_executor_backend == "uni"
    assert llm.llm_engine.engine_core.engine_core.batch_queue_size == in_flight
    for served in under_each_policy(llm, ears, serve):
        assert tokens(served.done) == stock, served.policy
        assert served.hit_rate > 0.02
        assert abs(served.residual) < 0.005, (served.policy, served.residual)
        assert any(not one[5] for one in ears.of("admitted")), "nothing was preempted"
    abort(llm.llm_engine)
    assert tokens(outputs(llm, SHORT)) == stock[: len(SHORT)]
    status = attached(llm).status()
    assert (status["faults"], status["free_blocks"]) == (0, status["num_blocks"] - 1)
