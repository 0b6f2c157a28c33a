"""Rules of what an EndpointSlice says, and of what several of them say of one server."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.discovery.sighting import settle
from service.discovery.slices import read_slices
from service.fleet import Found

HTTP = {"name": "http", "port": 8000, "protocol": "TCP"}


def endpoint(ip: str, pod: str = "", **conditions: bool | None) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "namespace": "prod", "uid": f"uid-{pod}"}} if pod else {}
    return {"addresses": [ip], "conditions": conditions, "nodeName": "node-1", "zone": "z1", **target}


def slice_of(
    *endpoints: object, ports: object = (HTTP,), family: str = "IPv4", name: str = "vllm-x1"
) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "prod", "labels": {"kubernetes.io/service-name": "vllm"}}
    return {"metadata": metadata, "addressType": family, "endpoints": list(endpoints), "ports": ports}


def read(*slices: object, port: str = "") -> tuple[list[tuple[str, str, bool]], list[str]]:
    """Return (name, address, draining) and the causes of what was skipped."""
    seen, skipped = read_slices(slices, port)  # type: ignore[arg-type]
    assert all(s.what and s.remedy for s in skipped)
    return [f[:3] for f in seen], [s.cause for s in skipped]


def test_an_endpoint_is_called_by_its_pod() -> None:
    """The pod's name, else the host name, else the address; addresses are ip:port."""
    nameless = {**endpoint("10.0.0.3"), "hostname": "vllm-2"}
    seen, skipped = read(slice_of(endpoint("10.0.0.1", "vllm-0"), nameless, endpoint("10.0.0.4")))
    assert seen == [
        ("vllm-0", "10.0.0.1:8000", False),
        ("vllm-2", "10.0.0.3:8000", False),
        ("10.0.0.4:8000", "10.0.0.4:8000", False),
    ]
    assert skipped == []


@pytest.mark.parametrize(
    ("conditions", "seen"),
    [
        ({}, "serving"),
        ({"ready": None}, "serving"),
        ({"ready": True, "serving": True, "terminating": False}, "serving"),
        ({"ready": False, "serving": False, "terminating": False}, "absent"),
        ({"ready": False}, "absent"),
        ({"ready": False, "serving": True, "terminating": True}, "draining"),
        ({"ready": False, "serving": False, "terminating": True}, "draining"),
        ({"ready": True, "serving": True, "terminating": True}, "draining"),
    ],
)
def test_conditions(conditions: dict[str, bool | None], seen: str) -> None:
    """Ready or unsaid serves, terminating drains whatever else is said, not ready yet is left out."""
    said, skipped = read(slice_of(endpoint("10.0.0.1", "vllm-0", **conditions)))
    expected = {"serving": [("vllm-0", "10.0.0.1:8000", False)], "draining": [("vllm-0", "10.0.0.1:8000", True)]}
    assert (said, skipped) == (expected.get(seen, []), [])


METRICS = {"name": "metrics", "port": 9400, "protocol": "TCP"}


@pytest.mark.parametrize(
    ("ports", "wanted", "names"),
    [
        ([HTTP], "", ["vllm-0"]),
        ([HTTP, METRICS], "http", ["vllm-0"]),
        ([HTTP, METRICS], "8000", ["vllm-0"]),
        ([HTTP, METRICS], "", ["vllm-0:8000", "vllm-0:9400"]),
        ([{"port": 8000}], "", ["vllm-0"]),
        ([HTTP, {"name": "dns", "port": 53, "protocol": "UDP"}], "", ["vllm-0"]),
        ([{"name": f"p{i}", "port": 8000 + i} for i in range(8)], "", [f"vllm-0:{8000 + i}" for i in range(8)]),
    ],
)
def test_ports(ports: object, wanted: str, names: list[str]) -> None:
    """The named port, else the only one over TCP; each of several is an endpoint of its own."""
    seen, skipped = read(slice_of(endpoint("10.0.0.1", "vllm-0"), ports=ports), port=wanted)
    assert [name for name, _, _ in seen] == names
    assert all(address.startswith("10.0.0.1:") for _, address, _ in seen)
    assert skipped == []


