"""Rules of counting: nothing lost, nothing sent twice under two numbers, presence told, memory bounded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.rates import GAP_S, PROMOTE_AT, Batch, Rates


def drain(rates: Rates, now: float) -> dict[int, dict[int, int]]:
    got: dict[int, dict[int, int]] = {}
    while (batch := rates.next_batch(now)) is not None:
        window = got.setdefault(batch.window_start_s, {})
        for key, n in batch.counts.items():
            window[key] = window.get(key, 0) + n
        rates.done()
    return got


def test_counts_land_in_the_window_of_their_time() -> None:
    """A request belongs to the window that holds its time, also when it is sent later."""
    rates = Rates(10, 100)
    for t, key in ((100.0, 1), (109.9, 1), (110.0, 1), (119.0, 2)):
        rates.count(key, t)
    assert drain(rates, 120) == {100: {1: 2}, 110: {1: 1, 2: 1}}
    assert drain(rates, 120) == {}


def test_a_batch_not_done_comes_again_unchanged() -> None:
    """Until it is done, a batch keeps number and counts, so that the store can tell it was applied."""
    rates = Rates(10, 100, first_batch=7)
    rates.count(1, 100.0)
    first = rates.next_batch(100)
    assert first is not None
    assert first.number == 8
    rates.count(1, 101.0)
    again = rates.next_batch(101)
    assert again == first
    assert again is not None
    assert again.counts == {1: 1}
    rates.done()
    second = rates.next_batch(101)
    assert second is not None
    assert (second.number, second.counts) == (9, {1: 1})


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-9, 20), st.sampled_from(["count", "send", "fail"])), max_size=200)
)
def test_every_request_is_counted_exactly_once(steps: list[tuple[int, float, str]]) -> None:
    """Over any order of counting, sending and failing, and a clock that goes back, a store that dedups by number holds
    exactly what was counted; and every span lies inside its window and inside the time that passed."""
    rates, now = Rates(5, 10_000), 1000.0
    expected: dict[int, int] = {}
    stored: dict[int, int] = {}
    last, first_s, last_s = -1, 1000.0, 1000.0

    def apply(batch: Batch) -> None:
        nonlocal last
        if batch.span is not None:
            began, until = batch.span
            assert max(first_s, batch.window_start_s) <= began <= until <= min(last_s, batch.window_start_s + 5)
        if batch.number > last:  # applied, whether or not its answer is lost
            last = batch.number
            for key, n in batch.counts.items():
                assert n > 0
                stored[key] = stored.get(key, 0) + n

    for key, dt, action in steps:
        now += dt
        first_s, last_s = min(first_s, now), max(last_s, now)
        if action == "count":
            rates.count(key, now)
            expected[key] = expected.get(key, 0) + 1
        elif (batch := rates.next_batch(now)) is not None:
            apply(batch)
            if action == "send":
                rates.done()
    while (batch := rates.next_batch(now)) is not None:
        apply(batch)
        rates.done()
    assert stored == expected
    assert rates.dropped == 0


def told(rates: Rates, now: float) -> list[tuple[int, tuple[float, float] | None]]:
    found = []
    while (batch := rates.next_batch(now)) is not None:
        found.append((batch.window_start_s, batch.span))
        rates.done()
    return found


def test_presence_is_told_of_every_window_with_or_without_requests() -> None:
    """From the start of the process on each window gets a span, whole in the middle; one call tells a time once."""
    rates = Rates(10, 1000, began_s=103.5)
    assert told(rates, 104.0) == [(100, (103.5, 104.0))]
    assert told(rates, 104.0) == []
    rates.count(1, 109.0)
    assert told(rates, 125.0) == [(100, (104.0, 110)), (110, (110, 120)), (120, (120, 125.0))]
    rates.count(1, 130.0)
    assert told(rates, 130.0) == [(120, (125.0, 130)), (130, None)], "130 begins the next window, of which none passed"


def test_nothing_is_told_of_a_time_that_was_jumped_over() -> None:
    """A process that stood still, or whose clock was set, says nothing of the gap; earlier counts still go out."""
    rates = Rates(10, 10_000, began_s=100.0)
    rates.count(1, 101.0)
    later = 102.0 + 2 * GAP_S
    assert told(rates, later) == [(100, (100.0, 101.0))]
    assert told(rates, later + 1) == [(int(later) // 10 * 10, (later, later + 1))]
    assert told(rates, 50.0) == []
    assert told(rates, 51.0) == [(50, (50.0, 51.0))]


def test_spans_merge_while_the_store_is_away() -> None:
    """Batches of one window that wait become one, from the first start to the last end."""
    rates = Rates(10, 1000, began_s=100.0)
    first = rates.next_batch(101.0)
    for at_s in (102.0, 103.0):
        rates.count(1, at_s)
        assert rates.next_batch(at_s) == first, "what may be on its way stays as it is"
    rates.done()
    second = rates.next_batch(103.0)
    assert second == Batch(100, 2, {1: 2}, (101.0, 103.0))


def test_memory_is_bounded_while_the_store_is_away() -> None:
    """Counts older than keep_s are dropped and counted as dropped; one window holds one unsent batch."""
    rates = Rates(10, 30)
    for second in range(1000):
        rates.count(1, float(second))
        rates.next_batch(float(second))
    assert len(rates._closed) <= 6
    kept = sum(sum(w.values()) for w in drain(rates, 999).values())
    assert kept + rates.dropped == 1000
    assert rates.dropped > 900


def test_random_keys_cannot_fill_the_memory() -> None:
    """Counts of one window and of all unsent ones together are bounded; what does not fit is counted as dropped."""
    rates = Rates(10, 10_000, keys_max=100)
    for second in range(200):
        for key in range(30):
            rates.count(second * 1000 + key, float(second))
        if second == 50:
            first = rates.next_batch(50.0)
    assert first is not None
    held = sum(len(b.counts) for b in rates._closed) + len(rates._open)
    assert held <= 300
    assert rates.next_batch(200.0) == first, "a batch that may be on its way is not dropped under the sender's hands"
    kept = sum(sum(w.values()) for w in drain(rates, 200.0).values())
    assert kept + rates.dropped == 200 * 30


def test_a_window_of_many_flushes_holds_no_more_keys_than_one() -> None:
    """The bound is a window's, however often its counts are handed on, or wait to be."""
    for sends in (True, False):
        rates = Rates(1000, 10_000, keys_max=100)
        rates.next_batch(1000.0)
        sent = 0
        for second in range(1000, 1500):
            for key in range(20):
                rates.count(second * 1000 + key, float(second))
            batch = rates.next_batch(float(second))
            if sends and batch is not None:
                sent += len(batch.counts)
                rates.done()
        assert sent + sum(len(b.counts) for b in rates._closed) <= 125


