"""Rules of counting: nothing lost, nothing sent twice under two numbers, memory bounded."""

from hypothesis import given
from hypothesis import strategies as st

from service.rates import Rates


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
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 3), st.sampled_from(["count", "send", "fail"])), max_size=200)
)
def test_every_request_is_counted_exactly_once(steps: list[tuple[int, float, str]]) -> None:
    """Over any order of counting, sending and failing, a store that dedups by number holds exactly what was counted."""
    rates, now = Rates(5, 10_000), 1000.0
    expected: dict[int, int] = {}
    stored: dict[int, int] = {}
    last = -1
    for key, dt, action in steps:
        now += dt
        if action == "count":
            rates.count(key, now)
            expected[key] = expected.get(key, 0) + 1
        elif (batch := rates.next_batch(now)) is not None:
            if batch.number > last:  # applied, whether or not its answer is lost
                last = batch.number
                for k, n in batch.counts.items():
                    stored[k] = stored.get(k, 0) + n
            if action == "send":
                rates.done()
    while (batch := rates.next_batch(now)) is not None:
        if batch.number > last:
            last = batch.number
            for k, n in batch.counts.items():
                stored[k] = stored.get(k, 0) + n
        rates.done()
    assert stored == expected


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
    assert rates.next_batch(199.0) == first, "a batch that may be on its way is not dropped under the sender's hands"
    kept = sum(sum(w.values()) for w in drain(rates, 199.0).values())
    assert kept + rates.dropped == 200 * 30
