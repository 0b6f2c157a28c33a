"""What a model on its accelerators costs: constants of the step-time model, and how much KV cache there is.

dt = max(floor_s, base_s + token_s * tokens) + pair_s2 * sum(n * (ctx + n / 2)) + kv_s * context + seq_s * sequences

tokens: all tokens of the step; the sum goes over its prefill chunks of n tokens behind ctx computed ones; context:
computed tokens of its decoding sequences; sequences: all in the step.

Source of the times: AIConfigurator 0.12, h100_sxm, vLLM 0.24, `static_ctx` and `static_gen`, fits by eye; `seq_s` of
70b-fp8-tp2, and `pair_s2` and `seq_s` of 70b-bf16-tp2, are our fit of the same rows. Error of the fits, in %:

preset        prefill 512  1024  2048  4096  8192  1024 behind 8192   decode 1x1K  64x1K  256x1K  64x8K  128x8K
70b-fp8-tp2            +1     0     0    -1   +14                 0             0      0     +16     +5      +3
8b-bf16-tp1            +9   +11   +10    +7    +3                +9            +1     -8      +6     -1       0
70b-bf16-tp2           +2    +6    +5    +1     0                 0             0      0       0     +4      +5

Source of the KV size: 70b-fp8-tp2 is CacheRoute's figure (arXiv 2608.19677: 40,071 blocks of 16 tokens on two devices,
which needs parts of about 96 GB); the others are about what parts of that size hold beside the weights.
"""

from dataclasses import dataclass

from service.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Preset:
    """Constants of one model on one kind of destination; s: seconds, s2: seconds per pair of tokens."""

    name: str
    floor_s: float
    base_s: float
    token_s: float
    pair_s2: float
    kv_s: float
    seq_s: float
    kv_blocks: int
    max_model_len: int = 131_072


PRESETS = (
    Preset("70b-fp8-tp2", 0.0172, 0.005, 7.72e-5, 2.1e-9, 3.15e-8, 3e-5, kv_blocks=40_071),
    Preset("8b-bf16-tp1", 0.0062, 0.002, 2.15e-5, 8e-10, 4.1e-8, 1e-5, kv_blocks=35_000),
    Preset("70b-bf16-tp2", 0.0275, 0.0, 1.13e-4, 1.2e-9, 5.7e-8, 2e-5, kv_blocks=9_375),
)


def find_preset(name: str) -> Preset:
    """Return the preset of that name; InvalidInput lists the names there are."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise InvalidInput(f"--preset {name!r} is unknown", f"use one of: {', '.join(p.name for p in PRESETS)}")
