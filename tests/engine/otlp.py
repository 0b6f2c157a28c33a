"""A collector of OpenTelemetry spans over HTTP or gRPC, for tests that want to see what was really sent."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """Receives spans until closed. `spans`: name, attributes, begin and end (ns) and the resource of each."""

    def __init__(self, protocol: str = "http/protobuf", answers: threading.Event | None = None) -> None:
        """answers: no export is answered before it is set."""
        self.spans: list[dict[str, Any]] = []
        self._answers = answers
        self.protocol = protocol
        self.port = self._serve_http() if protocol == "http/protobuf" else self._serve_grpc()

    @property
    def environment(self) -> Mapping[str, str]:
        """The standard variables by which an exporter finds it."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
        }

    def received(self, request: Any) -> None:
        if self._answers is not None:
            self._answers.wait()
        for resource in request.resource_spans:
            found = {a.key: a.value.string_value or a.value.int_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    {
                        "name": span.name,
                        "begin": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "attributes": {a.key: _value(a.value) for a in span.attributes},
                        "resource": found,
                    }
                    for span in scope.spans
                ]

    def close(self) -> None:
        self._close()

    def _serve_http(self) -> int:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        collector = self

        class Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.received(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def close() -> None:
            server.shutdown()
            server.server_close()

        self._close = close
        return int(server.server_address[1])

    def _serve_grpc(self) -> int:
        import grpc
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

        collector = self

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
                collector.received(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._close = lambda: server.stop(None) and None
        return int(port)


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
