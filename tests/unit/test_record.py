"""What a planner goes on from when it takes the lead: the newest record that is one of ours."""

import json
import math
from typing import Any

import pytest

from planner.envelope import Memory
from planner.record import Left, as_dict, blank, dumps, resumed


def stored(**changed: Any) -> dict[str, Any]:
    """Return a record as it is read back."""
    record = blank("p", 100.0, "timer")
    record["memory"], record["lost"] = as_dict(Memory(100.0, 5.0, leaves=2)), ["b"]
    record["engines"] = {"known_at_s": 90.0, "known_p99_s": 0.5, "known_load_rps": 3.0, "cache_tokens": None}
    return {**json.loads(dumps(record)), **changed}


def test_a_record_comes_back_as_it_was_left() -> None:
    """Memory, time, lost endpoints and what engines said, through JSON and back."""
    left = resumed([stored()])
    assert (left.memory, left.at_s, left.lost) == (Memory(100.0, 5.0, leaves=2), 100.0, ("b",))
    assert dict(left.engines) == {"known_at_s": 90.0, "known_p99_s": 0.5, "known_load_rps": 3.0, "cache_tokens": None}


def test_a_record_of_an_older_planner_has_no_engines() -> None:
    """It is gone on from all the same."""
    older = stored()
    del older["engines"]
    assert resumed([older]).at_s == 100.0
    assert dict(resumed([older]).engines) == {}


@pytest.mark.parametrize(
    "changed",
    [
        {"engines": {"known_p99_s": math.inf}},
        {"engines": {"known_p99_s": "x"}},
        {"engines": {"known_p99_s": -1}},
        {"engines": [1]},
        {"memory": {"leaves": -1}},
        {"at_s": math.nan},
    ],
)
def test_what_is_none_of_ours_is_passed_over(changed: dict[str, Any]) -> None:
    """A record with a value that cannot be ours is as none: the one before it counts, else nothing does."""
    assert resumed([stored(**changed)]) == Left()
    assert resumed([stored(**changed), stored()]).at_s == 100.0
