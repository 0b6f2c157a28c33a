"""Workers and TLS behind a real Envoy: connections spread, and certificates change under traffic without a trace."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replay.processes import free_ports
from tests.contract.certificates import Issued, issue
from tests.e2e.attach import Attachment, processor, until
from tests.e2e.backend import addresses

Json = dict[str, Any]
WORKERS = 2
HELD = 50
UPSTREAM_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext"


class Rig:
    """Gateways over one pool: `spread` with workers, `tls` with mutual TLS, `blind` to a self-signed certificate."""

    def __init__(self, workdir: Path) -> None:
        self.folder, self.ca, self.clients = workdir / "secret", issue("ca"), issue("clients")
        self.rotate("first")
        (self.folder / "ca.crt").write_bytes(self.clients.certificate)
        hosts = addresses(free_ports(2))
        self.attached = Attachment(workdir, hosts)
        self.attached.pool("pool", hosts)
        files = {f"tls_{n}": str(self.folder / f) for n, f in (("cert", "tls.crt"), ("key", "tls.key"))}
        self.attached.service("spread", hosts, workers=str(WORKERS))
        self.attached.service("tls", hosts, workers=str(WORKERS), tls_client_ca=str(self.folder / "ca.crt"), **files)
        self.attached.service("blind", hosts, tls_self_signed="true")
        for name in ("spread", "tls", "blind"):
            manager = self.attached.gateway(name, service=name, pool="pool")
            # A busy machine shall not make Envoy go on without an answer.
            processor(manager)["message_timeout"] = "30s"
        # As many streams as there are requests in flight: two to a connection make enough connections for all workers.
        self._http2("spread")["max_concurrent_streams"] = 2
        # A new connection, and a new handshake, every few requests.
        self._options("tls")["common_http_protocol_options"] = {"max_requests_per_connection": 5}
        envoy = issue("envoy", self.clients)
        self._dial_tls(
            "tls",
            validation_context={
                "trusted_ca": {"inline_string": self.ca.certificate.decode()},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": "localhost"}}],
            },
            tls_certificates=[
                {
                    "certificate_chain": {"inline_string": envoy.certificate.decode()},
                    "private_key": {"inline_string": envoy.key.decode()},
                }
            ],
        )
        self._dial_tls("blind")

    def rotate(self, name: str) -> Issued:
        """Put a new certificate in place as some tools do: one file after the other, for a moment not fitting."""
        issued = issue(name, self.ca)
        issued.write(self.folder)
        return issued

    def decided(self, service: str) -> float:
        """Return how many requests a service decided."""
        return self.attached.metric(service, "cacheroute_picks_total")

    def bypassed(self, gateway: str) -> int:
        """Return how many requests of a gateway went on without its service."""
        return self.attached.envoy_stat(f"http.{gateway}.ext_proc.failure_mode_allowed")

    def _cluster(self, name: str) -> Json:
        clusters: list[Json] = self.attached.document["static_resources"]["clusters"]
        return next(cluster for cluster in clusters if cluster["name"] == name)

    def _options(self, name: str) -> Json:
        options: Json
        (options,) = self._cluster(name)["typed_extension_protocol_options"].values()
        return options

    def _http2(self, name: str) -> Json:
        config = self._options(name)["explicit_http_config"]
        http2: Json = config.setdefault("http2_protocol_options", {})
        return http2

    def _dial_tls(self, name: str, **context: Any) -> None:
        self._cluster(name)["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {"@type": UPSTREAM_TLS, "sni": "localhost", "common_tls_context": context},
        }


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("workers"))
    with rig.attached:
        yield rig


def client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=60), connector=aiohttp.TCPConnector(limit=0), raise_for_status=True
    )


async def test_an_envoy_of_one_thread_reaches_every_worker(rig: Rig) -> None:
    """With few streams to a connection Envoy opens more of them and all workers get some; no request passes us by."""
    attached = rig.attached
    async with client() as session, contextlib.AsyncExitStack() as held:
        opened = await asyncio.gather(*(session.get(f"{attached.urls['spread']}/hold") for _ in range(HELD)))
        for response in opened:
            held.callback(response.close)
        await until(lambda: attached.inflight("spread") == HELD, "all in flight")
        streams = [attached.metric("spread", "cacheroute_streams", worker=str(n)) for n in range(WORKERS)]
        assert all(streams), streams
        assert sum(streams) == HELD
    assert rig.bypassed("spread") == 0
    await until(lambda: attached.inflight("spread") == 0, "all taken back")


async def test_certificates_rotate_under_traffic(rig: Rig) -> None:
    """Envoy verifies us and we verify it; while certificates change no request fails and none passes us by."""
    attached, sent, over = rig.attached, 0, asyncio.Event()
    decided = rig.decided("tls")

    async def ask(session: aiohttp.ClientSession) -> None:
        nonlocal sent
        while not over.is_set():
            async with session.get(f"{attached.urls['tls']}/") as response:
                await response.read()
            sent += 1

    async with client() as session:
        asking = asyncio.gather(*(ask(session) for _ in range(4)))
        for turn in (1, 2):
            rig.rotate(f"turn {turn}")
            await until(
                lambda turn=turn: attached.metric("tls", "cacheroute_tls_reloads_total") >= WORKERS * turn,  # type: ignore[misc]
                "taken by all workers",
            )
            handshakes = attached.envoy_stat("cluster.tls.ssl.handshake")
            await until(
                lambda before=handshakes: attached.envoy_stat("cluster.tls.ssl.handshake") > before + 4,  # type: ignore[misc]
                "new connections made with it",
            )
        over.set()
        await asking
    assert rig.decided("tls") - decided == sent
    assert rig.bypassed("tls") == 0
    assert attached.envoy_stat("cluster.tls.ssl.fail_verify_error") == 0


async def test_a_gateway_that_does_not_verify_needs_no_certificate_of_ours(rig: Rig) -> None:
    """What dials TLS blindly, as some gateways always do, is served with a self-signed certificate."""
    decided = rig.decided("blind")
    async with client() as session:
        for _ in range(5):
            async with session.get(f"{rig.attached.urls['blind']}/") as response:
                await response.read()
    assert rig.decided("blind") - decided == 5
    assert rig.bypassed("blind") == 0
    assert rig.attached.envoy_stat("cluster.blind.ssl.handshake") > 0
