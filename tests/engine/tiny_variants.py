"""What else runs on the tiny model's scale: other kinds of attention, states, LoRA adapters, drafts.

1. `SLIDING` and `HYBRID` run the tiny model's own weights as another architecture: a window is a setting, no weight.
2. A model with states has weights of its own: short convolutions with layers of attention between them (LFM2); vLLM
   keeps their states as it keeps Mamba's. Mamba itself cannot run with prefix caching on vLLM's CPU build.
3. An adapter changes attention so much that its answers are others than the base model's.
4. An EAGLE head drafts for the tiny model; it knows nothing, so hardly any draft is taken.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine import tiny_model as base
from tests.engine.tiny_model import MAX_MODEL_LEN, VOCABULARY, made_once, save_tokenizer

MISTRAL: Mapping[str, Any] = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
SLIDING: Mapping[str, Any] = {"hf_overrides": MISTRAL}
# A group takes blocks of its own: three times as many hold as many requests.
HYBRID: Mapping[str, Any] = {
    "hf_overrides": {**MISTRAL, "layer_types": ["sliding_attention", "full_attention"]},
    "num_gpu_blocks_override": 192,
}

RANK = 8
SOURCES = (Path(__file__), Path(base.__file__))


def state_model() -> str:
    """Return the folder of a model of four layers: states, attention, states, attention."""
    return made_once("tiny-states", _states, *SOURCES)


def adapter(seed: int) -> str:
    """Return the folder of a LoRA adapter of rank 8 for the tiny model, one for each seed."""
    return made_once(f"tiny-adapter-{seed}", lambda folder: _adapter(folder, seed), *SOURCES)


def eagle_head() -> str:
    """Return the folder of a one-layer EAGLE head for the tiny model."""
    return made_once("tiny-eagle", _eagle, *SOURCES)


def _states(folder: Path) -> None:
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    save_tokenizer(folder)
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
        layer_types=["conv", "full_attention"] * 2,
        # vLLM asks for these two, transformers no longer writes them.
        conv_dim=128,
        block_dim=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    Lfm2ForCausalLM(config).to(torch.float32).save_pretrained(folder)


def _adapter(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    random, weights = torch.Generator().manual_seed(seed), {}
    for number in range(2):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            place = f"base_model.model.model.layers.{number}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.3 * torch.randn(RANK, 128, generator=random)
            weights[f"{place}.lora_B.weight"] = 0.3 * torch.randn(width, RANK, generator=random)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM", "bias": "none"}))


def _eagle(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    save_tokenizer(folder)
    sizes = {"self_attn.q_proj": (128, 128), "self_attn.k_proj": (64, 128), "self_attn.v_proj": (64, 128)}
    sizes |= {"self_attn.o_proj": (128, 128), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128)}
    sizes |= {"mlp.down_proj": (128, 256)}
    random = torch.Generator().manual_seed(0)
    weights = {f"layers.0.{name}.weight": torch.randn(*size, generator=random) / 4 for name, size in sizes.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(128)
    # Takes the token's embedding and the model's last state side by side.
    weights["fc.weight"] = torch.randn(128, 256, generator=random) / 4
    save_file(weights, folder / "model.safetensors")
    config = LlamaConfig.from_pretrained(base.tiny_model())
    config.num_hidden_layers = 1
    config.save_pretrained(folder)
