"""Discovery by EndpointSlices, asked of an API server of the test's own that lists and watches as Kubernetes does."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from replay.processes import free_ports
from service.discovery import Discovery
from service.dispatch import pick
from service.errors import InvalidInput, NoReadyEndpoint
from service.fleet import Changes, Fleet
from service.settings import ServiceSettings
from service.table import Table
from service.telemetry import Telemetry
from service.tls import self_signed

PATIENCE_S = 20.0
PATH = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
SELECTOR = "kubernetes.io/service-name=vllm"


def endpoint_slice(suffix: str, *endpoints: dict[str, Any], version: int) -> dict[str, Any]:
    """Return a slice as `kubectl get endpointslice -o json` shows one of the controller's."""
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": f"vllm-{suffix}",
            "generateName": "vllm-",
            "namespace": "prod",
            "uid": f"6f3c2a1e-0000-4000-8000-{suffix:0>12}",
            "resourceVersion": str(version),
            "generation": 3,
            "creationTimestamp": "2026-11-02T08:15:30Z",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "vllm",
                "service.kubernetes.io/headless": "",
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-02T08:15:29Z"},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Service", "name": "vllm", "uid": "0d4f", "controller": True}
            ],
        },
        "addressType": "IPv4",
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}] if endpoints else None,
    }


def pod(number: int, ip: str = "", *, ready: bool = True, terminating: bool = False) -> dict[str, Any]:
    return {
        "addresses": [ip or f"10.0.0.{number + 1}"],
        "conditions": {"ready": ready, "serving": ready, "terminating": terminating},
        "hostname": f"vllm-{number}",
        "targetRef": {"kind": "Pod", "namespace": "prod", "name": f"vllm-{number}", "uid": f"uid-{number}"},
        "nodeName": f"node-{number}",
        "zone": "eu-1a",
    }


class ApiServer:
    """Keeps slices under rising versions; serves lists, and watches from any version not yet forgotten."""

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.history: list[tuple[int, dict[str, Any]]] = []
        self.oldest = 0
        self.token = "token-1"
        self.allowed = True
        self.status = 0
        self.lists = 0
        self.watched_from: list[str] = []
        self.timeouts: list[int] = []
        self._changed = asyncio.Condition()
        self._watches: list[tuple[web.Request, web.StreamResponse]] = []

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        app = web.Application()
        app.router.add_get(PATH, self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        self.cut()
        await self._runner.cleanup()

    async def put(self, suffix: str, *endpoints: dict[str, Any]) -> None:
        self.version += 1
        thing = endpoint_slice(suffix, *endpoints, version=self.version)
        kind = "MODIFIED" if suffix in self.slices else "ADDED"
        self.slices[suffix] = thing
        await self._tell({"type": kind, "object": thing})

    async def delete(self, suffix: str) -> None:
        self.version += 1
        thing = self.slices.pop(suffix)
        thing["metadata"]["resourceVersion"] = str(self.version)
        await self._tell({"type": "DELETED", "object": thing})

    async def bookmark(self) -> None:
        """Say that something else in the cluster has changed, up to here."""
        self.version += 50
        metadata = {"resourceVersion": str(self.version), "creationTimestamp": None}
        thing = {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata}
        await self._tell({"type": "BOOKMARK", "object": thing})

    async def say(self, line: bytes) -> None:
        """Write any bytes into each watch."""
        for _, response in self._watches:
            await response.write(line)

    async def gone(self) -> None:
        """Forget all versions, and tell each watch so in its stream."""
        self.oldest = self.version
        await self.say(json.dumps({"type": "ERROR", "object": self._too_old()}).encode() + b"\n")

    def cut(self) -> None:
        """Break each watch's connection."""
        for request, _ in self._watches:
            if request.transport is not None:
                request.transport.abort()

    @property
    def watches(self) -> int:
        return len(self._watches)

    async def _tell(self, event: dict[str, Any]) -> None:
        async with self._changed:
            self.history.append((self.version, json.loads(json.dumps(event))))
            self._changed.notify_all()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if not self.allowed:
            why = 'endpointslices.discovery.k8s.io is forbidden: User "x" cannot list resource "endpointslices"'
            return _status(403, "Forbidden", why)
        if self.status:
            return _status(self.status, "InternalError", "etcdserver: request timed out")
        assert request.query["labelSelector"] == SELECTOR
        if request.query.get("watch", "") in {"", "false"}:
            self.lists += 1
            items = [{k: v for k, v in s.items() if k not in {"kind", "apiVersion"}} for s in self.slices.values()]
            metadata = {"resourceVersion": str(self.version)}
            kind = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1"}
            return web.json_response({**kind, "metadata": metadata, "items": items})
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        assert request.query["allowWatchBookmarks"] in {"true", "True"}
        version, ends_s = request.query["resourceVersion"], int(request.query["timeoutSeconds"])
        self.watched_from.append(version)
        self.timeouts.append(ends_s)
        if int(version) < self.oldest:
            return web.json_response(self._too_old(), status=410)
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        watch = (request, response)
        self._watches.append(watch)
        seen = int(version)
        try:
            async with asyncio.timeout(ends_s):
                while True:
                    for at, event in list(self.history):
                        if at > seen:
                            await response.write(json.dumps(event).encode() + b"\n")
                            seen = at
                    async with self._changed:
                        while all(at <= seen for at, _ in self.history):
                            await self._changed.wait()
        except TimeoutError:
            await response.write_eof()
        except ConnectionError:
            pass
        finally:
            self._watches.remove(watch)
        return response

    def _too_old(self) -> dict[str, Any]:
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": f"too old resource version: 1 ({self.oldest})",
            "reason": "Expired",
            "code": 410,
        }


