"""The paper's preset decides as the paper says: each 15 minutes, cold, hash by hash, at the mean free queue."""

from typing import Any

import numpy as np

from engine_patch.decision import EVIDENCE
from engine_patch.estimator import Estimator
from engine_patch.paper_preset import replay


def log(*requests: list[int]) -> list["np.ndarray[Any, Any]"]:
    """Return a window's log."""
    return [np.array(request, dtype=np.uint64) for request in requests]


def test_the_papers_replay_counts_each_hash() -> None:
    """Cold, in order, block by block: a hash behind a miss is a hit, and so is one of the request's own."""
    assert replay("lru", 10, log([1, 2, 3], [9, 2, 3], [1, 1])) == 2 + 2
    assert replay("lru", 2, log([1, 2], [1], [3], [1, 2])) == 2  # 3 evicts 2, not 1
    assert replay("s3fifo", 2, log([1, 2], [1], [3], [1, 2])) == 2
    assert replay("lru", 0, log([1, 1])) == 0


def test_the_papers_s3fifo_keeps_what_was_hit_through_a_scan() -> None:
    """A hash hit in small goes to main instead of out, so a scan of new ones evicts itself; LRU loses it."""
    window = log([1, 2], [1, 2], list(range(100, 120)), [1, 2])
    assert replay("s3fifo", 10, window) == 4
    assert replay("lru", 10, window) == 2


def test_the_paper_preset_decides_strictly_at_the_mean_free_queue() -> None:
    """Each 900 s; capacity is the mean of the free blocks seen; S3-FIFO needs a strictly higher rate, no margin."""
    estimator = Estimator("paper", ("s3fifo", "lru"), 1000, 16)
    window = [[1, 2], [1, 2], list(range(100, 120)), [1, 2]]
    for at, hashes in enumerate(window):
        estimator.admitted(at * 10.0, at, hashes, len(hashes) * 16, 0, free_blocks=8 + 4 * (at % 2))
        estimator.freed(at * 10.0 + 5, at, hashes, len(hashes))
    assert estimator.decide(899.0) is None
    decision = estimator.decide(901.0)
    assert decision is not None
    assert (decision.policy, decision.switch, decision.details["capacity"]) == ("s3fifo", True, 10)
    assert decision.rates == {"lru": 2 / 26, "s3fifo": 4 / 26}
    estimator.policy(901.0, "s3fifo")
    for at in range(3):  # cold: what was seen before plays no part, and a tie brings LRU back
        estimator.admitted(902.0 + at, at, [1, 2], 32, 0, free_blocks=10)
    tie = estimator.decide(1802.0)
    assert tie is not None
    assert (tie.policy, tie.switch) == ("lru", True)
    assert tie.rates["lru"] == tie.rates["s3fifo"] > 0
    empty = estimator.decide(2800.0)
    assert empty is not None
    assert (empty.switch, empty.reason) == (False, EVIDENCE)
