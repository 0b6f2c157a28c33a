"""The endpoints as this process knows them: who is ready, and how many requests each has in flight.

Rules of readiness:
1. An endpoint starts ready: refusing traffic before the first probe would turn a restart of the service into an outage.
2. `probe_failures` failed probes in a row make it unready; one good probe makes it ready again.
3. A failure that Envoy met while connecting makes it unready at once and asks for a probe.
4. A draining endpoint gets no new requests, whatever its probes say.

Load of an endpoint = requests that this process sent and has not seen end + the same of the other service processes.
"""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Endpoint:
    """One vLLM server. `usable` (ready and not draining) is derived, kept because each pick reads it."""

    name: str
    address: str
    ready: bool = True
    draining: bool = False
    inflight: int = 0
    inflight_elsewhere: int = 0
    failures: int = 0
    usable: bool = True

    @property
    def load(self) -> int:
        """Requests in flight, here and elsewhere."""
        return self.inflight + self.inflight_elsewhere


class Fleet:
    """All endpoints by name and address, and the usable ones in one list for picks."""

    def __init__(self, endpoints: tuple[tuple[str, str], ...]) -> None:
        """endpoints: (stable name, ip:port), both distinct."""
        self.endpoints = [Endpoint(name, address) for name, address in endpoints]
        self.by_name = {e.name: e for e in self.endpoints}
        self.by_address = {e.address: e for e in self.endpoints}
        self.usable = list(self.endpoints)

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

    def set_elsewhere(self, inflight: dict[str, int]) -> None:
        """Replace what the other processes have in flight; inflight: address -> requests."""
        for endpoint in self.endpoints:
            endpoint.inflight_elsewhere = inflight.get(endpoint.address, 0)

    def _set_ready(self, endpoint: Endpoint, ready: bool) -> bool:
        if endpoint.ready == ready:
            return False
        endpoint.ready = ready
        self._refresh()
        return True

    def _refresh(self) -> None:
        for endpoint in self.endpoints:
            endpoint.usable = endpoint.ready and not endpoint.draining
        self.usable = [e for e in self.endpoints if e.usable]