def _status(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**status, "message": message, "reason": reason, "code": code}, status=code)


def write_kubeconfig(path: Path, port: int, token: str) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "c",
                "clusters": [{"name": "k", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
                "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                "users": [{"name": "u", "user": {"token": token}}],
            }
        )
    )


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    write_kubeconfig(tmp_path / "kubeconfig", server.port, server.token)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    await server.stop()


class Followed:
    """A fleet that follows the service `vllm` of namespace `prod`."""

    def __init__(self, discover: str = "k8s:prod/vllm:http") -> None:
        self.fleet = Fleet((), 30.0)
        self.telemetry = Telemetry(CollectorRegistry())
        # Less than may be set: a test is shorter than an interval.
        self.settings = ServiceSettings(discover=discover).model_copy(update={"discover_interval_s": 0.05})
        self.heard: list[Changes] = []
        self.discovery = Discovery(self.fleet, self.settings, self.telemetry, self.heard.append)

    def names(self) -> list[str]:
        return sorted(e.name for e in self.fleet.endpoints)

    def failures(self, cause: str) -> float:
        counted = self.telemetry.registry.get_sample_value("cacheroute_discovery_failures_total", {"cause": cause})
        return counted or 0.0

    def all_failures(self) -> float:
        family = next(m for m in self.telemetry.registry.collect() if m.name == "cacheroute_discovery_failures")
        return sum(s.value for s in family.samples if s.name.endswith("_total"))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.discovery.first()
        task = asyncio.create_task(self.discovery.run())
        await asyncio.sleep(0)
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


async def test_list_then_watch(server: ApiServer) -> None:
    """One list, then each event of the watch is in the fleet: joining, changing, draining, leaving; pods keep names."""
    await server.put("abc", pod(0), pod(1))
    followed = Followed()
    async with followed.running():
        assert followed.names() == ["vllm-0", "vllm-1"]
        assert all(e.usable and e.handicap == 1 for e in followed.fleet.endpoints)
        await server.put("def", pod(2), pod(3, ready=False))
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1", "vllm-2"])
        new = followed.fleet.by_name["vllm-2"]
        assert (new.usable, new.handicap) == (True, 10.0), "Kubernetes vouches for it, and it is cold"
        await server.put("abc", pod(0, ready=False, terminating=True), pod(1))
        await eventually(lambda: not followed.fleet.by_name["vllm-0"].usable)
        assert followed.fleet.by_name["vllm-0"].draining
        await server.put("abc", pod(0, "10.0.9.9"), pod(1))
        await eventually(lambda: followed.fleet.by_name["vllm-0"].address == "10.0.9.9:8000")
        await server.delete("def")
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])
    assert server.lists == 1
    assert followed.all_failures() == 0
    assert [c for c in followed.heard if any(c)] == [
        Changes(("vllm-0", "vllm-1"), (), ()),
        Changes(("vllm-2",), (), ()),
        Changes((), (), ("vllm-0",)),
        Changes((), ("vllm-2",), ()),
    ]


