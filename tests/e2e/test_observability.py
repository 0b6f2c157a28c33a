"""Observability mode of a real Envoy: the service watches traffic that it has no say in, and cannot hurt it.

Envoy sends a copy of each message, takes no answer, and closes the stream some time after the response
(`deferred_close_timeout`).
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest

from replay.processes import free_ports
from service.telemetry import DESTINATION
from tests.e2e.attach import STATS_S, Attachment, until
from tests.e2e.backend import EVENTS, addresses, digest
from tests.e2e.bootstrap import processor

OBSERVED, BODIES = "observed", "observed-bodies"
BODY = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attachment]:
    """Two endpoints behind gateways that show the service headers only, and bodies too."""
    hosts = addresses(free_ports(2))
    attached = Attachment(tmp_path_factory.mktemp("observed"), hosts)
    # One key may have one request in flight: what is refused elsewhere.
    attached.service("watcher", hosts, key_inflight_max="1")
    attached.pool("pool", hosts)
    for name in (OBSERVED, BODIES):
        manager = attached.gateway(name, service="watcher", pool="pool")
        config = processor(manager)
        config |= {"observability_mode": True, "deferred_close_timeout": "0.3s"}
        if name == BODIES:
            config["processing_mode"] |= {"request_body_mode": "STREAMED", "response_body_mode": "STREAMED"}
    with attached:
        yield attached


@pytest.fixture
async def session(attached: Attachment) -> AsyncIterator[aiohttp.ClientSession]:
    """A client; after the test the service has nothing in flight, and answered nothing."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session
    await attached.drained()
    await asyncio.sleep(2 * STATS_S)
    assert attached.bytes_answered("watcher") == 0


async def ask(session: aiohttp.ClientSession, url: str, key: str) -> str:
    """Send a request that must reach a backend as if nobody watched; return the backend."""
    async with session.post(url + "/x", data=BODY, headers={"x-tenant-id": key}) as response:
        seen: dict[str, Any] = json.loads(await response.read())
        assert (response.status, seen["sha256"], seen["length"]) == (200, digest(BODY), len(BODY))
        assert DESTINATION not in seen["headers"]
        return str(seen["backend"])


@pytest.mark.parametrize("gateway", [OBSERVED, BODIES])
async def test_traffic_is_watched_and_left_alone(
    attached: Attachment, session: aiohttp.ClientSession, gateway: str
) -> None:
    """Each request is picked for and compared with who served; who serves is Envoy's balancing alone, by key."""
    picks = attached.metric("watcher", "cacheroute_picks_total")
    shadows = attached.metric("watcher", "cacheroute_shadow_total")
    keys = [f"tenant-{i}" for i in range(40)]
    served = {key: {await ask(session, attached.urls[gateway], key) for _ in range(2)} for key in keys}
    assert {len(backends) for backends in served.values()} == {1}
    assert len(set.union(*served.values())) == 2
    await until(lambda: attached.metric("watcher", "cacheroute_shadow_total") == shadows + 80, "all compared")
    assert attached.metric("watcher", "cacheroute_picks_total") == picks + 80
    agreed = attached.metric("watcher", "cacheroute_shadow_total", agrees="yes")
    assert 0 < agreed < attached.metric("watcher", "cacheroute_shadow_total")


async def test_nobody_is_refused(attached: Attachment, session: aiohttp.ClientSession) -> None:
    """A key above its limit is served all the same, and nothing counts as refused."""
    async with session.post(attached.urls[OBSERVED] + "/hold", headers={"x-tenant-id": "busy"}) as held:
        assert held.status == 200
        await until(lambda: attached.inflight("watcher") == 1, "one in flight")
        for _ in range(3):
            await ask(session, attached.urls[OBSERVED], "busy")
        held.close()
    assert attached.metric("watcher", "cacheroute_refused_total") == 0


async def test_service_that_hangs(attached: Attachment, session: aiohttp.ClientSession) -> None:
    """While the service stands still, responses do not wait for it."""
    attached.services["watcher"].send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(20):
            for i in range(20):
                await ask(session, attached.urls[OBSERVED], f"tenant-{i}")
    finally:
        attached.services["watcher"].send_signal(signal.SIGCONT)


@pytest.mark.parametrize("gateway", [OBSERVED, BODIES])
async def test_service_that_is_dead(attached: Attachment, session: aiohttp.ClientSession, gateway: str) -> None:
    """With the service dead, in mid-response too, traffic goes on; when it is back it watches again."""
    async with session.post(attached.urls[gateway] + "/events") as response:
        assert await response.content.readline() == b"data: 0\n"
        attached.services["watcher"].kill()
        for _ in range(EVENTS):
            attached.backend.go_on()
        try:
            assert (await response.read()).endswith(b"data: %d\n\n" % (EVENTS - 1))
            for i in range(10):
                await ask(session, attached.urls[gateway], f"tenant-{i}")
        finally:
            attached.restart("watcher")

    async def watched() -> bool:
        await ask(session, attached.urls[gateway], "tenant")
        return attached.metric("watcher", "cacheroute_picks_total") > 0

    async with asyncio.timeout(15):
        while not await watched():
            await asyncio.sleep(0.05)
