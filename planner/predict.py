"""Predicts what a plan is worth from rates alone: hit rates, work, staleness and warm-up, in prefill tokens.

1. Requests of a key are taken as Poisson arrivals. An endpoint sees λ / k of a planned key that has a copy there (the
   least loaded of k copies takes each, so in the long run each takes its part), and λ / R of every other key.
2. An endpoint keeps a prefix that is used again within τ: of a key that it sees at rate s it hits 1 - exp(-s τ).
3. τ is where what is touched within τ fills the cache (the approximation of Che et al. 2002, with sizes):
   Σ prefix · (1 - exp(-s τ)) + τ · requests/s · (unique + output tokens) = cache tokens. The left side is concave, so
   Newton's method from 0 rises to the root without passing it. Each endpoint has its own τ, since their loads differ.
4. Flat-LB is the empty plan: every key at λ / R on every endpoint.
5. A request costs S = prompt tokens · (1 - H) / prefill rate + output tokens / decode rate of engine time, H the share
   of prompt tokens found in cache. The gain g of a plan is S of Flat-LB over S of the plan, over the plan's bottleneck:
   how many times what it bears is on one endpoint of the work that dispatch cannot send elsewhere; 1 at least.
   (a) Work of planned keys goes to their targets; on the endpoint that has most of it, over the mean of all work.
   (b) Work of keys of one copy is not even steered between targets. Of that an endpoint bears less: the ρ at which 1 %
   of its requests wait longer than `slo_services` requests take without a cache, by
   ρ · exp(-2 (1 - ρ) · wait · E[S] / E[S²]) = 0.01 (M/G/1 in heavy traffic), where a steered one bears `STEERED`.
6. Staleness of a plan against another, in tokens per second: the prefix tokens that it computes anew and the other
   would not, and its excess work less that of the other. Excess is work of planned keys on an endpoint beyond
   `imbalance_max` times the mean of all work: what a fleet that is sized for that bound leaves in its queues, since it
   cannot go elsewhere. It may be below 0.
7. Warm-up of a plan that replaces another: a prefix for each new target of a key that both hold, times the chance
   1 - exp(-λ / k · interval) that it is asked for there before the next plan. Keys that only the new one holds were
   cold before and cost nothing extra. All of that prefix is counted, as if it had always been hit before.

Not modelled: bursts (they raise hits, with a plan and without), prefixes that end in the middle, blocks that running
requests pin, and an engine's own behaviour. The paper's model of one characteristic time missed a real engine by 14.3
points at the median: such figures rank and gate, they promise nothing.

Keys outside the plan are drawn together by rate, `PER_E` classes for each factor e, which changes no hit rate by 1e-3.
About 20 ms for 128,824 keys, 3,840 slots and 30 endpoints. Source: ours, but for rule 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.rates import KeyRates
from service.plan import Plan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PER_E = 20
# Newton's steps; ten or so are usual, and the last ones change nothing.
STEPS = 100
SAME = 1e-9
# How busy simulated fleets are when p99 under power-of-two-choices comes to the SLO of rule 5: 0.89 to 0.98.
STEERED = 0.95
LATE = 0.01
# A key asked for more rarely, once in 30,000 years, is not asked for; and no τ is longer than the second.
LEAST_RPS = 1e-12
FOREVER_S = 1e300


@dataclass(frozen=True, slots=True)
class Economics:
    """What requests weigh and engines bear, and the gate's thresholds; a 0 marked so means: not known.

    cache_tokens_per_endpoint: KV blocks times block size, from the metric `vllm:cache_config_info` (0: not known).
    prefix_tokens: mean shared prefix of a key, for keys whose own is not known (0: not known).
    unique_tokens: mean prompt tokens behind the prefix; with the prefix, the mean of `vllm:request_prompt_tokens`.
    output_tokens: mean of `vllm:request_generation_tokens`; they fill the cache too.
    prefill_tokens_per_s, decode_tokens_per_s: of one engine; the defaults are those of the preset 70b-fp8-tp2 in
    replay.presets: 4,096 tokens in 342 ms, and 64 sequences of 1,000 tokens in steps of 21.2 ms.
    slo_services: p99 of TTFT that is wanted, in times that a request takes by itself without a cache; only what keys of
    one copy may load an endpoint with depends on it.
    plan_interval_s: how long a plan is in service at least, the planner's interval.
    gain_min: least predicted gain (planner.gate, rule 5; docs/planner.md has the measurement behind 1.1).
    gain_band: how far below it a plan in service may fall before it is taken away.
    imbalance_max: highest load over the mean that does not call for another plan.
    stale_min: least staleness that counts, as a share of all prompt tokens.
    p99_ratio_max, active_ratio_max: the envelope (planner.envelope, rule 1).
    back_after_s: how long both are inside the envelope before the plan returns, the first time.
    """

    cache_tokens_per_endpoint: float = 0.0
    prefix_tokens: float = 0.0
    unique_tokens: float = 0.0
    output_tokens: float = 0.0
    prefill_tokens_per_s: float = 12_000.0
    decode_tokens_per_s: float = 3_000.0
    slo_services: float = 8.0
    plan_interval_s: float = 300.0
    gain_min: float = 1.1
    gain_band: float = 0.05
    imbalance_max: float = 1.1
    stale_min: float = 0.002
    p99_ratio_max: float = 1.25
    active_ratio_max: float = 1.5
    back_after_s: float = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """What a plan, or Flat-LB, is expected to do.

    hit_rate: share of requests that find their prefix.  token_hit_rate: share of all prompt tokens found in cache.
    missed_tokens_per_s: prefix tokens computed anew, whole fleet.  prompt_tokens_per_s: all that are asked for.
    service_s: S.  bottleneck: rule 5's.
    loads_rps, work_tokens_per_s (prefill tokens, and decoding in their measure), planned_tokens_per_s (work of planned
    keys alone), resident_s (τ, s; inf: nothing is ever evicted): of each endpoint, length R.
    """

    hit_rate: float
    token_hit_rate: float
    missed_tokens_per_s: float
    prompt_tokens_per_s: float
    service_s: float
    bottleneck: float
    loads_rps: Floats
    work_tokens_per_s: Floats
    planned_tokens_per_s: Floats
    resident_s: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The copies of a plan at today's rates; slot i is a copy of row rows[i] on targets[i] and sees shares_rps[i].

    rows: indexes into the rates.  targets: indexes of today's endpoints.  copies: of each row of the rates, 0: cold.
    Keys without a rate, and targets that are gone, are left out.
    """

    rows: Ints
    targets: Ints
    shares_rps: Floats
    copies: Ints


