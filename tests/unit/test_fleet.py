"""Rules of the fleet: who is in it, who is ready, what is in flight, and how a cold endpoint is eased in."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.fleet import (
    ANSWER_WORK,
    BLIP_S,
    GATEWAY_FAULTS,
    PANIC_SHARE,
    SLOW_START_SHARE,
    Changes,
    Endpoint,
    Fleet,
    Found,
)

SLOW_START_S = 30.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def found(*names: str, **more: bool) -> list[Found]:
    return [Found(name, f"10.0.0.{int(name[1:]) + 1}:8000", **more) for name in names]


def fleet_of(*names: str, clock: Callable[[], float] | None = None, slow_start_s: float = SLOW_START_S) -> Fleet:
    fleet = Fleet((), slow_start_s, clock or Clock())
    fleet.update(found(*names), warm=True)
    return fleet


def test_an_update_tells_what_it_changed() -> None:
    """Added, removed and moved endpoints are told by name; an update that says nothing new tells nothing."""
    fleet = fleet_of("e1", "e2", "e3")
    one = fleet.by_name["e1"]
    seen = [*found("e1", "e4"), Found("e2", "10.9.9.9:8000")]
    assert fleet.update(seen) == Changes(added=("e4",), removed=("e3",), moved=("e2",))
    assert fleet.update(seen) == Changes((), (), ())
    assert fleet.by_name["e1"] is one
    assert {e.name: e.address for e in fleet.endpoints} == {f.name: f.address for f in seen}
    assert fleet.update([]) == Changes((), ("e1", "e4", "e2"), ())
    assert (fleet.usable, fleet.usable_load) == ([], 0)


def test_an_endpoint_that_left_gets_nothing_and_keeps_its_count() -> None:
    """Requests that are in flight when their endpoint leaves end without a trace, and are still there if it returns."""
    fleet = fleet_of("e1", "e2")
    gone = fleet.by_name["e1"]
    for _ in range(3):
        fleet.charge(gone, ANSWER_WORK)
    fleet.update(found("e2"))
    assert gone not in fleet.usable
    assert fleet.usable_load == 0
    fleet.release(gone, ANSWER_WORK)
    fleet.update(found("e1", "e2"))
    assert fleet.by_name["e1"] is gone
    assert (gone.inflight, gone.work, gone.usable) == (2, 2 * ANSWER_WORK, True)
    fleet.release(gone, ANSWER_WORK)
    fleet.release(gone, ANSWER_WORK)
    assert (gone.inflight, gone.work, fleet.usable_load) == (0, 0, 0)


def test_a_moved_endpoint_is_another_server() -> None:
    """What was in flight at the old address does not count for the new one, which starts cold."""
    fleet = fleet_of("e1", "e2")
    old = fleet.by_name["e1"]
    fleet.charge(old, ANSWER_WORK)
    fleet.update([Found("e1", "10.9.9.9:8000"), *found("e2")])
    new = fleet.by_name["e1"]
    assert (new.inflight, new.handicap, old.inflight) == (0, 1 / SLOW_START_SHARE, 1)
    assert fleet.by_address.keys() == {"10.9.9.9:8000", fleet.by_name["e2"].address}
    fleet.release(old, ANSWER_WORK)
    assert fleet.usable_load == 0


def test_a_draining_endpoint_gets_nothing_whatever_probes_say() -> None:
    """Discovery's draining keeps an endpoint out of picks until discovery takes it back."""
    fleet = fleet_of("e1", "e2")
    fleet.update([*found("e1", draining=True), *found("e2")])
    assert [e.name for e in fleet.usable] == ["e2"]
    fleet.probe_succeeded(fleet.by_name["e1"])
    assert [e.name for e in fleet.usable] == ["e2"]
    fleet.update(found("e1", "e2"))
    assert [e.name for e in fleet.usable] == ["e1", "e2"]


def test_who_is_there_at_the_start_is_ready_and_warm() -> None:
    """A restart of the service neither refuses traffic nor eases anybody in, not even servers nobody vouches for."""
    fleet = Fleet((), SLOW_START_S, Clock())
    fleet.update(found("e1", "e2", vouched=False), warm=True)
    assert [(e.usable, e.handicap) for e in fleet.endpoints] == [(True, 1.0)] * 2


