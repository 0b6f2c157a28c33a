"""What the guards say of schedulers that vLLM itself builds for layers, connectors and settings of all kinds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from engine_patch import attach
from engine_patch.attachment import Attachment
from tests.engine.schedulers import layer, scheduler

pytestmark = pytest.mark.newest

FULL, SLIDING, LOCAL = "FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"
NONE = "the model has {} KV cache groups ({}); only one is supported"
# Parts that a kind of layer must have beside heads and block size.
PARTS: dict[str, dict[str, Any]] = {
    SLIDING: {"sliding_window": 64},
    LOCAL: {"attention_chunk_size": 64},
    "RSWASpec": {"rswa_window": 64},
    "MLAAttentionSpec": {"num_kv_heads": 1},
    "MambaSpec": {"shapes": ((3, 64),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"},
}


def model(*kinds: str) -> dict[str, Any]:
    """Return a model of these layers, in this order; `Kind:64` is one with heads of that size."""
    made = {}
    for number, kind in enumerate(kinds):
        name, _, size = kind.partition(":")
        made[str(number)] = layer(name, **PARTS.get(name, {}), **({"head_size": int(size)} if size else {}))
    return made


def outcome(made: Any) -> Any:
    """Attach, and see that a refused engine is as vLLM made it."""
    queue = made.kv_cache_manager.block_pool.free_block_queue
    found = attach.attach(made, {})
    if isinstance(found, Attachment):
        found.detach("the test is over")
    assert type(queue) is FreeKVCacheBlockQueue
    return found


@pytest.mark.parametrize(
    ("kinds", "changes", "said"),
    [
        ((FULL, FULL), {}, None),
        ((FULL, f"{FULL}:64"), {}, None),
        (("MLAAttentionSpec", "MLAAttentionSpec"), {}, None),
        ((SLIDING, FULL), {}, NONE.format(2, f"{SLIDING}, {FULL}")),
        ((SLIDING, SLIDING, SLIDING, FULL), {}, NONE.format(4, f"{SLIDING}, {FULL}")),
        ((LOCAL, FULL), {}, NONE.format(2, f"{LOCAL}, {FULL}")),
        (("MambaSpec", FULL), {}, NONE.format(2, f"MambaSpec, {FULL}")),
        ((SLIDING, SLIDING), {}, f"the model's KV cache is no full attention (SlidingWindowManager of {SLIDING})"),
        ((LOCAL, LOCAL), {}, f"the model's KV cache is no full attention (ChunkedLocalAttentionManager of {LOCAL})"),
        (("MambaSpec",), {}, "the model's KV cache is no full attention (MambaManager of MambaSpec)"),
        (("RSWASpec",), {}, "the model's KV cache is no full attention (RSWAManager of RSWASpec)"),
        ((), {"enable_prefix_caching": False}, "prefix caching is off"),
        # vLLM keeps such layers as if they were full, and then their blocks are worth what a prefix is worth.
        ((SLIDING, FULL), {"disable_hybrid_kv_cache_manager": True}, None),
        ((SLIDING, SLIDING, SLIDING, f"{FULL}:64"), {"disable_hybrid_kv_cache_manager": True}, None),
        ((LOCAL, FULL), {"disable_hybrid_kv_cache_manager": True}, None),
        # With no full layer beside it, a sliding one stays one.
        (
            (SLIDING, SLIDING),
            {"disable_hybrid_kv_cache_manager": True},
            f"the model's KV cache is no full attention (SlidingWindowManager of {SLIDING})",
        ),
    ],
)
def test_kinds_of_layers(kinds: tuple[str, ...], changes: dict[str, Any], said: str | None) -> None:
    """One group kept block by block from the first token on is attached to; whatever else vLLM forms is refused."""
    found = outcome(scheduler(model(*kinds), **changes))
    assert (None if isinstance(found, Attachment) else found.status()["reason"]) == said


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ExampleConnector", {"shared_storage_path": "here"}),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1 << 26}),
        ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1 << 26}),
        ("MultiConnector", {"connectors": [{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}]}),
        ("NixlConnector", {}),
        ("MooncakeConnector", {}),
        ("DecodeBenchConnector", {}),
    ],
)
def test_connectors(name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of vLLM's KV connectors that can be built here is refused by its name."""
    monkeypatch.chdir(tmp_path)
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": more}
    made = scheduler(kv_transfer_config=transfer)
    try:
        assert outcome(made).status()["reason"] == f"a KV connector is configured ({name})"
    finally:
        made.connector.shutdown()


def test_offloading_is_refused_as_the_connector_that_it_is() -> None:
    """`kv_offloading_size` makes vLLM configure a connector, whose name the reason has."""
    made = scheduler(kv_offloading_size=0.1)
    assert outcome(made).status()["reason"] == "a KV connector is configured (OffloadingConnector)"
    made.connector.shutdown()


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        {"runner": "pooling"},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False},
        {"async_scheduling": True},
        {"enable_lora": True},
        {"kv_cache_metrics": True},
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
        {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
        {"prefix_caching_hash_algo": "xxhash"},
        {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_settings_that_change_nothing_for_the_pool(changes: dict[str, Any]) -> None:
    """Settings of other parts of vLLM leave the pool as it is: attached."""
    found = outcome(scheduler(**changes))
    assert isinstance(found, Attachment), found.status()["reason"]
