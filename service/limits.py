"""Reads which endpoints gateway and client allow for a request; pure.

1. The gateway's subset hint: pick from these alone. Addresses that are no endpoint of ours are ignored; a hint that
   names none of ours allows nothing.
2. In conformance runs the client's `test-epp-endpoint-selection`, `ip` or `ip:port` with commas: these, in this order,
   as far as the hint allows them too.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from service.fleet import Endpoint, Fleet
from service.messages import split_list, subset_hint
from service.pb import ext_proc_pb2 as pb
from service.telemetry import TEST_SELECTION


class Limits(NamedTuple):
    """subset: all that may be picked, None: any.  order: who is asked for, in order, None: nobody in particular."""

    subset: frozenset[Endpoint] | None = None
    order: tuple[Endpoint, ...] | None = None


NO_LIMITS = Limits()


def read_limits(fleet: Fleet, request: pb.ProcessingRequest, headers: Mapping[str, bytes]) -> Limits:
    """Return the limits of a request; headers: with TEST_SELECTION only where clients may choose."""
    hint, selection = subset_hint(request), headers.get(TEST_SELECTION)
    if hint is None and not selection:
        return NO_LIMITS
    subset = frozenset(named(fleet, hint)) if hint is not None else None
    if not selection:
        return Limits(subset)
    chosen = named(fleet, split_list(selection.decode("latin-1")))
    return Limits(subset, tuple(e for e in chosen if subset is None or e in subset))


def named(fleet: Fleet, addresses: Iterable[str]) -> list[Endpoint]:
    """Return the endpoints of these addresses in their order, each once; one without a port means all of that IP."""
    of_ip: dict[str, list[Endpoint]] = {}
    found: dict[Endpoint, None] = {}
    for address in addresses:
        endpoint = fleet.by_address.get(address)
        if endpoint is not None:
            found[endpoint] = None
        elif address:
            if not of_ip:
                for endpoint in fleet.endpoints:
                    of_ip.setdefault(endpoint.address.rpartition(":")[0].strip("[]"), []).append(endpoint)
            found.update(dict.fromkeys(of_ip.get(address.strip("[]"), ())))
    return list(found)
