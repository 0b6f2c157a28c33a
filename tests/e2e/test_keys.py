"""Where a real Envoy's requests have their key, and what happens to keys that cannot be used: the request goes on.

Envoy answers with the hash of the key that the service used, from the decision's metadata.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from replay.processes import free_ports
from service.keys import format_hash, hash_key
from service.telemetry import KEY_HASH, NAMESPACE
from tests.e2e.attach import Attachment
from tests.e2e.backend import addresses
from tests.e2e.bootstrap import filter_of, forward, put_first
from tests.e2e.http2 import Connection, Headers

HASH_HEADER = b"x-key-hash"
ISSUER, SECRET = "https://issuer.example.com", b"a secret of at least thirty-two bytes"
KEY_MAX_BYTES = 256


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(claims: dict[str, Any], secret: bytes = SECRET) -> bytes:
    """Return a JSON Web Token with these claims, signed by HS256."""
    parts = [{"alg": "HS256", "typ": "JWT", "kid": "test"}, {"iss": ISSUER, **claims}]
    signed = ".".join(_base64(json.dumps(part).encode()) for part in parts)
    return f"{signed}.{_base64(hmac.digest(secret, signed.encode(), hashlib.sha256))}".encode()


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attachment]:
    """A gateway for each kind of key, and a service for each order of sources."""
    hosts = addresses(free_ports(2))
    attached = Attachment(tmp_path_factory.mktemp("keys"), hosts)
    attached.pool("pool", hosts)
    for service, sources in (("headers", "x-tenant-id,x-org"), ("authority", ":authority"), ("path", ":path/2")):
        attached.service(service, hosts, key_header=sources, key_max_bytes=str(KEY_MAX_BYTES))
    for name, service, also in (
        ("headers", "headers", ["x-org"]),
        ("claim", "headers", ["x-org"]),
        ("authority", "authority", [":authority"]),
        ("path", "path", [":path"]),
    ):
        manager = attached.gateway(name, service=service, pool="pool")
        forward(manager, *also)
        manager["max_request_headers_kb"] = 96
        manager["route_config"]["virtual_hosts"][0]["response_headers_to_add"].append(
            {"header": {"key": HASH_HEADER.decode(), "value": f"%DYNAMIC_METADATA({NAMESPACE}:{KEY_HASH})%"}}
        )
        if name == "claim":
            _verify_tokens(manager)
    with attached:
        yield attached


def _verify_tokens(manager: Any) -> None:
    """Make the claim `org` of a verified token the header `x-org`, before the service is asked."""
    keys = {"keys": [{"kty": "oct", "alg": "HS256", "kid": "test", "k": _base64(SECRET)}]}
    provider = {
        "issuer": ISSUER,
        "local_jwks": {"inline_string": json.dumps(keys)},
        "claim_to_headers": [{"header_name": "x-org", "claim_name": "org"}],
    }
    rule = {"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}
    put_first(
        manager,
        "envoy.filters.http.jwt_authn",
        "jwt_authn.v3.JwtAuthentication",
        {"providers": {"issuer": provider}, "rules": [rule]},
    )
    assert filter_of(manager, "envoy.filters.http.jwt_authn") is manager["http_filters"][0]["typed_config"]


class Client:
    def __init__(self, attached: Attachment) -> None:
        self.attached = attached

    async def ask(self, gateway: str, headers: Headers = (), path: str = "/v1/completions") -> tuple[int, bytes | None]:
        """Return status and the hash of the key that was used, None when there was none."""
        async with await Connection.to(self.attached.urls[gateway].removeprefix("http://")) as connection:
            stream = connection.open(path, headers, end=True)
            answer = await stream.headers()
            await stream.read_all()
            used = answer.get(HASH_HEADER, b"")
            return int(answer[b":status"]), used if used not in (b"", b"-") else None

    def rejected(self, service: str, cause: str) -> float:
        """Return how many keys were rejected for this cause."""
        return self.attached.metric(service, "cacheroute_keys_rejected_total", cause=cause)

    def lines(self, service: str, cause: str) -> int:
        """Return how many lines the service logged about keys rejected for this cause."""
        lines = self.attached.services[service].log.read_text().splitlines()
        logged = [json.loads(line) for line in lines if line.startswith("{")]
        return sum(line.get("cause") == cause and bool(line.get("remedy")) for line in logged)


@pytest.fixture
async def client(attached: Attachment) -> AsyncIterator[Client]:
    """A client; after the test nothing is in flight."""
    yield Client(attached)
    await attached.drained()


def hashed(key: bytes) -> bytes:
    """Return the hash as Envoy tells it."""
    return format_hash(hash_key(key)).encode()


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"x-tenant-id", b"acme"), (b"x-org", b"other")], b"acme"),
        ([(b"x-org", b"other")], b"other"),
        ([(b"x-tenant-id", b""), (b"x-org", b"other")], b"other"),
        ([(b"x-tenant-id", b"Acme \xc3\xa9")], b"Acme \xc3\xa9"),
        ([], None),
        ([(b"x-tenant-id", b"")], None),
    ],
)
async def test_first_header_that_has_one(client: Client, headers: Headers, key: bytes | None) -> None:
    """The key is that of the first source with one; an empty header is none, and no key at all is no fault."""
    assert await client.ask("headers", headers) == (200, hashed(key) if key is not None else None)


@pytest.mark.parametrize("authority", [b"tenant.example.com", b"Tenant.Example.com:8443", b"tenant.example.com."])
async def test_authority(client: Client, authority: bytes) -> None:
    """The host that a client asks for is a key, however it is written."""
    assert await client.ask("authority", [(b":authority", authority)]) == (200, hashed(b"tenant.example.com"))


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/tenants/acme/v1?x=/1/2", b"acme"),
        ("/tenants/a%20b", b"a b"),
        ("//tenants//acme", b"acme"),
        ("/tenants", None),
    ],
)
async def test_segment_of_the_path(client: Client, path: str, key: bytes | None) -> None:
    """A segment of the path is a key."""
    assert await client.ask("path", path=path) == (200, hashed(key) if key is not None else None)


async def test_claim_of_a_token(client: Client) -> None:
    """A claim that Envoy verified is a key, and a client cannot put another in its place."""
    bearer = (b"authorization", b"Bearer " + token({"org": "acme"}))
    assert await client.ask("claim", [bearer]) == (200, hashed(b"acme"))
    assert await client.ask("claim", [bearer, (b"x-org", b"forged")]) == (200, hashed(b"acme"))
    forged = (b"authorization", b"Bearer " + token({"org": "acme"}, b"another secret of thirty-two bytes"))
    assert (await client.ask("claim", [forged, (b"x-org", b"forged")]))[0] == 401
    assert await client.ask("claim", [(b"authorization", b"Bearer " + token({}))]) == (200, None)


async def test_claim_that_a_client_adds_to_a_token_without_it(client: Client) -> None:
    """A token that lacks the claim gives no key, whatever header the client sends with it."""
    bearer = (b"authorization", b"Bearer " + token({}))
    assert await client.ask("claim", [bearer, (b"x-org", b"forged")]) == (200, None)


@pytest.mark.parametrize(
    ("gateway", "headers", "cause"),
    [
        ("headers", [(b"x-tenant-id", b"k" * 65_536)], "too_long"),
        ("headers", [(b"x-tenant-id", b"k" * (KEY_MAX_BYTES + 1)), (b"x-org", b"other")], "too_long"),
        ("headers", [(b"x-tenant-id", b"\xff\xfe secret")], "not_utf8"),
    ],
    ids=["64 KiB", "a byte too long", "not UTF-8"],
)
async def test_key_that_cannot_be_used(client: Client, gateway: str, headers: Headers, cause: str) -> None:
    """The request is served without its key, another source is not asked, it is counted each time and logged once."""
    before = client.rejected(gateway, cause)
    for _ in range(3):
        assert await client.ask(gateway, headers) == (200, None)
    assert client.rejected(gateway, cause) == before + 3
    assert client.lines(gateway, cause) == 1


async def test_path_that_decodes_to_rubbish(client: Client) -> None:
    """A segment that is no UTF-8 once decoded is not used, as any other such key."""
    before = client.rejected("path", "not_utf8")
    assert await client.ask("path", path="/tenants/%ff%fe") == (200, None)
    assert client.rejected("path", "not_utf8") == before + 1


async def test_longest_key_is_used(client: Client) -> None:
    """A key of exactly the longest length is used."""
    key = b"k" * KEY_MAX_BYTES
    assert await client.ask("headers", [(b"x-tenant-id", key)]) == (200, hashed(key))


async def test_keys_are_logged_nowhere(client: Client) -> None:
    """Neither the service nor Envoy's access log names a key, used or not."""
    secret = b"secret-tenant"
    await client.ask("headers", [(b"x-tenant-id", secret)])
    await client.ask("headers", [(b"x-tenant-id", secret * 100)])
    await client.ask("headers", [(b"x-tenant-id", secret + b"\xff")])
    files = [client.attached.log, *(process.log for process in client.attached.services.values())]
    assert not any(secret in file.read_bytes() for file in files)
