"""What `cacheroute status` makes of acks: how each service stands to the head, since when; one view of the fleet."""

import pytest

from planner.cli.status import instance_of, lag, merge, state_of
from service.published import FLEET_SHOWN, Ack, EndpointView, Head, Publication, decode_fleet, encode_fleet

HEAD = Head(version=5, epoch=10, created_at=500.0)
LOG = [Publication(10, 5, 500.0), Publication(10, 4, 400.0), Publication(10, 3, 300.0), Publication(9, 2, 200.0)]


def ack(version: int, epoch: int = 10, error: str = "", fleet: tuple[EndpointView, ...] = ()) -> Ack:
    return Ack("x", version, epoch, error, at=595.0, created_at=450.0, source="redis", fleet=fleet)


@pytest.mark.parametrize(
    ("said", "state", "versions", "since"),
    [
        (ack(5), "in_step", 0, 0.0),
        (ack(5, error="another plan was published as version 5 too"), "diverged", 0, 0.0),
        (ack(4), "behind", 1, 500.0),
        (ack(4, error="schema"), "refused", 1, 500.0),
        (ack(3), "behind", 2, 400.0),
        (ack(2, epoch=9), "behind", 3, 300.0),
        (ack(0, epoch=0), "behind", 4, 200.0),
        (ack(6), "ahead", 0, 0.0),
        (ack(1, epoch=11, error="the head went back to version 5 of epoch 10"), "ahead", 0, 0.0),
    ],
)
def test_where_a_service_stands(said: Ack, state: str, versions: int, since: float) -> None:
    """State, publications that it misses, and the time of the first of them."""
    assert state_of(said, HEAD) == state
    assert lag(said, HEAD, LOG) == (versions, since)
    row = instance_of(said, HEAD, LOG, now=600.0)
    assert (row["state"], row["lag_versions"]) == (state, versions)
    assert row["lag_s"] == (600.0 - since if versions else 0.0)
    assert (row["seen_s"], row["age_s"]) == (5.0, 150.0 if said.version else 0.0)


def test_a_log_that_was_cut_still_tells_a_lag() -> None:
    """Without the entries, the head itself is missed since its own time; a head without a time tells none."""
    assert lag(ack(1), HEAD, []) == (1, 500.0)
    assert lag(ack(1), HEAD, LOG[:1]) == (1, 500.0)
    assert lag(ack(1), Head(version=5, epoch=10), LOG[:2]) == (2, 400.0)


def test_no_plan_and_no_table_is_in_step() -> None:
    """A new pool's services wait for nothing."""
    row = instance_of(ack(0, epoch=0), Head(), [], now=600.0)
    assert (row["state"], row["lag_versions"], row["lag_s"], row["age_s"]) == ("in_step", 0, 0.0, 0.0)


def test_the_fleet_is_what_all_services_say() -> None:
    """Ready when all say so, draining when one does, requests summed; two addresses of one name are two rows."""
    first = (EndpointView("a", "10.0.0.1:80", True, False, 3), EndpointView("b", "10.0.0.2:80", True, False, 1))
    second = (EndpointView("a", "10.0.0.1:80", False, True, 4), EndpointView("b", "10.0.0.9:80", True, False, 5))
    rows = merge([ack(5, fleet=second), ack(5, fleet=first)])
    assert [(r["name"], r["address"], r["ready"], r["draining"], r["inflight"]) for r in rows] == [
        ("a", "10.0.0.1:80", False, True, 7),
        ("b", "10.0.0.2:80", True, False, 1),
        ("b", "10.0.0.9:80", True, False, 5),
    ]
    assert [(r["ready_instances"], r["instances"]) for r in rows] == [(1, 2), (1, 1), (1, 1)]


def test_an_ack_carries_a_bounded_fleet() -> None:
    """What is written is read back; of a huge fleet the first ones, and never what nobody wrote."""
    fleet = tuple(EndpointView(f"e{i}", f"10.0.0.1:{i}", i % 2 == 0, i % 3 == 0, i) for i in range(FLEET_SHOWN + 9))
    assert decode_fleet(encode_fleet(fleet)) == fleet[:FLEET_SHOWN]
    for text in (b"{", b"5", b"[[1]]", b'[["a","b",1,0,"x"]]', b"\xff"):
        with pytest.raises((ValueError, TypeError)):
            decode_fleet(text)