async def test_an_endpoint_that_changes_slices_is_there_all_the_time(server: ApiServer) -> None:
    """While a slice is split both list the endpoint; it is one, it never leaves, and nothing is counted."""
    await server.put("abc", pod(0), pod(1))
    followed = Followed()
    async with followed.running():
        first = followed.fleet.by_name["vllm-1"]
        await server.put("def", pod(1), pod(2))
        await eventually(lambda: "vllm-2" in followed.names())
        await server.put("abc", pod(0))
        await server.put("xyz", pod(3))
        await eventually(lambda: "vllm-3" in followed.names())
        assert followed.fleet.by_name["vllm-1"] is first
    assert followed.all_failures() == 0


async def test_a_service_scaled_to_nothing_is_an_empty_fleet(server: ApiServer) -> None:
    """Kubernetes' word that there are no endpoints is taken: requests are refused, until there are some again."""
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await server.put("abc")
        await eventually(lambda: not followed.fleet.endpoints)
        with pytest.raises(NoReadyEndpoint):
            pick(Table(), followed.fleet, None, Random(0))
        await server.put("abc", pod(0))
        await eventually(lambda: followed.fleet.usable)
    assert followed.all_failures() == 0


async def test_a_watch_that_ends_is_opened_again_where_it_was(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that ends in order is opened again from the last event or bookmark: no list, no failure, no gap."""
    monkeypatch.setattr("service.discovery.api_server.WATCH_S", 1.0)
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        await server.bookmark()
        bookmarked = str(server.version)
        await eventually(lambda: len(server.watched_from) > 1)
        assert server.watched_from[1] == bookmarked
        await server.put("def", pod(1))
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])
        put, opened = str(server.version), len(server.watched_from)
        await eventually(lambda: len(server.watched_from) > opened)
        assert server.watched_from[opened] == put
    assert server.lists == 1
    assert followed.all_failures() == 0
    assert set(server.timeouts) <= {1, 2}


@pytest.mark.parametrize("how", ["status", "event"])
async def test_a_version_that_is_gone_leads_to_a_list(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """410, as the answer to a watch or in its stream, is no failure: everything is listed anew, then watched."""
    monkeypatch.setattr("service.discovery.api_server.SHORT_S", 0.0)
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        if how == "event":
            await server.gone()
        else:
            server.cut()
            server.history.clear()
            server.version += 1000
            server.oldest = server.version
            server.slices["abc"] = endpoint_slice("abc", pod(0), pod(1), version=server.version)
            await eventually(lambda: "vllm-1" in followed.names())
        await eventually(lambda: server.lists == 2 and server.watches)
        await server.put("def", pod(2))
        await eventually(lambda: "vllm-2" in followed.names())
    assert followed.failures("gone") == 0
    assert followed.all_failures() == (1 if how == "status" else 0), "the cut itself"


async def test_a_server_that_forgets_at_once_is_not_asked_without_end(server: ApiServer) -> None:
    """Where each version is gone as soon as it is listed, lists come with pauses that grow, and the fleet is right."""
    await server.put("abc", pod(0))
    server.oldest = 10**9
    followed = Followed()
    async with followed.running():
        await eventually(lambda: followed.failures("gone") >= 4)
        assert server.lists <= followed.failures("gone") + 2
        assert followed.names() == ["vllm-0"]
        server.oldest = 0
        await eventually(lambda: server.watches)


async def test_a_connection_that_breaks_loses_nothing(server: ApiServer) -> None:
    """A watch that is cut is opened again from the last version: what happened meanwhile arrives, without a list."""
    await server.put("abc", pod(0))
    followed = Followed()
    with capture_logs() as logs:
        async with followed.running():
            await eventually(lambda: server.watches)
            server.cut()
            await server.put("def", pod(1))
            await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])
    assert server.lists == 1
    assert server.watched_from == ["101", "101"]
    assert followed.failures("connection") == 1
    assert [line["event"] for line in logs if line["event"].startswith("discovery")] == [
        "discovery",
        "discovery has recovered",
    ]


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"{}\n",
        b"[]\n",
        b'{"type": "ADDED", "object": {}}\n',
        b'{"type": "ADDED", "object": null}\n',
        b'{"type": "MODIFIED", "object": {"metadata": {"name": "vllm-abc"}}}\n',
        b"\xff\xfe\n",
        b'{"type": "ADDED", "object": "' + b"x" * 5_000_000 + b'"}\n',
    ],
    ids=lambda line: line[:40].decode("latin1"),
)
async def test_an_event_that_cannot_be_read_leads_to_a_list(server: ApiServer, line: bytes) -> None:
    """A line that is no event is counted, and the truth is listed anew instead of being guessed on."""
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        await server.say(line)
        await eventually(lambda: server.lists == 2 and server.watches)
        assert followed.names() == ["vllm-0"]
        await server.put("def", pod(1))
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])
    assert followed.all_failures() == 1


async def test_an_error_event_leads_to_a_list(server: ApiServer) -> None:
    """Another error in the stream than 410 is counted, and everything is listed anew."""
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        status = {"kind": "Status", "status": "Failure", "code": 500, "message": "etcd is away"}
        await server.say(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
        await eventually(lambda: server.lists == 2 and server.watches)
    assert (followed.failures("status"), followed.all_failures()) == (1, 1)


async def test_without_permission_the_log_says_which(server: ApiServer) -> None:
    """403 is counted and told once, with the rule that a Role needs; the fleet fills when it is granted."""
    await server.put("abc", pod(0))
    server.allowed = False
    followed = Followed()
    with capture_logs() as logs:
        async with followed.running():
            assert followed.names() == []
            await eventually(lambda: followed.failures("forbidden") >= 3)
            server.allowed = True
            await eventually(lambda: followed.names() == ["vllm-0"])
    told = [line for line in logs if line["event"] == "discovery"]
    assert len(told) == 1
    for word in ("endpointslices", "discovery.k8s.io", "get, list, watch", "prod", "Role"):
        assert word in told[0]["remedy"]
    assert "cannot list resource" in told[0]["error"]


async def test_credentials_are_read_again(server: ApiServer, tmp_path: Path) -> None:
    """A token that is refused is replaced by the one that the configuration then holds; the fleet stays meanwhile."""
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        server.token = "token-2"
        server.cut()
        await eventually(lambda: followed.failures("unauthorized") >= 2)
        assert followed.names() == ["vllm-0"]
        write_kubeconfig(tmp_path / "kubeconfig", server.port, "token-2")
        await server.put("def", pod(1))
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])


async def test_a_pod_uses_its_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod the account's token and authority are used, over TLS; a token that was rotated is read from its file."""
    pair = self_signed()
    (tmp_path / "ca.crt").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    (tmp_path / "token").write_text("token-1")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    server = ApiServer()
    await server.start(tls=tls)
    await server.put("abc", pod(0))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "localhost")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
    account = "kubernetes_asyncio.config.incluster_config.SERVICE"
    monkeypatch.setattr(f"{account}_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{account}_CERT_FILENAME", str(tmp_path / "ca.crt"))
    followed = Followed()
    try:
        async with followed.running():
            assert followed.names() == ["vllm-0"]
            await eventually(lambda: server.watches)
            (tmp_path / "token").write_text("token-2")
            server.token = "token-2"
            server.cut()
            await server.put("def", pod(1))
            await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])
    finally:
        await server.stop()


