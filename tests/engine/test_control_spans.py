"""One span a switch reaches a real collector, over both protocols; a collector that is slow or away stops nobody."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_patch.switch_spans import QUEUED_MOST, SwitchSpans, why_off
from tests.engine.otlp import Collector

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="vLLM brings the exporters")

ENTRY = {"from": "lru", "to": "arc", "cause": "auto", "actor": "switcher", "why": "arc 0.5, lru 0.4", "took_s": 0.25}


@pytest.fixture(params=["http/protobuf", "grpc"])
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    found = Collector(request.param)
    use(found, monkeypatch)
    yield found
    found.close()


def use(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=vllm-0")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)


def eventually(condition: Callable[[], Any], timeout_s: float = 30) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.01)
    return found


def test_a_switch_is_one_span(collector: Collector) -> None:
    """Name, attributes, resource, and the time that the switch took, as the standard variables say."""
    spans = SwitchSpans()
    spans.start()
    spans.switched(ENTRY, {"wakman.engine": 1, "wakman.hit_rate.arc": 0.5, "wakman.window_s": None})
    (span,) = eventually(lambda: collector.spans)
    assert span["name"] == "wakman_switch"
    assert span["attributes"] == {
        "wakman.from": "lru",
        "wakman.to": "arc",
        "wakman.cause": "auto",
        "wakman.actor": "switcher",
        "wakman.why": "arc 0.5, lru 0.4",
        "wakman.engine": 1,
        "wakman.hit_rate.arc": 0.5,
    }
    assert span["resource"]["service.name"] == "vllm"
    assert span["resource"]["k8s.pod.name"] == "vllm-0"
    assert span["end"] - span["begin"] == 250_000_000
    assert abs(span["end"] / 1e9 - time.time()) < 60
    eventually(lambda: spans.status()["sent"] == 1)
    spans.close()
    spans.switched({**ENTRY, "cause": "fault"}, {})
    eventually(lambda: len(collector.spans) == 2)
    assert eventually(lambda: all(t.name != "wakman-spans" for t in threading.enumerate()))


def test_a_slow_collector_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an export hangs, switches return at once; beyond a short queue the oldest spans are dropped and counted."""
    answers = threading.Event()
    collector = Collector(answers=answers)
    use(collector, monkeypatch)
    spans = SwitchSpans()
    spans.start()
    spans.switched(ENTRY, {})
    eventually(lambda: not spans._queue)
    caller = threading.Thread(target=lambda: [spans.switched(ENTRY, {}) for _ in range(QUEUED_MOST + 7)], daemon=True)
    caller.start()
    caller.join(20)
    assert not caller.is_alive()
    assert spans.status()["dropped"] == 7
    answers.set()
    eventually(lambda: len(collector.spans) == QUEUED_MOST + 1)
    spans.close()
    collector.close()


def test_a_collector_that_is_away_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span that nobody takes is a failure in the status, and the next one is tried again."""
    collector = Collector()
    collector.close()
    use(collector, monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    spans = SwitchSpans()
    spans.start()
    for count in (1, 2):
        spans.switched(ENTRY, {})
        eventually(lambda count=count: spans.status()["failed"] == count)
    assert spans.status()["sent"] == 0
    assert spans.status()["error"]
    spans.close()


def test_a_setting_that_is_wrong_turns_spans_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown protocol is said in the status; switches go on without spans."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "smoke")
    spans = SwitchSpans()
    spans.start()
    spans.switched(ENTRY, {})
    assert "smoke" in eventually(lambda: spans.status()["off"])
    assert eventually(lambda: not spans._queue)
    spans.switched(ENTRY, {})
    assert not spans._queue


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "console,otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "TRUE"}, False),
    ],
)
def test_spans_are_on_where_the_standard_variables_say_so(environ: dict[str, str], on: bool) -> None:
    """Without an endpoint for traces, or where the SDK or the exporter is off, no thread starts and nothing is kept."""
    assert (why_off(environ) == "") is on
    if not on:
        spans = SwitchSpans(environ)
        spans.start()
        spans.switched(ENTRY, {})
        assert not spans._queue
        assert spans.status()["on"] is False
