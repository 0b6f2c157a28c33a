"""Decides whether a key may have one more request in flight; pure, one object a process.

Two rules, each off when its setting is 0:
- `key_inflight_max`: no key has more than so many requests in flight over all processes (refused: key_concurrency).
- `fleet_inflight_max`: while the fleet has more than so many, keys at their weighted share are refused (fair_share).
Requests without a key are one key of weight 1.

How processes agree (`service.leases` carries the messages):
1. A request is decided at once, from what this process holds of its key: a lease, the number of slots it may fill.
2. Every `load_exchange_s` each process reports, of its 256 most wanted keys (fewer when there are many processes), what
   is in flight and what it could use: in flight and turned away, the most of late (half is forgotten in a second).
   It divides by what it knows of all (`service.shares`), gives up at once what it has too much, and asks for its part.
   It gets more when the others have given theirs up (`service.lease_rows`).
3. Shares bind while what is in flight, and what was just turned away, fills the fleet. Below, everybody is admitted.
   What is known of the others is a period old: a first burst over n processes can take the room n times.
4. A key without a lease here is served before anybody was asked: of the cap it has `key_inflight_max` / n, at least
   one; of the fleet all such keys together have one lease, at least one slot a process.

The cap is kept exactly while it is n or more, the same processes live, and no more keys are wanted than have rows; with
a cap below n, a key that nobody knew can have n in flight. For a period after a process joined, and while one cannot
reach Redis, it may add its n-th part. When exchanges fail leases stay until they would end; from then on each process
keeps to the n-th part of cap and fleet, n being the processes seen last (at the start: `workers`).
"""

import heapq
import math
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from service.keys import hash_key
from service.lease_rows import REST, WEIGHT_MAX, Answer, Ask, Report, Row
from service.shares import limits, parse_weights, part
from service.slots import KeyState, Slots, ask, merge, number_of

KEY_CONCURRENCY, FAIR_SHARE = "key_concurrency", "fair_share"

HALF_LIFE_S = 1.0
KEYS_MAX = 256
# Of all processes together: what a process reads in one exchange.
ROWS_MAX = 2048
# More keys than this have a place here only while something is in flight.
SLOTS_MAX = 65_536
# Slots that cannot be told apart change hands after so long.
TURN_MS = 4000


class Settings(Protocol):
    """What is needed of `service.settings.ServiceSettings`, which is not pure."""

    @property
    def key_inflight_max(self) -> int: ...
    @property
    def fleet_inflight_max(self) -> int: ...
    @property
    def fair_weight(self) -> tuple[str, ...]: ...
    @property
    def key_salt(self) -> str: ...
    @property
    def instance(self) -> str: ...
    @property
    def workers(self) -> int: ...


