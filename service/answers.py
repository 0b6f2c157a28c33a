"""Decides what each message of a request's stream is answered; what messages look like stands in `messages`.

One stream is one request:
1. Request headers: read the key, ask fairness, pick, count, charge the first endpoint, answer with the list. With
   nothing to pick (503), or a key that has its share already (429), the client is answered instead; while no endpoint
   has ever been found, the request is left to Envoy.
2. Response headers: learn which endpoint served and with what status; move the charge there when it is another one.
3. Bodies are sent back as they came where the gateway waits for that, all else is told to continue unchanged.
4. The end of the stream, whatever ended it, takes the charge back. With `response_trailer_mode: SEND` Envoy keeps the
   stream open to the true end of the response, so the charge is what is really in flight.

In observability mode (shadow) nothing is answered and nobody is refused: the pick is compared with the endpoint that
served, which is charged from its response headers to the end of the response, since Envoy closes such streams late.

What comes more than once in a request counts once: the first request headers make the pick.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from random import Random

import structlog

from service.dispatch import SPILL_FACTOR, Pick, pick
from service.errors import NoReadyEndpoint
from service.fairness import Fairness
from service.fleet import ANSWER_WORK, Endpoint, Fleet, request_work
from service.keys import KeyReader, hash_key
from service.limits import NO_LIMITS, Limits, read_limits
from service.messages import (
    CONTINUE,
    OPERATORS,
    TOO_MANY,
    Decisions,
    attempts,
    destination,
    echo,
    echoed,
    first_values,
    refusal,
    served_by,
    served_metadata,
    status,
    with_response_headers,
)
from service.pb import ext_proc_pb2 as pb
from service.rates import Rates
from service.table import Current
from service.telemetry import TEST_SELECTION, TEST_SERVED, Seldom, Telemetry

CONTENT_LENGTH = "content-length"

# Replies differ in their list only; an ordered pair of 64 endpoints has 4,032 of them.
LISTS_KEPT = 8192

KEY_REMEDIES = {
    "too_long": "requests are balanced without their key; raise CACHEROUTE_KEY_MAX_BYTES or send shorter keys",
    "not_utf8": "requests are balanced without their key; let whoever sets the key send UTF-8",
}

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Stream:
    """One request as far as it is known."""

    __slots__ = (
        "admitted", "answered", "bodies", "charged", "ended", "key_hash", "over", "picked", "responded", "work"
    )  # fmt: skip

    def __init__(self) -> None:
        self.bodies: Mapping[str, int] | None = None  # what to send back, once the first message is here
        self.ended: tuple[str, ...] = ()  # bodies sent back to their end
        self.answered = False  # whether request headers were decided upon
        self.responded = False
        self.over = False  # nothing more is to be read: we ended the request
        self.key_hash: int | None = None
        self.work = ANSWER_WORK
        self.picked: Pick | None = None
        self.charged: Endpoint | None = None
        self.admitted = False  # by fairness, which is to be told the end


def _ignore(_endpoint: Endpoint) -> None:
    pass


class Answers:
    """Answers for all streams; all decisions are `dispatch.pick`, all state is the fleet's and the current table."""

    def __init__(
        self,
        fleet: Fleet,
        current: Current,
        rates: Rates,
        telemetry: Telemetry,
        rng: Random,
        *,
        key_reader: KeyReader,
        key_salt: bytes = b"",
        prompt_max_bytes: int = 512 * 1024,
        spill_factor: float = SPILL_FACTOR,
        fairness: Fairness | None = None,
        conformance: bool = False,
        body_echo: str = "auto",
        on_connect_failure: Callable[[Endpoint], object] = _ignore,
        on_ejected: Callable[[Endpoint], object] = _ignore,
        on_suspect: Callable[[Endpoint], object] = _ignore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """prompt_max_bytes: the most that a prompt weighs, 0: load is the number of requests.  conformance: clients may
        choose endpoints.  body_echo: auto, always or never.
        on_connect_failure, on_ejected, on_suspect: told which endpoint was dead, answered too many errors in a row, or
        had a request that ended without a response.
        """
        self._fleet, self._current, self._rates, self._telemetry, self._rng = fleet, current, rates, telemetry, rng
        self._keys, self._key_salt = key_reader, key_salt
        self._prompt_max_bytes, self._spill_factor = prompt_max_bytes, spill_factor
        self._fairness = fairness if fairness is not None and fairness.enabled else None
        self._conformance, self._body_echo = conformance, body_echo
        self._on_connect_failure, self._on_ejected, self._on_suspect = on_connect_failure, on_ejected, on_suspect
        self._clock, self._seldom = clock, Seldom()
        self._wanted = key_reader.headers | {CONTENT_LENGTH} | ({TEST_SELECTION} if conformance else set())
        self._decisions = Decisions()
        self._lists: dict[tuple[Endpoint, ...], bytes] = {}

    def answer(self, stream: Stream, request: pb.ProcessingRequest) -> Iterable[bytes]:
        """Return the replies to one message, in order; a kind that we do not know needs none."""
        if stream.bodies is None:
            stream.bodies = echoed(request, self._body_echo)
        kind = request.WhichOneof("request")
        if request.observability_mode:
            self._shadow(stream, kind, request)
            return ()
        if kind == "request_headers":
            if stream.answered:
                return (CONTINUE[kind],)
            started = time.perf_counter()
            reply = self._decide(stream, request)
            self._telemetry.decide_seconds.observe(time.perf_counter() - started)
            return (reply,) if reply else ()
        if kind == "response_headers":
            served = self._learn(stream, request)
            return (self._served_reply(request, served) if self._conformance else CONTINUE[kind],)
        if kind in stream.bodies:
            return self._pass_on(stream, kind, getattr(request, kind))
        return (CONTINUE[kind],) if kind is not None else ()

    def _decide(self, stream: Stream, request: pb.ProcessingRequest) -> bytes:
        """Return the reply to request headers: a list, or the client's answer, after which the stream is over."""
        stream.answered = True
        found = self._read(stream, request)
        if self._fairness is not None:
            cause = self._fairness.admit(stream.key_hash)
            if cause:
                return self._refuse(stream, 429, cause)
            stream.admitted = True
        limits = read_limits(self._fleet, request, found)
        try:
            chosen = self._pick(stream, limits)
        except NoReadyEndpoint as exc:
            if not self._fleet.known:
                return self._leave_to_envoy(stream)
            return self._refuse(stream, 503, "no_ready_endpoint" if limits is NO_LIMITS else "subset", str(exc))
        self._count(stream)
        stream.charged = chosen.endpoints[0]
        self._fleet.charge(stream.charged, stream.work)
        table = self._current.table
        # Two parts of one message: protobuf merges them, and the first repeats as often as the list does.
        why = self._decisions.part(chosen.reason, table.version, table.age_s(self._clock()), stream.key_hash)
        return self._list(chosen.endpoints) + why

    def _read(self, stream: Stream, request: pb.ProcessingRequest) -> dict[str, bytes]:
        """Learn the key and the work of a request; return the headers that matter."""
        found = first_values(request.request_headers, self._wanted)
        length = found.get(CONTENT_LENGTH)
        if length is not None and length[:20].isdigit():
            stream.work = request_work(min(int(length[:10]), self._prompt_max_bytes))
        key, cause = self._keys.read(found)
        if key is not None:
            stream.key_hash = hash_key(key, self._key_salt)
        elif cause:
            self._telemetry.keys_rejected.labels(cause).inc()
            if self._seldom.may(cause):
                log.warning("a key is not used", cause=cause, remedy=KEY_REMEDIES.get(cause, ""))
        return found

    def _pick(self, stream: Stream, limits: Limits) -> Pick:
        subset, order = limits
        if order is None:
            table, rng, factor = self._current.table, self._rng, self._spill_factor
            chosen = pick(table, self._fleet, stream.key_hash, rng, stream.work, factor, subset)
        else:
            usable = tuple(e for e in order if e.usable)
            if not usable:
                raise NoReadyEndpoint(len(order))
            chosen = Pick(usable, "cold")
        stream.picked = chosen
        self._telemetry.picks[chosen.reason] += 1
        return chosen

    def _list(self, endpoints: tuple[Endpoint, ...]) -> bytes:
        part = self._lists.get(endpoints)
        if part is None:
            if len(self._lists) >= LISTS_KEPT:
                self._lists.clear()
            part = self._lists[endpoints] = destination(",".join(e.address for e in endpoints))
        return part

    def _count(self, stream: Stream) -> None:
        """Count a request that is routed: what is refused, and tried again, is no load that a plan could carry."""
        if stream.key_hash is not None:
            self._rates.count(stream.key_hash, self._clock())

    def _leave_to_envoy(self, stream: Stream) -> bytes:
        """End the stream unanswered: Envoy, which may know of endpoints when we do not, goes on by itself."""
        stream.over = True
        self._telemetry.left_to_envoy.inc()
        if self._seldom.may("unknown"):
            log.warning("requests are left to Envoy: no endpoint has been found yet", remedy="see the discovery's log")
        return b""

    def _refuse(self, stream: Stream, code: int, cause: str, why: str = "") -> bytes:
        stream.over = True
        self._telemetry.refused.labels(cause).inc()
        if code != TOO_MANY and self._seldom.may(cause):
            log.warning("requests are refused", status=code, cause=cause, remedy=OPERATORS[cause])
        return refusal(code, cause, why)

    def _learn(self, stream: Stream, request: pb.ProcessingRequest) -> Endpoint | None:
        """Learn from a response who gave it, None when unknown, and charge that endpoint from here on."""
        address = served_by(request)
        charged, picked = stream.charged, stream.picked
        # An endpoint may have left the fleet meanwhile.
        served = charged if charged is not None and charged.address == address else self._fleet.by_address.get(address)
        first, stream.responded = not stream.responded, True
        if not first or not stream.answered:
            return served
        if served is None:
            if address:
                self._telemetry.unknown_endpoint.inc()
            return None
        code = status(request)
        self._telemetry.served[served.name, f"{code // 100}xx" if code else "unknown"] += 1
        if self._fleet.answered(served, code):
            self._on_ejected(served)
        if served is not charged:
            if picked is not None and charged is not None:
                self._telemetry.elsewhere.labels(served.name).inc()
                if (tries := attempts(request)) > 1:
                    # Envoy walks the list in order, then leaves it: all before the one that served were not reachable.
                    tried = picked.endpoints
                    for endpoint in tried[: tried.index(served) if served in tried else tries - 1]:
                        self._on_connect_failure(endpoint)
                self._fleet.release(charged, stream.work)
            self._fleet.charge(served, stream.work)
            stream.charged = served
        return served

    def _shadow(self, stream: Stream, kind: str | None, request: pb.ProcessingRequest) -> None:
        """Follow a request that Envoy only tells about."""
        if kind == "request_headers" and not stream.answered:
            stream.answered = True
            found = self._read(stream, request)
            # Without a pick there is nothing to compare, and the request is followed all the same.
            with contextlib.suppress(NoReadyEndpoint):
                self._pick(stream, read_limits(self._fleet, request, found))
            self._count(stream)
        elif kind == "response_headers" and stream.answered and not stream.responded:
            served = self._learn(stream, request)
            if served is not None and stream.picked is not None:
                self._telemetry.shadow.labels("yes" if served is stream.picked.endpoints[0] else "no").inc()
            if request.response_headers.end_of_stream:
                self._release(stream)
        elif kind == "response_trailers" or (kind == "response_body" and request.response_body.end_of_stream):
            self._release(stream)

    def _served_reply(self, request: pb.ProcessingRequest, served: Endpoint | None) -> bytes:
        address = served_metadata(request) or (served.address if served is not None else "")
        return with_response_headers({TEST_SERVED: address} if address else {})

    def _pass_on(self, stream: Stream, kind: str, body: pb.HttpBody) -> Iterable[bytes]:
        # Some Envoys send the end twice (envoy#46237); passed on twice, it would end the body with rubbish.
        if kind in stream.ended:
            return ()
        if body.end_of_stream or body.end_of_stream_without_message:
            stream.ended += (kind,)
        assert stream.bodies is not None
        return echo(kind, body, stream.bodies[kind])

    def _release(self, stream: Stream) -> None:
        """Take the charge back, once."""
        charged, stream.charged = stream.charged, None
        if charged is not None:
            self._fleet.release(charged, stream.work)

    def end(self, stream: Stream) -> None:
        """Take back what the request holds; called once, whatever ended its stream."""
        charged = stream.charged
        self._release(stream)
        if stream.admitted and self._fairness is not None:
            stream.admitted = False
            self._fairness.release(stream.key_hash)
        if charged is not None and not stream.responded:
            self._on_suspect(charged)
