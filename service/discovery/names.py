"""Endpoints from DNS: the address records of a headless service, or its SRV records.

1. `dns:HOST:PORT` asks for the addresses. An endpoint is called by its address: nothing stabler is known of it.
2. `srv:NAME` asks for SRV records, then for the addresses of the targets that the answer does not bring along. An
   endpoint is called by the first label of its target (`vllm-0`), which a StatefulSet keeps over restarts; by label and
   port where one target has several ports. Of several addresses of a target one is taken, the lowest.
3. IPv6 addresses are asked for where there is no IPv4 one: a dual-stack service lists each server in both families, and
   the records do not say which two are one.
4. A query that fails leaves its last answer in force, so that a name server with a hole in its view removes nobody. An
   answer without any endpoint fails as a whole, and the last fleet stays: DNS cannot tell "none" from "not known".
5. The next question comes when the shortest TTL is over, but not before `discover_interval_s`, nor after TTL_MAX_S.
"""

import asyncio
import random
from collections import defaultdict

import dns.asyncresolver
import dns.exception
import dns.name
import dns.rdatatype
import dns.resolver

from service.discovery.sighting import Sighting, Skipped, address_of
from service.errors import DiscoveryFailed
from service.fleet import Found
from service.settings import ServiceSettings, parse_discover, split_address

# A server is asked again after a second without an answer, and given up after three.
TRY_S, LIFETIME_S = 1.0, 3.0
TTL_MAX_S = 300.0
# Queries in flight at a time: a fleet of hundreds must not flood its name server.
PARALLEL = 16

REMEDIES = {
    "timeout": "check that the name server can be reached (CACHEROUTE_DNS_SERVER, else /etc/resolv.conf)",
    "server": "look at the name server's log; a dot at the end of the name skips the search list of /etc/resolv.conf",
    "nxdomain": "check the name in --discover; a Kubernetes service must be headless (clusterIP: None)",
    "empty": "check that the service selects ready pods; for srv, that its port has the name that --discover asks for",
}

A, AAAA, SRV = dns.rdatatype.A, dns.rdatatype.AAAA, dns.rdatatype.SRV


