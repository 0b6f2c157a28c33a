"""In every body mode of a real Envoy, HTTP/1.1 and HTTP/2: what passes is what was sent, at once, both ways.

Full duplex is what Istio, the Envoy AI Gateway and their like hardwire for endpoint pickers; the other modes are what
an Envoy set up for another processor may already have. What Envoy 1.40 itself gets wrong in them, measured:
1. A route with a retry policy, and a request with trailers: the body reaches the backend twice, always in full duplex,
   mostly in STREAMED and BUFFERED_PARTIAL and where only trailers are sent to the processor (envoy#36119, #46095).
   Never in BUFFERED, nor in the mode that we recommend, which sends neither bodies nor trailers of requests.
2. The same in STREAMED when the processor dies in the middle of a request's body: what went before is sent again.
3. In full duplex `failure_mode_allow` covers requests without a body only: with one, a processor that does not answer
   means 500, unless Envoy knows beforehand that it is down.
"""

import asyncio
import io
import random
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replay.processes import free_ports
from tests.e2e.attach import Attachment, until
from tests.e2e.backend import EVENTS, addresses, digest
from tests.e2e.bootstrap import FULL_DUPLEX, check_health, processor, route, send_all
from tests.e2e.http2 import Connection

MODES = ("FULL_DUPLEX_STREAMED", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL")
PROTOCOLS = ("h1", "h2")
# Around the length of a piece (62,000) and of Envoy's own pieces (65,536 and less), and far beyond.
SIZES = (0, 1, 61_999, 62_000, 62_001, 65_536, 1_000_000, 5_000_000)
# Envoy buffers up to 1 MiB by default, and answers 413 beyond.
BUFFERED_MAX = 1_048_576
NOISE = random.Random(0).randbytes(max(SIZES))
# Everything that Envoy counts when the two do not understand each other.
COMPLAINTS = (
    "streams_failed",
    "failure_mode_allowed",
    "spurious_msgs_received",
    "message_timeouts",
    "rejected_header_mutations",
)


class Gateways:
    """Two endpoints behind a gateway for each mode and protocol; a third endpoint, for retries, that tests close."""

    def __init__(self, workdir: Path) -> None:
        alive, other, self.fragile = addresses(free_ports(3))
        self.alive = (alive, other)
        self.attached = attached = Attachment(workdir, [*self.alive, self.fragile])
        attached.service("picker", self.alive)
        # Probed often, so that it is soon ready again, and taken out by Envoy's word alone.
        retrying = {"probe_interval_s": "0.1", "probe_failures": "1000000"}
        attached.service("retrying", (alive, self.fragile), **retrying)
        checked = attached.service("checked", self.alive, drain_notice_s="4", drain_s="30")
        check_health(checked)
        for protocol in PROTOCOLS:
            h2 = protocol == "h2"
            attached.pool(f"pool-{protocol}", self.alive, h2=h2)
            attached.pool(f"fragile-{protocol}", (alive, self.fragile), h2=h2)
            for mode in MODES:
                self._gateway(f"{mode}-{protocol}", mode, f"pool-{protocol}")
            # Without retries, for requests with trailers.
            for mode in MODES:
                manager = self._gateway(f"{mode}-{protocol}-once", mode, f"pool-{protocol}")
                del route(manager)["route"]["retry_policy"]
            manager = self._gateway(f"retrying-{protocol}", "FULL_DUPLEX_STREAMED", f"fragile-{protocol}", "retrying")
            manager["route_config"]["virtual_hosts"][0]["include_attempt_count_in_response"] = True
            recommended = attached.gateway(f"recommended-{protocol}", service="picker", pool=f"pool-{protocol}")
            assert processor(recommended)["processing_mode"].get("request_body_mode", "NONE") == "NONE"
        self._gateway("checked", "FULL_DUPLEX_STREAMED", "pool-h1", "checked")
        large = self._gateway("large-buffer", "BUFFERED", "pool-h1")
        attached.document["static_resources"]["listeners"][-1]["per_connection_buffer_limit_bytes"] = 16 << 20
        processor(large)["processing_mode"]["response_body_mode"] = "NONE"

    def _gateway(self, name: str, mode: str, pool: str, service: str = "picker") -> Any:
        manager = self.attached.gateway(name, service=service, pool=pool)
        send_all(manager)
        processor(manager)["processing_mode"] = FULL_DUPLEX | {"request_body_mode": mode, "response_body_mode": mode}
        return manager

    def complaints(self, gateway: str) -> dict[str, int]:
        """Return what Envoy has to complain of, at this gateway."""
        return {name: self.attached.envoy_stat(f"http.{gateway}.ext_proc.{name}") for name in COMPLAINTS}

    def address(self, gateway: str) -> str:
        return self.attached.urls[gateway].removeprefix("http://")


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    """One service and one Envoy for all tests of this module."""
    gateways = Gateways(tmp_path_factory.mktemp("modes"))
    with gateways.attached:
        yield gateways


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP/1.1 client."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), connector=connector) as session:
        yield session


async def echo(session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, bool, bool]:
    """Return status, whether the backend got what was sent, and whether the client got it back."""
    async with session.post(f"{url}/echo", data=io.BytesIO(body)) as response:
        back = await response.read()
        came = (response.headers.get("x-sha256"), response.headers.get("x-length"))
        return response.status, came == (digest(body), str(len(body))), back == body


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", MODES)
async def test_bodies_arrive_whole(
    gateways: Gateways, session: aiohttp.ClientSession, mode: str, protocol: str
) -> None:
    """A body of any length reaches the backend byte for byte and comes back so, each request decided by the service."""
    gateway = f"{mode}-{protocol}"
    sizes = [size for size in SIZES if size <= BUFFERED_MAX or not mode.startswith("BUFFERED")]
    before = gateways.attached.metric("picker", "cacheroute_picks_total")
    for size in sizes:
        assert await echo(session, gateways.attached.urls[gateway], NOISE[:size]) == (200, True, True), size
    assert gateways.attached.metric("picker", "cacheroute_picks_total") == before + len(sizes)
    assert gateways.complaints(gateway) == dict.fromkeys(COMPLAINTS, 0)
    await gateways.attached.drained()


async def test_body_that_the_service_does_not_take_passes(gateways: Gateways, session: aiohttp.ClientSession) -> None:
    """A buffered body longer than the longest message that the service takes goes on whole, without the service."""
    body = NOISE[:5_000_000]
    assert await echo(session, gateways.attached.urls["large-buffer"], body) == (200, True, True)
    assert gateways.complaints("large-buffer")["streams_failed"] == 1
    await gateways.attached.drained()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", MODES)
async def test_messages_without_a_body(gateways: Gateways, mode: str, protocol: str) -> None:
    """A request and a response that have no body at all pass, by HTTP/1.1 and HTTP/2 to the backend."""
    async with await Connection.to(gateways.address(f"{mode}-{protocol}")) as connection:
        for method in (b"GET", b"POST", b"DELETE"):
            stream = connection.open("/empty", method=method, end=True)
            assert (await asyncio.wait_for(stream.headers(), 15))[b":status"] == b"204"
            assert await stream.read_all() == b""
    assert gateways.complaints(f"{mode}-{protocol}") == dict.fromkeys(COMPLAINTS, 0)
    await gateways.attached.drained()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "STREAMED"])
