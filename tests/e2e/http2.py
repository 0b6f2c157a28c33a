"""One HTTP/2 connection without TLS, as client or as server: streams that are read and written piece by piece.

Unlike an ordinary client it tells apart every event that a proxy could merge, drop or repeat: each piece of a body, the
trailers, a reset.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Self

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from service.settings import split_address

Headers = Sequence[tuple[bytes, bytes]]
WINDOW = 1 << 24


class Stream:
    """One request and its response, seen from one side; made by `Connection`."""

    def __init__(self, connection: "Connection", number: int) -> None:
        self.trailers: dict[bytes, bytes] = {}
        self.gone = asyncio.Event()  # Reset by the other side, or the connection ended.
        self._connection, self._number = connection, number
        self._headers: asyncio.Future[dict[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def headers(self) -> dict[bytes, bytes]:
        """Return the other side's headers once they are there; raise ConnectionResetError when they never come."""
        return await asyncio.shield(self._headers)

    async def read(self) -> bytes:
        """Return the next piece of the body, empty at its end; raise ConnectionResetError when it was cut off."""
        piece = await self._pieces.get()
        if piece is None:
            self._pieces.put_nowait(None)
            raise ConnectionResetError("the stream was reset")
        if not piece:
            self._pieces.put_nowait(b"")
        return piece

    async def read_all(self) -> bytes:
        """Return the rest of the body."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Send a piece as fast as the other side takes it; raise ConnectionResetError when it takes no more."""
        await self._connection.send_data(self._number, data, end, self)

    def send_headers(self, headers: Headers, *, end: bool = False) -> None:
        """Send headers, or trailers with `end`."""
        self._connection.send_headers(self._number, headers, end)

    def reset(self) -> None:
        """Break the stream off."""
        self._connection.reset(self._number)


class Connection:
    """Reads one connection in a task of its own."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        received: bytes = b"",
        on_request: Callable[[Stream], None] | None = None,
    ) -> None:
        """on_request: told each new stream, which makes this the server's side.  received: what was read already."""
        self._reader, self._writer, self._on_request = reader, writer, on_request
        config = h2.config.H2Configuration(
            client_side=on_request is None,
            header_encoding=None,
            # Tests send what no good client would.
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self._h2 = h2.connection.H2Connection(config)
        self._streams: dict[int, Stream] = {}
        self._window = asyncio.Condition()
        self._h2.initiate_connection()
        self._h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
        self._flush()
        self.reading = asyncio.create_task(self._read(received))

    @classmethod
    async def to(cls, address: str) -> Self:
        """Connect to `ip:port`."""
        return cls(*await asyncio.open_connection(*split_address(address)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        with contextlib.suppress(asyncio.CancelledError):
            await self.reading

    def open(self, path: str, headers: Headers = (), *, method: bytes = b"POST", end: bool = False) -> Stream:
        """Begin a request."""
        number = self._h2.get_next_available_stream_id()
        stream = self._streams[number] = Stream(self, number)
        given = {name for name, _ in headers}
        fixed = ((b":method", method), (b":scheme", b"http"), (b":authority", b"test"), (b":path", path.encode()))
        self.send_headers(number, [*(h for h in fixed if h[0] not in given), *headers], end)
        return stream

    def close(self) -> None:
        """Close the connection at once, whatever is in flight on it."""
        self.reading.cancel()
        self._writer.transport.abort()

    def send_headers(self, number: int, headers: Headers, end: bool) -> None:
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            self._h2.send_headers(number, [*headers], end_stream=end)
            self._flush()

    async def send_data(self, number: int, data: bytes, end: bool, stream: Stream) -> None:
        view = memoryview(data)
        try:
            while view:
                room = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
                if room <= 0:
                    async with self._window:
                        await self._window.wait()
                    if stream.gone.is_set():
                        raise ConnectionResetError("the stream was reset")
                    continue
                self._h2.send_data(number, view[:room].tobytes())
                view = view[room:]
                self._flush()
                await self._writer.drain()
            if end:
                self._h2.end_stream(number)
                self._flush()
        except h2.exceptions.StreamClosedError as exc:
            raise ConnectionResetError("the stream was reset") from exc

    def reset(self, number: int) -> None:
        with contextlib.suppress(h2.exceptions.StreamClosedError):
            self._h2.reset_stream(number, h2.errors.ErrorCodes.CANCEL)
            self._flush()

    def _flush(self) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._h2.data_to_send())

    async def _read(self, data: bytes) -> None:
        try:
            while data or (data := await self._reader.read(1 << 16)):
                for event in self._h2.receive_data(data):
                    self._take(event)
                self._flush()
                async with self._window:
                    self._window.notify_all()
                data = b""
        except (ConnectionError, h2.exceptions.ProtocolError):
            pass
        finally:
            for stream in self._streams.values():
                self._gone(stream)
            self._writer.close()

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RequestReceived():
                stream = self._streams[event.stream_id] = Stream(self, event.stream_id)
                stream._headers.set_result(dict(event.headers))
                assert self._on_request is not None
                self._on_request(stream)
            case h2.events.ResponseReceived():
                self._streams[event.stream_id]._headers.set_result(dict(event.headers))
            case h2.events.DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if event.data:
                    self._streams[event.stream_id]._pieces.put_nowait(event.data)
            case h2.events.TrailersReceived():
                self._streams[event.stream_id].trailers = dict(event.headers)
            case h2.events.StreamEnded():
                self._streams[event.stream_id]._pieces.put_nowait(b"")
            case h2.events.StreamReset():
                self._gone(self._streams[event.stream_id])

    def _gone(self, stream: Stream) -> None:
        if not stream._headers.done():
            stream._headers.set_exception(ConnectionResetError("the stream was reset"))
            stream._headers.exception()  # Whoever does not ask need not know.
        stream._pieces.put_nowait(None)
        stream.gone.set()
