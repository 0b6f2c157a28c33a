"""How slots are divided: weighted max-min fair over keys, max-min fair over the processes of a key."""

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.shares import limits, parse_weights, part, shares

Wanted = dict[int, tuple[int, float]]

weights = st.one_of(st.sampled_from([0.1, 1.0, 1.0, 1.0, 3.0, 4.0]), st.floats(1e-6, 1e6))
wants = st.dictionaries(st.integers(0, 2**64 - 1), st.tuples(st.integers(0, 500), weights), max_size=12)
slots = st.integers(0, 1000)


@given(slots, wants)
@example(3, {1: (3, 1e6), 2: (3, 1e-6), 3: (1, 0.1)})
@example(3, dict.fromkeys(range(9), (2, 0.1)))
def test_shares_are_weighted_max_min_fair(total: int, wanted: dict[int, tuple[int, float]]) -> None:
    """All slots are used while anybody wants more, nobody gets more than he wants, and who is refused has his weight's
    part: nobody who got more for his weight could give a whole slot to him."""
    given_ = shares(total, wanted)
    assert set(given_) == set(wanted)
    assert all(0 <= given_[key] <= want for key, (want, _) in wanted.items())
    assert sum(given_.values()) == min(total, sum(want for want, _ in wanted.values()))
    for key, (want, weight) in wanted.items():
        if given_[key] < want:
            for other, (_, others_weight) in wanted.items():
                # Both are within one slot of the level that divides them.
                assert (given_[other] - 1) / others_weight <= (given_[key] + 1) / weight * (1 + 1e-9)


@given(slots, wants, st.randoms(), st.integers(0, 5))
def test_shares_do_not_depend_on_order(
    total: int, wanted: dict[int, tuple[int, float]], rng: Random, turn: int
) -> None:
    """Each process gets the same shares from the same figures, in whatever order it learnt them."""
    items = list(wanted.items())
    rng.shuffle(items)
    assert shares(total, dict(items), turn=turn) == shares(total, wanted, turn=turn)


@pytest.mark.parametrize(
    ("total", "wanted", "expected"),
    [
        (100, {1: (140, 4.0), 2: (300, 1.0)}, {1: 80, 2: 20}),
        (100, {1: (50, 4.0), 2: (300, 1.0)}, {1: 50, 2: 50}),
        (100, {1: (0, 4.0), 2: (300, 1.0)}, {1: 0, 2: 100}),
        (100, {1: (140, 4.0), 2: (10, 1.0)}, {1: 90, 2: 10}),
        (90, {1: (99, 1.0), 2: (99, 2.0), 3: (99, 6.0)}, {1: 10, 2: 20, 3: 60}),
        (10, {1: (3, 1.0), 2: (4, 1.0)}, {1: 3, 2: 4}),
        (0, {1: (3, 1.0)}, {1: 0}),
        (7, {}, {}),
    ],
)
def test_shares_by_hand(total: int, wanted: Mapping[int, tuple[int, float]], expected: dict[int, int]) -> None:
    """Weights divide what is contended; what a key leaves goes to the others."""
    assert shares(total, wanted) == expected


def test_equal_remainders_take_turns() -> None:
    """With fewer slots than keys each key has a slot at some time, and about as often as any other."""
    had = dict.fromkeys(range(1, 9), 0)
    for turn in range(400):
        for key, n in shares(2, {key * 977: (5, 1.0) for key in had}, turn=turn).items():
            had[key // 977] += n
    assert sum(had.values()) == 800
    assert min(had.values()) > 40


@given(slots, wants)
def test_limits_leave_each_key_its_part_by_weight(total: int, wanted: Wanted) -> None:
    """A key's limit is its share, or its part by weight among those who want any, if it wants less just now."""
    found = limits(
        total, {k: want for k, (want, _) in wanted.items()}, {k: weight for k, (_, weight) in wanted.items()}
    )
    fair = shares(total, wanted)
    for key, (want, weight) in wanted.items():
        contending = sum(weight for want, weight in wanted.values() if want) + (0 if want else weight)
        entitled = total * weight / contending
        assert found[key] >= fair[key]
        assert found[key] > entitled * (1 - 1e-9) - 1
        assert found[key] <= max(fair[key], entitled * (1 + 1e-9))


@given(slots, st.integers(1, 8), st.dictionaries(st.integers(0, 7), st.integers(1, 300)))
def test_parts_of_processes(total: int, count: int, wanted: dict[int, int]) -> None:
    """The parts of all processes sum to the key's slots; nobody who wants more has less than another by over one; and
    what nobody wants is spread evenly."""
    wanted = {place: want for place, want in wanted.items() if place < count}
    parts = [part(total, wanted, place, count) for place in range(count)]
    assert sum(parts) == total
    assert min(parts) >= 0
    if sum(wanted.values()) <= total:
        spare = [parts[place] - wanted.get(place, 0) for place in range(count)]
        assert max(spare) - min(spare) <= 1
    else:
        for place in range(count):
            assert parts[place] <= wanted.get(place, 0)
            if parts[place] < wanted.get(place, 0):
                assert max(parts) <= parts[place] + 1


def test_weights_are_keys_as_they_are_hashed() -> None:
    """A key may hold `=`, is normalised as in a request, and is not shown when its weight is none."""
    assert parse_weights((" acme =4", "a=b=0.5")) == {b"acme": 4.0, b"a=b": 0.5}
    for bad in ("acme", "acme=", "=4", "acme=0", "acme=-1", "acme=nan", "acme=inf", "acme=x"):
        with pytest.raises(ValueError, match="number 2 is not KEY=WEIGHT") as caught:
            parse_weights(("b=1", bad))
        assert "acme" not in str(caught.value)
    with pytest.raises(ValueError, match="number 2 has two weights"):
        parse_weights(("acme=1", "acme=2"))
