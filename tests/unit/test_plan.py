"""Rules of the plan as a value: what `check` refuses, and that bytes keep everything."""

import contextlib
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InvalidPlan
from service.keys import KEY_CHECK, hash_key
from service.pb import plan_pb2
from service.plan import Parameters, Plan, check, decode, encode

CHECK = hash_key(KEY_CHECK)


def small(**changes: object) -> Plan:
    plan = Plan(
        endpoints=("a", "b", "c"),
        key_hashes=array("Q", [11, 22, 2**64 - 1]),
        target_offsets=array("I", [0, 1, 3, 4]),
        targets=array("I", [0, 1, 2, 0]),
        rates_rps=array("f", [3.0, 2.0, 1.0]),
        key_check=CHECK,
        parameters=Parameters("lpt", 64, 2.5, 10, 7.0, 6.0),
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    n = draw(st.integers(1, 6))
    keys = draw(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=20))
    offsets, targets = [0], []
    for _ in keys:
        targets += draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=n))
        offsets.append(len(targets))
    rates = draw(st.lists(st.floats(0, 1e6, width=32), min_size=len(keys), max_size=len(keys)))
    return Plan(
        endpoints=tuple(f"endpoint-{i}" for i in range(n)),
        key_hashes=array("Q", keys),
        target_offsets=array("I", offsets),
        targets=array("I", targets),
        rates_rps=array("f", rates),
        key_check=CHECK,
    )


@given(plans())
def test_bytes_keep_everything(plan: Plan) -> None:
    """Decoding what was encoded gives the same plan, and the same plan gives the same bytes."""
    data = encode(plan)
    assert decode(data, key_check=CHECK) == plan
    assert encode(decode(data)) == data


def test_content_digest_ignores_the_publication() -> None:
    """Two publications of one assignment have one content digest; another assignment has another."""
    plan = small()
    published = plan.published(version=7, epoch=2, created_at=123.5, actor="me", reason="why")
    assert published.content_sha256() == plan.content_sha256()
    assert small(rates_rps=array("f", [3.0, 2.0, 1.5])).content_sha256() != plan.content_sha256()


def test_the_same_assignment_at_other_rates_is_the_same() -> None:
    """Rates, row order and target order are no difference; a key more, or another target, is."""
    plan = small()
    reordered = small(
        key_hashes=array("Q", [22, 2**64 - 1, 11]),
        target_offsets=array("I", [0, 2, 3, 4]),
        targets=array("I", [2, 1, 0, 0]),
        rates_rps=array("f", [9.0, 8.0, 7.0]),
        parameters=Parameters("lpt", 1, 1.0, 1, 1.0, 1.0),
    )
    assert plan.assigns_as(reordered)
    assert not plan.assigns_as(small(targets=array("I", [1, 1, 2, 0])))
    assert not plan.assigns_as(small(key_hashes=array("Q", [11, 22, 33])))
    assert not plan.assigns_as(small(endpoints=("a", "b", "z")))


def test_target_names_of_a_row() -> None:
    """A row's targets come back as names in plan order."""
    assert [small().target_names(i) for i in range(3)] == [("a",), ("b", "c"), ("a",)]


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        ("columns", {"rates_rps": array("f", [1.0])}),
        ("columns", {"target_offsets": array("I", [0, 1, 3])}),
        ("columns", {"target_offsets": array("I", [0, 1, 3, 9])}),
        ("columns", {"target_offsets": array("I", [1, 1, 3, 4])}),
        ("endpoint", {"targets": array("I", [0, 1, 3, 0])}),
        ("endpoint", {"endpoints": ("a", "b", "b")}),
        ("endpoint", {"endpoints": ("a", "", "c")}),
        ("key", {"key_hashes": array("Q", [11, 11, 12])}),
        ("rate", {"rates_rps": array("f", [1.0, -1.0, 1.0])}),
        ("rate", {"rates_rps": array("f", [1.0, float("nan"), 1.0])}),
        ("rate", {"rates_rps": array("f", [1.0, float("inf"), 1.0])}),
        ("targets", {"targets": array("I", [0, 1, 1, 0])}),
        ("targets", {"target_offsets": array("I", [0, 0, 3, 4])}),
        ("targets", {"target_offsets": array("I", [0, 3, 2, 4])}),
        ("salt", {"key_check": hash_key(KEY_CHECK, b"pepper")}),
    ],
)
def test_a_broken_rule_is_named(cause: str, changes: dict[str, object]) -> None:
    """Each rule of the module refuses its own fault, with a cause short enough for a metric label."""
    with pytest.raises(InvalidPlan) as caught:
        check(small(**changes), key_check=CHECK)
    assert caught.value.cause == cause


def test_foreign_bytes_are_corrupt_and_unknown_schema_is_named() -> None:
    """Bytes that are no plan, and a plan of a later schema, are refused with causes of their own."""
    with pytest.raises(InvalidPlan) as caught:
        decode(b"\xff\xff\xff not a plan")
    assert caught.value.cause == "corrupt"
    with pytest.raises(InvalidPlan, match="schema 99") as caught:
        decode(plan_pb2.Plan(schema=99).SerializeToString())
    assert caught.value.cause == "schema"
    with pytest.raises(InvalidPlan) as caught:
        decode(b"")
    assert caught.value.cause == "schema"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    """Whatever Redis or a disk hands us, `decode` returns a plan or raises InvalidPlan."""
    with contextlib.suppress(InvalidPlan):
        check(decode(data))


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_flipped_byte_is_a_plan_or_refused(position: int, value: int) -> None:
    """Damage inside a real plan never escapes as another exception."""
    data = bytearray(encode(small()))
    data[position % len(data)] = value
    with contextlib.suppress(InvalidPlan):
        check(decode(bytes(data)))
