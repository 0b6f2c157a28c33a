"""Measures how much one endpoint bears: an open loop of one tenant's traffic at rising loads, until the SLO breaks.

1. Requests come as Poisson arrivals, answered or not those before. Their prompts share one prefix, warm after the first
   request, and end in words that no other request had (planner.target).
2. Each step's first `WARM_UP` is left out. A request that fails came too late. A step that is clearly broken is cut
   short, and what is in flight is closed; the next step begins when the endpoint is idle.
3. A step in which the client sent late, by more than `LAG` of the TTFT SLO for 1 in 100 requests, says nothing about
   the endpoint and is left out.
4. planner.ladder chooses the loads and reads the crossing; planner.capacity reads the cache from /metrics.
5. TTFT is from sending to the first text. ITL is a request's mean gap between tokens, (end - first token) / (tokens -
   1): engines put several tokens into one event when they are busy, so gaps between events are no gaps of tokens.
6. A simulated engine that runs faster than time is measured in its own seconds; only `max_minutes` is ours.

However it ends, nothing is left in flight.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
import numpy as np

from planner.capacity import Page
from planner.ladder import BROKEN, Limits, Next, Step, next_step
from planner.target import ANSWER_TIMEOUT_S, Target, Traffic
from replay.player import PlayedRequest, Progress
from service.errors import InvalidInput

WARM_UP = 0.1
LAG = 0.1
PROBES = 4
# The least length of a step, in times that one request takes by itself, and in SLOs: at a load 10 % too high, a queue
# needs 10 SLOs to grow to one.
LEAST_LONG = 10
# In times that one request takes by itself: what is kept for the last requests of a step to end, and when a request
# counts as failed (the SLO added).
ENDS_LONG = 3
GIVEN_UP_LONG = 30
CUT_AT_LEAST = 20
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class CalibrateSettings:
    """What is measured and how long; slos: seconds by name, `ttft` always among them."""

    endpoint: str
    slos: Mapping[str, float]
    prefix_tokens: int
    unique_tokens: int
    output_tokens: int
    max_rps: float
    max_minutes: float
    headroom: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidInput that lists every fault."""
        faults = []
        url = urlsplit(self.endpoint)
        if url.scheme not in {"http", "https"} or not url.hostname or url.path.strip("/") or url.query:
            faults.append(f"--endpoint {self.endpoint!r} is not http://HOST:PORT")
        for name, limit_s in self.slos.items():
            if not 0 < limit_s < float("inf"):
                faults.append(f"--slo-{name}-p99-s {limit_s:g} is not a finite time above 0")
        for option, value, least in (
            ("--prefix-tokens", self.prefix_tokens, 1),
            ("--unique-tokens", self.unique_tokens, 1),
            ("--output-tokens", self.output_tokens, 2 if "itl" in self.slos else 1),
            ("--seed", self.seed, 0),
        ):
            if value < least:
                faults.append(f"{option} {value} is below {least}")
        for option, amount in (("--max-rps", self.max_rps), ("--max-minutes", self.max_minutes)):
            if not 0 < amount < float("inf"):
                faults.append(f"{option} {amount:g} is not a finite number above 0")
        if not 0 <= self.headroom < 1:
            faults.append(f"--headroom {self.headroom:g} is not at least 0 and below 1")
        if faults:
            raise InvalidInput("; ".join(faults), "correct the options")


@dataclass(frozen=True, slots=True)
class Measured:
    """A step and what was seen around it; kv_usage: mean while it ran, None: not exported."""

    step: Step
    sent: int
    failed: int
    failures: tuple[str, ...]
    prompt_tokens: float
    kv_usage: float | None
    before: Page | None
    after: Page | None
    span_s: float


@dataclass(slots=True)
class Calibration:
    """All that was measured; `alone_s`: what one request takes on an idle endpoint; ended: why the ladder did."""

    settings: CalibrateSettings
    model: str
    engine_version: str | None
    first: Page | None
    alone_ttft_s: float
    alone_s: float
    run_id: str
    steps: list[Measured] = field(default_factory=list)
    timed_out: bool = False
    notes: list[str] = field(default_factory=list)


async def calibrate(settings: CalibrateSettings, told: Callable[[Measured], None]) -> Calibration:
    """Measure; `told` is called after each step. Raise ServerUnavailable when the endpoint cannot be reached.

    Cancelling it closes what is in flight.
    """
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(settings.endpoint.rstrip("/"), timeout=timeout) as client:
        target = Target(client, settings.endpoint.rstrip("/"))
        traffic = Traffic(settings.prefix_tokens, settings.unique_tokens, settings.output_tokens, settings.seed)
        deadline = asyncio.get_running_loop().time() + settings.max_minutes * 60
        try:
            async with asyncio.timeout_at(deadline):
                found = await _begin(target, traffic, settings)
        except TimeoutError:
            raise InvalidInput(
                f"the first requests did not end within --max-minutes {settings.max_minutes:g}", "allow more time"
            ) from None
        await _climb(found, target, traffic, deadline, told)
        return found


