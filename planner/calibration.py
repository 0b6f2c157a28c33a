"""What a calibration says, as one document: the cap, the cache, what depends on them, and all it was read from.

1. `replica_cap_rps` is the crossing less the headroom. Where the SLO was not crossed, the document says `censored`:
   `above`, the endpoint bears at least that much; `below`, not even the lowest load was borne, and there is no cap;
   `client`, no step counts, since the client could not send in time.
2. The interval is of chance alone; the crossing lies some percent high besides (planner.ladder), hence the headroom.
3. The cache is read near the cap, from the steps at most `NEAR` below the crossing: running requests pin most there,
   and prefixes stay the shortest.
4. Sensitivity: the cap, and what a plan would be with it, at SLOs and caps `VARIED` lower and higher. With rates, the
   plan that `build` makes of them; without, how many copies a key of so many times the cap would have.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from planner.admission import Rules
from planner.build import build
from planner.calibrate import Calibration, Measured
from planner.capacity import Residency, Room, residency, room
from planner.ladder import REQUESTS, Found, find, interval
from planner.rates import KeyRates

METHOD = "open loop of Poisson arrivals of one tenant; share of requests later than the SLO, isotonic in load, at 1 %"
NEAR = 0.2
VARIED = (0.75, 1.0, 1.25)
TIMES_CAP = (1, 2, 4, 8)
PREFIX = "CACHEROUTE_PLANNER_"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Whose plan the sensitivity is of."""

    rates: KeyRates
    endpoints: Sequence[str]


def document(found: Calibration, fleet: Fleet | None = None, at_s: float | None = None) -> dict[str, Any]:
    """Return all of it, ready for JSON; at_s: unix s of the measurement, None: now."""
    settings = found.settings
    usable = [measured for measured in found.steps if measured.step.usable]
    steps = [measured.step for measured in usable]
    crossed = find(steps, settings.slos) if steps else None
    result = _result(found, crossed)
    if crossed is not None:
        low, high = interval(steps, settings.slos, settings.seed)
        result["chance_95_rps"] = [_round(low), _round(high)]
    cache, here, stays = _cache(found, usable, crossed)
    cap = result["replica_cap_rps"]
    return {
        "tool": {"name": "cacheroute calibrate", "version": _version()},
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() if at_s is None else at_s)),
        "endpoint": settings.endpoint,
        "model": found.model,
        "engine_version": found.engine_version,
        "simulated": dict(found.first.simulated) if found.first and found.first.simulated else None,
        "seed": settings.seed,
        "run_id": found.run_id,
        "traffic": {
            "prefix_tokens": settings.prefix_tokens,
            "unique_tokens": settings.unique_tokens,
            "output_tokens": settings.output_tokens,
            "prompt_tokens_seen": _round(_prompt_tokens(found)),
            "alone_ttft_s": _round(found.alone_ttft_s),
            "alone_s": _round(found.alone_s),
        },
        "slo_p99_s": dict(settings.slos),
        "max_rps": settings.max_rps,
        "max_minutes": settings.max_minutes,
        "method": METHOD,
        "result": result,
        "cache": cache,
        "sensitivity": _sensitivity(found, usable, cap, here, fleet),
        "settings": _lines(found, cap, here, stays),
        "notes": _notes(found, usable, crossed, stays),
        "steps": [_step(measured, settings.slos) for measured in found.steps],
    }


def _result(found: Calibration, crossed: Found | None) -> dict[str, Any]:
    headroom = found.settings.headroom
    if crossed is None:
        return {"censored": "client", "crossing_rps": None, "replica_cap_rps": None, "headroom": headroom}
    cap = None if crossed.where == "below" else _down(crossed.rate_rps * (1 - headroom))
    return {
        "censored": None if crossed.where == "crossed" else crossed.where,
        "bound_by": crossed.bound_by,
        "crossing_rps": _round(crossed.rate_rps),
        "chance_95_rps": None,
        "headroom": headroom,
        "replica_cap_rps": cap,
    }


