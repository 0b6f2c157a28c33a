"""S3-FIFO, rule by rule."""

from engine_patch.policy import new_queue
from engine_patch.s3fifo import S3FifoQueue


def queue_of(size: int, blocks: str = "", percent: int = 10, threshold: int = 1) -> S3FifoQueue[str]:
    queue: S3FifoQueue[str] = S3FifoQueue(size, small_percent=percent, threshold=threshold)
    for block in blocks:
        queue.append(block)
    return queue


def reuse(queue: S3FifoQueue[str], block: str) -> None:
    queue.hit(block)
    queue.remove(block)
    queue.append(block)


def test_what_is_hit_once_outlives_what_is_not() -> None:
    """A block that was hit goes to main; those that pass through small go before it, however late they came."""
    queue = queue_of(8, "abc")
    reuse(queue, "a")
    for block in "de":
        queue.append(block)
    assert queue.evict_many(4) == ["b", "c", "d", "e"]


def test_a_hit_on_a_block_in_use_counts() -> None:
    """A block that was shared while it was in use is freed into main."""
    queue = queue_of(8, "bc")
    queue.hit("a")
    queue.append("a")
    assert list(queue) == ["b", "c", "a"]
    assert queue.evict_many(2) == ["b", "c"]


def test_main_gives_a_second_chance_for_each_hit() -> None:
    """A block of main that was hit n times since it came there passes the head n times, at most 3."""
    queue = queue_of(8, "abcd")
    for block in "abcd":
        reuse(queue, block)
    for _ in range(5):
        queue.hit("a")
    queue.hit("b")
    assert queue.evict() == "c"
    assert queue.evict() == "d"
    assert queue.evict() == "b"
    assert queue.evict() == "a"


def test_an_eviction_from_main_costs_the_others_nothing() -> None:
    """Who was not passed over keeps what it had: a hit after that is worth one more pass."""
    queue = queue_of(8, "ab")
    for block in "ab":
        reuse(queue, block)
    assert queue.evict() == "a"
    reuse(queue, "b")
    queue.hit("c")
    queue.append("c")
    assert queue.evict_many(2) == ["c", "b"]


def test_a_ghost_comes_back_to_main() -> None:
    """What small dropped and is needed again was dropped too early."""
    queue = queue_of(4, "abcd")
    assert queue.evict() == "a"
    assert list(queue.ghosts()) == ["a"]
    queue.append("a")
    assert list(queue.ghosts()) == []
    assert queue.evict_many(4) == ["b", "c", "d", "a"]


def test_main_leaves_no_ghost_and_small_no_more_than_the_pool_has_blocks() -> None:
    """The ghost keeps the youngest `num_blocks` contents that small dropped."""
    queue = queue_of(2, "ab")
    reuse(queue, "a")
    assert queue.evict_many(2) == ["b", "a"]
    assert list(queue.ghosts()) == ["b"]
    for block in "cd":
        queue.append(block)
        queue.evict()
    assert list(queue.ghosts()) == ["c", "d"]


def test_small_gives_the_victim_while_it_has_its_share() -> None:
    """For a tenth, 1 block of 10 is enough and 1 of 11 is not; a quarter needs 3 of 12; 0 always takes small."""
    for percent, main, small, victim in (
        (10, 9, 1, "small"),
        (10, 10, 1, "main"),
        (25, 9, 3, "small"),
        (25, 9, 2, "main"),
        (0, 90, 1, "small"),
        (0, 3, 0, "main"),
    ):
        queue: S3FifoQueue[tuple[str, int]] = S3FifoQueue(100, small_percent=percent)
        for at in range(main):
            queue.hit(("main", at))
            queue.append(("main", at))
        for at in range(small):
            queue.append(("small", at))
        assert queue.evict() == (victim, 0)


def test_threshold_two_asks_for_two_hits() -> None:
    """With threshold 2 a block that was hit once goes back to small, its hit remembered."""
    queue = queue_of(8, "ab", threshold=2)
    reuse(queue, "a")
    assert list(queue) == ["b", "a"]
    reuse(queue, "a")
    queue.append("c")
    assert queue.evict_many(3) == ["b", "c", "a"]


def test_a_copy_that_goes_leaves_no_ghost_while_another_block_holds_the_content() -> None:
    """Only when the last block with a content is evicted is the content remembered."""
    held = {1: "x", 2: "x"}

    def elsewhere(block: int, content: object) -> bool:
        return any(other != block and value == content for other, value in held.items())

    queue: S3FifoQueue[int] = S3FifoQueue(4, (), elsewhere)
    queue.append(1, "x")
    queue.append(2, "x")
    assert queue.evict() == 1
    del held[1]
    assert list(queue.ghosts()) == []
    queue.evict()
    assert list(queue.ghosts()) == ["x"]


def test_what_hangs_on_an_evicted_block_goes_next() -> None:
    """Descendants of a block that is gone cannot be reached: evicted first, parents before children, not remembered."""
    queue: S3FifoQueue[str] = S3FifoQueue(8)
    for block in ("abc", "abx", "ab", "a"):
        if block != "a":
            queue.hit(block)  # of main, so that their parent in small goes first
        queue.append(block, None, block[:-1] or None)
    queue.append("z")
    assert queue.evict() == "a"
    assert list(queue) == ["ab", "abc", "abx", "z"]
    assert queue.evict_many(3) == ["ab", "abc", "abx"]
    assert list(queue.ghosts()) == ["a"]


def test_a_child_in_use_is_no_orphan() -> None:
    """Who uses a block uses its parents, so a child that comes back later is a block like any other."""
    queue: S3FifoQueue[str] = S3FifoQueue(8)
    queue.append("ab", None, "a")
    queue.append("a")
    queue.remove("ab")
    assert queue.evict() == "a"
    queue.append("ab", None, "a")
    queue.append("z")
    assert list(queue) == ["ab", "z"]


def test_an_orphan_that_is_hit_starts_anew() -> None:
    """When its parent is computed anew an orphan can be hit; it then has that one hit."""
    queue: S3FifoQueue[str] = S3FifoQueue(8)
    queue.append("ab", None, "a")
    queue.hit("ab")
    queue.remove("ab")
    queue.append("ab", None, "a")
    queue.append("a")
    assert queue.evict() == "a"
    queue.hit("ab")
    queue.remove("ab")
    queue.append("ab", None, "a")
    queue.append("b")
    assert queue.evict_many(2) == ["b", "ab"]


def test_a_block_that_lost_its_hash_goes_first_and_is_not_remembered() -> None:
    """A forgotten block is evicted before all others, and what hangs on it after it."""
    queue = new_queue("s3fifo", 8)
    for block in ("z", "ab", "a"):
        queue.append(block, None, block[:-1] or None)
    queue.forget("a")
    assert list(queue) == ["a", "ab", "z"]
    assert isinstance(queue, S3FifoQueue)
    assert queue.evict_many(2) == ["a", "ab"]
    assert list(queue.ghosts()) == []
