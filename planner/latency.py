"""p99 of TTFT as the engines themselves measure it, and what it is held against. Pure.

1. An engine's page holds a histogram of its requests since it began, `vllm:time_to_first_token_seconds`. What it
   counted between two pages is their difference, bucket by bucket, all models and ranks behind its port together.
2. An engine without an earlier page adds nothing yet. One that began anew in between (another `_created`, or a count
   that fell) adds what its new page holds.
3. The differences of all engines are added up until they hold `LEAST_REQUESTS`; p99 is then read from the bucket that
   holds it, its requests spread evenly over it, and a new window begins. So it does with each plan that is published:
   no window holds requests of two.
4. What a p99 is held against follows what is measured with a half-life of an hour, as the rates do: it is that of
   Flat-LB, or of the plans before, and takes on the present one by and by. Slow change leaves no envelope, a jump does.
5. A p99 below the SLO, or below `QUICK_S`, is as good as that.
6. At more than `LOADED` times the requests that each engine had when it was learnt, a p99 is held against nothing:
   the load may be what raises it.

Source: ours; 3 is how Prometheus reads a histogram.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

TTFT = "vllm:time_to_first_token_seconds"
CACHE = "vllm:cache_config_info"
# Chance moves the p99 of so many by some 7 %, of 200 by 15 %.
LEAST_REQUESTS = 1000
HALF_LIFE_S = 3600.0
QUICK_S = 0.1
LOADED = 1.1
QUANTILE = 0.99


@dataclass(frozen=True, slots=True)
class EnginePage:
    """What one answer of /metrics says.

    counts: requests in each bucket by its upper bound, s, since `born` (unix s; 0: not told).  cache_tokens: KV blocks
    times block size; None: not told.
    """

    counts: Mapping[float, float]
    born: float = 0.0
    cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """One window. p99_s: of TTFT.  requests: in it.  load_rps: requests/s of one engine, the mean; 0: not known."""

    p99_s: float
    requests: float
    load_rps: float


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of p99 at unix s `at_s`, and at which load; see `Measured`."""

    at_s: float
    p99_s: float
    load_rps: float


