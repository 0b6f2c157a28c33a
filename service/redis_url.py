"""Reads the one setting that says where Redis is; pure but for a look at certificate files.

    redis://[user:password@]host[:port][/db]                one server; `rediss` for TLS, here and below
    unix:///path/of/socket[?db=N]                           one server on this machine
    redis+sentinel://[user:password@]host[:port],…/MASTER   the master that Sentinels name, wherever it moves
    redis+cluster://[user:password@]host[:port],…           a Cluster, found through any of its nodes

Query parameters: `db`, `username`, `password`, `sentinel_username`, `sentinel_password`, `socket_timeout` (seconds),
and for TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_check_hostname`, `ssl_cert_reqs`, `ssl_ciphers`, all as
redis-py names them. Signs that mean something in a URL are percent-encoded, in a password too; a plus is a plus. What
is said twice is refused.

A URL is checked whole before anything connects. No error repeats what may be a secret: a URL that cannot be read is not
shown, and a query never is.
"""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, Literal
from urllib.parse import unquote

from service.errors import InvalidInput

REMEDY = (
    "use redis://[user:password@]host:port/db, redis+sentinel://host:port,host:port/MASTER or "
    "redis+cluster://host:port,host:port, rediss for TLS, special signs of a password percent-encoded"
)
SHORTEST_TIMEOUT_S, TIMEOUT_S, LONGEST_TIMEOUT_S = 0.01, 0.5, 10.0
PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
DATABASES = 16384


@dataclass(frozen=True, slots=True)
class RedisTarget:
    """Where Redis is and how to get in; `hosts` are (host, port), `tls` the `ssl_…` arguments of a client."""

    mode: Literal["server", "sentinel", "cluster"]
    scheme: str
    hosts: tuple[tuple[str, int], ...]
    socket: str = ""
    master: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    timeout_s: float = TIMEOUT_S
    tls: Mapping[str, Any] | None = None

    def shown(self) -> str:
        """Return the URL as logs and errors may show it: without user, password and query."""
        where = ",".join(
            f"[{host.replace('%', '%25')}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts
        )
        if self.socket:
            return f"{self.scheme}://{self.socket}"
        return f"{self.scheme}://{where}" + ("" if self.mode == "cluster" else f"/{self.master or self.db}")

    @property
    def unverified(self) -> bool:
        """Return whether anybody may pose as the server, which TLS should keep from."""
        return self.tls is not None and self.tls.get("ssl_cert_reqs") == "none"

    def scrub(self, text: str) -> str:
        """Return a text of the client or the server without our secrets, in case it repeats what it was sent."""
        for secret in (self.password, self.sentinel_password):
            if secret:
                text = text.replace(secret, "…")
        return text


def without_password(url: str) -> str:
    """Return a Redis URL as logs and errors may show it, or that it is none."""
    try:
        return _parse(url).shown()
    except ValueError:
        return "(not a Redis URL)"


def parse_redis_url(url: str) -> RedisTarget:
    """Return where a URL points; raise InvalidInput, which shows nothing of it, when it or its files cannot be used."""
    try:
        target = _parse(url)
        if target.tls is not None:
            _check_files(target.tls)
    except ValueError as exc:
        raise InvalidInput(f"the Redis URL (--redis, CACHEROUTE_REDIS_URL) cannot be used: {exc}", REMEDY) from None
    return target


# -- reading a URL: every ValueError says what is wrong without repeating what it found --------------------------------


def _parse(url: str) -> RedisTarget:
    if any(sign.isspace() or not sign.isprintable() for sign in url):
        raise ValueError("it has blanks or control characters")
    scheme, separator, rest = url.partition("://")
    scheme = scheme.lower()
    base, _, kind = scheme.partition("+")
    if not separator or base not in ("redis", "rediss", "unix") or (kind and base == "unix"):
        raise ValueError("it does not start with redis://, rediss://, redis+sentinel:// or redis+cluster://")
    if kind not in ("", "sentinel", "cluster"):
        raise ValueError("after redis+ comes sentinel or cluster")
    if "#" in rest:
        raise ValueError("it has a #")
    rest, _, query = rest.partition("?")
    place, slash, path = rest.partition("/")
    options = _options(_pairs(query), tls=base == "rediss")
    path = unquote(path)
    if base == "unix":
        if place or not path:
            raise ValueError("unix:// is followed by the path of a socket")
        return RedisTarget(mode="server", scheme=scheme, hosts=(), socket=slash + path, **options)
    mode: Literal["server", "sentinel", "cluster"] = (
        "sentinel" if kind == "sentinel" else "cluster" if kind == "cluster" else "server"
    )
    user, _, where = place.rpartition("@")
    before = _user(user) if user else {}
    if before.keys() & options.keys():
        raise ValueError("user or password stand both before the host and in its query")
    options |= before
    hosts = tuple(_host(part, PORTS[mode]) for part in where.split(","))
    if mode == "server":
        if len(hosts) > 1:
            raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
        if path:
            if "db" in options:
                raise ValueError("the database stands both after the host and in its query")
            options["db"] = _database(path)
    elif mode == "sentinel":
        if not path or not all(sign.isalnum() or sign in "._-" for sign in path):
            raise ValueError("redis+sentinel:// needs the master's name after the hosts, as in host:26379/mymaster")
        options["master"] = path
    elif path.strip("/0") or options.get("db"):
        raise ValueError("a Cluster has database 0 only")
    if mode != "sentinel" and ("sentinel_username" in options or "sentinel_password" in options):
        raise ValueError("sentinel_username and sentinel_password belong to redis+sentinel://")
    return RedisTarget(mode=mode, scheme=scheme, hosts=hosts, **options)


