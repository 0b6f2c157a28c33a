"""Admission by key: fleets of processes in virtual time that exchange by the model of the lease script."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from service.fairness import FAIR_SHARE, KEY_CONCURRENCY, KEYS_MAX, SLOTS_MAX
from service.keys import hash_key
from tests.unit.lease_model import TTL_MS, FairFleet, Seen, Source, fairness, shares_seen

A, B = hash_key(b"A"), hash_key(b"B")
SETTLED_S, LOOK_S = 10.0, 20.0
# Tenant A reaches process 0 alone, B the two others: no process sees both.
CLOSED = (Source("A", (0,), clients=110, retry_s=0.2), Source("B", (1, 2), clients=160, retry_s=0.2))
OPEN = (Source("A", (0,), rate_rps=140), Source("B", (1, 2), rate_rps=300))
POLITE = (Source("A", (0,), clients=110, retry_s=1.0), Source("B", (1, 2), clients=160, retry_s=1.0))
LONG = (Source("A", (0,), clients=110, hold_s=8.0), Source("B", (1, 2), clients=160, hold_s=8.0))


def run(
    sources: tuple[Source, ...],
    seed: int,
    *,
    slots: int = 100,
    weights: tuple[str, ...] = ("A=4",),
    fair: bool = True,
    settled_s: float = SETTLED_S,
) -> Seen:
    fleet = FairFleet(3, seed, fair=fair, fleet_inflight_max=slots, fair_weight=weights)
    fleet.load(sources)
    return fleet.run(settled_s + LOOK_S, since_s=settled_s)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("sources", "settled_s"),
    [(CLOSED, SETTLED_S), (OPEN, SETTLED_S), (POLITE, SETTLED_S), (LONG, 60.0)],
    ids=["closed", "open", "polite", "long"],
)
def test_skewed_tenants_keep_four_to_one(sources: tuple[Source, ...], settled_s: float, seed: int) -> None:
    """Two tenants of weights 4:1, each at processes of its own, the light one wanting more, are within 5 % of 4:1."""
    seen = run(sources, seed, settled_s=settled_s)
    assert seen.mean("A") / seen.mean("B") == pytest.approx(4.0, rel=0.05)
    assert seen.mean("A") + seen.mean("B") > 97, "and nothing of the fleet is left idle"
    assert {cause for _, cause in seen.refused} == {FAIR_SHARE}


@pytest.mark.parametrize("sources", [CLOSED, OPEN], ids=["closed", "open"])
def test_without_shares_demand_decides(sources: tuple[Source, ...]) -> None:
    """The control of the tests above: with the same limit but first come, first served, A has less than B."""
    seen = run(sources, 0, fair=False)
    assert seen.mean("A") < seen.mean("B")


@pytest.mark.parametrize(
    ("weights", "expected"),
    [({"A": 1, "B": 1}, (50, 50)), ({"A": 10, "B": 1}, (91, 9)), ({"A": 1, "B": 9}, (10, 90))],
)
def test_other_weights(weights: dict[str, float], expected: tuple[int, int]) -> None:
    """Any weights are kept to the slot."""
    seen = run(CLOSED, 1, weights=tuple(f"{k}={w}" for k, w in weights.items()))
    assert (seen.mean("A"), seen.mean("B")) == pytest.approx(expected, abs=0.5)


def test_three_tenants_of_which_one_is_everywhere() -> None:
    """Three tenants with overlapping ingress have their weights' parts: 60, 30 and 10 of 100."""
    sources = (Source("A", (0, 1, 2), clients=90), Source("B", (1,), clients=60), Source("C", (1, 2), clients=120))
    seen = run(sources, 2, weights=("A=6", "B=3"))
    assert shares_seen(seen, {"A": 6, "B": 3, "C": 1}) == pytest.approx([1, 1, 1], rel=0.05)
    assert sum(seen.mean(t) for t in "ABC") == pytest.approx(100, abs=2)


