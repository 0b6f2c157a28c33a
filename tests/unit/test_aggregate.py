"""One answer made of several workers' answers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from service.aggregate import load_of_others, together_fleet, together_metrics, together_table

# What a label may hold, and what could be taken for the end of something.
HARD = ['a"\\\n', "{", "}", 'x{y="z",w="1"} 2', "é \u2028 日本", ",", "# HELP requests x", " ", "", "# EOF", "a\\"]
FORMATS = [(generate_latest, parse_plain), (generate_openmetrics, parse_openmetrics)]


@pytest.fixture(autouse=True)
def like_the_service() -> Iterator[None]:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    yield
    enable_created_metrics()  # type: ignore[no-untyped-call]


def filled(worker: int) -> CollectorRegistry:
    """What a worker's /metrics tells of."""
    registry = CollectorRegistry()
    requests = Counter("requests", 'Requests.\nIn "two" lines, {braced}.', ["key"], registry=registry)
    for key in HARD:
        requests.labels(key).inc(worker + 1)
    Gauge("streams", "Open streams.", registry=registry).set(worker)
    Gauge("empty", "", ["none"], registry=registry)
    Histogram("decide", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    if worker == 1:
        Gauge("late", "Only one has it.", registry=registry).set(float("nan"))
    return registry


@pytest.mark.parametrize(("write", "parse"), FORMATS)
def test_series_of_all_workers_stand_under_one_description(
    write: Callable[[Any], bytes], parse: Callable[[str], Iterator[Metric]]
) -> None:
    """In each format every series of every worker is there under its label, as it was, and every family stands once."""
    registry = CollectorRegistry()
    own = GaugeMetricFamily("up", "Up.", labels=["worker"])
    own.add_metric(["0"], 1.0)
    registry.register(type("Own", (), {"collect": lambda _: [own]})())
    merged = together_metrics(write(registry), [(str(n), write(filled(n))) for n in (0, 1)]).decode()
    families = list(parse(merged))
    assert [f.name for f in families] == ["up", "requests", "streams", "empty", "decide", "late"]
    described = {f.name: (f.type, f.documentation) for f in filled(1).collect()}
    assert {f.name: (f.type, f.documentation) for f in families if f.name != "up"} == described

    def series(of: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], str]:
        samples = [s for family in of for s in family.samples]
        found = {(s.name, frozenset(s.labels.items())): str(s.value) for s in samples}
        assert len(found) == len(samples)
        return found

    expected = {("up", frozenset({("worker", "0")})): "1.0"}
    for n in (0, 1):
        alone = series(parse(write(filled(n)).decode()))
        expected |= {(name, labels | {("worker", str(n))}): value for (name, labels), value in alone.items()}
    assert series(families) == expected
    keys = {dict(labels)["key"] for name, labels in expected if name == "requests_total"}
    assert keys == set(HARD)


@pytest.mark.parametrize("write", [write for write, _ in FORMATS])
def test_nobody_answered(write: Callable[[Any], bytes]) -> None:
    """Without any worker there is still a text."""
    assert together_metrics(write(CollectorRegistry()), []) == write(CollectorRegistry())


def endpoint(name: str, **facts: Any) -> dict[str, Any]:
    """An endpoint as /fleet tells it."""
    plain = {"ready": True, "draining": False, "warming": False, "inflight": 0, "inflight_elsewhere": 0}
    return {"name": name, "address": f"{name}:1", **plain, **facts}


def test_in_flight_is_the_sum_and_readiness_what_all_say() -> None:
    """Requests add up; one worker that finds an endpoint unready, draining or warming is enough to say so."""
    answers: list[dict[str, Any]] = [
        {"endpoints": [endpoint("a", inflight=3, inflight_elsewhere=4), endpoint("b", ready=False)]},
        {"endpoints": [endpoint("a", inflight=4, inflight_elsewhere=3, warming=True), endpoint("b", draining=True)]},
        {"endpoints": [endpoint("a", inflight=0, inflight_elsewhere=7)]},
    ]
    assert together_fleet(answers, others_known=True) == {
        "endpoints": [endpoint("a", inflight=7, warming=True), endpoint("b", ready=False, draining=True)]
    }


@pytest.mark.parametrize(("others_known", "elsewhere"), [(True, 10), (False, 0)])
def test_elsewhere_is_what_other_instances_have(others_known: bool, elsewhere: int) -> None:
    """What workers have of each other is no longer elsewhere; without Redis there is nobody else."""
    answers: list[dict[str, Any]] = [
        {"endpoints": [endpoint("a", inflight=3, inflight_elsewhere=14)]},
        {"endpoints": [endpoint("a", inflight=4, inflight_elsewhere=13)]},
    ]
    (found,) = together_fleet(answers, others_known=others_known)["endpoints"]
    assert (found["inflight"], found["inflight_elsewhere"]) == (7, elsewhere)


def test_the_table_is_the_oldest() -> None:
    """Epoch counts before version; each worker's own stands beside, in order."""
    answers = {2: {"version": 9, "epoch": 1}, 0: {"version": 3, "epoch": 2}, 1: {"version": 8, "epoch": 1}}
    assert together_table(answers) == {
        "version": 8,
        "epoch": 1,
        "workers": [
            {"worker": 0, "version": 3, "epoch": 2},
            {"worker": 1, "version": 8, "epoch": 1},
            {"worker": 2, "version": 9, "epoch": 1},
        ],
    }


def test_each_is_told_the_others_load() -> None:
    """Requests and work add up over all but the one that is told."""
    loads = {0: {"a": (1, 10), "b": (2, 20)}, 1: {"a": (3, 30)}, 2: {}}
    assert load_of_others(loads, 0) == {"a": (3, 30)}
    assert load_of_others(loads, 2) == {"a": (4, 40), "b": (2, 20)}
