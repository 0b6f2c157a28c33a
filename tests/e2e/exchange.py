"""A request and its response as a backend sees them, the same for HTTP/1.1 and HTTP/2."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import h11

from tests.e2e.http2 import Headers, Stream


class Exchange(Protocol):
    """A request and its response, whatever the protocol; header names are lower-case."""

    protocol: str
    method: str
    path: str
    headers: dict[bytes, bytes]
    trailers: dict[bytes, bytes]

    def pieces(self) -> AsyncIterator[bytes]: ...
    async def begin(self, status: int, headers: Headers) -> None: ...
    async def write(self, data: bytes) -> None: ...
    async def end(self, trailers: Headers = ()) -> None: ...
    async def abandoned(self) -> None:
        """Return when the other side has gone."""

    def cut(self) -> None: ...


class Http2Exchange:
    """One stream of an HTTP/2 connection."""

    protocol = "h2"

    def __init__(self, stream: Stream, headers: dict[bytes, bytes]) -> None:
        self._stream, self.headers = stream, headers
        self.method, self.path = headers[b":method"].decode(), headers[b":path"].decode()
        self.trailers: dict[bytes, bytes] = {}

    async def pieces(self) -> AsyncIterator[bytes]:
        while piece := await self._stream.read():
            yield piece
        self.trailers = self._stream.trailers

    async def begin(self, status: int, headers: Headers) -> None:
        self._stream.send_headers([(b":status", b"%d" % status), *headers])

    async def write(self, data: bytes) -> None:
        await self._stream.send(data)

    async def end(self, trailers: Headers = ()) -> None:
        if trailers:
            self._stream.send_headers(trailers, end=True)
        else:
            await self._stream.send(b"", end=True)

    async def abandoned(self) -> None:
        await self._stream.gone.wait()

    def cut(self) -> None:
        self._stream.reset()


class Http1Exchange:
    """One turn of an HTTP/1.1 connection."""

    protocol = "h1"

    def __init__(self, connection: "Http1Connection", request: h11.Request) -> None:
        self._connection = connection
        self.headers = dict(request.headers)
        self.method, self.path = request.method.decode(), request.target.decode()
        self.trailers: dict[bytes, bytes] = {}

    async def pieces(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._connection.next_event()
            if isinstance(event, h11.EndOfMessage):
                self.trailers = dict(event.headers)
                return
            if not isinstance(event, h11.Data):
                raise ConnectionResetError("the client has gone")
            yield bytes(event.data)

    async def begin(self, status: int, headers: Headers) -> None:
        await self._connection.send(h11.Response(status_code=status, headers=[*headers]))

    async def write(self, data: bytes) -> None:
        await self._connection.send(h11.Data(data=data))

    async def end(self, trailers: Headers = ()) -> None:
        await self._connection.send(h11.EndOfMessage(headers=[*trailers]))

    async def abandoned(self) -> None:
        await self._connection.closed()

    def cut(self) -> None:
        self._connection.cut()


class Http1Connection:
    """Gives the requests of one connection, one after the other, as far as it is kept alive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: bytes) -> None:
        self._reader, self._writer = reader, writer
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        self._h11.receive_data(received)

    async def requests(self) -> AsyncIterator[Http1Exchange]:
        while isinstance(event := await self.next_event(), h11.Request):
            yield Http1Exchange(self, event)
            if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
                return
            self._h11.start_next_cycle()

    async def next_event(self) -> Any:
        while (event := self._h11.next_event()) is h11.NEED_DATA:
            self._h11.receive_data(await self._reader.read(1 << 16))
        return event

    async def send(self, event: Any) -> None:
        data = self._h11.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    async def closed(self) -> None:
        while await self._reader.read(1 << 16):
            pass

    def cut(self) -> None:
        self._writer.transport.abort()
