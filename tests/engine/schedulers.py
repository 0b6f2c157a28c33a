"""vLLM's own scheduler for the settings and layers that a test names, built as the engine does, without a worker.

1. vLLM turns the arguments into its configuration, forms the KV cache groups, and makes the scheduler with its manager,
   coordinator, pool and connector: what the guards look at is real, on a machine without the device it is for.
2. What a worker would say is said here: the layers (an engine's two of full attention unless named), the memory, and
   the layout of the cache.
"""

from collections.abc import Mapping
from typing import Any

from tests.engine.tiny_model import ENGINE, tiny_model


def layer(kind: str, **parts: Any) -> Any:
    """Return the cache of one layer, of the class `kind` of vLLM's KV cache interface, in blocks of 32 tokens."""
    import torch
    from vllm.v1 import kv_cache_interface

    parts = {"block_size": ENGINE["block_size"], **parts}
    if kind != "MambaSpec":
        parts = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32, **parts}
    return getattr(kv_cache_interface, kind)(**parts)


def scheduler(layers: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """Return the scheduler of these layers by name, `ENGINE` changed by the arguments. About 20 ms."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
        resolve_kv_cache_block_sizes,
    )
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    arguments = {"model": tiny_model(), **ENGINE, "num_gpu_blocks_override": 256, **changes}
    config = EngineArgs(**arguments).create_engine_config()
    register_all_kvcache_specs(config)
    config.cache_config.kv_cache_layout = "LBNHC"
    layers = {"0": layer("FullAttentionSpec"), "1": layer("FullAttentionSpec")} if layers is None else layers
    caches = generate_scheduler_kv_cache_config(get_kv_cache_configs(config, [dict(layers)], [1 << 30]))
    config.cache_config.num_gpu_blocks = caches.num_blocks
    block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
    made: Any = config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=None,  # type: ignore[arg-type]
        block_size=block_size,
        hash_block_size=hash_block_size,
        log_stats=True,
    )
    return made
