"""From rates to a plan: what it holds, what its report says, and that the same input gives the same bytes."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.admission import Rules
from planner.build import Built, build, endpoint_names, report_of, shape_of
from planner.rates import KeyRates
from service.errors import InvalidInput
from service.keys import KEY_CHECK, hash_key
from service.plan import decode, encode

NAMES = ("a", "b", "c")


def built(
    rates: dict[int, float],
    endpoints: tuple[str, ...] = NAMES,
    slots_per_endpoint: int = 2,
    replica_cap_rps: float = 4.0,
) -> Built:
    return build(
        KeyRates.of(rates.keys(), rates.values()),
        endpoints,
        rules=Rules(slots_per_endpoint=slots_per_endpoint, replica_cap_rps=replica_cap_rps),
        key_check=hash_key(KEY_CHECK),
    )


def test_a_plan_by_hand() -> None:
    """A hot key has two copies, the others fill the rest, and what has no slot is cold load everywhere."""
    made = built({10: 8.0, 11: 3.0, 12: 2.0, 13: 1.5, 14: 1.0, 15: 0.3}, slots_per_endpoint=2)
    plan = made.plan
    assert {h: plan.target_names(row) for row, h in enumerate(plan.key_hashes)} == {
        10: ("a", "b"),
        11: ("c",),
        12: ("c",),
        13: ("a",),
        14: ("b",),
    }
    assert list(plan.rates_rps) == [8.0, 3.0, 2.0, 1.5, 1.0]
    assert made.shape.loads_rps == pytest.approx((5.6, 5.1, 5.1))
    report = report_of(made)
    assert report.pop("build_ms") == made.admit_ms + made.place_ms
    assert report == {
        "keys": 6,
        "rate_rps": 15.8,
        "endpoints": 3,
        "slots_per_endpoint": 2,
        "slots_used": 6,
        "admitted": 5,
        "admitted_rate_share": pytest.approx(15.5 / 15.8),
        "max_copies": 2,
        "max_over_mean": pytest.approx(5.6 * 3 / 15.8),
        "outcome": "fresh",
        "sha256": plan.content_sha256(),
    }


@given(
    st.dictionaries(st.integers(0, 2**64 - 1), st.floats(min_value=0, max_value=1e6), max_size=50),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_the_order_of_rows_does_not_reach_the_bytes(rates: dict[int, float], r: int, slots: int, seed: int) -> None:
    """Shuffled rows give the same bytes, which read back as the same plan within its budget."""
    names, shuffled = tuple(f"e{i}" for i in range(r)), list(rates.items())
    Random(seed).shuffle(shuffled)
    one, two = built(rates, names, slots), built(dict(shuffled), names, slots)
    data = encode(one.plan)
    assert data == encode(two.plan)
    assert decode(data, key_check=hash_key(KEY_CHECK)) == one.plan
    assert one.shape.slots_used <= r * slots
    assert shape_of(decode(data)) == one.shape
    assert one.shape.max_over_mean >= 1 - 1e-9
    assert sum(one.shape.loads_rps) == pytest.approx(sum(rates.values()), rel=1e-6, abs=1e-6)


def test_no_rate_at_all_is_an_empty_plan() -> None:
    """Keys that nobody asked for are counted and not admitted."""
    report = report_of(built({1: 0.0, 2: 0.0}))
    assert (report["keys"], report["admitted"], report["max_copies"]) == (2, 0, 0)
    assert (report["admitted_rate_share"], report["max_over_mean"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"endpoints": ()}, "endpoints"),
        ({"slots_per_endpoint": 0}, "--slots 0"),
        ({"slots_per_endpoint": 2**32}, "--slots 4294967296"),
        ({"replica_cap_rps": 0.0}, "--replica-cap 0"),
        ({"replica_cap_rps": -1.0}, "--replica-cap -1"),
        ({"replica_cap_rps": float("nan")}, "--replica-cap nan"),
        ({"replica_cap_rps": float("inf")}, "--replica-cap inf"),
    ],
)
def test_parameters_out_of_range_are_refused(change: dict[str, object], word: str) -> None:
    """R or W below 1 and a cap that is no rate above 0 are named in an input error."""
    with pytest.raises(InvalidInput, match=word):
        built({1: 1.0}, **change)  # type: ignore[arg-type]


def test_endpoints_by_number_or_by_file(tmp_path: Path) -> None:
    """A number makes names, a file holds them, one a line."""
    assert endpoint_names("3") == ("endpoint-0", "endpoint-1", "endpoint-2")
    (tmp_path / "names").write_text("vllm-0\n\n  vllm-1 \n")
    assert endpoint_names(str(tmp_path / "names")) == ("vllm-0", "vllm-1")


@pytest.mark.parametrize("value", ["0", "-3"])
def test_fewer_than_one_endpoint_is_refused(value: str) -> None:
    """R below 1 is an input error."""
    with pytest.raises(InvalidInput, match="at least 1"):
        endpoint_names(value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "names no endpoint"), (b"a\nb\na\n", "line 3: 'a' stands on line 1 too"), (b"\xff\n", "UTF-8")],
)
def test_a_file_of_names_with_a_fault_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """An empty file, a repeated name and other bytes than text are told with file and line."""
    path = tmp_path / "names"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=words) as caught:
        endpoint_names(str(path))
    assert str(path) in str(caught.value)
    with pytest.raises(InvalidInput, match="cannot be read"):
        endpoint_names(str(tmp_path / "none"))
