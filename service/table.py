"""The table as served: key hash -> names of its targets, built from a plan and replaced as a whole.

A table never changes; a new plan makes a new table and one reference is swapped, so a pick sees either all of the old
plan or all of the new. Building runs in a thread beside the event loop, in steps short enough that the loop gets the
interpreter in between.
"""

import time
from dataclasses import dataclass, field

from service.plan import Plan

ROWS_PER_STEP = 4096


@dataclass(frozen=True, slots=True)
class Table:
    """What picks are made from; the empty table (version 0) makes every key cold.

    source: `redis`, `disk` for the last good table of an earlier process, or empty for the empty table.
    """

    version: int = 0
    epoch: int = 0
    created_at: float = 0.0
    targets: dict[int, tuple[str, ...]] = field(default_factory=dict)
    sha256: str = ""
    source: str = ""

    def age_s(self, now: float) -> float:
        """Return the seconds since publication, 0 for the empty table and for clocks that differ."""
        return max(0.0, now - self.created_at) if self.version else 0.0


@dataclass(slots=True)
class Current:
    """The one reference that a new table is swapped into."""

    table: Table = field(default_factory=Table)


def build_table(plan: Plan, sha256: str = "", source: str = "redis") -> Table:
    """Return the table of a plan whose bytes have this digest; about 60 ms for 128,824 keys: not for the event loop.

    Keys with equal targets share one tuple: with R endpoints and one copy a key there are R tuples, not one a key.
    """
    targets: dict[int, tuple[str, ...]] = {}
    singles = [(name,) for name in plan.endpoints]
    shared: dict[tuple[int, ...], tuple[str, ...]] = {}
    keys, offsets, indexes = plan.key_hashes, plan.target_offsets, plan.targets
    for start in range(0, len(keys), ROWS_PER_STEP):
        for row in range(start, min(start + ROWS_PER_STEP, len(keys))):
            first, last = offsets[row], offsets[row + 1]
            if last - first == 1:
                targets[keys[row]] = singles[indexes[first]]
            else:
                chosen = tuple(indexes[first:last])
                targets[keys[row]] = shared.setdefault(chosen, tuple(plan.endpoints[i] for i in chosen))
        time.sleep(0)
    return Table(plan.version, plan.epoch, plan.created_at, targets, sha256, source)
