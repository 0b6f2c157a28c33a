"""TLS on the gRPC port with real handshakes: who gets in, and certificates that change while it serves."""

import asyncio
import datetime
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from prometheus_client import CollectorRegistry

from service.errors import InvalidInput
from service.server import bind, new_server
from service.settings import ServiceSettings, load_settings
from service.telemetry import Telemetry
from service.tls import Certificates, first_pair
from tests.contract.certificates import DAY, Issued, issue
from tests.contract.serving import Held, Serving, environment, until


@pytest.fixture(scope="module")
def ca() -> Issued:
    return issue("ca")


EXPIRY = "cacheroute_tls_certificate_expiry_timestamp_seconds"


def tls(folder: Path, **more: str) -> dict[str, str]:
    return {"tls_cert": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key"), **more}


def trusting(ca: Issued, client: Issued | None = None) -> grpc.ChannelCredentials:
    key, chain = (client.key, client.certificate) if client else (None, None)
    return grpc.ssl_channel_credentials(ca.certificate, key, chain)


def shown(serving: Serving) -> str:
    """Return the name on the certificate that a new connection is shown; HTTP/2 is agreed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", serving.grpc_port), timeout=10) as plain,
        context.wrap_socket(plain) as secure,
    ):
        assert secure.selected_alpn_protocol() == "h2"
        der = secure.getpeercert(binary_form=True)
    assert der is not None
    (name,) = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return str(name.value)


def refused(connect: Callable[[], Held]) -> bool:
    with pytest.raises(grpc.RpcError) as caught:
        connect()
    return bool(caught.value.code() == grpc.StatusCode.UNAVAILABLE)


def test_only_tls_gets_in(tmp_path: Path, ca: Issued) -> None:
    """With a certificate a client that trusts its CA is answered; one in plain text, or that trusts another, is not."""
    issue("one", ca).write(tmp_path)
    with Serving(tmp_path / "log", **tls(tmp_path)) as serving:
        Held(serving.channel(trusting(ca))).end()
        assert refused(lambda: Held(serving.channel()))
        assert refused(lambda: Held(serving.channel(trusting(issue("other")))))
        Held(serving.channel(trusting(ca))).end()


def test_clients_are_verified_where_a_ca_is_given(tmp_path: Path, ca: Issued) -> None:
    """With a client CA only clients that it signed get in; another CA takes its place without a restart."""
    issue("one", ca).write(tmp_path)
    clients, others = issue("clients"), issue("other clients")
    (tmp_path / "ca.crt").write_bytes(clients.certificate)
    with Serving(tmp_path / "log", **tls(tmp_path, tls_client_ca=str(tmp_path / "ca.crt"))) as serving:
        known, stranger = issue("envoy", clients), issue("envoy", others)
        Held(serving.channel(trusting(ca, known))).end()
        assert refused(lambda: Held(serving.channel(trusting(ca))))
        assert refused(lambda: Held(serving.channel(trusting(ca, stranger))))
        (tmp_path / "ca.crt").write_bytes(others.certificate)
        until(lambda: serving.samples("cacheroute_tls_reloads_total") == {"": 1}, "taken")
        Held(serving.channel(trusting(ca, stranger))).end()
        assert refused(lambda: Held(serving.channel(trusting(ca, known))))


def test_a_secret_that_is_swapped_is_taken(tmp_path: Path, ca: Issued) -> None:
    """A Kubernetes secret changes by a symbolic link: new connections are shown the new certificate, others live on."""
    for name in ("one", "two"):
        issue(name, ca).write(tmp_path / f"..{name}")
        for file in (tmp_path / f"..{name}").iterdir():
            os.utime(file, (1e9, 1e9))  # times say nothing
    (tmp_path / "..data").symlink_to("..one")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    with Serving(tmp_path / "log", workers="2", **tls(tmp_path)) as serving:
        assert shown(serving) == "one"
        held = Held(serving.channel(trusting(ca)))
        (tmp_path / "..new").symlink_to("..two")
        (tmp_path / "..new").rename(tmp_path / "..data")
        until(lambda: serving.samples("cacheroute_tls_reloads_total") == {"0": 1, "1": 1}, "taken by both")
        assert {shown(serving) for _ in range(10)} == {"two"}
        held.end()
        assert len(serving.told("certificate taken into service")) == 2
        assert all("expires" in line for line in serving.told("certificate taken into service"))


def test_a_worker_that_is_started_again_shows_what_the_files_hold(tmp_path: Path, ca: Issued) -> None:
    """A certificate that was replaced since the supervisor's start is never shown again."""
    issue("old", ca).write(tmp_path)
    with Serving(tmp_path / "log", workers="2", **tls(tmp_path)) as serving:
        issue("new", ca).write(tmp_path)
        until(lambda: serving.samples("cacheroute_tls_reloads_total") == {"0": 1, "1": 1}, "taken by both")
        for worker in serving.workers():
            worker.kill()
        names: list[str] = []

        def all_serve() -> bool:
            names.append(shown(serving))
            return serving.get("/healthz")[0] == 200 and len(serving.told("serving")) == 5

        until(all_serve, "all serve again")
        assert set(names) == {"new"}


KINDS: dict[str, Callable[[], Any]] = {
    "RSA of 2048 bits": lambda: rsa.generate_private_key(65537, 2048),
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "RSA of 1024 bits": lambda: rsa.generate_private_key(65537, 1024),
    "of the curve secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "of the curve secp224r1": lambda: ec.generate_private_key(ec.SECP224R1()),
    "a DSA key": lambda: dsa.generate_private_key(2048),
    "a Ed448 key": ed448.Ed448PrivateKey.generate,
}
WEAK = list(KINDS)[5:]


def settings_of(folder: Path) -> ServiceSettings:
    """Return settings with the certificate of a folder."""
    return load_settings({}, endpoint=("a=127.0.0.1:1",), **tls(folder))


def of_kind(folder: Path, key: Any) -> ServiceSettings:
    """Write a certificate for a key, and return the settings with it."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kind")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey | ed448.Ed448PrivateKey) else hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "tls.crt").write_bytes(certificate.public_bytes(pem))
    (folder / "tls.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return settings_of(folder)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WEAK])
async def test_each_kind_of_key_that_is_taken_is_served(tmp_path: Path, kind: str) -> None:
    """What passes the check makes a handshake."""
    settings = of_kind(tmp_path, KINDS[kind]())
    pair = first_pair(settings)
    assert pair is not None
    server = new_server()
    port = bind(server, "127.0.0.1:0", certificates=Certificates(settings, Telemetry(CollectorRegistry()), pair))
    await server.start()
    assert await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=10)
    await server.stop(0)


@pytest.mark.parametrize("kind", WEAK)
async def test_a_key_that_grpc_would_not_serve_is_told(tmp_path: Path, ca: Issued, kind: str) -> None:
    """At the start it ends it, later the last good pair stays; both name the file, the kind and what is taken."""
    issue("one", ca).write(tmp_path)
    settings = settings_of(tmp_path)
    pair, telemetry = first_pair(settings), Telemetry(CollectorRegistry())
    assert pair is not None
    certificates = Certificates(settings, telemetry, pair)
    key = KINDS[kind]()
    of_kind(tmp_path, key)
    with pytest.raises(InvalidInput) as caught:
        first_pair(settings)
    assert f"{tmp_path}/tls.key is {kind}, which cannot be served; give a key of another kind: RSA" in str(caught.value)
    await certificates.refresh()
    assert certificates.current is pair
    assert telemetry.registry.get_sample_value("cacheroute_tls_failures_total", {"cause": "weak"}) == 1


async def test_when_the_certificate_expires_is_exported(tmp_path: Path, ca: Issued) -> None:
    """The gauge follows a renewal; without TLS there is none."""
    issue("one", ca, days=1).write(tmp_path)
    settings = settings_of(tmp_path)
    pair, telemetry = first_pair(settings), Telemetry(CollectorRegistry())
    assert pair is not None
    assert telemetry.registry.get_sample_value(EXPIRY) is None
    certificates = Certificates(settings, telemetry, pair)
    for days in (1, 20):
        issue("one", ca, days=days).write(tmp_path)
        await certificates.refresh()
        value = telemetry.registry.get_sample_value(EXPIRY)
        assert value is not None
        assert abs(value - time.time() - days * 86400) < 3600


async def test_files_that_give_no_answer_are_counted(
    tmp_path: Path, ca: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that hangs holds nothing up, and what it held is served on."""
    issue("one", ca).write(tmp_path)
    settings = settings_of(tmp_path)
    pair, telemetry = first_pair(settings), Telemetry(CollectorRegistry())
    assert pair is not None
    certificates = Certificates(settings, telemetry, pair)
    (tmp_path / "tls.key").unlink()
    os.mkfifo(tmp_path / "tls.key")
    monkeypatch.setattr("service.tls.READ_S", 0.1)
    await certificates.refresh()
    assert certificates.current is pair
    assert telemetry.registry.get_sample_value("cacheroute_tls_failures_total", {"cause": "unreadable"}) == 1


@pytest.mark.parametrize("fault", ["mismatch", "malformed", "unreadable"])
def test_what_cannot_be_used_changes_nothing(tmp_path: Path, ca: Issued, fault: str) -> None:
    """A rotation that is half written, cut off or gone is counted and told once; the last good pair stays meanwhile."""
    issue("one", ca).write(tmp_path)
    with Serving(tmp_path / "log", **tls(tmp_path)) as serving:
        match fault:
            case "mismatch":
                (tmp_path / "tls.crt").write_bytes(issue("two", ca).certificate)
            case "malformed":
                (tmp_path / "tls.crt").write_bytes(issue("two", ca).certificate[:100])
            case _:
                (tmp_path / "tls.key").unlink()
        until(lambda: serving.samples("cacheroute_tls_failures_total", cause=fault).get("", 0) >= 2, "counted")
        assert shown(serving) == "one"
        Held(serving.channel(trusting(ca))).end()
        (line,) = serving.told("certificate refused, serving with the last one")
        assert str(tmp_path) in line["error"]
        assert "give" in line["error"] or "put" in line["error"]
        issue("three", ca).write(tmp_path)
        until(lambda: shown(serving) == "three", "mended")


def test_an_expired_certificate_is_used_and_told(tmp_path: Path, ca: Issued) -> None:
    """A gateway may not check it, so the service goes on; the log says so."""
    issue("old", ca, days=-1).write(tmp_path)
    with Serving(tmp_path / "log", **tls(tmp_path)) as serving:
        assert shown(serving) == "old"
        (line,) = until(lambda: serving.told("certificate has expired"), "told")
        assert "renew" in line["remedy"]


def test_a_self_signed_certificate_is_one_for_all_workers(tmp_path: Path) -> None:
    """Gateways that do not verify get TLS without any file; a client that verifies does not."""
    with Serving(tmp_path / "log", workers="2", tls_self_signed="true") as serving:
        pems = {ssl.get_server_certificate(("127.0.0.1", serving.grpc_port), timeout=10) for _ in range(20)}
        assert len(pems) == 1
        Held(serving.channel(grpc.ssl_channel_credentials(pems.pop().encode()))).end()
        assert refused(lambda: Held(serving.channel(grpc.ssl_channel_credentials())))


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("no_cert", "CACHEROUTE_TLS_CERT {folder}/tls.crt cannot be read: No such file or directory; give"),
        ("no_key", "CACHEROUTE_TLS_KEY {folder}/tls.key cannot be read: No such file or directory; give"),
        ("no_pem", "CACHEROUTE_TLS_CERT {folder}/tls.crt holds no PEM certificate; put"),
        ("bad_key", "CACHEROUTE_TLS_KEY {folder}/tls.key holds no PEM key without a password; give"),
        ("other_key", "CACHEROUTE_TLS_KEY {folder}/tls.key does not fit the certificate {folder}/tls.crt; give"),
        ("bad_ca", "CACHEROUTE_TLS_CLIENT_CA {folder}/ca.crt holds no PEM certificate; give"),
        ("half", "a certificate needs its key; set both"),
    ],
)
def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path, ca: Issued, broken: str, told: str) -> None:
    """The start ends with exit code 2 and one line that names the file and what to do, and nothing of a key."""
    issue("one", ca).write(tmp_path)
    (tmp_path / "ca.crt").write_bytes(ca.certificate)
    settings = tls(tmp_path, tls_client_ca=str(tmp_path / "ca.crt"))
    match broken:
        case "no_cert":
            (tmp_path / "tls.crt").unlink()
        case "no_key":
            (tmp_path / "tls.key").unlink()
        case "no_pem":
            (tmp_path / "tls.crt").write_text("hello")
        case "bad_key":
            (tmp_path / "tls.key").write_bytes(issue("two").key[:-40])
        case "other_key":
            (tmp_path / "tls.key").write_bytes(issue("two").key)
        case "bad_ca":
            (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\n")
        case _:
            del settings["tls_key"]
    given = {"endpoint": "a=127.0.0.1:1", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", **settings}
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "serve"],
        env=environment(**given),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert told.replace("{folder}", str(tmp_path)) in line
    assert "PRIVATE" not in line
