"""Real engines that the patch must leave alone: they serve, with vLLM's own queue, and the status says why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from tests.engine.attached import answers, attachment_of, environment, mixed, no_hook_left, queue_of

Engines = Callable[..., Any]

pytestmark = pytest.mark.newest

MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}


def connector(folder: Path) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(folder)},
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_prefix_caching": False}, "prefix caching is off"),
        (
            {"hf_overrides": MISTRAL},
            "the model's KV cache is no full attention (SlidingWindowManager of SlidingWindowSpec)",
        ),
        ({"kv_transfer_config": connector}, "a KV connector is configured (ExampleConnector)"),
    ],
    ids=["caching off", "sliding window", "connector"],
)
def test_left_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """The engine has the stock queue and no hook, answers, and refuses orders with the same reason."""
    with environment(monkeypatch, WAKMAN_POLICY="s3fifo"):
        llm = engines(**{name: value(tmp_path) if callable(value) else value for name, value in changes.items()})
    there = attachment_of(llm)
    assert (there.status()["attached"], there.status()["reason"]) == (False, said)
    assert type(queue_of(llm)) is FreeKVCacheBlockQueue
    assert no_hook_left(llm) == []
    assert len(answers(llm, mixed(1, 4))) == 4
    assert said in there.set_mode("arc", "test", "")["error"]