def _cache(
    found: Calibration, usable: Sequence[Measured], crossed: Found | None
) -> tuple[dict[str, Any], Room | None, Residency]:
    """Return what is said of the cache, and the same for use."""
    near = _near(usable, crossed)
    usages = [measured.kv_usage for measured in near if measured.kv_usage is not None]
    usage = sum(usages) / len(usages) if usages else None
    tokens = found.first.cache_tokens if found.first else None
    settings = found.settings
    here = None
    if tokens is not None and usage is not None:
        # What the model's own tokenizer made of the words; the answer's tokens are its own.
        scale = _prompt_tokens(found) / (settings.prefix_tokens + settings.unique_tokens) or 1.0
        here = room(tokens, usage, settings.prefix_tokens * scale, settings.unique_tokens * scale)
    spans = [(m.before, m.after, m.span_s) for m in near if m.before is not None and m.after is not None]
    stays = residency(spans, here.free_tokens if here else None)
    said = {
        "cache_tokens": tokens,
        "kv_usage_under_load": _round(usage),
        "free_tokens": here.free_tokens if here else None,
        "slots_per_endpoint": here.slots if here else None,
        "tokens_per_endpoint": here.budget_tokens if here else None,
        "resident_s": _round(stays.seconds),
        "resident_how": stays.how,
        "evictions_seen": stays.evictions,
        "filled_tokens_per_s": _round(stays.filled_tokens_per_s),
    }
    return said, here, stays


def _near(usable: Sequence[Measured], crossed: Found | None) -> list[Measured]:
    """Rule 3."""
    if crossed is None:
        return []
    held = [m for m in usable if m.step.rate_rps <= crossed.rate_rps and not m.step.cut]
    near = [m for m in held if m.step.rate_rps >= crossed.rate_rps * (1 - NEAR)]
    return near or sorted(held, key=lambda m: m.step.rate_rps)[-1:]


def _sensitivity(
    found: Calibration, usable: Sequence[Measured], cap: float | None, here: Room | None, fleet: Fleet | None
) -> list[dict[str, Any]]:
    """Rule 4; empty without a cap."""
    if cap is None:
        return []
    steps = [measured.step for measured in usable]
    rows: list[tuple[str, float, str | None, float | None]] = [
        ("replica_cap", factor, None, cap * factor) for factor in VARIED
    ]
    for factor in VARIED:
        if factor != 1:
            slos = {name: limit_s * factor for name, limit_s in found.settings.slos.items()}
            at = find(steps, slos)
            censored = None if at.where == "crossed" else at.where
            varied = None if at.where == "below" else at.rate_rps * (1 - found.settings.headroom)
            rows.append(("slo", factor, censored, varied))
    return [
        {
            "varied": name,
            "times": factor,
            "censored": censored,
            "replica_cap_rps": _round(varied),
            **(_planned(varied, cap, here, fleet) if varied else {}),
        }
        for name, factor, censored, varied in rows
    ]


def _planned(cap: float, measured: float, here: Room | None, fleet: Fleet | None) -> dict[str, Any]:
    if fleet is None:
        return {"copies_of_a_key": {f"{n} x cap": math.ceil(n * measured / cap - 1e-9) for n in TIMES_CAP}}
    slots = here.slots if here else 1
    built = build(fleet.rates, fleet.endpoints, rules=Rules(slots_per_endpoint=slots, replica_cap_rps=cap), key_check=0)
    shape = built.shape
    return {
        "slots_used": shape.slots_used,
        "admitted": shape.admitted,
        "admitted_rate_share": _round(shape.admitted_rate_share),
        "max_copies": shape.max_copies,
        "max_over_mean": _round(shape.max_over_mean),
    }


def _lines(found: Calibration, cap: float | None, here: Room | None, stays: Residency) -> dict[str, str]:
    """Return the planner's settings, ready to be pasted; only those that are known."""
    settings = found.settings
    tokens = found.first.cache_tokens if found.first else None
    known = {
        "REPLICA_CAP_RPS": cap,
        "SLOTS_PER_ENDPOINT": here.slots if here else None,
        "TOKENS_PER_ENDPOINT": here.budget_tokens if here else None,
        "RESIDENT_S": None if stays.seconds is None else _round(stays.seconds),
        "CACHE_TOKENS_PER_ENDPOINT": tokens,
        "PREFIX_TOKENS": settings.prefix_tokens if tokens else None,
        "UNIQUE_TOKENS": settings.unique_tokens if tokens else None,
        "OUTPUT_TOKENS": settings.output_tokens if tokens else None,
    }
    return {PREFIX + name: f"{value:.15g}" for name, value in known.items() if value is not None}


