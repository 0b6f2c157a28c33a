"""The engine patch's metrics: names, types, labels, and what `/metrics` shows when engines change, fail or restart."""

import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_patch.metrics import COUNTER, families, text
from engine_patch.policy import POLICIES


def status(**changes: Any) -> dict[str, Any]:
    """An attached engine's, with everything in it."""
    return {
        "engine": 0,
        "attached": True,
        "policy": "arc",
        "mode": "auto",
        "residual": -0.002,
        "drops": 3,
        "switch_counts": [{"from": "lru", "to": "arc", "cause": "auto", "count": 2}],
        "decisions": {"margin": 5},
        "shadow": {"up": True, "rates": {"lru": 0.25, "arc": 0.5}},
        "control_file": {"ignored": 1},
        **changes,
    }


def shown(*statuses: dict[str, Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    page = text(families(statuses, 1e9))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def value(found: dict[Any, float], name: str, **labels: str) -> float | None:
    return found.get((name, frozenset({"engine": "0", **labels}.items())))


def test_the_documented_names() -> None:
    """Every metric of an attached engine is there by its documented name, and Prometheus' parser reads the page."""
    found = shown(status())
    assert value(found, "wakman_attached") == 1
    assert {p: value(found, "wakman_policy", policy=p) for p in POLICIES} == {p: float(p == "arc") for p in POLICIES}
    assert (
        found[
            ("wakman_switches_total", frozenset({("engine", "0"), ("from", "lru"), ("to", "arc"), ("cause", "auto")}))
        ]
        == 2
    )
    assert value(found, "wakman_shadow_hit_rate", policy="lru") == 0.25
    assert value(found, "wakman_residual") == -0.002
    assert value(found, "wakman_events_dropped_total") == 3
    assert value(found, "wakman_decisions_total", reason="margin") == 5
    assert value(found, "wakman_shadow_up") == 1
    assert value(found, "wakman_automatic") == 1
    assert value(found, "wakman_control_file_ignored_total") == 1
    assert value(found, "wakman_status_timestamp_seconds") == 1e9
    kinds = {family.name: family.type for family in text_string_to_metric_families(text(families([status()], 1.0)))}
    assert kinds["wakman_switches"] == kinds["wakman_decisions"] == kinds["wakman_events_dropped"] == "counter"
    assert kinds["wakman_attached"] == kinds["wakman_shadow_hit_rate"] == "gauge"


def test_an_engine_that_is_not_attached() -> None:
    """It is shown as 0, no policy is live, and what is not known is left out rather than 0."""
    found = shown({"engine": 0, "attached": False, "reason": "hybrid model", "policy": None, "mode": "auto"})
    assert value(found, "wakman_attached") == 0
    assert [value(found, "wakman_policy", policy=p) for p in POLICIES] == [0.0] * len(POLICIES)
    assert value(found, "wakman_shadow_up") == 0
    assert value(found, "wakman_automatic") == 0
    assert value(found, "wakman_residual") is None
    assert value(found, "wakman_shadow_hit_rate", policy="lru") is None


def test_each_engine_has_its_own_series() -> None:
    """Data-parallel engines differ by the label `engine`; one whose answer is an error has none."""
    found = shown(status(), status(engine=1, policy="lru"), {"engine": 2, "error": "broken"})
    engines = {dict(labels)["engine"] for _, labels in found}
    assert engines == {"0", "1"}
    assert found[("wakman_policy", frozenset({("engine", "1"), ("policy", "lru")}))] == 1


def test_what_is_no_number_is_left_out() -> None:
    """NaN, null and text where a number belongs give no sample, and labels are escaped."""
    found = shown(
        status(residual=None, drops="many", shadow={"up": True, "rates": {"lru": math.nan}}, decisions={'a"b\\\n': 1})
    )
    assert value(found, "wakman_residual") is None
    assert value(found, "wakman_events_dropped_total") is None
    assert value(found, "wakman_shadow_hit_rate", policy="lru") is None
    assert value(found, "wakman_decisions_total", reason='a"b\\\n') == 1


EXPORT = """
    import sys
    from engine_patch.metrics import Exporter, families
    from prometheus_client import REGISTRY, CollectorRegistry, generate_latest, multiprocess
    sys.path.insert(0, {tests!r})
    from test_wakman_metrics import status
    exporter = Exporter()
    for statuses in ({statuses}):
        exporter.show(families(statuses, 1e9))
    registry = REGISTRY
    if {several}:
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
    print(generate_latest(registry).decode())
"""


def exported(statuses: str, folder: str = "") -> dict[str, float]:
    """Return what a process's /metrics shows after these statuses; folder: as with several API servers."""
    import os
    from pathlib import Path

    program = textwrap.dedent(EXPORT).format(tests=str(Path(__file__).parent), statuses=statuses, several=bool(folder))
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environ |= {"PROMETHEUS_MULTIPROC_DIR": folder} if folder else {}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("wakman_") and "_created" not in line]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_registry_shows_what_the_page_shows(tmp_path: Any) -> None:
    """On vLLM's /metrics, with one API server and with several, the series are those of `/v1/wakman/metrics`."""
    page = text(families([status()], 1e9)).splitlines()
    wanted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if not line.startswith("#")}
    wanted = {series(name): number for name, number in wanted.items()}
    for folder in ("", str(tmp_path)):
        assert {series(name): number for name, number in exported("[status()],", folder).items()} == wanted


