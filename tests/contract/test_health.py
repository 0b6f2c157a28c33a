"""Readiness as probes of real servers find it, while the fleet changes."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from service.fleet import Changes, Endpoint, Fleet, Found
from service.health import Prober
from service.settings import ServiceSettings
from service.telemetry import Telemetry

PATIENCE_S = 20.0
NEVER_S = 3600.0


class Engines:
    """Servers with a `/health` each, which answers as `status` says; 0: never."""

    def __init__(self) -> None:
        self.status: dict[str, int] = {}
        self.probes: dict[str, int] = {}
        self.address: dict[str, str] = {}
        self._runners: list[web.AppRunner] = []

    async def start(self, *names: str) -> None:
        for name in names:
            self.status[name], self.probes[name] = 200, 0

            async def health(_: web.Request, name: str = name) -> web.Response:
                self.probes[name] += 1
                if not self.status[name]:
                    await asyncio.sleep(NEVER_S)
                return web.Response(status=self.status[name])

            app = web.Application()
            app.router.add_get("/health", health)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address[name] = f"127.0.0.1:{runner.addresses[0][1]}"
            self._runners.append(runner)

    async def stop(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    def found(self, *names: str, vouched: bool = True) -> list[Found]:
        return [Found(name, self.address[name], vouched=vouched) for name in names]


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    engines = Engines()
    await engines.start("a", "b", "c")
    yield engines
    await engines.stop()


@contextlib.asynccontextmanager
async def probing(fleet: Fleet, *, interval_s: float = 0.02) -> AsyncIterator[tuple[Prober, Telemetry]]:
    telemetry = Telemetry(CollectorRegistry())
    settings = ServiceSettings(
        endpoint=("x=127.0.0.1:1",), probe_interval_s=interval_s, probe_timeout_s=0.5, probe_failures=2
    )
    prober = Prober(fleet, settings, telemetry)
    task = asyncio.create_task(prober.run())
    try:
        yield prober, telemetry
        assert not task.done(), "probing never ends by itself"
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


def watching() -> int:
    """Return how many tasks probe."""
    return sum("_watch" in repr(task.get_coro()) for task in asyncio.all_tasks())


def told(telemetry: Telemetry, name: str, to: str, cause: str) -> float:
    labels = {"endpoint": name, "to": to, "cause": cause}
    return telemetry.registry.get_sample_value("cacheroute_readiness_changes_total", labels) or 0.0


async def test_probes_come_and_go_with_the_fleet(engines: Engines) -> None:
    """Who joins is probed, who leaves is not, who returns is again, and no task is left over."""
    fleet = Fleet([("a", engines.address["a"])])
    async with probing(fleet) as (prober, _):
        await eventually(lambda: engines.probes["a"])
        prober.changed(fleet.update(engines.found("b", "c")))
        await eventually(lambda: engines.probes["b"] and engines.probes["c"])
        seen = engines.probes["a"]
        await eventually(lambda: engines.probes["b"] > seen + 20)
        assert watching() == 2
        assert engines.probes["a"] <= seen + 1, "one may have been on its way"
        for _ in range(50):
            prober.changed(fleet.update(engines.found("a", "b", "c")))
            prober.changed(fleet.update(engines.found("b")))
        prober.changed(fleet.update(engines.found("a")))
        seen = engines.probes["a"]
        await eventually(lambda: engines.probes["a"] > seen + 1)
        assert watching() == 1


async def test_the_fleet_may_change_before_probing_starts_and_after_it_ended(engines: Engines) -> None:
    """Changes before `run` are found when it starts; those after its end are no error."""
    fleet = Fleet()
    telemetry = Telemetry(CollectorRegistry())
    prober = Prober(fleet, ServiceSettings(endpoint=("x=127.0.0.1:1",)), telemetry)
    prober.changed(fleet.update(engines.found("a")))
    task = asyncio.create_task(prober.run())
    await eventually(lambda: engines.probes["a"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    prober.changed(fleet.update(engines.found("a", "b")))
    prober.connect_failed(fleet.by_name["b"])


async def test_one_that_nobody_vouches_for_is_probed_first(engines: Engines) -> None:
    """A server that DNS lists while it loads gets nothing until its first good probe."""
    engines.status["b"] = 503
    fleet = Fleet([("a", engines.address["a"])])
    async with probing(fleet) as (prober, telemetry):
        prober.changed(fleet.update([*engines.found("a"), *engines.found("b", vouched=False)]))
        await eventually(lambda: engines.probes["b"] > 5)
        assert [e.name for e in fleet.usable] == ["a"]
        engines.status["b"] = 200
        await eventually(lambda: len(fleet.usable) == 2)
        assert (told(telemetry, "b", "ready", "probe"), told(telemetry, "b", "unready", "probe")) == (1, 0)


async def test_one_that_hangs_delays_nobody(engines: Engines) -> None:
    """An endpoint that never answers its probes is found unready, and the others are probed all the while."""
    engines.status["a"] = 0
    fleet = Fleet([(name, engines.address[name]) for name in ("a", "b")])
    async with probing(fleet) as (_, telemetry):
        await eventually(lambda: told(telemetry, "a", "unready", "probe"))
        assert engines.probes["b"] > 2 * engines.probes["a"]
        assert [e.name for e in fleet.usable] == ["b"]


async def test_what_requests_meet_brings_a_probe_forward(engines: Engines) -> None:
    """A connection that failed, and a request without any response, ask for a probe long before it is due."""
    fleet = Fleet([(name, engines.address[name]) for name in ("a", "b")])
    one = fleet.by_name["a"]
    async with probing(fleet, interval_s=NEVER_S) as (prober, telemetry):
        await eventually(lambda: engines.probes["a"] == 1)
        prober.connect_failed(one)
        prober.connect_failed(one)
        assert not one.usable
        await eventually(lambda: one.usable)
        assert told(telemetry, "a", "unready", "connect") == told(telemetry, "a", "ready", "probe") == 1
        engines.status["a"] = 503
        # A burst asks for one probe only: suspicion alone takes nobody out.
        for probes in (3, 4):
            await asyncio.sleep(0.3)
            for _ in range(100):
                prober.suspect(one)
            assert one.usable
            await eventually(lambda probes=probes: engines.probes["a"] == probes)
        await eventually(lambda: not one.usable)
        assert told(telemetry, "a", "unready", "probe") == 1


async def test_impatient_clients_cannot_flood_an_endpoint_with_probes(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soon after a probe, requests without a response ask for none; a connection that failed still does."""
    monkeypatch.setattr("service.health.SUSPECT_GAP_S", NEVER_S)
    fleet = Fleet([("a", engines.address["a"])])
    async with probing(fleet, interval_s=NEVER_S) as (prober, _):
        await eventually(lambda: engines.probes["a"] == 1)
        for _ in range(5):
            prober.suspect(fleet.by_name["a"])
            await asyncio.sleep(0.1)
        assert engines.probes["a"] == 1
        prober.connect_failed(fleet.by_name["a"])
        await eventually(lambda: engines.probes["a"] == 2)


