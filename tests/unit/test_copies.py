"""Copies take room, are hit by nobody while an older block lives, and keep a content alive when that one goes."""

from random import Random
from typing import Any

import numpy as np
import pytest

from engine_patch import shadow as shadow_code
from engine_patch.copies import Copies
from engine_patch.estimator import Estimator
from engine_patch.lane import Lane
from engine_patch.policy import POLICIES
from engine_patch.shadow import PoolShadow
from tests.unit.pool_model import BLOCK

SEGMENTED = ["s3fifo", "arc"]


def serve(shadow: PoolShadow, hashes: list[int], answer: list[int] | None = None, rest: int = 0) -> int:
    """Serve a request alone, block-aligned unless there is a `rest` of tokens; return what the first lane hit."""
    before = shadow.lanes[0].hit_blocks
    shadow.admitted("r", hashes, len(hashes) * BLOCK + rest)
    full = len(hashes) + len(answer or [])
    shadow.freed("r", answer or [], full, full + (rest > 0))
    return shadow.lanes[0].hit_blocks - before


def test_the_copies_of_a_content_succeed_in_order() -> None:
    """The eldest comes first; a content without copies is a content like any other."""
    copies = Copies(100)
    for copy in (50, 51, 52):
        copies.add(7, copy)
    assert copies.within([(0, 10), (51, 53)]) == [7, 51, 52]
    assert copies.in_use(7) == 3
    copies.freed(50)
    assert (list(copies.younger(7)), copies.in_use(7)) == ([50, 51, 52], 2)
    copies.drop(50, True)
    copies.drop(52, False)
    assert (list(copies.younger(7)), copies.in_use(7)) == ([51], 1)
    copies.drop(51, False)
    assert copies.within([(0, 100)]) == []
    assert list(copies.younger(7)) == []


def test_each_time_a_block_aligned_prompt_comes_again_lru_has_a_block_less() -> None:
    """vLLM's LRU puts the copy at the tail: five of them push five others out."""
    shadow = PoolShadow(["lru"], 12, BLOCK)
    serve(shadow, [1, 2, 3, 4, 5, 6])
    for _ in range(5):
        assert serve(shadow, [11, 12]) <= 1
    assert len(shadow.lanes[0].queue) == 12
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, 2, 3, 4, 5, 6, 11, 12]  # and four copies of 12
    assert serve(shadow, [11, 12]) == 1
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, 2, 3, 4, 5, 11, 12]


def test_the_oldest_is_hit_and_a_copy_takes_its_place() -> None:
    """A copy cannot be hit before the older block is evicted; then it is, where it stands."""
    shadow = PoolShadow(["lru"], 8, BLOCK)
    serve(shadow, [1, 2, 3])
    serve(shadow, [1, 2, 3])  # 3 and its copy; 3 is the older
    serve(shadow, [21, 22, 23, 24, 25])  # takes the four that never had a content, and 3
    assert shadow.contents(shadow.lanes[0]) == [3, 2, 1, 25, 24, 23, 22, 21]
    assert serve(shadow, [1, 2, 3], rest=1) == 3


@pytest.mark.parametrize("policy", SEGMENTED)
def test_a_copy_goes_to_the_front(policy: str) -> None:
    """Freed while the older one lives it is evicted before all that can be hit, and leaves no ghost."""
    shadow = PoolShadow([policy], 8, BLOCK)
    serve(shadow, [1, 2, 3])
    serve(shadow, [1, 2, 3])
    queue = shadow.lanes[0].queue
    assert shadow.ids.names[queue.blocks()].tolist().index(3) > 0  # the copy is ahead of it
    serve(shadow, [21, 22, 23, 24, 25])
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, 2, 3, 21, 22, 23, 24, 25]
    assert not queue.copies.contents


def test_an_answer_given_before_is_written_into_copies() -> None:
    """The answer's blocks are computed anew, whatever is there."""
    shadow = PoolShadow(["lru"], 10, BLOCK)
    serve(shadow, [1, 2], [3, 4], rest=5)
    assert serve(shadow, [1, 2], [3, 4], rest=5) == 2
    assert len(shadow.lanes[0].queue) == 6
    assert serve(shadow, [1, 2, 3, 4], rest=5) == 4


