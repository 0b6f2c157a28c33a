"""Rules of the pick, and of the fleet it reads."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dispatch import pick
from service.errors import NoReadyEndpoint
from service.fleet import Fleet
from service.table import Table


def fleet_of(n: int, loads: list[int] | None = None, unready: set[int] | None = None) -> Fleet:
    fleet = Fleet(tuple((f"e{i}", f"10.0.0.{i}:8000") for i in range(n)))
    for i, endpoint in enumerate(fleet.endpoints):
        endpoint.inflight = loads[i] if loads else 0
        if unready and i in unready:
            fleet.connect_failed(endpoint)
    return fleet


@st.composite
def situations(draw: st.DrawFn) -> tuple[Fleet, Table, int]:
    n = draw(st.integers(1, 8))
    fleet = fleet_of(
        n,
        draw(st.lists(st.integers(0, 50), min_size=n, max_size=n)),
        draw(st.sets(st.integers(0, n - 1))),
    )
    for endpoint in fleet.endpoints:
        endpoint.inflight_elsewhere = draw(st.integers(0, 50))
        if draw(st.booleans()) and draw(st.booleans()):
            fleet.set_draining(endpoint, True)
    # A plan may name endpoints that this fleet does not have (e8, e9).
    names = draw(st.lists(st.sampled_from([f"e{i}" for i in range(10)]), unique=True, max_size=5))
    return fleet, Table(1, 1, 0.0, {42: tuple(names)} if names else {}), draw(st.integers(0, 2**32))


@given(situations())
def test_a_pick_keeps_its_rules(situation: tuple[Fleet, Table, int]) -> None:
    """Picks are distinct and usable; targets come first by load when any is usable; the list has a spare if it can."""
    fleet, table, seed = situation
    usable = [e for e in fleet.endpoints if e.ready and not e.draining]
    if not usable:
        with pytest.raises(NoReadyEndpoint):
            pick(table, fleet, 42, Random(seed))
        return
    chosen = pick(table, fleet, 42, Random(seed))
    names = [e.name for e in chosen.endpoints]
    assert len(set(names)) == len(names)
    assert all(e in usable for e in chosen.endpoints)
    planned = table.targets.get(42)
    alive = {e.name for e in usable} & set(planned or ())
    expected_reason = "cold" if planned is None else "planned" if alive else "fallback"
    assert chosen.reason == expected_reason
    heads = len(alive) or 1
    assert len(names) == min(heads + 1, len(usable))
    if alive:
        assert set(names[:heads]) == alive
        loads = [e.load for e in chosen.endpoints[:heads]]
        assert loads == sorted(loads)


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
    fleet.set_elsewhere({"10.0.0.1:8000": 9})
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