async def _begin(target: Target, traffic: Traffic, settings: CalibrateSettings) -> Calibration:
    """Find out whom we measure, warm the prefix, and time one request by itself."""
    target.model, longest = await target.served()
    length = settings.prefix_tokens + settings.unique_tokens + settings.output_tokens
    if longest is not None and length > longest:
        raise InvalidInput(
            f"prefix, unique part and answer are {length} tokens, but {target.url} takes {longest}",
            "lower --prefix-tokens, --unique-tokens or --output-tokens",
        )
    first = await target.page()
    notes = []
    if first is None:
        notes.append("/metrics does not answer: nothing is known of the cache")
    elif first.running or first.waiting:
        notes.append("the endpoint was serving others when the run began: what they take is missing in the result")
    target.speed = first.speed if first else 1.0
    played = [await target.one(traffic.request(0.0)) for _ in range(PROBES)]
    # The first one warmed the prefix; of the others the quickest had nobody beside it.
    alone_s = min(request.end_s - request.sent_s for request in played[1:]) * target.speed
    alone_ttft_s = min(request.ttft_s or 0.0 for request in played[1:]) * target.speed
    target.timeout_s = GIVEN_UP_LONG * (alone_s + settings.slos["ttft"])
    return Calibration(
        settings=settings,
        model=target.model,
        engine_version=await target.version(),
        first=first,
        alone_ttft_s=alone_ttft_s,
        alone_s=alone_s,
        run_id=traffic.run_id,
        notes=notes,
    )


async def _climb(
    found: Calibration, target: Target, traffic: Traffic, deadline: float, told: Callable[[Measured], None]
) -> None:
    """Take steps until the ladder has enough or the time is over."""
    loop = asyncio.get_running_loop()
    slos = found.settings.slos
    limits = Limits(
        start_rps=min(found.settings.max_rps, 0.5 / found.alone_s),
        max_rps=found.settings.max_rps,
        least_s=LEAST_LONG * max(found.alone_s, slos["ttft"]),
        total_s=found.settings.max_minutes * 60 * target.speed,
    )
    while True:
        left_s = (deadline - loop.time()) * target.speed - ENDS_LONG * found.alone_s
        asked = next_step([measured.step for measured in found.steps], slos, limits, left_s)
        if asked is None:
            found.timed_out = left_s < limits.least_s
            return
        try:
            async with asyncio.timeout_at(deadline):
                measured = await _step(target, traffic, slos, asked)
                found.steps.append(measured)
                told(measured)
                if measured.failed == measured.sent:
                    await target.served()
                await target.idle()
        except TimeoutError:
            found.timed_out = True
            return


async def _step(target: Target, traffic: Traffic, slos: Mapping[str, float], asked: Next) -> Measured:
    """Take one step; it is cut short once it is clearly broken."""
    loop, speed = asyncio.get_running_loop(), target.speed
    before = await target.page()
    began = loop.time()
    probes = traffic.step(asked.rate_rps, asked.duration_s)
    progress, usages = Progress(), list[float]()
    seen = over = 0
    cut = False
    async with _running(target.play(probes, progress)) as playing:
        while not playing.done() and not cut:
            await asyncio.wait((playing,), timeout=min(POLL_S, asked.duration_s / speed / 10))
            over += sum(_over(request, slos, speed) for request in progress.played[seen:])
            seen = progress.done
            cut = over > max(CUT_AT_LEAST, BROKEN * len(probes)) and not playing.done()
            if progress.sent < len(probes):
                page = await target.page()
                if page is not None and page.kv_usage is not None:
                    usages.append(page.kv_usage)
    span_s = (loop.time() - began) * speed
    after = await target.page()
    played = sorted(progress.played, key=lambda request: request.scheduled_s)
    kept = [r for r in played if r.scheduled_s * speed >= WARM_UP * asked.duration_s] or played
    lag_p99_s = float(np.quantile([r.lag_s for r in played], 0.99)) * speed if played else 0.0
    step = Step(
        rate_rps=asked.rate_rps,
        duration_s=asked.duration_s,
        latencies_s={name: np.array([_latency_s(r, name, speed) for r in kept]) for name in slos},
        lag_p99_s=lag_p99_s,
        late=lag_p99_s > LAG * slos["ttft"],
        cut=cut,
    )
    whole = [request.prompt_tokens for request in played if not request.failure]
    return Measured(
        step=step,
        sent=progress.sent,
        failed=progress.failed,
        failures=tuple(dict.fromkeys(r.failure for r in played if r.failure))[:3],
        prompt_tokens=sum(whole) / len(whole) if whole else 0.0,
        kv_usage=sum(usages) / len(usages) if usages else None,
        before=before,
        after=after,
        span_s=span_s,
    )


@contextlib.asynccontextmanager
async def _running(work: Coroutine[None, None, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run it beside the block, and end it with the block, whatever ends that."""
    task = asyncio.create_task(work)
    try:
        yield task
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.wait((task,))


def _latency_s(request: PlayedRequest, name: str, speed: float) -> float:
    """Return what the SLO of that name bounds, in the endpoint's seconds; infinite for a request that failed."""
    if request.ttft_s is None or request.first_token_s is None:
        return float("inf")
    if name == "ttft":
        return request.ttft_s * speed
    return (request.end_s - request.first_token_s) * speed / max(1, request.completion_tokens - 1)


def _over(request: PlayedRequest, slos: Mapping[str, float], speed: float) -> bool:
    return any(_latency_s(request, name, speed) > limit_s for name, limit_s in slos.items())