async def test_strangers_are_no_error(engines: Engines) -> None:
    """What is heard of an endpoint that left, or never was here, changes nothing."""
    fleet = Fleet([(name, engines.address[name]) for name in ("a", "b")])
    one = fleet.by_name["a"]
    async with probing(fleet) as (prober, telemetry):
        await eventually(lambda: engines.probes["a"])
        prober.changed(fleet.update(engines.found("b")))
        for endpoint in (one, Endpoint("z", "127.0.0.1:1")):
            prober.connect_failed(endpoint)
            prober.suspect(endpoint)
        assert told(telemetry, "a", "unready", "connect") == 0
        assert [e.name for e in fleet.usable] == ["b"]


async def test_answers_take_out_until_the_next_regular_probe(engines: Engines) -> None:
    """With `/health` good, an endpoint whose answers were faults is back after its next regular probe, not before."""
    fleet = Fleet([(name, engines.address[name]) for name in ("a", "b")])
    one = fleet.by_name["a"]
    async with probing(fleet, interval_s=1.0) as (prober, telemetry):
        await eventually(lambda: engines.probes["a"])
        probes = engines.probes["a"]
        while not fleet.answered(one, 503):
            pass
        prober.ejected(one)
        out = time.monotonic()
        await eventually(lambda: one.usable)
        assert engines.probes["a"] == probes + 1
        assert time.monotonic() - out > 0.5, "its probe was not brought forward"
        assert told(telemetry, "a", "unready", "status") == told(telemetry, "a", "ready", "probe") == 1


