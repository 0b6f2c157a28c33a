"""The external processor over real gRPC: what each stream is answered, and that a charge is always taken back."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf import json_format

from service.fleet import ANSWER_WORK, Found
from service.keys import KeyReader, format_hash, hash_key
from service.messages import Decisions
from service.pb import ext_proc_pb2 as pb
from tests.contract.extproc_rig import Rig, picked, request, response, served, set_headers


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with served() as rig:
        yield rig


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
        ({"x_tenant_id": b"\xff\xfe\x00"}, "cold", None),
        ({"x_tenant_id": "  solo\t"}, "planned", b"solo"),
    ],
)
async def test_first_present_header_is_the_key(
    rig: Rig, headers: dict[str, str | bytes], reason: str, counted: bytes | None
) -> None:
    """Headers are tried in order, empty ones are absent, those that are too long or no text are no key."""
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


async def test_the_first_of_two_headers_is_the_key(rig: Rig) -> None:
    """A key header that stands twice counts with its first value: what is put in front decides."""
    message = request(x_tenant_id="solo")
    message.request_headers.headers.headers.add(key="x-tenant-id", raw_value=b"acme")
    (reply,) = await rig.exchange(message)
    assert picked(reply)[0] == "10.0.0.1:80"


async def test_the_served_endpoint_is_known_from_metadata_alone(rig: Rig) -> None:
    """A gateway that speaks the endpoint picker protocol, and tells no attributes, moves the charge as well."""
    call = rig.stream()
    await call.write(request(x_tenant_id="solo"))
    await call.read()
    await call.write(response(metadata="10.0.0.2:80"))
    await call.read()
    assert rig.inflight() == {"a": 0, "b": 1, "c": 0}
    await call.done_writing()
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}


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


async def test_no_ready_endpoint_is_a_503(rig: Rig) -> None:
    """With nothing to pick the protocol's answer is an ImmediateResponse 503, not an error of the stream."""
    for endpoint in rig.fleet.endpoints:
        rig.fleet.probe_failed(endpoint, allowed=1, refused=True)
    call = rig.stream()
    await call.write(request(x_tenant_id="acme"))
    reply = await call.read()
    assert reply.immediate_response.status.code == 503
    assert b"none of 3 endpoints is ready" in reply.immediate_response.body
    assert await call.read() == grpc.aio.EOF
    assert sum((await rig.settled()).values()) == 0


