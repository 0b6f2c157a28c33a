"""Sends one OpenTelemetry span a switch, `wakman_switch`, so that a change of hit rate is seen beside its cause.

1. Configured by the standard variables alone: `OTEL_EXPORTER_OTLP_ENDPOINT` (or `…_TRACES_ENDPOINT`), `…_PROTOCOL`,
   `…_HEADERS`, `…_TIMEOUT`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_EXPORTER=none`,
   `OTEL_SDK_DISABLED=true`. Without an endpoint nothing is imported, started or sent.
2. The engine's thread appends to a short queue (about 4 µs) and goes on. A daemon thread, begun when the engine
   attaches (the SDK takes a second to import, which must not happen under traffic), builds the exporter and sends; a
   collector that is slow or away holds that thread alone.
3. When the queue is full the oldest span is dropped and counted. Whatever fails is counted, said in `status`, and costs
   no more than the span.
4. The provider is this module's own: the one that vLLM may have set for its request spans is neither used nor replaced.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

QUEUED_MOST = 64
LATE_S = 1.0
SPAN = "wakman_switch"


class SwitchSpans:
    """The spans of one engine."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Nothing is imported or started before `start`."""
        self._off = why_off(environ)
        self._queue: deque[tuple[int, int, dict[str, Any]]] = deque()
        self._wake = threading.Event()
        self._ended = False
        self._sent = self._failed = self._dropped = 0
        self._error = ""

    def start(self) -> None:
        """Begin the thread if spans are to be sent; returns at once."""
        if not self._off:
            threading.Thread(target=self._run, name="wakman-spans", daemon=True).start()

    def switched(self, entry: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        """Send a span for this entry of the history; more: further attributes. Never blocks, never raises."""
        if self._off:
            return
        try:
            end_ns = time.time_ns()
            begin_ns = end_ns - int(float(entry.get("took_s") or 0.0) * 1e9)
            told = {f"wakman.{name}": entry.get(name) for name in ("from", "to", "cause", "actor", "why")}
            if len(self._queue) >= QUEUED_MOST:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append((begin_ns, end_ns, _attributes({**told, **more})))
            self._wake.set()
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"

    def status(self) -> dict[str, Any]:
        """Return whether spans are sent, why not (`off`), and how many were sent, failed and dropped."""
        return {
            "on": not self._off,
            "off": self._off,
            "sent": self._sent,
            "failed": self._failed,
            "dropped": self._dropped,
            "error": self._error,
        }

    def close(self) -> None:
        """End the thread, without waiting for it, once what is queued or comes within `LATE_S` is sent.

        A detachment closes first and is then told as the last switch.
        """
        self._ended = True
        self._wake.set()

    def _run(self) -> None:
        try:
            tracer, shutdown = self._tracer()
        except Exception as exc:
            self._off = f"{type(exc).__name__}: {exc}"
            self._queue.clear()
            return
        last = False
        while True:
            self._wake.clear()
            while self._queue:
                begin_ns, end_ns, attributes = self._queue.popleft()
                try:
                    tracer.start_span(SPAN, start_time=begin_ns, attributes=attributes).end(end_time=end_ns)
                except Exception as exc:
                    self._failed += 1
                    self._error = f"{type(exc).__name__}: {exc}"
            if not self._ended:
                self._wake.wait()
            elif not last:
                last = True
                time.sleep(LATE_S)
            else:
                shutdown()
                return

    def _tracer(self) -> tuple[Any, Any]:
        """Return a tracer whose spans are exported as they end, in the thread that ends them, and what ends it."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
        from opentelemetry.sdk.trace.export import SpanExportResult

        exporter = otlp_exporter()
        spans = self

        class Sender(SpanProcessor):  # type: ignore[misc, unused-ignore]
            def on_end(self, span: Any) -> None:
                try:
                    done = exporter.export((span,)) is SpanExportResult.SUCCESS
                    error = "" if done else "the exporter could not deliver it"
                except Exception as exc:
                    done, error = False, f"{type(exc).__name__}: {exc}"
                spans._sent += done
                spans._failed += not done
                spans._error = error

        # vLLM's service name unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says otherwise.
        resource = Resource({"service.name": "vllm", "process.pid": os.getpid()}).merge(_from_environment())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(Sender())
        return provider.get_tracer("wakman"), exporter.shutdown


def why_off(environ: Mapping[str, str] = os.environ) -> str:
    """Return why no span is sent, empty when they are; reads variables alone."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "OTEL_SDK_DISABLED is true"
    exporters = [name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")]
    if "otlp" not in exporters:
        return "OTEL_TRACES_EXPORTER has no otlp"
    if not any(environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("TRACES_ENDPOINT", "ENDPOINT")):
        return "OTEL_EXPORTER_OTLP_ENDPOINT is not set"
    return ""


def otlp_exporter(environ: Mapping[str, str] = os.environ) -> Any:
    """Return the exporter of the protocol that the variables name, gRPC by default as OpenTelemetry's Python has it."""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol.strip() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol.strip() == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL={protocol!r} is neither grpc nor http/protobuf")


def _from_environment() -> Any:
    from opentelemetry.sdk.resources import OTELResourceDetector

    return OTELResourceDetector().detect()


def _attributes(told: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in told.items()
        if isinstance(value, str | bool | int | float) and value is not None and value != ""
    }