async def test_pieces_travel_at_once(gateways: Gateways, mode: str, protocol: str) -> None:
    """Each piece of a request comes back before the next is sent, and each event before the next is made."""
    async with await Connection.to(gateways.address(f"{mode}-{protocol}")) as connection:
        stream = connection.open("/duplex")
        for i in range(EVENTS):
            await stream.send(b"piece %d" % i, end=i == EVENTS - 1)
            assert await asyncio.wait_for(stream.read(), 15) == b"piece %d" % i
        assert await stream.read() == b""
        stream = connection.open("/events", end=True)
        for i in range(EVENTS):
            assert await asyncio.wait_for(stream.read(), 15) == b"data: %d\n\n" % i
            gateways.attached.backend.go_on()
        assert await stream.read() == b""
    await gateways.attached.drained()


@pytest.mark.parametrize("size", [0, 1, 200_000])
@pytest.mark.parametrize("gateway", [*(f"{mode}-h2-once" for mode in MODES), "BUFFERED-h2", "recommended-h2"])
async def test_trailers_pass_both_ways(gateways: Gateways, gateway: str, size: int) -> None:
    """Trailers of a request reach the backend, and those of its response the client, after a body that is whole.

    With a retry policy where Envoy bears it, see the head of this file.
    """
    trailers = [(b"x-checksum", b"abc"), (b"grpc-status", b"0")]
    async with await Connection.to(gateways.address(gateway)) as connection:
        for _ in range(5):
            stream = connection.open("/echo")
            if size:
                await stream.send(NOISE[:size])
            stream.send_headers(trailers, end=True)
            headers = await stream.headers()
            assert (headers[b":status"], int(headers[b"x-length"])) == (b"200", size)
            assert await stream.read_all() == NOISE[:size]
            assert stream.trailers == dict(trailers)
    assert gateways.complaints(gateway) == dict.fromkeys(COMPLAINTS, 0)
    await gateways.attached.drained()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_many_at_a_time(gateways: Gateways, session: aiohttp.ClientSession, protocol: str) -> None:
    """Fifty requests at a time in full duplex, of all lengths: nobody gets a byte of another's body, none fails."""
    gateway = f"FULL_DUPLEX_STREAMED-{protocol}"
    lengths = [1, 1_000, 62_000, 130_000, 500_000]
    bodies = [NOISE[i : i + lengths[i % len(lengths)]] for i in range(150)]
    slots = asyncio.Semaphore(50)

    async def one(body: bytes) -> tuple[int, bool, bool]:
        async with slots:
            return await echo(session, gateways.attached.urls[gateway], body)

    assert set(await asyncio.gather(*(one(body) for body in bodies))) == {(200, True, True)}
    assert gateways.complaints(gateway) == dict.fromkeys(COMPLAINTS, 0)
    await gateways.attached.drained()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_client_that_leaves(gateways: Gateways, protocol: str) -> None:
    """A client that leaves in mid-request or mid-response leaves nothing in flight, and the backend learns of it."""
    attached = gateways.attached
    left = attached.backend.abandoned.total()
    async with await Connection.to(gateways.address(f"FULL_DUPLEX_STREAMED-{protocol}")) as connection:
        streams = [connection.open("/hold", end=True) for _ in range(5)]
        for stream in streams:
            assert await stream.read() == b"held"
        half_sent = [connection.open("/echo") for _ in range(5)]
        for stream in half_sent:
            await stream.send(NOISE[:100_000])
        await until(lambda: attached.inflight("picker") == 10, "all in flight")
        for stream in streams + half_sent:
            stream.reset()
        await gateways.attached.drained()
        await until(lambda: attached.backend.abandoned.total() == left + 5, "the backend told")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_backend_that_resets(gateways: Gateways, protocol: str) -> None:
    """A response that breaks off breaks off at the client too, or is answered 5xx, and leaves nothing in flight."""
    async with await Connection.to(gateways.address(f"FULL_DUPLEX_STREAMED-{protocol}")) as connection:
        for _ in range(5):
            stream = connection.open("/reset", end=True)
            try:
                whole = (await stream.headers())[b":status"] == b"200"
                await stream.read_all()
            except ConnectionResetError:
                whole = False
            assert not whole
        await gateways.attached.drained()


