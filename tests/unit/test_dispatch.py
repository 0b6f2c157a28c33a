"""Rules of the pick, and of the fleet it reads."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dispatch import SPILL_SLACK, pick
from service.errors import NoReadyEndpoint
from service.fleet import ANSWER_WORK, Fleet, request_work
from service.table import Table


def fleet_of(n: int, loads: list[int] | None = None, unready: set[int] | None = None) -> Fleet:
    fleet = Fleet(tuple((f"e{i}", f"10.0.0.{i}:8000") for i in range(n)))
    for i, endpoint in enumerate(fleet.endpoints):
        for _ in range(loads[i] if loads else 0):
            fleet.charge(endpoint, ANSWER_WORK)
        if unready and i in unready:
            fleet.probe_failed(endpoint, allowed=1, refused=True)
    return fleet


@st.composite
def situations(draw: st.DrawFn) -> tuple[Fleet, Table, int]:
    n = draw(st.integers(1, 8))
    fleet = fleet_of(
        n,
        draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)),
        draw(st.sets(st.integers(0, n - 1))),
    )
    elsewhere = {e.address: draw(st.integers(0, 50)) for e in fleet.endpoints}
    fleet.set_elsewhere({address: (count, count * ANSWER_WORK) for address, count in elsewhere.items()})
    for endpoint in fleet.endpoints:
        if draw(st.booleans()) and draw(st.booleans()):
            fleet.set_draining(endpoint, True)
    # A plan may name endpoints that this fleet does not have (e8, e9).
    names = draw(st.lists(st.sampled_from([f"e{i}" for i in range(10)]), unique=True, max_size=5))
    return fleet, Table(1, 1, 0.0, {42: tuple(names)} if names else {}), draw(st.integers(0, 2**32))


@given(
    situations(),
    st.sampled_from([1.0, 1.25, 2.0, math.inf]),
    st.none() | st.sets(st.integers(0, 8)),
)
def test_a_pick_keeps_its_rules(situation: tuple[Fleet, Table, int], factor: float, within: set[int] | None) -> None:
    """Picks are distinct, usable and of the subset if there is one, which is then the whole fleet as far as it matters;
    usable targets are all listed by load, first unless load spills; one is spare.
    """
    fleet, table, seed = situation
    subset = None if within is None else {e for i, e in enumerate(fleet.endpoints) if i in within}
    usable = [e for e in fleet.endpoints if e.usable and (subset is None or e in subset)]
    if not usable:
        with pytest.raises(NoReadyEndpoint):
            pick(table, fleet, 42, Random(seed), subset=subset)
        return
    chosen = pick(table, fleet, 42, Random(seed), ANSWER_WORK, factor, subset)
    names = [e.name for e in chosen.endpoints]
    assert len(set(names)) == len(names)
    assert all(e in usable for e in chosen.endpoints)
    planned = table.targets.get(42)
    alive = {e.name for e in usable} & set(planned or ())
    if planned is None or not alive:
        assert chosen.reason == ("cold" if planned is None else "fallback")
        assert len(names) == min(2, len(usable))
        return
    listed = [e for e in chosen.endpoints if e.name in alive]
    assert {e.name for e in listed} == alive
    least = min(e.load for e in usable if e.name in alive)
    bound = factor * (sum(e.load for e in usable) / len(usable) + ANSWER_WORK) + SPILL_SLACK
    if chosen.reason == "spill":
        assert least + ANSWER_WORK > bound
        assert chosen.endpoints[0].load < least
    else:
        assert chosen.reason == "planned"
        assert listed == list(chosen.endpoints[: len(listed)])
        assert [e.load for e in listed] == sorted(e.load for e in listed)
        assert len(names) == min(len(alive) + 1, len(usable))


def test_load_beyond_the_bound_spills_to_a_less_loaded_endpoint() -> None:
    """A target above its bounded share sends the request elsewhere and stays next in the list; below it does not."""
    table, rng = Table(1, 1, 0.0, {5: ("e0",)}), Random(0)
    even, hot = fleet_of(6, [30] * 6), fleet_of(6, [40, 1, 1, 1, 1, 1])
    assert pick(table, even, 5, rng).reason == "planned"
    spilled = pick(table, hot, 5, rng)
    assert spilled.reason == "spill"
    assert spilled.endpoints[0].name != "e0"
    assert spilled.endpoints[1].name == "e0"
    assert pick(table, hot, 5, rng, ANSWER_WORK, math.inf).reason == "planned"


def test_an_idle_fleet_never_spills() -> None:
    """A single request, however large, goes to its target when nothing else is in flight."""
    table = Table(1, 1, 0.0, {5: ("e2",)})
    for prompt_bytes in (0, 1, 10**9):
        chosen = pick(table, fleet_of(6), 5, Random(1), request_work(prompt_bytes))
        assert (chosen.reason, chosen.endpoints[0].name) == ("planned", "e2")


def test_a_target_without_a_queue_never_spills() -> None:
    """A few small requests at one target stay together, though the rest of the fleet idles."""
    table, fleet = Table(1, 1, 0.0, {5: ("e2",)}), fleet_of(6, [0, 0, 8, 0, 0, 0])
    assert pick(table, fleet, 5, Random(1)).reason == "planned"


def test_load_weighs_prompts_not_requests() -> None:
    """One giant prompt outweighs many small ones."""
    fleet, table = fleet_of(2), Table(1, 1, 0.0, {5: ("e0", "e1")})
    fleet.charge(fleet.endpoints[0], request_work(500_000))
    for _ in range(20):
        fleet.charge(fleet.endpoints[1], request_work(2_000))
    assert pick(table, fleet, 5, Random(0), ANSWER_WORK, math.inf).endpoints[0].name == "e1"


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 10**6)), max_size=60),
    st.integers(0, 10**6),
    st.sets(st.integers(0, 2)),
)
def test_load_of_the_fleet_is_that_of_its_usable_endpoints(
    charges: list[tuple[int, int]], other: int, unready: set[int]
) -> None:
    """The total follows every charge, release, report of others and change of readiness, and ends at zero."""
    fleet = fleet_of(3)

    def consistent() -> bool:
        return fleet.usable_load == sum(e.work + e.work_elsewhere for e in fleet.endpoints if e.ready) and all(
            e.load == e.work + e.work_elsewhere for e in fleet.endpoints
        )

    for number, (index, work) in enumerate(charges):
        fleet.charge(fleet.endpoints[index], work)
        if number == len(charges) // 2:
            for i in unready:
                fleet.probe_failed(fleet.endpoints[i], allowed=1, refused=True)
        assert consistent()
    fleet.set_elsewhere({"10.0.0.1:8000": (1, other), "10.0.0.9:8000": (5, 5)})
    assert consistent()
    for i in unready:
        fleet.probe_succeeded(fleet.endpoints[i])
    assert fleet.usable_load == sum(w for _, w in charges) + other
    fleet.set_elsewhere({})
    for index, work in charges:
        fleet.release(fleet.endpoints[index], work)
    assert consistent()
    assert [fleet.usable_load, *(e.inflight for e in fleet.endpoints)] == [0] * 4


def test_what_hangs_at_dead_endpoints_does_not_lift_the_bound() -> None:
    """The bound is a share of what the usable endpoints hold; work stuck at unready ones is no reason to pile up."""
    table = Table(1, 1, 0.0, {5: ("e0",)})
    fleet = fleet_of(6, [20, 1, 1, 1, 500, 500])
    assert pick(table, fleet, 5, Random(0)).reason == "planned"
    fleet.connect_failed(fleet.endpoints[4])
    fleet.connect_failed(fleet.endpoints[5])
    assert pick(table, fleet, 5, Random(0)).reason == "spill"


def test_two_choices_never_takes_the_worst() -> None:
    """Of two distinct random endpoints the less loaded is taken, so the most loaded of a fleet never is."""
    fleet = fleet_of(5, [3, 9, 4, 1, 2])
    rng = Random(1)
    firsts = {pick(Table(), fleet, None, rng).endpoints[0].name for _ in range(2000)}
    assert firsts == {"e0", "e2", "e3", "e4"}


def test_cold_requests_spread_evenly_over_an_idle_fleet() -> None:
    """On equal loads the first drawn wins, and draws are uniform: no endpoint is favoured."""
    fleet, rng = fleet_of(6), Random(2)
    counts = dict.fromkeys(fleet.by_name, 0)
    for _ in range(6000):
        counts[pick(Table(), fleet, 7, rng).endpoints[0].name] += 1
    assert max(counts.values()) < 1.15 * min(counts.values())


def test_ties_between_targets_split_a_key_evenly() -> None:
    """Copies of a key share it, as placement assumed, even when nothing is in flight."""
    fleet, rng, table = fleet_of(4), Random(3), Table(1, 1, 0.0, {5: ("e1", "e3")})
    counts = {"e1": 0, "e3": 0}
    for _ in range(2000):
        counts[pick(table, fleet, 5, rng).endpoints[0].name] += 1
    assert 0.9 < counts["e1"] / counts["e3"] < 1.1


def test_load_counts_what_others_have_in_flight() -> None:
    """The load of other service processes decides as ours does."""
    fleet, table = fleet_of(3, [5, 0, 0]), Table(1, 1, 0.0, {5: ("e0", "e1")})
    assert pick(table, fleet, 5, Random(0)).endpoints[0].name == "e1"
    fleet.set_elsewhere({"10.0.0.1:8000": (9, 9 * ANSWER_WORK)})
    assert pick(table, fleet, 5, Random(0)).endpoints[0].name == "e0"
    fleet.set_elsewhere({})
    assert pick(table, fleet, 5, Random(0)).endpoints[0].name == "e1"


def test_readiness_needs_repeated_probe_failures_but_one_success() -> None:
    """Probes take an endpoint out after the allowed failures in a row and back at the first success."""
    fleet = fleet_of(2)
    endpoint = fleet.endpoints[0]
    assert not fleet.probe_failed(endpoint, allowed=2)
    assert not fleet.probe_succeeded(endpoint)
    assert not fleet.probe_failed(endpoint, allowed=2)
    assert fleet.usable == fleet.endpoints
    assert fleet.probe_failed(endpoint, allowed=2)
    assert not fleet.probe_failed(endpoint, allowed=2)
    assert [e.name for e in fleet.usable] == ["e1"]
    assert fleet.probe_succeeded(endpoint)
    assert fleet.usable == fleet.endpoints


def test_draining_is_kept_apart_from_readiness() -> None:
    """A draining endpoint stays out whatever its probes say, and comes back when draining ends."""
    fleet = fleet_of(2)
    fleet.set_draining(fleet.endpoints[0], True)
    fleet.probe_succeeded(fleet.endpoints[0])
    assert [e.name for e in fleet.usable] == ["e1"]
    fleet.set_draining(fleet.endpoints[0], False)
    assert fleet.usable == fleet.endpoints
