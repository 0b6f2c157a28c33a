"""What a source of endpoints saw at one moment, and how several sights of one endpoint become one; pure.

Rules of `settle`, so that names and addresses are distinct and all processes come to the same fleet:
1. Of two that are equal, one stays: while Kubernetes moves an endpoint between slices, both list it.
2. Of two with one name, IPv4 comes before IPv6: a dual-stack service lists each server once a family, and updates the
   two one after the other.
3. Then the one that is not draining stays: a pod that was replaced ends under its name.
4. Then the lower address and name. Such a conflict has no good answer, so it is told.
"""

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple, Protocol

from service.fleet import Found


class Skipped(NamedTuple):
    """A part of an answer that is not used: why, as a short word for metrics, in words, and what to do about it."""

    cause: str
    what: str
    remedy: str


class Sighting(NamedTuple):
    """Everything that a source sees; `found` may repeat names and addresses."""

    found: tuple[Found, ...]
    skipped: tuple[Skipped, ...] = ()


class Source(Protocol):
    """Somewhere that knows the endpoints."""

    async def find(self) -> Sighting:
        """Ask now; raise DiscoveryFailed when there is no answer to use."""

    async def wait(self) -> Sighting:
        """Return the next sighting when it is due or something has changed; raise DiscoveryFailed."""

    async def close(self) -> None:
        """Let connections go."""


def address_of(ip: str, port: int) -> str:
    """Return `ip:port` or `[v6]:port` as Envoy writes it; raise ValueError for anything but an IP address."""
    parsed = ip_address(ip)
    return f"[{parsed}]:{port}" if isinstance(parsed, IPv6Address) else f"{parsed}:{port}"


def settle(found: Iterable[Found]) -> tuple[list[Found], list[Skipped]]:
    """Return endpoints with distinct names and addresses, by name, and what gave way to them without good reason."""
    by_name: dict[str, Found] = {}
    by_address: dict[str, Found] = {}
    skipped = []
    for one in sorted(found, key=lambda f: (_is_v6(f), f.draining, f.address, f.name, not f.vouched)):
        rival = by_name.get(one.name) or by_address.get(one.address)
        if rival is None:
            by_name[one.name] = by_address[one.address] = one
        elif one[:2] != rival[:2] and not one.draining and _is_v6(one) == _is_v6(rival):
            what = f"{one.name} at {one.address} and {rival.name} at {rival.address} cannot both be"
            remedy = "give each server a name and an address of its own; until then the second is used"
            skipped.append(Skipped("duplicate", what, remedy))
    return sorted(by_name.values()), skipped


def _is_v6(found: Found) -> bool:
    return found.address.startswith("[")
