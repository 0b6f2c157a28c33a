"""The planner's settings: one frozen object, from the environment and the command line, all faults told at once.

1. What a whole pool agrees on has the service's names: CACHEROUTE_REDIS_URL, _POOL, _KEY_SALT, _RATE_WINDOW_S.
2. Everything else is `CACHEROUTE_PLANNER_` + the field's name in capitals. Lists are comma-separated.
3. The command line wins. An unknown name under either prefix is refused.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from planner.build import MAX_SLOTS
from service.errors import InvalidInput
from service.settings import OTHER_ROOMS, ServiceSettings, check_salt, refuse_unknown, split_address
from service.settings import PREFIX as SERVICE_PREFIX

PREFIX = "CACHEROUTE_PLANNER_"
OPTIONS = {"redis_url": "--redis", "slots_per_endpoint": "--slots", "replica_cap_rps": "--replica-cap"}
SHARED = ("redis_url", "pool", "key_salt", "rate_window_s")

CommaList = Annotated[tuple[str, ...], NoDecode]


def _shared(name: str, **rules: Any) -> Any:
    return Field(validation_alias=SERVICE_PREFIX + name.upper(), **rules)


class PlannerSettings(BaseSettings):
    """What the planner job runs with; units are in the names.

    endpoint: stable names of the pool's endpoints, in the order that breaks ties; `NAME=IP:PORT` is read as NAME.
    windows: how many of the newest rate windows are read.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    redis_url: str = _shared("redis_url", min_length=1)
    pool: str = _shared("pool", default="default", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    key_salt: str = _shared("key_salt", default="")
    rate_window_s: int = _shared("rate_window_s", default=30, ge=1, le=86400)
    endpoint: CommaList
    slots_per_endpoint: int = Field(ge=1, le=MAX_SLOTS)
    replica_cap_rps: float = Field(gt=0, allow_inf_nan=False)
    windows: int = Field(default=10, ge=1, le=10_000)
    interval_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    actor: str = "planner"
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")

    @field_validator("key_salt")
    @classmethod
    def _salt(cls, value: str) -> str:
        return check_salt(value)

    @field_validator("endpoint", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("endpoint")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = []
        for item in value:
            name, sep, address = item.partition("=")
            if not name:
                raise ValueError(f"{item!r} is not NAME or NAME=IP:PORT")
            if sep:
                split_address(address)
            names.append(name)
        if not names:
            raise ValueError("name at least one endpoint")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"endpoint name {', '.join(twice)} stands twice")
        return tuple(names)


def load_settings(environ: Mapping[str, str], **given: object) -> PlannerSettings:
    """Return the settings of the environment under those given on the command line (None: not given).

    Raise InvalidInput that lists every fault: option, variable, value and what is allowed.
    """
    refuse_unknown_variables(environ)
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return PlannerSettings(**chosen)  # type: ignore[arg-type]
    except ValidationError as exc:
        raise InvalidInput(_describe(exc), "give or correct the option or variable") from exc


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """Raise InvalidInput for a CACHEROUTE_* name that neither service nor planner knows."""
    refuse_unknown(environ, SERVICE_PREFIX, {name.upper() for name in ServiceSettings.model_fields}, OTHER_ROOMS)
    refuse_unknown(environ, PREFIX, {name.upper() for name in PlannerSettings.model_fields if name not in SHARED})


def _describe(exc: ValidationError) -> str:
    faults = []
    for error in exc.errors():
        name = str(error["loc"][0]).removeprefix(SERVICE_PREFIX).lower() if error["loc"] else "settings"
        option = OPTIONS.get(name, "--" + name.replace("_", "-"))
        variable = (SERVICE_PREFIX if name in SHARED else PREFIX) + name.upper()
        value = "" if error["type"] == "missing" or name == "key_salt" else f" = {error['input']!r}"
        faults.append(f"{option} ({variable}){value}: {error['msg'].removeprefix('Value error, ')}")
    return "; ".join(faults)
