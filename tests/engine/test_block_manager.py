"""vLLM's own KV cache manager, driven without a model: its figures, and ours over it on made and real traffic."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

import replay
from engine_patch.block_manager import VllmBlocks
from engine_patch.policy import POLICIES
from replay.evaluation import Settings, run_case
from replay.mixes import Mix, Request, constant, generate
from replay.scenarios import Recorded
from replay.served import OwnBlocks, Served, serve

BLOCKS = 3000
EXCERPT = Path(replay.__file__).parent / "data" / "mooncake_conversation_excerpt.jsonl.gz"
TRAFFIC = constant(Mix(0.4, 0.2, 0.4), 500)


@pytest.fixture(scope="module")
def trace() -> tuple[Request, ...]:
    """Some 750 requests, which want many more blocks than there are."""
    return generate(TRAFFIC, 5)


class Watched:
    """Blocks that note each start's hit tokens, and may change the policy on the way."""

    def __init__(self, blocks: VllmBlocks, turns: Sequence[str] = ()) -> None:
        self.blocks = blocks
        self.hits: list[int | None] = []
        self._turns = itertools.cycle(turns) if turns else None

    def __getattr__(self, name: str) -> object:
        return getattr(self.blocks, name)

    def start(self, request_id: str, hashes: Sequence[bytes], prompt_tokens: int) -> int | None:
        """Start, switching before every 50th request."""
        if self._turns is not None and len(self.hits) % 50 == 49:
            self.blocks.switch(next(self._turns))
        self.hits.append(self.blocks.start(request_id, hashes, prompt_tokens))
        return self.hits[-1]


def served(trace: Sequence[Request], blocks: object) -> Served:
    """Serve the trace on these blocks."""
    hashes = [blocks.hashes(request.blocks.tobytes()) for request in trace]  # type: ignore[attr-defined]
    return serve(trace, hashes, blocks)  # type: ignore[arg-type]


def test_the_hit_rate_is_the_one_that_vllm_itself_counts(trace: tuple[Request, ...]) -> None:
    """Tokens hit over tokens asked for, added up here, are vLLM's own prefix cache statistics of the same requests."""
    blocks = VllmBlocks(BLOCKS)
    result = served(trace, blocks)
    assert 0.1 < result.hit_rate < 0.9
    stats = blocks._manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (result.started, result.prompt_tokens, result.hit_tokens)
    assert blocks.num_free == BLOCKS
    assert result.refused == 0


def test_lru_hits_what_stock_vllm_hits(trace: tuple[Request, ...]) -> None:
    """Request for request, the adopted queue under LRU hits as many tokens as vLLM's own queue."""
    stock, adopted = Watched(VllmBlocks(BLOCKS)), Watched(VllmBlocks(BLOCKS, "lru"))
    served(trace, stock)
    served(trace, adopted)
    assert stock.hits == adopted.hits


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_the_trace_and_keeps_its_queue_whole(trace: tuple[Request, ...], policy: str) -> None:
    """After the trace all blocks are free, list and state agree, and a policy that is not LRU hit something else."""
    blocks = Watched(VllmBlocks(BLOCKS, policy))
    result = served(trace, blocks)
    assert blocks.blocks.check() is None
    assert blocks.num_free == BLOCKS
    lru = served(trace, VllmBlocks(BLOCKS, "lru"))
    assert (result.hit_tokens == lru.hit_tokens) == (policy == "lru")


def test_switching_loses_nothing_that_is_cached(trace: tuple[Request, ...]) -> None:
    """A policy switched every 50 starts, through all of them, ends whole, and hits within what the policies hit."""
    blocks = Watched(VllmBlocks(BLOCKS, "lru"), POLICIES)
    result = served(trace, blocks)
    assert blocks.blocks.check() is None
    rates = [served(trace, VllmBlocks(BLOCKS, policy)).hit_rate for policy in ("lru", "s3fifo", "arc")]
    assert min(rates) - 0.05 < result.hit_rate < max(rates) + 0.05


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    """It is counted as refused, and the requests behind it are served."""
    trace = generate(constant(Mix(0.5, 0, 0.5), 60), 1)
    small = served(trace, VllmBlocks(300))
    assert small.refused == sum(request.prompt_tokens > 300 * 16 for request in trace) > 0
    assert small.started == len(trace) - small.refused


@pytest.mark.newest
@pytest.mark.parametrize(("policy", "points"), [("lru", 0.0), ("s3fifo", 0.002), ("s3fifo-25", 0.002), ("arc", 0.002)])
def test_our_own_blocks_hit_what_vllms_do(trace: tuple[Request, ...], policy: str, points: float) -> None:
    """`--manager own` is within 0.2 points of vLLM's manager under every policy, and equal to it under LRU."""
    own, theirs = served(trace, OwnBlocks(BLOCKS, policy)), served(trace, VllmBlocks(BLOCKS, policy))
    assert own.prompt_tokens == theirs.prompt_tokens
    assert own.hit_rate == pytest.approx(theirs.hit_rate, abs=points + 1e-12)


@pytest.mark.newest
def test_an_evaluation_runs_on_vllms_manager() -> None:
    """`run_case` gives a rate for each policy and preset, between 0 and what an infinite cache would hit."""
    settings = Settings(blocks=BLOCKS, manager="vllm", policies=("lru", "arc"), presets=("default", "paper"))
    lines = {line["name"]: line for line in run_case(TRAFFIC, 5, settings.names(), settings)}
    assert list(lines) == settings.names()
    bounds = lines["bounds"]
    for name in settings.names()[:-1]:
        assert 0 < lines[name]["hit"] <= bounds["belady"] <= bounds["infinite"]
    assert all(policy in settings.pool for _, policy in lines[settings.run_name("default")]["switches"])


@pytest.mark.newest
def test_the_mooncake_excerpt_runs_on_vllms_manager() -> None:
    """The excerpt of a real trace is served in its own blocks of 512 tokens; LRU hits what stock vLLM hits."""
    trace = Recorded(EXCERPT).requests(0)
    stock, lru = (served(trace, VllmBlocks(2000, policy, 512)) for policy in ("stock", "lru"))
    assert stock.hit_tokens == lru.hit_tokens > 0
    for policy in ("s3fifo", "arc"):
        blocks = VllmBlocks(2000, policy, 512)
        assert 0 < served(trace, blocks).hit_rate < 0.4
        assert blocks.check() is None
