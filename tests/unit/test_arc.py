"""ARC, rule by rule."""

from engine_patch.arc import ArcQueue


def queue_of(size: int, blocks: str = "") -> ArcQueue[str]:
    queue: ArcQueue[str] = ArcQueue(size)
    for block in blocks:
        queue.append(block)
    return queue


def reuse(queue: ArcQueue[str], block: str) -> None:
    queue.hit(block)
    queue.remove(block)
    queue.append(block)


def ghosts(queue: ArcQueue[str]) -> list[str]:
    return ["".join(ghost) for ghost in queue.ghosts()]  # type: ignore[arg-type]


def test_at_first_what_was_never_hit_goes() -> None:
    """p starts at 0: T1 gives the victim while it has one, oldest first, then T2."""
    queue = queue_of(8, "abc")
    reuse(queue, "a")
    queue.append("d")
    assert queue.evict_many(4) == ["b", "c", "d", "a"]
    assert ghosts(queue) == ["bcd", "a"]


def test_a_ghost_of_t1_makes_t1_larger() -> None:
    """A content that T1 dropped and that is needed again moves p up, and goes to T2."""
    queue = queue_of(4, "abcd")
    queue.evict_many(2)
    queue.append("a")
    assert queue.target == 1
    assert ghosts(queue) == ["b", ""]
    queue.append("e")
    # T1 holds c, d, e: more than its one block; then d; then e is what p lets it keep, and T2 gives a.
    assert queue.evict_many(3) == ["c", "d", "a"]


def test_a_ghost_of_t2_makes_t1_smaller() -> None:
    """A content that T2 dropped and that is needed again moves p down, by the ratio of the ghosts, never below 0."""
    queue = queue_of(4, "abcd")
    queue.evict_many(2)
    queue.append("a")
    queue.append("b")
    assert queue.target == 2
    assert queue.evict() == "a"
    queue.append("a")
    assert queue.target == 1
    assert ghosts(queue) == ["", ""]


def test_p_moves_by_the_ratio_of_the_ghosts() -> None:
    """One content in B1 against three in B2 moves p by 3."""
    queue = queue_of(8)
    for block in "abc":
        queue.hit(block)
        queue.append(block)
    queue.append("z")
    assert queue.evict_many(4) == ["z", "a", "b", "c"]
    queue.append("z")
    assert queue.target == 3


def test_the_ghosts_are_bounded_by_the_pool() -> None:
    """T1 with its ghost never exceeds the pool, both with both never twice the pool."""
    queue: ArcQueue[int] = ArcQueue(5)
    for block in range(200):
        if len(queue) == 5:
            queue.evict()
        if block % 3 == 0:
            queue.hit(block)
        queue.append(block)
        once, often = (len(list(ghost)) for ghost in queue.ghosts())
        assert once <= 5
        assert once + often + len(queue) <= 10


def test_a_copy_that_goes_leaves_no_ghost_while_another_block_holds_the_content() -> None:
    """Only when the last block with a content is evicted is the content remembered."""
    held = {1: "x", 2: "x"}

    def elsewhere(block: int, content: object) -> bool:
        return any(other != block and value == content for other, value in held.items())

    queue: ArcQueue[int] = ArcQueue(4, (), elsewhere)
    queue.append(1, "x")
    queue.append(2, "x")
    assert queue.evict() == 1
    assert [list(ghost) for ghost in queue.ghosts()] == [[], []]
    del held[1]
    queue.evict()
    assert [list(ghost) for ghost in queue.ghosts()] == [["x"], []]


def test_what_hangs_on_an_evicted_block_goes_next() -> None:
    """Descendants of a block that is gone are evicted first and not remembered, also those of T2."""
    queue: ArcQueue[str] = ArcQueue(8)
    queue.hit("ab")
    for block in ("ab", "a", "z"):
        queue.append(block, None, block[:-1] or None)
    assert queue.evict() == "a"
    assert queue.evict_many(2) == ["ab", "z"]
    assert [list(ghost) for ghost in queue.ghosts()] == [["a", "z"], []]
