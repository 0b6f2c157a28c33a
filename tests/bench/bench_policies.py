"""What the pure queues cost a block (min / median / max, ns): a request that misses whole, and one that hits whole.

A pool of `BLOCKS` is full; requests have `REQUEST` blocks, chained behind one common block; ids are 63-bit integers.
Missing: looked up, room made, freed. Hitting: looked up, taken, freed. Batches are what the shadow calls.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stats import machine, spread

from engine_patch.policy import POLICIES, EvictionQueue, new_queue

BLOCKS, REQUEST, ROUNDS = 16_384, 300, 150


def request(rng: Random) -> list[int]:
    return [rng.getrandbits(63) for _ in range(REQUEST)]


def serve(queue: EvictionQueue[int], blocks: list[int]) -> None:
    hits = queue.prefix(blocks)
    queue.take(blocks[:hits])
    queue.discard_all(blocks[hits:])
    queue.evict_many(max(0, len(queue) + len(blocks) - BLOCKS))
    queue.append_chain(blocks, None, 0)


def ns_a_block(work: Callable[[], None]) -> float:
    began = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - began) / REQUEST


def main() -> None:
    print(f"{BLOCKS} blocks, requests of {REQUEST}; ns a block, {machine()}")
    gc.disable()
    for policy in POLICIES:
        rng = Random(0)
        queue: EvictionQueue[int] = new_queue(policy, BLOCKS)
        hot = request(rng)
        for _ in range(BLOCKS // REQUEST * 3):
            serve(queue, request(rng))
        serve(queue, hot)
        misses, hits = [], []
        for _ in range(ROUNDS):
            blocks = request(rng)
            misses.append(ns_a_block(lambda: serve(queue, blocks)))  # noqa: B023
            hits.append(ns_a_block(lambda: serve(queue, hot)))  # noqa: B023
        print(f"  {policy:18} missing {spread(misses, 0):22} hitting {spread(hits, 0)}")


if __name__ == "__main__":
    main()