def slots_of(rates: KeyRates, plan: Plan | None, endpoints: Sequence[str]) -> Slots:
    """Return the plan's copies, none without a plan."""
    copies = np.zeros(len(rates), dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    if plan is None or not len(plan) or not len(rates):
        return Slots(nothing, nothing, np.zeros(0), copies)
    index = {name: i for i, name in enumerate(endpoints)}
    renamed = np.array([index.get(name, -1) for name in plan.endpoints], dtype=np.int64)
    hashes = np.asarray(plan.key_hashes, dtype=np.uint64)
    offsets = np.asarray(plan.target_offsets, dtype=np.int64)
    at = np.minimum(np.searchsorted(rates.key_hashes, hashes), len(rates) - 1)
    known = (rates.key_hashes[at] == hashes) & (rates.rates_rps[at] >= LEAST_RPS)
    rows = np.repeat(np.where(known, at, -1), offsets[1:] - offsets[:-1])
    targets = renamed[np.asarray(plan.targets, dtype=np.int64)]
    there = (rows >= 0) & (targets >= 0)
    rows, targets = rows[there], targets[there]
    copies = np.bincount(rows, minlength=len(rates))
    return Slots(rows, targets, rates.rates_rps[rows] / copies[rows], copies)


def predict(rates: KeyRates, plan: Plan | None, endpoints: Sequence[str], economics: Economics) -> Prediction:
    """Return what `plan` (None: Flat-LB) is expected to do on these endpoints, at least one, at these rates.

    `economics` must know the cache and, unless `rates` do, the prefix.
    """
    return _predict(rates, slots_of(rates, plan, endpoints), len(endpoints), economics)


def _predict(rates: KeyRates, slots: Slots, r: int, economics: Economics) -> Prediction:
    sizes = sizes_of(rates, economics)
    held = sizes[slots.rows]
    cold = _Cold(rates.rates_rps, sizes, (slots.copies == 0) & (rates.rates_rps >= LEAST_RPS), r)
    loads = _on_each(slots, slots.shares_rps, r) + cold.rate
    resident_s = _resident_s(slots, held, cold, loads * (economics.unique_tokens + economics.output_tokens), economics)
    hits = -np.expm1(-slots.shares_rps * resident_s[slots.targets])
    cold_hits = _hits(cold.rates, resident_s)
    # Prefix tokens asked for and found, and requests that found theirs, by endpoint.
    asked = _on_each(slots, slots.shares_rps * held, r) + cold.tokens_rate
    found = _on_each(slots, slots.shares_rps * held * hits, r)
    found = np.minimum(found + cold_hits @ cold.tokens_rates, asked)
    served = float(
        (slots.shares_rps * hits).sum() + (_hits(cold.rates_by_request, resident_s) @ cold.request_rates).sum()
    )
    total = float(loads.sum())
    decoding = economics.output_tokens * economics.prefill_tokens_per_s / economics.decode_tokens_per_s
    work = asked - found + loads * (economics.unique_tokens + decoding)
    prompt = float(asked.sum()) + total * economics.unique_tokens
    every = economics.unique_tokens + decoding
    planned = _on_each(slots, slots.shares_rps * (every + held * (1 - hits)), r)
    one = slots.shares_rps * (slots.copies[slots.rows] == 1)
    fixed = _on_each(slots, one * (every + held * (1 - hits)), r)
    fixed_squares = _on_each(slots, one * (hits * every**2 + (1 - hits) * (every + held) ** 2), r)
    alone = prompt / total + decoding if total else 0.0
    with np.errstate(over="ignore"):  # work next to nothing
        steepness = np.divide(
            2 * economics.slo_services * alone * fixed,
            fixed_squares,
            out=np.full(r, np.inf),
            where=fixed_squares > 0,
        )
    bears = _bears(steepness)
    return Prediction(
        hit_rate=min(1.0, served / total) if total else 0.0,
        token_hit_rate=float(found.sum()) / prompt if prompt else 0.0,
        missed_tokens_per_s=float((asked - found).sum()),
        prompt_tokens_per_s=prompt,
        service_s=float(work.sum()) / total / economics.prefill_tokens_per_s if total else 0.0,
        bottleneck=max(1.0, float(np.maximum(fixed / bears, planned).max() / work.mean())) if work.mean() > 0 else 1.0,
        loads_rps=loads,
        work_tokens_per_s=work,
        planned_tokens_per_s=planned,
        resident_s=resident_s,
    )


def flat_resident_s(rates: KeyRates, endpoints: Sequence[str], economics: Economics) -> float:
    """Return the median τ of the endpoints under Flat-LB, s: what admission can go by while none is measured.

    A plan keeps prefixes longer, so a key that is resident by this is so under the plan. inf: nothing is ever evicted.
    """
    return float(np.median(predict(rates, None, endpoints, economics).resident_s))


def gain(flat: Prediction, plan: Prediction) -> float:
    """Return rule 5's g; 1 when no engine time is spent either way."""
    if plan.service_s > 0:
        return flat.service_s / plan.service_s / plan.bottleneck
    return 1.0 if flat.service_s == 0 else float("inf")


def staleness_tokens_per_s(current: Prediction, other: Prediction, economics: Economics) -> float:
    """Return rule 6: what `current` costs beyond `other`."""
    missed = current.missed_tokens_per_s - other.missed_tokens_per_s
    return missed + _excess(current, economics) - _excess(other, economics)


def warm_up_tokens(
    rates: KeyRates, current: Plan | None, candidate: Plan, endpoints: Sequence[str], economics: Economics
) -> float:
    """Return rule 7."""
    was, now = slots_of(rates, current, endpoints), slots_of(rates, candidate, endpoints)
    pairs, before = (slots.rows * len(endpoints) + slots.targets for slots in (now, was))
    moved = ~np.isin(pairs, before) & (was.copies[now.rows] > 0)
    touched = -np.expm1(-now.shares_rps[moved] * economics.plan_interval_s)
    return float((sizes_of(rates, economics)[now.rows[moved]] * touched).sum())


def sizes_of(rates: KeyRates, economics: Economics) -> Floats:
    """Return each key's prefix, tokens, length n."""
    return np.full(len(rates), economics.prefix_tokens) if rates.prefix_tokens is None else rates.prefix_tokens


def max_over_mean(values: Floats) -> float:
    """Return the highest over the mean; 1 when all are 0."""
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def _excess(prediction: Prediction, economics: Economics) -> float:
    bound = economics.imbalance_max * float(prediction.work_tokens_per_s.mean())
    return float(np.maximum(prediction.planned_tokens_per_s - bound, 0).sum())


def _bears(steepness: Floats) -> Floats:
    """Return rule 5's share of a steered endpoint's load that one bears whose arrivals are not; 1 at most."""
    low, high = np.full(len(steepness), LATE), np.ones(len(steepness))
    for _ in range(40):
        busy = (low + high) / 2
        late = np.log(busy / LATE) > steepness * (1 - busy)
        low, high = np.where(late, low, busy), np.where(late, busy, high)
    return np.minimum(low / STEERED, 1.0)


def _on_each(slots: Slots, values: Floats, endpoints: int) -> Floats:
    """Return the sum of one value a slot on each endpoint."""
    return np.asarray(np.bincount(slots.targets, weights=values, minlength=endpoints), dtype=np.float64)


class _Cold:
    """Keys outside the plan as one endpoint sees them, drawn together by rate.

    rates, rates_by_request: of a key of each class, means by prefix and by request.  tokens: prefix tokens of a class.
    request_rates, tokens_rates: requests/s, and prefix tokens asked for per second, of a class.  rate, tokens_rate:
    their sums.
    """

    def __init__(self, rates_rps: Floats, sizes: Floats, cold: NDArray[np.bool_], endpoints: int) -> None:
        rates, sizes = rates_rps[cold] / endpoints, sizes[cold]
        classes = np.floor(np.log(rates) * PER_E).astype(np.int64)
        classes = np.unique(classes, return_inverse=True)[1]
        self.request_rates = np.bincount(classes, weights=rates)
        self.tokens = np.bincount(classes, weights=sizes)
        self.tokens_rates = np.bincount(classes, weights=rates * sizes)
        # By prefix, so that the derivative of rule 3 is exact; a class of prefixes without length fills nothing.
        by_key = self.request_rates / np.bincount(classes)
        self.rates = np.divide(self.tokens_rates, self.tokens, out=by_key, where=self.tokens > 0)
        self.rates_by_request = np.bincount(classes, weights=rates * rates) / self.request_rates
        self.rate, self.tokens_rate = float(self.request_rates.sum()), float(self.tokens_rates.sum())


def _hits(rates: Floats, resident_s: Floats) -> Floats:
    """Return rule 2 for each endpoint and class."""
    return -np.expm1(-rates[None, :] * resident_s[:, None])


def _resident_s(slots: Slots, held: Floats, cold: _Cold, fill: Floats, economics: Economics) -> Floats:
    """Rule 3. held: prefix tokens of each slot.  fill: tokens/s that are never asked for again, of each endpoint."""
    r, cache = len(fill), economics.cache_tokens_per_endpoint
    all_held = _on_each(slots, held, r) + cold.tokens.sum()
    never = (fill <= 0) & (all_held <= cache)
    tau = np.zeros(r)
    for _ in range(STEPS):
        gone = np.exp(-slots.shares_rps * tau[slots.targets])
        cold_gone = np.exp(-cold.rates[None, :] * tau[:, None])
        touched = _on_each(slots, held * (1 - gone), r) + (1 - cold_gone) @ cold.tokens + fill * tau
        slope = _on_each(slots, held * slots.shares_rps * gone, r) + cold_gone @ cold.tokens_rates + fill
        with np.errstate(over="ignore"):
            step = np.maximum(cache - touched, 0) / np.where(slope > 0, slope, np.inf)
        step = np.where(never, 0.0, np.minimum(step, FOREVER_S - tau))
        tau += step
        if (step <= SAME * tau).all():
            break
    return np.where(never, np.inf, tau)