def _user(text: str) -> dict[str, Any]:
    name, _, password = text.partition(":")
    return {
        **({"username": unquote(name)} if name else {}),
        **({"password": unquote(password)} if password else {}),
    }


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, port = text, ""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or (rest and not rest.startswith(":")):
            raise ValueError("an IPv6 host is written [address]:port")
        port, host = rest[1:], unquote(host)
        try:
            IPv6Address(host)
        except ValueError:
            raise ValueError("what stands in brackets is no IPv6 address") from None
    elif ":" in text:
        host, _, port = text.rpartition(":")
    if not text.startswith("["):
        plain = host.replace(".", "").replace("-", "").replace("_", "")
        if not plain.isalnum() or not host.isascii():
            raise ValueError("a host is missing or is none")
    port = port or str(default_port)
    if not _is_number(port) or not 0 < int(port) <= 65535:
        raise ValueError("a port is not a number of 1 to 65535")
    return host, int(port)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5


def _database(text: str) -> int:
    if not _is_number(text) or int(text) >= DATABASES:
        raise ValueError("the database after the host is not a small number")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise ValueError("ssl_check_hostname is true or false")
    return text.lower() in ("true", "yes", "1")


def _choice(text: str) -> str:
    if text not in ("none", "optional", "required"):
        raise ValueError("ssl_cert_reqs is none, optional or required")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not SHORTEST_TIMEOUT_S <= seconds <= LONGEST_TIMEOUT_S:
        raise ValueError(f"socket_timeout is not {SHORTEST_TIMEOUT_S:g} to {LONGEST_TIMEOUT_S:g} seconds")
    return seconds


PLAIN: Mapping[str, Callable[[str], Any]] = {
    "db": _database,
    "username": str,
    "password": str,
    "sentinel_username": str,
    "sentinel_password": str,
    "socket_timeout": _seconds,
}
TLS: Mapping[str, Callable[[str], Any]] = {
    "ssl_ca_certs": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_check_hostname": _switch,
    "ssl_cert_reqs": _choice,
    "ssl_ciphers": str,
}


def _pairs(query: str) -> list[tuple[str, str]]:
    """Return the decoded names and values of a query."""
    pairs = [part.partition("=") for part in query.split("&")] if query else []
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("it is no URL")
    # Not as a form decodes them, where a plus is a blank: passwords have such signs.
    return [(unquote(name), unquote(value)) for name, _, value in pairs]


def _options(pairs: list[tuple[str, str]], *, tls: bool) -> dict[str, Any]:
    query = dict(pairs)
    unknown = [name for name in query if name not in PLAIN and name not in TLS]
    if unknown:
        # Not which: what stands after an unescaped question mark of a password would be shown.
        raise ValueError(f"its query has other names than {', '.join((*PLAIN, *TLS))}")
    if len(query) < len(pairs):
        raise ValueError("a parameter of its query stands twice")
    if not tls and any(name in TLS for name in query):
        raise ValueError("ssl_… parameters need rediss://")
    options = {name: read(query[name]) for name, read in PLAIN.items() if name in query}
    if "socket_timeout" in options:
        options["timeout_s"] = options.pop("socket_timeout")
    if tls:
        if empty := [name for name in TLS if query.get(name) == ""]:
            raise ValueError(f"{empty[0]} is empty")
        options["tls"] = {name: read(query[name]) for name, read in TLS.items() if name in query}
        if options["tls"].get("ssl_cert_reqs") == "none":
            options["tls"]["ssl_check_hostname"] = False
    return options


def _check_files(tls: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the file, for a certificate or key that cannot be used."""
    if ("ssl_keyfile" in tls) and "ssl_certfile" not in tls:
        raise ValueError("ssl_keyfile needs ssl_certfile")
    try:
        if "ssl_ca_certs" in tls:
            ssl.create_default_context(cafile=tls["ssl_ca_certs"])
    except OSError as exc:
        raise ValueError(f"ssl_ca_certs {tls['ssl_ca_certs']}: {exc.strerror or exc}") from None
    try:
        if "ssl_certfile" in tls:
            # An empty password: an encrypted key is refused here instead of asked for on a terminal.
            ssl.create_default_context().load_cert_chain(tls["ssl_certfile"], tls.get("ssl_keyfile"), "")
    except OSError as exc:
        raise ValueError(f"ssl_certfile {tls['ssl_certfile']}: {exc.strerror or exc}") from None
    try:
        if "ssl_ciphers" in tls:
            ssl.create_default_context().set_ciphers(tls["ssl_ciphers"])
    except OSError:
        raise ValueError("ssl_ciphers names none that this machine has") from None
