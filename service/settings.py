"""The service's settings: one frozen object, from the environment and the command line, all faults told at once.

Every name is `CACHEROUTE_` + the field's name in capitals. Lists are comma-separated. An unknown `CACHEROUTE_*` name is
refused, since a misspelt setting that is silently ignored is found at night; names of other rooms have prefixes of
their own (OTHER_ROOMS) and are checked there.
"""

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from service.dispatch import SPILL_FACTOR
from service.errors import InvalidInput

PREFIX = "CACHEROUTE_"
# The planner's and the engine patch's own variables, and where the tests find whole traces.
OTHER_ROOMS = ("CACHEROUTE_PLANNER_", "CACHEROUTE_ENGINE_", "CACHEROUTE_TRACES")

SALT_MIN_BYTES = 16
# Settings that are also options of `cacheroute serve`.
OPTIONS = {
    "listen": "--listen",
    "http": "--http",
    "endpoint": "--endpoint",
    "key_header": "--key-header",
    "redis_url": "--redis",
    "pool": "--pool",
}

CommaList = Annotated[tuple[str, ...], NoDecode]


class ServiceSettings(BaseSettings):
    """What one service process runs with; units are in the names."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    listen: str = "0.0.0.0:9002"
    http: str = "127.0.0.1:9090"
    endpoint: CommaList = ()
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
    probe_path: str = "/health"
    probe_interval_s: float = Field(default=1.0, gt=0, le=3600)
    probe_timeout_s: float = Field(default=1.0, gt=0, le=60)
    probe_failures: int = Field(default=2, ge=1)
    drain_s: float = Field(default=10.0, ge=0, le=3600)
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")

    @field_validator("endpoint", "key_header", mode="before")
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
        return tuple(name.lower() for name in value)

    @field_validator("key_salt")
    @classmethod
    def _salt(cls, value: str) -> str:
        return check_salt(value)

    @field_validator("listen", "http")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value

    @field_validator("endpoint")
    @classmethod
    def _endpoints(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_endpoints(value)
        return value


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
    if not settings.endpoint:
        raise InvalidInput("no endpoint is named", "give --endpoint NAME=IP:PORT or set CACHEROUTE_ENDPOINT")
    return settings


def refuse_unknown(environ: Mapping[str, str], prefix: str, known: set[str], elsewhere: tuple[str, ...] = ()) -> None:
    """Raise InvalidInput for a variable that starts with `prefix` and is no setting of ours or of `elsewhere`."""
    unknown = sorted(
        name
        for name in environ
        if name.startswith(prefix)
        and name.removeprefix(prefix) not in known
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
        shown = "…" if field == "key_salt" else repr(error["input"])
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
    host, sep, port = value.rpartition(":")
    if not sep or not port.isdigit() or not 0 <= int(port) <= 65535 or not host:
        raise ValueError(f"{value!r} is not HOST:PORT with a port of 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_endpoints(values: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return (name, ip:port) of each `NAME=IP:PORT`; raise ValueError for a bad or repeated one.

    The address must be an IP: it is what Envoy compares with the hosts of its cluster, which knows no names.
    """
    pairs: list[tuple[str, str]] = []
    for value in values:
        name, sep, address = value.partition("=")
        if not sep or not name:
            raise ValueError(f"{value!r} is not NAME=IP:PORT")
        host, _ = split_address(address)
        try:
            ip_address(host)
        except ValueError:
            raise ValueError(f"{value!r}: {host!r} is not an IP address, and Envoy picks endpoints by IP") from None
        pairs.append((name, address))
    for what, items in (("name", [n for n, _ in pairs]), ("address", [a for _, a in pairs])):
        twice = sorted({i for i in items if items.count(i) > 1})
        if twice:
            raise ValueError(f"endpoint {what} {', '.join(twice)} stands twice")
    return tuple(pairs)
