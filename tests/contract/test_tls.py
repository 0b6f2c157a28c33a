"""TLS on the gRPC port with real handshakes: who gets in, and certificates that change while it serves."""

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from cryptography import x509

from tests.contract.certificates import Issued, issue
from tests.contract.serving import Held, Serving, environment, until


@pytest.fixture(scope="module")
def ca() -> Issued:
    return issue("ca")


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