ONE = endpoint("10.0.0.1", "vllm-0")


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (slice_of(ONE, ports=None), "no_port"),
        (slice_of(ONE, ports=[]), "no_port"),
        (slice_of(ONE, ports=[{"name": "http", "port": None}]), "no_port"),
        (slice_of(ONE, ports=[METRICS]), "no_port"),
        (slice_of({"addresses": []}), "no_address"),
        (slice_of({"addresses": None}), "no_address"),
        (slice_of({}), "no_address"),
        (slice_of(endpoint("vllm-0.example", "vllm-0")), "no_address"),
        (slice_of(endpoint("vllm.example.com"), family="FQDN"), "no_address"),
        (slice_of("not an endpoint"), "malformed"),
        (slice_of(ONE, ports="http"), "malformed"),
        ({"endpoints": 3, "addressType": "IPv4", "ports": [HTTP]}, "malformed"),
        ([], "malformed"),
        (None, "malformed"),
    ],
)
def test_what_cannot_be_picked_is_skipped_and_told(bad: object, cause: str) -> None:
    """A slice or endpoint that names no address for Envoy is left out with its cause; the others are used."""
    good = slice_of(endpoint("10.0.0.2", "vllm-1"), name="vllm-x2")
    assert read(bad, good, port="http") == ([("vllm-1", "10.0.0.2:8000", False)], [cause])


@pytest.mark.parametrize("ports", [None, []])
@pytest.mark.parametrize("endpoints", [None, []])
def test_the_placeholder_of_a_service_scaled_to_nothing_is_fine(ports: object, endpoints: object) -> None:
    """Kubernetes keeps a slice without endpoints and ports for a service that selects nobody."""
    assert read({**slice_of(), "endpoints": endpoints, "ports": ports}) == ([], [])


def settled(*found: Found) -> tuple[dict[str, tuple[str, bool]], int]:
    chosen, skipped = settle(found)
    return {f.name: (f.address, f.draining) for f in chosen}, len(skipped)


def test_two_sights_of_one_endpoint_are_one() -> None:
    """While Kubernetes moves an endpoint to another slice it stands in both; nothing is wrong with that."""
    one = Found("vllm-0", "10.0.0.1:8000")
    assert settled(one, one) == ({"vllm-0": ("10.0.0.1:8000", False)}, 0)
    assert settled(one._replace(draining=True), one) == ({"vllm-0": ("10.0.0.1:8000", False)}, 0)


def test_the_pod_that_serves_has_the_name() -> None:
    """A StatefulSet's pod that ends and its successor share the name; the successor gets it, without a complaint."""
    old, new = Found("vllm-0", "10.0.0.1:8000", draining=True), Found("vllm-0", "10.0.0.9:8000")
    assert settled(old, new) == settled(new, old) == ({"vllm-0": ("10.0.0.9:8000", False)}, 0)
    reused = Found("vllm-1", "10.0.0.1:8000")
    assert settled(old, reused) == ({"vllm-1": ("10.0.0.1:8000", False)}, 0)


def test_a_dual_stack_pod_is_one_endpoint_by_ipv4() -> None:
    """The slices of the two families list each pod once each; no conflict, and IPv4 is used."""
    assert settled(Found("vllm-0", "[fd00::1]:8000"), Found("vllm-0", "10.0.0.1:8000")) == (
        {"vllm-0": ("10.0.0.1:8000", False)},
        0,
    )


def test_a_conflict_is_settled_and_told() -> None:
    """Two servers of one name, or one address under two names: the lower one is used and it is told."""
    assert settled(Found("a", "10.0.0.2:1"), Found("a", "10.0.0.1:1")) == ({"a": ("10.0.0.1:1", False)}, 1)
    assert settled(Found("b", "10.0.0.1:1"), Found("a", "10.0.0.1:1")) == ({"a": ("10.0.0.1:1", False)}, 1)


@given(
    st.lists(
        st.builds(
            Found,
            st.sampled_from("abc"),
            st.sampled_from(["10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:1", "[fd00::2]:1"]),
            st.booleans(),
        ),
        max_size=8,
    ),
    st.randoms(),
)
def test_all_processes_settle_alike(found: list[Found], rng: Any) -> None:
    """Names and addresses are distinct afterwards, and the order in which they were seen does not matter."""
    chosen, _ = settle(found)
    assert len({f.name for f in chosen}) == len({f.address for f in chosen}) == len(chosen)
    assert set(chosen) <= set(found)
    shuffled = list(found)
    rng.shuffle(shuffled)
    assert settle(shuffled)[0] == chosen
