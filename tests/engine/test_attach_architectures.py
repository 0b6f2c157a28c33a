"""Live models of other kinds: what the patch cannot judge it leaves alone, and they serve as without it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.attached import Ears, mixed, outputs, with_ears
from tests.engine.side_by_side import (
    left_alone,
    tokens,
    tokens_and_hits,
    under_each_policy,
    with_the_patch,
    without_the_patch,
)
from tests.engine.tiny_variants import HYBRID, SLIDING, state_model

Engines = Callable[..., Any]

pytestmark = pytest.mark.newest

PROMPTS = mixed(7, 40)
SPECS = "SlidingWindowSpec, FullAttentionSpec"


@pytest.fixture(scope="module")
def ears() -> Iterator[Ears]:
    with pytest.MonkeyPatch.context() as patch:
        yield with_ears(patch)


def store(folder: Path) -> dict[str, Any]:
    """Return the settings of a connector that writes prompts to files and reads them; it wants them in one chunk."""
    extra = {"shared_storage_path": str(folder)}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": transfer, "max_num_batched_tokens": 8192}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (lambda _: HYBRID, f"the model has 2 KV cache groups ({SPECS}); only one is supported"),
        (lambda _: SLIDING, "the model's KV cache is no full attention (SlidingWindowManager of SlidingWindowSpec)"),
        (
            lambda _: {"model": state_model(), "num_gpu_blocks_override": 192},
            "the model has 2 KV cache groups (MambaSpec, FullAttentionSpec); only one is supported",
        ),
        (store, "a KV connector is configured (ExampleConnector)"),
    ],
    ids=["hybrid", "sliding", "states and attention", "connector"],
)
def test_left_alone_it_serves_as_without_the_patch(
    engines: Engines, tmp_path: Path, changes: Callable[[Path], dict[str, Any]], said: str
) -> None:
    """Refused for its own reason, with vLLM's queue and no hook; tokens and hits, twice over, are those without us."""
    told = []
    for number, start in enumerate((without_the_patch, with_the_patch)):
        llm = start(engines, **changes(tmp_path / str(number)))
        told.append([tokens_and_hits(outputs(llm, PROMPTS)) for _ in range(2)])
    assert left_alone(llm) == said
    assert told[0] == told[1]
    assert any(hits for _, hits in told[0][1]), "nothing was hit"
    assert len({answer for answer, _ in told[0][0]}) > len(PROMPTS) // 2, "the model answers alike whatever is asked"


def test_a_hybrid_model_kept_as_one_of_full_attention_is_attached(engines: Engines, ears: Ears) -> None:
    """Its blocks are found from the first one on and freed at the end: same tokens under each policy, true shadows."""
    changes = {**HYBRID, "num_gpu_blocks_override": 64, "disable_hybrid_kv_cache_manager": True}
    stock = tokens(outputs(without_the_patch(engines, **changes), PROMPTS))
    llm = with_the_patch(engines, **changes)
    for served in under_each_policy(llm, ears, lambda llm: outputs(llm, PROMPTS)):
        assert tokens(served.done) == stock, served.policy
        assert served.hit_rate > 0.05, served
        assert abs(served.residual) < 0.005, served
