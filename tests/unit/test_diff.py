"""What `plan diff` says, against the definitions taken key by key."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.diff import diff, max_over_mean
from service.plan import Parameters, Plan

Rows = dict[int, tuple[float, tuple[str, ...]]]


def plan_of(rows: Rows, endpoints: tuple[str, ...], rate_rps: float | None = None) -> Plan:
    offsets = [0]
    for _, names in rows.values():
        offsets.append(offsets[-1] + len(names))
    planned = sum(rate for rate, _ in rows.values())
    return Plan(
        endpoints=endpoints,
        key_hashes=array("Q", list(rows)),
        target_offsets=array("I", offsets),
        targets=array("I", [endpoints.index(n) for _, names in rows.values() for n in names]),
        rates_rps=array("f", [rate for rate, _ in rows.values()]),
        key_check=1,
        parameters=Parameters(rate_rps=planned if rate_rps is None else rate_rps, admitted_rate_rps=planned),
    )


def rows_of(endpoints: tuple[str, ...]) -> st.SearchStrategy[Rows]:
    targets = st.lists(st.sampled_from(endpoints), unique=True, min_size=1, max_size=3).map(tuple)
    return st.dictionaries(
        st.integers(0, 12) | st.just(2**64 - 1), st.tuples(st.sampled_from([0.5, 1.0, 4.0]), targets), max_size=12
    )


@given(rows_of(("a", "b", "c")), rows_of(("c", "d", "b", "e")))
def test_a_difference_is_what_the_definitions_say(old: Rows, new: Rows) -> None:
    """Counts and shares follow their definitions, endpoints are compared by name."""
    found = diff(plan_of(old, ("a", "b", "c")), plan_of(new, ("c", "d", "b", "e")))
    both = old.keys() & new.keys()
    fresh = {k: set(new[k][1]) - set(old[k][1]) if k in old else set(new[k][1]) for k in new}
    planned, slots = sum(rate for rate, _ in new.values()), sum(len(names) for _, names in new.values())
    assert found.keys_in_both == len(both)
    assert found.keys_changed == sum(set(old[k][1]) != set(new[k][1]) for k in both)
    assert (found.admitted, found.dropped) == (len(new.keys() - old.keys()), len(old.keys() - new.keys()))
    assert found.moved_targets == sum(len(fresh[k]) for k in both)
    moved = sum(new[k][0] * len(fresh[k]) / len(new[k][1]) for k in both)
    assert found.rate_moved_fraction == pytest.approx(moved / planned if planned else 0)
    assert found.slots_new_fraction == pytest.approx(sum(map(len, fresh.values())) / slots if slots else 0)
    after = {name: sum(r / len(t) for r, t in new.values() if name in t) for name in "abcde"}
    assert found.loads_after_rps == pytest.approx(after)
    before = {name: sum(new.get(k, old[k])[0] / len(t) for k, (_, t) in old.items() if name in t) for name in "abc"}
    cold = max(0.0, planned - sum(new.get(k, old[k])[0] for k in old)) / 3
    assert {n: found.loads_before_rps[n] for n in "abc"} == pytest.approx({n: v + cold for n, v in before.items()})


def test_cold_load_counts_on_every_endpoint() -> None:
    """What the plan does not admit is spread over the endpoints that it names."""
    found = diff(plan_of({1: (2.0, ("a",))}, ("a", "b"), 4.0), plan_of({1: (2.0, ("b",))}, ("a", "b"), 4.0))
    assert found.loads_before_rps == {"a": 3.0, "b": 1.0}
    assert found.loads_after_rps == {"a": 1.0, "b": 3.0}
    assert max_over_mean(found.loads_after_rps, ("a", "b")) == 1.5
    assert max_over_mean({"a": 0.0}, ("a",)) == 1.0
