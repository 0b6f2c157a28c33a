"""Which keys get slots: eq. 2's copies, by rate, skipping what does not fit, whatever the input's order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.admission import Rules, admit

Keys = dict[int, float]

# Few distinct values, so that ties and runs of equal copies are common.
rates = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 1e-9]), st.floats(min_value=0, max_value=50, allow_nan=False)
)
fleets = st.dictionaries(st.integers(0, 2**64 - 1), rates, max_size=40)


def columns(keys: Keys) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    return np.array(list(keys), dtype=np.uint64), np.array(list(keys.values()), dtype=np.float64)


def admitted(
    keys: Keys, endpoints: int, slots_per_endpoint: int, replica_cap_rps: float = 1.0
) -> list[tuple[int, int]]:
    hashes, rates_rps = columns(keys)
    got = admit(
        hashes,
        rates_rps,
        endpoints=endpoints,
        rules=Rules(slots_per_endpoint=slots_per_endpoint, replica_cap_rps=replica_cap_rps),
    )
    return list(zip(hashes[got.rows].tolist(), got.copies.tolist(), strict=True))


def by_the_book(keys: Keys, endpoints: int, slots_per_endpoint: int, replica_cap_rps: float) -> list[tuple[int, int]]:
    """Algorithm 1 of the paper, lines 1 to 13, step by step."""
    left, chosen = endpoints * slots_per_endpoint, []
    for key_hash, rate in sorted(keys.items(), key=lambda item: (-item[1], item[0])):
        copies = min(endpoints, max(1, math.ceil(rate / replica_cap_rps)))
        if rate > 0 and copies <= left:
            chosen.append((key_hash, copies))
            left -= copies
    return chosen


@given(fleets, st.integers(1, 5), st.integers(1, 6), st.sampled_from([0.3, 1.0, 7.0, 100.0]))
def test_equals_the_algorithm_taken_step_by_step(keys: Keys, endpoints: int, slots: int, cap: float) -> None:
    """The vectorised admission chooses the same keys, copies and order as the paper's loop."""
    assert admitted(keys, endpoints, slots, cap) == by_the_book(keys, endpoints, slots, cap)


@given(fleets, st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(keys: Keys, endpoints: int, slots: int, random: object) -> None:
    """A permutation of the rows gives the same admission, and its copies stay inside R * W and never rise."""
    shuffled = list(keys.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    got = admitted(keys, endpoints, slots)
    assert admitted(dict(shuffled), endpoints, slots) == got
    copies = [k for _, k in got]
    assert sum(copies) <= endpoints * slots
    assert copies == sorted(copies, reverse=True)


def test_a_key_that_does_not_fit_is_skipped() -> None:
    """Deviation from eq. 3: after a key of two copies that no longer fits, a key of one copy still gets the slot."""
    assert admitted({1: 2.0, 2: 2.0, 3: 0.5, 4: 0.4}, endpoints=3, slots_per_endpoint=1) == [(1, 2), (3, 1)]


def test_many_skipped_keys_do_not_hide_a_small_one() -> None:
    """However many keys of several copies stand in front of it, the last slot goes to the hottest key that fits."""
    keys = dict.fromkeys(range(1, 11), 2.0) | {11: 0.5, 12: 0.6}
    assert admitted(keys, endpoints=3, slots_per_endpoint=1) == [(1, 2), (12, 1)]


@pytest.mark.parametrize(("rate", "copies"), [(0.1, 1), (1.0, 1), (1.01, 2), (2.0, 2), (3.5, 4), (1000.0, 4)])
def test_copies_bring_each_share_under_the_cap(rate: float, copies: int) -> None:
    """A key has max(1, ceil(rate / cap)) copies, at most one an endpoint."""
    assert admitted({1: rate}, endpoints=4, slots_per_endpoint=1) == [(1, copies)]


def test_ties_at_the_edge_of_the_budget_go_by_hash() -> None:
    """Of more equal keys than slots, those of the lowest hashes are admitted."""
    keys = dict.fromkeys((9, 3, 2**64 - 1, 7, 1, 8, 5, 6), 0.5) | {100: 0.9}
    assert [h for h, _ in admitted(keys, endpoints=2, slots_per_endpoint=2)] == [100, 1, 3, 5]


def test_keys_without_requests_get_no_slot() -> None:
    """A rate of zero is never admitted, even when slots stay empty."""
    assert admitted({1: 0.0, 2: 0.1}, endpoints=5, slots_per_endpoint=5) == [(2, 1)]
    assert admitted(dict.fromkeys(range(100), 0.0) | {7: 0.1}, endpoints=2, slots_per_endpoint=2) == [(7, 1)]
    assert admitted({}, endpoints=1, slots_per_endpoint=1) == []


def test_a_cap_next_to_zero_means_every_endpoint() -> None:
    """An infinite quotient is cut to R like every other large one."""
    assert admitted({1: 1.0}, endpoints=3, slots_per_endpoint=1, replica_cap_rps=5e-324) == [(1, 3)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [1, 40, 300])
def test_large_inputs_take_a_short_cut_to_the_same_keys(seed: int, slots: int) -> None:
    """The sample that saves sorting changes nothing, also when most rates are equal."""
    rng = np.random.default_rng(seed)
    rates_rps = np.exp(rng.normal(0, 1.65, 50_000)) if seed % 2 else rng.integers(0, 3, 50_000) / 2.0
    hashes = rng.permutation(50_000).astype(np.uint64)
    got = admit(hashes, rates_rps, endpoints=4, rules=Rules(slots_per_endpoint=slots, replica_cap_rps=1e6))
    wanted = sorted(zip((-rates_rps).tolist(), hashes.tolist(), strict=True))[: 4 * slots]
    assert hashes[got.rows].tolist() == [key_hash for rate, key_hash in wanted if rate < 0]