@pytest.mark.parametrize("size", [0, 1, 62_001, 1_000_000])
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_dead_first_endpoint(gateways: Gateways, protocol: str, size: int) -> None:
    """In full duplex too the next of the list serves when the first is dead, and gets the body once, from its start."""
    attached = gateways.attached
    attached.backend.open(gateways.fragile)
    await until(lambda: all(e["ready"] for e in attached.fleet("retrying")), "both endpoints ready")
    async with await Connection.to(gateways.address(f"retrying-{protocol}")) as connection:
        # While the other one has a request, the fragile one is the less loaded and comes first.
        held: list[Any] = []
        while not any(e["inflight"] and e["address"] != gateways.fragile for e in attached.fleet("retrying")):
            held.append(connection.open("/hold", end=True))
            await held[-1].headers()
        for stream in held[:-1]:
            stream.reset()
        await until(lambda: attached.inflight("retrying") == 1, "one in flight")
        attached.backend.close(gateways.fragile)
        await until(lambda: _connections(attached, gateways.fragile) == 0, "no connection to the dead one")
        stream = connection.open("/echo", end=size == 0)
        if size:
            await stream.send(NOISE[:size], end=True)
        headers = await stream.headers()
        assert (headers[b":status"], headers[b"x-envoy-attempt-count"]) == (b"200", b"2")
        assert int(headers[b"x-length"]) == size
        assert await stream.read_all() == NOISE[:size]
        held[-1].reset()
    await gateways.attached.drained()


