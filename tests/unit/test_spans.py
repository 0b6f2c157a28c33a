"""Chains become ranges of small numbers and back, and queues of ranges keep their books, through every renumbering."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from engine_patch.chain_ids import ChainIds, Range, beginning, behind
from engine_patch.policy import POLICIES, new_queue
from engine_patch.shadow import PoolShadow
from engine_patch.span_ghost import Ghost
from engine_patch.span_policies import new_spans
from engine_patch.spans import FRONT
from tests.unit.pool_model import BLOCK, Traffic


def ids_of(ranges: list[Range]) -> list[int]:
    """Return every id."""
    return [number for low, high in ranges for number in range(low, high)]


def array(hashes: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return hashes as the shadows take them."""
    return np.array(hashes, dtype=np.uint64)


def test_a_chain_has_the_ids_of_its_blocks() -> None:
    """Equal hashes have one id, others have others, wherever the chain is entered and left; parents are known."""
    ids, known = ChainIds(100_000), {}
    for prompt, full in Traffic(0).prompts(500):
        ranges = ids.ranges(array(prompt))
        ranges += ids.ranges(array(full[len(prompt) :]), ranges[-1][1] - 1)
        numbers = ids_of(ranges)
        assert len(numbers) == len(full)
        for value, number in zip(full, numbers, strict=True):
            assert known.setdefault(value, number) == number
        for before, number in pairwise(numbers):
            assert number in ids.children(before, before + 1)
    assert len(set(known.values())) == len(known) == ids.used
    assert ids.names[: ids.used].tolist() == sorted(known, key=known.__getitem__)


def test_compacting_keeps_what_is_wanted() -> None:
    """Wanted ids keep their hash, order and children; what is forgotten gets a new id when it comes again."""
    ids = ChainIds(1000)
    first = ids.ranges(array([1, 2, 3, 4, 5]))
    second = ids.ranges(array([1, 2, 30, 40]))
    assert (first, second) == ([(0, 5)], [(0, 2), (5, 7)])
    wanted = np.array([True, True, False, True, False, True, True])
    new = np.cumsum(wanted) - 1
    ids.compact(wanted, new, 500)
    assert ids.names[: ids.used].tolist() == [1, 2, 4, 30, 40]
    assert ids.size == 500
    assert ids.ranges(array([1, 2, 30, 40])) == [(0, 2), (3, 5)]
    assert ids.children(1, 2) == [3]
    assert ids.ranges(array([1, 2, 3, 4])) == [(0, 2), (5, 7)]  # 4's parent was forgotten, and 4 with it
    assert sorted(ids.children(1, 2)) == [3, 5]


def test_ghosts_forget_the_oldest_first() -> None:
    """A ghost keeps its newest entries, whatever was taken out of it before."""
    ghost = Ghost(100)
    ghost.add(0, 10)
    ghost.add(20, 25)
    assert ghost.take(30, 40) is None
    taken = ghost.take(7, 12)
    assert taken is not None
    assert taken.tolist() == [True] * 3 + [False] * 2
    assert ghost.count == 12
    ghost.trim(7)  # 6 … 2 go, the high end being the oldest
    assert ghost.count == 7
    wanted = np.zeros(100, dtype=np.bool_)
    ghost.mark(wanted)
    assert np.flatnonzero(wanted).tolist() == [0, 1, 20, 21, 22, 23, 24]
    new = np.cumsum(wanted) - 1
    ghost.renumber(wanted, new, 50)
    ghost.trim(3)
    kept = np.zeros(50, dtype=np.bool_)
    ghost.mark(kept)
    assert np.flatnonzero(kept).tolist() == [2, 3, 4]


