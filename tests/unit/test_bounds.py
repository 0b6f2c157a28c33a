"""The bounds that no policy beats."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_patch.bounds import belady, infinite, next_uses
from engine_patch.policy import POLICIES
from replay.eviction import BlockTrace, bound_hits, hits

ids = st.lists(st.integers(0, 5), max_size=12)


def best(blocks: tuple[int, ...], capacity: int) -> int:
    """Return the most hits that any choice of victims gives, by trying all."""

    @cache
    def most(at: int, resident: frozenset[int]) -> int:
        if at == len(blocks):
            return 0
        block = blocks[at]
        if block in resident:
            return 1 + most(at + 1, resident)
        if len(resident) < capacity:
            return most(at + 1, resident | {block})
        return max(most(at + 1, resident - {victim} | {block}) for victim in resident)

    return most(0, frozenset())


@given(blocks=ids, capacity=st.integers(1, 4))
def test_belady_is_the_best_of_all_choices(blocks: list[int], capacity: int) -> None:
    """MIN has as many hits as the best of all sequences of victims."""
    assert belady(blocks, capacity) == best(tuple(blocks), capacity)


@given(blocks=ids)
def test_an_infinite_cache_misses_each_id_once(blocks: list[int]) -> None:
    """Hits are all but the first of each id, and room for all ids is as good as endless room."""
    assert infinite(blocks) == len(blocks) - len(set(blocks)) == belady(blocks, 6)


def test_next_uses_are_places() -> None:
    """A place points to the next place of the same id, the last one past the end."""
    assert next_uses("abcab") == [3, 4, 5, 5, 5]


def test_refuses_a_cache_without_room() -> None:
    """A cache holds one block or more."""
    with pytest.raises(ValueError, match="not 0"):
        belady([1], 0)


chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=40)


@pytest.mark.parametrize("policy", POLICIES)
@given(paths=chains, capacity=st.integers(1, 12))
def test_no_policy_beats_the_bounds(policy: str, paths: list[tuple[int, ...]], capacity: int) -> None:
    """On chained requests contiguous hits stay within Belady's, and Belady's within the infinite cache's."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = [
        tuple(numbers.setdefault(path[:end], len(numbers)) for end in range(1, len(path) + 1)) for path in paths
    ]
    trace = BlockTrace(requests, chained=True)
    endless, best_possible = bound_hits(trace, capacity)
    assert hits(policy, trace, capacity) <= best_possible <= endless
