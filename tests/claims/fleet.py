"""A small fleet with size-aware LRU caches, request by request: what predictions of planner.predict are held against.

It shares nothing with the prediction: Poisson arrivals are drawn, each request goes to one endpoint (the least loaded
target of its key's row, else the better of two drawn), and that endpoint's cache is kept entry by entry. An endpoint
serves one request after the other, prompt tokens that are not cached at the prefill rate, then its output; that is
harsher than continuous batching. TTFT is the wait and the prefill.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.predict import Economics

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outcome:
    """hit_rate: of requests.  token_hit_rate: of prompt tokens.  p99_s: of TTFT.  busy: share of the fleet's time."""

    hit_rate: float
    token_hit_rate: float
    p99_s: float
    busy: float


def simulate(
    rates_rps: Floats,
    sizes: Floats,
    targets: dict[int, tuple[int, ...]],
    *,
    endpoints: int,
    economics: Economics,
    requests: int,
    seed: int,
    thread: tuple[float, float] = (1.0, 0.0),
) -> Outcome:
    """Return what the last 60 % of `requests` met; targets: of a row of the rates, none: P2C over all endpoints.

    thread: requests a conversation (geometric mean), and seconds between them (exponential mean); such arrivals are
    no Poisson process.
    """
    rng = np.random.default_rng(seed)
    keys, times = _arrivals(rng, rates_rps, requests, *thread)
    firsts = rng.integers(0, endpoints, requests).tolist()
    seconds = rng.integers(1, max(2, endpoints), requests).tolist()
    size_of = sizes.tolist()
    room, fill = economics.cache_tokens_per_endpoint, economics.unique_tokens + economics.output_tokens
    decode_s = economics.output_tokens / economics.decode_tokens_per_s
    caches: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(endpoints)]
    used = [0.0] * endpoints
    queues: list[deque[float]] = [deque() for _ in range(endpoints)]
    free_at = [0.0] * endpoints
    first_counted = int(requests * 0.4)
    hits, found, asked, busy = 0, 0.0, 0.0, 0.0
    ttfts: list[float] = []

    def load(endpoint: int, now: float) -> int:
        queue = queues[endpoint]
        while queue and queue[0] <= now:
            queue.popleft()
        return len(queue)

    for i in range(requests):
        key, now = keys[i], times[i]
        planned = targets.get(key)
        if planned is None:
            one = firsts[i]
            other = (one + seconds[i]) % endpoints
            endpoint = one if load(one, now) <= load(other, now) else other
        elif len(planned) == 1:
            endpoint = planned[0]
            load(endpoint, now)
        else:
            # In another order each time: the first would take all ties, and most of an idle fleet's requests.
            turn = i % len(planned)
            endpoint = min(planned[turn:] + planned[:turn], key=lambda e: load(e, now))
        cache, size = caches[endpoint], size_of[key]
        hit = key in cache
        if hit:
            cache.move_to_end(key)
        else:
            cache[key] = size
            used[endpoint] += size
        if fill:
            cache[-1 - i] = fill
            used[endpoint] += fill
        while used[endpoint] > room:
            used[endpoint] -= cache.popitem(last=False)[1]
        prefill_s = (economics.unique_tokens + (0.0 if hit else size)) / economics.prefill_tokens_per_s
        start = max(now, free_at[endpoint])
        free_at[endpoint] = start + prefill_s + decode_s
        queues[endpoint].append(free_at[endpoint])
        if i >= first_counted:
            hits += hit
            found += size if hit else 0.0
            asked += size + economics.unique_tokens
            busy += prefill_s + decode_s
            ttfts.append(start + prefill_s - now)
    counted = requests - first_counted
    return Outcome(
        hits / counted,
        found / asked,
        float(np.percentile(ttfts, 99)),
        busy / endpoints / (times[-1] - times[first_counted]),
    )


def _arrivals(
    rng: np.random.Generator, rates_rps: Floats, requests: int, mean: float, gap_s: float
) -> tuple[list[int], list[float]]:
    total = float(rates_rps.sum())
    lengths = rng.geometric(1 / mean, requests)
    keys = np.repeat(rng.choice(len(rates_rps), requests, p=rates_rps / total), lengths)
    starts = np.repeat(np.cumsum(rng.exponential(mean / total, requests)), lengths)
    if mean == 1:
        return keys.tolist(), starts.tolist()
    # Within a conversation the gaps add up from its start.
    gaps = rng.exponential(gap_s, len(keys))
    first = np.repeat(np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    sums = np.cumsum(gaps)
    times = starts + sums - sums[first]
    order = np.argsort(times, kind="stable")[:requests]
    return keys[order].tolist(), times[order].tolist()
