"""The service's settings: one frozen object, from the environment and the command line, all faults told at once.

Every name is `CACHEROUTE_` + the field's name in capitals. Lists are comma-separated. An unknown `CACHEROUTE_*` name is
refused, since a misspelt setting that is silently ignored is found at night; names of other rooms have prefixes of
their own (OTHER_ROOMS) and are checked there. So is a setting that would do nothing beside the others.
"""

import os
import re
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.dispatch import SPILL_FACTOR
from service.errors import InvalidInput
from service.keys import check_source
from service.shares import parse_weights

PREFIX = "CACHEROUTE_"
# The planner's and the engine patch's own variables, and where the tests find whole traces and keep Envoys.
OTHER_ROOMS = ("CACHEROUTE_PLANNER_", "CACHEROUTE_ENGINE_", "CACHEROUTE_TRACES", "CACHEROUTE_ENVOY_CACHE")

# What Kubernetes puts into every pod of a namespace for each Service there; one may be called `cacheroute`.
SERVICE_LINK = re.compile(
    r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)", re.ASCII
)

SALT_MIN_BYTES = 16
# Values that are shown in no error.
SECRETS = ("key_salt", "fair_weight")
# Settings that are also options of `cacheroute serve`.
OPTIONS = {
    "listen": "--listen",
    "http": "--http",
    "endpoint": "--endpoint",
    "key_header": "--key-header",
    "redis_url": "--redis",
    "pool": "--pool",
    "discover": "--discover",
    "workers": "--workers",
}

CommaList = Annotated[tuple[str, ...], NoDecode]