async def test_what_a_client_is_told_has_a_cause_and_a_remedy(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    """A 503 of ours says why in a header, a counter, Envoy's details and one log line, and what to do about it."""
    for endpoint in rig.fleet.endpoints:
        rig.fleet.probe_failed(endpoint, allowed=1, refused=True)
    for _ in range(2):
        (reply,) = await rig.exchange(request(x_tenant_id="acme"))
    answer = reply.immediate_response
    assert set_headers(answer.headers.set_headers) == {"x-cacheroute-dropped-reason": "no-ready-endpoint"}
    assert answer.details == "cacheroute_no_ready_endpoint"
    assert b"try again" in answer.body
    assert rig.metric("refused_total", cause="no_ready_endpoint") == 2
    assert "".join(capsys.readouterr()).count("requests are refused") == 1
    assert sum((await rig.settled()).values()) == 0


async def test_an_endpoint_that_left_meanwhile_still_counts(rig: Rig) -> None:
    """A response of an endpoint that discovery took away since the pick is no response from an unknown address."""
    call = rig.stream()
    await call.write(request(x_tenant_id="solo"))
    await call.read()
    rig.fleet.update([Found("b", "10.0.0.2:80")])
    await call.write(response(served="10.0.0.1:80"))
    await call.read()
    assert dict(rig.telemetry.served) == {("a", "2xx"): 1}
    assert rig.metric("served_unknown_total") == 0
    await call.done_writing()
    await rig.settled()


async def test_gateway_errors_in_a_row_eject(rig: Rig) -> None:
    """An endpoint that answers 503 again and again leaves the picks, and the prober is told."""
    for _ in range(20):
        await rig.exchange(request(x_tenant_id="solo"), response("503", served="10.0.0.1:80"))
    assert rig.ejected == ["a"]
    assert not rig.fleet.by_name["a"].usable


@pytest.mark.parametrize(("messages", "suspects"), [(1, ["a"]), (2, [])])
async def test_a_request_that_ends_without_a_response_is_suspect(rig: Rig, messages: int, suspects: list[str]) -> None:
    """The prober hears of an endpoint whose request ended before any response, and of no other."""
    await rig.exchange(*[request(x_tenant_id="solo"), response(served="10.0.0.1:80")][:messages])
    await rig.settled()
    assert rig.suspects == suspects


async def test_keys_that_are_not_used_are_counted_by_cause_and_logged_seldom(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    """One counter a cause, one line a minute with the remedy, and never the key."""
    for _ in range(3):
        await rig.exchange(request(x_tenant_id="secret" * 20))
    await rig.exchange(request(x_tenant_id=b"secret\xff"))
    assert rig.metric("keys_rejected_total", cause="too_long") == 3
    assert rig.metric("keys_rejected_total", cause="not_utf8") == 1
    printed = "".join(capsys.readouterr())
    assert printed.count("CACHEROUTE_KEY_MAX_BYTES") == 1
    assert printed.count("UTF-8") == 1
    assert "secret" not in printed


async def test_keys_come_from_authority_and_path_too() -> None:
    """The sources are those of the key reader, whatever header or pseudo header they are."""
    async with served(key_reader=KeyReader((":path/2", ":authority"), 64)) as rig:
        for path in ("/v1/solo/x?y=1", "/v1"):
            await rig.exchange(request(**{":path": path, ":authority": "Acme:8080"}))
        batch = rig.rates.next_batch(1012.5)
        assert batch is not None
        assert batch.counts == {hash_key(b"solo"): 1, hash_key(b"acme"): 1}


@pytest.mark.parametrize("key_hash", [None, 0, 1, 2**64 - 1])
@pytest.mark.parametrize("age_s", [0.0, 12.3456, 1e9])
@pytest.mark.parametrize("version", [0, 7, 2**40])
def test_a_decision_is_written_as_it_is(key_hash: int | None, age_s: float, version: int) -> None:
    """The part that is put together from pieces reads like one that is serialised whole, however often it is reused."""
    decisions = Decisions()
    for reason in ("planned", "cold", "planned"):
        read = pb.ProcessingResponse.FromString(decisions.part(reason, version, age_s, key_hash))
        expected = {"reason": reason, "plan_version": float(version), "plan_age_s": round(age_s, 3)}
        if key_hash is not None:
            expected["key_hash"] = format_hash(key_hash)
        assert json_format.MessageToDict(read.dynamic_metadata) == {"cacheroute": expected}


async def test_requests_are_left_to_envoy_until_somebody_has_been_found(rig: Rig) -> None:
    """While no endpoint has ever been found the stream ends unanswered, without error; with a known fleet it is 503."""
    rig.fleet.update([])
    rig.fleet.known = False
    assert await rig.exchange(request(x_tenant_id="acme")) == []
    assert rig.metric("left_to_envoy_total") == 1
    rig.fleet.known = True
    (reply,) = await rig.exchange(request(x_tenant_id="acme"))
    assert reply.immediate_response.status.code == 503
    assert await rig.settled() == {}


async def test_only_what_is_routed_is_counted(rig: Rig) -> None:
    """A refused request is no demand that a plan could carry: it is not counted, however often it is tried again."""
    await rig.exchange(request(x_tenant_id="acme"))
    for endpoint in rig.fleet.endpoints:
        rig.fleet.probe_failed(endpoint, allowed=1, refused=True)
    for _ in range(5):
        await rig.exchange(request(x_tenant_id="acme"))
    batch = rig.rates.next_batch(1012.5)
    assert batch is not None
    assert batch.counts == {hash_key(b"acme"): 1}