def series(name: str) -> tuple[str, frozenset[str]]:
    """A series whatever the order of its labels."""
    metric, _, labels = name.partition("{")
    return metric, frozenset(labels.rstrip("}").split(","))


def test_counters_follow_the_engines_and_never_go_back() -> None:
    """A counter is what the engine counted, asked once or often; after a restart, which counts from 0, it goes on."""
    name = 'wakman_events_dropped_total{engine="0"}'
    assert exported("[status(drops=3)], [status(drops=3)], [status(drops=7)]")[name] == 7
    assert exported("[status(drops=7)], [status(drops=2)], [status(drops=4)]")[name] == 11


# What attachment.status says once it is detached: what the shadow said last is still in it.
DETACHED = "status(attached=False, policy=None, mode='off', shadow={'up': False, 'rates': {'lru': 0.25, 'arc': 0.5}})"


@pytest.mark.parametrize("several", [False, True])
def test_after_off_nothing_is_shown_as_if_it_were_live(several: bool, tmp_path: Any) -> None:
    """Detached, an engine has no shadow: its rates and residual are NaN with one API server and with several."""
    found = exported(f"[status()], [{DETACHED}]", str(tmp_path) if several else "")
    assert math.isnan(found['wakman_residual{engine="0"}'])
    for policy in ("lru", "arc"):
        assert math.isnan(found[f'wakman_shadow_hit_rate{{engine="0",policy="{policy}"}}'])
        assert found[f'wakman_policy{{engine="0",policy="{policy}"}}'] == 0
    assert found['wakman_attached{engine="0"}'] == found['wakman_shadow_up{engine="0"}'] == 0
    assert found['wakman_automatic{engine="0"}'] == 0
    assert found['wakman_events_dropped_total{engine="0"}'] == 3
    page = shown(eval(DETACHED))
    assert value(page, "wakman_shadow_up") == 0
    assert not {name for name, _ in page} & {"wakman_residual", "wakman_shadow_hit_rate"}


def test_a_shadow_that_does_not_run_tells_nothing() -> None:
    """Killed, it leaves no rates and no residual until it is back; the engine is attached all the same."""
    dead = "status(shadow={'up': False, 'rates': {'lru': 0.25, 'arc': 0.5}}, last_decision={'rates': {'lru': 0.25}})"
    found = exported(f"[status()], [{dead}]")
    assert found['wakman_attached{engine="0"}'] == 1
    assert found['wakman_shadow_up{engine="0"}'] == 0
    assert math.isnan(found['wakman_residual{engine="0"}'])
    assert math.isnan(found['wakman_shadow_hit_rate{engine="0",policy="lru"}'])
    assert exported(f"[status()], [{dead}], [status()]")['wakman_residual{engine="0"}'] == -0.002


@pytest.mark.parametrize("several", [False, True])
def test_an_engine_that_falls_silent_keeps_its_timestamp(several: bool, tmp_path: Any) -> None:
    """One of two does not answer: its series stand still, so that an alert on its timestamp fires; told again, end."""
    silent = "{'engine': 1, 'silent': True, 'error': 'engine 1 did not answer'}"
    folder = str(tmp_path) if several else ""
    found = exported(f"[status(), status(engine=1)], [status(), {silent}], [status(), {silent}]", folder)
    for engine in (0, 1):
        assert found[f'wakman_status_timestamp_seconds{{engine="{engine}"}}'] == 1e9
        assert found[f'wakman_residual{{engine="{engine}"}}'] == -0.002
    found = exported(f"[status(engine=1)], [{silent}], [status(engine=1, shadow=None)]")
    assert math.isnan(found['wakman_residual{engine="1"}'])


def test_every_counter_is_named_as_prometheus_wants() -> None:
    """Counters end in `_total`, gauges do not."""
    for family in families([], 0.0):
        assert family.name.startswith("wakman_")
        assert family.name.endswith("_total") == (family.kind == COUNTER)
