"""What every eviction policy does, and each by the rules that its file states."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patch.arc import ArcQueue
from engine_patch.chains import UNHASHED
from engine_patch.policy import POLICIES, S3FIFO, converted, new_queue
from engine_patch.s3fifo import S3FifoQueue
from tests.unit.queue_models import BLOCKS, ModelArc, ModelQueue, ModelS3Fifo, Pool, ancestors, operations, parent_of

CHAINED = [policy for policy in POLICIES if policy != "lru"]


def model(policy: str, elsewhere: Any) -> ModelQueue:
    if policy == "arc":
        return ModelArc(BLOCKS, range(BLOCKS), elsewhere)
    found = ModelS3Fifo(BLOCKS, range(BLOCKS), elsewhere)
    found.percent, found.threshold = S3FIFO[policy]
    return found


@pytest.mark.parametrize("policy", CHAINED)
@given(steps=operations)
def test_does_what_its_rules_say(policy: str, steps: list[tuple[str, int, str]]) -> None:
    """After every operation: the model's blocks, order and ghosts; bounds of the ghosts; only orphans at the front."""
    pool = Pool()
    queue: Any = new_queue(policy, BLOCKS, range(BLOCKS), pool.elsewhere)
    naive: Any = model(policy, pool.elsewhere)
    copies: set[int] = set()
    for what, block, content in steps:
        free = block in queue
        if what == "evict" and len(queue):
            evicted = queue.evict()
            assert evicted == naive.evict()
            pool.lose(evicted)
        elif what in ("append", "copy") and not free:
            held = pool.content.setdefault(block, content)
            name = "append" if what == "append" or not pool.elsewhere(block, held) else "append_copy"
            (copies.add if name == "append_copy" else copies.discard)(block)
            getattr(queue, name)(block, held, parent_of(held))
            getattr(naive, name)(block, held)
        elif what == "prepend" and not free:
            pool.lose(block)
            queue.prepend(block)
            naive.prepend(block)
        elif what == "remove" and free and block in pool.content:
            queue.remove(block)
            naive.remove(block)
        elif what == "hit" and block in pool.content:
            queue.hit(block)
            naive.hit(block)
        elif what == "forget":
            queue.forget(block)
            naive.forget(block)
            pool.lose(block)
        elif what == "reset":
            queue.reset()
            naive.reset()
            pool.content.clear()
        assert list(queue) == naive.order()
        assert len(queue) == len(naive.order())
        if policy == "arc":
            assert [list(ghost) for ghost in queue.ghosts()] == [naive.b1, naive.b2]
            assert queue.target == naive.p
            assert len(naive.small) + len(naive.b1) <= BLOCKS
            assert len(naive.small + naive.main + naive.b1 + naive.b2) <= 2 * BLOCKS
        else:
            assert list(queue.ghosts()) == naive.ghost
            assert len(naive.ghost) <= BLOCKS
            assert not set(naive.ghost) & {pool.content[b] for b in queue if b in pool.content}
        hashed_front = set(naive.front) - naive.unhashed - copies
        assert all(set(ancestors(pool.content[orphan])) & pool.gone for orphan in hashed_front)


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10_000))
def test_every_free_block_is_evicted_exactly_once(policy: str, seed: int) -> None:
    """Whatever came before, all that is free can be evicted, each block once, and then nothing is left."""
    rng = Random(seed)
    queue = new_queue(policy, 40, range(40))
    held: list[list[int]] = []
    for _ in range(60):
        if len(queue) >= 8 and rng.random() < 0.6:
            held.append(queue.evict_many(rng.randint(1, 8)))
        elif held:
            blocks = held.pop(rng.randrange(len(held)))
            queue.append_chain(blocks, [(rng.randrange(50), at) for at in range(len(blocks))])
        for block in rng.sample(range(40), 4):
            queue.hit(block)
            if block in queue and rng.random() < 0.5:
                queue.remove(block)
                held.append([block])
    used = [block for blocks in held for block in blocks]
    expected = sorted(set(range(40)) - set(used))
    assert sorted(queue) == expected
    assert sorted(queue.evict_many(len(queue))) == expected
    with pytest.raises(KeyError):
        queue.evict()
    assert list(queue) == []


