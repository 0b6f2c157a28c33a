"""The gRPC server's bounds, against a real client."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from service.errors import InvalidInput
from service.ports import check_port, hold_port
from service.server import METADATA_MAX_BYTES, bind, new_server


async def echo(_requests: object, context: Any) -> None:
    """Answer each message with the address of the connection that it came by."""
    while await context.read() is not grpc.aio.EOF:
        await context.write(context.peer().encode())


@asynccontextmanager
async def served(**bounds: Any) -> AsyncIterator[Any]:
    server = new_server(**bounds)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.stream_stream("/test.Echo/Echo")
    await server.stop(0)


async def ask(call: Any, message: bytes = b"x") -> bytes:
    """Send one message and return its answer."""
    await call.write(message)
    answer: bytes = await call.read()
    return answer


async def test_a_message_may_be_as_long_as_the_setting_says() -> None:
    """Longer ones end their stream, and nobody else's."""
    async with served(message_max_bytes=65536) as echo:
        other = echo(timeout=30)
        await ask(other)
        assert await ask(echo(timeout=30), b"x" * 65536)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(echo(timeout=30), b"x" * 65537)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(other)


async def test_metadata_is_bounded() -> None:
    """What a mesh may send passes, twice as much as Envoy's own limit does not, each time alike."""
    async with served() as echo:
        for _ in range(5):
            assert await ask(echo(metadata=(("x-mesh", "x" * 100 * 1024),), timeout=30))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(echo(metadata=(("x-mesh", "x" * (METADATA_MAX_BYTES + 1)),), timeout=30))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await ask(echo(timeout=30))


async def test_a_client_is_told_how_many_streams_a_connection_may_have() -> None:
    """The next stream waits until one ends, as the client obeys what the server announces."""
    async with served(streams_per_connection=2) as echo:
        first, second = echo(timeout=30), echo(timeout=30)
        await ask(first)
        await ask(second)
        waiting = asyncio.ensure_future(ask(echo(timeout=30)))
        await ask(first)
        assert not waiting.done()
        first.cancel()
        assert await waiting


async def test_connections_grow_old_without_ending_a_stream() -> None:
    """After its age a connection takes no new stream; those that it has go on for as long as they like."""
    async with served(connection_age_s=0.2) as echo:
        old = echo(timeout=60)
        first = await ask(old)
        async with asyncio.timeout(30):
            while (latest := await ask(echo(timeout=30))) == first:
                await asyncio.sleep(0.05)
        assert latest != first
        assert await ask(old) == first


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_are_those_of_ipv6_too() -> None:
    """gRPC listens on both for 0.0.0.0: a port that anybody has on either is taken, and workers' is held on both."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        assert check_port(f"127.0.0.1:{port}") == port
        for host in ("0.0.0.0", "[::]"):
            with pytest.raises(InvalidInput, match="Address already in use"):
                check_port(f"{host}:{port}")
    holder, listen = hold_port("0.0.0.0:0")
    with holder:
        port = int(listen.rpartition(":")[2])
        for host, family in (("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET)):
            with pytest.raises(OSError, match="Address already in use"):
                socket.create_server((host, port), family=family)


async def test_workers_share_a_port_of_all_addresses() -> None:
    """Two servers listen where the supervisor holds the port, on IPv4 and IPv6."""
    holder, listen = hold_port("0.0.0.0:0")
    servers = [new_server(shares_port=True) for _ in range(2)]
    with holder:
        for server in servers:
            assert bind(server, listen, shares_port=True) == int(listen.rpartition(":")[2])
            await server.start()
            with socket.create_connection(("127.0.0.1", int(listen.rpartition(":")[2])), timeout=10):
                pass
    for server in servers:
        await server.stop(0)