def test_one_that_nobody_vouches_for_waits_for_a_good_probe() -> None:
    """A server that joins by DNS gets nothing before a good probe, and is cold then, however long it loaded."""
    for loading_s in (0.1, BLIP_S - 1, 10 * SLOW_START_S):
        clock = Clock()
        fleet = fleet_of("e1", clock=clock, slow_start_s=2 * BLIP_S)
        fleet.update([*found("e1"), *found("e2", vouched=False)])
        two = fleet.by_name["e2"]
        assert not two.usable
        fleet.probe_failed(two, allowed=2)
        clock.now += loading_s
        fleet.refresh()
        assert not two.usable
        assert fleet.probe_succeeded(two)
        assert (two.usable, two.handicap) == (True, 1 / SLOW_START_SHARE)
        fleet.update([*found("e1"), *found("e2", vouched=False)])
        assert two.usable, "seen again, it is known"


def test_slow_start_ramps_from_ten_times_to_once() -> None:
    """The load of one that joined counts ten times at first, less and less, and once after `slow_start_s`."""
    clock = Clock()
    fleet = fleet_of("e1", clock=clock)
    fleet.update(found("e1", "e2"))
    warm, cold = fleet.by_name["e1"], fleet.by_name["e2"]
    for endpoint in (warm, cold):
        fleet.charge(endpoint, ANSWER_WORK)
    handicaps = []
    for _ in range(int(SLOW_START_S) + 1):
        fleet.refresh()
        assert warm.handicap == 1.0
        assert cold.load == cold.handicap * ANSWER_WORK
        handicaps.append(cold.handicap)
        clock.now += 1
    assert handicaps[0] == 10.0
    assert handicaps[15] == pytest.approx(2.0)
    assert handicaps[-1] == 1.0
    assert handicaps == sorted(handicaps, reverse=True)


@pytest.mark.parametrize(("away_s", "handicap"), [(BLIP_S - 0.1, 1.0), (BLIP_S, 1 / SLOW_START_SHARE)])
def test_a_blip_leaves_the_cache_warm(away_s: float, handicap: float) -> None:
    """An endpoint that was unready for less than a restart can take is warm; one that was longer starts slowly."""
    clock = Clock()
    fleet = fleet_of("e1", "e2", clock=clock)
    one = fleet.by_name["e1"]
    assert fleet.connect_failed(one)
    clock.now += away_s
    assert fleet.probe_succeeded(one)
    assert one.handicap == handicap


def test_without_slow_start_nobody_is_eased_in() -> None:
    """`slow_start_s` 0 gives a new endpoint its full share at once."""
    fleet = fleet_of("e1", slow_start_s=0)
    fleet.update(found("e1", "e2"))
    assert fleet.by_name["e2"].handicap == 1.0


def answers(fleet: Fleet, name: str, *statuses: int) -> list[bool]:
    return [fleet.answered(fleet.by_name[name], status) for status in statuses]


def test_gateway_errors_in_a_row_take_an_endpoint_out() -> None:
    """The fifth of 502, 503 and 504 in a row makes an endpoint unready, said once; a good probe brings it back."""
    fleet = fleet_of("e1", "e2")
    bad = (502, 503, 504, 503)
    assert answers(fleet, "e1", *bad) == [False] * (GATEWAY_FAULTS - 1)
    assert answers(fleet, "e1", 503, 503) == [True, False]
    assert [e.name for e in fleet.usable] == ["e2"]
    assert fleet.probe_succeeded(fleet.by_name["e1"])
    assert answers(fleet, "e1", *bad, 502) == [False] * (GATEWAY_FAULTS - 1) + [True]


@pytest.mark.parametrize("status", [0, 200, 400, 404, 429, 500, 501, 529])
def test_other_answers_are_no_fault_of_the_endpoint(status: int) -> None:
    """An answer that is about one request, and one of unknown status, breaks the row and never takes anybody out."""
    fleet = fleet_of("e1", "e2")
    assert not any(answers(fleet, "e1", *[status] * 20))
    assert not any(answers(fleet, "e1", *[503, 503, 503, 503, status] * 5))