def test_requests_without_a_key_are_one_key() -> None:
    """Whoever sends no key has weight 1 together with all others that send none."""
    sources = (Source("A", (0,), clients=110), Source("", (1, 2), clients=160))
    seen = run(sources, 3)
    assert seen.mean("A") / seen.mean("") == pytest.approx(4.0, rel=0.05)


def test_what_one_leaves_the_other_takes_and_gives_back() -> None:
    """While A sends nothing B fills the fleet; when A is back it has its share again as soon as B's requests end."""
    fleet = FairFleet(3, 4, fleet_inflight_max=100, fair_weight=("A=4",))
    away = (Source("A", (0,), clients=110, ends_s=20.0), Source("A", (0,), clients=110, begins_s=40.0))
    fleet.load((*away, Source("B", (1, 2), clients=160)))
    fleet.run(30.0)
    alone = fleet.run(39.9, since_s=30.0)
    assert alone.mean("B") > 98
    assert alone.most_together <= 101
    back = fleet.run(60.0, since_s=45.0)
    assert back.mean("A") / back.mean("B") == pytest.approx(4.0, rel=0.05)


def test_nobody_is_refused_while_the_fleet_has_room() -> None:
    """Below the limit weights mean nothing: whoever comes is admitted, also all at one process."""
    fleet = FairFleet(3, 5, fleet_inflight_max=200, fair_weight=("A=100",))
    fleet.load((Source("A", (0,), clients=5), Source("B", (1,), clients=90), Source("C", (0, 1, 2), clients=90)))
    seen = fleet.run(30.0, since_s=0.0)
    assert not seen.refused
    assert seen.most_together > 170


def test_slots_of_a_dead_process_return() -> None:
    """A process that dies holds its slots until its leases end, and then no longer."""
    fleet = FairFleet(3, 6, fleet_inflight_max=100, key_inflight_max=60)
    fleet.load((Source("A", (0,), clients=100), Source("A", (1,), clients=100, begins_s=10.0)))
    fleet.run(15.0)
    assert fleet.run(15.0).most["A"] <= 60
    fleet.at(20.0, lambda: fleet.kill(0))
    dying = fleet.run(20.8, since_s=20.05)
    assert dying.mean("A") <= 31, "its half is not given away while it may still be filling it"
    after = fleet.run(30.0, since_s=23.0)
    assert after.mean("A") == pytest.approx(60, abs=1)


scenes = st.lists(
    st.builds(
        Source,
        tenant=st.sampled_from(("A", "B", "")),
        at=st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True).map(tuple),
        clients=st.integers(1, 30),
        hold_s=st.sampled_from((0.02, 0.3, 2.0)),
        retry_s=st.sampled_from((0.05, 0.5)),
        begins_s=st.floats(1, 6),
        ends_s=st.floats(3, 12),
    ),
    max_size=6,
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 20), scenes, st.integers(0, 1000))
def test_the_cap_is_kept_exactly(processes: int, cap: int, sources: list[Source], seed: int) -> None:
    """However traffic of a key comes and moves, at no moment has it more in flight than the cap, or than processes."""
    fleet = FairFleet(processes, seed, key_inflight_max=cap, fleet_inflight_max=25)
    here = [replace(s, at=tuple(sorted({i % processes for i in s.at}))) for s in sources]
    fleet.load(here)
    seen = fleet.run(14.0, since_s=0.9)
    assert max(seen.most.values(), default=0) <= max(cap, processes)


@pytest.mark.parametrize("at", [(0,), (0, 1, 2), (2, 1)])
def test_the_cap_can_be_filled_from_anywhere(at: tuple[int, ...]) -> None:
    """One key that wants more has all its slots, at one process or at several, and refusals say why."""
    fleet = FairFleet(3, 7, key_inflight_max=13)
    fleet.load((Source("A", at, clients=40),))
    seen = fleet.run(30.0, since_s=5.0)
    assert seen.mean("A") == pytest.approx(13, abs=0.2)
    assert {cause for _, cause in seen.refused} == {KEY_CONCURRENCY}


