"""One key in one process: what admission reads and writes, and how its report looks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from service.lease_rows import NO_KEY, REST, Ask, Row


class Slots:
    """One key in this process."""

    __slots__ = (
        "asked_cap", "asked_share", "cap", "inflight", "leased", "limit", "refused", "share", "told", "wanted", "weight"
    )  # fmt: skip

    def __init__(self, cap: float, weight: float) -> None:
        self.inflight = 0
        self.refused = 0  # since the last report
        self.wanted = 0.0  # at the last report
        self.weight = weight
        self.cap = cap  # how many may be in flight here under the cap
        self.told = False  # the others count on what was asked for, even if no answer came
        self.leased = False
        self.share = 0  # if leased, how many may be in flight here while the fleet is full
        self.limit = 0  # and in all processes
        self.asked_cap = self.asked_share = 0


@dataclass(frozen=True, slots=True)
class KeyState:
    """One key here, for people. cap, share: how many may be in flight here, None: no limit; wanted: could be."""

    inflight: int
    wanted: int
    refused: int
    weight: float
    leased: bool
    cap: int | None
    share: int | None


def number_of(key: int | None) -> int:
    """Return a key as it stands in reports."""
    return NO_KEY if key is None else key


def ask(number: int, slots: Slots) -> Ask:
    """Return a key's row."""
    # Rounded down: a key that had one request a moment ago holds no slot for another.
    return Ask(number, slots.inflight, int(slots.wanted), slots.weight, slots.asked_cap, slots.asked_share, slots.limit)


def merge(rows: Mapping[int, Sequence[Row | Ask]]) -> tuple[dict[int, dict[int, int]], dict[int, float]]:
    """Return key -> place of a process -> slots it could use, and key -> weight; where processes differ the higher.

    Only keys that somebody wants, and always REST, whose weight is the sum.
    """
    wanted: dict[int, dict[int, int]] = {REST: {}}
    weights: dict[int, float] = {REST: 0.0}
    for place, of_one in rows.items():
        for key, _, want, weight, *_ in of_one:
            if key == REST:
                weights[REST] += weight
            elif want:
                weights[key] = max(weights.get(key, 0.0), weight)
            if want:
                wanted.setdefault(key, {})[place] = want
    weights[REST] = max(weights[REST], 1.0)
    return wanted, weights