@pytest.mark.parametrize("n", range(1, 9))
def test_never_more_than_half_is_taken_out_for_answers(n: int) -> None:
    """When all endpoints answer 503, at least half stay in picks; draining ones count on neither side."""
    fleet = fleet_of(*(f"e{i}" for i in range(n)))
    for _ in range(3 * GATEWAY_FAULTS):
        for endpoint in fleet.endpoints:
            fleet.answered(endpoint, 503)
    assert len(fleet.usable) == math.ceil(n / 2)

    draining = fleet_of(*(f"e{i}" for i in range(n)))
    for endpoint in draining.endpoints[: n // 2]:
        draining.set_draining(endpoint, True)
    for _ in range(3 * GATEWAY_FAULTS):
        for endpoint in draining.endpoints:
            draining.answered(endpoint, 503)
    assert len(draining.usable) == math.ceil((n - n // 2) / 2)


def test_answers_take_nobody_out_while_probes_have_taken_half() -> None:
    """Endpoints that are out for another reason count: answers alone must not end what is left."""
    fleet = fleet_of("e1", "e2", "e3", "e4")
    for name in ("e1", "e2"):
        fleet.connect_failed(fleet.by_name[name])
    assert not any(answers(fleet, "e3", *[503] * 20))


def test_connections_that_fail_everywhere_leave_half_in() -> None:
    """A gateway that retries for other reasons names each endpoint as not reached; that must not empty the fleet."""
    fleet = fleet_of(*(f"e{i}" for i in range(8)))
    taken = [fleet.connect_failed(endpoint) for endpoint in fleet.endpoints]
    assert (sum(taken), len(fleet.usable)) == (4, 4)


@pytest.mark.parametrize("n", [1, 2, 5, 10, 100])
def test_panic_uses_all_where_somebody_listens(n: int) -> None:
    """When hardly any endpoint passes its probes, all are used but those where nobody listens; then it ends."""
    fleet = fleet_of(*(f"e{i}" for i in range(n)))
    ready = math.ceil(n * PANIC_SHARE)
    for endpoint in fleet.endpoints[ready:]:
        fleet.probe_failed(endpoint, allowed=1)
    assert (fleet.panic, len(fleet.usable)) == (False, ready)
    for endpoint in fleet.endpoints[:ready]:
        fleet.probe_failed(endpoint, allowed=1)
    assert (fleet.panic, len(fleet.usable)) == (True, n)
    for number, endpoint in enumerate(fleet.endpoints, start=1):
        fleet.probe_failed(endpoint, allowed=1, refused=True)
        assert len(fleet.usable) == n - number
    for endpoint in fleet.endpoints[:ready]:
        fleet.probe_succeeded(endpoint)
    assert (fleet.panic, len(fleet.usable)) == (False, ready)


def test_a_fleet_that_starts_slowly_together_does_not() -> None:
    """What counts is how much colder an endpoint is than the others: all cold at once are equals."""
    clock = Clock()
    fleet = Fleet((), SLOW_START_S, clock)
    fleet.update(found("e1", "e2"))
    assert [e.handicap for e in fleet.endpoints] == [1.0, 1.0]
    clock.now += SLOW_START_S / 2
    fleet.update(found("e1", "e2", "e3"))
    assert [e.handicap for e in fleet.endpoints] == pytest.approx([1.0, 1.0, 5.0])


@pytest.mark.parametrize(("away_s", "handicap"), [(BLIP_S - 0.1, 1.0), (BLIP_S, 1 / SLOW_START_SHARE)])
def test_an_endpoint_that_discovery_lost_for_a_moment_is_as_it_was(away_s: float, handicap: float) -> None:
    """Kubernetes takes a pod out for one missed readiness probe; back soon it is warm, and unready if it was."""
    clock = Clock()
    fleet = fleet_of("e1", "e2", "e3", clock=clock)
    fleet.probe_failed(fleet.by_name["e2"], allowed=1)
    fleet.update(found("e1"))
    clock.now += away_s
    fleet.update(found("e1", "e2", "e3"))
    assert fleet.by_name["e3"].handicap == handicap
    assert fleet.by_name["e2"].ready == (away_s >= BLIP_S)


class Model:
    """What a fleet should say, computed in the plainest way."""

    def __init__(self) -> None:
        self.charged: list[tuple[Endpoint, int]] = []

    def check(self, fleet: Fleet) -> None:
        staying = [e for e in fleet.endpoints if not e.draining]
        panic = sum(e.ready for e in staying) < PANIC_SHARE * len(staying)
        assert fleet.panic == panic
        assert fleet.usable == [e for e in staying if e.ready or (panic and not e.refused)]
        assert min((e.handicap for e in fleet.usable), default=1.0) == 1.0
        assert all(e.usable == (e in fleet.usable) for e in fleet.endpoints)
        assert len({e.name for e in fleet.endpoints}) == len(fleet.endpoints) == len(fleet.by_address)
        for endpoint in {*fleet.endpoints, *(e for e, _ in self.charged)}:
            mine = [work for e, work in self.charged if e is endpoint]
            assert (endpoint.inflight, endpoint.work) == (len(mine), sum(mine))
        for endpoint in fleet.endpoints:
            whole = endpoint.work + endpoint.work_elsewhere
            assert endpoint.load == pytest.approx(whole * endpoint.handicap, abs=1e-6)
        assert fleet.usable_load == pytest.approx(sum(e.load for e in fleet.usable), abs=1e-6)


NAMES = [f"e{i}" for i in range(6)]
members = st.lists(
    st.builds(
        Found,
        st.sampled_from(NAMES),
        st.integers(1, 6).map("10.0.0.{}:8000".format),
        st.booleans(),
        st.booleans(),
    ),
    max_size=6,
    unique_by=(lambda f: f.name, lambda f: f.address),
)
steps = st.one_of(
    members.map(lambda m: ("update", m)),
    st.tuples(st.just("charge"), st.integers(0, 100_000)),
    st.tuples(st.sampled_from(["release", "good probe", "bad probe", "connect", "503", "200", "refresh"]), st.none()),
    st.tuples(st.just("wait"), st.floats(0.1, 20)),
    st.tuples(st.just("elsewhere"), st.integers(0, 50)),
)


@given(st.lists(steps, max_size=60), st.integers(0, 2**32))
def test_nothing_in_flight_is_lost_over_any_sequence(sequence: list[tuple[str, object]], seed: int) -> None:
    """Whatever happens in whatever order, counts are those of the charges not yet released, and sums are right."""
    rng, clock, model = Random(seed), Clock(), Model()
    fleet = Fleet([(name, f"10.0.0.{i + 1}:8000") for i, name in enumerate(NAMES[:3])], SLOW_START_S, clock)
    for step, value in sequence:
        # Any endpoint that somebody may still hold, in the fleet or gone.
        known = [*fleet.endpoints, *(e for e, _ in model.charged)]
        one = rng.choice(known) if known else None
        match step, value:
            case "update", list():
                fleet.update(value)
            case "charge", int() if fleet.usable:
                chosen = rng.choice(fleet.usable)
                fleet.charge(chosen, ANSWER_WORK + value)
                model.charged.append((chosen, ANSWER_WORK + value))
            case "release", _ if model.charged:
                fleet.release(*model.charged.pop(rng.randrange(len(model.charged))))
            case "wait", float():
                clock.now += value
            case "elsewhere", int():
                fleet.set_elsewhere(
                    {e.address: (value, value * ANSWER_WORK) for e in fleet.endpoints if rng.random() < 0.5}
                )
            case "refresh", _:
                fleet.refresh()
            case "good probe", _ if one:
                fleet.probe_succeeded(one)
            case "bad probe", _ if one:
                fleet.probe_failed(one, allowed=2, refused=rng.random() < 0.5)
            case "connect", _ if one:
                fleet.connect_failed(one)
            case (("503" | "200"), _) if one:
                fleet.answered(one, int(step))
        model.check(fleet)
    while model.charged:
        fleet.release(*model.charged.pop())
    model.check(fleet)
    assert fleet.usable_load == pytest.approx(sum(e.work_elsewhere * e.handicap for e in fleet.usable), abs=1e-6)
