"""A backend that tells what it was sent, on many addresses at once, each HTTP/1.1 and cleartext HTTP/2 by preface.

The path says what a request gets:
- `/echo`: its own body and trailers, once all is there. `/duplex`: each piece of its body as soon as it is there.
- `/events`: server-sent events, each written only once the test has said that it has the one before (`Backend.go_on`).
- `/hold`: headers and one piece, then nothing more; `/reset`: headers, one piece, and the connection or stream cut off.
- `/empty`: 204. Anything else: a JSON document of what came: backend, protocol, method, path, headers, sha256, length,
  trailers.
Every response names the backend, the protocol, and the SHA-256 and length of the request's body if it was awaited.

It lives in a thread with an event loop of its own, so that it answers while a test blocks.
"""

import asyncio
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import h11

from service.settings import split_address
from tests.e2e.exchange import Exchange, Http1Connection, Http2Exchange
from tests.e2e.http2 import Connection, Stream

EVENTS = 20
PREFACE = b"PRI * HTTP/2.0"
T = TypeVar("T")


class Backend:
    """All backends of a test module; an address can be closed, with its connections, and opened again."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self.served: Counter[str] = Counter()  # Finished requests by address.
        self.abandoned: Counter[str] = Counter()  # `/hold` requests that their client left, by address.
        self._addresses = tuple(addresses)
        self._servers: dict[str, asyncio.Server] = {}
        self._writers: dict[str, set[asyncio.StreamWriter]] = {a: set() for a in self._addresses}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(0)

    def start(self) -> None:
        """Listen on every address."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="backend", daemon=True)
        self._thread.start()
        for address in self._addresses:
            self.open(address)

    def stop(self) -> None:
        """Close all and end the thread."""
        for address in self._addresses:
            self.close(address)
        self._run(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def open(self, address: str) -> None:
        """Listen on an address; nothing happens when it does."""
        if address not in self._servers:
            self._servers[address] = self._run(self._listen(address))

    def close(self, address: str) -> None:
        """Refuse connections from now on, and reset those that there are."""
        if address in self._servers:
            self._run(self._shut(address, self._servers.pop(address)))

    def go_on(self) -> None:
        """Let `/events` write its next event."""
        self._loop.call_soon_threadsafe(self._gate.release)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _listen(self, address: str) -> asyncio.Server:
        host, port = split_address(address)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers[address].add(writer)
            try:
                await self._converse(address, reader, writer)
            except (ConnectionError, h11.ProtocolError):
                pass
            finally:
                self._writers[address].discard(writer)
                writer.close()

        return await asyncio.start_server(connected, host, port, backlog=1024)

    async def _shut(self, address: str, server: asyncio.Server) -> None:
        server.close()
        for writer in self._writers[address]:
            writer.transport.abort()

    async def _finish(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _converse(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = b""
        while len(received) < len(PREFACE) and PREFACE.startswith(received):
            data = await reader.read(1 << 16)
            if not data:
                return
            received += data
        if received.startswith(PREFACE):

            def on_request(stream: Stream) -> None:
                task = asyncio.create_task(self._over_http2(address, stream))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            await Connection(reader, writer, received=received, on_request=on_request).reading
            return
        async for exchange in Http1Connection(reader, writer, received).requests():
            await self._answer(address, exchange)

    async def _over_http2(self, address: str, stream: Stream) -> None:
        with contextlib.suppress(ConnectionError):
            await self._answer(address, Http2Exchange(stream, await stream.headers()))

    async def _answer(self, address: str, exchange: Exchange) -> None:
        name = [(b"x-backend", address.encode()), (b"x-protocol", exchange.protocol.encode())]
        match exchange.path.partition("?")[0]:
            case "/health":
                await _read(exchange)
                await exchange.begin(200, [*name, (b"content-length", b"0")])
                await exchange.end()
                return
            case "/empty":
                await _read(exchange)
                await exchange.begin(204, name)
                await exchange.end()
            case "/duplex":
                await exchange.begin(200, name)
                async for piece in exchange.pieces():
                    await exchange.write(piece)
                await exchange.end()
            case "/events":
                await _read(exchange)
                await exchange.begin(200, [*name, (b"content-type", b"text/event-stream")])
                for i in range(EVENTS):
                    await exchange.write(b"data: %d\n\n" % i)
                    await self._gate.acquire()
                await exchange.end()
            case "/hold":
                await _read(exchange)
                await exchange.begin(200, name)
                await exchange.write(b"held")
                await exchange.abandoned()
                self.abandoned[address] += 1
                return
            case "/reset":
                await _read(exchange)
                await exchange.begin(200, name)
                await exchange.write(b"half")
                exchange.cut()
                return
            case path:
                body = await _read(exchange)
                seen = [*name, (b"x-sha256", digest(body).encode()), (b"x-length", b"%d" % len(body))]
                if path != "/echo":
                    body = _document(address, exchange, body)
                    seen.append((b"content-type", b"application/json"))
                trailers = [(k, v) for k, v in exchange.trailers.items() if path == "/echo"]
                # HTTP/1.1 has trailers after chunks only.
                if not trailers:
                    seen.append((b"content-length", b"%d" % len(body)))
                await exchange.begin(200, seen)
                await exchange.write(body)
                await exchange.end(trailers)
        self.served[address] += 1


async def _read(exchange: Exchange) -> bytes:
    return b"".join([piece async for piece in exchange.pieces()])


def _document(address: str, exchange: Exchange, body: bytes) -> bytes:
    return json.dumps(
        {
            "backend": address,
            "protocol": exchange.protocol,
            "method": exchange.method,
            "path": exchange.path,
            "headers": _texts(exchange.headers.items()),
            "sha256": digest(body),
            "length": len(body),
            "trailers": _texts(exchange.trailers.items()),
        }
    ).encode()


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in headers}


def digest(body: bytes) -> str:
    """Return a body's SHA-256 as the backend tells it."""
    return hashlib.sha256(body).hexdigest()


def addresses(ports: Sequence[int], hosts: Sequence[str] = ("127.0.0.1",)) -> tuple[str, ...]:
    """Return every host with every port."""
    return tuple(f"{host}:{port}" for host in hosts for port in ports)
