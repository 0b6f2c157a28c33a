"""An HTTP server whose answers have as many chunks as the path asks for: `python chunk_server.py PORT`.

`POST /300` is answered with 300 chunks of 100 bytes, one every 2 ms, so that each one travels by itself; any GET with
200 and nothing. It is made for load: no framework, one write a chunk.
"""

import asyncio
import sys

PAYLOAD = b"data: " + b"x" * 92 + b"\n\n"
CHUNK = b"64\r\n" + PAYLOAD + b"\r\n"
GAP_S = 0.002
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection; one request at a time, as HTTP/1.1 without pipelining sends them."""

    def __init__(self) -> None:
        self._buffer = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where to write."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer once a request is whole, its body too (by length, or chunked to its last chunk)."""
        self._buffer += data
        head, blank, body = self._buffer.partition(b"\r\n\r\n")
        if not blank:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if b"transfer-encoding: chunked" in lines:
            if not body.endswith(b"0\r\n\r\n"):
                return
        elif len(body) < length:
            return
        self._buffer = b""
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._transport.write(EMPTY)
        else:
            self._transport.write(HEAD)
            self._send(int(path[1:]))

    def _send(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == 1:
            self._transport.write(CHUNK + b"0\r\n\r\n")
            return
        self._transport.write(CHUNK)
        asyncio.get_running_loop().call_later(GAP_S, self._send, left - 1)


async def main() -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
