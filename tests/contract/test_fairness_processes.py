"""Three service processes and one Valkey: tenants keep their weights and their caps wherever their requests come in."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest

from service.keys import format_hash, hash_key
from service.pb import ext_proc_pb2 as pb
from tests.contract.serving import METHOD, Serving, until

pytestmark = pytest.mark.timeout(240)

HOLD_S, RETRY_S = 0.5, 0.3
SETTLED_S, LOOK_S = 5.0, 12.0


class Server(Protocol):
    url: str


@dataclass
class Clients:
    """What the clients of all tenants have in flight, as they see it: from the answer that admitted to the end."""

    inflight: Counter[str] = field(default_factory=Counter)
    inflight_s: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    at: float = 0.0

    def begin(self) -> None:
        """Forget all but what is in flight."""
        self.__init__(inflight=self.inflight, at=time.monotonic())  # type: ignore[misc]

    def add(self, tenant: str, n: int) -> None:
        self.look()
        self.inflight[tenant] += n
        self.most[tenant] = max(self.most[tenant], self.inflight[tenant])

    def look(self) -> None:
        now = time.monotonic()
        for tenant, n in self.inflight.items():
            self.inflight_s[tenant] += n * (now - self.at)  # type: ignore[assignment]
        self.at = now

    async def one(self, channel: grpc.aio.Channel, tenant: str, rng: random.Random) -> None:
        """Be a client for good: a request is held for a time; a refused one is tried again a little later."""
        message = pb.ProcessingRequest()
        message.request_headers.headers.headers.add(key="x-tenant-id", raw_value=tenant.encode())
        while True:
            call: Any = channel.stream_stream(
                METHOD,
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )()
            await call.write(message)
            reply = await call.read()
            kind = reply.WhichOneof("response") if reply is not grpc.aio.EOF else "closed"
            if kind == "request_headers":
                self.add(tenant, 1)
                try:
                    await asyncio.sleep(HOLD_S * rng.uniform(0.5, 1.5))
                finally:
                    self.add(tenant, -1)
                    self.completed[tenant] += 1
                await call.done_writing()
                await call.read()
                continue
            if kind == "immediate_response":
                self._refused(reply.immediate_response)
            else:
                self.other[kind] += 1
            call.cancel()
            await asyncio.sleep(RETRY_S * rng.uniform(0.5, 1.5))

    def _refused(self, answer: pb.ImmediateResponse) -> None:
        headers = {o.header.key: o.header.raw_value.decode() for o in answer.headers.set_headers}
        if answer.status.code == 429 and headers.get("retry-after") == "1":
            self.reasons[headers.get("x-cacheroute-dropped-reason", "none")] += 1
        else:
            self.other[f"status {answer.status.code}"] += 1


@asynccontextmanager
async def clients(
    services: Sequence[Serving], demand: Sequence[tuple[str, Sequence[int], int]], seed: int
) -> AsyncIterator[Clients]:
    """Run clients of tenants; demand: tenant, the services that they reach, how many they are."""
    counts, rng = Clients(at=time.monotonic()), random.Random(seed)
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{s.grpc_port}") for s in services]
    tasks = [
        asyncio.create_task(counts.one(channels[at[n % len(at)]], tenant, rng))
        for tenant, at, number in demand
        for n in range(number)
    ]
    try:
        yield counts
        for task in tasks:
            assert not task.done(), task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for channel in channels:
            await channel.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts services of one pool, and ends them after the test."""
    with ExitStack() as running:

        def starts(number: int, **settings: str) -> list[Serving]:
            common = {"load_exchange_s": "0.25", **settings}
            services = [
                running.enter_context(Serving(tmp_path / f"{i}.log", instance=f"p{i}", **common)) for i in range(number)
            ]
            known = number if "redis_url" in settings else 1
            for service in services:
                until(lambda s=service: s.samples("cacheroute_fair_processes") == {"": known}, "all know of all")  # type: ignore[misc]
            return services

        yield starts


# The tenant of weight 4 reaches one process, the other one all others, with more clients.
SKEWED = (("gold", (0,), 24), ("other", (1, 2), 40))


@pytest.mark.parametrize("seed", range(2))
async def test_four_to_one_under_fully_skewed_ingress(start: Any, valkey: Server, pool: str, seed: int) -> None:
    """Two tenants of weights 4:1 that no process sees both of, the light one wanting more, are within 5 % of 4:1."""
    services = start(3, redis_url=valkey.url, pool=pool, fleet_inflight_max="20", fair_weight="gold=4")
    async with clients(services, SKEWED, seed) as counts:
        await asyncio.sleep(SETTLED_S)
        counts.begin()
        await asyncio.sleep(LOOK_S)
        counts.look()
    held = {tenant: counts.inflight_s[tenant] / LOOK_S for tenant in ("gold", "other")}
    print(f"in flight {held}, ratio {held['gold'] / held['other']:.3f}, completed {dict(counts.completed)}")
    assert held["gold"] / held["other"] == pytest.approx(4.0, rel=0.05)
    assert set(counts.reasons) == {"fair-share"}
    assert not counts.other
    for service in services:
        assert service.samples("cacheroute_fair_processes") == {"": 3}
        assert service.samples("cacheroute_fleet_full") == {"": 1}
    refused = sum(sum(s.samples("cacheroute_refused_total", cause="fair_share").values()) for s in services)
    assert refused >= counts.reasons["fair-share"]


async def test_processes_that_do_not_exchange_give_one_to_one(start: Any) -> None:
    """The control, and a peer's failure (163:162): processes fair each by itself give their parts to anybody."""
    services = start(2, fleet_inflight_max="10", fair_weight="gold=4")
    async with clients(services, (("gold", (0,), 24), ("other", (1,), 40)), 0) as counts:
        await asyncio.sleep(SETTLED_S)
        counts.begin()
        await asyncio.sleep(LOOK_S)
        counts.look()
    print(f"in flight {dict(counts.inflight_s)}")
    assert counts.inflight_s["gold"] / counts.inflight_s["other"] == pytest.approx(1.0, rel=0.1)
    assert set(counts.reasons) == {"fair-share"}


async def test_a_keys_cap_holds_over_all_processes(start: Any, valkey: Server, pool: str) -> None:
    """A key fills its cap and at no moment has more in flight, while its traffic moves between processes."""
    services = start(3, redis_url=valkey.url, pool=pool, key_inflight_max="9")
    for at in ((0,), (0, 1, 2), (2, 1), (1,)):
        async with clients(services, (("gold", at, 20), ("other", (0, 1, 2), 20)), 0) as counts:
            await asyncio.sleep(3.0)
            assert counts.most["gold"] <= 9
            assert counts.most["other"] <= 9
            counts.begin()
            await asyncio.sleep(2.0)
            counts.look()
        assert counts.most["gold"] == 9, at
        assert counts.most["other"] == 9, at
        assert counts.inflight_s["gold"] / 2.0 > 7.5, at
        assert set(counts.reasons) == {"key-concurrency"}
        assert not counts.other
    gold = format_hash(hash_key(b"gold"))
    assert all("gold" not in s.log() or gold in s.log() for s in services), "keys are never logged, but as hashes"
    assert all(s.inflight() == 0 for s in services)
