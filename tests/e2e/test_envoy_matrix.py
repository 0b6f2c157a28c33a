"""On each Envoy from 1.36 to 1.40: requests in flight are counted exactly while they last, and not at all after.

What is true is known twice: by the streams that this test has begun and not seen end, and by Envoy's own gauge of
active requests a host. The service's counters are compared with both, endpoint by endpoint: errors that cancel are
errors.
"""

import asyncio
import json
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replay.envoy_config import EnvoySettings, build_bootstrap
from replay.lab import Lab, LabSettings
from tests.e2e.counts import active, counted, drained, exactly, fullest, metrics, tally
from tests.e2e.envoy_versions import VERSIONS, envoy_of, minor
from tests.e2e.http2 import Connection, Stream

pytestmark = pytest.mark.timeout(300)  # The first test of a version may have to download it.

ENDING = 2000  # tokens; about two seconds of streaming
LONG = 3000  # longer than the lab lets a service drain
ENDLESS = 60_000  # about a minute: none of these ends by itself
DONE = b"data: [DONE]"


@pytest.fixture(scope="module", params=VERSIONS)
def shared_lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three engines, Valkey, the service and an Envoy of this version; takes the place of the run's shared lab."""
    workdir = tmp_path_factory.mktemp(f"envoy-{request.param}")
    settings = LabSettings(engines=3, speed=20, planner=False, workdir=workdir, envoy=envoy_of(request.param))
    with Lab(settings) as lab:
        yield lab


def served_by(client: Any, response: aiohttp.ClientResponse) -> str:
    """Return the name of the engine that gives this response."""
    return {e.address: e.name for e in client.lab.engines}[response.headers["x-cacheroute-served"]]


@asynccontextmanager
async def streams(
    client: Any, keys: Sequence[str], *, max_tokens: int
) -> AsyncIterator[list[tuple[str, aiohttp.ClientResponse]]]:
    """Open a stream a key, all at once; give who serves each, and the response; abort those still open at the end."""
    async with AsyncExitStack() as stack:
        opening = (stack.enter_async_context(client.streaming(key, max_tokens=max_tokens)) for key in keys)
        opened = await asyncio.gather(*opening)
        yield [(served_by(client, response), response) for response in opened]


