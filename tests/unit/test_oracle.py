"""The rules by which libcachesim's policies are followed; the comparison itself is in tests/claims/test_oracle.py."""

import pytest

from engine_patch.oracle import hits


def test_lru_keeps_what_was_used_last() -> None:
    """A hit makes an id the youngest."""
    assert list(hits("lru", [1, 2, 1, 3, 1, 2], 2)) == [0, 0, 1, 0, 1, 0]


def test_s3fifo_fills_main_before_it_ever_evicts() -> None:
    """With small full and nothing evicted yet new ids go to main, so a first round over the capacity is kept whole."""
    ids = list(range(20))
    assert list(hits("s3fifo", ids + ids, 20)) == [0] * 20 + [1] * 20
    # Ids 0 and 1 are in small: 20 and 21 drive them out, not those in main.
    assert list(hits("s3fifo", [*ids, 20, 21, 2, 0], 20))[-2:] == [1, 0]


def test_s3fifo_asks_for_two_hits() -> None:
    """One hit does not save an id in small, two do."""
    ids = list(range(20))
    assert list(hits("s3fifo", [*ids, 0, 20, 0], 20))[-1] == 0
    assert list(hits("s3fifo", [*ids, 0, 0, 20, 0], 20))[-1] == 1


@pytest.mark.parametrize(
    ("policy", "capacity", "what"),
    [("arc", 100, "lru and s3fifo, not 'arc'"), ("lru", 0, "not 0"), ("s3fifo", 19, "20 or more, not 19")],
)
def test_refuses_what_libcachesim_cannot_run(policy: str, capacity: int, what: str) -> None:
    """Another policy, no capacity, and an S3-FIFO whose small queue would hold one object."""
    with pytest.raises(ValueError, match=what):
        hits(policy, [1], capacity)