class ServiceSettings(BaseSettings):
    """What one service process runs with; units are in the names."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    listen: str = "0.0.0.0:9002"
    http: str = "127.0.0.1:9090"
    workers: int = Field(default=1, ge=1, le=64)
    endpoint: CommaList = ()
    discover: str = ""
    discover_interval_s: float = Field(default=5.0, ge=0.5, le=3600)
    dns_server: str = ""
    slow_start_s: float = Field(default=30.0, ge=0, le=3600)
    key_header: CommaList = ("x-tenant-id",)
    key_salt: str = ""
    rate_keys_max: int = Field(default=1_000_000, ge=1)
    key_max_bytes: int = Field(default=256, ge=1, le=65536)
    # The longest prompt of many models, 131,072 tokens. A client may announce any length, and pictures are no prompt.
    prompt_max_bytes: int = Field(default=512 * 1024, ge=0)
    spill_factor: float = Field(default=SPILL_FACTOR, ge=1)
    redis_url: str = ""
    pool: str = Field(default="default", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    instance: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", pattern=r"^[A-Za-z0-9._-]+$")
    rate_window_s: int = Field(default=30, ge=1, le=86400)
    rate_keep_s: int = Field(default=7200, ge=1)
    rate_flush_s: float = Field(default=1.0, gt=0, le=60)
    plan_poll_s: float = Field(default=2.0, gt=0, le=3600)
    load_exchange_s: float = Field(default=0.25, gt=0, le=60)
    probe_path: str = Field(default="/health", pattern=r"^/[!-~]*$")
    probe_interval_s: float = Field(default=1.0, gt=0, le=3600)
    probe_timeout_s: float = Field(default=1.0, gt=0, le=60)
    probe_failures: int = Field(default=2, ge=1)
    drain_notice_s: float = Field(default=1.0, ge=0, le=600)
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    # Bounds: what one client or one Envoy can make this process hold.
    streams_max: int = Field(default=20_000, ge=1)
    streams_per_connection: int = Field(default=256, ge=1, le=1_000_000)
    message_max_bytes: int = Field(default=4 * 1024 * 1024, ge=65536)
    body_echo: Literal["auto", "always", "never"] = "auto"
    conformance: bool = False
    key_inflight_max: int = Field(default=0, ge=0, le=2**31)
    fleet_inflight_max: int = Field(default=0, ge=0, le=2**31)
    fair_weight: CommaList = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    tls_self_signed: bool = False
    state_dir: str = ""
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")

    @field_validator("endpoint", "key_header", "fair_weight", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("key_header")
    @classmethod
    def _lower(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("name at least one header")
        return tuple(check_source(name) for name in value)

    @field_validator("fair_weight")
    @classmethod
    def _weights(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_weights(value)
        return value

    @field_validator("pool", mode="before")
    @classmethod
    def _pool(cls, value: Any) -> Any:
        # As the commands that look at a pool take an empty name.
        return value or "default"

    @field_validator("key_salt")
    @classmethod
    def _salt(cls, value: str) -> str:
        return check_salt(value)

    @field_validator("discover")
    @classmethod
    def _discover(cls, value: str) -> str:
        if value:
            parse_discover(value)
        return value

    @field_validator("dns_server")
    @classmethod
    def _dns_server(cls, value: str) -> str:
        if value:
            host, _ = split_address(value)
            ip_address(host)
        return value

    @field_validator("listen", "http")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("endpoint")
    @classmethod
    def _endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{name}={address}" for name, address in parse_endpoints(value))


def load_settings(environ: Mapping[str, str], **given: object) -> ServiceSettings:
    """Return the settings of the environment under those given on the command line (None: not given).

    Raise InvalidInput that lists every fault: name, value and what is allowed.
    """
    refuse_unknown(environ, PREFIX, {name.upper() for name in ServiceSettings.model_fields}, OTHER_ROOMS)
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        settings = ServiceSettings(**chosen)  # type: ignore[arg-type]
    except ValidationError as exc:
        raise InvalidInput(describe(exc, PREFIX), "correct the option or variable") from exc
    if bool(settings.endpoint) == bool(settings.discover):
        raise InvalidInput(
            "endpoints are both named and to be discovered" if settings.discover else "no endpoint is named",
            "give --endpoint NAME=IP:PORT (CACHEROUTE_ENDPOINT) or --discover (CACHEROUTE_DISCOVER), one of the two",
        )
    _check_idle(settings)
    _check_tls(settings)
    return settings


def _check_idle(settings: ServiceSettings) -> None:
    """Raise InvalidInput for a setting that does nothing beside the others."""
    if settings.state_dir and not settings.redis_url:
        raise InvalidInput(
            "CACHEROUTE_STATE_DIR keeps plans, and no Redis is named that they come from",
            "set CACHEROUTE_REDIS_URL (--redis), or unset it",
        )
    if settings.fair_weight and not settings.fleet_inflight_max:
        raise InvalidInput(
            "CACHEROUTE_FAIR_WEIGHT divides CACHEROUTE_FLEET_INFLIGHT_MAX, which is 0: no limit",
            "set the limit, or unset the weights",
        )
    if settings.dns_server and not settings.discover.startswith(("dns:", "srv:")):
        raise InvalidInput(
            "CACHEROUTE_DNS_SERVER is named, and no endpoint is looked up in DNS",
            "unset it, or discover by dns:HOST:PORT or srv:NAME",
        )
    if settings.rate_keep_s < 2 * settings.rate_window_s:
        raise InvalidInput(
            f"CACHEROUTE_RATE_KEEP_S = {settings.rate_keep_s} is less than two windows of "
            f"{settings.rate_window_s} s (CACHEROUTE_RATE_WINDOW_S): counts would be gone before they are read",
            "keep them for longer, or count in shorter windows",
        )


def _check_tls(settings: ServiceSettings) -> None:
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise InvalidInput("a certificate needs its key", "set both CACHEROUTE_TLS_CERT and CACHEROUTE_TLS_KEY")
    if settings.tls_self_signed and settings.tls_cert:
        raise InvalidInput(
            "a certificate is given and a self-signed one is asked for",
            "set either CACHEROUTE_TLS_CERT or CACHEROUTE_TLS_SELF_SIGNED",
        )
    if settings.tls_client_ca and not (settings.tls_cert or settings.tls_self_signed):
        raise InvalidInput("clients are to be verified without TLS", "set CACHEROUTE_TLS_CERT and CACHEROUTE_TLS_KEY")


def refuse_unknown(environ: Mapping[str, str], prefix: str, known: set[str], elsewhere: tuple[str, ...] = ()) -> None:
    """Raise InvalidInput for a variable that starts with `prefix` and is no setting of ours or of `elsewhere`.

    Names of the form that Kubernetes gives to what it tells about Services are nobody's settings and pass.
    """
    unknown = sorted(
        name
        for name in environ
        if name.startswith(prefix)
        and name.removeprefix(prefix) not in known
        and not SERVICE_LINK.fullmatch(name.removeprefix(prefix))
        and not name.startswith(elsewhere or ("\0",))
    )
    if unknown:
        raise InvalidInput(
            f"unknown setting {', '.join(unknown)} in the environment",
            f"unset it, or use one of: {', '.join(sorted(prefix + k for k in known))}",
        )


def describe(exc: ValidationError, prefix: str) -> str:
    """Return every fault of a validation in one line, by option where there is one, and by variable."""
    faults = []
    for error in exc.errors():
        field = str(error["loc"][0]) if error["loc"] else "settings"
        variable = prefix + field.upper()
        name = f"{OPTIONS[field]} ({variable})" if field in OPTIONS else variable
        shown = "…" if field in SECRETS else repr(error["input"])
        why = error["msg"].removeprefix("Value error, ")
        faults.append(f"{name} = {shown}: {why}")
    return "; ".join(faults)


def check_salt(value: str) -> str:
    """Return a salt that may be used, or no salt; raise ValueError for one that can be guessed."""
    if value and len(value.encode()) < SALT_MIN_BYTES:
        raise ValueError(f"a salt of less than {SALT_MIN_BYTES} bytes can be guessed; take random ones")
    return value


def split_address(value: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[v6]:port`; raise ValueError naming what is wrong."""
    found = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^\[\]:]+)):([0-9]{1,5})", value)
    if not found or int(found[3]) > 65535:
        raise ValueError(f"{value!r} is not HOST:PORT with a port of 0 to 65535, or [IPV6]:PORT")
    return found[1] or found[2], int(found[3])


