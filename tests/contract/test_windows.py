"""Reading windows from a real server: each change once, however late, repeated or lost; commands of bounded size."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import pytest

from planner.rates import KeyRates
from planner.settings import PlannerSettings, load_settings
from planner.windows import Windows, window_starts
from service.counts import RATES_PER_CALL, RATES_PER_SCAN
from service.rates import Counted, Rates
from service.store import Store

WINDOW_S = 30
NOW_S = 1_800_000_045.0  # the middle of a window
OPEN_S = 1_800_000_030


class Server(Protocol):
    url: str


class Watched(Store):
    """A store that notes which windows were read."""

    def __init__(self, url: str, pool: str) -> None:
        super().__init__(url, pool)
        self.seen: list[int] = []

    async def read_window(self, window_start_s: int) -> Counted:
        self.seen.append(window_start_s)
        return await super().read_window(window_start_s)

    def reads(self) -> list[int]:
        """Return the windows read since this was last asked, oldest first."""
        found, self.seen = sorted(self.seen), []
        return found


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Watched]:
    store = Watched(valkey.url, pool)
    yield store
    await store.close()


def settings_of(store: Store, **given: object) -> PlannerSettings:
    return load_settings(
        {},
        redis_url="redis://nowhere",
        pool=store.pool,
        endpoint=("a",),
        slots_per_endpoint=2,
        replica_cap_rps=9.0,
        **given,
    )


async def add(
    store: Store, start_s: int, counts: Mapping[int, int], batch: int = 1, life: str = "x:1", until_s: float = 0.0
) -> None:
    span = (float(start_s), until_s or float(start_s + WINDOW_S))
    await store.add_rates(start_s, counts, instance=life, batch=batch, ttl_s=600, span=span)


def as_dict(rates: KeyRates) -> dict[int, float]:
    return {key: round(rate, 9) for key, rate in zip(rates.key_hashes.tolist(), rates.rates_rps.tolist(), strict=True)}


async def fresh(store: Store, now_s: float = NOW_S, **given: object) -> dict[int, float]:
    return as_dict((await Windows(store, settings_of(store, **given)).read(now_s))[0])


def test_window_starts_end_with_the_open_one() -> None:
    """The newest windows, oldest first, aligned as services align them."""
    assert list(window_starts(NOW_S, WINDOW_S, 3)) == [OPEN_S - 60, OPEN_S - 30, OPEN_S]
    assert list(window_starts(90.0, 30, 1)) == [90]


async def test_a_cycle_reads_only_what_has_changed(store: Watched) -> None:
    """Windows are read once, and again when counts came late; rates are those of a reader that begins anew."""
    windows = Windows(store, settings_of(store, half_life_events=1000))
    assert (await windows.read(NOW_S))[1].windows == 0
    for at in range(4):
        await add(store, OPEN_S - at * WINDOW_S, {1: 30, 2: 10 * at}, until_s=NOW_S if at == 0 else 0.0)
    rates, read = await windows.read(NOW_S)
    assert store.reads() == [OPEN_S - 90, OPEN_S - 60, OPEN_S - 30, OPEN_S]
    assert (read.windows, read.events, read.newest_s) == (4, 180, int(NOW_S))
    assert as_dict(rates) == await fresh(store, half_life_events=1000)
    store.reads()

    again, same = await windows.read(NOW_S)
    assert store.reads() == []
    assert (as_dict(again), same.sha256) == (as_dict(rates), read.sha256)

    await add(store, OPEN_S, {1: 5}, batch=2, until_s=NOW_S + 10)
    await add(store, OPEN_S - 60, {2: 100}, life="late:1")
    later, changed = await windows.read(NOW_S + 10)
    assert store.reads() == [OPEN_S - 60, OPEN_S]
    assert (changed.events, changed.late, changed.sha256 != read.sha256) == (285, 1, True)
    assert as_dict(later) == await fresh(store, NOW_S + 10, half_life_events=1000)


async def test_repeated_and_reordered_batches_count_once(store: Watched) -> None:
    """A batch that arrives again, also after a later one, changes neither counts nor revision."""
    await add(store, OPEN_S, {1: 10}, batch=1)
    await add(store, OPEN_S, {1: 5}, batch=2)
    revisions = await store.read_revisions([OPEN_S, OPEN_S - 30])
    assert revisions == {OPEN_S: 2}
    await add(store, OPEN_S, {1: 10}, batch=1)
    await add(store, OPEN_S, {1: 5}, batch=2)
    assert await store.read_revisions([OPEN_S]) == revisions
    assert (await store.read_window(OPEN_S)).counts == {1: 15}


async def test_a_restarted_service_of_the_same_name_loses_nothing(store: Watched) -> None:
    """A new life may number its batches below those of the last one; both count, and downtime is not covered."""
    await store.add_rates(OPEN_S, {1: 10}, instance="pod:aa", batch=900, ttl_s=60, span=(OPEN_S, OPEN_S + 5.0))
    await store.add_rates(OPEN_S, {1: 20}, instance="pod:bb", batch=1, ttl_s=60, span=(OPEN_S + 20.0, OPEN_S + 30.0))
    assert await fresh(store, OPEN_S + 40) == {1: 2.0}


async def test_spans_of_one_life_grow_together(store: Watched) -> None:
    """From the earliest start to the latest end, in whatever order batches tell them; without one all is covered."""
    for batch, span in enumerate([(10.5, 12.0), (8.0, 9.25), (11.0, 11.5), (-5.0, 0.0)]):
        await store.add_rates(0, {}, instance="x:1", batch=batch, ttl_s=60, span=span)
    await store.add_rates(0, {}, instance="y:1", batch=1, ttl_s=60)
    found = await store.read_window(0)
    assert (found.counts, sorted(found.spans, key=str)) == ({}, [(0.0, 12.0), None])


async def test_idle_services_tell_silence_from_absence(store: Watched) -> None:
    """Ten seconds of requests, then none: rates fall while somebody is there to count, and only then."""
    rates = Rates(WINDOW_S, 7200, began_s=float(OPEN_S))

    async def flush(now_s: float) -> None:
        while (batch := rates.next_batch(now_s)) is not None:
            await store.add_rates(
                batch.window_start_s, batch.counts, instance="x:1", batch=batch.number, ttl_s=60, span=batch.span
            )
            rates.done()

    for second in range(10):
        rates.count(7, OPEN_S + second + 0.5)
        await flush(OPEN_S + second + 1.0)
    assert await fresh(store, OPEN_S + 10.9) == {7: 1.0}
    assert await fresh(store, OPEN_S + 100.0) == {7: 1.0}, "it died after ten seconds: nobody counted since"
    await flush(OPEN_S + 100.0)
    assert await fresh(store, OPEN_S + 100.0) == {7: 0.1}, "it was there all the time"


async def test_what_the_store_loses_stays_known(store: Watched) -> None:
    """A store that comes back empty, or with an older copy, takes nothing away and adds nothing twice."""
    windows = Windows(store, settings_of(store))
    await add(store, OPEN_S - 60, {1: 60})
    await add(store, OPEN_S - 30, {1: 60})
    before = as_dict((await windows.read(NOW_S))[0])
    assert before == {1: 2.0}
    for start in (OPEN_S - 60, OPEN_S - 30):
        await store._redis.delete(store._key("rates", start))
    for batch in (1, 2):
        await add(store, OPEN_S - 30, {1: 15}, batch=batch, life="y:1")
    rates, read = await windows.read(NOW_S)
    assert (as_dict(rates), read.events) == (before, 120)
    await add(store, OPEN_S - 30, {1: 60}, batch=3, life="y:1")
    rates, read = await windows.read(NOW_S)
    assert (as_dict(rates), read.events) == ({1: pytest.approx(2.5, rel=1e-3)}, 150), "it holds more than was known"
    for start in (OPEN_S + 150, OPEN_S + 180):
        await add(store, start, {2: 1})
    rates, read = await Windows(store, settings_of(store, windows=2)).read(OPEN_S + 200.0)
    assert (read.windows, read.events) == (2, 2)


async def test_windows_leave_the_memory_when_they_leave_the_range(store: Watched) -> None:
    """No more than `windows` are kept, and none that weighs under a hundredth."""
    windows = Windows(store, settings_of(store, windows=3, half_life_events=10))
    for at in range(6):
        await add(store, OPEN_S + at * WINDOW_S, {1: 10})
        await windows.read(NOW_S + at * WINDOW_S)
    assert sorted(windows._kept) == [OPEN_S + 90, OPEN_S + 120, OPEN_S + 150]
    await add(store, OPEN_S + 150, {1: 100}, batch=2)
    rates, read = await windows.read(NOW_S + 150)
    assert (as_dict(rates), read.windows, list(windows._kept)) == ({1: round(110 / 30, 9)}, 1, [OPEN_S + 150])


async def test_clocks_that_are_wrong_do_no_harm(store: Watched) -> None:
    """What a service whose clock is ahead counts waits for its time; a planner whose clock goes back reads on."""
    windows = Windows(store, settings_of(store))
    await add(store, OPEN_S, {1: 30})
    await add(store, OPEN_S + 3600, {1: 30}, life="ahead:1")
    now = as_dict((await windows.read(OPEN_S + 30.0))[0])
    assert now == {1: 1.0}
    assert as_dict((await windows.read(OPEN_S - 3600.0))[0]) == {}
    assert as_dict((await windows.read(OPEN_S + 30.0))[0]) == now
    rates, read = await windows.read(OPEN_S + 3630.0)
    assert (as_dict(rates), read.events) == (now, 60)


async def test_commands_are_bounded_in_size(store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script call carries at most RATES_PER_CALL counts, a step of reading asks for at most RATES_PER_SCAN."""
    calls, steps = list[int](), list[tuple[int, int]]()
    run, hscan = store._link.run, store._redis.hscan

    async def counted_run(script: Any, *, keys: Any, args: Any) -> Any:
        calls.append((len(args) - 6) // 2)
        return await run(script, keys=keys, args=args)

    async def counted_hscan(name: str, cursor: int, *, count: int) -> Any:
        cursor, found = await hscan(name, cursor, count=count)
        steps.append((count, len(found)))
        return cursor, found

    monkeypatch.setattr(store._link, "run", counted_run)
    monkeypatch.setattr(store._redis, "hscan", counted_hscan)
    many = dict.fromkeys(range(7 * RATES_PER_CALL + 1), 1)
    await add(store, OPEN_S, many)
    assert calls == [RATES_PER_CALL] * 7 + [1]
    assert (await store.read_window(OPEN_S)).counts == many
    assert {asked for asked, _ in steps} == {RATES_PER_SCAN}
    assert len(steps) > len(many) / (2 * RATES_PER_SCAN)
    # A bucket is returned whole, in both tables while the server moves from one to the other.
    assert max(got for _, got in steps) <= 3 * RATES_PER_SCAN