def test_what_is_not_computed_yet_is_hit_by_nobody() -> None:
    """Where the engine finds less of what another request holds than it holds, every policy finds as little."""
    shadow = PoolShadow(["lru", "arc"], 30, BLOCK)
    shadow.admitted("a", [1, 2, 3, 4], 70, hit_tokens=0)
    shadow.admitted("b", [1, 2, 3, 4], 70, hit_tokens=2 * BLOCK)
    assert [lane.hit_blocks for lane in shadow.lanes] == [2, 2]
    shadow.freed("a", [], 4, 5)
    shadow.freed("b", [], 4, 5)
    assert [len(lane.queue) for lane in shadow.lanes] == [6, 6]
    assert shadow.in_use == 0


def test_one_that_reads_no_cache_computes_all() -> None:
    """A look-up that is not counted and found nothing left every block where it was."""
    shadow = PoolShadow(["lru"], 30, BLOCK)
    serve(shadow, [1, 2, 3], rest=1)
    shadow.admitted("logprobs", [1, 2, 3], 3 * BLOCK + 1, False, 0)
    assert len(shadow.lanes[0].queue) == 3
    shadow.freed("logprobs", [], 3, 4)
    assert len(shadow.lanes[0].queue) == 6


def test_the_engine_says_how_much_is_in_use() -> None:
    """More than requests told of evicts; less, where a prompt takes its blocks in chunks, does not yet."""
    shadow = PoolShadow(["lru"], 20, BLOCK)
    serve(shadow, list(range(1, 11)), rest=1)
    shadow.admitted("a", [21, 22], 33, hit_tokens=0, free_blocks=6)  # 11 blocks are answers being written
    assert len(shadow.lanes[0].queue) == 6
    shadow = PoolShadow(["lru"], 20, BLOCK)
    serve(shadow, list(range(1, 15)))
    shadow.admitted("b", list(range(41, 59)), 18 * BLOCK + 1, hit_tokens=0, free_blocks=15)  # it holds 5 of 19 blocks
    assert len(shadow.lanes[0].queue) == 14
    shadow.freed("b", [], 18, 19, free_blocks=1)
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, *range(41, 59)]


def test_what_was_written_meanwhile_is_gone_before_the_look_up() -> None:
    """The engine's free blocks tell at an admission that answers had grown over blocks which it would have hit."""
    shadow = PoolShadow(["lru"], 12, BLOCK)
    serve(shadow, [1, 2, 3, 4, 5, 6])
    serve(shadow, [11, 12, 13])
    shadow.admitted("writes", [21], BLOCK + 1, hit_tokens=0, free_blocks=10)
    # It has written four blocks since, over 6, 5 and 4.
    shadow.admitted("asks", [1, 2, 3, 4], 4 * BLOCK + 1, hit_tokens=3 * BLOCK, free_blocks=1)
    assert shadow.lanes[0].hit_blocks == 3


def test_who_was_never_admitted_holds_what_is_there() -> None:
    """Blocks of a request that is only heard of at its end are those that are known, and no copies."""
    shadow = PoolShadow(["lru"], 10, BLOCK)
    serve(shadow, [1, 2, 3])
    shadow.freed("stranger", [1, 2, 3, 4], 4, 4)
    assert sorted(shadow.contents(shadow.lanes[0])) == [1, 2, 3, 4]
    assert len(shadow.lanes[0].queue) == 4


