"""Rules of the table: the plan's assignment by name, and an age that is never negative."""

from array import array

from service.keys import hash_key
from service.plan import Plan
from service.table import Table, build_table


def test_table_holds_the_plans_assignment() -> None:
    """Each key gets its targets' names in plan order; equal sets share one tuple."""
    plan = Plan(
        endpoints=("a", "b", "c"),
        key_hashes=array("Q", [1, 2, 3, 4, 5]),
        target_offsets=array("I", [0, 1, 3, 4, 6, 7]),
        targets=array("I", [2, 0, 1, 2, 0, 1, 1]),
        rates_rps=array("f", [5, 4, 3, 2, 1]),
        key_check=0,
        version=3,
        epoch=9,
        created_at=100.0,
    )
    table = build_table(plan)
    assert table.targets == {1: ("c",), 2: ("a", "b"), 3: ("c",), 4: ("a", "b"), 5: ("b",)}
    assert table.targets[1] is table.targets[3]
    assert table.targets[2] is table.targets[4]
    assert (table.version, table.epoch) == (3, 9)
    assert table.age_s(130.5) == 30.5
    assert table.age_s(50.0) == 0.0
    assert Table().age_s(1e9) == 0.0


def test_key_hash_is_fixed_for_good() -> None:
    """Plans outlive processes and versions: these values never change."""
    assert f"{hash_key(b'tenant-1'):016x}" == "b4d0f657fa3a2347"
    assert f"{hash_key(b'tenant-1', b'pepper'):016x}" == "d00fc1d41e0c0f91"
    assert f"{hash_key(b''):016x}" == "4e5cf43589ef081c"