def parse_endpoints(values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (name, ip:port) of each `NAME=IP:PORT`; raise ValueError for a bad or repeated one.

    The address must be an IP: it is what Envoy compares with the hosts of its cluster, which knows no names. It is
    returned as Envoy writes it, however it was written.
    """
    pairs: list[tuple[str, str]] = []
    for value in values:
        name, sep, address = value.partition("=")
        if not sep or not name:
            raise ValueError(f"{value!r} is not NAME=IP:PORT")
        host, port = split_address(address)
        try:
            pairs.append((name, f"{_as_envoy_writes(host)}:{port}"))
        except ValueError:
            raise ValueError(f"{value!r}: {host!r} is not an IP address, and Envoy picks endpoints by IP") from None
        if not port:
            raise ValueError(f"{value!r}: no server listens on port 0")
    for what, items in (("name", [n for n, _ in pairs]), ("address", [a for _, a in pairs])):
        twice = sorted({i for i in items if items.count(i) > 1})
        if twice:
            raise ValueError(f"endpoint {what} {', '.join(twice)} stands twice")
    return tuple(pairs)


def _as_envoy_writes(host: str) -> str:
    ip = ip_address(host)
    if ip.version == 4:
        return str(ip)
    if ip.scope_id:
        raise ValueError("a zone is this machine's own")
    return f"[{socket.inet_ntop(socket.AF_INET6, ip.packed)}]"


DISCOVER_FORMS = "dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE[:PORT-NAME]"


def parse_discover(value: str) -> tuple[str, str, str]:
    """Return (source, what to ask for, port) of a `discover` setting; the port is a number for dns, else a name or "".

    Raise ValueError for anything but `DISCOVER_FORMS`.
    """
    source, _, rest = value.partition(":")
    host, colon, port = rest.rpartition(":")
    if source == "dns" and host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= 65535:
        return source, host, port
    if source == "srv" and rest and not colon:
        return source, rest, ""
    if source == "k8s":
        service, _, name = rest.partition(":")
        namespace, slash, service_name = service.partition("/")
        if namespace and slash and service_name and "/" not in service_name:
            return source, service, name
    raise ValueError(f"{value!r} is not {DISCOVER_FORMS}")
