"""One answer made of several workers' answers."""

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from service.aggregate import Together, load_of_others, together_fleet, together_table


@pytest.fixture(autouse=True)
def like_the_service() -> Iterator[None]:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    yield
    enable_created_metrics()  # type: ignore[no-untyped-call]


def text(worker: int) -> str:
    """What a worker's /metrics says."""
    registry = CollectorRegistry()
    Counter("requests", "Requests.", ["key"], registry=registry).labels('a"\\\n').inc(worker + 1)
    Gauge("streams", "Open streams.", registry=registry).set(worker)
    Histogram("decide", "Time.", buckets=(1.0, 2.0), registry=registry).observe(1.5)
    return generate_latest(registry).decode()


def test_series_of_all_workers_stand_under_one_description() -> None:
    """Labels and values stay, a label says whose they are, and what is made parses again in both formats."""
    own = GaugeMetricFamily("up", "Up.", labels=["worker"])
    own.add_metric(["0"], 1.0)
    merged = Together({1: text(1), 0: text(0)}, [own])
    plain = list(text_string_to_metric_families(generate_latest(merged).decode()))
    openmetrics = list(parse_openmetrics(generate_openmetrics(merged).decode()))  # type: ignore[no-untyped-call]
    for families in (plain, openmetrics):
        assert [f.name for f in families] == ["up", "requests", "streams", "decide"]
        assert {f.name: f.type for f in families}["requests"] == "counter"
        values = {(s.name, s.labels.get("worker"), s.labels.get("le")): s.value for f in families for s in f.samples}
        assert values["requests_total", "0", None] == 1
        assert values["requests_total", "1", None] == 2
        assert values["streams", "1", None] == 1
        assert values["decide_bucket", "1", "2.0"] == 1
        keys = {s.labels["key"] for f in families for s in f.samples if s.name == "requests_total"}
        assert keys == {'a"\\\n'}


def test_nobody_answered() -> None:
    """Without any worker there is still a text."""
    assert generate_latest(Together({})) == b""


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
