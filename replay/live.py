"""Shows a pass while it runs: endpoints, in flight, hit rate, plan version, progress.

On a terminal it is a panel redrawn twice a second; elsewhere one line every 5 s on standard error. Everything shown
comes from the parts' own HTTP ports; a part that does not answer is shown as a dash and disturbs nothing. When an
engine changes its eviction policy, a line says so, with the engine's own reason.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from replay.player import Progress

POLL_S = 0.5
LINE_S = 5.0
ANSWER_TIMEOUT_S = 2.0
QUERIES = "vllm:prefix_cache_queries_total"
HITS = "vllm:prefix_cache_hits_total"
RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
POLICY = "wakman_policy"
SWITCHES = "wakman_switches_total"
DASH = "–"


@dataclass(frozen=True, slots=True)
class Places:
    """Where to look: the service's HTTP port, and per endpoint name its `ip:port`."""

    service_url: str
    engines: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """One endpoint at one moment; None where its server did not answer."""

    name: str
    ready: bool | None
    inflight: int | None
    running: float | None
    waiting: float | None
    hit_rate: float | None
    served: int
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment; None where the service did not answer. plan_keys: how many the plan admits.

    news: one line for each change of an eviction policy since the last look.
    """

    rows: tuple[Row, ...]
    plan_version: int | None
    plan_keys: int | None
    news: tuple[str, ...] = ()


@dataclass(slots=True)
class Watch:
    """Reads a fleet over one pass; counters of engines count from the first reading on."""

    client: aiohttp.ClientSession
    places: Places
    progress: Progress
    _first: dict[str, tuple[float, float]] = field(default_factory=dict)
    _switches: dict[str, int] = field(default_factory=dict)

    async def look(self) -> Snapshot:
        """Read all ports at once; within `ANSWER_TIMEOUT_S`, whoever does not answer."""
        url, engines = self.places.service_url, self.places.engines
        fleet, table, *pages = await asyncio.gather(
            self._json(f"{url}/fleet"),
            self._json(f"{url}/table"),
            *(self._text(f"http://{address}/metrics") for address in engines.values()),
        )
        endpoints = {endpoint["name"]: endpoint for endpoint in fleet["endpoints"]} if fleet else {}
        served = Counter(request.served for request in self.progress.played)
        rows = [
            self._row(name, address, endpoints.get(name), page, served)
            for (name, address), page in zip(engines.items(), pages, strict=True)
        ]
        news = [
            item
            for (name, address), page in zip(engines.items(), pages, strict=True)
            for item in await self._news(name, address, page)
        ]
        version, keys = (table["version"], table["keys"]) if table else (None, None)
        return Snapshot(tuple(rows), version, keys, tuple(news))

    async def _news(self, name: str, address: str, page: str) -> list[str]:
        """Return a line for each switch of an engine since the last look."""
        if not page:
            return []
        count = int(metric_sum(page, SWITCHES))
        fresh = count - self._switches.setdefault(name, count)
        self._switches[name] = count
        told = await self._json(f"http://{address}/v1/wakman/history") if fresh > 0 else None
        entries = told["engines"][0]["history"][-fresh:] if told else ()
        return [f"{name} evicts by {entry['to']} now, not by {entry['from']}: {entry['why']}" for entry in entries]

    def _row(
        self, name: str, address: str, endpoint: dict[str, Any] | None, page: str, served: Counter[str | None]
    ) -> Row:
        hit_rate = None
        if page:
            now = metric_sum(page, QUERIES), metric_sum(page, HITS)
            queries, hits = (
                value - before for value, before in zip(now, self._first.setdefault(name, now), strict=True)
            )
            hit_rate = hits / queries if queries > 0 else None
        return Row(
            name=name,
            ready=endpoint["ready"] if endpoint else None,
            inflight=endpoint["inflight"] + endpoint["inflight_elsewhere"] if endpoint else None,
            running=metric_sum(page, RUNNING) if page else None,
            waiting=metric_sum(page, WAITING) if page else None,
            hit_rate=hit_rate,
            served=served[address],
            policy=_live_policy(page),
        )

    async def _json(self, url: str) -> dict[str, Any] | None:
        try:
            async with self.client.get(url) as response:
                document: dict[str, Any] = await response.json()
                return document
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def _text(self, url: str) -> str:
        try:
            async with self.client.get(url) as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return ""


async def watch(progress: Progress, places: Places, *, title: str, console: Console, lines: Console) -> NoReturn:
    """Show the pass until cancelled: a panel on `console` when that is a terminal, else lines on `lines`."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        eye = Watch(client, places, progress)
        if not console.is_terminal:
            await eye.look()  # the engines' counters begin here
            while True:
                await asyncio.sleep(LINE_S)
                snapshot = await eye.look()
                for item in (*snapshot.news, line(title, progress, snapshot)):
                    lines.print(item, highlight=False, soft_wrap=True)
        started_s = time.monotonic()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while True:
                snapshot = await eye.look()
                for item in snapshot.news:
                    live.console.print(item, highlight=False, soft_wrap=True)
                live.update(panel(title, progress, snapshot, time.monotonic() - started_s), refresh=True)
                await asyncio.sleep(POLL_S)


