"""Gives each admitted key its endpoints so that load is even and as few keys as possible leave a warm cache.

Fresh LPT (`planner.placement`) moves 95 % of all keys at every replan, since the least drift changes the order in which
it deals them out. Here a key stays where it is unless somebody has to move:

1. Every copy whose previous endpoint is still there stays on it. A key that needs fewer copies gives up those on its
   most loaded endpoints.
2. Heavy copies, from `HEAVY` of the mean on, that an endpoint cannot carry together are parted: the lighter ones leave.
3. Copies without an endpoint (those, new keys, more copies, endpoints that are gone) go to the least loaded one, the
   heaviest first.
4. The bound is 1 + ε times the mean load, or what fresh LPT reaches on the same input where that is higher: where
   nothing better can be had, nobody is moved for it.
5. While the most loaded endpoint is above the bound, one key moves from it to the least loaded one: the lightest that
   brings it below, else the heaviest for which there is room. So few keys move, and middling ones: the many light ones
   stay, and so do those so heavy that their next endpoint would be above the bound.
6. When no key can be moved alone, room is made for one: the fewest keys leave another endpoint for any that has room.
7. An endpoint below the floor, as a new one is, gets heavy keys of the most loaded ones up to the floor, but no more
   than `fill` of the mean in one cycle: its cache warms up over a few cycles.
8. Rules 5 to 7 end when the cycle's budget, in keys or in rate, is spent. Rules 1 to 3 are never limited.
9. When the bound is missed and budget is left, fresh LPT is taken if the budget bears it.

Source: ours; the objective is the load rebalancing problem (Aggarwal, Motwani, Zhu 2006): least makespan with at most
k relocations. docs/planner.md has the figures, beside fresh LPT and one pass that keeps targets heaviest first.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.placement import Placement, place

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Sums of many shares in another order differ by less.
SAME = 1e-9
# How many endpoints are tried as the other side of an exchange, least loaded first.
EXCHANGES_TRIED = 30
HEAVY = 0.25

Outcome = Literal["even", "budget", "uneven", "fresh"]


@dataclass(frozen=True, slots=True)
class Previous:
    """Where the keys were: row i had targets[offsets[i]:offsets[i + 1]], indexes of today's endpoints, distinct.

    Endpoints that are gone are left out.
    """

    offsets: Ints
    targets: Ints


@dataclass(frozen=True, slots=True)
class Limits:
    """What one cycle may do.

    epsilon: by how much the most loaded endpoint may exceed the mean.  keys_share, rate_share: the most of the admitted
    keys, and of their rate, that rules 5 to 9 move.  floor: least load of an endpoint as a share of the mean, 0:
    none.  fill: the most of the mean that an endpoint is given at a time.
    """

    epsilon: float = 0.05
    keys_share: float = 0.1
    rate_share: float = 0.2
    floor: float = 0.8
    fill: float = 0.25


def place_sticky(
    rates_rps: Floats,
    copies: Ints,
    *,
    endpoints: int,
    cold_load_rps: float,
    previous: Previous,
    limits: Limits,
) -> tuple[Placement, Outcome]:
    """Return the targets of each key, and whether the bound holds (even), or why not.

    `budget`: it was spent first; `uneven`: no move that the budget bears leads there; `fresh`: rule 9 was used.
    rates_rps, copies: one a key, length n, by rate, highest first; 1 ≤ copies ≤ endpoints.  cold_load_rps: as in
    `place`.  The same input gives the same result.  O(N) in numpy, and some µs for each copy that is new or moves.
    """
    board = _Board(rates_rps, copies, endpoints, cold_load_rps)
    keys_most, rate_most = limits.keys_share * len(rates_rps), limits.rate_share * float(rates_rps.sum())
    budget = _Budget(keys_most, rate_most)
    bound = (1 + limits.epsilon) * board.mean
    # A copy heavier than the bound rules it out; otherwise fresh LPT is worth its time only if levelling fails.
    heaviest = cold_load_rps + float(board.shares.max(initial=0.0))
    fresh: Placement | None = None
    if heaviest > bound:
        fresh = place(rates_rps.tolist(), copies.tolist(), endpoints=endpoints, cold_load_rps=cold_load_rps)
        bound = max(bound, *fresh.loads_rps)
    board.keep(previous, bound)
    board.deal()
    board.dealt = board.flat.copy()
    outcome: Outcome = "even"
    if not board.level(bound, budget):
        fresh = fresh or place(rates_rps.tolist(), copies.tolist(), endpoints=endpoints, cold_load_rps=cold_load_rps)
        bound = max(bound, *fresh.loads_rps)
        if not board.level(bound, budget):
            outcome = "budget" if budget.spent else "uneven"
            # In place of the moves made so far, not on top of them.
            keys, rate_rps = board.difference(fresh)
            if not budget.spent and keys <= keys_most and rate_rps <= rate_most:
                return fresh, "fresh"
    board.fill(limits, budget)
    return board.placement(), outcome


class _Budget:
    """What rules 5 to 7 may still move; a key counts once however often it moves."""

    def __init__(self, keys: float, rate_rps: float) -> None:
        self._keys, self._rate_rps = keys, rate_rps
        self._moved: set[int] = set()
        self.spent = False

    def take(self, moves: Iterable[tuple[int, float]]) -> bool:
        """Return whether the moves of (row, share) fit together, and count them if so."""
        moves = list(moves)
        rows = self._moved.union(row for row, _ in moves)
        rate_rps = sum(share for _, share in moves)
        if len(rows) > self._keys or rate_rps > self._rate_rps:
            self.spent = True
            return False
        self._moved = rows
        self._rate_rps -= rate_rps
        return True


class _Board:
    """The copies on their endpoints. Slot i is one copy: of row rows[i], on flat[i] (-1: none), of load shares[i]."""

    def __init__(self, rates_rps: Floats, copies: Ints, endpoints: int, cold_load_rps: float) -> None:
        self.copies, self.endpoints = copies, endpoints
        self.offsets = np.concatenate(([0], np.cumsum(copies)))
        self.rows = np.repeat(np.arange(len(copies)), copies)
        self.shares = np.repeat(rates_rps / np.maximum(copies, 1), copies)
        self.flat = np.full(len(self.rows), -1, dtype=np.int64)
        self.dealt = self.flat
        self.loads = np.full(endpoints, cold_load_rps)
        self.cold_load_rps = cold_load_rps
        self.mean = cold_load_rps + float(rates_rps.sum()) / endpoints
        self._held: dict[int, list[tuple[float, int]]] = {}

    def keep(self, previous: Previous, bound: float) -> None:
        """Rules 1 and 2."""
        had = np.diff(previous.offsets)
        single = (self.copies == 1) & (had == 1)
        slots, kept = self.offsets[:-1][single], previous.targets[previous.offsets[:-1][single]]
        self.flat[slots] = kept
        self.loads += np.bincount(kept, weights=self.shares[slots], minlength=self.endpoints)
        for row in np.flatnonzero(~single & (had > 0)).tolist():
            targets = previous.targets[previous.offsets[row] : previous.offsets[row + 1]].tolist()
            first, k = int(self.offsets[row]), int(self.copies[row])
            chosen = sorted(targets, key=lambda r: (self.loads[r], r))[:k]
            for slot, target in enumerate(sorted(chosen, key=targets.index), start=first):
                self.flat[slot] = target
                self.loads[target] += self.shares[slot]
        self._part(bound)

    def _part(self, bound: float) -> None:
        """Take heavy copies off an endpoint that they alone would bring above the bound, the lighter ones first."""
        heavy = np.flatnonzero((self.shares >= HEAVY * self.mean) & (self.flat >= 0))
        carried = np.full(self.endpoints, self.cold_load_rps)
        for slot in heavy[np.argsort(-self.shares[heavy], kind="stable")].tolist():
            target, share = int(self.flat[slot]), float(self.shares[slot])
            if carried[target] + share <= bound * (1 + SAME):
                carried[target] += share
            else:
                self.flat[slot] = -1
                self.loads[target] -= share

    def deal(self) -> None:
        """Rule 3."""
        empty = np.flatnonzero(self.flat < 0)
        if not len(empty):
            return
        heap = [(load, r) for r, load in enumerate(self.loads.tolist())]
        heapify(heap)
        order = empty[np.argsort(-self.shares[empty], kind="stable")]
        for slot, row in zip(order.tolist(), self.rows[order].tolist(), strict=True):
            taken = self._targets(row) if self.copies[row] > 1 else ()
            passed = []
            load, target = heappop(heap)
            while target in taken:
                passed.append((load, target))
                load, target = heappop(heap)
            self.flat[slot] = target
            heappush(heap, (load + float(self.shares[slot]), target))
            for entry in passed:
                heappush(heap, entry)
        for load, r in heap:
            self.loads[r] = load

    def level(self, bound: float, budget: _Budget) -> bool:
        """Rules 5 and 6; return whether every endpoint is within the bound."""
        bound *= 1 + SAME
        while True:
            hot = int(self.loads.argmax())
            if self.loads[hot] <= bound:
                return True
            moves = self._one_move(hot, bound) or self._exchange(hot, bound)
            if not moves or not budget.take((int(self.rows[slot]), float(self.shares[slot])) for slot, _ in moves):
                return False
            for slot, target in moves:
                self._move(slot, target)

    def fill(self, limits: Limits, budget: _Budget) -> None:
        """Rule 7."""
        for target in np.flatnonzero(self.loads < limits.floor * self.mean).tolist():
            goal = min(limits.floor * self.mean, float(self.loads[target]) + limits.fill * self.mean)
            while self.loads[target] < goal:
                donor = int(self.loads.argmax())
                # Neither may end up on the wrong side: the donor below the goal, the new one above the mean.
                room = min(self.mean - float(self.loads[target]), float(self.loads[donor]) - goal)
                slot = self._heaviest(donor, target, room)
                if slot is None or not budget.take([(int(self.rows[slot]), float(self.shares[slot]))]):
                    break
                self._move(slot, target)

    def difference(self, other: Placement) -> tuple[int, float]:
        """Return how many keys have other targets there than before levelling, and the rate that moves."""
        rows, rate_rps = 0, 0.0
        for row in range(len(self.copies)):
            ours = self.dealt[self.offsets[row] : self.offsets[row + 1]].tolist()
            theirs = other.targets[other.offsets[row] : other.offsets[row + 1]]
            lost = len(set(ours) - set(theirs))
            rows += lost > 0
            rate_rps += lost * float(self.shares[self.offsets[row]])
        return rows, rate_rps

    def placement(self) -> Placement:
        return Placement(
            offsets=array("I", self.offsets.astype(np.uint32).tobytes()),
            targets=array("I", self.flat.astype(np.uint32).tobytes()),
            loads_rps=tuple(self.loads.tolist()),
        )

    def _one_move(self, hot: int, bound: float) -> list[tuple[int, int]]:
        target = int(self.loads.argmin())
        held, room = self._on(hot), bound - self.loads[target]
        first = bisect_left(held, (self.loads[hot] - bound, -1))
        if first < len(held) and held[first][0] <= room:
            for share, slot in held[first:]:
                if share > room:
                    break
                if target not in self._targets(int(self.rows[slot])):
                    return [(slot, target)]
        heaviest = self._heaviest(hot, target, room)
        return [] if heaviest is None else [(heaviest, target)]

    def _exchange(self, hot: int, bound: float) -> list[tuple[int, int]]:
        """Return the fewest moves that take a key off `hot` and make room for it elsewhere, none if there are none."""
        best: list[tuple[int, int]] = []
        others = [r for r in np.argsort(self.loads, kind="stable").tolist() if r != hot][:EXCHANGES_TRIED]
        for share, slot in reversed(self._on(hot)):
            for other in others:
                moves = self._make_room(hot, slot, share, other, bound)
                if moves and (not best or len(moves) < len(best)):
                    best = moves
            if best:
                break
        return best

    def _make_room(self, hot: int, slot: int, share: float, other: int, bound: float) -> list[tuple[int, int]]:
        if share <= 0 or other in self._targets(int(self.rows[slot])):
            return []
        loads = self.loads.copy()
        loads[hot] -= share
        loads[other] += share
        moves, held, moved = [(slot, other)], self._on(other), set[int]()
        while loads[other] > bound:
            need, there = loads[other] - bound, loads[other]
            loads[other] = np.inf
            target = int(loads.argmin())
            room = bound - loads[target]
            # The lightest that is enough, else the heaviest that fits.
            enough = bisect_left(held, (need, -1))
            at = enough if enough < len(held) and held[enough][0] <= room else bisect_right(held, (room, 2**62)) - 1
            while at >= 0 and (held[at][1] in moved or target in self._targets(int(self.rows[held[at][1]]))):
                at -= 1
            if at < 0 or held[at][0] <= 0:
                return []
            back, back_slot = held[at]
            moved.add(back_slot)
            moves.append((back_slot, target))
            loads[other] = there - back
            loads[target] += back
        return moves

    def _heaviest(self, source: int, target: int, room: float) -> int | None:
        held = self._on(source)
        for share, slot in reversed(held[: bisect_right(held, (room, 2**62))]):
            if share > 0 and target not in self._targets(int(self.rows[slot])):
                return slot
        return None

    def _move(self, slot: int, target: int) -> None:
        share, source = float(self.shares[slot]), int(self.flat[slot])
        self.flat[slot] = target
        self.loads[source] -= share
        self.loads[target] += share
        if source in self._held:
            self._held[source].remove((share, slot))
        if target in self._held:
            insort(self._held[target], (share, slot))

    def _on(self, endpoint: int) -> list[tuple[float, int]]:
        """Return (share, slot) of all copies on an endpoint, lightest first; kept up to date by `_move`."""
        if endpoint not in self._held:
            slots = np.flatnonzero(self.flat == endpoint)
            self._held[endpoint] = sorted(zip(self.shares[slots].tolist(), slots.tolist(), strict=True))
        return self._held[endpoint]

    def _targets(self, row: int) -> list[int]:
        found: list[int] = self.flat[self.offsets[row] : self.offsets[row + 1]].tolist()
        return found
