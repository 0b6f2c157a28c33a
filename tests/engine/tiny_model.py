"""A model of a few hundred kilobytes with random weights, made on the spot: vLLM needs weights to run, the tests none.

1. Two Llama layers of 128 hidden units, and a tokenizer whose words are `<0>` … `<1023>`: word N is token N, so a test
   writes prompts as numbers and knows their tokens. The weights are drawn from a fixed seed; nothing is downloaded.
2. The folder is cached under a name that holds this file's digest; it appears whole or not at all.
3. `ENGINE` are the arguments that start an engine fast on a CPU with few blocks of 32 tokens; `ENVIRONMENT` what its
   process needs. Both serve `LLM(...)` and, as flags, the API server.
"""

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 1024
BLOCK_SIZE = 32
MAX_MODEL_LEN = 1024
# 63 to use: one is the null block. The whole must hold a request of MAX_MODEL_LEN, or vLLM refuses to start.
NUM_BLOCKS = 64

ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": MAX_MODEL_LEN,
    "block_size": BLOCK_SIZE,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "enable_prefix_caching": True,
    "seed": 0,
}

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "CUDA_VISIBLE_DEVICES": "",
    # Two engines on one machine start fast only where neither spins while it waits.
    "KMP_BLOCKTIME": "0",
    # numba's own (n-grams): on OpenMP's, it and torch break up each other's teams of threads at each step.
    "NUMBA_THREADING_LAYER": "workqueue",
}


def tiny_model() -> str:
    """Return the folder of the model, made if need be (about 3 s the first time, in a vLLM environment)."""
    return made_once("tiny-model", _make, Path(__file__))


def made_once(name: str, make: Callable[[Path], None], *sources: Path) -> str:
    """Return a folder in the cache that `make` filled, now or before; it is made anew when a source file changes."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    folder = cache_folder() / f"{name}-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=".part", dir=folder.parent))
        try:
            make(part)
            part.rename(folder)
        except OSError:
            # Somebody else was first; anything else shows when the folder is used.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return str(folder)


def cache_folder() -> Path:
    """Return where the tests on vLLM keep what outlives a checkout."""
    chosen = os.environ.get("CACHEROUTE_VLLM_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cacheroute" / "vllm"


def flags(**changes: Any) -> list[str]:
    """Return `ENGINE`, changed by the arguments, as flags of the API server."""
    listed: list[str] = []
    for name, value in {**ENGINE, **changes}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            listed.append(flag)
        elif value is False:
            listed.append("--no-" + name.replace("_", "-"))
        elif value is not None:
            listed += [flag, str(value)]
    return listed


def server_command(port: int, **changes: Any) -> list[str]:
    """Return the command of an API server on the tiny model; `vllm serve` refuses the name of the CPU distribution."""
    api_server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_model()]
    return [*api_server, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *flags(**changes)]


def prompt(*tokens: int) -> dict[str, Any]:
    """Return the prompt of these tokens, for `LLM.generate`; over HTTP `"prompt": [tokens]` says the same."""
    return {"prompt_token_ids": list(tokens)}


def save_tokenizer(folder: Path) -> None:
    """Put the tokenizer of numbers beside a model of `VOCABULARY` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<0>", bos_token="<1>", eos_token="<2>", pad_token="<0>"
    ).save_pretrained(folder)


def _make(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    save_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.25,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            # Every answer must hang on the whole prompt, so that a wrong block in the cache shows in it: attention that
            # looks at all tokens about alike, and weighs more than the token itself.
            layer.self_attn.q_proj.weight *= 0.25
            layer.self_attn.o_proj.weight *= 4
    model.save_pretrained(folder)


if __name__ == "__main__":
    os.environ.update({**ENVIRONMENT, "VLLM_PLUGINS": "wakman"})
    command = server_command(int(sys.argv[1]), num_gpu_blocks_override=1024)
    os.execv(command[0], command)