class Names:
    """One name in DNS that stands for the fleet."""

    def __init__(self, settings: ServiceSettings) -> None:
        """settings: `discover` is of the source dns or srv."""
        self._source, self._host, port = parse_discover(settings.discover)
        self._port = int(port or 0)
        self._server = split_address(settings.dns_server) if settings.dns_server else None
        self._interval_s = settings.discover_interval_s
        self._ttl_s = TTL_MAX_S
        self._due_s = 0.0
        self._parallel = asyncio.Semaphore(PARALLEL)
        # The last good answer by what was asked for.
        self._last: dict[tuple[str, dns.rdatatype.RdataType], list[str]] = {}

    async def find(self) -> Sighting:
        """Ask now; raise DiscoveryFailed when no endpoint is known."""
        self._ttl_s, self._due_s = TTL_MAX_S, 0.0
        resolver, skipped = self._resolver(), list[Skipped]()
        find = self._by_address if self._source == "dns" else self._by_target
        found = await find(resolver, skipped)
        if not found:
            raise DiscoveryFailed(*(skipped[0] if skipped else _skipped("empty", self._host)))
        self._due_s = self._interval_s if skipped else max(self._ttl_s, self._interval_s)
        return Sighting(tuple(found), tuple(skipped))

    async def wait(self) -> Sighting:
        """Ask again when the answers have ended, at once after a failure; raise DiscoveryFailed as `find` does."""
        # A tenth earlier or later: the processes of one rollout shall not ask in chorus for ever.
        await asyncio.sleep(self._due_s * random.uniform(0.9, 1.1))
        return await self.find()

    async def close(self) -> None:
        """Nothing is held between questions."""

    def _resolver(self) -> dns.asyncresolver.Resolver:
        # Made anew for each question: /etc/resolv.conf may change, and may be there later than we are.
        try:
            resolver = dns.asyncresolver.Resolver(configure=self._server is None)
        except (dns.exception.DNSException, OSError) as exc:
            raise DiscoveryFailed("server", f"no name server is known: {exc}", REMEDIES["timeout"]) from exc
        if self._server is not None:
            resolver.nameservers, resolver.port = [self._server[0]], self._server[1]
        resolver.timeout, resolver.lifetime = TRY_S, LIFETIME_S
        return resolver

    async def _by_address(self, resolver: dns.asyncresolver.Resolver, skipped: list[Skipped]) -> list[Found]:
        ips = await self._addresses(resolver, self._host, skipped)
        return [Found(address, address, vouched=False) for address in (address_of(ip, self._port) for ip in ips)]

    async def _by_target(self, resolver: dns.asyncresolver.Resolver, skipped: list[Skipped]) -> list[Found]:
        answer = await self._ask(resolver, self._host, SRV)
        ports: dict[str, set[int]] = defaultdict(set)
        for record in answer:
            ports[_text(record.target)].add(record.port)
        beside: dict[str, list[str]] = defaultdict(list)
        for rrset in answer.response.additional:
            if rrset.rdtype in {A, AAAA}:
                self._ttl_s = min(self._ttl_s, rrset.ttl)
                beside[_text(rrset.name)] += [record.address for record in rrset]
        hosts = sorted(host for host in ports if host != ".")
        apart = [host for host in hosts if host not in beside]
        asked = await asyncio.gather(*(self._addresses(resolver, host, skipped) for host in apart))
        ips = {**beside, **dict(zip(apart, asked, strict=True))}
        self._last = {(host, kind): last for (host, kind), last in self._last.items() if host in ports}
        found = list[Found]()
        for host in hosts:
            label = host.partition(".")[0]
            ip = min(ips[host], key=lambda ip: (":" in ip, ip), default=None)
            for port in sorted(ports[host]):
                if not port:
                    skipped.append(_skipped("no_port", f"the SRV record of {host}"))
                elif ip is not None:
                    name = label if len(ports[host]) == 1 else f"{label}:{port}"
                    found.append(Found(name, address_of(ip, port), vouched=False))
        return found

    async def _addresses(self, resolver: dns.asyncresolver.Resolver, host: str, skipped: list[Skipped]) -> list[str]:
        """Return the addresses of a host, all of one family, empty when none is known; never raise."""
        for kind in (A, AAAA):
            try:
                self._last[host, kind] = [record.address for record in await self._ask(resolver, host, kind)]
            except DiscoveryFailed as exc:
                skipped.append(Skipped(exc.cause, str(exc), exc.remedy))
                if exc.cause == "nxdomain":
                    self._last.pop((host, A), None)
                    self._last.pop((host, AAAA), None)
                    break
            if ips := self._last.get((host, kind)):
                return ips
        return []

    async def _ask(
        self, resolver: dns.asyncresolver.Resolver, host: str, kind: dns.rdatatype.RdataType
    ) -> dns.resolver.Answer:
        """Return the answer, without records when the name has none of this kind; raise DiscoveryFailed otherwise."""
        try:
            async with self._parallel:
                answer = await resolver.resolve(host, kind, raise_on_no_answer=False, search=True)
        except dns.resolver.NXDOMAIN as exc:
            raise DiscoveryFailed(*_skipped("nxdomain", host)) from exc
        except dns.exception.Timeout as exc:
            raise DiscoveryFailed(*_skipped("timeout", host)) from exc
        except (dns.exception.DNSException, OSError) as exc:
            raise DiscoveryFailed("server", f"{host}: {exc}", REMEDIES["server"]) from exc
        if answer.rrset is not None:
            self._ttl_s = min(self._ttl_s, answer.chaining_result.minimum_ttl)
        return answer


def _text(name: dns.name.Name) -> str:
    """Return a name in lower case: name servers may mix cases, endpoints' names must not change with them."""
    return name.canonicalize().to_text()


def _skipped(cause: str, what: str) -> Skipped:
    said = {"timeout": "no answer from the name server", "nxdomain": "no such name", "empty": "no endpoint"}
    return Skipped(cause, f"{what}: {said.get(cause, 'names no port')}", REMEDIES.get(cause, REMEDIES["empty"]))
