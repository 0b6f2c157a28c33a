"""Five gateways in front of the same simulated engines: CPU a request, added latency, requests/s a core, hit rate.

One run; `gateways.py` says what each gateway is. In every round the gateways take turns, in rotating order, each
started afresh and alone:

1. Trace: the engines' prefix caches are emptied, then the second half of the shipped trace excerpt is played as
   recorded. Hit rate = tokens found over tokens looked up, from the engines' own counters. TTFT is in engine seconds.
2. Fixed rate: 200 requests/s through the gateway and, alternating with them, 200/s straight to the engines, at fixed
   times whatever the answers do: prompts of 128 tokens, one token back. Added latency is the difference of the two
   quantiles. CPU of the routing processes counts the gateway's requests only, background work included.

The plan of ours comes from the rates of the FIRST half of the excerpt, so it has not seen what it is judged on; that
half is not played. Nobody's engines or trees are warm when the trace begins.

Fair to the peer: its recommended settings, quiet logs; it reads every body, so its prompts are real text in which
conversations share prefixes word by word (`replay/workload.py`). Its CPU grows with the prompt: the trace's are long
(14,000 tokens on average), the fixed rate's are short, and both figures stand here.
"""

import argparse
import asyncio
import csv
import gc
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
from gateways import ECHO, ENVOY, NAMES, SGLANG, Gateway, Site, environment, install_sglang, process, running
from stats import machine, quantile, spread

from replay.demo import EXCERPT
from replay.lab import CLI, HOST, KEY_HEADER, MODEL
from replay.live import HITS, QUERIES, metric_sum
from replay.player import play
from replay.processes import Process, answers_http, answers_ping, free_ports, stop_together, wait_ready
from replay.programs import valkey_program
from replay.traces import read_trace
from replay.workload import PlayRequest, build_workload, prompt_text

ENGINES, SPEED, TENANTS, RATE_RPS = 6, 12.0, 64, 200
SHORT_PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Turn:
    """What one gateway did in one round. cpu_ms, by part, and latencies, ms, are those of the fixed rate."""

    hit_rate: float
    ttft_p50_s: float
    trace_cpu_ms: float
    cpu_ms: dict[str, float]
    p50_ms: float
    p99_ms: float
    direct_p50_ms: float
    direct_p99_ms: float
    failed: int
    bypassed: int
    lag_s: float

    @property
    def total_ms(self) -> float:
        """CPU of all routing processes a request."""
        return sum(self.cpu_ms.values())


def halves(wall_s: float) -> tuple[tuple[PlayRequest, ...], tuple[PlayRequest, ...]]:
    """Return the excerpt's first half, whole, and as much of its second half as fits; times from the half's start."""
    whole = build_workload(read_trace(EXCERPT), tenants=TENANTS, duration_s=1e9, rate_rps=None, seed=0)
    middle = len(whole) // 2
    start_s = whole[middle].at_s
    second = tuple(replace(r, at_s=r.at_s - start_s) for r in whole[middle:] if r.at_s - start_s < wall_s * SPEED)
    return whole[:middle], second


def publish_plan(site: Site, before: Sequence[PlayRequest]) -> None:
    """Build a plan from the rates of `before` and publish it, with the commands that an operator has."""
    span_s = before[-1].at_s / SPEED
    rates, names, plan = (site.folder / name for name in ("rates.csv", "endpoints", "plan"))
    with rates.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("key", "rate_rps"))
        table.writerows((key, count / span_s) for key, count in Counter(r.key for r in before).items())
    names.write_text("".join(f"engine-{i}\n" for i in range(ENGINES)))
    replica_cap = f"{len(before) / span_s / ENGINES:g}"
    build = ["plan", "build", "--rates", str(rates), "--endpoints", str(names), "--slots", str(TENANTS)]
    publish = ["plan", "publish", str(plan), "--redis", site.redis, "--pool", site.pool]
    for command in ([*build, "--replica-cap", replica_cap, "--out", str(plan)], publish):
        subprocess.run([*CLI, *command], check=True, capture_output=True, env=environment(), timeout=60)


async def prefix_counters(site: Site) -> tuple[float, float]:
    """Return tokens looked up and tokens found, of all engines so far."""
    queries = hits = 0.0
    async with aiohttp.ClientSession() as client:
        for engine in site.engines:
            async with client.get(f"http://{engine}/metrics") as response:
                page = await response.text()
            queries, hits = queries + metric_sum(page, QUERIES), hits + metric_sum(page, HITS)
    return queries, hits


