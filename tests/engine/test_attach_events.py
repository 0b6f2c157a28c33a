"""What the hooks see of each kind of request on a live engine: hits, holds and give-backs, each once and exactly."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams

from engine_patch import free_queue
from tests.engine.attached import (
    Ears,
    answers,
    attached,
    environment,
    mixed,
    outputs,
    queue_of,
    scheduler_of,
    with_ears,
)
from tests.engine.residual import residual
from tests.engine.tiny_model import BLOCK_SIZE, prompt

Engines = Callable[..., Any]


@pytest.fixture(scope="module")
def ears() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield with_ears(patch)


@pytest.fixture(scope="module")
def llm(engines: Engines, ears: Ears) -> Any:
    """One engine for the tests that need no setting of their own; long prompts are prefilled in chunks."""
    with pytest.MonkeyPatch.context() as patch, environment(patch, WAKMAN_POLICY="s3fifo"):
        return engines(max_num_batched_tokens=256)


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest, ears: Ears) -> None:
    if "llm" in request.fixturenames:
        assert request.getfixturevalue("llm").reset_prefix_cache()
    ears.told.clear()


def held(told: Sequence[tuple[Any, ...]]) -> dict[str, int]:
    """Go through admissions and give-backs; return how many blocks each request still holds. Twice in a row fails."""
    open_: dict[str, int] = {}
    for kind, request, hashes, *_ in (one for one in told if one[0] in {"admitted", "freed"}):
        if kind == "admitted":
            assert request not in open_, f"{request} was admitted twice"
            open_[request] = len(hashes)
        else:
            assert request in open_, f"{request} was freed but never admitted"
            del open_[request]
    return open_


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The blocks whose hits were counted, a list of numbers for each request."""
    counted: list[list[int]] = []
    count = free_queue.hit

    def hit(state: Any, blocks: Sequence[Any]) -> None:
        counted.append([block.block_id for block in blocks])
        count(state, blocks)

    monkeypatch.setattr(free_queue, "hit", hit)
    return counted


def test_hits_are_what_vllm_answers(llm: Any, ears: Ears) -> None:
    """The hit tokens and prompt tokens told of each request are those that vLLM reports to its client."""
    done = outputs(llm, mixed(13, 40))
    told = sorted((one[3], one[4]) for one in ears.of("admitted"))
    assert told == sorted((len(one.prompt_token_ids), one.num_cached_tokens or 0) for one in done)
    assert all(counted for *_, counted, _ in ears.of("admitted"))
    assert held(ears.told) == {}


