"""Builds and reads the messages of Envoy's external processing protocol; pure: protobuf and bytes, no transport.

Nothing here raises on what a peer may send: fields of another type than expected read as absent, repeated ones are
looked at up to a bound, and numbers are clamped.

Bodies (`echoed`, `echo`): in the modes FULL_DUPLEX_STREAMED and GRPC a body passes on only as far as the processor
sends it back, so it is sent back as it came, in pieces that the protocol allows; in all other modes the processor
says to continue. Envoy tells its modes in the first message of a stream. Gateways that never do so (they implement
this protocol for endpoint pickers) use FULL_DUPLEX_STREAMED both ways.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from struct import pack

from google.protobuf.struct_pb2 import Value

from service.keys import format_hash
from service.pb import ext_proc_pb2 as pb
from service.telemetry import (
    ATTRIBUTE_ATTEMPTS,
    ATTRIBUTE_UPSTREAM,
    DESTINATION,
    DROPPED_REASON,
    EXT_PROC_ATTRIBUTES,
    KEY_HASH,
    LB_NAMESPACE,
    NAMESPACE,
    PLAN_AGE_S,
    PLAN_VERSION,
    REASON,
    SERVED,
    SUBSET,
    SUBSET_NAMESPACE,
)

# Of one message: Envoy's own limit is 100 headers, and no fleet is that large.
HEADERS_MAX = 2048
NAMED_MAX = 4096
# The protocol allows 64 KiB with all that is around the bytes.
CHUNK_BYTES = 62_000
WHOLE = 1 << 62
ATTEMPTS_MAX = 1000
# A reason of four, with or without a key, and the versions of the last hours.
DECISIONS_KEPT = 64
_NO_AGE, _NO_KEY = -1.2345678901234567e-89, "?" * 16

BODY_KINDS = ("request_body", "response_body")
NOTHING_ECHOED: Mapping[str, int] = {}
ALL_ECHOED: Mapping[str, int] = dict.fromkeys(BODY_KINDS, CHUNK_BYTES)
# A message of GRPC mode is one message of the application: it stays whole.
_PIECE: dict[int, int] = {
    pb.ProtocolConfiguration.FULL_DUPLEX_STREAMED: CHUNK_BYTES,
    pb.ProtocolConfiguration.GRPC: WHOLE,
}
_MODES = pb.ProtocolConfiguration.BodySendMode.values()
_ECHOED: dict[tuple[int, int], Mapping[str, int]] = {
    (up, down): {kind: _PIECE[mode] for kind, mode in zip(BODY_KINDS, (up, down), strict=True) if mode in _PIECE}
    for up in _MODES
    for down in _MODES
}


# What a client is told: what is wrong and what to do about it; and what operators are, there and in the log.
REFUSALS = {
    "no_ready_endpoint": "{}; try again later",
    "subset": "none of the endpoints that the gateway allows for this request is ready; try again later",
    "key_concurrency": "this key has as many requests in flight as it may have; wait for one of them to end",
    "fair_share": "the fleet is full and this key has its share of it; wait for a request of it to end",
}
OPERATORS = {
    "no_ready_endpoint": "see /fleet and the engines' own health",
    "subset": "compare the gateway's subset hint with /fleet",
    "key_concurrency": "see CACHEROUTE_KEY_INFLIGHT_MAX",
    "fair_share": "see CACHEROUTE_FLEET_INFLIGHT_MAX and CACHEROUTE_FAIR_WEIGHT",
}
TOO_MANY = 429
RETRY_AFTER_S = 1


def _continue(kind: str) -> bytes:
    """Return the reply that lets one kind of message pass; an empty one would be dropped as spurious."""
    response = pb.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response.SerializeToString()


CONTINUE = {
    kind: _continue(kind)
    for kind in (
        "request_headers", "response_headers", "request_body", "response_body", "request_trailers", "response_trailers"
    )
}  # fmt: skip


def echoed(first: pb.ProcessingRequest, setting: str) -> Mapping[str, int]:
    """Return the kinds of bodies to send back, with the length of a piece; from the first message of a stream.

    setting: auto, always or never.
    """
    if setting == "never":
        return NOTHING_ECHOED
    if setting == "always" or not first.HasField("protocol_config"):
        return ALL_ECHOED
    modes = first.protocol_config
    return _ECHOED.get((modes.request_body_mode, modes.response_body_mode), NOTHING_ECHOED)


def echo(kind: str, body: pb.HttpBody, piece: int) -> Iterator[bytes]:
    """Return the replies that pass a body message on: at most `piece` bytes each, what ends it on the last."""
    data = body.body
    last = (len(data) - 1) // piece * piece if data else 0
    for start in range(0, last + 1, piece):
        response = pb.ProcessingResponse()
        part = getattr(response, kind).response.body_mutation.streamed_response
        part.SetInParent()
        part.body = data[start : start + piece]
        part.grpc_message_compressed = body.grpc_message_compressed
        if start == last:
            part.end_of_stream = body.end_of_stream
            part.end_of_stream_without_message = body.end_of_stream_without_message
        yield response.SerializeToString()


def first_values(headers: pb.HttpHeaders, wanted: frozenset[str]) -> dict[str, bytes]:
    """Return the first value of each wanted header that is there."""
    found: dict[str, bytes] = {}
    items = headers.headers.headers
    for header in items if len(items) <= HEADERS_MAX else items[:HEADERS_MAX]:
        name = header.key
        if name in wanted and name not in found:
            # Envoy sends raw_value; other gateways send value.
            found[name] = header.raw_value or header.value.encode()
            if len(found) == len(wanted):
                break
    return found


def subset_hint(request: pb.ProcessingRequest) -> list[str] | None:
    """Return the addresses that the gateway allows, None when it gives no hint: a list, or one string with commas."""
    value = _metadata(request, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    match value.WhichOneof("kind"):
        case "list_value":
            return [item.string_value for item in islice(value.list_value.values, NAMED_MAX)]
        case "string_value":
            return split_list(value.string_value)
    return None


def split_list(value: str) -> list[str]:
    """Return the parts of a list with commas."""
    return [part.strip() for part in value.split(",", NAMED_MAX)[:NAMED_MAX]]


def served_by(request: pb.ProcessingRequest) -> str:
    """Return the address that served, empty when unknown: where Envoy says that it connected, else the metadata."""
    value = _attribute(request, ATTRIBUTE_UPSTREAM)
    return (value.string_value if value is not None else "") or served_metadata(request)


def attempts(request: pb.ProcessingRequest) -> int:
    """Return how many endpoints Envoy tried for a response, 1 when it does not say."""
    value = _attribute(request, ATTRIBUTE_ATTEMPTS)
    return int(value.number_value) if value is not None and 1 <= value.number_value <= ATTEMPTS_MAX else 1


def served_metadata(request: pb.ProcessingRequest) -> str:
    """Return the address that served as the endpoint picker protocol says it, empty when it does not."""
    value = _metadata(request, LB_NAMESPACE, SERVED)
    return value.string_value if value is not None else ""


def status(request: pb.ProcessingRequest) -> int:
    """Return the status of a response, 0 when there is none of 100 to 599."""
    for header in islice(request.response_headers.headers.headers, HEADERS_MAX):
        if header.key == ":status":
            value = header.raw_value or header.value.encode()
            return int(value) if len(value) == 3 and value.isdigit() and b"100" <= value < b"600" else 0
    return 0


def destination(value: str) -> bytes:
    """Return the part of a reply that carries the list, twice as the protocol wants it."""
    response = pb.ProcessingResponse()
    _set(response.request_headers.response.header_mutation, DESTINATION, value)
    response.dynamic_metadata.fields[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = value
    return response.SerializeToString()


class Decisions:
    """Writes the part of a reply that says why, for Envoy's access log and trace tags.

    Of these parts only age and key differ much, and both have one length: all else is serialised once and kept.
    """

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self._kept: dict[tuple[str, int, bool], tuple[bytes, bytes, bytes, bool]] = {}

    def part(self, reason: str, plan_version: int, plan_age_s: float, key_hash: int | None) -> bytes:
        """Return the part; plan_age_s is given to a millisecond."""
        form = self._kept.get((reason, plan_version, key_hash is not None))
        if form is None:
            form = self._form(reason, plan_version, key_hash is not None)
        before, between, after, age_first = form
        age = pack("<d", round(plan_age_s, 3))
        if key_hash is None:
            return before + age + after
        key = format_hash(key_hash).encode()
        return before + age + between + key + after if age_first else before + key + between + age + after

    def _form(self, reason: str, plan_version: int, keyed: bool) -> tuple[bytes, bytes, bytes, bool]:
        """Serialise a part with an age and a key that stand nowhere else, and cut those out: protobuf orders a map's
        entries as it likes.
        """
        if len(self._kept) >= DECISIONS_KEPT:
            self._kept.clear()
        response = pb.ProcessingResponse()
        fields = response.dynamic_metadata.fields[NAMESPACE].struct_value.fields
        fields[REASON].string_value = reason
        fields[PLAN_VERSION].number_value = plan_version
        fields[PLAN_AGE_S].number_value = _NO_AGE
        if keyed:
            fields[KEY_HASH].string_value = _NO_KEY
        rest, age, after = response.SerializeToString().partition(pack("<d", _NO_AGE))
        assert age
        between, age_first = b"", True
        if keyed:
            key = _NO_KEY.encode()
            age_first = key in after
            if age_first:
                between, _, after = after.partition(key)
            else:
                rest, _, between = rest.partition(key)
        form = self._kept[reason, plan_version, keyed] = (rest, between, after, age_first)
        return form


def with_response_headers(headers: Mapping[str, str]) -> bytes:
    """Return the reply to response headers that sets these as well."""
    response = pb.ProcessingResponse()
    response.response_headers.SetInParent()
    for name, value in headers.items():
        _set(response.response_headers.response.header_mutation, name, value)
    return response.SerializeToString()


def refusal(code: int, cause: str, why: str = "") -> bytes:
    """Return the reply that answers the client at once, in Envoy's default content type, text/plain.

    cause: one of REFUSALS.  why: what the sentence does not know.
    """
    response = pb.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = code
    answer.body = f"cacheroute: {REFUSALS[cause].format(why)} (operators: {OPERATORS[cause]})\n".encode()
    answer.details = f"cacheroute_{cause}"
    _set(answer.headers, DROPPED_REASON, cause.replace("_", "-"))
    if code == TOO_MANY:
        _set(answer.headers, "retry-after", str(RETRY_AFTER_S))
    return response.SerializeToString()


def _set(mutation: pb.HeaderMutation, name: str, value: str) -> None:
    option = mutation.set_headers.add()
    option.header.key, option.header.raw_value = name, value.encode()
    option.append_action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD


def _attribute(request: pb.ProcessingRequest, name: str) -> Value | None:
    # `get`, here and below: a map makes what is asked for with brackets.
    space = request.attributes.get(EXT_PROC_ATTRIBUTES)
    return space.fields.get(name) if space is not None else None


def _metadata(request: pb.ProcessingRequest, namespace: str, name: str) -> Value | None:
    space = request.metadata_context.filter_metadata.get(namespace)
    return space.fields.get(name) if space is not None else None
