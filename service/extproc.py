"""Answers Envoy's external processing streams; the only file that knows the protocol.

One stream is one request:
1. Request headers: read the key, count it, pick, charge the first endpoint, answer with the list as a header and as
   metadata of equal value.
2. Response headers: learn which endpoint served and with what status; move the charge there when it is another one.
3. Everything else is told to continue unchanged.
4. The end of the stream, whatever ended it, takes the charge back. With `response_trailer_mode: SEND` Envoy keeps the
   stream open to the true end of the response, so the charge is what is really in flight.
"""

import time
from collections.abc import AsyncIterator, Callable
from random import Random

import grpc

from service.dispatch import SPILL_FACTOR, Pick, pick
from service.errors import NoReadyEndpoint
from service.fleet import ANSWER_WORK, Endpoint, Fleet, request_work
from service.keys import format_hash, hash_key
from service.pb import ext_proc_pb2 as pb
from service.rates import Rates
from service.table import Current, Table
from service.telemetry import (
    ATTRIBUTE_ATTEMPTS,
    ATTRIBUTE_UPSTREAM,
    DESTINATION,
    EXT_PROC_ATTRIBUTES,
    KEY_HASH,
    LB_NAMESPACE,
    NAMESPACE,
    PLAN_AGE_S,
    PLAN_VERSION,
    REASON,
    SERVED,
    Telemetry,
)

CONTENT_LENGTH = "content-length"

# Replies differ in their list only; an ordered pair of 64 endpoints has 4,032 of them.
LISTS_KEPT = 8192

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


def _continue(kind: str) -> bytes:
    """Return the reply that lets one kind of message pass; an empty one would be dropped as spurious."""
    response = pb.ProcessingResponse()
    getattr(response, kind).SetInParent()
    return response.SerializeToString()


CONTINUE = {
    kind: _continue(kind)
    for kind in ("response_headers", "request_body", "response_body", "request_trailers", "response_trailers")
}