def line(title: str, progress: Progress, snapshot: Snapshot) -> str:
    """Return the state in one line, for logs."""
    inflight = [row.inflight for row in snapshot.rows if row.inflight is not None]
    return (
        f"{title}: {progress.done}/{progress.total} done, {sum(inflight) if inflight else DASH} in flight, "
        f"{progress.failed} failed, hit rate {_percent(_hit_rate(progress))}, plan {_plan(snapshot)}"
    )


def panel(title: str, progress: Progress, snapshot: Snapshot, elapsed_s: float) -> RenderableType:
    """Return the state as a table of endpoints under a progress bar."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("endpoint")
    for name in ("ready", "in flight", "running", "waiting", "hit rate", "served", "eviction"):
        table.add_column(name, justify="left" if name == "eviction" else "right")
    for row in snapshot.rows:
        ready = DASH if row.ready is None else "yes" if row.ready else "[red]no[/red]"
        counts = (DASH if value is None else f"{value:.0f}" for value in (row.inflight, row.running, row.waiting))
        table.add_row(row.name, ready, *counts, _percent(row.hit_rate), str(row.served), row.policy or DASH)
    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, progress.total), completed=progress.done, width=40)
    head.add_row(Text(title, style="bold"), bar, f"{progress.done}/{progress.total}", f"{elapsed_s:.0f} s")
    failed = f"[red]{progress.failed}[/red]" if progress.failed else "0"
    foot = f"hit rate {_percent(_hit_rate(progress))} of prompt tokens · failed {failed} · plan {_plan(snapshot)}"
    return Group(head, table, Text.from_markup(foot))


def metric_sum(page: str, name: str) -> float:
    """Return the sum over all label sets of one metric of a Prometheus text page, 0 when it has none."""
    return sum(metric_values(page, name).values())


def metric_values(page: str, name: str) -> dict[str, float]:
    """Return label text (`reason="cold"`, empty without labels) -> value of one metric of a Prometheus text page."""
    values: dict[str, float] = {}
    for sample in page.splitlines():
        if sample.startswith(name) and sample[len(name) : len(name) + 1] in {"{", " "}:
            series, _, value = sample.rpartition(" ")
            values[series[len(name) :].strip("{} ")] = float(value)
    return values


def _live_policy(page: str) -> str | None:
    """Return which eviction policy an engine's metrics call live."""
    for labels, value in metric_values(page, POLICY).items():
        if value and (found := re.search(r'policy="([^"]*)"', labels)):
            return found[1]
    return None


def _hit_rate(progress: Progress) -> float | None:
    return progress.cached_tokens / progress.prompt_tokens if progress.prompt_tokens else None


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f} %"


def _plan(snapshot: Snapshot) -> str:
    if snapshot.plan_version is None:
        return DASH
    return f"{snapshot.plan_version} ({snapshot.plan_keys} keys)" if snapshot.plan_version else "none"
