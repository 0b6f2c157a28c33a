"""LoRA on a live engine: adapters and the base model share prompts, and no block; the shadow sees them as vLLM does."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.engine.attached import mixed, with_ears
from tests.engine.side_by_side import (
    tokens,
    tokens_and_hits,
    under_each_policy,
    with_the_patch,
    without_the_patch,
)
from tests.engine.tiny_model import prompt
from tests.engine.tiny_variants import RANK, adapter

Engines = Callable[..., Any]

pytestmark = pytest.mark.newest

LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "num_gpu_blocks_override": 128}
PROMPTS = mixed(7, 36)


def generate(llm: Any, asked: list[list[int]], adapters: list[Any]) -> list[Any]:
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    done: list[Any] = llm.generate(
        [prompt(*one) for one in asked], sampling, use_tqdm=False, lora_request=adapters or None
    )
    return done


def serve(llm: Any) -> list[Any]:
    """Ask the base model and two adapters the same, by turns.

    The base model's requests have batches of their own: beside an adapter's, vLLM's CPU build answers them by it.
    """
    first, second = (LoRARequest(str(seed), seed, adapter(seed)) for seed in (1, 2))
    done = []
    for at in range(0, len(PROMPTS), 6):
        asked = PROMPTS[at : at + 6]
        done += generate(llm, asked, [])
        done += generate(llm, [one for one in asked for _ in range(2)], [first, second] * len(asked))
    return done


def test_adapters_share_prompts_and_no_block(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompt has other hashes with each adapter and none; answers are those without us under each policy."""
    stock = serve(without_the_patch(engines, **LORA))
    ears = with_ears(monkeypatch)
    llm = with_the_patch(engines, **LORA)
    for served in under_each_policy(llm, ears, serve):
        assert tokens(served.done) == tokens(stock), served.policy
        if served.policy == "lru":
            assert tokens_and_hits(served.done) == tokens_and_hits(stock)
        assert served.hit_rate > 0.05, served
        assert abs(served.residual) < 0.005, served
    # Of the last policy: the first six prompts, asked of the base model, then by turns of the two adapters.
    hashes = {one[1].partition("-")[0]: one[2] for one in ears.of("admitted")}
    assert len(hashes) == len(stock) == 3 * len(PROMPTS)
    first, *_ = sorted(map(int, hashes))
    base, one, two = (hashes[str(first + at)] for at in (0, 6, 7))
    assert len(base) == len(one) == len(two) > 0
    assert len({*base, *one, *two}) == 3 * len(base)
    assert len({tokens(stock)[at] for at in (0, 6, 7)}) == 3, "the adapters answer as the base model does"
