"""What a pool's engines say of themselves from cycle to cycle, and what of it the gate and admission go by.

1. Each cycle reads their pages (planner.scrape): p99 of TTFT (planner.latency), and the size of their caches.
2. A p99 stands until the next window is complete, or another plan is published.
3. What the settings say stands; a size of 0 there is filled in from the pages, the smallest of all engines. A size that
   was once told is kept while engines are silent.
4. τ, by which admission tells keys that stay resident, is the one predicted for Flat-LB when the settings have none but
   cache and prefix are known. A cache that nothing is ever evicted from needs no such threshold.

What it knows goes into the record of each cycle, and the next leader goes on from there.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.admission import Rules
from planner.latency import (
    LEAST_REQUESTS,
    EnginePage,
    Known,
    Measured,
    TtftWindow,
    baseline_s,
    followed,
    least_cache_tokens,
    without_future,
)
from planner.predict import Economics, flat_resident_s, sizes_of
from planner.rates import KeyRates
from planner.record import Engined, Record
from planner.scrape import addresses_of, scrape
from service.published import Ack

Scrape = Callable[[Sequence[str]], Awaitable[dict[str, EnginePage]]]


@dataclass(frozen=True, slots=True)
class Seen:
    """One look. p99_s, baseline_s: of TTFT, None: not measured, or nothing to hold it against.

    cache_tokens: of the smallest cache, None: not told.
    """

    p99_s: float | None = None
    baseline_s: float | None = None
    cache_tokens: int | None = None


class Engines:
    """One planner's view of the engines."""

    def __init__(self, *, slo_s: float, scrape: Scrape = scrape, least_requests: float = LEAST_REQUESTS) -> None:
        """Nothing is read before `look`. slo_s: wanted p99 of TTFT; 0: none."""
        self._slo_s, self._scrape = slo_s, scrape
        self._window = TtftWindow(least_requests)
        self._plan = (0, 0)
        self._known: Known | None = None
        self._measured: Measured | None = None
        self._baseline_s: float | None = None
        self._cache_tokens: int | None = None
        self._answered = self._silent = 0

    def resume(self, left: Mapping[str, float | None]) -> None:
        """Go on from what an earlier planner's record says."""
        at_s, p99_s, load_rps = (left.get(name) for name in ("known_at_s", "known_p99_s", "known_load_rps"))
        if at_s is not None and p99_s is not None and load_rps is not None:
            self._known = Known(at_s, p99_s, load_rps)
        tokens = left.get("cache_tokens")
        self._cache_tokens = None if not tokens else int(tokens)

    async def look(self, acks: Sequence[Ack], endpoints: Sequence[str], now_s: float, plan: tuple[int, int]) -> Seen:
        """Return what is known after asking once; planner.scrape tells how long that takes.

        now_s: unix s.  plan: epoch and version of the one in service.
        """
        addresses = addresses_of(acks, endpoints)
        pages = await self._scrape(addresses) if addresses else {}
        self._answered, self._silent = len(pages), len(addresses) - len(pages)
        self._cache_tokens = least_cache_tokens(pages.values()) or self._cache_tokens
        measured = self._window.take(pages, now_s)
        if plan != self._plan:  # somebody else published: the window is of two plans
            self.begin(plan)
        elif measured is not None:
            known = without_future(self._known, now_s)
            self._measured, self._baseline_s = measured, baseline_s(known, measured, self._slo_s)
            self._known = followed(known, measured, now_s)
        p99_s = self._measured.p99_s if self._measured is not None else None
        return Seen(p99_s, self._baseline_s, self._cache_tokens)

    def begin(self, plan: tuple[int, int]) -> None:
        """Take note that this plan, another one, is in service from the last look on."""
        self._plan = plan
        self._window.begin()
        self._measured = self._baseline_s = None

    def as_record(self) -> Engined:
        """Return what a record holds of it; see `planner.record.Engined`."""
        known, measured = self._known, self._measured
        return {
            "answered": self._answered,
            "silent": self._silent,
            "cache_tokens": self._cache_tokens,
            "p99_ttft_s": None if measured is None else measured.p99_s,
            "requests": None if measured is None else measured.requests,
            "load_rps": None if measured is None else measured.load_rps,
            "baseline_p99_ttft_s": self._baseline_s,
            "known_at_s": None if known is None else known.at_s,
            "known_p99_s": None if known is None else known.p99_s,
            "known_load_rps": None if known is None else known.load_rps,
        }


@dataclass(frozen=True, slots=True)
class Basis:
    """What one cycle goes by, the settings filled in; `*_from`: see `planner.record.Record`."""

    rules: Rules
    economics: Economics
    resident_from: str
    cache_from: str

    def note(self, record: Record) -> None:
        """Write it down."""
        record["resident_s"], record["resident_from"] = self.rules.resident_s, self.resident_from
        record["cache_tokens"], record["cache_from"] = self.economics.cache_tokens_per_endpoint, self.cache_from


async def basis_of(rules: Rules, economics: Economics, seen: Seen, rates: KeyRates, endpoints: Sequence[str]) -> Basis:
    """Return rules 3 and 4; some 10 ms in a thread for 128,824 keys."""
    cache_from = "setting" if economics.cache_tokens_per_endpoint else "engines" if seen.cache_tokens else ""
    if cache_from == "engines":
        economics = replace(economics, cache_tokens_per_endpoint=float(seen.cache_tokens or 0))
    if rules.resident_s:
        return Basis(rules, economics, "setting", cache_from)
    if cache_from and rates.total_rps and sizes_of(rates, economics).any():
        resident_s = await asyncio.to_thread(flat_resident_s, rates, endpoints, economics)
        if math.isfinite(resident_s):
            return Basis(replace(rules, resident_s=resident_s), economics, "predicted", cache_from)
    return Basis(rules, economics, "", cache_from)
