"""The demonstration: one fleet on this machine, one trace, two ways to route it, a verdict; and a switch of eviction.

1. Everything that can be refused is refused first: options, trace, report path.
2. Pass 1, Flat-LB: the service runs without a plan, so each request goes to the less loaded of two random engines.
3. The engines' prefix caches are emptied; the planner plans once, from the rates that the service measured in pass 1.
4. Pass 2, CacheRoute: the same requests at the same times.
5. The two passes are compared request by request (`replay.verdict`).
6. Asked for another eviction policy than LRU: a third pass with the same requests and the same plan, in which every
   engine evicts by it, or (`auto`) decides by itself and may switch. It is compared with the second.

Why these defaults: the trace is played as fast as it was recorded, a choice that no result was tuned for. The shipped
excerpt then offers 2.9 requests/s, 14,000 prompt tokens each on average, to six engines. Their prefill alone, with no
cache hit, would take 82 % of what the engines have: enough for queues to matter, and they do not grow without end.
A mix (`replay.mix_workload`) is played at 0.5 requests/s an engine onto 5,333 blocks each: as many blocks for a rate as
16,000 have at the paper's 1.5 requests/s, where its own choice of policies matters.
"""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from rich.console import Console

from engine_patch.settings import AUTO, known_policies
from replay.live import Places, metric_values, watch
from replay.mix_workload import build_mix, parse_mixes
from replay.player import Playable, PlayedRequest, Progress, play
from replay.report import Conditions, Eviction, Switch, check_writable
from replay.traces import read_trace
from replay.verdict import PolicySummary, Served, Verdict, judge, summarize
from replay.workload import build_workload
from service.errors import InvalidInput, ServerUnavailable

if TYPE_CHECKING:
    from replay.lab import Lab