def read_page(text: str) -> EnginePage:
    """Return what a Prometheus page says; raise ValueError for one that says it wrongly."""
    lines = [line for line in text.splitlines() if line.startswith((TTFT, CACHE))]
    samples = [s for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    born = [sample.value for sample in samples if sample.name == f"{TTFT}_created"]
    if not all(map(math.isfinite, born)):
        raise ValueError(f"{TTFT}_created is not finite")
    return EnginePage(_buckets(samples), math.fsum(born), _cache_tokens(samples))


def counted_since(before: EnginePage, after: EnginePage) -> dict[float, float]:
    """Return the requests in each bucket between two pages of one engine: rules 1 and 2."""
    fell = any(after.counts.get(bound, 0.0) < count for bound, count in before.counts.items())
    if fell or before.born != after.born:
        return dict(after.counts)
    return {bound: count - before.counts.get(bound, 0.0) for bound, count in after.counts.items()}


def quantile(counts: Mapping[float, float], share: float = QUANTILE) -> float | None:
    """Return where `share` of the requests lie below, s, the last finite bound if beyond; None without any.

    counts: in each bucket by its upper bound, not cumulative.
    """
    rank, below, low = share * math.fsum(counts.values()), 0.0, 0.0
    for bound in sorted(bound for bound, count in counts.items() if count > 0 or not math.isinf(bound)):
        count = counts[bound]
        if count > 0 and below + count >= rank:
            if math.isinf(bound):
                return low or None
            return min(bound, low + (bound - low) * max(0.0, rank - below) / count)
        below += count
        low = low if math.isinf(bound) else bound
    # Sums of floats may miss the rank by an ulp.
    return low if below > 0 and low else None


def followed(known: Known | None, measured: Measured, now_s: float) -> Known:
    """Return rule 4: what is known after a window that ended at unix s `now_s`."""
    if known is None:
        return Known(now_s, measured.p99_s, measured.load_rps)
    follow = 1 - 0.5 ** (max(0.0, now_s - known.at_s) / HALF_LIFE_S)
    return Known(
        now_s,
        known.p99_s + (measured.p99_s - known.p99_s) * follow,
        known.load_rps + (measured.load_rps - known.load_rps) * follow,
    )


def baseline_s(known: Known | None, measured: Measured, slo_s: float) -> float | None:
    """Return what a p99 is held against, s: rules 4 to 6; None: nothing. slo_s: 0: there is none."""
    if known is None or measured.load_rps > LOADED * known.load_rps:
        return None
    return max(known.p99_s, slo_s, QUICK_S)


@dataclass(slots=True)
class TtftWindow:
    """The window that is open, and the page of each engine that was read last."""

    least_requests: float = LEAST_REQUESTS
    _pages: dict[str, tuple[EnginePage, float]] = field(default_factory=dict)
    _counts: dict[float, float] = field(default_factory=dict)
    _engine_s: float = 0.0

    def take(self, pages: Mapping[str, EnginePage], at_s: float) -> Measured | None:
        """Take in the pages of one time (s), by engine; return the window that this ends, None: it goes on.

        An engine that is not among them is forgotten: it begins anew when it answers again.
        """
        for engine, page in pages.items():
            if engine in self._pages:
                before, before_s = self._pages[engine]
                self._engine_s += max(0.0, at_s - before_s)
                for bound, count in counted_since(before, page).items():
                    self._counts[bound] = self._counts.get(bound, 0.0) + count
        self._pages = {engine: (page, at_s) for engine, page in pages.items()}
        requests = math.fsum(self._counts.values())
        p99_s = quantile(self._counts) if requests >= self.least_requests else None
        if p99_s is None:
            return None
        measured = Measured(p99_s, requests, requests / self._engine_s if self._engine_s > 0 else 0.0)
        self.begin()
        return measured

    def begin(self) -> None:
        """Leave out what was counted until the pages that were taken last."""
        self._counts, self._engine_s = {}, 0.0


def least_cache_tokens(pages: Iterable[EnginePage]) -> int | None:
    """Return the smallest cache among those that are told, since each plan treats all endpoints alike."""
    return min((page.cache_tokens for page in pages if page.cache_tokens), default=None)


def without_future(known: Known | None, now_s: float) -> Known | None:
    """Return what is known by a clock that says `now_s`: after one that was ahead it follows from here."""
    return known if known is None or known.at_s <= now_s else replace(known, at_s=now_s)


def _buckets(samples: Iterable[Sample]) -> dict[float, float]:
    """Return the buckets of all label sets together, each with the requests that are in it alone."""
    cumulative: dict[tuple[tuple[str, str], ...], dict[float, float]] = {}
    for sample in samples:
        if sample.name == f"{TTFT}_bucket":
            bound = float(sample.labels["le"])
            labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
            if math.isnan(bound) or bound < 0 or not 0 <= sample.value < math.inf:
                raise ValueError(f"{TTFT}_bucket up to {bound} holds {sample.value}")
            cumulative.setdefault(labels, {})[bound] = sample.value
    counts: dict[float, float] = {}
    for series in cumulative.values():
        below = 0.0
        for bound in sorted(series):
            if series[bound] < below:
                raise ValueError(f"{TTFT}_bucket up to {bound} holds fewer than the one below")
            counts[bound] = counts.get(bound, 0.0) + series[bound] - below
            below = series[bound]
    return counts


def _cache_tokens(samples: Iterable[Sample]) -> int | None:
    """Return the tokens of all ranks behind the port, None until each has sized its cache."""
    total = 0
    for sample in samples:
        if sample.name == CACHE:
            try:
                total += int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"])
            except (KeyError, ValueError):  # "None" until then
                return None
    return total if 0 < total < 10**15 else None
