"""The endpoints as this process knows them: who is ready, and how many requests each has in flight.

Rules of readiness:
1. An endpoint starts ready: refusing traffic before the first probe would turn a restart of the service into an outage.
2. `probe_failures` failed probes in a row make it unready; one good probe makes it ready again.
3. A failure that Envoy met while connecting makes it unready at once and asks for a probe.
4. A draining endpoint gets no new requests, whatever its probes say.

Load of an endpoint = work that this process sent and has not seen end + the same of the other service processes. The
work of a request is its prompt's bytes (`content-length`) plus a constant for its answer, since prompts differ by
more than a hundred times and a count of requests cannot see a giant one in front of the queue; see `request_work`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# What a request costs beside its prompt, in bytes of prompt: about 1,000 tokens. It is all that counts when no length
# is known, and then load is the number of requests.
ANSWER_WORK = 4096


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
    usable: bool = True
    load: int = 0


class Fleet:
    """All endpoints by name and address; the usable ones in one list for picks, and the load of those together."""

    def __init__(self, endpoints: tuple[tuple[str, str], ...]) -> None:
        """endpoints: (stable name, ip:port), both distinct."""
        self.endpoints = [Endpoint(name, address) for name, address in endpoints]
        self.by_name = {e.name: e for e in self.endpoints}
        self.by_address = {e.address: e for e in self.endpoints}
        self.usable = list(self.endpoints)
        self.usable_load = 0

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
        endpoint.failures = 0
        return self._set_ready(endpoint, True)

    def probe_failed(self, endpoint: Endpoint, *, allowed: int) -> bool:
        """Note a failed probe; return whether that made the endpoint unready."""
        endpoint.failures += 1
        return endpoint.failures >= allowed and self._set_ready(endpoint, False)

    def connect_failed(self, endpoint: Endpoint) -> bool:
        """Note that Envoy could not reach the endpoint; return whether that made it unready."""
        return self._set_ready(endpoint, False)

    def set_draining(self, endpoint: Endpoint, draining: bool) -> None:
        """Stop, or resume, sending new requests to the endpoint."""
        endpoint.draining = draining
        self._refresh()

    def set_elsewhere(self, inflight: Mapping[str, tuple[int, int]]) -> None:
        """Replace what the other processes have in flight; inflight: address -> (requests, work)."""
        for endpoint in self.endpoints:
            endpoint.inflight_elsewhere, endpoint.work_elsewhere = inflight.get(endpoint.address, (0, 0))
        self._refresh()

    def _add(self, endpoint: Endpoint, work: int) -> None:
        endpoint.work += work
        endpoint.load += work
        if endpoint.usable:
            self.usable_load += work

    def _set_ready(self, endpoint: Endpoint, ready: bool) -> bool:
        if endpoint.ready == ready:
            return False
        endpoint.ready = ready
        self._refresh()
        return True

    def _refresh(self) -> None:
        for endpoint in self.endpoints:
            endpoint.usable = endpoint.ready and not endpoint.draining
            endpoint.load = endpoint.work + endpoint.work_elsewhere
        self.usable = [e for e in self.endpoints if e.usable]
        self.usable_load = sum(e.load for e in self.usable)