@pytest.mark.parametrize("seed", range(3))
def test_beyond_keys_max_hot_keys_are_found(seed: int) -> None:
    """Of keys that come after the room is gone the hot ones are counted, never under the truth since they were new,
    others not at all; every request is in a count or told as dropped; what was counted before stays exact."""
    rng = random.Random(seed)
    rates, truth = Rates(30, 1000, keys_max=1000), dict[int, int]()
    early = [rng.getrandbits(64) for _ in range(1000)]
    hot, cold = [rng.getrandbits(64) for _ in range(20)], [rng.getrandbits(64) for _ in range(2000)]
    requests = early * 3 + hot * 50 + cold
    later = requests[3000:]
    rng.shuffle(later)
    for key in requests[:3000] + later:
        rates.count(key, 100.0)
        truth[key] = truth.get(key, 0) + 1
    assert rates.sketched > len(cold)
    counts = drain(rates, 120.0)[90]
    assert {key: counts[key] for key in early} == {key: truth[key] for key in early}
    noise = 2 * len(later) // 128
    for key in hot:
        assert truth[key] <= counts[key] <= truth[key] + noise
    assert set(counts) <= set(truth)
    assert len(counts) <= 1250
    assert sum(counts.values()) + rates.dropped >= len(requests)
    assert sum(counts.values()) - len(requests) <= 250 * noise


def test_keys_that_come_once_are_not_taken_for_frequent_ones() -> None:
    """However many there are, their sums in the sketch's cells promote hardly any of them."""
    rng = random.Random(0)
    rates = Rates(30, 1000, keys_max=64)
    for _ in range(5000):
        rates.count(rng.getrandbits(64), 100.0)
    counts = drain(rates, 120.0)[90]
    assert len(counts) <= 64 + 2


def test_a_promoted_key_is_credited_once() -> None:
    """After its promotion a key counts one by one, over all flushes of its window, and is new again in the next."""
    rates = Rates(30, 1000, keys_max=4)
    for key in range(4):
        rates.count(key, 100.0)
    for _ in range(PROMOTE_AT + 3):
        rates.count(9, 100.0)
    assert drain(rates, 101.0)[90] == {0: 1, 1: 1, 2: 1, 3: 1, 9: PROMOTE_AT + 3}
    rates.count(9, 102.0)
    rates.count(7, 102.0)
    assert drain(rates, 103.0)[90] == {9: 1}
    rates.count(9, 130.0)
    assert drain(rates, 131.0)[120] == {9: 1}
    assert (rates.dropped, rates.sketched) == (1, PROMOTE_AT + 1)
