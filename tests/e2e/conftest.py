"""One fleet on real Envoy and real Valkey for all end-to-end tests, and a client of it; each test finds it whole."""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from replay.lab import Lab, LabSettings
from replay.programs import envoy_program
from service.errors import InvalidInput
from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.store import Store

PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """status, the name of the engine that served (empty: none did), and how many tokens came."""

    status: int
    served: str
    tokens: int


class Client:
    """What a test does with a fleet; every wait has a deadline and says what was awaited."""

    def __init__(self, lab: Lab, session: aiohttp.ClientSession) -> None:
        self.lab = lab
        self.session = session
        self.engines = [e.name for e in lab.engines]
        self._names = {e.address: e.name for e in lab.engines}

    async def ask(self, key: str | None, *, max_tokens: int = 2, headers: Mapping[str, str] | None = None) -> Answer:
        """Send one request that is answered at once."""
        async with self._post(key, max_tokens, stream=False, headers=headers) as response:
            body = await response.read()
            tokens = json.loads(body)["usage"]["completion_tokens"] if response.status == 200 else 0
            return Answer(response.status, self._served(response), tokens)

    async def ask_all(self, keys: Sequence[str | None]) -> list[Answer]:
        """Send one request a key, one after the other."""
        return [await self.ask(key) for key in keys]

    @asynccontextmanager
    async def streaming(self, key: str, *, max_tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request that streams; its first event has arrived when the block begins."""
        async with self._post(key, max_tokens, stream=True) as response:
            assert response.status == 200
            assert (await response.content.readline()).startswith(b"data:")
            yield response

    async def stream(self, key: str, *, max_tokens: int, begun: asyncio.Event | None = None) -> Answer:
        """Send a request that streams and read it to its end."""
        async with self.streaming(key, max_tokens=max_tokens) as response:
            if begun is not None:
                begun.set()
            events = [line async for line in response.content if line.startswith(b"data:")]
        assert events[-1].strip() == b"data: [DONE]"
        usage = next(u for e in reversed(events[:-1]) if (u := json.loads(e[5:]).get("usage")))
        return Answer(response.status, self._served(response), usage["completion_tokens"])

    async def publish(self, assignment: Mapping[str, Sequence[str]], *, served: bool = True) -> int:
        """Publish a plan that gives each key its engines; return its version, once the service serves it."""
        rows = [(hash_key(key.encode()), [self.engines.index(e) for e in names]) for key, names in assignment.items()]
        offsets = [0]
        for _, targets in rows:
            offsets.append(offsets[-1] + len(targets))
        plan = Plan(
            endpoints=tuple(self.engines),
            key_hashes=array("Q", [key_hash for key_hash, _ in rows]),
            target_offsets=array("I", offsets),
            targets=array("H", [t for _, targets in rows for t in targets]),
            rates_rps=array("f", [1.0] * len(rows)),
            key_check=hash_key(KEY_CHECK),
        )
        store = Store(self.lab.redis_url, self.lab.pool)
        try:
            published = await store.publish(plan, expected=await store.read_head(), actor="test", reason="test")
        finally:
            await store.close()
        if served:
            await self.until(lambda: self.serves(published), f"plan {published.version} in service")
        return published.version

    async def serves(self, plan: Plan) -> bool:
        """Return whether the service's table is that of `plan`."""
        table = await self.get("/table")
        return bool((table["version"], table["epoch"]) == (plan.version, plan.epoch))

    async def get(self, path: str) -> Any:
        """Return a JSON document of the service's HTTP port."""
        async with self.session.get(self.lab.service_url + path) as response:
            return json.loads(await response.read())

    async def inflight(self) -> int:
        """Return how many requests the service thinks are in flight."""
        return sum(e["inflight"] for e in (await self.get("/fleet"))["endpoints"])

    async def quiet(self) -> bool:
        """Return whether the service thinks that nothing is in flight."""
        return await self.inflight() == 0

    async def whole(self) -> bool:
        """Return whether the service and Envoy think that every engine is ready."""
        async with self.session.get(f"{self.lab.envoy_admin_url}/clusters") as response:
            states = [line for line in (await response.text()).splitlines() if "::health_flags::" in line]
        in_envoy = sum(line.startswith("pool::") and line.endswith("::healthy") for line in states)
        return in_envoy == len(self.engines) and all(e["ready"] for e in (await self.get("/fleet"))["endpoints"])

    async def until(self, check: Callable[[], Awaitable[bool]], what: str, within_s: float = PATIENCE_S) -> None:
        """Wait until `check` holds."""
        deadline = time.monotonic() + within_s
        while not await check():
            assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
            await asyncio.sleep(0.01)

    async def envoy_stat(self, name: str) -> int:
        """Return a counter of Envoy by its exact name."""
        async with self.session.get(f"{self.lab.envoy_admin_url}/stats?filter=^{name}$&format=json") as response:
            stats = json.loads(await response.read())["stats"]
        return int(next(s["value"] for s in stats if s.get("name") == name))

    def _post(self, key: str | None, max_tokens: int, *, stream: bool, headers: Mapping[str, str] | None = None) -> Any:
        body: dict[str, Any] = {"model": self.lab.model, "prompt": "the cat sat on the mat", "max_tokens": max_tokens}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        tenant = {} if key is None else {"x-tenant-id": key}
        url = f"{self.lab.gateway_url}/v1/completions"
        return self.session.post(url, json=body, headers={**tenant, **(headers or {})})

    def _served(self, response: aiohttp.ClientResponse) -> str:
        return self._names.get(response.headers.get("x-cacheroute-served", ""), "")


@pytest.fixture(scope="session")
def shared_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Four engines, Valkey, the service and Envoy, for the whole run; tests plan by hand."""
    try:
        envoy_program()
    except InvalidInput as exc:
        pytest.skip(str(exc))
    settings = LabSettings(engines=4, speed=20, planner=False, workdir=tmp_path_factory.mktemp("lab"))
    with Lab(settings) as lab:
        yield lab


@pytest.fixture
async def client(shared_lab: Lab) -> AsyncIterator[Client]:
    """A client of the fleet; whatever the test broke is mended after it, and nothing is left in flight."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(shared_lab, session)
        yield client
        for part in shared_lab.parts:
            if shared_lab.pid(part) is None:
                shared_lab.start(part)
        await client.until(client.whole, "every engine ready after the test")
        await client.until(client.quiet, "nothing in flight after the test")