@pytest.mark.parametrize("policy", CHAINED)
@given(seed=st.integers(0, 10_000))
def test_nothing_is_kept_of_blocks_that_are_gone(policy: str, seed: int) -> None:
    """When the last block is evicted, no count, content or link is left: memory follows the pool, not the traffic."""
    rng = Random(seed)
    queue: Any = new_queue(policy, 30, range(30))
    for _ in range(40):
        path = [str(rng.randrange(3)) for _ in range(rng.randint(1, 6))]
        contents = ["/".join(path[:end]) for end in range(1, len(path) + 1)]
        blocks = queue.evict_many(len(path))
        if rng.random() < 0.3:
            queue.hit(blocks[0])
        queue.append_chain(blocks, contents)
        if rng.random() < 0.3:
            used = sorted(queue)[: rng.randint(1, 3)]
            held = {block: (content, parent) for block, content, parent in queue.entries()}
            queue.take([block for block in used if held[block][1] is not UNHASHED])
            for block in used:
                if block not in queue:
                    queue.append(block, *held[block])
    assert len(queue.evict_many(30)) == 30
    assert (queue._kids, queue._contents, queue._state) == ({}, {}, {})


requests = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=40)


@pytest.mark.parametrize("policy", POLICIES)
@given(traffic=requests, capacity=st.integers(6, 12))
def test_a_batch_is_the_loop_over_single_calls(policy: str, traffic: list[tuple[int, ...]], capacity: int) -> None:
    """Batches of hits, evictions and appended chains leave the queue as one call a block does."""
    batch: Any = new_queue(policy, capacity)
    single: Any = new_queue(policy, capacity)
    for path in traffic:
        blocks = [path[:end] for end in range(1, len(path) + 1)]
        known = batch.prefix(blocks)
        assert known == next((at for at, block in enumerate(blocks) if block not in single), len(blocks))
        assert batch.take(blocks[:known]) == known
        for block in blocks[:known]:
            single.hit(block)
            single.remove(block)
        batch.discard_all(blocks[known:])
        for block in blocks[known:]:
            if block in single:
                single.remove(block)
        wanted = max(0, len(batch) + len(blocks) - capacity)
        assert batch.evict_many(wanted) == [single.evict() for _ in range(wanted)]
        batch.append_chain(blocks)
        for at in range(len(blocks) - 1, -1, -1):
            single.append(blocks[at], None, blocks[at - 1] if at else None)
        assert list(batch) == list(single)
        if policy == "arc":
            assert batch.target == single.target
            assert [list(ghost) for ghost in batch.ghosts()] == [list(ghost) for ghost in single.ghosts()]
        elif policy != "lru":
            assert list(batch.ghosts()) == list(single.ghosts())


