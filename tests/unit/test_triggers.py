"""When an endpoint counts as lost or back, and when load or copies call for a cycle."""

from array import array

import pytest

from planner.admission import Rules
from planner.rates import KeyRates
from planner.triggers import Presence, Pressure, pressure_of
from service.plan import Plan
from service.published import FLEET_SHOWN, Ack, EndpointView

RULES = Rules(slots_per_endpoint=2, replica_cap_rps=10.0)


def ack(**ready: bool) -> Ack:
    views = tuple(EndpointView(name, "10.0.0.1:80", is_ready, False, 0) for name, is_ready in ready.items())
    return Ack("x", 1, 1, "", 0.0, fleet=views)


def draining(name: str) -> Ack:
    return Ack("x", 1, 1, "", 0.0, fleet=(EndpointView(name, "10.0.0.1:80", True, True, 0),))


def looked(presence: Presence, *acks: Ack, at: float) -> tuple[str, ...]:
    presence.look(acks, at)
    return presence.lost


def test_an_endpoint_is_lost_after_a_while_without_a_break() -> None:
    """Away for less moves nobody, and coming back in between begins the time anew; back needs as long."""
    presence = Presence(("a", "b"), 10.0)
    assert looked(presence, ack(a=False, b=True), at=0) == ()
    assert presence.unsure
    assert looked(presence, ack(a=False, b=True), at=9) == ()
    assert looked(presence, ack(a=True, b=True), at=9.5) == ()
    assert not presence.unsure
    assert looked(presence, ack(a=False, b=True), at=10) == ()
    assert looked(presence, ack(a=False, b=True), at=20) == ("a",)
    assert looked(presence, ack(a=True, b=True), at=21) == ("a",)
    assert looked(presence, ack(a=False, b=True), at=30) == ("a",)
    assert looked(presence, ack(a=True, b=True), at=31) == ("a",)
    assert looked(presence, ack(a=True, b=True), at=41) == ()


def test_one_service_that_reaches_it_is_enough() -> None:
    """An endpoint is away only when all that know it say so; draining is away."""
    presence = Presence(("a", "b"), 0.0)
    presence.look([ack(a=False), ack(a=True)], 0)
    presence.look([ack(a=False), ack(a=True)], 1)
    assert presence.lost == ()
    presence.look([ack(a=False), draining("a")], 2)
    assert presence.lost == ("a",)


def test_what_no_service_ever_knew_is_there_and_what_vanished_is_not() -> None:
    """Services that run behind, or none at all, lose nothing; one that all of them had and have no more is away."""
    presence = Presence(("a", "b"), 0.0)
    assert looked(presence, ack(a=True), at=0) == ()
    assert looked(presence, at=1) == ()
    assert looked(presence, ack(a=True, b=True), at=2) == ()
    assert looked(presence, ack(a=True), at=3) == ("b",)
    assert looked(presence, at=4) == ("b",), "nobody lives: nothing changes"


def test_a_fleet_that_is_shown_in_part_says_nothing_of_the_rest() -> None:
    """Acks list the first few hundred endpoints; those behind are not gone."""
    presence = Presence(("a",), 0.0)
    presence.look([ack(a=True)], 0)
    many = ack(**{f"e{i}": True for i in range(FLEET_SHOWN)})
    assert looked(presence, many, at=1) == ()


def test_a_new_leader_goes_on_from_the_lost_ones() -> None:
    """What the planner before found lost stays so until it is back."""
    presence = Presence(("a", "b"), 5.0, lost=("a", "gone"))
    assert looked(presence, ack(a=False, b=True), at=0) == ("a",)
    assert looked(presence, ack(a=True, b=True), at=1) == ("a",)
    assert looked(presence, ack(a=True, b=True), at=6) == ()


def plan_of(*rows: tuple[int, ...]) -> Plan:
    offsets, targets = [0], list[int]()
    for row in rows:
        targets += row
        offsets.append(len(targets))
    keys = array("Q", range(len(rows)))
    return Plan(("a", "b"), keys, array("I", offsets), array("I", targets), array("f", [1.0] * len(rows)), key_check=0)


def test_pressure_is_load_and_copies_at_todays_rates() -> None:
    """Loads are those of the plan's targets with all else dealt evenly; copies those that the replica cap calls for."""
    rates = KeyRates.of(range(4), [6.0, 2.0, 3.0, 1.0])
    assert pressure_of(rates, plan_of((0,), (1,)), ("a", "b"), RULES) == Pressure(8 / 6, 0)
    hot = KeyRates.of(range(4), [25.0, 15.0, 0.0, 0.0])
    assert pressure_of(hot, plan_of((0, 1), (1,)), ("a", "b"), RULES) == Pressure(27.5 / 20, 1)
    capped = Rules(slots_per_endpoint=2, replica_cap_rps=10.0, copies_max=1)
    assert pressure_of(hot, plan_of((0,), (1,)), ("a", "b"), capped).short_of_copies == 0
    for nothing in (None, plan_of()):
        assert pressure_of(rates, nothing, ("a", "b"), RULES) == Pressure()


@pytest.mark.parametrize(
    ("now", "before", "word"),
    [
        (Pressure(1.3, 0), Pressure(1.0, 0), "imbalance"),
        (Pressure(1.3, 0), Pressure(1.27, 0), ""),
        (Pressure(1.05, 0), Pressure(1.0, 0), ""),
        (Pressure(1.0, 1), Pressure(1.0, 0), "copies"),
        (Pressure(1.0, 1), Pressure(1.0, 1), ""),
    ],
)
def test_only_what_became_worse_calls(now: Pressure, before: Pressure, word: str) -> None:
    """What the last cycle could not mend calls for no other, and neither does what is within the bound."""
    assert now.calls(before, 1.1).partition(":")[0] == word
