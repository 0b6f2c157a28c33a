"""Endpoints in Kubernetes EndpointSlices (discovery.k8s.io/v1); pure.

1. Name: the pod's, else the host name, else the address. A StatefulSet's pod keeps its name over restarts.
2. Port: the one named in `--discover`, by name or number; without it the slice's only TCP port. With several, each port
   is an endpoint of its own, called `pod:port`, as in an InferencePool with several target ports.
3. Ready (left out means yes): in the fleet. Terminating: in the fleet, draining. Else, not ready yet: left out.
4. What Envoy could not pick (no port, no address, a DNS name for an address) is skipped and told. A slice without any
   endpoint is not told: Kubernetes keeps an empty one, without ports, for a service scaled to nothing.

Source: the API's own comments on EndpointSlice. Only the first of an endpoint's addresses counts there, and here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from service.discovery.sighting import Skipped, address_of
from service.fleet import Found


def read_slices(slices: Iterable[Mapping[str, Any]], port: str) -> tuple[list[Found], list[Skipped]]:
    """Return the endpoints of slices as their JSON says, with repeats, and what of them cannot be used; never raise.

    port: name or number; empty: any.
    """
    found, skipped = list[Found](), list[Skipped]()
    for one in slices:
        try:
            _read(one, port, found, skipped)
        except (AttributeError, KeyError, TypeError, ValueError) as exc:
            what = f"EndpointSlice {_name(one)} is not what the API describes: {type(exc).__name__} {exc}"
            skipped.append(Skipped("malformed", what, "see who writes it: kubectl get endpointslice -o yaml"))
    return found, skipped


def _read(one: Mapping[str, Any], port: str, found: list[Found], skipped: list[Skipped]) -> None:
    endpoints = one.get("endpoints") or ()
    if not endpoints:
        return
    if one.get("addressType") not in {"IPv4", "IPv6"}:
        what = f"EndpointSlice {_name(one)} has addresses of type {one.get('addressType')}"
        skipped.append(Skipped("no_address", what, "Envoy picks by IP: use a service that selects pods"))
        return
    ports = _ports(one, port)
    if not ports:
        told = ", ".join(str(p.get("name") or p.get("port")) for p in one.get("ports") or ()) or "none"
        what = f"EndpointSlice {_name(one)} has no port {port or 'number over TCP'} (ports: {told})"
        skipped.append(
            Skipped("no_port", what, "name a port of the service: --discover k8s:NAMESPACE/SERVICE:PORT-NAME")
        )
        return
    for endpoint in endpoints:
        conditions = endpoint.get("conditions") or {}
        terminating = conditions.get("terminating") is True
        if conditions.get("ready") is False and not terminating:
            continue
        try:
            addresses = [address_of(endpoint["addresses"][0], number) for number in ports]
        except (IndexError, KeyError, TypeError, ValueError):
            what = f"EndpointSlice {_name(one)} has an endpoint without an IP address"
            skipped.append(Skipped("no_address", what, "see who writes it: kubectl get endpointslice -o yaml"))
            continue
        pod = (endpoint.get("targetRef") or {}).get("name") or endpoint.get("hostname")
        for number, address in zip(ports, addresses, strict=True):
            name = address if not pod else pod if len(ports) == 1 else f"{pod}:{number}"
            found.append(Found(name, address, draining=terminating))


def _ports(one: Mapping[str, Any], wanted: str) -> list[int]:
    ports = [p for p in one.get("ports") or () if p.get("port") and p.get("protocol", "TCP") == "TCP"]
    if wanted:
        ports = [p for p in ports if p.get("name") == wanted or str(p["port"]) == wanted]
    return sorted({p["port"] for p in ports})


def _name(one: object) -> str:
    metadata = one.get("metadata") if isinstance(one, Mapping) else None
    return str(metadata.get("name")) if isinstance(metadata, Mapping) else "without a name"