async def empty_caches(site: Site) -> None:
    """Empty every engine's prefix cache."""
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        for engine in site.engines:
            async with client.post(f"http://{engine}/reset_prefix_cache"):
                pass


def short_bodies(requests: Sequence[PlayRequest]) -> list[tuple[str, bytes]]:
    """Return (key, body) of short requests, each with text of its own conversation."""
    bodies = []
    for request in requests:
        text = prompt_text(request.blocks[-1:], SHORT_PROMPT_TOKENS)
        bodies.append((request.key, json.dumps({"model": MODEL, "prompt": text, "max_tokens": 1}).encode()))
    return bodies


async def fixed_rate(
    gateway: Gateway, site: Site, bodies: Sequence[tuple[str, bytes]], seconds: float
) -> tuple[list[float], list[float], int]:
    """Return latencies in ms through the gateway and straight to the engines, and how many requests failed."""
    through: list[float] = []
    direct: list[float] = []
    failed = 0
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:

        async def one(url: str, number: int, latencies: list[float]) -> None:
            nonlocal failed
            key, body = bodies[number % len(bodies)]
            headers = {KEY_HEADER: key, "content-type": "application/json"}
            began = time.perf_counter()
            try:
                async with client.post(f"{url}/v1/completions", data=body, headers=headers) as response:
                    await response.read()
                    failed += response.status != 200
            except (aiohttp.ClientError, TimeoutError):
                failed += 1
            latencies.append((time.perf_counter() - began) * 1e3)

        start, gap = time.perf_counter(), 1 / RATE_RPS / 2
        async with asyncio.TaskGroup() as group:
            for i in range(int(seconds * RATE_RPS)):
                for step, (url, latencies) in enumerate(
                    ((gateway.url, through), (f"http://{site.engines[i % ENGINES]}", direct))
                ):
                    await asyncio.sleep(max(0.0, start + (2 * i + step) * gap - time.perf_counter()))
                    group.create_task(one(url, i, latencies))
    return through, direct, failed


async def take_turn(gateway: Gateway, site: Site, trace: Sequence[PlayRequest], rate_s: float) -> Turn:
    """Measure one gateway."""
    await empty_caches(site)
    queries, hits = await prefix_counters(site)
    before = sum(gateway.cpu_s().values())
    played = await play(trace, gateway.url, speed=SPEED, model=MODEL, timeout_s=90)
    trace_cpu_s = sum(gateway.cpu_s().values()) - before
    queries_after, hits_after = await prefix_counters(site)
    bodies = short_bodies(trace)
    await fixed_rate(gateway, site, bodies, 1)  # connections, first calls
    at_start = gateway.cpu_s()
    through, direct, failed = await fixed_rate(gateway, site, bodies, rate_s)
    at_end = gateway.cpu_s()
    return Turn(
        hit_rate=(hits_after - hits) / (queries_after - queries),
        ttft_p50_s=quantile([r.ttft_s * SPEED for r in played if r.ttft_s is not None], 0.5),
        trace_cpu_ms=trace_cpu_s / len(played) * 1e3,
        cpu_ms={part: (at_end[part] - at_start[part]) / len(through) * 1e3 for part in at_end},
        p50_ms=quantile(through, 0.5),
        p99_ms=quantile(through, 0.99),
        direct_p50_ms=quantile(direct, 0.5),
        direct_p99_ms=quantile(direct, 0.99),
        failed=failed + sum(r.failure is not None for r in played),
        bypassed=gateway.bypassed(),
        lag_s=max(r.lag_s for r in played),
    )


