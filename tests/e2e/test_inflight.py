"""The service counts a request in flight from its pick to the true end of its response, whatever ended it."""

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import pytest

LONG = 4000  # tokens; some seconds of streaming


async def test_normal_end(client: Any) -> None:
    """Streams are counted while they last, on the engines that serve them, and no longer."""
    await client.publish({"tenant": ["engine-1"]})
    begun = [asyncio.Event() for _ in range(6)]
    streams = [asyncio.create_task(client.stream("tenant", max_tokens=2000, begun=event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    counts = {e["name"]: e["inflight"] for e in (await client.get("/fleet"))["endpoints"]}
    answers = await asyncio.gather(*streams)
    assert {a.tokens for a in answers} == {2000}
    served = Counter(a.served for a in answers)
    assert counts == {name: served[name] for name in client.engines}
    await client.until(client.quiet, "nothing in flight after the streams' ends")


async def test_client_abort(client: Any) -> None:
    """A client that goes away in mid-stream is no longer counted."""
    async with client.streaming("tenant", max_tokens=LONG) as response:
        assert await client.inflight() == 1
        response.close()
    await client.until(client.quiet, "nothing in flight after the client went away")


async def test_client_abort_before_the_answer(client: Any) -> None:
    """A client that goes away before the response begins is no longer counted."""
    waiting = asyncio.create_task(client.ask("tenant", max_tokens=LONG))

    async def counted() -> bool:
        return await client.inflight() == 1

    await client.until(counted, "the request in flight")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.until(client.quiet, "nothing in flight after the client went away")


async def test_upstream_reset(client: Any) -> None:
    """An engine that dies in mid-stream leaves nothing in flight."""
    await client.publish({"tenant": ["engine-3"]})
    async with client.streaming("tenant", max_tokens=LONG) as response:
        assert await client.inflight() == 1
        client.lab.kill("engine-3")
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    await client.until(client.quiet, "nothing in flight after the engine's death")


async def test_refused_request(client: Any) -> None:
    """A request that the engine refuses is counted no longer than any other."""
    answer = await client.ask("tenant", max_tokens=-1)
    assert answer.status == 400
    await client.until(client.quiet, "nothing in flight after the refusal")
