"""The certificate of the gRPC port: read, checked, and taken anew when its files change, without a restart.

1. Files are compared by content, every `POLL_S`: a Kubernetes secret changes by swapping a symbolic link, which leaves
   times and sizes as they may.
2. A certificate is taken only with the key that fits it, of a kind that gRPC can serve and that is strong: RSA of 2048
   bits or more, the curves P-256, P-384 and P-521, Ed25519. While a rotation is half written they do not fit, and the
   last good pair stays; the next look finds the other half.
3. What cannot be used stops the start. Later it is counted by cause and told once a minute: service goes on.
4. An expired certificate is used, since a gateway may not check that, and told.
5. A self-signed certificate is for gateways that dial TLS without verifying whom they reach. It lives in memory and is
   made at each start; nobody can verify it.
"""

import asyncio
import datetime
import socket
from pathlib import Path
from typing import NamedTuple

import structlog

from service.errors import InvalidInput
from service.files import Aside
from service.settings import ServiceSettings
from service.telemetry import Seldom, Telemetry

POLL_S = 1.0
READ_S = 5.0
SELF_SIGNED_DAYS = 3650
RSA_MIN_BITS = 2048
# As people call them: as OpenSSL does.
CURVES = {"P-256": "secp256r1", "P-384": "secp384r1", "P-521": "secp521r1"}
SOON = datetime.timedelta(days=7)

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Pair(NamedTuple):
    """A certificate with what follows it in its chain, its key, and whom it verifies clients by; all PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None


class Unusable(InvalidInput):
    """A certificate, key or CA that cannot be used; `cause` is unreadable, malformed, mismatch or weak."""

    def __init__(self, cause: str, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.cause = cause


class Certificates:
    """The pair in service; `current` is replaced as a whole."""

    def __init__(self, settings: ServiceSettings, telemetry: Telemetry, pair: Pair) -> None:
        """pair: what `first_pair` returned."""
        self._settings, self._telemetry = settings, telemetry
        self.current = pair
        self._expires = expiry(pair)
        self._aside = Aside()
        telemetry.watch_certificate(self.expires_s)
        self._seldom = Seldom()
        self._warned = Seldom(period_s=3600.0)

    def expires_s(self) -> float:
        """Return when the certificate in service expires, as Unix time."""
        return self._expires.timestamp()

    async def run(self) -> None:
        """Look for changes until cancelled."""
        while True:
            self.warn_of_expiry()
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Take the files as they are now, if they are others and can be used."""
        try:
            try:
                found = await self._aside.run(self._look, READ_S)
            except OSError as exc:
                what = f"the certificate's files gave no answer in {READ_S:g} s"
                raise Unusable("unreadable", what, "look at the disk that holds them") from exc
            if found is not None:
                self.current, self._expires = found
                self._telemetry.tls_reloads.inc()
                log.info("certificate taken into service", file=self._settings.tls_cert, expires=found[1].isoformat())
                self._warned = Seldom(period_s=3600.0)
        except Unusable as exc:
            self._telemetry.tls_failures.labels(exc.cause).inc()
            if self._seldom.may(exc.cause):
                log.error("certificate refused, serving with the last one", cause=exc.cause, error=str(exc))

    def _look(self) -> tuple[Pair, datetime.datetime] | None:
        """Return a new pair and when it expires, None when the files are as they were; in a thread."""
        pair = self._read()
        return None if pair == self.current else (pair, check_pair(self._settings, pair))

    def _read(self) -> Pair:
        # A self-signed pair stays for the life of the process; whom it verifies clients by may change.
        if self._settings.tls_self_signed:
            return self.current._replace(client_ca=_read_ca(self._settings))
        return read_pair(self._settings)

    def warn_of_expiry(self) -> None:
        """Tell, once an hour, when the certificate has expired or soon will."""
        expires = self._expires
        left = expires - datetime.datetime.now(datetime.UTC)
        if left < SOON and self._warned.may("expiry"):
            log.warning(
                "certificate has expired" if left.total_seconds() <= 0 else "certificate expires soon",
                file=self._settings.tls_cert,
                expires=expires.isoformat(),
                remedy="renew it: it is taken as soon as the files change",
            )