class Fairness:
    """Admission of one process."""

    def __init__(self, settings: Settings) -> None:
        """Until the first exchange this process takes itself for one of `workers`."""
        self.enabled = bool(settings.key_inflight_max or settings.fleet_inflight_max)
        self.key_max, self.fleet_max = settings.key_inflight_max, settings.fleet_inflight_max
        self.instance = settings.instance
        self.processes = settings.workers
        self.inflight = 0
        # What the fleet wants, as last known, and whether that is more than it bears.
        self.demand, self.full = 0, False
        salt = settings.key_salt.encode()
        self._weights = {hash_key(key, salt): weight for key, weight in parse_weights(settings.fair_weight).items()}
        self._slots: dict[int | None, Slots] = {}
        self._rest = Slots(math.inf, 1.0)
        self._shed, self._shed_before = 0, 0.0
        self._asked: list[tuple[int | None, Slots]] = []
        self._others: Mapping[str, Report] = {}
        self._elsewhere: frozenset[int] = frozenset()
        self._alone, self._turn = True, 0
        self._reported_at: float | None = None
        self._report = Report(0, 0, 0, ())
        self._allowance: float = _nth(self.key_max, self.processes) or math.inf
        self._room: float = _nth(self.fleet_max, self.processes) or math.inf
        self._rest.share = _nth(self.fleet_max, self.processes)

    # -- the request path ----------------------------------------------------------------------------------------------

    def admit(self, key_hash: int | None) -> str:
        """Return "" and count the request in flight, or return why it is refused; half a µs with `release`."""
        slots = self._slots.get(key_hash)
        if slots is None:
            slots = self._slots[key_hash] = self._new(key_hash)
        if slots.inflight >= slots.cap:
            return self._refuse(key_hash, slots, KEY_CONCURRENCY)
        if self.full or self.inflight >= self._room:
            holder = slots if slots.leased else self._rest
            if holder.inflight >= holder.share:
                return self._refuse(key_hash, slots, FAIR_SHARE)
        slots.inflight += 1
        self.inflight += 1
        if not slots.leased:
            self._rest.inflight += 1
        return ""

    def release(self, key_hash: int | None) -> None:
        """Count an admitted request out, exactly once."""
        slots = self._slots[key_hash]
        slots.inflight -= 1
        self.inflight -= 1
        if not slots.leased:
            self._rest.inflight -= 1

    def _new(self, key: int | None) -> Slots:
        return Slots(self._allowance, self._weights.get(key, 1.0) if key is not None else 1.0)

    def _refuse(self, key_hash: int | None, slots: Slots, cause: str) -> str:
        slots.refused += 1
        if cause == FAIR_SHARE:
            self._shed += 1
        if not slots.inflight and len(self._slots) > SLOTS_MAX:
            del self._slots[key_hash]
        return cause

    # -- the exchange --------------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> Report:
        """Close a period, give up what is too much, return what to tell the others and to ask for.

        Keys with nothing in flight that nobody wants are forgotten.
        """
        passed_s = now_s - self._reported_at if self._reported_at is not None else 0.0
        self._reported_at = now_s
        kept = 0.5 ** (passed_s / HALF_LIFE_S)
        self._shed_before, self._shed = max(self._shed, self._shed_before * kept), 0
        for key, slots in list(self._slots.items()):
            slots.wanted = max(slots.inflight + slots.refused, slots.wanted * kept)
            # The others may hold what a row says is not held here: it stays until this process has its free slots back.
            has_free = not slots.told or slots.cap >= self.key_max // self.processes
            if slots.wanted < 1 and has_free and number_of(key) not in self._elsewhere:
                del self._slots[key]
        most = min(KEYS_MAX, max(1, ROWS_MAX // self.processes))
        named: Set[int | None] = self._slots.keys()
        if len(named) > most:
            named = set(heapq.nlargest(most, named, key=lambda key: self._slots[key].wanted))
        self._gather_rest(named, kept)
        self._asked = [(key, self._slots[key]) for key in named]
        self._divide()
        rows = [ask(number_of(key), slots) for key, slots in (*self._asked, (REST, self._rest))]
        free = 0 if math.isinf(self._allowance) else int(self._allowance)
        self._report = Report(self.inflight, math.ceil(self._shed_before - 0.5), free, rows)
        return self._report

    def apply(self, answer: Answer) -> None:
        """Take into force what the exchange of the last report brought."""
        self._others, self._alone, self._turn = answer.others, False, answer.now_ms // TURN_MS
        self.processes = len(answer.others) + 1
        *grants, rest = answer.grants
        for (_, slots), (cap, share) in zip(self._asked, grants, strict=True):
            self._lease(slots, cap, share)
        self._rest.share = rest[1]
        self._elsewhere = frozenset(
            row.key
            for report in answer.others.values()
            for row in report.rows
            if row.key != REST and (row.demand or row.inflight)
        )
        self._know()
        for number in self._elsewhere:
            key = number or None
            if key not in self._slots and len(self._slots) < SLOTS_MAX:
                self._slots[key] = self._new(key)
        # A higher one only with the next report, which tells the others of it.
        self._allow(min(self._allowance, _nth(self.key_max, self.processes) or math.inf))

    def alone(self) -> None:
        """Keep to this process's part from the last report on, since nothing is known of the others any more."""
        self._others, self._alone, self._elsewhere = {}, True, frozenset()
        self._divide()
        for _, slots in self._asked:
            self._lease(slots, slots.asked_cap, slots.asked_share)
        self._rest.share = self._rest.asked_share
        self._know()

    def _lease(self, slots: Slots, cap: int, share: int) -> None:
        slots.cap, slots.share = cap if self.key_max else math.inf, share
        if not slots.leased:
            slots.leased = True
            self._rest.inflight -= slots.inflight

    def _know(self) -> None:
        """Learn how full the fleet is."""
        elsewhere = sum(report.inflight for report in self._others.values())
        refused = sum(report.refused for report in (self._report, *self._others.values()))
        self.demand = self.inflight + elsewhere + refused
        fleet = self._part_of(self.fleet_max)
        self.full = bool(fleet) and self.demand >= fleet
        self._room = fleet - elsewhere if fleet else math.inf

    def _part_of(self, limit: int) -> int:
        return _nth(limit, self.processes) if self._alone else limit

    def _gather_rest(self, named: Set[int | None], kept: float) -> None:
        """Make one key of all that get no row, and of those to come: as many as came since the last report, or of late.

        Keys without a row have no lease from here on.
        """
        rest, wanted, weight = self._rest, 0.0, 0.0
        rest.inflight = 0
        for key, slots in self._slots.items():
            if not slots.told or key not in named:
                wanted += slots.inflight + slots.refused
                weight += slots.weight
            slots.refused = 0
            if key not in named:
                slots.leased = slots.told = False
            if not slots.leased:
                rest.inflight += slots.inflight
        rest.wanted, rest.weight = max(wanted, rest.wanted * kept), min(max(weight, rest.weight * kept), WEIGHT_MAX)

    def _divide(self) -> None:
        """Divide cap and fleet between keys and processes: what to ask for. Give up what is too much."""
        members = sorted({self.instance, *self._others})
        place, count = members.index(self.instance), len(members)
        fleet, cap = self._part_of(self.fleet_max), self._part_of(self.key_max)
        self._allow(_nth(self.key_max, self.processes) or math.inf)
        asked = [(number_of(key), slots) for key, slots in self._asked] + [(REST, self._rest)]
        rows: dict[int, Sequence[Row | Ask]] = {members.index(name): r.rows for name, r in self._others.items()}
        rows[place] = [ask(number, slots) for number, slots in asked]
        wanted, weights = merge(rows)
        totals = {number: sum(by_place.values()) for number, by_place in wanted.items()}
        if cap:
            totals = {number: min(total, cap) if number != REST else total for number, total in totals.items()}
        shared = limits(fleet, totals, weights, turn=self._turn) if fleet else {}
        shared[REST] = max(shared.get(REST, 0), count)  # room for a key that comes next
        for number, slots in asked:
            by_place = wanted.get(number, {})
            slots.limit = shared.get(number, 0)
            slots.asked_share = part(slots.limit, by_place, place, count)
            slots.asked_cap = part(cap, by_place, place, count) if cap and number != REST else 0
            if slots.leased or number == REST:
                slots.share = min(slots.share, slots.asked_share)
            if cap and number != REST:
                slots.cap = min(slots.cap, slots.asked_cap)
            slots.told = True

    def _allow(self, allowance: float) -> None:
        self._allowance = allowance
        for slots in self._slots.values():
            if not slots.told:
                slots.cap = allowance

    # -- for people ----------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """How many keys are known here."""
        return len(self._slots)

    def explain(self, key_hash: int | None) -> KeyState:
        """Return a key's state in this process; one that is not known here has what it would begin with."""
        slots = self._slots.get(key_hash) or self._new(key_hash)
        share = slots.share if slots.leased else self._rest.share
        return KeyState(
            inflight=slots.inflight,
            wanted=max(slots.inflight + slots.refused, int(slots.wanted)),
            refused=slots.refused,
            weight=slots.weight,
            leased=slots.leased,
            cap=None if math.isinf(slots.cap) else int(slots.cap),
            share=share if self.fleet_max else None,
        )


def _nth(limit: int, processes: int) -> int:
    """Return one process's part of a limit, at least one; 0 stays 0, since it means none."""
    return max(1, limit // processes) if limit else 0
