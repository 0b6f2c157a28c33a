"""Our reduced ext_proc.proto against the full upstream messages (envoy-data-plane), on the wire and both ways."""

import dataclasses
import warnings
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

from service.messages import echo, refusal
from service.pb import ext_proc_pb2 as ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import betterproto2
    import envoy_data_plane.envoy.config.core.v3 as core
    import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as filters
    import envoy_data_plane.envoy.service.ext_proc.v3 as upstream
    import envoy_data_plane.envoy.type.v3 as envoy_type
    import envoy_data_plane.google.protobuf as well_known

PAIRS: dict[str, Any] = {
    **{
        name: getattr(upstream, name)
        for name in (
            "ProcessingRequest",
            "ProcessingResponse",
            "HttpHeaders",
            "HttpBody",
            "HttpTrailers",
            "HeadersResponse",
            "BodyResponse",
            "TrailersResponse",
            "CommonResponse",
            "ProtocolConfiguration",
            "BodyMutation",
            "StreamedBodyResponse",
            "ImmediateResponse",
            "HeaderMutation",
        )
    },
    **{name: getattr(core, name) for name in ("HeaderMap", "HeaderValue", "HeaderValueOption", "Metadata")},
    "HttpStatus": envoy_type.HttpStatus,
}

# An enum and an int32 are the same varint.
SAME_WIRE = {"enum": "int32"}


def _kind(field: FieldDescriptor) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "map"
    kind = {
        FieldDescriptor.TYPE_STRING: "string",
        FieldDescriptor.TYPE_BYTES: "bytes",
        FieldDescriptor.TYPE_BOOL: "bool",
        FieldDescriptor.TYPE_INT32: "int32",
        FieldDescriptor.TYPE_ENUM: "enum",
        FieldDescriptor.TYPE_MESSAGE: "message",
    }[field.type]
    return SAME_WIRE.get(kind, kind)


def test_every_message_has_its_upstream_peer() -> None:
    """No message of ours is left unchecked by this file."""
    assert set(ours.DESCRIPTOR.message_types_by_name) == set(PAIRS)


def test_the_method_path_is_upstreams() -> None:
    """The gRPC path, which depends on package and service, is the one Envoy calls."""
    service = ours.DESCRIPTOR.services_by_name["ExternalProcessor"]
    assert service.full_name == "envoy.service.ext_proc.v3.ExternalProcessor"
    assert [m.name for m in service.methods] == ["Process"]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_field_numbers_and_types_are_upstreams(name: str) -> None:
    """Each field of ours has upstream's name, number, type and oneof, so neither side can misread the other."""
    peer = {
        (f.metadata["betterproto"].proto_name if hasattr(f.metadata["betterproto"], "proto_name") else f.name).rstrip(
            "_"
        ): (
            f.metadata["betterproto"].number,
            SAME_WIRE.get(f.metadata["betterproto"].proto_type, f.metadata["betterproto"].proto_type),
            f.metadata["betterproto"].group,
        )
        for f in dataclasses.fields(PAIRS[name])
    }
    for field in ours.DESCRIPTOR.message_types_by_name[name].fields:
        oneof = field.containing_oneof.name if field.containing_oneof else None
        assert peer[field.name] == (field.number, _kind(field), oneof), field.full_name


texts = st.text(max_size=30)
headers = st.lists(st.tuples(texts, st.binary(max_size=40)), max_size=8)