@pytest.mark.parametrize("policy", POLICIES)
def test_evicts_all_that_is_asked_or_nothing(policy: str) -> None:
    """When fewer blocks are free than asked for, nothing is evicted."""
    queue = new_queue(policy, 4, range(3))
    with pytest.raises(KeyError, match="4 blocks are asked for, 3 are free"):
        queue.evict_many(4)
    assert list(queue) == [0, 1, 2]
    assert queue.evict_many(0) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_refuses_a_block_that_is_free_already(policy: str) -> None:
    """Freeing a block twice is a fault of the caller, and so is hitting one that is in use."""
    queue = new_queue(policy, 4, [1])
    for free in (queue.append, queue.append_copy, queue.prepend):
        with pytest.raises(AssertionError, match="free already"):
            free(1)
    with pytest.raises(KeyError):
        queue.remove(2)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_reset_keeps_the_blocks_and_their_order(policy: str) -> None:
    """After a reset the blocks go in the order in which they would have gone, and nothing is remembered of contents."""
    queue = new_queue(policy, 6, range(6))
    queue.append_chain(queue.evict_many(4), ["a", "ab", "abc", "abcd"])
    queue.take([0, 1])
    queue.append_chain([0, 1], ["a", "ab"])
    before = list(queue)
    queue.reset()
    assert list(queue) == before
    assert all(parent is UNHASHED for _, _, parent in queue.entries())
    assert queue.evict_many(6) == before


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("other", POLICIES)
def test_a_switch_keeps_every_block_and_its_order(policy: str, other: str) -> None:
    """A queue of another policy holds the same blocks, those without a hash first, and leaves its source as it was."""
    queue = new_queue(policy, 8, range(8))
    queue.append_chain(queue.evict_many(5), ["a", "ab", "abc", "abcd", "abcde"])
    queue.take([0, 1])
    queue.append_chain([0, 1], ["a", "ab"])
    queue.prepend(queue.evict())
    before = list(queue)
    switched = converted(queue, other, 8)
    assert list(switched) == before == list(queue)
    assert switched.evict_many(3) == before[:3]
    assert list(queue) == before


def test_a_switch_between_kinds_of_s3fifo_keeps_hits_and_parts() -> None:
    """What small and main held they hold, a block in use stays of main, and hits that were counted count."""
    queue = new_queue("s3fifo", 8)
    queue.append_chain(["a", "b", "c", "d"])
    queue.take(["a", "b"])
    queue.append_chain(["a", "b"])
    queue.take(["a"])
    queue.hit("c")
    switched = converted(queue, "s3fifo-t2", 8)
    assert list(switched) == ["d", "c", "b"]
    switched.append("a")
    switched.hit("c")
    # d has no hit; c has the two that main asks for, b and a are of main and follow in its order.
    assert switched.evict_many(4) == ["d", "b", "c", "a"]


def test_a_switch_from_lru_puts_what_lost_its_hash_first() -> None:
    """LRU keeps a block that lost its hash in its place; the policy that follows takes it first."""
    queue = new_queue("lru", 4)
    for block in "abc":
        queue.append(block)
    queue.forget("b")
    assert list(queue) == ["a", "b", "c"]
    assert list(converted(queue, "lru", 4)) == ["a", "b", "c"]
    assert converted(queue, "s3fifo", 4).evict_many(3) == ["b", "a", "c"]


def test_a_switch_between_s3fifo_and_arc_keeps_the_parts() -> None:
    """Small is T1 and main is T2, also for blocks in use; p starts at 0."""
    queue = new_queue("arc", 4)
    queue.append_chain(["a", "b"])
    queue.take(["a"])
    queue.append("a")
    queue.take(["a"])
    switched = converted(queue, "s3fifo", 4)
    switched.append("a")
    assert switched.evict_many(2) == ["b", "a"]
    back: Any = converted(queue, "arc", 4)
    assert back.target == 0


def test_a_switch_between_s3fifo_and_arc_drops_hits() -> None:
    """A block in use that was hit but is not of main comes back as one that was not."""
    queue = new_queue("s3fifo-t2", 4)
    queue.hit("x")
    switched = converted(queue, "arc", 4)
    switched.hit("m")
    switched.append("m")
    switched.append("x")
    assert list(switched) == ["x", "m"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    """The message names what there is."""
    with pytest.raises(ValueError, match="'fifo'; there are lru, s3fifo, s3fifo-25, s3fifo-t2, s3fifo-paper-free, arc"):
        new_queue("fifo", 4)
    with pytest.raises(ValueError, match="1 block or more"):
        new_queue("lru", 0)


def test_classes_are_what_the_names_say() -> None:
    """All names but lru and arc are S3-FIFO with other numbers."""
    for policy in POLICIES:
        assert isinstance(new_queue(policy, 4), S3FifoQueue) == (policy in S3FIFO)
    assert isinstance(new_queue("arc", 4), ArcQueue)
