"""How far a shadow is from the engine whose events it is given."""

from collections.abc import Sequence
from typing import Any

from engine_patch.shadow import PoolShadow


def residual(told: Sequence[tuple[Any, ...]], policy: str, num_blocks: int, block_size: int, dropped: int = 0) -> float:
    """Return the shadow's hit rate less the engine's, by prompt tokens, from what ears (attached.py) were told."""
    shadow, said, asked = PoolShadow([policy], num_blocks, block_size, dropped=dropped), 0, 0
    for kind, *event in told:
        if kind == "reset":
            shadow.reset()
        if kind not in {"admitted", "freed"}:
            continue
        request, hashes, *rest = event
        numbers = [int.from_bytes(value[:8], "little") for value in hashes]
        if kind == "admitted":
            tokens, hit_tokens, counted, free = rest
            shadow.admitted(request, numbers, tokens, counted, hit_tokens, free)
            said, asked = said + hit_tokens * counted, asked + tokens * counted
        else:
            shadow.freed(request, numbers[shadow.hashes_known(request) :], len(numbers), *rest)
    assert 0 < said < asked
    return (shadow.lanes[0].hit_blocks * block_size - said) / asked