def test_the_estimator_hands_on_what_the_engine_says() -> None:
    """Hit tokens and free blocks of both events reach the shadow."""
    estimator = Estimator("default", ("lru",), 20, BLOCK)
    shadow = estimator._warm.shadow  # type: ignore[union-attr]
    estimator.admitted(1.0, "a", [1, 2, 3], 3 * BLOCK + 1, 0, free_blocks=9)
    estimator.admitted(1.1, "b", [1, 2, 3], 3 * BLOCK + 1, BLOCK, free_blocks=5)
    assert (shadow.lanes[0].hit_blocks, shadow._untold) == (1, 10)
    estimator.freed(1.2, "a", [1, 2, 3], 4, free_blocks=4)
    assert shadow._untold == 11
    estimator.freed_tail(1.3, "b", np.empty(0, dtype=np.uint64), 3, 4, free_blocks=8)
    assert shadow._untold == 8


def books(shadow: PoolShadow, lane: Lane) -> None:
    """Fail where a lane's books do not balance."""
    queue, pins = lane.queue, shadow._pins.counts
    blocks = queue.blocks().tolist()
    free, copies = set(blocks), queue.copies
    assert len(free) == len(blocks) == len(queue)
    assert {span[0]: span for span in queue.spans()} == queue._at
    assert {at for at, odd in enumerate(copies._odd) if odd} == {*copies.contents, *copies.contents.values()}
    for content in set(copies.contents.values()):
        held = [copy for copy in copies.younger(content) if copy not in free]
        assert copies.in_use(content) == len(held) <= pins[content]
        assert (content in free) == (pins[content] == len(held))
    assert all(block in copies.contents.values() for block in blocks if pins[block])


def traffic(rng: Random, shadow: PoolShadow, number: int, past: list[list[int]], running: list[Any]) -> None:
    """Admit a request and end others, as a confused engine might tell it."""
    base = past[-1 - min(len(past) - 1, int(rng.expovariate(0.15)))] if past and rng.random() < 0.7 else []
    prompt = (base + [rng.getrandbits(63) for _ in range(rng.choice((0, 0, 1, 5)))])[:40] or [rng.getrandbits(63)]
    full = prompt + [rng.getrandbits(63) for _ in range(rng.randint(0, 4))]
    past.append(rng.choice((prompt, full)))
    name = running.pop()[0] if running and rng.random() < 0.02 else number  # admitted again, unfreed
    hit_tokens = rng.choice((None, 0, BLOCK * rng.randint(0, len(prompt))))
    free = rng.choice((None, rng.randint(0, shadow.num_blocks)))
    tokens = len(prompt) * BLOCK + rng.choice((0, rng.randint(1, BLOCK - 1)))
    shadow.admitted(name, prompt, tokens, rng.random() < 0.93, hit_tokens, free)
    running.append((name, full))
    while len(running) > rng.choice((1, 4, 9)):
        ended, full = running.pop(rng.randrange(len(running)))
        until = len(full) if rng.random() < 0.9 else rng.randrange(len(full) + 1)
        shadow.freed(ended, full[shadow.hashes_known(ended) : until], until, until + rng.randint(0, 2), free)
    if rng.random() < 0.02:
        shadow.freed("stranger", full, len(full), len(full) + 1)


@pytest.mark.parametrize("seed", range(12))
def test_the_books_balance_whatever_is_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through switches, resets, lost events, aborts and renumberings: one block of each content is the oldest."""
    monkeypatch.setattr(shadow_code, "IDS_MIN", 600)
    monkeypatch.setattr(shadow_code, "IDS_PER_BLOCK", 3)
    rng = Random(seed)
    shadow = PoolShadow(
        rng.sample(POLICIES, 3), rng.choice((40, 63, 150, 400)), BLOCK, rng.choice((1, 1, 0.5)), rng.randrange(2)
    )
    past: list[list[int]] = []
    running: list[Any] = []
    for number in range(500):
        traffic(rng, shadow, number, past, running)
        event = rng.random()
        if event < 0.004:
            shadow.lost()
        elif event < 0.006:
            shadow.reset()
        elif event < 0.03:
            shadow.lanes.append(shadow.mirror(rng.choice(shadow.lanes), rng.choice(POLICIES)))
            shadow.lanes.pop(rng.randrange(len(shadow.lanes)))
        for lane in shadow.lanes:
            books(shadow, lane)