class ExternalProcessor:
    """Serves `Process`; all decisions are `dispatch.pick`, all state is the fleet's and the current table."""

    def __init__(
        self,
        fleet: Fleet,
        current: Current,
        rates: Rates,
        telemetry: Telemetry,
        rng: Random,
        *,
        key_headers: tuple[str, ...],
        key_salt: bytes,
        key_max_bytes: int,
        prompt_max_bytes: int,
        spill_factor: float = SPILL_FACTOR,
        on_connect_failure: Callable[[Endpoint], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """key_headers: lower-case names, the first present wins.  prompt_max_bytes: the most that a prompt weighs, 0:
        load is the number of requests.  on_connect_failure: told which endpoint was dead.
        """
        self._fleet, self._current, self._rates, self._telemetry, self._rng = fleet, current, rates, telemetry, rng
        self._key_headers, self._key_salt, self._key_max_bytes = key_headers, key_salt, key_max_bytes
        self._prompt_max_bytes, self._spill_factor = prompt_max_bytes, spill_factor
        self._on_connect_failure = on_connect_failure
        self._clock = clock
        self._refused = telemetry.refused.labels("no_ready_endpoint")
        self._lists: dict[tuple[Endpoint, ...], bytes] = {}

    def rpc(self) -> grpc.GenericRpcHandler:
        """Return the handler to add to a server; replies are bytes already."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Process": grpc.stream_stream_rpc_method_handler(
                    self.process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
                )
            },
        )

    async def process(self, requests: AsyncIterator[pb.ProcessingRequest], _context: object) -> AsyncIterator[bytes]:
        """Serve one stream."""
        self._telemetry.streams += 1
        picked: Pick | None = None
        charged: Endpoint | None = None
        work = ANSWER_WORK
        try:
            async for request in requests:
                kind = request.WhichOneof("request")
                if kind == "request_headers":
                    started = time.perf_counter()
                    try:
                        chosen, asked, reply = self._route(request)
                    except NoReadyEndpoint as exc:
                        self._refused.inc()
                        yield _unavailable(exc)
                        return
                    if charged is None:
                        picked, charged, work = chosen, chosen.endpoints[0], asked
                        self._fleet.charge(charged, work)
                    self._telemetry.decide_seconds.observe(time.perf_counter() - started)
                    yield reply
                elif kind == "response_headers":
                    if picked is not None and charged is not None:
                        charged = self._credit(request, picked, charged, work)
                    yield CONTINUE[kind]
                elif kind is not None:
                    yield CONTINUE[kind]
        finally:
            if charged is not None:
                self._fleet.release(charged, work)
            self._telemetry.streams -= 1

    def _route(self, request: pb.ProcessingRequest) -> tuple[Pick, int, bytes]:
        """Return the pick for a request's headers, the work to charge it with, and the reply."""
        table, now = self._current.table, self._clock()
        key, work = self._read(request)
        key_hash = None
        if key is not None:
            key_hash = hash_key(key, self._key_salt)
            self._rates.count(key_hash, now)
        chosen = pick(table, self._fleet, key_hash, self._rng, work, self._spill_factor)
        self._telemetry.picks[chosen.reason] += 1
        # Two parts of one message: protobuf merges them, and the first repeats as often as the list does.
        return chosen, work, self._list(chosen.endpoints) + _decision(chosen, table, key_hash, now)

    def _list(self, endpoints: tuple[Endpoint, ...]) -> bytes:
        part = self._lists.get(endpoints)
        if part is None:
            if len(self._lists) >= LISTS_KEPT:
                self._lists.clear()
            part = self._lists[endpoints] = _destination(",".join(e.address for e in endpoints))
        return part

    def _read(self, request: pb.ProcessingRequest) -> tuple[bytes | None, int]:
        """Return the key, None when there is none to use, and the work that the headers announce."""
        names, found, work = self._key_headers, dict[str, bytes](), ANSWER_WORK
        for header in request.request_headers.headers.headers:
            name = header.key
            if name in names:
                # Envoy sends raw_value; other gateways send value.
                found.setdefault(name, header.raw_value or header.value.encode())
            elif name == CONTENT_LENGTH:
                length = header.raw_value or header.value.encode()
                if length.isdigit():
                    work = request_work(min(int(length[:10]), self._prompt_max_bytes))
        for name in names:
            key = found.get(name)
            if key:
                if len(key) > self._key_max_bytes:
                    self._telemetry.keys_rejected.labels("too_long").inc()
                    return None, work
                return key, work
        return None, work

    def _credit(self, request: pb.ProcessingRequest, picked: Pick, charged: Endpoint, work: int) -> Endpoint:
        """Learn from a response who gave it; return the endpoint that the request is charged to from here on."""
        address, attempts = _served_by(request)
        served = self._fleet.by_address.get(address)
        if served is None:
            if address:
                self._telemetry.unknown_endpoint.inc()
            return charged
        self._telemetry.served[served.name, _status_class(request)] += 1
        if served is not charged:
            self._telemetry.elsewhere.labels(served.name).inc()
            if attempts > 1:
                # Envoy walks the list in order, then leaves it: all before the one that served were not reachable.
                tried = picked.endpoints
                for endpoint in tried[: tried.index(served) if served in tried else attempts - 1]:
                    self._on_connect_failure(endpoint)
            self._fleet.release(charged, work)
            self._fleet.charge(served, work)
        return served


def _served_by(request: pb.ProcessingRequest) -> tuple[str, int]:
    """Return the address that served, empty when unknown, and how many attempts it took."""
    address, attempts = "", 1
    if EXT_PROC_ATTRIBUTES in request.attributes:
        fields = request.attributes[EXT_PROC_ATTRIBUTES].fields
        if ATTRIBUTE_UPSTREAM in fields:
            address = fields[ATTRIBUTE_UPSTREAM].string_value
        if ATTRIBUTE_ATTEMPTS in fields:
            attempts = int(fields[ATTRIBUTE_ATTEMPTS].number_value)
    if not address and LB_NAMESPACE in request.metadata_context.filter_metadata:
        fields = request.metadata_context.filter_metadata[LB_NAMESPACE].fields
        if SERVED in fields:
            address = fields[SERVED].string_value
    return address, attempts


def _status_class(request: pb.ProcessingRequest) -> str:
    for header in request.response_headers.headers.headers:
        if header.key == ":status":
            status = header.raw_value.decode(errors="replace") or header.value
            return f"{status[:1]}xx"
    return "unknown"


def _destination(value: str) -> bytes:
    """Return the part of a reply that carries the list, twice as the protocol wants it."""
    response = pb.ProcessingResponse()
    option = response.request_headers.response.header_mutation.set_headers.add()
    option.header.key = DESTINATION
    option.header.raw_value = value.encode()
    option.append_action = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    response.dynamic_metadata.fields[LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = value
    return response.SerializeToString()


def _decision(chosen: Pick, table: Table, key_hash: int | None, now: float) -> bytes:
    """Return the part of a reply that says why, for Envoy's access log and trace tags."""
    response = pb.ProcessingResponse()
    fields = response.dynamic_metadata.fields[NAMESPACE].struct_value.fields
    fields[REASON].string_value = chosen.reason
    fields[PLAN_VERSION].number_value = table.version
    fields[PLAN_AGE_S].number_value = round(table.age_s(now), 3)
    if key_hash is not None:
        fields[KEY_HASH].string_value = format_hash(key_hash)
    return response.SerializeToString()


def _unavailable(exc: NoReadyEndpoint) -> bytes:
    response = pb.ProcessingResponse()
    response.immediate_response.status.code = 503
    response.immediate_response.body = f"cacheroute: {exc}\n".encode()
    response.immediate_response.details = "cacheroute_no_ready_endpoint"
    return response.SerializeToString()
