"""Makes the gRPC server that Envoy dials: its bounds, its port, its TLS, its health services.

1. Bounds: the streams of one connection, the size of a message, the size of metadata. `streams_per_connection` is
   announced to Envoy, which opens further connections beyond it; the kernel gives each of them to one of the workers.
   It is no means to spread few streams: what Envoy sends into a new connection before it has heard of a bound is
   refused beyond it (gRPC answers ENHANCE_YOUR_CALM), and such a request goes its way without us. Measured on Envoy
   1.40: of 50 requests at once 34 to 42 with a bound of 8. Envoy's own `max_concurrent_streams` refuses nothing.
2. A connection whose other side has vanished without a word is found by pings, so that its streams end and their
   charges are taken back. A gateway that pings often is never punished for it.
3. One process alone does not share its port. Workers do, under a supervisor that holds it (`service.ports`).
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.extproc import SERVICE
from service.ports import check_port, port_refused
from service.tls import Certificates, Pair

# "" is what a gateway's own health check asks when it names no service.
HEALTH_SERVICES = ("", "liveness", "readiness", "inference-extension", SERVICE)
# A process that drains is alive: nobody shall restart it for that.
ALIVE_WHILE_DRAINING = "liveness"

# Twice what Envoy lets all headers of a request have together.
METADATA_MAX_BYTES = 128 * 1024
# Of workers, and with TLS: connections are dealt out anew now and then, so that a worker that was restarted gets its
# share, and a certificate or CA that was replaced is out of use at last. Envoy loses no request by it (GOAWAY).
CONNECTION_AGE_S = 60.0
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000


def new_server(
    *,
    streams_per_connection: int = 256,
    message_max_bytes: int = 4 * 1024 * 1024,
    shares_port: bool = False,
    connection_age_s: float | None = None,
) -> grpc.aio.Server:
    """Return a gRPC server that bears long-lived streams.

    shares_port: other workers listen on its port too.  connection_age_s: after it, give or take a tenth, new streams
    need a new connection, and those that are open end in peace (None: connections are for ever).
    """
    age = [] if connection_age_s is None else [("grpc.max_connection_age_ms", int(1000 * connection_age_s))]
    return grpc.aio.server(
        options=[
            *age,
            ("grpc.so_reuseport", int(shares_port)),
            ("grpc.max_concurrent_streams", streams_per_connection),
            # gRPC counts a stream until it is freed, Envoy until it ends: on a full connection gRPC would refuse what
            # Envoy rightly sends, and Envoy would go on without an answer.
            ("grpc.http.overload_protection", 0),
            ("grpc.max_receive_message_length", message_max_bytes),
            # Our own are as long as Envoy's where bodies are sent back.
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", METADATA_MAX_BYTES),
            # Between the two limits gRPC refuses at random; with both equal a size passes or it does not.
            ("grpc.absolute_max_metadata_size", METADATA_MAX_BYTES),
            ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_ping_strikes", 0),
        ]
    )


def bind(
    server: grpc.aio.Server, listen: str, *, shares_port: bool = False, certificates: Certificates | None = None
) -> int:
    """Bind the server, with TLS where certificates are given; return the port, raise InvalidInput when it is taken.

    From here on clients connect, so start the server at once: until then they wait.
    """
    if not shares_port:
        # A plain socket's error says why; gRPC's only says that it failed, in a log of its own.
        check_port(listen)
    try:
        if certificates is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, _credentials(certificates))
    except RuntimeError as exc:
        raise port_refused(listen, "address cannot be bound") from exc


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials that each new connection takes anew; connections that stand keep theirs."""
    served = certificates.current

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Called in gRPC's threads before each handshake: nothing is read here, and None means that all stays.
        nonlocal served
        if certificates.current is served:
            return None
        served = certificates.current
        return _configuration(served)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(served),
        changed,  # type: ignore[arg-type]  # None is documented, and missing in the stubs
        require_client_authentication=served.client_ca is not None,
    )


def _configuration(pair: Pair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], root_certificates=pair.client_ca)


class Health:
    """The gRPC health services; everything serves until `drain`."""

    def __init__(self, server: grpc.aio.Server) -> None:
        """Add them to a server that has not started."""
        self._servicer = _Servicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def serve(self) -> None:
        """Answer SERVING for each name."""
        for name in HEALTH_SERVICES:
            self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def drain(self) -> None:
        """Answer NOT_SERVING, so that gateways send new requests elsewhere."""
        for name in HEALTH_SERVICES:
            if name != ALIVE_WHILE_DRAINING:
                self._servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    def end_watches(self) -> None:
        """End the streams of those who watch: they are no requests, and would hold the end of the server up."""
        self._servicer.end_watches()


class _Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The health service, with watches that end when they are told, between two answers.

    gRPC's own can only be cancelled. A cancel that meets an answer under way can leave the stream open for ever, and
    the end of the server then waits for it.
    """

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._over = False

    def set(self, name: str, status: Any) -> None:
        self._status[name] = status
        self._tell()

    def end_watches(self) -> None:
        self._over = True
        self._tell()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  # gRPC's name
        if request.service not in self._status:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._status[request.service])

    async def Watch(self, request: Any, context: Any) -> None:  # noqa: N802  # gRPC's name
        last = None
        while True:
            changed, over = self._changed, self._over
            status = self._status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            if over:
                return
            await changed.wait()

    def _tell(self) -> None:
        # Who waits has the old event; who comes later, or was writing, sees what is new before it waits for the next.
        self._changed.set()
        self._changed = asyncio.Event()
