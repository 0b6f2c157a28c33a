"""Engines with the patch in this process, traffic that evicts, and ears in the place of the shadow."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch import attach, plugin
from engine_patch.attachment import Attachment
from engine_patch.block_manager import VllmBlocks
from engine_patch.decision import Decision
from tests.engine.tiny_model import prompt

HOT_TOKENS = 128
ONE_OFF_TOKENS = 400
# Of engines without a model.
BLOCK = 16
DECISION = Decision(
    t=1.0,
    policy="s3fifo",
    live="lru",
    since=0.0,
    switch=True,
    reason="better",
    text="Switch from lru to s3fifo.",
    window_s=60.0,
    rates={"lru": 0.3, "s3fifo": 0.4},
    window_rates={"lru": 0.3, "s3fifo": 0.4},
    advantage=0.1,
    margin=0.005,
    residual=0.001,
    requests=100,
    blocks=1000,
)


class Ears:
    """A recorder and a link at once: keeps what it is told, and hands out the decisions that a test puts in."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.decisions: list[Decision] = []
        self.closed = 0

    def __call__(self, *_: Any, **__: Any) -> "Ears":
        return self

    def start(self) -> None:
        """Start nothing."""

    def admitted(
        self,
        t: float,
        request_id: str,
        hashes: Sequence[bytes],
        num_prompt_tokens: int,
        hit_tokens: int | None,
        block_size: int,
        *,
        counted: bool,
        free_blocks: int,
    ) -> None:
        self.told.append(("admitted", request_id, list(hashes), num_prompt_tokens, hit_tokens, counted, free_blocks))

    def freed(self, t: float, request_id: str, hashes: Sequence[bytes], num_blocks: int, *, free_blocks: int) -> None:
        self.told.append(("freed", request_id, list(hashes), num_blocks, free_blocks))

    def reset(self, t: float) -> None:
        self.told.append(("reset",))

    def policy(self, t: float, name: str, why: str) -> None:
        self.told.append(("policy", name, why))

    def poll(self) -> list[Decision]:
        """Hand out what the test put in, once."""
        decisions, self.decisions = self.decisions, []
        return decisions

    def status(self) -> dict[str, Any]:
        return {"up": True, "dropped": 0}

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        """Return what was told of one kind, in order."""
        return [told for told in self.told if told[0] == kind]


def with_ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    """Put ears where the next engine starts its shadow."""
    ears = Ears()
    monkeypatch.setattr("engine_patch.events.Recorder", ears)
    monkeypatch.setattr("engine_patch.link.ShadowLink", ears)
    return ears


def bare(num_blocks: int = 16) -> tuple[Any, VllmBlocks]:
    """Return a scheduler of vLLM's class around its real KV cache manager, and what drives that without a model."""
    from vllm.v1.core.sched.scheduler import Scheduler

    blocks = VllmBlocks(num_blocks)
    made = object.__new__(Scheduler)
    made.kv_cache_manager = blocks._manager
    made.vllm_config = SimpleNamespace(kv_transfer_config=None)  # type: ignore[assignment]
    made.connector = None
    made.requests = blocks._running  # type: ignore[assignment]
    return made, blocks


def started(**environ: str) -> tuple[Any, VllmBlocks, Any]:
    """Attach to a fresh engine without a model; return its scheduler, what drives its blocks, and the outcome."""
    scheduler, blocks = bare()
    return scheduler, blocks, attach.attach(scheduler, environ)


def serve(blocks: VllmBlocks, count: int = 40, first: int = 0) -> list[int | None]:
    """Serve requests of 4 blocks, two of them a shared prefix, one after another; return their hit tokens."""
    hits = []
    for number in range(first, first + count):
        hashes = [b"hot-%03d-" % at for at in range(2)] + [b"%d-%06d" % (at, number) for at in range(2)]
        hits.append(blocks.start(f"r{number}", hashes, 4 * BLOCK + 1))
        blocks.finish(f"r{number}", hashes, 4 * BLOCK + 1)
    return hits


def attachment_of(llm: Any) -> Any:
    """Return what was made of this engine: an Attachment or NotAttached."""
    return attach.of(scheduler_of(llm))


def scheduler_of(llm: Any) -> Any:
    """Return the scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def queue_of(llm: Any) -> Any:
    """Return the free-block queue of an engine in this process."""
    return scheduler_of(llm).kv_cache_manager.block_pool.free_block_queue


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, **environ: str) -> Iterator[None]:
    """Run with these variables and the plugin registered, as vLLM would find it when an engine starts."""
    plugin.register()
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield


def mixed(seed: int, count: int) -> list[list[int]]:
    """Return prompts, a third of them on one of three hot prefixes of 4 blocks, the others one-off and of 12 blocks."""
    rng = random.Random(seed)
    hot = [[rng.randrange(3, 1024) for _ in range(HOT_TOKENS)] for _ in range(3)]
    prompts = []
    for _ in range(count):
        if rng.random() < 1 / 3:
            prompts.append(rng.choice(hot) + [rng.randrange(3, 1024) for _ in range(5)])
        else:
            prompts.append([rng.randrange(3, 1024) for _ in range(ONE_OFF_TOKENS)])
    return prompts


def answers(llm: Any, prompts: Sequence[Sequence[int]], **parameters: Any) -> list[tuple[int, ...]]:
    """Return the greedy answers' tokens, in the order of the prompts."""
    return [tuple(done.outputs[0].token_ids) for done in outputs(llm, prompts, **parameters)]


def outputs(llm: Any, prompts: Sequence[Sequence[int]], **parameters: Any) -> list[Any]:
    """Return vLLM's outputs, in the order of the prompts; greedy and of 8 tokens unless `parameters` say otherwise."""
    from vllm import SamplingParams

    sampling = SamplingParams(**{"max_tokens": 8, "temperature": 0, "ignore_eos": True, **parameters})
    done: list[Any] = llm.generate([prompt(*tokens) for tokens in prompts], sampling, use_tqdm=False)
    return done


def hot_hit_rate(done: Sequence[Any]) -> float:
    """Return the share of the hot prompts' tokens that were read from the cache."""
    hot = [one for one in done if len(one.prompt_token_ids) < ONE_OFF_TOKENS]
    return sum(one.num_cached_tokens or 0 for one in hot) / sum(len(one.prompt_token_ids) for one in hot)


def attached(llm: Any) -> Attachment:
    """Return the attachment of an engine that must have one."""
    there = attachment_of(llm)
    assert isinstance(there, Attachment), there.status()["reason"]
    assert there.attached, there.status()["reason"]
    return there


def no_hook_left(llm: Any) -> list[str]:
    """Return the names of our hooks that are still on the engine's instances."""
    manager = scheduler_of(llm).kv_cache_manager
    owners = (scheduler_of(llm), manager, manager.coordinator, manager.block_pool)
    return [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if getattr(value, "__module__", "") == "engine_patch.hooks"
    ]
