"""The planner's settings: one frozen object, from the environment and the command line, all faults told at once.

1. What a whole pool agrees on has the service's names: CACHEROUTE_REDIS_URL, _POOL, _KEY_SALT, _RATE_WINDOW_S.
2. Everything else is `CACHEROUTE_PLANNER_` + the field's name in capitals. Lists are comma-separated.
3. The command line wins. An unknown name under either prefix is refused.
"""

import os
import socket
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from planner.admission import Rules
from planner.build import MAX_SLOTS
from planner.predict import Economics
from planner.sticky import Limits
from service.errors import InvalidInput, InvalidParameter
from service.settings import OTHER_ROOMS, ServiceSettings, check_salt, refuse_unknown, split_address
from service.settings import PREFIX as SERVICE_PREFIX

PREFIX = "CACHEROUTE_PLANNER_"
OPTIONS = {"redis_url": "--redis", "slots_per_endpoint": "--slots", "replica_cap_rps": "--replica-cap"}
# Parameters of admission, placement and gate, as `plan build` has them.
RULES = frozenset(
    {"epsilon", "keys_budget", "rate_budget", "copies_max", "incumbent_bonus", "tokens_per_endpoint", "resident_s"}
    | {"residency"}
)
SHARED = ("redis_url", "pool", "key_salt", "rate_window_s")

CommaList = Annotated[tuple[str, ...], NoDecode]


def _shared(name: str, **rules: Any) -> Any:
    return Field(validation_alias=SERVICE_PREFIX + name.upper(), **rules)


class PlannerSettings(BaseSettings):
    """What the planner job runs with; units are in the names.

    endpoint: stable names of the pool's endpoints, in the order that breaks ties; `NAME=IP:PORT` is read as NAME.
    windows: how many of the newest rate windows are read.  half_life_events: after how many requests of the whole pool
    a request counts half in the rates; 0: by the number of slots, `planner.rates.half_life_of`.
    From `method` to `residency`: planner.sticky.Limits and planner.admission.Rules; from `gate` to `back_after_s`:
    planner.predict.Economics, but for slo_ttft_p99_s (planner.latency, rule 5).
    scrape_engines: whether the engines' metrics are read, for p99 of TTFT and the size of their caches.
    interval_s: between two cycles.  check_s: between two looks at load and copies, which may call for one.
    watch_s: between two looks at the endpoints.  lost_after_s: how long an endpoint is away before it is lost, and back
    before it gets keys again.  lease_s: how long the lead of a planner that died lasts.
    name: of this process, no two alike.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    redis_url: str = _shared("redis_url", min_length=1)
    pool: str = _shared("pool", default="default", min_length=1, pattern=r"^[A-Za-z0-9._-]+$")
    key_salt: str = _shared("key_salt", default="")
    rate_window_s: int = _shared("rate_window_s", default=30, ge=1, le=86400)
    endpoint: CommaList
    slots_per_endpoint: int = Field(ge=1, le=MAX_SLOTS)
    replica_cap_rps: float = Field(gt=0, allow_inf_nan=False)
    windows: int = Field(default=240, ge=1, le=10_000)
    half_life_events: int = Field(default=0, ge=0, le=10**12)
    method: Literal["sticky", "lpt"] = "sticky"
    epsilon: float = Field(default=0.05, ge=0, le=10)
    keys_budget: float = Field(default=0.1, ge=0, le=1)
    rate_budget: float = Field(default=0.2, ge=0, le=1)
    copies_max: int = Field(default=0, ge=0)
    incumbent_bonus: float = Field(default=0.25, ge=0, le=10)
    tokens_per_endpoint: int = Field(default=0, ge=0, le=10**15)
    resident_s: float = Field(default=0.0, ge=0, le=1e9)
    residency: float = Field(default=0.5, ge=0, le=1e9)
    gate: bool = True
    cache_tokens_per_endpoint: float = Field(default=0.0, ge=0, le=1e15)
    prefix_tokens: float = Field(default=0.0, ge=0, le=1e9)
    unique_tokens: float = Field(default=0.0, ge=0, le=1e9)
    output_tokens: float = Field(default=0.0, ge=0, le=1e9)
    prefill_tokens_per_s: float = Field(default=12_000.0, gt=0, le=1e12)
    decode_tokens_per_s: float = Field(default=3_000.0, gt=0, le=1e12)
    slo_services: float = Field(default=8.0, ge=1, le=1e6)
    gain_min: float = Field(default=1.1, ge=1, le=100)
    gain_band: float = Field(default=0.05, ge=0, le=100)
    imbalance_max: float = Field(default=1.1, ge=1, le=1000)
    stale_min: float = Field(default=0.002, ge=0, le=1)
    active_ratio_max: float = Field(default=1.5, ge=1, le=1e6)
    p99_ratio_max: float = Field(default=1.25, ge=1, le=1e6)
    slo_ttft_p99_s: float = Field(default=0.0, ge=0, le=1e6)
    back_after_s: float = Field(default=600.0, ge=0, le=1e9)
    scrape_engines: bool = True
    interval_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    check_s: float = Field(default=15.0, gt=0, allow_inf_nan=False)
    watch_s: float = Field(default=1.0, gt=0, le=60)
    lost_after_s: float = Field(default=10.0, ge=0, le=3600)
    lease_s: float = Field(default=15.0, ge=0.5, le=3600)
    name: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", pattern=r"^[A-Za-z0-9._-]+$")
    actor: str = "planner"
    log_level: str = Field(default="info", pattern=r"^(debug|info|warning|error)$")

    @property
    def rules(self) -> Rules:
        """Return how keys are admitted."""
        return Rules(
            slots_per_endpoint=self.slots_per_endpoint,
            replica_cap_rps=self.replica_cap_rps,
            copies_max=self.copies_max,
            incumbent_bonus=self.incumbent_bonus,
            resident_s=self.resident_s,
            residency=self.residency,
            tokens_per_endpoint=self.tokens_per_endpoint,
        )

    @property
    def limits(self) -> Limits:
        """Return what one cycle may move."""
        return Limits(epsilon=self.epsilon, keys_share=self.keys_budget, rate_share=self.rate_budget)

    @property
    def economics(self) -> Economics:
        """Return what the gate judges by."""
        return Economics(
            cache_tokens_per_endpoint=self.cache_tokens_per_endpoint,
            prefix_tokens=self.prefix_tokens,
            unique_tokens=self.unique_tokens,
            output_tokens=self.output_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_tokens_per_s=self.decode_tokens_per_s,
            plan_interval_s=self.interval_s,
            slo_services=self.slo_services,
            gain_min=self.gain_min,
            gain_band=self.gain_band,
            imbalance_max=self.imbalance_max,
            stale_min=self.stale_min,
            active_ratio_max=self.active_ratio_max,
            p99_ratio_max=self.p99_ratio_max,
            back_after_s=self.back_after_s,
        )

    @field_validator("pool", mode="before")
    @classmethod
    def _pool(cls, value: Any) -> Any:
        return value or "default"  # as services take an empty name

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

    Raise InvalidInput that lists every fault: option, variable, value and what is allowed; InvalidParameter when only
    parameters of the rules are out of range.
    """
    refuse_unknown_variables(environ)
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return PlannerSettings(**chosen)  # type: ignore[arg-type]
    except ValidationError as exc:
        fields = {str(error["loc"][0]) if error["loc"] else "" for error in exc.errors()}
        kind = InvalidParameter if fields <= RULES else InvalidInput
        raise kind(_describe(exc), "give or correct the option or variable") from exc


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