def first_pair(settings: ServiceSettings) -> Pair | None:
    """Return the pair to start with, None where TLS is not asked for; raise InvalidInput when it cannot be used."""
    if settings.tls_self_signed:
        pair = self_signed()._replace(client_ca=_read_ca(settings))
    elif settings.tls_cert:
        pair = read_pair(settings)
    else:
        return None
    check_pair(settings, pair)
    return pair


def read_pair(settings: ServiceSettings) -> Pair:
    """Return what the files hold now, unchecked; raise Unusable when one cannot be read."""
    certificate = _read("CACHEROUTE_TLS_CERT", settings.tls_cert)
    return Pair(certificate, _read("CACHEROUTE_TLS_KEY", settings.tls_key), _read_ca(settings))


def check_pair(settings: ServiceSettings, pair: Pair) -> datetime.datetime:
    """Return when the certificate expires; raise Unusable for a part that is malformed or weak or does not fit."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from cryptography.x509 import load_pem_x509_certificates

    where = f"CACHEROUTE_TLS_CERT {settings.tls_cert}"
    try:
        leaf = load_pem_x509_certificates(pair.certificate)[0]
        public = leaf.public_key()
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise Unusable("malformed", f"{where} holds no PEM certificate", "put the server's certificate first") from exc
    where = f"CACHEROUTE_TLS_KEY {settings.tls_key}"
    try:
        key = load_pem_private_key(pair.key, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        # The cause is not repeated: nothing of a key's file shall reach a log.
        raise Unusable("malformed", f"{where} holds no PEM key without a password", "give the key unencrypted") from exc
    if key.public_key() != public:
        raise Unusable(
            "mismatch",
            f"{where} does not fit the certificate {settings.tls_cert}",
            "give the key that the first certificate of the file was made for",
        )
    if (kind := _unsuitable(key)) is not None:
        raise Unusable(
            "weak",
            f"{where} is {kind}, which cannot be served",
            f"give a key of another kind: RSA of {RSA_MIN_BITS} bits or more, {', '.join(CURVES)} or Ed25519",
        )
    if pair.client_ca is not None:
        try:
            load_pem_x509_certificates(pair.client_ca)
        except ValueError as exc:
            where = f"CACHEROUTE_TLS_CLIENT_CA {settings.tls_client_ca}"
            raise Unusable("malformed", f"{where} holds no PEM certificate", "give the CA that signs clients") from exc
    return leaf.not_valid_after_utc


def _unsuitable(key: object) -> str | None:
    """Return what kind of key it is if it is none that we serve, else None."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

    match key:
        case rsa.RSAPrivateKey():
            return f"RSA of {key.key_size} bits" if key.key_size < RSA_MIN_BITS else None
        case ec.EllipticCurvePrivateKey():
            return f"of the curve {key.curve.name}" if key.curve.name not in CURVES.values() else None
        case ed25519.Ed25519PrivateKey():
            return None
    return f"a {type(key).__name__.removesuffix('PrivateKey').lstrip('_')} key"


def self_signed() -> Pair:
    """Return a new certificate that nobody can verify, valid for ten years, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), socket.gethostname()[:64] or "cacheroute"
    subject, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A gateway's clock may be behind ours.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name), x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return Pair(certificate.public_bytes(pem), key.private_bytes(pem, *plain))


def expiry(pair: Pair) -> datetime.datetime:
    """Return when the certificate of a checked pair expires."""
    from cryptography.x509 import load_pem_x509_certificates

    return load_pem_x509_certificates(pair.certificate)[0].not_valid_after_utc


def _read_ca(settings: ServiceSettings) -> bytes | None:
    return _read("CACHEROUTE_TLS_CLIENT_CA", settings.tls_client_ca) if settings.tls_client_ca else None


def _read(variable: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        what = f"{variable} {path} cannot be read: {exc.strerror}"
        raise Unusable("unreadable", what, "give a file that this process may read") from exc
