"""Makes certificates for tests."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, PEM; `ca` is who signed it."""

    name: x509.Name
    secret: ec.EllipticCurvePrivateKey
    certificate: bytes

    @property
    def key(self) -> bytes:
        """The private key."""
        return self.secret.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    def write(self, folder: Path, cert: str = "tls.crt", key: str = "tls.key") -> None:
        """Write both files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / cert).write_bytes(self.certificate)
        (folder / key).write_bytes(self.key)


def issue(name: str, ca: Issued | None = None, *, days: int = 30) -> Issued:
    """Return a certificate for `name` and localhost, signed by a CA, or by itself and then a CA."""
    secret = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.DNSName(name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(ca.name if ca else subject)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 30 * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=ca is None, path_length=None), critical=True)
        .sign(ca.secret if ca else secret, hashes.SHA256())
    )
    return Issued(subject, secret, certificate.public_bytes(serialization.Encoding.PEM))