def _notes(found: Calibration, usable: Sequence[Measured], crossed: Found | None, stays: Residency) -> list[str]:
    """Return what a reader must know of how far to trust it."""
    notes = list(found.notes)
    late = sum(measured.step.late for measured in found.steps)
    if late:
        notes.append(f"{late} steps do not count: the client could not send in time; run it on an idle machine")
    if crossed is not None and crossed.where == "above":
        notes.append(f"the SLO held at every load up to {crossed.rate_rps:.4g} requests/s; the endpoint may bear more")
    if crossed is not None and crossed.where == "below":
        notes.append(
            f"the SLO was broken at the lowest load, {crossed.rate_rps:.4g} requests/s; one alone has its first "
            f"token after {found.alone_ttft_s:.3g} s"
        )
    if crossed is not None and crossed.where == "crossed":
        near = [m.step.requests for m in usable if abs(m.step.rate_rps / crossed.rate_rps - 1) <= NEAR]
        if len(near) < 10 or min(near) < REQUESTS * 0.85:
            notes.append(
                f"{len(near)} steps of {min(near, default=0)} requests or more near the crossing; 10 of {REQUESTS} "
                "are wanted: a longer --max-minutes makes it surer"
            )
    if found.timed_out:
        notes.append("the time was over before the ladder was")
    if stays.how == "estimated":
        notes.append(
            "resident_s is estimated from what fills the cache; vLLM measures it with --kv-cache-metrics, from "
            "30 sampled evictions on"
        )
    if any(measured.failed for measured in found.steps):
        kinds = dict.fromkeys(failure for measured in found.steps for failure in measured.failures)
        notes.append(f"requests failed, and count as too late: {'; '.join(list(kinds)[:3])}")
    return notes


def _step(measured: Measured, slos: Mapping[str, float]) -> dict[str, Any]:
    step = measured.step
    before, after = measured.before, measured.after
    hit_share = None
    if before is not None and after is not None and after.prompt_tokens > before.prompt_tokens:
        hit_share = (after.hit_tokens - before.hit_tokens) / (after.prompt_tokens - before.prompt_tokens)
    said: dict[str, Any] = {
        "rate_rps": _round(step.rate_rps),
        "duration_s": _round(step.duration_s),
        "requests": step.requests,
        "failed": measured.failed,
    }
    for name in slos:
        values = step.latencies_s[name]
        for quantile in (0.5, 0.99):
            said[f"{name}_p{100 * quantile:.0f}_s"] = _quantile(values, quantile)
    return said | {
        "share_over_slo": _round(step.share_over(slos)) if step.requests else None,
        "kv_usage": _round(measured.kv_usage),
        "hit_share": _round(hit_share),
        "lag_p99_s": _round(step.lag_p99_s),
        "counts": step.usable,
        "cut": step.cut,
    }


def _quantile(values: np.ndarray[Any, np.dtype[np.float64]], quantile: float) -> float | None:
    """Return it; None when so many failed that it is not finite."""
    if not len(values):
        return None
    found = float(np.quantile(values, quantile, method="higher"))
    return _round(found) if math.isfinite(found) else None


def _prompt_tokens(found: Calibration) -> float:
    seen = [measured.prompt_tokens for measured in found.steps if measured.prompt_tokens]
    return sum(seen) / len(seen) if seen else float(found.settings.prefix_tokens + found.settings.unique_tokens)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def _down(value: float) -> float:
    """Cut to four digits, never upwards."""
    step = 10.0 ** (math.floor(math.log10(value)) - 3)
    return float(f"{math.floor(value / step) * step:.4g}")


def _version() -> str:
    try:
        return version("cacheroute")
    except PackageNotFoundError:
        return "unknown"