def _connections(attached: Attachment, address: str) -> int:
    """Return how many connections Envoy's pools have to an address."""
    return sum(attached.host_stats(address, "cx_active"))


async def test_dead_service_in_full_duplex(gateways: Gateways, session: aiohttp.ClientSession) -> None:
    """A service that Envoy knows to be dead by health checks is passed by, bodies whole; alive again, it is asked."""
    attached, url = gateways.attached, gateways.attached.urls["checked"]
    attached.services["checked"].kill()
    try:
        await until(lambda: not attached.healthy("checked"), "known to be dead")
        async with asyncio.timeout(15):
            while (await echo(session, url, b"until Envoy's worker knows too"))[0] != 200:
                pass
        for size in (0, 1, 100_000, 1_000_000):
            assert await echo(session, url, NOISE[:size]) == (200, True, True)
    finally:
        attached.restart("checked")
    async with asyncio.timeout(15):
        while not attached.metric("checked", "cacheroute_picks_total"):
            assert await echo(session, url, NOISE[:1000]) == (200, True, True)
    await gateways.attached.drained()


async def test_service_that_ends_in_full_duplex(gateways: Gateways, session: aiohttp.ClientSession) -> None:
    """An orderly end of the service hurts nobody in full duplex: not a stream that it began, nor requests meanwhile."""
    attached, url = gateways.attached, gateways.attached.urls["checked"]
    service = attached.services["checked"]
    async with await Connection.to(gateways.address("checked")) as connection:
        stream = connection.open("/duplex")
        await stream.send(NOISE[:1000])
        assert await stream.read() == NOISE[:1000]
        service.send_signal(signal.SIGTERM)
        try:
            while attached.healthy("checked"):
                assert await echo(session, url, NOISE[:1000]) == (200, True, True)
            for size in (0, 1, 100_000):
                assert await echo(session, url, NOISE[:size]) == (200, True, True)
            await stream.send(NOISE[:1000], end=True)
            assert await stream.read_all() == NOISE[:1000]
            await until(lambda: not service.running, "the service's end", within_s=60)
            assert service.exit_code == 0
            assert await echo(session, url, NOISE[:1000]) == (200, True, True)
        finally:
            service.kill()
            attached.restart("checked")
    await until(lambda: attached.healthy("checked"), "known to be alive")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_service_that_dies_in_mid_body(gateways: Gateways, session: aiohttp.ClientSession, protocol: str) -> None:
    """In the recommended mode a service that is killed in the middle of a request and its response hurts neither."""
    attached = gateways.attached
    async with await Connection.to(gateways.address(f"recommended-{protocol}")) as connection:
        stream = connection.open("/duplex")
        for i in range(4):
            if i == 2:
                attached.services["picker"].kill()
            await stream.send(NOISE[:1000], end=i == 3)
            back = b""
            while len(back) < 1000:
                back += await asyncio.wait_for(stream.read(), 15)
            assert back == NOISE[:1000]
        assert await stream.read() == b""
        try:
            assert await echo(session, attached.urls[f"recommended-{protocol}"], NOISE[:100_000]) == (200, True, True)
        finally:
            attached.restart("picker")