def test_slots_follow_traffic_from_one_process_to_another() -> None:
    """When a key's traffic moves, its slots follow within a few exchanges of its requests' ends."""
    fleet = FairFleet(3, 8, key_inflight_max=20)
    fleet.load((Source("A", (0,), clients=40, ends_s=10.0), Source("A", (2,), clients=40, begins_s=10.0)))
    fleet.run(10.0)
    moved = fleet.run(20.0, since_s=16.0)
    assert moved.mean("A") == pytest.approx(20, abs=0.5)
    assert moved.most["A"] <= 20


def test_shares_follow_long_requests_only_when_they_end() -> None:
    """While a tenant's long requests run at one process, another one is not given the same slots again."""
    fleet = FairFleet(3, 15, fleet_inflight_max=100, fair_weight=("A=4",))
    moves = (Source("A", (0,), clients=110, hold_s=8.0, ends_s=40.0), Source("A", (2,), clients=110, begins_s=40.0))
    fleet.load((*moves, Source("B", (1,), clients=160)))
    fleet.run(40.0)
    moving = fleet.run(55.0, since_s=40.0)
    assert moving.most["A"] <= 84
    after = fleet.run(70.0, since_s=60.0)
    assert after.mean("A") / after.mean("B") == pytest.approx(4.0, rel=0.05)


def test_a_key_is_served_before_anybody_was_asked() -> None:
    """A key that is new to a process is admitted at once, up to its part of the cap."""
    fleet = FairFleet(3, 9, key_inflight_max=12)
    fleet.load((Source("B", (0, 1, 2), clients=99),))
    fleet.run(5.0)
    for one in fleet.processes:
        assert [one.admit(A) for _ in range(5)] == [""] * 4 + [KEY_CONCURRENCY]


@pytest.mark.parametrize("lost", range(4))
def test_lost_answers_give_nobody_too_much(lost: int) -> None:
    """When Redis has granted but the answer was lost, what a process fills and what others are granted still add up."""
    fleet = FairFleet(3, lost, key_inflight_max=12)
    rng = Random(lost)
    for one in fleet.processes:
        apply: Callable[..., None] = one.apply
        one.apply = lambda answer, apply=apply: apply(answer) if rng.random() < 0.5 else None  # type: ignore[method-assign,misc]
    fleet.load(Source("A", (i,), clients=8, begins_s=3.0 + i) for i in range(3))
    assert fleet.run(20.0, since_s=2.5).most["A"] <= 12


def test_without_redis_leases_stay_then_each_keeps_to_its_part() -> None:
    """Redis away: nothing changes until leases end, then each of n has its n-th part, until Redis is back."""
    fleet = FairFleet(3, 11, key_inflight_max=30, fleet_inflight_max=60)
    fleet.load((Source("A", (0,), clients=100, hold_s=0.2), Source("B", (1, 2), clients=100, hold_s=0.2)))
    before = fleet.run(20.0, since_s=10.0)
    assert before.mean("A") == pytest.approx(30, abs=0.5)
    fleet.at(20.0, lambda: setattr(fleet, "reachable", False))
    kept = fleet.run(20.0 + TTL_MS / 2000, since_s=20.05)
    assert kept.mean("A") == pytest.approx(30, abs=1)
    alone = fleet.run(40.0, since_s=25.0)
    assert alone.mean("A") == pytest.approx(10, abs=0.5)
    assert alone.mean("B") == pytest.approx(20, abs=0.5)
    assert alone.most["A"] <= 10
    fleet.at(40.0, lambda: setattr(fleet, "reachable", True))
    back = fleet.run(60.0, since_s=50.0)
    assert back.mean("A") == pytest.approx(30, abs=0.5)
    assert fleet.run(60.0).most["A"] <= 30