async def test_an_api_server_in_trouble_changes_nothing(server: ApiServer) -> None:
    """5xx answers keep the last fleet and are counted; later changes arrive when it is well again."""
    await server.put("abc", pod(0))
    followed = Followed()
    async with followed.running():
        await eventually(lambda: server.watches)
        server.status = 500
        server.cut()
        await eventually(lambda: followed.failures("status") >= 2)
        assert followed.fleet.usable
        await server.put("def", pod(1))
        server.status = 0
        await eventually(lambda: followed.names() == ["vllm-0", "vllm-1"])


async def test_a_start_without_api_server_serves_and_fills_later(server: ApiServer) -> None:
    """When the API server is away at the start the fleet is empty; who is found later is ready and warm."""
    await server.put("abc", pod(0))
    port = server.port
    await server.stop()
    followed = Followed()
    async with followed.running():
        assert followed.names() == []
        assert followed.failures("connection") == 1
        await server.start(port)
        await eventually(lambda: followed.fleet.usable)
    assert followed.fleet.endpoints[0].handicap == 1.0


async def test_a_slice_without_the_port_is_told(server: ApiServer) -> None:
    """A slice whose port is missing is left out, counted, and told with what it has instead; the others are used."""
    await server.put("abc", pod(0))
    odd = endpoint_slice("def", pod(1), version=102)
    odd["ports"] = [{"name": "grpc", "port": 9000, "protocol": "TCP"}]
    server.slices["def"] = odd
    followed = Followed()
    with capture_logs() as logs:
        async with followed.running():
            pass
    assert followed.names() == ["vllm-0"]
    assert followed.failures("no_port") == 1
    (told,) = [line for line in logs if line["event"] == "discovery"]
    assert "vllm-def" in told["error"]
    assert "grpc" in told["error"]
    assert "PORT-NAME" in told["remedy"]


