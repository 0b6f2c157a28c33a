"""Discovery by DNS, asked of a name server of the test's own over UDP and TCP, and the process that lives by it."""

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from replay.processes import free_ports
from service.discovery import Discovery
from service.discovery.names import TTL_MAX_S, Names
from service.fleet import Changes, Fleet
from service.pb import ext_proc_pb2 as pb
from service.settings import ServiceSettings
from service.telemetry import Telemetry

HOST = "vllm.prod.svc.cluster.local"
SRV_NAME = f"_http._tcp.{HOST}"
PATIENCE_S = 20.0


class NameServer(asyncio.DatagramProtocol):
    """Answers from `records`, or misbehaves as `fault` says, on one port of both transports."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl = 0
        self.beside: list[tuple[str, str]] = []
        # By record type, "" for all: servfail, refused, silence or garbage.
        self.fault: dict[str, str] = {}
        self.truncates = False
        self.asked: list[tuple[str, str, str]] = []
        self.address = ""

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._serve_tcp, "127.0.0.1", 0)
        port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", port))
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        self._udp.close()
        self._tcp.close()
        await self._tcp.wait_closed()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        reply = self._reply(data, "udp")
        if reply is not None:
            self._udp.sendto(reply, addr)

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
            reply = self._reply(data, "tcp")
            if reply is not None:
                writer.write(len(reply).to_bytes(2, "big") + reply)
                await writer.drain()
        writer.close()

    def _reply(self, data: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(data)
        name, kind = query.question[0].name.to_text(), dns.rdatatype.to_text(query.question[0].rdtype)
        name = name.removesuffix(".")
        self.asked.append((name, kind, transport))
        fault = self.fault.get(kind) or self.fault.get("")
        if fault == "silence":
            return None
        if fault == "garbage":
            return b"\x00\x01 no message at all"
        reply = dns.message.make_response(query)
        if fault:
            reply.set_rcode(dns.rcode.from_text(fault))
            return reply.to_wire()
        if self.truncates and transport == "udp":
            reply.flags |= dns.flags.TC
            return reply.to_wire()
        if texts := self.records.get((name, kind)):
            reply.answer.append(dns.rrset.from_text_list(f"{name}.", self.ttl, "IN", kind, texts))
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        if kind == "SRV":
            reply.additional = [
                dns.rrset.from_text_list(f"{name}.", self.ttl, "IN", kind, self.records[name, kind])
                for name, kind in self.beside
            ]
        return reply.to_wire()

    def set_pods(self, **pods: tuple[str, int]) -> None:
        """Become a headless service with these pods: `vllm_0=("10.0.0.1", 8000)`."""
        named = {pod.replace("_", "-"): where for pod, where in pods.items()}
        self.records = {(f"{pod}.{HOST}", "A"): [ip] for pod, (ip, _) in named.items()}
        self.records[SRV_NAME, "SRV"] = [f"0 50 {port} {pod}.{HOST}." for pod, (_, port) in named.items()]


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    server = NameServer()
    await server.start()
    yield server
    await server.stop()


class Followed:
    """A fleet that follows a name server."""

    def __init__(self, server: NameServer, discover: str) -> None:
        self.fleet = Fleet((), 30.0)
        self.telemetry = Telemetry(CollectorRegistry())
        settings = ServiceSettings(discover=discover, dns_server=server.address)
        # Less than may be set: a test is shorter than an interval.
        settings = settings.model_copy(update={"discover_interval_s": 0.05})
        self.heard: list[Changes] = []
        self.discovery = Discovery(self.fleet, settings, self.telemetry, self.heard.append)

    def endpoints(self) -> dict[str, str]:
        return {e.name: e.address for e in self.fleet.endpoints}

    def failures(self, cause: str) -> float:
        return self.telemetry.registry.get_sample_value("cacheroute_discovery_failures_total", {"cause": cause}) or 0.0

    def changes(self, change: str) -> float:
        return self.telemetry.registry.get_sample_value("cacheroute_discovery_changes_total", {"change": change}) or 0.0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.discovery.first()
        task = asyncio.create_task(self.discovery.run())
        try:
            yield
            assert not task.done(), "discovery never ends by itself"
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def eventually(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


async def test_addresses_of_a_headless_service(server: NameServer) -> None:
    """`dns:` makes an endpoint of each address, called by it, ready and warm at the start."""
    server.records[HOST, "A"] = ["10.0.0.2", "10.0.0.1"]
    followed = Followed(server, f"dns:{HOST}:8000")
    await followed.discovery.first()
    assert followed.endpoints() == {a: a for a in ("10.0.0.1:8000", "10.0.0.2:8000")}
    assert [(e.usable, e.handicap) for e in followed.fleet.endpoints] == [(True, 1.0)] * 2
    assert followed.heard == [Changes(("10.0.0.1:8000", "10.0.0.2:8000"), (), ())]


async def test_ipv6_addresses_are_written_as_envoy_writes_them(server: NameServer) -> None:
    """Without IPv4 addresses those of IPv6 are used, in brackets and in their shortest form."""
    server.records[HOST, "AAAA"] = ["fd00:0:0::1", "fd00::2"]
    followed = Followed(server, f"dns:{HOST}:8000")
    await followed.discovery.first()
    assert set(followed.endpoints()) == {"[fd00::1]:8000", "[fd00::2]:8000"}


async def test_a_server_in_both_families_is_one_endpoint(server: NameServer) -> None:
    """A dual-stack service, by either kind of record, gives one endpoint a server."""
    server.records[HOST, "A"], server.records[HOST, "AAAA"] = ["10.0.0.1"], ["fd00::1"]
    followed = Followed(server, f"dns:{HOST}:8000")
    await followed.discovery.first()
    assert set(followed.endpoints()) == {"10.0.0.1:8000"}

    server.set_pods(vllm_0=("10.0.0.1", 8000))
    server.records[f"vllm-0.{HOST}", "AAAA"] = ["fd00::1"]
    server.beside = [(f"vllm-0.{HOST}", "AAAA"), (f"vllm-0.{HOST}", "A")]
    followed = Followed(server, f"srv:{SRV_NAME}")
    await followed.discovery.first()
    assert followed.endpoints() == {"vllm-0": "10.0.0.1:8000"}


async def test_srv_names_outlive_addresses(server: NameServer) -> None:
    """`srv:` calls an endpoint by its target, so a pod that restarts elsewhere is the same name at another address."""
    server.set_pods(vllm_0=("10.0.0.1", 8000), vllm_1=("10.0.0.2", 8001))
    followed = Followed(server, f"srv:{SRV_NAME}")
    async with followed.running():
        assert followed.endpoints() == {"vllm-0": "10.0.0.1:8000", "vllm-1": "10.0.0.2:8001"}
        server.set_pods(vllm_0=("10.0.0.9", 8000), vllm_2=("10.0.0.3", 8000))
        await eventually(lambda: "vllm-2" in followed.endpoints())
        assert followed.endpoints() == {"vllm-0": "10.0.0.9:8000", "vllm-2": "10.0.0.3:8000"}
    assert [c for c in followed.heard if any(c)] == [
        Changes(("vllm-0", "vllm-1"), (), ()),
        Changes(("vllm-2",), ("vllm-1",), ("vllm-0",)),
    ]
    assert [followed.changes(c) for c in ("added", "removed", "moved")] == [3, 1, 1]
    assert not any(e.ready for e in followed.fleet.endpoints), "DNS vouches for nobody who joins"


async def test_two_ports_of_one_target_are_two_endpoints(server: NameServer) -> None:
    """A target with several ports gives an endpoint a port, called by both."""
    server.records = {
        (SRV_NAME, "SRV"): [f"0 50 {port} vllm-0.{HOST}." for port in (8000, 8001)],
        (f"vllm-0.{HOST}", "A"): ["10.0.0.1"],
    }
    followed = Followed(server, f"srv:{SRV_NAME}")
    await followed.discovery.first()
    assert followed.endpoints() == {"vllm-0:8000": "10.0.0.1:8000", "vllm-0:8001": "10.0.0.1:8001"}


async def test_addresses_that_come_along_are_not_asked_for(server: NameServer) -> None:
    """Addresses in the additional section are used, whatever their names' case; only the missing are asked for."""
    server.set_pods(vllm_0=("10.0.0.1", 8000), vllm_1=("10.0.0.2", 8000))
    server.records[SRV_NAME, "SRV"][0] = f"0 50 8000 VLLM-0.{HOST}."
    server.beside = [(f"vllm-0.{HOST}", "A")]
    followed = Followed(server, f"srv:{SRV_NAME}")
    await followed.discovery.first()
    assert followed.endpoints() == {"vllm-0": "10.0.0.1:8000", "vllm-1": "10.0.0.2:8000"}
    assert server.asked == [(SRV_NAME, "SRV", "udp"), (f"vllm-1.{HOST}", "A", "udp")]


