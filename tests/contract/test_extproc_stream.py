"""The external processor over real gRPC: what each stream is answered, and that a charge is always taken back."""

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from service.__main__ import bind, new_server
from service.extproc import ExternalProcessor
from service.fleet import ANSWER_WORK, Endpoint, Fleet
from service.keys import format_hash, hash_key
from service.pb import ext_proc_pb2 as pb
from service.rates import Rates
from service.table import Current, Table
from service.telemetry import Telemetry

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"


class Rig:
    """A served processor over three endpoints, its state, and a client."""

    def __init__(self) -> None:
        self.fleet = Fleet((("a", "10.0.0.1:80"), ("b", "10.0.0.2:80"), ("c", "10.0.0.3:80")))
        self.current = Current(Table(7, 1, 1000.0, {hash_key(b"acme"): ("b", "c"), hash_key(b"solo"): ("a",)}))
        self.rates = Rates(30, 300)
        self.telemetry = Telemetry(CollectorRegistry())
        self.dead: list[str] = []
        self.channel: grpc.aio.Channel

    def on_dead(self, endpoint: Endpoint) -> None:
        self.dead.append(endpoint.name)
        self.fleet.connect_failed(endpoint)

    def inflight(self) -> dict[str, int]:
        return {e.name: e.inflight for e in self.fleet.endpoints}

    def stream(self) -> Any:
        return self.channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()

    async def settled(self) -> dict[str, int]:
        """In-flight counts once the server has seen all streams end."""
        async with asyncio.timeout(5):
            while self.telemetry.registry.get_sample_value("cacheroute_streams"):
                await asyncio.sleep(0.005)
        return self.inflight()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    processor = ExternalProcessor(
        rig.fleet,
        rig.current,
        rig.rates,
        rig.telemetry,
        Random(0),
        key_headers=("x-tenant-id", "x-user"),
        key_salt=b"",
        key_max_bytes=64,
        prompt_max_bytes=512 * 1024,
        on_connect_failure=rig.on_dead,
        clock=lambda: 1012.5,
    )
    server = new_server()
    server.add_generic_rpc_handlers((processor.rpc(),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        rig.channel = channel
        yield rig
    await server.stop(0)


def request(**headers: str | bytes) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    for name, value in headers.items():
        raw = value if isinstance(value, bytes) else value.encode()
        message.request_headers.headers.headers.add(key=name.replace("_", "-"), raw_value=raw)
    return message


def response(status: str = "200", served: str = "", attempts: int = 1) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status.encode())
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    if served:
        fields["upstream.address"].string_value = served
    fields["upstream.request_attempt_count"].number_value = attempts
    return message


def picked(reply: pb.ProcessingResponse) -> list[str]:
    """The list of a reply, after checking that header and metadata say the same."""
    (option,) = reply.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    value: str = option.header.raw_value.decode()
    assert reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value == value
    return value.split(",")


async def test_planned_key_gets_its_targets_then_a_spare(rig: Rig) -> None:
    """The reply lists the key's targets, least loaded first, then one other; the decision rides as metadata."""
    for _ in range(3):
        rig.fleet.charge(rig.fleet.by_name["b"], 10)
    call = rig.stream()
    await call.write(request(x_tenant_id="acme"))
    reply = await call.read()
    assert picked(reply) == ["10.0.0.3:80", "10.0.0.2:80", "10.0.0.1:80"]
    ours = reply.dynamic_metadata.fields["cacheroute"].struct_value.fields
    assert ours["reason"].string_value == "planned"
    assert ours["plan_version"].number_value == 7
    assert ours["plan_age_s"].number_value == 12.5
    assert ours["key_hash"].string_value == format_hash(hash_key(b"acme"))
    assert rig.inflight() == {"a": 0, "b": 3, "c": 1}
    await call.done_writing()
    assert await call.read() == grpc.aio.EOF
    assert await rig.settled() == {"a": 0, "b": 3, "c": 0}


@pytest.mark.parametrize(
    ("headers", "reason", "counted"),
    [
        ({"x_tenant_id": "solo"}, "planned", b"solo"),
        ({"x_user": "solo"}, "planned", b"solo"),
        ({"x_user": "solo", "x_tenant_id": "other"}, "cold", b"other"),
        ({"x_tenant_id": "", "x_user": "solo"}, "planned", b"solo"),
        ({}, "cold", None),
        ({"x_tenant_id": "x" * 65}, "cold", None),
        ({"x_tenant_id": b"\xff\xfe\x00"}, "cold", b"\xff\xfe\x00"),
    ],
)
async def test_first_present_header_is_the_key(
    rig: Rig, headers: dict[str, str | bytes], reason: str, counted: bytes | None
) -> None:
    """Headers are tried in order, empty ones are absent, overlong ones are no key; bytes need not be UTF-8."""
    call = rig.stream()
    await call.write(request(**headers))
    reply = await call.read()
    assert reply.dynamic_metadata.fields["cacheroute"].struct_value.fields["reason"].string_value == reason
    await call.done_writing()
    await rig.settled()
    batch = rig.rates.next_batch(1012.5)
    assert (batch.counts if batch else None) == ({hash_key(counted): 1} if counted is not None else None)


async def test_value_is_read_where_raw_value_is_absent(rig: Rig) -> None:
    """Gateways that fill `value` instead of `raw_value` are understood."""
    message = pb.ProcessingRequest()
    message.request_headers.headers.headers.add(key="x-tenant-id", value="solo")
    call = rig.stream()
    await call.write(message)
    assert picked(await call.read())[0] == "10.0.0.1:80"
    call.cancel()
    assert sum((await rig.settled()).values()) == 0


async def test_charge_moves_to_the_endpoint_that_served(rig: Rig) -> None:
    """When Envoy walked the list, the request counts where it runs and the dead endpoint leaves the picks."""
    for _ in range(9):
        rig.fleet.charge(rig.fleet.by_name["c"], 10)
    call = rig.stream()
    await call.write(request(x_tenant_id="acme"))
    assert picked(await call.read())[:2] == ["10.0.0.2:80", "10.0.0.3:80"]
    await call.write(response(served="10.0.0.3:80", attempts=2))
    assert (await call.read()).WhichOneof("response") == "response_headers"
    assert rig.inflight() == {"a": 0, "b": 0, "c": 10}
    assert rig.dead == ["b"]
    assert rig.telemetry.registry.get_sample_value("cacheroute_served_total", {"endpoint": "c", "status": "2xx"}) == 1
    await call.done_writing()
    assert await rig.settled() == {"a": 0, "b": 0, "c": 9}


async def test_a_list_of_dead_endpoints_marks_what_was_tried(rig: Rig) -> None:
    """When Envoy left the list for its own fallback, each endpoint that it tried before leaves the picks."""
    call = rig.stream()
    await call.write(request(x_tenant_id="solo"))
    first, second = picked(await call.read())
    left = ({"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"} - {first, second}).pop()
    await call.write(response(served=left, attempts=3))
    await call.read()
    assert rig.dead == [rig.fleet.by_address[first].name, rig.fleet.by_address[second].name]
    assert rig.fleet.by_address[left].inflight == 1
    await call.done_writing()
    assert sum((await rig.settled()).values()) == 0


@pytest.mark.parametrize(
    ("length", "work"),
    [
        ("1000", ANSWER_WORK + 1000),
        ("0", ANSWER_WORK),
        ("", ANSWER_WORK),
        ("-5", ANSWER_WORK),
        ("many", ANSWER_WORK),
        ("9" * 40, ANSWER_WORK + 512 * 1024),
    ],
)
async def test_work_is_what_content_length_says_within_reason(rig: Rig, length: str, work: int) -> None:
    """A request weighs its announced length, clamped; what is no length weighs as if none were given."""
    call = rig.stream()
    await call.write(request(x_tenant_id="solo", content_length=length))
    await call.read()
    assert rig.fleet.by_name["a"].load == rig.fleet.usable_load == work
    await call.done_writing()
    await rig.settled()
    assert rig.fleet.usable_load == 0


async def test_an_unknown_server_changes_nothing_but_a_counter(rig: Rig) -> None:
    """A response from an address outside the fleet leaves the charge where it is."""
    call = rig.stream()
    await call.write(request(x_tenant_id="solo"))
    await call.read()
    await call.write(response(served="10.9.9.9:1", attempts=2))
    await call.read()
    assert rig.inflight()["a"] == 1
    assert rig.dead == []
    assert rig.telemetry.registry.get_sample_value("cacheroute_served_unknown_total") == 1
    await call.done_writing()
    assert sum((await rig.settled()).values()) == 0


@pytest.mark.parametrize("ending", ["half_close", "cancel", "cancel_before_reply", "channel_gone"])
async def test_in_flight_is_released_exactly_once(rig: Rig, ending: str) -> None:
    """However a stream ends, and in whatever phase, all counts are zero afterwards and never below."""
    for phase in range(3):
        call = rig.stream()
        await call.write(request(x_tenant_id="acme"))
        if ending != "cancel_before_reply":
            await call.read()
            for _ in range(phase):
                await call.write(response(served="10.0.0.2:80"))
                await call.read()
        match ending:
            case "half_close":
                await call.done_writing()
            case "channel_gone":
                del call
            case _:
                call.cancel()
    if ending == "channel_gone":
        await rig.channel.close()
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}