def report(turns: dict[str, list[Turn]]) -> None:
    """Print min / median / max of every figure, ratios paired round by round."""
    for title, figure, digits in (
        ("CPU at 200/s, ms a request, all routing processes", lambda t: t.total_ms, 3),
        ("requests/s a core at that CPU", lambda t: 1000 / t.total_ms, 0),
        ("p50 at 200/s, ms added to going straight to the engine", lambda t: t.p50_ms - t.direct_p50_ms, 2),
        ("p99 at 200/s, ms added", lambda t: t.p99_ms - t.direct_p99_ms, 2),
        ("straight to the engine beside it, p50, ms", lambda t: t.direct_p50_ms, 2),
        ("straight to the engine beside it, p99, ms", lambda t: t.direct_p99_ms, 2),
        ("CPU on the trace, ms a request, all routing processes", lambda t: t.trace_cpu_ms, 3),
        ("token hit rate on the trace, %", lambda t: 100 * t.hit_rate, 1),
        ("TTFT p50 on the trace, engine seconds", lambda t: t.ttft_p50_s, 2),
    ):
        print(title)
        for name, of in turns.items():
            print(f"  {name:14} {spread([figure(t) for t in of], digits)}")
    print("parts of the CPU at 200/s, ms a request")
    for name, of in turns.items():
        parts = (f"{part} {spread([t.cpu_ms[part] for t in of], 3)}" for part in of[0].cpu_ms)
        print(f"  {name:14} {'   '.join(parts)}")
    for other in (ENVOY, ECHO):
        print(f"CPU at 200/s over that of {other!r}, paired")
        for name, of in turns.items():
            print(f"  {name:14} {spread([t.total_ms / o.total_ms for t, o in zip(of, turns[other], strict=True)])}")
    print("requests that failed / that Envoy did not wait for / latest sending on the trace, s")
    for name, of in turns.items():
        failed, bypassed = sum(t.failed for t in of), sum(t.bypassed for t in of)
        print(f"  {name:14} {failed} / {bypassed} / {max(t.lag_s for t in of):.2f}")


def rounds_of(
    names: list[str],
    site: Site,
    valkey: Process,
    trace: Sequence[PlayRequest],
    rounds: int,
    rate_s: float,
    limit_s: float,
) -> dict[str, list[Turn]]:
    """Return each gateway's turns; fewer rounds when the next one would not end within the limit."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    began = time.monotonic()
    for number in range(rounds):
        round_began = time.monotonic()
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with running(name, site, valkey) as gateway:
                gc.collect()
                turns[name].append(asyncio.run(take_turn(gateway, site, trace, rate_s)))
        if number + 1 < rounds and 2 * time.monotonic() - round_began - began > limit_s:
            print(f"stopped after {number + 1} of {rounds} rounds: {limit_s:g} s do not bear another one")
            break
    return turns


def main() -> None:
    """Start engines and Valkey, let the gateways take turns, print the comparison."""
    parser = argparse.ArgumentParser(description="five gateways in front of the same simulated engines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace-s", type=float, default=22, help="wall seconds of the trace a turn (whole half: 22)")
    parser.add_argument("--rate-s", type=float, default=6, help="wall seconds at 200 requests/s a turn")
    parser.add_argument("--limit-s", type=float, default=570, help="no round is begun that would end later")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 5 + 2 s a turn: about two minutes")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.trace_s, options.rate_s = 2, 5, 2
    missing = install_sglang()
    names = [name for name in NAMES if not (missing and name == SGLANG)]
    if missing:
        print(f"without {SGLANG}, which cannot be installed: {missing}")
    before, trace = halves(options.trace_s)
    with tempfile.TemporaryDirectory() as folder:
        redis, *engines = (f"{HOST}:{port}" for port in free_ports(1 + ENGINES))
        site = Site(Path(folder), tuple(engines), f"redis://{redis}/0", "bench")
        command = [str(valkey_program()), "--bind", HOST, "--port", redis.rpartition(":")[2]]
        valkey = process(site, "valkey", [*command, "--save", "", "--appendonly", "no"], lambda: answers_ping(redis))
        parts = [valkey, *(engine(site, i, address) for i, address in enumerate(engines))]
        try:
            for part in parts:
                part.start()
            wait_ready(parts, timeout_s=60)
            publish_plan(site, before)
            turns = rounds_of(names, site, valkey, trace, options.rounds, options.rate_s, options.limit_s)
        finally:
            stop_together(parts)
    print(f"{len(trace)} requests of the trace a turn, then {RATE_RPS}/s for {options.rate_s:g} s ({machine()})")
    print(f"min / median / max of {len(turns[ENVOY])} rounds")
    report(turns)


def engine(site: Site, number: int, address: str) -> Process:
    """Return a simulated engine, not started."""
    command = [*CLI, "sim-engine", "--listen", address, "--name", f"engine-{number}", "--model", MODEL]
    command += ["--speed", f"{SPEED:g}", "--drain-s", "1"]
    return process(site, f"engine-{number}", command, lambda: answers_http(address, "/health"))


if __name__ == "__main__":
    main()
