"""Streams of messages as no gateway sends them, from streams as gateways do; all from one seed.

1. A stream begins as a gateway's: headers, bodies, trailers both ways, with modes, attributes, metadata, keys.
2. Types: metadata, attributes, statuses, lengths and keys get values of any other type or size.
3. Sequence: messages are repeated, dropped, swapped, sent before their time, or without end.
4. Bytes: bits flip, parts are cut, inserted, repeated, or two messages are run together (which protobuf merges).
"""

import math
from collections.abc import Callable
from random import Random
from typing import Any

from service.pb import ext_proc_pb2 as pb

ADDRESSES = ("10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80", "10.9.9.9:1", "10.0.0.2", "[::1]:80", "", ":", "x" * 300)
KEYS = (b"acme", b"solo", b"", b" \t", b"\xff\xfe", b"k" * 300, "ключ".encode(), b"a,b", b"\x00")
LENGTHS = (
    b"0",
    b"1000",
    b"9" * 30,
    b"-1",
    b"+5",
    "１２".encode(),
    b"\xb2",
    b"1e9",
    b"",
    b" 7",
    b"0x10",
    b"00000000000001",
)
STATUSES = (b"200", b"503", b"502", b"504", b"429", b"", b"abc", b"99", b"1000", "２００".encode(), b"-20", b"\xff")
PATHS = (b"/v1/acme/x", b"/", b"", b"//", b"/%zz/%41", b"/" + b"a/" * 500, b"?#", b"/v1/acme?x=/y")
MODES = tuple(pb.ProtocolConfiguration.BodySendMode.values())
NUMBERS = (0.0, 1.0, 2.0, 3.0, -1.0, 1e300, -1e300, math.nan, math.inf, -math.inf, 2.5)
BODY_SIZES = (0, 1, 100, 61_999, 62_000, 62_001, 130_000)
KINDS = (
    "request_headers",
    "response_headers",
    "request_body",
    "response_body",
    "request_trailers",
    "response_trailers",
)


