"""Six kinds of traffic as sequences of block ids: skewed, skewed with scans, a loop, a real trace, chains, uniform."""

from bisect import bisect
from collections.abc import Callable
from itertools import accumulate
from random import Random

from replay.demo import EXCERPT
from replay.eviction import read_blocks

REQUESTS = 60_000


def zipf() -> list[int]:
    """Return requests for 20,000 ids whose popularity falls as 1 / rank."""
    return _zipf(Random(1), REQUESTS)


def scans() -> list[int]:
    """Return skewed requests that runs of 3,000 ids, each asked for once, interrupt."""
    rng = Random(2)
    ids: list[int] = []
    fresh = 1_000_000
    while len(ids) < REQUESTS:
        ids += _zipf(rng, 5_000)
        ids += range(fresh, fresh + 3_000)
        fresh += 3_000
    return ids


def loop() -> list[int]:
    """Return 1,500 ids in a circle: LRU's worst case as soon as one of them does not fit."""
    return [at % 1_500 for at in range(30_000)]


def conversation() -> list[int]:
    """Return the blocks of the shipped excerpt of Mooncake's conversation trace, in prompt order."""
    return read_blocks(EXCERPT).blocks()


def sessions() -> list[int]:
    """Return interleaved sessions of 3 to 12 turns: each asks for all blocks so far and a few more, tail first."""
    rng = Random(3)
    ids: list[int] = []
    fresh = 1_000
    live: list[tuple[list[int], int]] = []
    while len(ids) < REQUESTS:
        if len(live) < 60:
            # One of 20 system prompts of 10 blocks.
            prompt = rng.randrange(20) * 10
            live.append((list(range(prompt, prompt + 10)), rng.randint(3, 12)))
        at = rng.randrange(len(live))
        blocks, turns = live[at]
        count = rng.randint(2, 12)
        blocks = blocks + list(range(fresh, fresh + count))
        fresh += count
        ids += reversed(blocks)
        if turns > 1:
            live[at] = (blocks, turns - 1)
        else:
            del live[at]
    return ids


def uniform() -> list[int]:
    """Return requests for 10,000 ids, all equally popular."""
    rng = Random(4)
    return [rng.randrange(10_000) for _ in range(REQUESTS)]


TRACES: dict[str, tuple[Callable[[], list[int]], tuple[int, int, int]]] = {
    "zipf": (zipf, (100, 1_000, 5_000)),
    "scans": (scans, (200, 2_000, 8_000)),
    "loop": (loop, (150, 1_490, 1_600)),
    "conversation": (conversation, (1_000, 4_000, 16_000)),
    "sessions": (sessions, (500, 2_000, 6_000)),
    "uniform": (uniform, (50, 999, 9_000)),
}


def _zipf(rng: Random, count: int) -> list[int]:
    bounds = list(accumulate(1 / rank for rank in range(1, 20_001)))
    return [bisect(bounds, rng.random() * bounds[-1]) for _ in range(count)]