def test_a_request_is_told_once_with_its_prompt_and_its_answer(llm: Any, ears: Ears) -> None:
    """Admitted with the prompt's full blocks; freed with prompt and answer, and every block that it held."""
    tokens = mixed(1, 1)[0][:100]
    outputs(llm, [tokens], max_tokens=64)
    (admitted,) = ears.of("admitted")
    (freed,) = ears.of("freed")
    # The last sampled token is never fed back: 163 tokens have keys and values.
    assert (len(admitted[2]), admitted[3:6]) == (100 // BLOCK_SIZE, (100, 0, True))
    assert (len(freed[2]), freed[3]) == (163 // BLOCK_SIZE, 6)
    assert freed[2][:3] == admitted[2]
    assert admitted[1] == freed[1]


def test_a_hit_is_counted_once_a_request_free_or_in_use(llm: Any, hits: list[list[int]]) -> None:
    """Two requests at once on a cached prefix count a hit each on its blocks, though one alone finds them free."""
    prefix = mixed(2, 1)[0][:128]
    outputs(llm, [[*prefix, 7]])
    assert hits == []
    outputs(llm, [[*prefix, 8], [*prefix, 9]])
    first, second = hits
    assert first == second
    assert len(set(first)) == 4


def test_chunked_prefill_counts_once(llm: Any, ears: Ears, hits: list[list[int]]) -> None:
    """A prompt of four steps is one admission and one hit a block."""
    prefix = mixed(4, 1)[0][:64]
    one_off = [one for one in mixed(5, 20) if len(one) == 400]
    tokens = [*prefix, *one_off[0], *one_off[1]]
    outputs(llm, [[*prefix, 7]])
    ears.told.clear()
    outputs(llm, [tokens])
    (admitted,) = ears.of("admitted")
    assert (admitted[3], admitted[4], len(admitted[2])) == (864, 64, 27)
    assert [len(blocks) for blocks in hits] == [2]


def test_parallel_samples_are_requests_of_their_own(llm: Any, ears: Ears) -> None:
    """Each of n samples is admitted and freed under its own name."""
    outputs(llm, [mixed(6, 1)[0][:100]], n=3, temperature=1.0, seed=5)
    assert len({one[1] for one in ears.of("admitted")}) == 3
    assert held(ears.told) == {}


def test_prompt_logprobs_read_no_cache_and_are_not_counted(llm: Any, ears: Ears, hits: list[list[int]]) -> None:
    """A request that wants the prompt's logprobs takes no hit, is told as not counted, and gives back what it held."""
    tokens = mixed(8, 1)[0][:100]
    outputs(llm, [tokens])
    ears.told.clear()
    outputs(llm, [tokens], prompt_logprobs=1)
    (admitted,) = ears.of("admitted")
    assert admitted[4:6] == (0, False)
    assert hits == []
    assert held(ears.told) == {}


def test_another_salt_is_other_content(llm: Any, ears: Ears) -> None:
    """What goes into a block's hash beside the tokens (salt; LoRA and images alike) keeps contents apart for us too."""
    tokens = mixed(9, 1)[0][:100]
    sampling = SamplingParams(max_tokens=2, temperature=0)
    for salt in ("a", "b", "a"):
        llm.generate([{**prompt(*tokens), "cache_salt": salt}], sampling, use_tqdm=False)
    a, b, again = ears.of("admitted")
    assert a[2] == again[2]
    assert set(a[2]).isdisjoint(b[2])
    assert (a[4], b[4], again[4]) == (0, 0, 96)


def test_aborted_requests_give_back_what_they_held(llm: Any, ears: Ears) -> None:
    """Aborted in mid-prefill: the hashes are of the blocks that were filled. Aborted while waiting: nothing is told."""
    engine, prompts = llm.llm_engine, [one for one in mixed(10, 30) if len(one) == 400]
    # In a step of 256 tokens the first is prefilled in part and the last ones wait.
    for number, tokens in enumerate(prompts[:9]):
        engine.add_request(f"abort-{number}", prompt(*tokens), SamplingParams(max_tokens=4, temperature=0))
    engine.step()
    assert 1 <= len(ears.of("admitted")) < 9
    engine.abort_request([f"abort-{number}" for number in range(9)])
    while engine.has_unfinished_requests():
        engine.step()
    assert held(ears.told) == {}
    assert all(0 < len(freed[2]) < 400 // BLOCK_SIZE for freed in ears.of("freed"))
    assert queue_of(llm).num_free_blocks == 63


@pytest.mark.parametrize("answer", [8, 40])
def test_the_shadow_hits_what_the_engine_hits(llm: Any, ears: Ears, answer: int) -> None:
    """A third of the prompts are block-aligned and come again, several at once, between long ones in chunks: half a
    point at most lies between the rates, whether or not answers fill blocks."""
    outputs(llm, [tokens[:128] if len(tokens) < 400 else tokens for tokens in mixed(14, 240)], max_tokens=answer)
    assert abs(residual(ears.told, "s3fifo", queue_of(llm).wakman.capacity, BLOCK_SIZE)) < 0.005
    assert held(ears.told) == {}


def test_a_reset_forgets_everything(llm: Any, ears: Ears) -> None:
    """A reset that vLLM does is told and clears what is known; one that it refuses, for blocks in use, is not."""
    tokens = mixed(12, 1)[0][:100]
    outputs(llm, [tokens, *mixed(12, 20)])
    assert queue_of(llm).wakman.ghost
    llm.llm_engine.add_request("holds", prompt(*tokens), SamplingParams(max_tokens=4))
    llm.llm_engine.step()
    assert not llm.reset_prefix_cache()
    assert ears.of("reset") == []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    assert llm.reset_prefix_cache()
    assert ears.of("reset") == [("reset",)]
    assert not queue_of(llm).wakman.ghost
    assert attached(llm).attached


def test_preempted_requests_are_told_as_resumed(
    engines: Engines, ears: Ears, hits: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preemption gives the blocks back; the resumed request is admitted anew, and is counted in nothing."""
    with environment(monkeypatch, WAKMAN_POLICY="s3fifo"):
        tight = engines(max_model_len=512, num_gpu_blocks_override=26)
    assert answers(tight, [tokens[:150] for tokens in mixed(3, 16)], max_tokens=120)
    admitted = ears.of("admitted")
    first = [one for one in admitted if one[5]]
    resumed = [one for one in admitted if not one[5]]
    assert len(first) == 16 == len({one[1] for one in first})
    assert resumed, "nothing was preempted"
    assert all(one[3] > 128 for one in resumed)
    assert held(ears.told) == {}
    assert len(hits) == sum(1 for one in first if one[4])
    state, pool = queue_of(tight).wakman, scheduler_of(tight).kv_cache_manager.block_pool
    assert free_queue.check(queue_of(tight), state, pool) is None