async def test_slow_starts_go_on_by_themselves(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without requests or load from elsewhere the share of a new endpoint still grows to the whole."""
    monkeypatch.setattr("service.health.REFRESH_S", 0.01)
    fleet = Fleet([("b", engines.address["b"])], 0.5)
    changes = fleet.update(engines.found("a", "b"))
    assert changes == Changes(("a",), (), ())
    one = fleet.by_name["a"]
    async with probing(fleet) as _:
        assert one.handicap > 1
        await eventually(lambda: one.handicap == 1)


async def test_one_that_only_envoy_cannot_reach_stays_out_longer_each_time(engines: Engines) -> None:
    """Back by a good probe and out again by a failed connection, an endpoint is held out for longer and longer."""
    fleet = Fleet([(name, engines.address[name]) for name in ("a", "b")])
    one = fleet.by_name["a"]
    async with probing(fleet, interval_s=0.05) as (prober, telemetry):
        await eventually(lambda: engines.probes["a"])
        outs = []
        for _ in range(6):
            prober.connect_failed(one)
            began = time.monotonic()
            await eventually(lambda: one.usable)
            outs.append(time.monotonic() - began)
        assert outs[5] > 0.05 * 2**4, outs
        assert told(telemetry, "a", "unready", "connect") == 6


class Odd(NamedTuple):
    """What a server answers to a probe: raw bytes, and whether it is healthy then."""

    said: bytes
    healthy: bool = False


ODD = {
    "redirect to itself": Odd(b"HTTP/1.1 302 Found\r\nLocation: /health\r\nContent-Length: 0\r\n\r\n"),
    "redirect to no host": Odd(b"HTTP/1.1 302 Found\r\nLocation: http://a..b/\r\nContent-Length: 0\r\n\r\n"),
    "long label": Odd(b"HTTP/1.1 302 x\r\nLocation: http://" + b"a" * 80 + b".b/\r\nContent-Length: 0\r\n\r\n"),
    "no HTTP": Odd(b"\x15\x03\x01\x00\x02\x02\x28" * 5),
    "bad status": Odd(b"HTTP/1.1 99999 x\r\n\r\n"),
    "bad length": Odd(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"),
    "nothing": Odd(b""),
    "well": Odd(b"HTTP/1.1 204 No Content\r\n\r\n", healthy=True),
    "bad gzip": Odd(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", healthy=True),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=list(ODD))
async def test_whatever_an_endpoint_answers_probing_goes_on(odd: Odd, engines: Engines) -> None:
    """No answer of one endpoint ends the probing, follows a redirect, or changes what is known of another endpoint."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(odd.said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fleet = Fleet([("a", f"127.0.0.1:{port}"), ("b", engines.address["b"]), ("c", engines.address["c"])])
    one = fleet.by_name["a"]
    async with probing(fleet):
        await eventually(lambda: engines.probes["b"] > 10)
        await eventually(lambda: one.usable == odd.healthy)
        engines.status["c"] = 503
        await eventually(lambda: not fleet.by_name["c"].usable)
        assert fleet.by_name["b"].usable
    server.close()


async def test_who_refuses_connections_is_told_from_who_fails_otherwise(engines: Engines) -> None:
    """In panic all are used but those where nobody listens."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        fleet = Fleet([("a", f"127.0.0.1:{nobody.getsockname()[1]}"), ("b", engines.address["b"])])
        engines.status["b"] = 404
        async with probing(fleet):
            await eventually(lambda: not fleet.by_name["b"].ready and not fleet.by_name["a"].ready)
            assert fleet.panic
            assert [e.name for e in fleet.usable] == ["b"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
async def test_what_this_machine_lacks_is_no_verdict(
    engines: Engines, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes that fail since there are no descriptors or no memory left here leave every endpoint as it was."""
    fleet = Fleet([("a", engines.address["a"])])
    tried = 0

    async def connect(*_: object, **__: object) -> None:
        nonlocal tried
        tried += 1
        raise OSError(number, "not here")

    async with probing(fleet) as (_, telemetry):
        await eventually(lambda: engines.probes["a"])
        monkeypatch.setattr("aiohttp.TCPConnector.connect", connect)
        await eventually(lambda: tried > 5)
        assert fleet.by_name["a"].ready
        assert told(telemetry, "a", "unready", "probe") == 0
