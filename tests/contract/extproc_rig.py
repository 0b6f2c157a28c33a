"""A served external processor with its state and a client, and the messages that a gateway would send it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from service.answers import Answers
from service.extproc import ExternalProcessor
from service.fairness import Fairness
from service.fleet import Endpoint, Fleet
from service.keys import KeyReader, hash_key
from service.pb import ext_proc_pb2 as pb
from service.rates import Rates
from service.server import bind, new_server
from service.table import Current, Table
from service.telemetry import Telemetry

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
A, B, C = "10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"


class Rig:
    """A processor over three endpoints, its state, and a client."""

    def __init__(self, **options: Any) -> None:
        """options: of Answers, and streams_max."""
        streams_max = options.pop("streams_max", 20_000)
        self.fleet = Fleet((("a", A), ("b", B), ("c", C)))
        self.current = Current(Table(7, 1, 1000.0, {hash_key(b"acme"): ("b", "c"), hash_key(b"solo"): ("a",)}))
        self.rates = Rates(30, 300)
        self.telemetry = Telemetry(CollectorRegistry())
        self.dead: list[str] = []
        self.ejected: list[str] = []
        self.suspects: list[str] = []
        self.fairness: Fairness | None = options.get("fairness")
        self.answers = Answers(
            self.fleet,
            self.current,
            self.rates,
            self.telemetry,
            Random(0),
            on_connect_failure=self.on_dead,
            on_ejected=lambda e: self.ejected.append(e.name),
            on_suspect=lambda e: self.suspects.append(e.name),
            clock=lambda: 1012.5,
            **{"key_reader": KeyReader(("x-tenant-id", "x-user"), 64), **options},
        )
        self.processor = ExternalProcessor(self.answers, self.telemetry, streams_max)
        self.channel: grpc.aio.Channel

    def on_dead(self, endpoint: Endpoint) -> None:
        """Do what the prober does."""
        self.dead.append(endpoint.name)
        self.fleet.connect_failed(endpoint)

    def inflight(self) -> dict[str, int]:
        """Requests in flight by endpoint."""
        return {e.name: e.inflight for e in self.fleet.endpoints}

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, 0 when it has none yet."""
        return self.telemetry.registry.get_sample_value(f"cacheroute_{name}", labels) or 0.0

    def stream(self) -> Any:
        """A stream as a gateway opens one."""
        return self.channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until the server has come so far."""
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)

    async def settled(self) -> dict[str, int]:
        """In-flight counts once the server has seen all streams end."""
        await self.until(lambda: not self.telemetry.streams)
        return self.inflight()

    async def exchange(self, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """All that is answered to these messages until the stream ends, which it must without an error."""
        call = self.stream()
        for message in messages:
            await call.write(message)
        await call.done_writing()
        replies = [reply async for reply in call]
        assert await call.code() == grpc.StatusCode.OK
        return replies


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[Rig]:
    """Serve a rig."""
    rig = Rig(**options)
    server = new_server()
    server.add_generic_rpc_handlers((rig.processor.rpc(),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as rig.channel:
            yield rig
    finally:
        await server.stop(0)


def request(shadow: bool = False, **headers: str | bytes) -> pb.ProcessingRequest:
    """Request headers; `_` in names stands for `-`."""
    message = pb.ProcessingRequest(observability_mode=shadow)
    message.request_headers.SetInParent()
    for name, value in headers.items():
        raw = value if isinstance(value, bytes) else value.encode()
        message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=raw)
    return message


def response(
    status: str = "200",
    served: str = "",
    attempts: float = 1,
    *,
    metadata: str = "",
    end: bool = False,
    shadow: bool = False,
) -> pb.ProcessingRequest:
    """Response headers with what Envoy tells; served: attribute, metadata: as the protocol says it."""
    message = pb.ProcessingRequest(observability_mode=shadow)
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    message.response_headers.end_of_stream = end
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    if served:
        fields["upstream.address"].string_value = served
    fields["upstream.request_attempt_count"].number_value = attempts
    if metadata:
        spaces = message.metadata_context.filter_metadata
        spaces["envoy.lb"].fields["x-gateway-destination-endpoint-served"].string_value = metadata
    return message


def other(kind: str, *, shadow: bool = False) -> pb.ProcessingRequest:
    """An empty message of a kind."""
    message = pb.ProcessingRequest(observability_mode=shadow)
    getattr(message, kind).SetInParent()
    return message


def body(kind: str, data: bytes, *, end: bool = False, shadow: bool = False) -> pb.ProcessingRequest:
    """A part of a body."""
    message = other(kind, shadow=shadow)
    getattr(message, kind).body, getattr(message, kind).end_of_stream = data, end
    return message


def with_modes(message: pb.ProcessingRequest, up: str, down: str) -> pb.ProcessingRequest:
    """The message as the first of a stream whose gateway tells its modes."""
    message.protocol_config.request_body_mode = pb.ProtocolConfiguration.BodySendMode.Value(up)
    message.protocol_config.response_body_mode = pb.ProtocolConfiguration.BodySendMode.Value(down)
    return message


def hint(message: pb.ProcessingRequest, value: object) -> pb.ProcessingRequest:
    """The message with a subset hint of any JSON value."""
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"x-gateway-destination-endpoint-subset": value}
    )
    return message


def picked(reply: pb.ProcessingResponse) -> list[str]:
    """The list of a reply, after checking that header and metadata say the same."""
    (option,) = reply.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    value: str = option.header.raw_value.decode()
    assert reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value == value
    return value.split(",")


def set_headers(options: Sequence[pb.HeaderValueOption]) -> dict[str, str]:
    """The headers that a mutation sets."""
    return {o.header.key: o.header.raw_value.decode() for o in options}