async def test_a_truncated_answer_is_asked_for_again_over_tcp(server: NameServer) -> None:
    """A fleet that does not fit a datagram is found whole."""
    server.truncates = True
    server.records[HOST, "A"] = [f"10.0.{i // 200}.{i % 200 + 1}" for i in range(1000)]
    followed = Followed(server, f"dns:{HOST}:8000")
    await followed.discovery.first()
    assert len(followed.endpoints()) == 1000
    assert {transport for _, _, transport in server.asked} == {"udp", "tcp"}


@pytest.mark.parametrize("discover", [f"dns:{HOST}:8000", f"srv:{SRV_NAME}"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("servfail", "server"),
        ("refused", "server"),
        ("garbage", "timeout"),
        ("silence", "timeout"),
        ("nothing", "empty"),
        ("no name", "nxdomain"),
    ],
)
async def test_what_dns_does_not_say_changes_nothing(server: NameServer, discover: str, fault: str, cause: str) -> None:
    """An answer that fails or is empty keeps the last fleet, counts its cause, and logs one line with a remedy."""
    server.set_pods(vllm_0=("10.0.0.1", 8000))
    server.records[HOST, "A"] = ["10.0.0.1"]
    followed = Followed(server, discover)
    good = dict(server.records)
    with capture_logs() as logs:
        async with followed.running():
            before = followed.endpoints()
            assert len(before) == 1
            if fault == "nothing":
                server.records = {key: [] for key in good}
            elif fault == "no name":
                server.records = {}
            else:
                server.fault[""] = fault
            times = 1 if cause == "timeout" else 3
            await eventually(lambda: followed.failures(cause) >= times)
            assert followed.endpoints() == before
            assert followed.fleet.usable
            server.records, server.fault = good, {}
            await eventually(lambda: any(line["event"] == "discovery has recovered" for line in logs))
            server.records = {**good, (HOST, "A"): ["10.0.0.1", "10.0.0.2"]}
            server.records[SRV_NAME, "SRV"] = [*good[SRV_NAME, "SRV"], f"0 50 8000 vllm-1.{HOST}."]
            server.records[f"vllm-1.{HOST}", "A"] = ["10.0.0.2"]
            await eventually(lambda: len(followed.endpoints()) == 2)
    told = [line for line in logs if line["event"] == "discovery"]
    assert [line["cause"] for line in told] == [cause]
    assert told[0]["log_level"] == "warning"
    assert told[0]["remedy"]
    assert told[0]["error"]


