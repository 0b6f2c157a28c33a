"""Our LRU, S3-FIFO and Belady against libcachesim's, and what the policies hit on Mooncake's conversation trace."""

import functools
from pathlib import Path
from typing import Any

import pytest

from engine_patch import oracle
from engine_patch.bounds import belady, next_uses
from replay.eviction import BlockTrace, bound_hits, hits, read_blocks
from tests.claims.id_traces import TRACES

CASES = [(name, capacity) for name, (_, capacities) in TRACES.items() for capacity in capacities]
NEVER = 2**63 - 1


@functools.cache
def ids(name: str) -> list[int]:
    return TRACES[name][0]()


def libcachesim_hits(policy: str, blocks: list[int], capacity: int) -> bytearray:
    """Return what libcachesim's cache answers to each request in turn."""
    # A test dependency alone: it is under the GPL.
    sim: Any = pytest.importorskip("libcachesim")
    cache = {"lru": sim.LRU, "s3fifo": sim.S3FIFO, "belady": sim.Belady}[policy](cache_size=capacity, hashpower=16)
    request = sim.Request()
    request.obj_size = 1
    found = bytearray()
    for block, use in zip(blocks, next_uses(blocks), strict=True):
        request.obj_id = block
        request.next_access_vtime = use if use < len(blocks) else NEVER
        found.append(cache.get(request))
    return found


@pytest.mark.parametrize(("name", "capacity"), CASES)
@pytest.mark.parametrize("policy", oracle.POLICIES)
def test_the_oracle_is_libcachesim_request_for_request(policy: str, name: str, capacity: int) -> None:
    """Every single request hits here exactly when it hits there."""
    ours = oracle.hits(policy, ids(name), capacity)
    theirs = libcachesim_hits(policy, ids(name), capacity)
    assert sum(map(int.__ne__, ours, theirs)) == 0
    assert 0 < sum(ours) < len(ours) or name == "loop"


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_belady_is_libcachesims(name: str, capacity: int) -> None:
    """MIN has the same number of hits; which of two blocks that never come again goes first is nobody's concern."""
    assert belady(ids(name), capacity) == sum(libcachesim_hits("belady", ids(name), capacity))


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_the_queue_of_free_blocks_is_lru_too(name: str, capacity: int) -> None:
    """Single ids through the queue that serves blocks hit exactly as often as libcachesim's LRU."""
    trace = BlockTrace([(block,) for block in ids(name)], chained=False)
    assert hits("lru", trace, capacity) == sum(oracle.hits("lru", ids(name), capacity))


# Hit ratios of the whole trace, blocks of 512 tokens, contiguous prefixes; capacity -> policy -> ratio.
CONVERSATION = {
    1_000: {"lru": 0.0445, "s3fifo": 0.0565, "s3fifo-25": 0.0572, "arc": 0.0529, "belady": 0.1906},
    4_000: {"lru": 0.0865, "s3fifo": 0.1275, "s3fifo-25": 0.1263, "arc": 0.0974, "belady": 0.3223},
    8_000: {"lru": 0.1781, "s3fifo": 0.1860, "s3fifo-25": 0.1887, "arc": 0.1914, "belady": 0.3659},
    16_000: {"lru": 0.2627, "s3fifo": 0.2342, "s3fifo-25": 0.2566, "arc": 0.2706, "belady": 0.3664},
    32_000: {"lru": 0.3320, "s3fifo": 0.2948, "s3fifo-25": 0.3147, "arc": 0.3152, "belady": 0.3664},
}


@pytest.mark.parametrize("capacity", CONVERSATION)
def test_hit_ratios_of_a_real_trace(traces: Path, capacity: int) -> None:
    """Mooncake's conversation trace favours S3-FIFO in small caches and LRU in large ones; ARC never comes last."""
    trace = read_blocks(traces / "mooncake_conversation.jsonl")
    total = len(trace.blocks())
    assert total == 288_500
    expected = dict(CONVERSATION[capacity])
    endless, best = bound_hits(trace, capacity)
    assert endless / total == pytest.approx(0.3664, abs=1e-4)
    assert best / total == pytest.approx(expected.pop("belady"), abs=1e-4)
    ratios = {policy: hits(policy, trace, capacity) / total for policy in expected}
    assert ratios == pytest.approx(expected, abs=1e-4)
    assert (ratios["s3fifo"] > ratios["lru"]) == (capacity <= 8_000)
    assert ratios["arc"] > min(ratios["lru"], ratios["s3fifo"])