async def test_a_second_headers_message_is_not_charged_twice(rig: Rig) -> None:
    """A misbehaving client that sends headers twice on one stream still holds one charge."""
    call = rig.stream()
    for _ in range(2):
        await call.write(request(x_tenant_id="solo"))
        await call.read()
    assert sum(rig.inflight().values()) == 1
    call.cancel()
    assert sum((await rig.settled()).values()) == 0


async def test_every_other_message_is_told_to_continue(rig: Rig) -> None:
    """Bodies and trailers get the reply of their own kind, without changes; a stream may start with any of them."""
    call = rig.stream()
    for kind in ("response_headers", "request_body", "response_body", "request_trailers", "response_trailers"):
        message = pb.ProcessingRequest()
        getattr(message, kind).SetInParent()
        await call.write(message)
        reply = await call.read()
        assert reply.WhichOneof("response") == kind
        assert getattr(reply, kind).ByteSize() == 0
    call.cancel()
    assert sum((await rig.settled()).values()) == 0


async def test_no_ready_endpoint_is_a_503(rig: Rig) -> None:
    """With nothing to pick the protocol's answer is an ImmediateResponse 503, not an error of the stream."""
    for endpoint in rig.fleet.endpoints:
        rig.fleet.connect_failed(endpoint)
    call = rig.stream()
    await call.write(request(x_tenant_id="acme"))
    reply = await call.read()
    assert reply.immediate_response.status.code == 503
    assert b"none of 3 endpoints is ready" in reply.immediate_response.body
    assert await call.read() == grpc.aio.EOF
    assert sum((await rig.settled()).values()) == 0