@pytest.mark.parametrize("fault", ["servfail", "silence", "no server"])
async def test_a_start_without_dns_serves_and_fills_later(server: NameServer, fault: str) -> None:
    """When DNS is away at the start the fleet is empty within seconds, and who is found later is ready and warm."""
    server.set_pods(vllm_0=("10.0.0.1", 8000))
    followed = Followed(server, f"srv:{SRV_NAME}")
    if fault == "no server":
        await server.stop()
    else:
        server.fault[""] = fault
    async with asyncio.timeout(PATIENCE_S):
        await followed.discovery.first()
    assert followed.endpoints() == {}
    if fault == "no server":
        return
    async with followed.running():
        server.fault = {}
        await eventually(lambda: followed.fleet.usable)
    assert followed.fleet.endpoints[0].handicap == 1.0


async def test_a_hole_in_the_view_removes_nobody(server: NameServer) -> None:
    """Where only the addresses cannot be had, those known before are used, new targets join when theirs are there."""
    server.set_pods(vllm_0=("10.0.0.1", 8000), vllm_1=("10.0.0.2", 8000))
    followed = Followed(server, f"srv:{SRV_NAME}")
    async with followed.running():
        server.fault["A"] = "servfail"
        server.set_pods(vllm_0=("10.0.0.1", 8000), vllm_2=("10.0.0.3", 8000))
        await eventually(lambda: "vllm-1" not in followed.endpoints())
        assert followed.endpoints() == {"vllm-0": "10.0.0.1:8000"}
        assert followed.failures("server")
        server.fault = {}
        await eventually(lambda: "vllm-2" in followed.endpoints())


