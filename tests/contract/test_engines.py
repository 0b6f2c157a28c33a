"""The planner and the engines' metrics pages: real engines are read, and a p99 that jumps ends a plan until it is back.

Pages of engines whose latency a test decides come from a real server too, and are made as vLLM makes them.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from planner.cycle import Planner
from planner.latency import TtftWindow
from planner.predict import flat_resident_s
from planner.record import Record
from planner.scrape import addresses_of, scrape
from planner.settings import PlannerSettings, load_settings
from planner.windows import Windows
from replay.sim_metrics import TTFT_BUCKETS_S
from service.ledger import Ledger
from service.published import Ack, EndpointView
from service.store import Store
from tests.contract.test_planner_job import NOW_S, OPEN_S, Server

SOON_S = 60.0


@contextlib.contextmanager
def sim_engine(kv_blocks: int) -> Iterator[str]:
    """Run a simulated engine, 20 times faster than time; yields its address."""
    options = ("--listen", "127.0.0.1:0", "--speed", "20", "--kv-blocks", str(kv_blocks))
    command = (sys.executable, "-m", "planner.cli", "sim-engine", *options)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("{"), line + process.stderr.read()
            yield json.loads(line)["address"]
        finally:
            process.kill()


async def complete(address: str, requests: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SOON_S)) as client:

        async def one(number: int) -> None:
            body = {"model": "sim-model", "prompt": f"{number} word " * 50, "max_tokens": 2}
            async with client.post(f"http://{address}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(*(one(number) for number in range(requests)))


@dataclass
class FakeEngine:
    """A metrics page whose latencies the test decides; `wrong` is answered in its place."""

    wrong: web.Response | None = None
    silent: bool = False
    asked: int = 0
    address: str = ""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        name = "vllm:time_to_first_token_seconds"
        self._ttft = Histogram(name, "TTFT", ("engine",), buckets=TTFT_BUCKETS_S, registry=self.registry)
        cache = Gauge("vllm:cache_config_info", "KV", ("block_size", "num_gpu_blocks"), registry=self.registry)
        cache.labels("16", "1000").set(1)

    def serve(self, requests: int, seconds: float) -> None:
        for _ in range(requests):
            self._ttft.labels("0").observe(seconds)

    async def page(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.silent:
            await asyncio.sleep(SOON_S)
        return self.wrong or web.Response(body=generate_latest(self.registry))


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    app = web.Application()
    app.add_routes([web.get("/metrics", engine.page), web.get("/elsewhere", FakeEngine().page)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.address = f"{host}:{port}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with serving(FakeEngine()) as engine:
        yield engine


@pytest.fixture
async def store(valkey: Server, pool: str) -> AsyncIterator[Ledger]:
    store = Ledger(valkey.url, pool)
    yield store
    await store.close()


@pytest.fixture
def settings(valkey: Server, pool: str) -> PlannerSettings:
    return load_settings(
        {},
        redis_url=valkey.url,
        pool=pool,
        endpoint=("a", "b"),
        slots_per_endpoint=50,
        replica_cap_rps=1e6,
    )


class Cycles:
    """One planner that leads, 300 s from cycle to cycle, and whose services reach the engine as both endpoints."""

    def __init__(self, store: Ledger, settings: PlannerSettings) -> None:
        self.store, self.now_s = store, NOW_S
        self.planner = Planner(store, settings, clock=lambda: self.now_s)

    async def next(self, address: str) -> Record:
        fleet = [EndpointView(name, address, ready=True, draining=False, inflight=0) for name in ("a", "b")]
        await self.store.write_ack("x", version=0, epoch=0, error="", fleet=fleet)
        lease = await self.store.lead("test", ttl_s=60)
        record = await self.planner.cycle(lease.value)
        self.now_s += 300.0
        return record


async def count(store: Store, keys: int = 50, each: int = 20) -> None:
    await store.add_rates(OPEN_S, dict.fromkeys(range(1, keys + 1), each), instance="x", batch=1, ttl_s=600)


async def test_real_engines_are_read_and_what_is_silent_is_left_out(engine: FakeEngine) -> None:
    """Requests between two scrapes are counted over all engines, and the smallest cache; nothing keeps it waiting."""
    with sim_engine(2000) as first, sim_engine(3000) as second:
        engine.silent = True
        window, places = TtftWindow(least_requests=30), (first, second, engine.address, "127.0.0.1:1")
        await complete(first, 5)
        async with asyncio.timeout(SOON_S / 2):
            pages = await scrape(places)
        assert {address: page.cache_tokens for address, page in pages.items()} == {first: 32_000, second: 48_000}
        assert window.take(pages, 0.0) is None
        await asyncio.gather(complete(first, 20), complete(second, 15))
        measured = window.take(await scrape(places), 10.0)
        assert measured is not None
        assert (measured.requests, measured.load_rps) == (35, 35 / 20)
        assert 0 < measured.p99_s < 100


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: web.Response(status=503),
        lambda: web.Response(status=302, headers={"location": "/elsewhere"}),
        lambda: web.Response(text='vllm:time_to_first_token_seconds_bucket{le="1"} NaN'),
        lambda: web.Response(text="vllm:time_to_first_token_seconds_bucket{le="),
        lambda: web.Response(text="# " + "x" * 5_000_000),
        lambda: web.Response(headers={"content-encoding": "gzip"}, body=b"no gzip"),
    ],
)
async def test_an_answer_that_is_no_page_is_silence(engine: FakeEngine, wrong: object) -> None:
    """Errors, redirects, broken and endless pages are left out, and raise nothing."""
    assert callable(wrong)
    assert engine.address in await scrape([engine.address])
    engine.wrong = wrong()
    assert await scrape([engine.address]) == {}


def test_engines_are_where_the_newest_service_says() -> None:
    """One address an endpoint of ours, the newest one; what is no address is not asked."""

    def ack(at: float, **fleet: str) -> Ack:
        views = tuple(EndpointView(name, address, True, False, 0) for name, address in fleet.items())
        return Ack("x", 1, 1, "", at, fleet=views)

    acks = [ack(2.0, a="10.0.0.2:80", other="10.9.9.9:80"), ack(1.0, a="10.0.0.1:80", b="user@evil/?x", c="[::1]:80")]
    assert addresses_of(acks, ("a", "b", "c")) == ("10.0.0.2:80", "[::1]:80")


async def test_a_p99_that_jumps_ends_the_plan_until_it_is_back(
    store: Ledger, settings: PlannerSettings, engine: FakeEngine
) -> None:
    """Flat-LB with the numbers at once, no plan while p99 is high, and the plan by itself 600 s after it is not."""
    await count(store)
    cycles, decisions, records = Cycles(store, settings), [], []
    for seconds in (0.9, 0.9, 0.9, 2.0, 2.0, 0.9, 0.9, 0.9):
        engine.serve(2000, seconds)
        records.append(await cycles.next(engine.address))
        decisions.append(records[-1]["decision"])
    assert decisions == ["published", "unchanged", "unchanged", "flat", "refused", "refused", "refused", "published"]
    assert [record["engines"]["p99_ttft_s"] for record in records[:3]] == [None, 0.9975, 0.9975]
    left, waiting, back = records[3], records[4], records[7]
    assert left["engines"]["baseline_p99_ttft_s"] == 0.9975
    assert left["engines"]["p99_ttft_s"] == pytest.approx(2.485)
    assert left["numbers"]["p99_ratio"] == pytest.approx(2.485 / 0.9975)
    assert "p99 of TTFT is 2.49 s, 2.49 times the 1.00 s before" in left["reason"]
    assert (await store.read_log())[1].reason == left["reason"]
    assert waiting["reason"].startswith("Refused: Flat-LB stays")
    assert waiting["numbers"]["p99_ratio"] > 2
    assert back["reason"].startswith("Published: no plan is in service")
    assert (await store.read_log())[0].keys == 50


async def test_the_next_leader_knows_p99_and_caches(
    store: Ledger, settings: PlannerSettings, engine: FakeEngine
) -> None:
    """A planner that takes the lead goes on from the record, and needs pages of its own for a window only."""
    await count(store)
    one = Cycles(store, settings)
    for seconds in (0.9, 0.9):
        engine.serve(2000, seconds)
        last = await one.next(engine.address)
    assert last["engines"]["known_p99_s"] == 0.9975
    two = Cycles(store, settings)
    two.now_s = one.now_s
    engine.silent = True
    record = await two.next(engine.address)
    assert (record["engines"]["silent"], record["cache_tokens"], record["cache_from"]) == (1, 16_000, "engines")
    engine.silent = False
    assert (await two.next(engine.address))["decision"] == "unchanged"
    engine.serve(2000, 2.0)
    assert (await two.next(engine.address))["decision"] == "flat"


async def test_an_operators_plan_begins_a_window_of_its_own(
    store: Ledger, settings: PlannerSettings, engine: FakeEngine
) -> None:
    """Requests from before somebody published are not held against what is in service now."""
    await count(store)
    cycles = Cycles(store, settings)
    for _ in range(2):
        engine.serve(2000, 0.9)
        await cycles.next(engine.address)
    head = await store.read_head()
    plan = cycles.planner._current
    assert plan is not None
    await store.publish(plan, expected=head, actor="operator", reason="")
    engine.serve(2000, 2.0)
    assert (await cycles.next(engine.address))["engines"]["p99_ttft_s"] is None
    engine.serve(2000, 0.9)
    assert (await cycles.next(engine.address))["engines"]["p99_ttft_s"] == 0.9975


async def test_engines_are_not_asked_when_that_is_off(
    store: Ledger, settings: PlannerSettings, engine: FakeEngine
) -> None:
    """With scrape_engines off nothing connects to them, and nothing of them is known."""
    await count(store)
    record = await Cycles(store, settings.model_copy(update={"scrape_engines": False})).next(engine.address)
    assert (record["decision"], engine.asked, record["cache_from"]) == ("published", 0, "")
    assert (record["engines"]["answered"], record["engines"]["cache_tokens"]) == (0, None)


async def test_residency_is_predicted_where_cache_and_prefix_are_known(
    store: Ledger, settings: PlannerSettings, engine: FakeEngine
) -> None:
    """τ of Flat-LB is what admission goes by, unless one is set; a key too rare for it gets no slot."""
    await count(store, keys=40, each=50)
    await store.add_rates(OPEN_S, dict.fromkeys(range(100, 110), 1), instance="y", batch=1, ttl_s=600)
    ungated = settings.model_copy(update={"gate": False})
    unknown = await Cycles(store, ungated.model_copy(update={"scrape_engines": False})).next(engine.address)
    assert (unknown["resident_s"], unknown["resident_from"], unknown["admitted"]) == (0.0, "", 50)
    sized = ungated.model_copy(update={"prefix_tokens": 1000.0, "unique_tokens": 100.0})
    told = await Cycles(store, sized).next(engine.address)
    assert (told["cache_tokens"], told["cache_from"], told["resident_from"]) == (16_000, "engines", "predicted")
    rates, _ = await Windows(store, sized).read(NOW_S)
    economics = sized.model_copy(update={"cache_tokens_per_endpoint": 16_000.0}).economics
    assert told["resident_s"] == flat_resident_s(rates, ("a", "b"), economics) > 0
    assert told["admitted"] == 40
    chosen = await Cycles(store, sized.model_copy(update={"resident_s": 1e6})).next(engine.address)
    assert (chosen["resident_s"], chosen["resident_from"], chosen["admitted"]) == (1e6, "setting", 50)
    huge = await Cycles(store, sized.model_copy(update={"cache_tokens_per_endpoint": 1e12})).next(engine.address)
    assert (huge["cache_tokens"], huge["cache_from"]) == (1e12, "setting")