def _struct(fields: dict[str, str]) -> Any:
    return well_known.Struct(fields={k: well_known.Value(string_value=v) for k, v in fields.items()})


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["request_headers", "response_headers"]),
    headers,
    st.booleans(),
    st.dictionaries(texts, texts, max_size=3),
)
def test_we_read_what_upstream_writes(
    kind: str, pairs: list[tuple[str, bytes]], end: bool, attrs: dict[str, str]
) -> None:
    """A request written with the full upstream messages is read by ours field by field."""
    header_map = core.HeaderMap(headers=[core.HeaderValue(key=k, raw_value=v) for k, v in pairs])
    message = upstream.ProcessingRequest(
        **{kind: upstream.HttpHeaders(headers=header_map, end_of_stream=end)},
        attributes={"envoy.filters.http.ext_proc": _struct(attrs)},
        metadata_context=core.Metadata(filter_metadata={"envoy.lb": _struct(attrs)}),
        observability_mode=end,
        protocol_config=upstream.ProtocolConfiguration(
            request_body_mode=filters.ProcessingModeBodySendMode.FULL_DUPLEX_STREAMED,
            response_body_mode=filters.ProcessingModeBodySendMode.GRPC,
            send_body_without_waiting_for_header_response=True,  # a field we do not know must not disturb the rest
        ),
    )
    read = ours.ProcessingRequest.FromString(bytes(message))
    assert read.WhichOneof("request") == kind
    part = getattr(read, kind)
    assert [(h.key, h.raw_value) for h in part.headers.headers] == pairs
    assert part.end_of_stream == read.observability_mode == end
    modes = read.protocol_config
    assert (modes.request_body_mode, modes.response_body_mode) == (4, 5)
    for struct in (read.attributes["envoy.filters.http.ext_proc"], read.metadata_context.filter_metadata["envoy.lb"]):
        assert {k: v.string_value for k, v in struct.fields.items()} == attrs


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["request_body", "response_body"]), st.binary(max_size=40), st.booleans(), st.booleans())
def test_bodies_go_both_ways(kind: str, data: bytes, end: bool, compressed: bool) -> None:
    """A body is read as upstream wrote it, and upstream reads what we send back of it."""
    chunk = upstream.HttpBody(
        body=data, end_of_stream=end, end_of_stream_without_message=end, grpc_message_compressed=compressed
    )
    read = ours.ProcessingRequest.FromString(bytes(upstream.ProcessingRequest(**{kind: chunk})))
    assert read.WhichOneof("request") == kind
    (reply,) = echo(kind, getattr(read, kind), 62_000)
    name, part = betterproto2.which_one_of(upstream.ProcessingResponse().parse(reply), "response")
    assert name == kind
    assert part.response.body_mutation.streamed_response == upstream.StreamedBodyResponse(
        body=data, end_of_stream=end, end_of_stream_without_message=end, grpc_message_compressed=compressed
    )


@settings(max_examples=60, deadline=None)
@given(headers, st.dictionaries(texts, texts, max_size=3), st.sampled_from([0, 2]))
def test_upstream_reads_what_we_write(pairs: list[tuple[str, bytes]], metadata: dict[str, str], action: int) -> None:
    """A reply of ours is read by the full upstream messages field by field."""
    reply = ours.ProcessingResponse()
    reply.request_headers.SetInParent()
    for key, value in pairs:
        option = reply.request_headers.response.header_mutation.set_headers.add()
        option.header.key, option.header.raw_value = key, value
        option.append_action = action
    for key, text in metadata.items():
        reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields[key].string_value = text
    read = upstream.ProcessingResponse().parse(reply.SerializeToString())
    name, part = betterproto2.which_one_of(read, "response")
    assert name == "request_headers"
    options = part.response.header_mutation.set_headers if pairs else []
    assert [(o.header.key, o.header.raw_value) for o in options] == pairs
    assert all(int(o.append_action) == action for o in options)
    if metadata:
        fields = read.dynamic_metadata.fields["envoy.lb"].struct_value.fields
        assert {k: v.string_value for k, v in fields.items()} == metadata


def test_upstream_reads_an_immediate_response() -> None:
    """Status, body, headers and details of an immediate response arrive under their upstream fields."""
    read = upstream.ProcessingResponse().parse(refusal(429, "fair_share"))
    name, part = betterproto2.which_one_of(read, "response")
    assert name == "immediate_response"
    assert (int(part.status.code), part.details) == (429, "cacheroute_fair_share")
    assert part.body.startswith(b"cacheroute: the fleet is full")
    assert {o.header.key: o.header.raw_value for o in part.headers.set_headers} == {
        "x-cacheroute-dropped-reason": b"fair-share",
        "retry-after": b"1",
    }