async def test_a_target_that_is_gone_is_gone(server: NameServer) -> None:
    """A target whose name no longer exists leaves the fleet, the others stay."""
    server.set_pods(vllm_0=("10.0.0.1", 8000), vllm_1=("10.0.0.2", 8000))
    followed = Followed(server, f"srv:{SRV_NAME}")
    async with followed.running():
        del server.records[f"vllm-1.{HOST}", "A"]
        await eventually(lambda: followed.endpoints() == {"vllm-0": "10.0.0.1:8000"})
        assert followed.failures("nxdomain")


async def test_names_that_two_targets_share_and_records_without_a_server(server: NameServer) -> None:
    """A name or address that stands twice is used once, a record without port is left out; each is counted and told."""
    server.records = {
        (SRV_NAME, "SRV"): [
            "0 50 8000 vllm-0.b.",
            "0 50 8000 vllm-0.a.",
            "0 50 8000 vllm-9.a.",
            "0 50 0 vllm-1.a.",
            "0 0 0 .",
        ],
        ("vllm-0.a", "A"): ["10.0.0.1"],
        ("vllm-0.b", "A"): ["10.0.0.2"],
        ("vllm-1.a", "A"): ["10.0.0.3"],
        ("vllm-9.a", "A"): ["10.0.0.1"],
    }
    followed = Followed(server, f"srv:{SRV_NAME}")
    with capture_logs() as logs:
        await followed.discovery.first()
    assert followed.endpoints() == {"vllm-0": "10.0.0.1:8000"}
    assert (followed.failures("duplicate"), followed.failures("no_port")) == (2, 1)
    assert sorted(line["cause"] for line in logs if line["event"] == "discovery") == ["duplicate", "no_port"]


@pytest.mark.parametrize(("ttl", "interval_s", "due_s"), [(30, 5, 30), (1, 5, 5), (86400, 5, TTL_MAX_S), (0, 7, 7)])
async def test_the_ttl_says_when_to_ask_again(
    server: NameServer, monkeypatch: pytest.MonkeyPatch, ttl: int, interval_s: float, due_s: float
) -> None:
    """The next question comes after the shortest TTL, not before the interval, at most minutes later."""
    server.ttl = ttl
    server.set_pods(vllm_0=("10.0.0.1", 8000))
    names = Names(
        ServiceSettings(discover=f"srv:{SRV_NAME}", dns_server=server.address, discover_interval_s=interval_s)
    )
    await names.find()
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await names.wait()
    assert slept[0] == pytest.approx(due_s, rel=0.1001)


