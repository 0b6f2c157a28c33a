"""The rules of `service.lease_rows` in Python, and a fleet of `Fairness` in virtual time that exchanges by them."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

from service.fairness import Fairness
from service.keys import hash_key
from service.lease_rows import Answer, Report, Row

PERIOD_S, TTL_MS = 0.25, 1000


class LeaseModel:
    """What Redis keeps; the twin of the script, compared with it in tests/contract/test_leases.py."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[float, Report]] = {}

    def lease(self, instance: str, report: Report, *, cap: int, ttl_ms: int, now_ms: int) -> Answer:
        """Return what one exchange brings."""
        living = {name: (ends, of) for name, (ends, of) in self.stored.items() if name == instance or ends > now_ms}
        others = {name: of for name, (_, of) in living.items() if name != instance}
        by_key = [(other, {row.key: row for row in other.rows}) for other in others.values()]
        rows, grants = [], []
        for key, inflight, demand, weight, asked_cap, asked_share, limit in report.rows:  # type: ignore[misc]
            held_cap = held_share = 0
            for other, its_rows in by_key:
                row = its_rows.get(key)
                held_cap += max(row.cap, row.inflight) if row else other.allowance
                held_share += max(row.share, row.inflight) if row else 0
            grant = max(0, min(asked_cap, cap - held_cap)), max(0, min(asked_share, limit - held_share))
            grants.append(grant)
            rows.append(Row(key, inflight, demand, weight, *grant))
        allowance = min(report.allowance, max(1, cap // (len(others) + 1)))
        living[instance] = (now_ms + ttl_ms, Report(report.inflight, report.refused, allowance, tuple(rows)))
        self.stored = living
        return Answer(now_ms, tuple(grants), others)


def fairness(name: str = "p0", **settings: Any) -> Fairness:
    """Return one process's admission, with settings as they are by default but for those given."""
    values = {"key_inflight_max": 0, "fleet_inflight_max": 0, "fair_weight": (), "key_salt": "", "workers": 1}
    return Fairness(SimpleNamespace(**{**values, "instance": name, **settings}))


@dataclass
class Source:
    """Clients of one tenant at some processes: `clients` in a closed loop, or arrivals at `rate_rps`."""

    tenant: str
    at: tuple[int, ...]
    clients: int = 0
    rate_rps: float = 0.0
    hold_s: float = 1.0
    retry_s: float = 0.1
    begins_s: float = 0.0
    ends_s: float = 1e9


@dataclass
class Seen:
    """What happened between `since_s` and the end."""

    inflight_s: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    most_together: int = 0
    lasted_s: float = 0.0

    def mean(self, tenant: str) -> float:
        return self.inflight_s[tenant] / self.lasted_s


class FairFleet:
    """n processes, each with `Fairness`, that exchange every period at moments of their own; time is a number."""

    def __init__(self, processes: int, seed: int, *, fair: bool = True, **settings: Any) -> None:
        self.rng, self.now, self.fair = Random(seed), 0.0, fair
        self.store, self.reachable, self.dead = LeaseModel(), True, set[int]()
        self.processes = [fairness(f"p{i}", **settings) for i in range(processes)]
        self.leased_at = [-1e9] * processes
        self.inflight: Counter[str] = Counter()
        self.seen, self._since = Seen(), 0.0
        self._held: list[Counter[str]] = [Counter() for _ in range(processes)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        for i in range(processes):
            self.at(self.rng.random() * PERIOD_S, lambda i=i: self._exchange(i))  # type: ignore[misc]

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), do))

    def run(self, until_s: float, *, since_s: float | None = None) -> Seen:
        """Go on until `until_s`; return what was seen from `since_s` on."""
        if since_s is not None:
            self.at(since_s, self._begin)
        while self._events and self._events[0][0] <= until_s:
            time_s, _, do = heapq.heappop(self._events)
            self._pass(time_s)
            do()
        self._pass(until_s)
        self.seen.lasted_s = self.now - self._since
        return self.seen

    def _begin(self) -> None:
        self.seen, self._since = Seen(), self.now

    def _pass(self, time_s: float) -> None:
        for tenant, n in self.inflight.items():
            self.seen.inflight_s[tenant] += n * (time_s - self.now)  # type: ignore[assignment]
        self.now = time_s

    def _exchange(self, i: int) -> None:
        if i in self.dead:
            return
        one = self.processes[i]
        report = one.report(self.now)
        if self.reachable:
            # The answer comes a little later; meanwhile others exchange and requests are decided.
            answer = self.store.lease(one.instance, report, cap=one.key_max, ttl_ms=TTL_MS, now_ms=int(self.now * 1000))
            sent = self.now

            def arrives() -> None:
                one.apply(answer)
                self.leased_at[i] = sent

            self.at(self.now + 0.002 + 0.01 * self.rng.random(), arrives)
        elif self.now - self.leased_at[i] >= TTL_MS / 1000:
            one.alone()
        self.at(self.now + PERIOD_S, lambda: self._exchange(i))

    def kill(self, i: int) -> None:
        """End a process and all that is in flight through it."""
        self.dead.add(i)
        self.inflight.subtract(self._held[i])
        self._held[i].clear()

    def load(self, sources: Iterable[Source]) -> None:
        for source in sources:
            for client in range(source.clients):
                start = source.begins_s + self.rng.random() * source.retry_s
                self.at(start, lambda s=source, c=client: self._closed(s, s.at[c % len(s.at)]))  # type: ignore[misc]
            if source.rate_rps:
                self.at(source.begins_s, lambda s=source: self._open(s))  # type: ignore[misc]

    def _closed(self, source: Source, i: int) -> None:
        if self.now < source.ends_s and i not in self.dead and not self._send(source, i, self._closed):
            self.at(self.now + source.retry_s * (0.5 + self.rng.random()), lambda: self._closed(source, i))

    def _open(self, source: Source) -> None:
        if self.now < source.ends_s:
            self._send(source, self.rng.choice(source.at), None)
            self.at(self.now + self.rng.expovariate(source.rate_rps), lambda: self._open(source))

    def _send(self, source: Source, i: int, then: Callable[[Source, int], None] | None) -> bool:
        tenant, one, key = source.tenant, self.processes[i], hash_key(source.tenant.encode()) if source.tenant else None
        if i in self.dead:
            return False
        if cause := one.admit(key) if self.fair else self._unfair(one):
            self.seen.refused[tenant, cause] += 1
            return False
        self.inflight[tenant] += 1
        self._held[i][tenant] += 1
        self.seen.most[tenant] = max(self.seen.most[tenant], self.inflight[tenant])
        self.seen.most_together = max(self.seen.most_together, self.inflight.total())

        def ends() -> None:
            if i in self.dead:
                return
            if self.fair:
                one.release(key)
            self.inflight[tenant] -= 1
            self._held[i][tenant] -= 1
            self.seen.completed[tenant] += 1
            if then is not None:
                then(source, i)

        self.at(self.now + source.hold_s * self.rng.uniform(0.5, 1.5), ends)
        return True

    def _unfair(self, one: Fairness) -> str:
        """The control: the fleet's limit without anybody's share, first come, first served."""
        return "full" if self.inflight.total() >= one.fleet_max else ""


def shares_seen(seen: Seen, weights: Mapping[str, float]) -> list[float]:
    """Return each tenant's mean in flight for its weight, over that of the first."""
    first, *_ = (seen.mean(tenant) / weight for tenant, weight in weights.items())
    return [seen.mean(tenant) / weight / first for tenant, weight in weights.items()]