@asynccontextmanager
async def unanswered(client: Any, count: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Send requests that are answered in a minute, and wait until all are counted; they are aborted at the end."""
    plan = spread(client, count // len(client.engines))
    await client.publish(plan)
    waiting = [asyncio.create_task(client.ask(key, max_tokens=ENDLESS)) for key in plan]

    async def all_counted() -> bool:
        at = await counted(client)
        return sum(at.values()) == count and await active(client) == at

    try:
        await client.until(all_counted, "all in flight")
        yield waiting
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def whole(response: aiohttp.ClientResponse, max_tokens: int) -> bool:
    """Read a stream to its end; return whether all of it came."""
    events = [line async for line in response.content if line.startswith(b"data:")]
    usage = json.loads(events[-2][len(b"data:") :])["usage"]
    return events[-1].strip() == DONE and usage["completion_tokens"] == max_tokens


def spread(client: Any, per_engine: int) -> dict[str, list[str]]:
    """Return a plan with as many keys of one target each for every engine."""
    return {f"tenant-{i}": [name] for i, name in enumerate(list(client.engines) * per_engine)}


@pytest.mark.parametrize("version", VERSIONS)
def test_configuration_is_accepted(version: str, tmp_path: Path) -> None:
    """Envoy of this version finds no fault in the bootstrap that is built for it, and nothing deprecated."""
    settings = EnvoySettings(
        listen="127.0.0.1:18080",
        admin="127.0.0.1:18081",
        service="127.0.0.1:18082",
        engines=("127.0.0.1:18083", "127.0.0.1:18084"),
        access_log="/dev/null",
        envoy_version=minor(version),
    )
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(build_bootstrap(settings)))
    command = [envoy_of(version), "--mode", "validate", "--log-level", "warning", "-c", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


async def test_list_is_obeyed_and_who_served_is_learnt(client: Any) -> None:
    """Each request is served by the first of its list; the service learns it from Envoy, and no other endpoint."""
    plan = spread(client, 4)
    await client.publish(plan)
    before = await metrics(client)
    for key, targets in plan.items():
        answer = await client.ask(key)
        assert (answer.status, [answer.served]) == (200, targets)
    after = await metrics(client)
    for engine in client.engines:
        assert after["cacheroute_served_total", engine] - before["cacheroute_served_total", engine] == 4
    for name in ("cacheroute_served_elsewhere_total", "cacheroute_served_unknown_total"):
        assert sum(v for (metric, _), v in (after - before).items() if metric == name) == 0
    await drained(client)


async def test_normal_end(client: Any) -> None:
    """Streams of planned and of cold keys, and requests that do not stream, are counted while they last."""
    plan = spread(client, 3)
    await client.publish(plan)
    async with streams(client, [*plan, *(f"cold-{i}" for i in range(9))], max_tokens=ENDING) as opened:
        await exactly(client, [name for name, _ in opened])
        assert all(await asyncio.gather(*(whole(response, ENDING) for _, response in opened)))
    assert {a.status for a in await asyncio.gather(*(client.ask(key) for key in plan))} == {200}
    await drained(client)


async def test_client_aborts_in_mid_stream(client: Any) -> None:
    """Each stream that its client leaves is subtracted from its own engine, and the others stay counted."""
    plan = spread(client, 3)
    await client.publish(plan)
    async with streams(client, [*plan], max_tokens=ENDLESS) as opened:
        await exactly(client, [name for name, _ in opened])
        for _, response in opened[::2]:
            response.close()
        rest = [name for name, _ in opened[1::2]]

        async def subtracted() -> bool:
            return await active(client) == await counted(client) == tally(client, rest)

        await client.until(subtracted, "the aborted ones subtracted")
    await drained(client)


async def test_client_aborts_before_the_answer(client: Any) -> None:
    """A request whose client leaves before the response has begun is counted until then."""
    async with unanswered(client, 6):
        pass
    await drained(client)


async def test_retry_walks_the_list(client: Any) -> None:
    """With the first two of the list dead the third serves; it is charged, and nothing stays with the dead ones."""
    await client.publish({"tenant": ["engine-0", "engine-1"]})
    before = await metrics(client)
    client.lab.kill("engine-0")
    client.lab.kill("engine-1")
    async with streams(client, ["tenant"] * 8, max_tokens=ENDLESS) as opened:
        assert {name for name, _ in opened} == {"engine-2"}
        await exactly(client, ["engine-2"] * 8)
    await drained(client)
    elsewhere = ("cacheroute_served_elsewhere_total", "engine-2")
    assert (await metrics(client))[elsewhere] > before[elsewhere]
    log: list[dict[str, Any]] = []

    async def logged() -> bool:
        log[:] = [json.loads(line) for line in client.lab.access_log.read_text().splitlines()][-8:]
        return len(log) == 8 and all(line["upstream"] == client.lab.engines[2].address for line in log)

    await client.until(logged, "the requests' lines in the access log")
    # The place in the list is the number of attempts: each host was tried once, in order.
    assert [line["destination"].split(",").index(line["upstream"]) + 1 for line in log] == [
        line["attempts"] for line in log
    ]
    assert max(line["attempts"] for line in log) == 3


async def test_engine_dies_in_mid_stream(client: Any) -> None:
    """What a dying engine was streaming fails and is subtracted; what others stream goes on and stays counted."""
    plan = spread(client, 3)
    await client.publish(plan)
    async with streams(client, [*plan], max_tokens=ENDING) as opened:
        names = [name for name, _ in opened]
        await exactly(client, names)
        victim, alive = fullest(names), []
        client.lab.kill(victim)
        for name, response in opened:
            if name == victim:
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            else:
                alive.append(whole(response, ENDING))
        assert alive
        assert all(await asyncio.gather(*alive))
    await drained(client)


async def test_engine_dies_before_the_answer(client: Any) -> None:
    """Requests that a dying engine had begun and not answered fail, and are subtracted; the others stay counted."""
    async with unanswered(client, 6) as waiting:
        before = await counted(client)
        victim = fullest([*Counter(before).elements()])
        client.lab.kill(victim)
        rest = before | {victim: 0}

        async def subtracted() -> bool:
            told = sum(task.done() for task in waiting) == before[victim]
            return told and await active(client) == await counted(client) == rest

        await client.until(subtracted, "the dead engine's requests subtracted")
        assert {task.result().status for task in waiting if task.done()} == {503}
    await drained(client)


async def test_service_killed_in_mid_stream(client: Any) -> None:
    """Responses arrive whole, and a new service counts its own requests exactly, whenever the old ones end."""
    plan = spread(client, 2)
    await client.publish(plan)
    version = (await client.get("/table"))["version"]
    async with streams(client, [*plan], max_tokens=ENDING) as opened:
        await exactly(client, [name for name, _ in opened])
        client.lab.kill("service")
        during = await asyncio.gather(*(client.ask(key) for key in plan))
        assert {a.status for a in during} == {200}
        client.lab.start("service")
        assert await counted(client) == tally(client, [])

        async def serves() -> bool:
            return bool((await client.get("/table"))["version"] == version)

        await client.until(serves, "the plan in the new service")
        async with streams(client, [*plan], max_tokens=ENDLESS) as later:
            begun = tally(client, [name for name, _ in later])
            assert await counted(client) == begun
            assert all(await asyncio.gather(*(whole(response, ENDING) for _, response in opened)))

            async def ended() -> bool:
                return bool(await active(client) == begun)

            await client.until(ended, "the old ones ended in Envoy")
            assert await counted(client) == begun
    await drained(client)


async def test_service_stopped_in_mid_stream(client: Any) -> None:
    """An orderly end counts to its last moment, cuts off no response, and leaves nothing counted."""
    plan = spread(client, 2)
    await client.publish(plan)
    async with streams(client, [*plan], max_tokens=LONG) as opened:
        client.lab.send_signal("service", signal.SIGTERM)
        await exactly(client, [name for name, _ in opened])
        assert (await client.ask("tenant-0")).status == 200
        assert all(await asyncio.gather(*(whole(response, LONG) for _, response in opened)))

    async def gone() -> bool:
        return client.lab.pid("service") is None

    await client.until(gone, "the end of the service")
    last = [json.loads(line) for line in client.lab.log_tail("service").splitlines() if line.startswith("{")]
    assert next(e["inflight"] for e in reversed(last) if e["event"] == "stopped") == 0
    client.lab.start("service")
    await drained(client)


async def test_service_hangs_in_mid_stream(client: Any) -> None:
    """A service that answers nothing for a while cuts nothing off, and counts right as soon as it goes on."""
    plan = spread(client, 2)
    await client.publish(plan)
    async with streams(client, [*plan], max_tokens=ENDING) as opened:
        await exactly(client, [name for name, _ in opened])
        client.lab.send_signal("service", signal.SIGSTOP)
        try:
            during = await asyncio.gather(*(client.ask(key) for key in plan))
            assert {a.status for a in during} == {200}
            assert all(await asyncio.gather(*(whole(response, ENDING) for _, response in opened)))
        finally:
            client.lab.send_signal("service", signal.SIGCONT)
    await drained(client)
    async with streams(client, [*plan], max_tokens=ENDLESS) as opened:
        await exactly(client, [name for name, _ in opened])
    await drained(client)


async def test_streams_of_one_http2_connection(client: Any) -> None:
    """Streams that share a client's connection end and are reset one by one, and are counted one by one."""
    plan = spread(client, 2)
    await client.publish(plan)
    names = {e.address.encode(): e.name for e in client.lab.engines}
    async with await Connection.to(client.lab.gateway_url.removeprefix("http://")) as connection:

        async def post(key: str, tokens: int) -> tuple[str, Stream]:
            body = {"model": client.lab.model, "prompt": "the cat", "max_tokens": tokens, "stream": True}
            stream = connection.open("/v1/completions", [(b"x-tenant-id", key.encode())])
            await stream.send(json.dumps(body).encode(), end=True)
            headers = await stream.headers()
            assert headers[b":status"] == b"200"
            return names[headers[b"x-cacheroute-served"]], stream

        ending = await asyncio.gather(*(post(key, ENDING) for key in plan))
        endless = await asyncio.gather(*(post(key, ENDLESS) for key in plan))
        await exactly(client, [name for name, _ in ending + endless])
        for _, stream in endless[::2]:
            stream.reset()
        bodies = await asyncio.gather(*(stream.read_all() for _, stream in ending))
        assert all(body.rstrip().endswith(DONE) for body in bodies)
        rest = [name for name, _ in endless[1::2]]

        async def subtracted() -> bool:
            return await active(client) == await counted(client) == tally(client, rest)

        await client.until(subtracted, "the ended and the reset ones subtracted")
    await drained(client)
