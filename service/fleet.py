"""The endpoints as this process knows them: who is ready, and how many requests each has in flight.

Rules of readiness:
1. An endpoint starts ready: refusing traffic before the first probe would turn a restart of the service into an outage.
2. `probe_failures` failed probes in a row make it unready; one good probe makes it ready again.
3. A failure that Envoy met while connecting makes it unready at once and asks for a probe.
4. `GATEWAY_FAULTS` answers of 502, 503 or 504 in a row make it unready until a good probe. Other 5xx are about one
   request (vLLM's 500) and say nothing about the next.
   Rules 3 and 4 take nobody out who would leave less than half of the endpoints that are not draining: what Envoy meets
   everywhere is no fault of one endpoint.
5. Panic: when less than `PANIC_SHARE` of those are ready, the others are used as well, except where nobody listens at
   all (connection refused). A probe path that is wrong, a network policy that blocks nobody but us, or engines too busy
   to answer probes must not turn into an outage: then the fault is rather ours, and Envoy finds out who serves.
6. A draining endpoint gets no new requests, whatever its probes say.
7. One that joins and that nobody vouches for (DNS may list a pod that still loads its model) waits for a good probe.

Membership: `update` takes what discovery found. An endpoint is the same one while name and address stay; one that is
gone keeps the count of its requests in flight until they end, and has it still when it comes back meanwhile. Back
within `BLIP_S` it is as it was: Kubernetes takes a pod out for one missed readiness probe.

Slow start: an endpoint that joins, or becomes ready again, has a cold cache. Over `slow_start_s` its load counts for
more than it is, ten times at first, so that it gets a share that grows instead of all requests at once (the weight
ramp of Envoy's slow start, for loads instead of weights). Who is there at the start of the process is taken as warm,
and so is who was unready for less than `BLIP_S`: no engine restarts that fast, so its cache is still there. When all
start slowly, nobody does: what counts is how much colder than the others.

Load of an endpoint = work that this process sent and has not seen end + the same of the other service processes. The
work of a request is its prompt's bytes (`content-length`) plus a constant for its answer, since prompts differ by
more than a hundred times and a count of requests cannot see a giant one in front of the queue; see `request_work`.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# What a request costs beside its prompt, in bytes of prompt: about 1,000 tokens. It is all that counts when no length
# is known, and then load is the number of requests.
ANSWER_WORK = 4096
# The share that an endpoint starts with; Envoy's default for its own slow start.
SLOW_START_SHARE = 0.1
BLIP_S = 5.0
PANIC_SHARE = 0.2
# Envoy's default for consecutive gateway failures, and the statuses that it counts as such.
GATEWAY_FAULTS = 5
GATEWAY_STATUSES = frozenset({502, 503, 504})


def request_work(prompt_bytes: int) -> int:
    """Return the work of a request whose body has this length, 0 when unknown; bytes."""
    return ANSWER_WORK + prompt_bytes


@dataclass(slots=True, eq=False)
class Endpoint:
    """One vLLM server. `usable` (ready and not draining) and `load` (all work) are derived, kept for picks to read."""

    name: str
    address: str
    ready: bool = True
    draining: bool = False
    inflight: int = 0
    work: int = 0
    inflight_elsewhere: int = 0
    work_elsewhere: int = 0
    failures: int = 0
    # Nobody listens there, as far as the last failed probe knows.
    refused: bool = False
    gateway_faults: int = 0
    # Since when it is warming up, on the fleet's clock; None: warm.
    joined_s: float | None = None
    unready_since_s: float = 0.0
    left_s: float = -math.inf
    handicap: float = 1.0
    usable: bool = True
    load: float = 0.0


class Found(NamedTuple):
    """One endpoint as discovery sees it; address is ip:port.  vouched: known to serve, so it needs no probe first."""

    name: str
    address: str
    draining: bool = False
    vouched: bool = True


class Changes(NamedTuple):
    """What an update did, by endpoint name; `moved` ones kept their name and have another address."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    moved: tuple[str, ...]