@pytest.mark.parametrize("content", ["", "nonsense", "clusters: 3", "current-context: x", None])
async def test_a_kubeconfig_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    """Credentials that cannot be read are counted and told, and are read again for each try; nothing raises."""
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    followed = Followed()
    with capture_logs() as logs:
        await followed.discovery.first()
    assert followed.failures("credentials") == 1
    assert "KUBECONFIG" in next(line for line in logs if line["event"] == "discovery")["remedy"]


def test_outside_of_a_cluster_it_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pod's environment and without a configuration there is nothing to ask: the start ends with a remedy."""
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidInput, match="set KUBECONFIG"):
        Followed()


def test_a_missing_package_is_said_at_the_start(tmp_path: Path) -> None:
    """Without the extra the start ends with exit code 2 and the command that installs it."""
    code = "import sys; sys.modules['kubernetes_asyncio'] = None; from planner.cli import main; main()"
    arguments = ["serve", "--discover=k8s:prod/vllm", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=clean, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 2, done.stderr
    assert "pip install 'cacheroute[kubernetes]'" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


async def test_a_service_process_follows_and_ends(server: ApiServer, tmp_path: Path) -> None:
    """`cacheroute serve --discover k8s:…` has the pods from its first answer on, follows them, and ends in order."""
    await server.put("abc", pod(0), pod(1))
    (http_port,) = free_ports(1)
    arguments = ["serve", "--discover=k8s:prod/vllm:http", "--listen=127.0.0.1:0", f"--http=127.0.0.1:{http_port}"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "planner.cli", *arguments),
            env={**clean, "CACHEROUTE_DRAIN_NOTICE_S": "0"},
            stdout=log,
            stderr=log,
        )

    async def fleet() -> list[str] | None:
        url = f"http://127.0.0.1:{http_port}/fleet"
        try:
            async with aiohttp.ClientSession() as session, session.get(url) as response:
                return sorted(e["name"] for e in (await response.json())["endpoints"])
        except aiohttp.ClientError:
            return None

    async def reaches(names: list[str]) -> None:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while (seen := await fleet()) != names:
            assert time.monotonic() < deadline, f"{seen}\n{(tmp_path / 'log').read_text()}"
            await asyncio.sleep(0.05)

    try:
        await reaches(["vllm-0", "vllm-1"])
        await eventually(lambda: server.watches)
        await server.put("abc", pod(1), pod(2))
        await reaches(["vllm-1", "vllm-2"])
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(3 * PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = (tmp_path / "log").read_text()
    assert json.loads(text.splitlines()[-1])["event"] == "stopped"
    assert "Unclosed" not in text, "nothing is left open at the end"