async def test_a_fault_of_our_own_does_not_end_discovery(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody expected is counted, logged once with its trace, and tried again after."""
    server.set_pods(vllm_0=("10.0.0.1", 8000))
    followed = Followed(server, f"srv:{SRV_NAME}")
    calls = 0

    def broken(_: Fleet, found: object, *, warm: bool = False) -> Changes:
        nonlocal calls
        calls += 1
        if calls < 4:
            raise ZeroDivisionError
        monkeypatch.undo()
        return followed.fleet.update(found, warm=warm)  # type: ignore[arg-type]

    monkeypatch.setattr(Fleet, "update", broken)
    with capture_logs() as logs:
        async with followed.running():
            await eventually(lambda: followed.fleet.usable)
    assert followed.failures("fault") == 3
    assert len([line for line in logs if line.get("exc_info")]) == 1


async def test_metrics_of_pods_that_left_are_forgotten(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters keep the last endpoints that left, not all of them: their names have no end."""
    monkeypatch.setattr("service.discovery.follow.NAMES_KEPT", 3)
    followed = Followed(server, f"srv:{SRV_NAME}")
    async with followed.running():
        for i in range(8):
            server.set_pods(**{f"pod_{i}": ("10.0.0.1", 8000)})
            await eventually(lambda i=i: f"pod-{i}" in followed.endpoints())
            followed.telemetry.served[f"pod-{i}", "2xx"] += 1
            followed.telemetry.elsewhere.labels(f"pod-{i}").inc()
            followed.telemetry.readiness_changes.labels(f"pod-{i}", "ready", "probe").inc()
    kept = {f"pod-{i}" for i in range(4, 8)}
    samples = [s for m in followed.telemetry.registry.collect() for s in m.samples if "endpoint" in s.labels]
    assert {s.labels["endpoint"] for s in samples} == kept
    assert {name for name, _ in followed.telemetry.served} == kept


class Children:
    """Processes of one test, each with its log; none outlives the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, *arguments: str, **variables: str) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        with (self._directory / f"{name}.log").open("ab") as log:
            self._running[name] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "planner.cli", *arguments), env={**clean, **variables}, stdout=log, stderr=log
            )

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    async def stop(self) -> None:
        for child in self._running.values():
            if child.returncode is None:
                child.kill()
            await child.wait()


class Requests:
    """Requests at the service as Envoy would send them, each in flight until it is ended."""

    def __init__(self, grpc_port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}")
        self._process = self._channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )
        self.open: list[tuple[str, Any]] = []

    async def begin(self, n: int) -> Tally[str]:
        """Begin n requests and leave them in flight; return how many each address got."""
        got = Tally[str]()
        for _ in range(n):
            call = self._process()
            message = pb.ProcessingRequest()
            message.request_headers.SetInParent()
            await call.write(message)
            answer = await call.read()
            assert answer.WhichOneof("response") == "request_headers", answer
            (option,) = answer.request_headers.response.header_mutation.set_headers
            address = option.header.raw_value.decode().split(",")[0]
            self.open.append((address, call))
            got[address] += 1
        return got

    async def end(self, address: str = "") -> None:
        """Let the endpoint, all endpoints when empty, answer all it has."""
        ending = [(a, call) for a, call in self.open if a == address or not address]
        self.open = [(a, call) for a, call in self.open if (a, call) not in ending]
        for served, call in ending:
            message = pb.ProcessingRequest()
            header = message.response_headers.headers.headers.add()
            header.key, header.raw_value = ":status", b"200"
            fields = message.attributes["envoy.filters.http.ext_proc"].fields
            fields["upstream.address"].string_value = served
            fields["upstream.request_attempt_count"].number_value = 1
            await call.write(message)
            await call.read()
            await call.done_writing()
            assert await call.read() == grpc.aio.EOF

    async def close(self) -> None:
        await self._channel.close()


async def test_engines_come_and_go_under_a_running_service(server: NameServer, tmp_path: Path) -> None:
    """An engine that joins gets requests once it answers probes, one that leaves gets none, and no count goes wrong."""
    grpc_port, http_port, *ports = free_ports(5)
    pods = {f"vllm_{i}": ("127.0.0.1", port) for i, port in enumerate(ports)}
    first, second, third = (f"127.0.0.1:{port}" for port in ports)
    children = Children(tmp_path)

    async def http(path: str) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{http_port}{path}") as response:
            return await response.text()

    async def fleet() -> dict[str, dict[str, Any]]:
        try:
            # The HTTP port answers before the gRPC port does; /healthz says when both do.
            if json.loads(await http("/healthz"))["status"] != "ok":
                return {}
            return {e["name"]: e for e in json.loads(await http("/fleet"))["endpoints"]}
        except aiohttp.ClientError:
            return {}

    async def reaches(what: Callable[[dict[str, dict[str, Any]]], object]) -> None:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not what(seen := await fleet()):
            assert time.monotonic() < deadline, f"it never came: {seen}\n{children.log('serve')}"
            await asyncio.sleep(0.05)

    server.set_pods(vllm_0=pods["vllm_0"], vllm_1=pods["vllm_1"])
    requests = Requests(grpc_port)
    try:
        for i in (0, 1):
            await children.start(f"engine-{i}", "sim-engine", f"--listen=127.0.0.1:{ports[i]}")
        await children.start(
            "serve",
            "serve",
            f"--discover=srv:{SRV_NAME}",
            f"--listen=127.0.0.1:{grpc_port}",
            f"--http=127.0.0.1:{http_port}",
            CACHEROUTE_DNS_SERVER=server.address,
            CACHEROUTE_DISCOVER_INTERVAL_S="0.5",
            CACHEROUTE_PROBE_INTERVAL_S="0.2",
            CACHEROUTE_SLOW_START_S="1",
        )
        await reaches(lambda seen: len(seen) == 2 and all(e["ready"] for e in seen.values()))
        got = await requests.begin(20)
        assert got.keys() == {first, second}
        before = await fleet()
        assert {name: e["inflight"] for name, e in before.items()} == {"vllm-0": got[first], "vllm-1": got[second]}

        server.set_pods(**pods)
        await reaches(lambda seen: "vllm-2" in seen)
        assert (await fleet())["vllm-2"]["ready"] is False, "it still loads its model"
        assert third not in await requests.begin(20)
        await children.start("engine-2", "sim-engine", f"--listen={third}")
        await reaches(lambda seen: seen["vllm-2"]["ready"])
        assert third in await requests.begin(60)

        server.set_pods(vllm_1=pods["vllm_1"], vllm_2=pods["vllm_2"])
        await reaches(lambda seen: "vllm-0" not in seen)
        assert first not in await requests.begin(60)
        held = sum(address == first for address, _ in requests.open)
        assert held

        server.set_pods(**pods)
        await reaches(lambda seen: "vllm-0" in seen)
        assert (await fleet())["vllm-0"]["inflight"] == held, "what was in flight when it left still is"
        server.set_pods(vllm_1=pods["vllm_1"], vllm_2=pods["vllm_2"])
        await reaches(lambda seen: "vllm-0" not in seen)
        await requests.end(first)
        await requests.end()
        await reaches(lambda seen: not any(e["inflight"] for e in seen.values()))
        server.set_pods(**pods)
        await reaches(lambda seen: "vllm-0" in seen)
        assert {e["inflight"] for e in (await fleet()).values()} == {0}
        metrics = await http("/metrics")
        assert f'cacheroute_served_total{{endpoint="vllm-0",status="2xx"}} {held}.0' in metrics
        assert "cacheroute_served_unknown_total 0.0" in metrics
        assert 'cacheroute_discovery_changes_total{change="removed"} 2.0' in metrics
    finally:
        await requests.close()
        await children.stop()


async def test_a_process_that_knows_nobody_leaves_requests_to_envoy(server: NameServer, tmp_path: Path) -> None:
    """While DNS is away at the start health is NOT_SERVING and streams end unanswered; then both are well."""
    grpc_port, http_port, engine = free_ports(3)
    server.set_pods(vllm_0=("127.0.0.1", engine))
    server.fault[""] = "servfail"
    children = Children(tmp_path)
    try:
        await children.start("engine", "sim-engine", f"--listen=127.0.0.1:{engine}")
        await children.start(
            "serve",
            "serve",
            f"--discover=srv:{SRV_NAME}",
            f"--listen=127.0.0.1:{grpc_port}",
            f"--http=127.0.0.1:{http_port}",
            CACHEROUTE_DNS_SERVER=server.address,
            CACHEROUTE_DISCOVER_INTERVAL_S="0.5",
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            process = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )

            async def health(name: str) -> int:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return int((await check(health_pb2.HealthCheckRequest(service=name))).status)
                return 0

            async def replies() -> list[pb.ProcessingResponse]:
                call = process()
                headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=[pb.HeaderValue(key="x-tenant-id", value="a")]))
                await call.write(pb.ProcessingRequest(request_headers=headers))
                await call.done_writing()
                found = [reply async for reply in call]
                assert await call.code() == grpc.StatusCode.OK
                return found

            async def reaches(status: int) -> None:
                deadline = time.monotonic() + PATIENCE_S
                while await health("readiness") != status:
                    assert time.monotonic() < deadline, children.log("serve")
                    await asyncio.sleep(0.05)

            await reaches(health_pb2.HealthCheckResponse.NOT_SERVING)
            assert await health("liveness") == health_pb2.HealthCheckResponse.SERVING
            assert await replies() == []
            server.fault = {}
            await reaches(health_pb2.HealthCheckResponse.SERVING)
            (reply,) = await replies()
            assert reply.HasField("request_headers")
    finally:
        await children.stop()
