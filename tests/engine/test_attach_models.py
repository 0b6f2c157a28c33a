"""What differs from engine to engine and still attaches: what vLLM drops of a hit, and maps that it makes anew."""

from random import Random
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from engine_patch import attach, free_queue
from engine_patch.attachment import Attachment
from engine_patch.guards import drops_a_block
from engine_patch.shadow import PoolShadow
from tests.engine.attached import BLOCK, bare, started, with_ears


def shadowed(told: list[tuple[Any, ...]], dropped: int) -> tuple[int, int]:
    """Return the hit tokens that the engine told of, and those of a shadow that is told the same."""
    shadow, said = PoolShadow(["lru"], 1000, BLOCK, dropped=dropped), 0
    for kind, request, hashes, *rest in told:
        numbers = [int.from_bytes(value[:8], "little") for value in hashes]
        if kind == "admitted":
            said += rest[1]
            shadow.admitted(request, numbers, rest[0])
        else:
            shadow.freed(request, numbers[shadow.hashes_known(request) :], len(numbers), rest[0])
    return said, shadow.lanes[0].hit_blocks * BLOCK


@pytest.mark.parametrize("eagle", [False, True])
def test_the_shadow_drops_of_a_hit_what_vllm_drops(eagle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With EAGLE vLLM computes the last block of each hit anew: the shadow knows, and hits what the engine hits."""
    ears = with_ears(monkeypatch)
    stock = KVCacheManager.__init__
    if eagle:
        monkeypatch.setattr(KVCacheManager, "__init__", lambda self, *a, **k: stock(self, *a, use_eagle=True, **k))
    # So many that nothing is evicted: each hit under EAGLE leaves a copy, of which the shadow has none.
    scheduler, blocks = bare(400)
    outcome = attach.attach(scheduler, {})
    assert isinstance(outcome, Attachment)
    assert drops_a_block(outcome._engine) is eagle
    rng = Random(0)
    for number in range(60):
        hashes = [b"%d-%06d" % (number % 5, at) for at in range(rng.randint(1, 6))]
        tokens = BLOCK * len(hashes) + rng.randrange(BLOCK)
        blocks.start(f"r{number}", hashes, tokens)
        blocks.finish(f"r{number}", hashes, tokens)
    said, ours = shadowed([told for told in ears.told if told[0] in {"admitted", "freed"}], int(eagle))
    assert said == ours > 0
    outcome.detach("the test is over")


def test_contents_are_counted_in_the_map_that_vllm_has_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset gives the pool another map of hashes; what is new in it saves looking for copies as before."""
    with_ears(monkeypatch)
    grown: list[int | None] = []
    cached = free_queue.cached

    def watched(state: Any, blocks: Any, first: int, until: int, new: int | None = None) -> None:
        grown.append(new)
        cached(state, blocks, first, until, new)

    monkeypatch.setattr(free_queue, "cached", watched)
    _, blocks, outcome = started()
    for number in range(2):
        blocks.start(f"r{number}", [b"a-%06d" % number, b"b-%06d" % number], 2 * BLOCK + 1)
        blocks.finish(f"r{number}", [b"a-%06d" % number, b"b-%06d" % number], 2 * BLOCK + 1)
        assert blocks._manager.reset_prefix_cache()
    assert grown == [2, 2]
    outcome.detach("the test is over")