def test_one_process_alone() -> None:
    """Without any exchange the limits are this process's own, or its part of them beside other workers."""
    one = fairness(key_inflight_max=2, fleet_inflight_max=3)
    assert [one.admit(A) for _ in range(3)] == ["", "", KEY_CONCURRENCY]
    assert [one.admit(B) for _ in range(2)] == ["", FAIR_SHARE]
    one.release(A)
    assert one.admit(B) == ""
    worker = fairness(key_inflight_max=10, workers=4)
    assert [worker.admit(A) for _ in range(3)] == ["", "", KEY_CONCURRENCY]


def test_off_by_default() -> None:
    """Without either setting nothing is to be asked."""
    assert not fairness().enabled
    assert fairness(key_inflight_max=1).enabled
    assert fairness(fleet_inflight_max=1).enabled


def test_weights_are_found_by_salted_hash() -> None:
    """A key's weight is that of its name, whatever the salt."""
    salt = b"0123456789abcdef"
    one = fairness(fleet_inflight_max=9, fair_weight=(" A =4",), key_salt=salt.decode())
    assert one.explain(hash_key(b"A", salt)).weight == 4.0
    assert one.explain(A).weight == 1.0


def test_what_nobody_wants_is_forgotten() -> None:
    """Keys leave memory some seconds after their last request, admitted or refused, in each process that knew them."""
    fleet = FairFleet(2, 12, key_inflight_max=4, fleet_inflight_max=50)
    fleet.load(Source(f"t{n}", (n % 2,), clients=1, ends_s=5.0) for n in range(400))
    fleet.run(5.0)
    assert min(one.keys for one in fleet.processes) >= 200
    fleet.run(20.0)
    assert [one.keys for one in fleet.processes] == [0, 0]
    assert [one.inflight for one in fleet.processes] == [0, 0]


def test_memory_is_bounded() -> None:
    """Keys that are only refused take no memory beyond a bound, and a report has a bounded number of rows."""
    one = fairness(fleet_inflight_max=1)
    assert one.admit(1) == ""
    for key in range(2, SLOTS_MAX + 1000):
        assert one.admit(key) == FAIR_SHARE
    assert one.keys <= SLOTS_MAX + 1
    assert len(one.report(0.0).rows) == KEYS_MAX + 1
    one.release(1)
    assert one.inflight == 0


@pytest.mark.parametrize("keys_max", [256, 16])
def test_many_light_keys_leave_heavy_ones_their_shares(monkeypatch: pytest.MonkeyPatch, keys_max: int) -> None:
    """Whether keys have rows or not, heavy ones keep their weights, and those that come now and then are served."""
    monkeypatch.setattr("service.fairness.KEYS_MAX", keys_max)
    light = tuple(Source(f"t{n}", (n % 3,), rate_rps=0.15, hold_s=0.5) for n in range(400))
    fleet = FairFleet(3, 13, fleet_inflight_max=100, fair_weight=("A=4",))
    fleet.load((*CLOSED, *light))
    seen = fleet.run(SETTLED_S + LOOK_S, since_s=SETTLED_S)
    assert seen.mean("A") / seen.mean("B") == pytest.approx(4.0, rel=0.05)
    come = 400 * 0.15 * LOOK_S
    assert sum(n for (tenant, _), n in seen.refused.items() if tenant.startswith("t")) < 0.1 * come


def test_a_keys_state_can_be_explained() -> None:
    """People see a key's requests in flight, its leases, what it wants and what was refused, here."""
    fleet = FairFleet(2, 14, key_inflight_max=10)
    fleet.load((Source("A", (0,), clients=30),))
    fleet.run(10.0)
    state = fleet.processes[0].explain(A)
    assert (state.inflight, state.cap, state.leased, state.share) == (10, 10, True, None)
    assert state.wanted >= 30
    assert fleet.processes[1].explain(A).cap == 0
    unknown = fleet.processes[0].explain(B)
    assert (unknown.inflight, unknown.cap, unknown.leased) == (0, 5, False)
