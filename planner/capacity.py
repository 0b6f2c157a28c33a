"""Reads from an engine's metrics how many keys its cache keeps warm, and for how long; pure.

1. Cache tokens are KV blocks times block size (`vllm:cache_config_info`), summed over the engines behind one port.
2. Running requests hold a part of them, `vllm:kv_cache_usage_perc` under the load that the endpoint bears; the rest is
   free for keeping.
3. A warm key holds its prefix and what one request adds: W = free tokens / (prefix + unique part). The token budget
   counts prefixes alone, so it is that many prefixes.
4. τ, how long an unused prefix stays, is read from `vllm:kv_block_idle_before_evict_seconds` over blocks evicted near
   that load, if the engine exports it and `EVICTIONS` were seen: their mean, but no less and no more than the bounds of
   the bucket in which the median lies (up to a factor of 2.5 apart). Else it is estimated, free tokens over the
   tokens that come into the cache a second, prompt tokens that were computed and answers. Under less load τ is longer.
   vLLM counts idle time from a block's last use, so the time that this use lasted is part of it.

Source: ours. W is only the cap of what fits; whether a key is worth a slot, residency says (planner.admission).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from replay.live import metric_sum, metric_values

IDLE = "vllm:kv_block_idle_before_evict_seconds"
EVICTIONS = 30
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Page:
    """What one answer of /metrics says; None where the engine does not export it.

    idle: evictions by upper bound of idle seconds, cumulative, as Prometheus has it; empty: not exported.
    idle_sum_s: of all of them.
    simulated: what `cacheroute_sim_info` says of a simulated engine.
    """

    running: float | None
    waiting: float | None
    kv_usage: float | None
    cache_tokens: int | None
    prompt_tokens: float
    hit_tokens: float
    generation_tokens: float
    idle: Mapping[float, float] = field(default_factory=dict)
    idle_sum_s: float = 0.0
    simulated: Mapping[str, str] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """How many of the endpoint's seconds pass in one of ours; 1 unless it is simulated."""
        return float(self.simulated.get("speed", 1))


@dataclass(frozen=True, slots=True)
class Residency:
    """How long an unused prefix stays; seconds is None when it is unknown. evictions: how many blocks were seen to go.

    filled_tokens_per_s: what came into the cache.
    """

    seconds: float | None
    how: Literal["measured", "estimated", "unknown"]
    evictions: int
    filled_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Room:
    """What a cache has room for: free tokens under load, keys (W), and the tokens of their prefixes."""

    free_tokens: int
    slots: int
    budget_tokens: int


def read_page(text: str) -> Page:
    """Return what a Prometheus page says; a value that is no number counts as not exported."""
    usage = metric_values(text, "vllm:kv_cache_usage_perc")
    idle: dict[float, float] = {}
    for labels, count in metric_values(text, f"{IDLE}_bucket").items():
        bound = dict(LABEL.findall(labels)).get("le")
        if bound is not None:
            idle[float(bound)] = idle.get(float(bound), 0.0) + count
    info = next(iter(metric_values(text, "cacheroute_sim_info")), "")
    return Page(
        running=_gauge(text, "vllm:num_requests_running"),
        waiting=_gauge(text, "vllm:num_requests_waiting"),
        kv_usage=sum(usage.values()) / len(usage) if usage else None,
        cache_tokens=_cache_tokens(text),
        prompt_tokens=metric_sum(text, "vllm:prompt_tokens_total"),
        hit_tokens=metric_sum(text, "vllm:prefix_cache_hits_total"),
        generation_tokens=metric_sum(text, "vllm:generation_tokens_total"),
        idle=idle,
        idle_sum_s=metric_sum(text, f"{IDLE}_sum"),
        simulated=dict(LABEL.findall(info)),
    )


def room(cache_tokens: int, kv_usage: float, prefix_tokens: float, unique_tokens: float) -> Room:
    """Return rules 2 and 3; at least one slot, since an endpoint without any takes no part in a plan."""
    free = cache_tokens * (1 - min(1.0, max(0.0, kv_usage)))
    slots = max(1, math.floor(free / (prefix_tokens + unique_tokens)))
    return Room(math.floor(free), slots, math.floor(slots * prefix_tokens))


def residency(spans: Sequence[tuple[Page, Page, float]], free_tokens: int | None) -> Residency:
    """Return rule 4 from stretches of load: the pages before and after, and the seconds between."""
    idle: dict[float, float] = {}
    filled = seconds = idle_sum_s = 0.0
    for before, after, length_s in spans:
        filled += (after.prompt_tokens - before.prompt_tokens) - (after.hit_tokens - before.hit_tokens)
        filled += after.generation_tokens - before.generation_tokens
        seconds += length_s
        idle_sum_s += after.idle_sum_s - before.idle_sum_s
        for bound, count in after.idle.items():
            idle[bound] = idle.get(bound, 0.0) + count - before.idle.get(bound, 0.0)
    rate = max(0.0, filled / seconds) if seconds > 0 else 0.0
    evictions = round(idle.get(math.inf, 0.0))
    if evictions >= EVICTIONS:
        low_s, high_s = _median_bucket(idle)
        return Residency(min(high_s, max(low_s, idle_sum_s / evictions)), "measured", evictions, rate)
    if free_tokens is None or rate <= 0:
        return Residency(None, "unknown", evictions, rate)
    return Residency(free_tokens / rate, "estimated", evictions, rate)


def _median_bucket(cumulative: Mapping[float, float]) -> tuple[float, float]:
    """Return the bounds of the bucket in which the median lies."""
    bounds = sorted(cumulative)
    half, low = cumulative[bounds[-1]] / 2, 0.0
    for bound in bounds:
        if cumulative[bound] >= half:
            return low, bound
        low = bound
    return low, math.inf


def _gauge(text: str, name: str) -> float | None:
    values = metric_values(text, name)
    return sum(values.values()) if values else None


def _cache_tokens(text: str) -> int | None:
    total = 0
    for labels in metric_values(text, "vllm:cache_config_info"):
        found = dict(LABEL.findall(labels))
        try:
            total += int(found["block_size"]) * int(found["num_gpu_blocks"])
        except (KeyError, ValueError):  # "None" until an engine has sized its cache
            return None
    return total or None