class Mutations:
    """A source of streams; `rng` makes it repeatable."""

    def __init__(self, rng: Random) -> None:
        """Everything is drawn from rng."""
        self._rng = rng
        self._last = b""
        self._changes: tuple[Callable[[bytearray], bytearray], ...] = (
            self._flip, self._cut, self._insert, self._repeat, self._overwrite
        )  # fmt: skip

    def stream(self) -> list[bytes]:
        """Return the messages of one stream."""
        rng, shadow = self._rng, self._rng.random() < 0.15
        messages = [self._message(kind, shadow) for kind in self._kinds()]
        if messages and rng.random() < 0.7:
            modes = messages[0].protocol_config
            modes.request_body_mode, modes.response_body_mode = rng.choice(MODES), rng.choice(MODES)
            if rng.random() < 0.02:
                modes.request_body_mode = rng.choice((-1, 6, 2**31 - 1))
        if rng.random() < 0.4:
            self._reorder(messages)
        raw = [message.SerializeToString() for message in messages]
        if rng.random() < 0.5:
            raw = [self._mangle(message) if rng.random() < 0.4 else message for message in raw]
        return raw

    def _kinds(self) -> list[str]:
        rng, kinds = self._rng, ["request_headers"]
        kinds += ["request_body"] * rng.choice((0, 0, 0, 1, 3))
        kinds += ["request_trailers"] * (rng.random() < 0.1) + ["response_headers"]
        kinds += ["response_body"] * rng.choice((0, 0, 0, 1, 5))
        return kinds + ["response_trailers"] * (rng.random() < 0.5)

    def _message(self, kind: str, shadow: bool) -> pb.ProcessingRequest:
        rng, message = self._rng, pb.ProcessingRequest(observability_mode=shadow)
        part = getattr(message, kind)
        part.SetInParent()
        match kind:
            case "request_headers":
                self._request(message)
            case "response_headers":
                self._response(message)
            case "request_body" | "response_body":
                # Large ones are rare: they cost more than all the rest.
                part.body = bytes(rng.choice(BODY_SIZES[:3] if rng.random() < 0.98 else BODY_SIZES))
                part.end_of_stream, part.end_of_stream_without_message = rng.random() < 0.3, rng.random() < 0.05
                part.grpc_message_compressed = rng.random() < 0.05
        return message

    def _request(self, message: pb.ProcessingRequest) -> None:
        rng, headers = self._rng, message.request_headers.headers.headers
        headers.add(key=":path", raw_value=rng.choice(PATHS))
        headers.add(key=":authority", raw_value=rng.choice((b"acme.example:80", b"[::1]:8", b"", b"..", b"\xff")))
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            key = rng.choice(KEYS) if rng.random() < 0.7 else b"tenant-%d" % rng.randrange(100_000)
            headers.add(key=rng.choice(("x-tenant-id", "x-user")), raw_value=key)
        if rng.random() < 0.7:
            headers.add(key="content-length", raw_value=rng.choice(LENGTHS))
        if rng.random() < 0.1:
            headers.add(key="x-tenant-id", value=rng.choice(("acme", "", "ключ")))
        if rng.random() < 0.15:
            chosen = ",".join(rng.choices(ADDRESSES, k=rng.randrange(4))).encode()
            headers.add(key="test-epp-endpoint-selection", raw_value=chosen + rng.choice((b"", b"\xff", b",,")))
        if rng.random() < 0.002:
            for n in range(3000):
                headers.add(key=f"x-{n}", raw_value=b"v")
        message.request_headers.end_of_stream = rng.random() < 0.2
        if rng.random() < 0.3:
            space = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
            self._put(space, "x-gateway-destination-endpoint-subset", self._hint())

    def _response(self, message: pb.ProcessingRequest) -> None:
        rng = self._rng
        message.response_headers.headers.headers.add(key=":status", raw_value=rng.choice(STATUSES))
        message.response_headers.end_of_stream = rng.random() < 0.1
        if rng.random() < 0.9:
            space = message.attributes["envoy.filters.http.ext_proc"]
            self._put(space, "upstream.address", rng.choice(ADDRESSES) if rng.random() < 0.9 else self._any(2))
            self._put(
                space, "upstream.request_attempt_count", rng.choice(NUMBERS) if rng.random() < 0.9 else self._any(2)
            )
        if rng.random() < 0.3:
            space = message.metadata_context.filter_metadata["envoy.lb"]
            value = rng.choice(ADDRESSES) if rng.random() < 0.8 else self._any(2)
            self._put(space, "x-gateway-destination-endpoint-served", value)

    def _hint(self) -> Any:
        rng = self._rng
        draw = rng.random()
        if draw < 0.5:
            return [a if rng.random() < 0.9 else self._any(2) for a in rng.choices(ADDRESSES, k=rng.randrange(5))]
        if draw < 0.8:
            return ",".join(rng.choices(ADDRESSES, k=rng.randrange(5)))
        return self._any(3) if draw < 0.999 else ["10.9.9.9:1"] * 5000

    def _any(self, depth: int) -> Any:
        rng = self._rng
        values: list[Callable[[], Any]] = [
            lambda: None, lambda: rng.random() < 0.5, lambda: rng.choice(NUMBERS), lambda: rng.choice(ADDRESSES)
        ]  # fmt: skip
        if depth:
            values += [
                lambda: [self._any(depth - 1) for _ in range(rng.randrange(3))],
                lambda: {str(n): self._any(depth - 1) for n in range(rng.randrange(3))},
            ]
        return rng.choice(values)()

    @staticmethod
    def _put(space: Any, name: str, value: Any) -> None:
        space.update({name: value})

    def _reorder(self, messages: list[pb.ProcessingRequest]) -> None:
        rng = self._rng
        for _ in range(rng.randrange(1, 4)):
            if not messages:
                return
            place = rng.randrange(len(messages))
            match rng.randrange(5):
                case 0:
                    messages.insert(rng.randrange(len(messages) + 1), messages[place])
                case 1:
                    del messages[place]
                case 2:
                    rng.shuffle(messages)
                case 3:
                    messages.extend([messages[place]] * rng.randrange(8))
                case 4:
                    messages.insert(place, self._message(rng.choice(KINDS), rng.random() < 0.5))

    def _mangle(self, message: bytes) -> bytes:
        rng = self._rng
        if len(message) > 4096:
            return message
        if rng.random() < 0.2:
            self._last, message = message, message + self._last
        data = bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            data = rng.choice(self._changes)(data)
        return bytes(data[:8192])

    def _flip(self, data: bytearray) -> bytearray:
        if data:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return data

    def _cut(self, data: bytearray) -> bytearray:
        start = self._rng.randrange(len(data) + 1)
        del data[start : start + self._rng.choice((1, 2, 8, 10_000))]
        return data

    def _insert(self, data: bytearray) -> bytearray:
        start = self._rng.randrange(len(data) + 1)
        data[start:start] = self._rng.randbytes(self._rng.choice((1, 2, 16)))
        return data

    def _repeat(self, data: bytearray) -> bytearray:
        start = self._rng.randrange(len(data) + 1)
        part = data[start : start + self._rng.choice((1, 4, 64, 10_000))]
        data[start:start] = part
        return data

    def _overwrite(self, data: bytearray) -> bytearray:
        for place in range(len(data)):
            if self._rng.random() < 0.05:
                data[place] = self._rng.randrange(256)
        return data