class Fleet:
    """All endpoints by name and address; the usable ones in one list for picks, and the load of those together."""

    def __init__(
        self,
        endpoints: Iterable[tuple[str, str]] = (),
        slow_start_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """endpoints: (stable name, ip:port), both distinct.  slow_start_s: 0: none."""
        self._slow_start_s, self._clock = slow_start_s, clock
        # Whether it is known who belongs here; not so while a discovery has never succeeded.
        self.known = True
        self.panic = False
        self.endpoints = [Endpoint(name, address) for name, address in endpoints]
        self._gone: list[Endpoint] = []
        self._index()

    def _index(self) -> None:
        self.by_name = {e.name: e for e in self.endpoints}
        self.by_address = {e.address: e for e in self.endpoints}
        assert len(self.by_name) == len(self.by_address) == len(self.endpoints), "names and addresses are distinct"
        self.refresh()

    def update(self, found: Iterable[Found], *, warm: bool = False) -> Changes:
        """Make the fleet what was found, names and addresses both distinct; return what changed.

        warm: take new ones as ready and warm, as at the start of the process.
        """
        before, gone, now = self.by_name, {(e.name, e.address): e for e in self._gone}, self._clock()
        endpoints, added, moved = list[Endpoint](), list[str](), list[str]()
        for name, address, draining, vouched in found:
            known = before.get(name)
            if known is None or known.address != address:
                (added if known is None else moved).append(name)
                known = gone.get((name, address)) or Endpoint(name, address)
                if now - known.left_s >= BLIP_S:
                    known.ready, known.failures, known.gateway_faults = vouched or warm, 0, 0
                    known.refused = not known.ready
                    known.joined_s = None if warm else now
                    # However soon its first good probe comes, it is cold then.
                    known.unready_since_s = -math.inf
            known.draining = draining
            endpoints.append(known)
        staying = {id(e) for e in endpoints}
        left = [e for e in (*self.endpoints, *self._gone) if id(e) not in staying]
        for endpoint in left:
            endpoint.usable = False
        for endpoint in self.endpoints:
            if id(endpoint) not in staying:
                endpoint.left_s = now
        names = {e.name for e in endpoints}
        removed = tuple(e.name for e in self.endpoints if e.name not in names)
        self.endpoints, self._gone = endpoints, [e for e in left if e.inflight or now - e.left_s < BLIP_S]
        self._index()
        return Changes(tuple(added), removed, tuple(moved))

    def charge(self, endpoint: Endpoint, work: int) -> None:
        """Count one more request in flight."""
        endpoint.inflight += 1
        self._add(endpoint, work)

    def release(self, endpoint: Endpoint, work: int) -> None:
        """Count a request in flight no more; called once for each `charge`, with its work."""
        endpoint.inflight -= 1
        self._add(endpoint, -work)

    def probe_succeeded(self, endpoint: Endpoint) -> bool:
        """Note a good probe; return whether that made the endpoint ready."""
        endpoint.failures, endpoint.refused = 0, False
        return self._set_ready(endpoint, True)

    def probe_failed(self, endpoint: Endpoint, *, allowed: int, refused: bool = False) -> bool:
        """Note a failed probe; return whether that made the endpoint unready.  refused: nobody listens there."""
        endpoint.failures += 1
        if refused != endpoint.refused:
            endpoint.refused = refused
            self.refresh()
        return endpoint.failures >= allowed and self._set_ready(endpoint, False)

    def connect_failed(self, endpoint: Endpoint) -> bool:
        """Note that Envoy could not reach the endpoint; return whether that made it unready."""
        return self._may_go(endpoint) and self._set_ready(endpoint, False)

    def answered(self, endpoint: Endpoint, status: int) -> bool:
        """Note the status of an endpoint's response, 0 when unknown; return whether that made the endpoint unready."""
        if status not in GATEWAY_STATUSES:
            endpoint.gateway_faults = 0
            return False
        endpoint.gateway_faults += 1
        if endpoint.gateway_faults < GATEWAY_FAULTS:
            return False
        return self._may_go(endpoint) and self._set_ready(endpoint, False)

    def _may_go(self, endpoint: Endpoint) -> bool:
        return endpoint.usable and 2 * (len(self.usable) - 1) >= self._staying

    def set_draining(self, endpoint: Endpoint, draining: bool) -> None:
        """Stop, or resume, sending new requests to the endpoint."""
        endpoint.draining = draining
        self.refresh()

    def set_elsewhere(self, inflight: Mapping[str, tuple[int, int]]) -> None:
        """Replace what the other processes have in flight; inflight: address -> (requests, work)."""
        for endpoint in self.endpoints:
            endpoint.inflight_elsewhere, endpoint.work_elsewhere = inflight.get(endpoint.address, (0, 0))
        self.refresh()

    def refresh(self) -> None:
        """Compute anew what is derived; called now and then too, so that slow starts go on."""
        now = self._clock()
        staying = [e for e in self.endpoints if not e.draining]
        ready = sum(e.ready for e in staying)
        self.panic = ready < PANIC_SHARE * len(staying)
        for endpoint in self.endpoints:
            endpoint.usable = not endpoint.draining and (endpoint.ready or (self.panic and not endpoint.refused))
            endpoint.handicap = self._handicap(endpoint, now)
        self.usable = [e for e in self.endpoints if e.usable]
        least = min((e.handicap for e in self.usable), default=1.0)
        for endpoint in self.endpoints:
            endpoint.handicap /= least
            endpoint.load = (endpoint.work + endpoint.work_elsewhere) * endpoint.handicap
        self.usable_load = sum(e.load for e in self.usable)
        self._staying = len(staying)

    def _handicap(self, endpoint: Endpoint, now: float) -> float:
        if endpoint.joined_s is None or not self._slow_start_s:
            return 1.0
        share = (now - endpoint.joined_s) / self._slow_start_s
        if share >= 1:
            endpoint.joined_s = None
            return 1.0
        return 1 / max(share, SLOW_START_SHARE)

    def _add(self, endpoint: Endpoint, work: int) -> None:
        endpoint.work += work
        load = work * endpoint.handicap
        endpoint.load += load
        if endpoint.usable:
            self.usable_load += load

    def _set_ready(self, endpoint: Endpoint, ready: bool) -> bool:
        if endpoint.ready == ready:
            return False
        endpoint.ready, endpoint.gateway_faults, now = ready, 0, self._clock()
        if not ready:
            endpoint.unready_since_s = now
        elif now - endpoint.unready_since_s >= BLIP_S:
            endpoint.joined_s = now
        self.refresh()
        return True