EXCERPT = Path(__file__).parent / "data" / "mooncake_conversation_excerpt.jsonl.gz"
FLAT, CACHEROUTE = "flat-lb", "cacheroute"
LRU = "lru"
MIX_RATE_RPS = 0.5  # an engine
MIX_KV_BLOCKS = 5_333
PICKS = "cacheroute_picks_total"
ENGINES_MAX = 64
# Windows of a quarter of a pass: the planner's last windows then cover the pass and little else.
WINDOWS_A_PASS = 4
WINDOW_MIN_S = 5
# The service hands its counts on once a second; the planner must not start on a pass's last second.
FLUSH_S = 2.0
PLAN_TIMEOUT_S = 15.0
POLL_S = 0.1
ANSWER_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_ENGINE_S = 600.0


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What to show. duration_s: wall seconds a pass takes to send.  rate_rps: requests per engine second (None: the
    trace's own).  speed: engine seconds per wall second.  trace: None for the shipped excerpt.  mix: generated traffic
    instead of a trace.  eviction: the third pass's, none when it is `lru`.  kv_blocks: an engine's (None: see above).
    """

    trace: Path | None = None
    mix: str | None = None
    engines: int = 6
    duration_s: float = 43.0
    rate_rps: float | None = None
    speed: float = 12.0
    tenants: int = 64
    eviction: str = LRU
    kv_blocks: int | None = None
    seed: int = 0
    report: Path | None = None
    picture: Path | None = None


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What came out, and of what."""

    verdict: Verdict
    policies: tuple[PolicySummary, ...]
    conditions: Conditions
    failures: tuple[str, ...]
    eviction: Eviction | None = None

    @property
    def failed(self) -> int:
        """Failed requests of all passes."""
        return sum(policy.failed for policy in self.policies)


@dataclass(frozen=True, slots=True)
class _Pass:
    played: tuple[PlayedRequest, ...]
    summary: PolicySummary
    served: tuple[Served, ...]


def run_demo(settings: DemoSettings, console: Console, lines: Console) -> DemoResult:
    """Start a lab, play the passes, end the lab, return the result; from the main thread only.

    console: where the live view goes; lines: where progress goes when that is no terminal.  Raise InvalidInput before
    anything is started, ServerUnavailable when a part of the lab does not do its work.
    """
    check(settings)
    requests = _requests(settings)
    span_s = requests[-1].at_s
    from replay.lab import Lab, LabSettings

    rate_rps = len(requests) / (span_s or settings.duration_s * settings.speed)
    # A key gets a second engine only when it alone is more than an engine's fair share of the offered rate.
    replica_cap_rps = rate_rps / settings.engines
    lab_settings = LabSettings(
        engines=settings.engines,
        speed=settings.speed,
        kv_blocks=settings.kv_blocks or (MIX_KV_BLOCKS if settings.mix else None),
        planner=False,
        rate_window_s=max(WINDOW_MIN_S, math.ceil(settings.duration_s / WINDOWS_A_PASS)),
        # The service counts in wall seconds.
        replica_cap_rps=replica_cap_rps * settings.speed,
        seed=settings.seed,
    )
    lines.print(
        f"starting {settings.engines} engines, Valkey, the service and Envoy for {len(requests)} requests, "
        f"{'twice' if settings.eviction == LRU else 'three times'} …",
        highlight=False,
    )
    third: tuple[_Pass, tuple[Switch, ...]] | None = None
    with Lab(lab_settings) as lab:
        flat = asyncio.run(_run_pass(FLAT, requests, lab, settings, console, lines))
        _wait_for_rates(flat.played)
        lab.reset_prefix_caches()
        record = lab.plan_once()
        asyncio.run(_wait_for_plan(lab, record))
        cacheroute = asyncio.run(_run_pass(CACHEROUTE, requests, lab, settings, console, lines))
        if settings.eviction != LRU:
            third = _evicting(requests, lab, settings, console, lines)
    verdict = judge(
        (flat.summary, flat.served),
        (cacheroute.summary, cacheroute.served),
        endpoints=settings.engines,
        seed=settings.seed,
    )
    passes = [flat, cacheroute]
    eviction = None
    if third is not None:
        passes.append(third[0])
        compared = judge(
            (cacheroute.summary, cacheroute.served),
            (third[0].summary, third[0].served),
            endpoints=settings.engines,
            seed=settings.seed,
            name=f"Eviction by {settings.eviction}",
        )
        eviction = Eviction(settings.eviction, compared, third[1])
    both = [request for each in passes for request in each.played]
    conditions = Conditions(
        trace=f"mix {settings.mix}" if settings.mix else (settings.trace or EXCERPT).name,
        seed=settings.seed,
        engines=settings.engines,
        requests=len(requests),
        tenants=settings.tenants,
        rate_rps=rate_rps,
        span_s=span_s,
        speed=settings.speed,
        replica_cap_rps=replica_cap_rps,
        lag_s=max(request.lag_s for request in both),
    )
    failures = tuple(f"{request.key}: {request.failure}" for request in both if request.failure)
    return DemoResult(verdict, tuple(each.summary for each in passes), conditions, failures, eviction)


def _requests(settings: DemoSettings) -> Sequence[Playable]:
    """Return what is to be sent."""
    duration_s = settings.duration_s * settings.speed
    if settings.mix is not None:
        return build_mix(
            parse_mixes(settings.mix),
            tenants=settings.tenants,
            duration_s=duration_s,
            rate_rps=settings.rate_rps or MIX_RATE_RPS * settings.engines,
            seed=settings.seed,
        )
    return build_workload(
        read_trace(settings.trace or EXCERPT),
        tenants=settings.tenants,
        duration_s=duration_s,
        rate_rps=settings.rate_rps,
        seed=settings.seed,
    )


def _evicting(
    requests: Sequence[Playable], lab: "Lab", settings: DemoSettings, console: Console, lines: Console
) -> tuple[_Pass, tuple[Switch, ...]]:
    """Play the requests once more with the engines evicting otherwise; return the pass and who switched in it."""
    lab.reset_prefix_caches()
    lab.set_eviction(settings.eviction, "the demonstration's third pass")
    began_s = time.time()
    done = asyncio.run(_run_pass(f"{CACHEROUTE}+{settings.eviction}", requests, lab, settings, console, lines))
    switches = [
        Switch(engine, (entry["at"] - began_s) * settings.speed, entry["from"], entry["to"], entry["why"])
        for engine, history in lab.eviction_history().items()
        for entry in history
        if entry["at"] >= began_s
    ]
    return done, tuple(sorted(switches, key=lambda switch: switch.at_s))


def check(settings: DemoSettings) -> None:
    """Raise InvalidInput that lists every option out of its range, with what it may be."""
    faults = []
    if not 1 <= settings.engines <= ENGINES_MAX:
        faults.append(f"--engines {settings.engines} is not 1 to {ENGINES_MAX}")
    above_zero = {"duration": settings.duration_s, "rate": settings.rate_rps, "speed": settings.speed}
    for name, value in above_zero.items():
        if value is not None and not 0 < value < math.inf:
            faults.append(f"--{name} {value:g} is not a finite number above 0")
    known = (AUTO, *known_policies())
    if settings.eviction not in known:
        faults.append(f"--eviction {settings.eviction!r} is none of {', '.join(known)}")
    if settings.mix is not None and settings.trace is not None:
        faults.append("--mix and --trace both say what to play")
    if settings.mix is not None:
        try:
            parse_mixes(settings.mix)
        except InvalidInput as exc:
            faults.append(str(exc))
    if settings.kv_blocks is not None and settings.kv_blocks < 1:
        faults.append(f"--kv-blocks {settings.kv_blocks} is below 1")
    if settings.tenants < 1:
        faults.append(f"tenants {settings.tenants} is below 1")
    if faults:
        raise InvalidInput("; ".join(faults), "correct the option")
    for option, path in (("--report", settings.report), ("--picture", settings.picture)):
        if path is not None:
            check_writable(option, path)


async def _run_pass(
    policy: str,
    requests: Sequence[Playable],
    lab: "Lab",
    settings: DemoSettings,
    console: Console,
    lines: Console,
) -> _Pass:
    """Play the requests, watch meanwhile, and sum up."""
    picks_before = await _picks(lab.service_url)
    played = await _play_watched(policy, requests, lab, settings, console, lines)
    picks = await _picks(lab.service_url)
    served = tuple(
        Served(
            ttft_s=None if request.ttft_s is None else request.ttft_s * settings.speed,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            endpoint=request.served,
        )
        for request in played
    )
    summary = summarize(
        policy,
        served,
        endpoints=settings.engines,
        planned_share=planned_share({reason: n - picks_before.get(reason, 0.0) for reason, n in picks.items()}),
        plan_version=await _plan_version(lab.service_url),
    )
    return _Pass(played, summary, served)


def planned_share(picks: Mapping[str, float]) -> float:
    """Return the share of picks with reason `planned`; keys are the label texts of the service's metric."""
    total = sum(picks.values())
    return picks.get('reason="planned"', 0.0) / total if total else 0.0


async def _play_watched(
    policy: str,
    requests: Sequence[Playable],
    lab: "Lab",
    settings: DemoSettings,
    console: Console,
    lines: Console,
) -> tuple[PlayedRequest, ...]:
    progress = Progress()
    number = {FLAT: 1, CACHEROUTE: 2}.get(policy, 3)
    title = f"{policy} (pass {number} of {2 if settings.eviction == LRU else 3})"
    places = Places(lab.service_url, {engine.name: engine.address for engine in lab.engines})
    watching = asyncio.create_task(watch(progress, places, title=title, console=console, lines=lines))
    try:
        return await play(
            requests,
            lab.gateway_url,
            speed=settings.speed,
            model=lab.model,
            timeout_s=max(REQUEST_TIMEOUT_S, REQUEST_TIMEOUT_ENGINE_S / settings.speed),
            progress=progress,
        )
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def _wait_for_rates(played: Sequence[PlayedRequest]) -> None:
    """Wait until the service has handed the counts of the pass's last requests to the store."""
    since_last_s = max(request.end_s for request in played) - played[-1].sent_s
    time.sleep(max(0.0, FLUSH_S - since_last_s))


async def _wait_for_plan(lab: "Lab", record: Mapping[str, Any]) -> None:
    """Wait until the service routes by the plan of `record`; raise ServerUnavailable when it does not come to that."""
    if record["decision"] != "published":
        raise ServerUnavailable(f"the planner published nothing after the first pass: decision {record['decision']}")
    try:
        async with asyncio.timeout(PLAN_TIMEOUT_S):
            while True:
                if await _plan_version(lab.service_url) >= record["version"]:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError as exc:
        raise ServerUnavailable(
            f"the service did not take plan {record['version']} within {PLAN_TIMEOUT_S:g} s; its last lines:\n"
            f"{lab.log_tail('service')}"
        ) from exc


async def _picks(service_url: str) -> dict[str, float]:
    return metric_values(await _get(f"{service_url}/metrics"), PICKS)


async def _plan_version(service_url: str) -> int:
    return int(json.loads(await _get(f"{service_url}/table"))["version"])


async def _get(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as client, client.get(url) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        raise ServerUnavailable(f"{url} does not answer: {exc}") from exc