def test_beginning_and_behind_divide_ranges() -> None:
    """The first n blocks and the others are the whole, for every n."""
    ranges = [(0, 4), (10, 11), (20, 25)]
    for count in range(12):
        first, rest = ids_of(beginning(ranges, count)), ids_of(behind(ranges, count))
        assert first + rest == ids_of(ranges)
        assert len(first) == min(count, 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_balance(policy: str) -> None:
    """After every request: sizes are the spans', which do not overlap and are found by their low id."""
    shadow = PoolShadow([policy], 300, BLOCK)
    lane, rng, running = shadow.lanes[0], Random(1), []
    used = []
    for number, (prompt, full) in enumerate(Traffic(1, blocks_max=20).prompts(1500)):
        if len(running) > 5:
            ended, known, hashes = running.pop(rng.randrange(6))
            until = len(hashes) if rng.random() < 0.95 else rng.randrange(len(hashes))
            shadow.freed(ended, hashes[known:until], until, until + rng.randrange(2))
        shadow.admitted(number, prompt, len(prompt) * BLOCK + 3, counted=rng.random() < 0.95)
        running.append((number, len(prompt), full))
        used.append(shadow.ids.used)
        if number % 10:
            continue
        queue = lane.queue
        spans = list(queue.spans())
        blocks = queue.blocks().tolist()
        assert len(set(blocks)) == len(blocks) == len(queue) == sum(high - low for low, high, _ in spans)
        assert len(queue) + shadow.in_use <= 300
        assert {span[0]: span for span in spans} == queue._at
        for part in range(3):
            assert queue._sizes[part] == sum(high - low for low, high, kind in spans if kind == part)
        assert not queue.state[[block for span in spans if span[2] == FRONT for block in range(*span[:2])]].any()
        assert not shadow._pins.counts[blocks].any()
    assert max(used) <= shadow.ids.size
    assert sorted(used) != used  # it was renumbered meanwhile
    for number, known, hashes in running:
        shadow.freed(number, hashes[known:], len(hashes), len(hashes))
    assert shadow.in_use == 0
    assert not shadow._pins.counts.any()


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "s3fifo-25"])
def test_spans_evict_what_the_keyed_queue_evicts(policy: str) -> None:
    """On chains without branches the queue of ranges holds after each step what policy.py's holds, but for 3 %."""
    rng, ids = Random(2), ChainIds(400_000)
    spans, keyed = new_spans(policy, ids, 200), new_queue(policy, 200)
    chains = [[rng.getrandbits(64) for _ in range(rng.randint(1, 30))] for _ in range(40)]
    for _ in range(1500):
        chain = chains[int(rng.random() ** 2 * 40)] if rng.random() < 0.6 else [rng.getrandbits(64) for _ in range(12)]
        ranges = ids.ranges(array(chain))
        found = keyed.prefix(chain)
        assert abs(spans.take(ranges) - found) <= (0 if policy == "lru" else 6)
        keyed.take(chain[:found])
        spans.hit(beginning(ranges, found))
        keyed.discard_all(chain)
        spans.discard(ranges)
        excess = len(keyed) + len(chain) - 200
        if excess > 0:
            keyed.evict_many(excess)
            spans.evict(excess)
        keyed.append_chain(chain)
        spans.append(ranges)
        apart = set(ids.names[spans.blocks()].tolist()) ^ set(keyed)
        assert len(apart) <= (0 if policy == "lru" else 12)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
@pytest.mark.parametrize("chains", [7, 17])
def test_nothing_grows_with_the_number_of_requests(policy: str, chains: int) -> None:
    """The same prompts for ever, all of them in the pool or half of them in a ghost: places are not piled up."""
    shadow = PoolShadow([policy], 100, BLOCK)
    rng = Random(0)
    for request in range(4000):
        prompt = [100 * rng.randrange(chains) + at for at in range(1, 10)]
        shadow.admitted(request, prompt, len(prompt) * BLOCK + 1)
        shadow.freed(request, [], len(prompt), len(prompt) + 1)
    queue = shadow.lanes[0].queue
    places = [len(part) for part in queue._parts]
    places += [len(getattr(queue, name)._order) for name in type(queue).__slots__ if name.endswith("_ghost")]
    assert max(places) < 300
