"""Draws the sessions of the WAKMan paper's workload (arXiv 2610.36355, Appendix F): three kinds, seeded.

1. Single-turn: a fixed prompt of one of 100 services, drawn by Zipf-Mandelbrot popularity, and a payload of its own;
   15 % have no fixed prompt. Multi-turn: a prompt of the session's own, then turns a minute apart. Agentic: the same
   with more turns, seconds apart. `Parameters` holds every figure.
2. What the appendix leaves open. `skew: right` is a log-normal with the given mean and standard deviation, `skew: left`
   the mirror of one about its mean, no skew a normal. Numbers of turns are rounded, then clipped to their bounds (which
   keeps the median); delays are clipped. Weights of prompt lengths are normalised. Lengths are at least 1 token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

KINDS = ("single", "multi", "agentic")
# (weight, median, sigma) of log-normals
Mixture: TypeAlias = tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Parameters:
    """All figures of Appendix F; tokens, seconds, requests (or sessions) a second; a sigma is in log space."""

    rate: float = 1.5
    services: int = 100
    popularity_alpha: float = 1.3
    popularity_q: float = 5.0
    no_prompt_share: float = 0.15
    single_prompts: Mixture = ((0.1, 8000, 0.05), (0.6, 2500, 0.2), (0.2, 1000, 0.2), (0.1, 300, 0.25))
    single_input_mean: float = 2048
    single_input_std: float = 128
    single_output_mean: float = 512
    single_output_std: float = 256
    multi_turns_median: float = 3
    multi_turns_sigma: float = 0.6
    multi_turns_min: int = 2
    multi_gap_median: float = 60
    multi_gap_sigma: float = 0.5
    multi_prompts: Mixture = ((0.2, 1250, 0.2), (0.5, 500, 0.2), (0.3, 150, 0.25))
    multi_input_mean: float = 1024
    multi_input_std: float = 128
    multi_output_mean: float = 768
    multi_output_std: float = 64
    agentic_turns_median: float = 7
    agentic_turns_sigma: float = 1.7
    agentic_turns_min: int = 5
    agentic_turns_max: int = 15
    agentic_gap_median: float = 6
    agentic_gap_sigma: float = 2.5
    agentic_gap_max: float = 300
    agentic_prompts: Mixture = ((0.4, 1024, 0.2), (0.4, 2048, 0.2))
    agentic_inputs: Mixture = ((0.85, 600, 0.5), (0.15, 3000, 0.2))
    agentic_output_median: float = 126
    agentic_output_sigma: float = 1.4


APPENDIX_F = Parameters()


@dataclass(frozen=True, slots=True)
class Session:
    """What a session will send: gap before it (s), input and output (tokens) of each turn; the first gap is 0.

    `head_tokens` stand before the first input. The first `shared_tokens` of the text are a service's: its `shared_key`.
    """

    key: int
    head_tokens: int
    gaps_s: tuple[float, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shared_key: int = 0
    shared_tokens: int = 0


Draw: TypeAlias = Callable[[], Session]


def session_draw(kind: str, p: Parameters, seed: int) -> Draw:
    """Return what draws the sessions of one kind, one a call."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    if kind == "single":
        return _single(rng, p)
    return _multi(rng, p) if kind == "multi" else _agentic(rng, p)


def popularity(p: Parameters) -> "npt.NDArray[np.float64]":
    """Return the share of each service, the most popular first: p(r) ~ (r + q)^-alpha."""
    weights = (np.arange(1, p.services + 1) + p.popularity_q) ** -p.popularity_alpha
    return np.asarray(weights / weights.sum())


def _single(rng: np.random.Generator, p: Parameters) -> Draw:
    prompts = [(_key(rng), _tokens(_mixed(rng, p.single_prompts))) for _ in range(p.services)]
    shares = popularity(p)

    def draw() -> Session:
        shared_key, head = (
            (0, 0) if rng.random() < p.no_prompt_share else prompts[int(rng.choice(p.services, p=shares))]
        )
        payload = _tokens(_right_skewed(rng, p.single_input_mean, p.single_input_std))
        output = _tokens(2 * p.single_output_mean - _right_skewed(rng, p.single_output_mean, p.single_output_std))
        return Session(_key(rng), head, (0.0,), (payload,), (output,), shared_key, head)

    return draw


def _multi(rng: np.random.Generator, p: Parameters) -> Draw:
    def draw() -> Session:
        turns = max(p.multi_turns_min, round(_lognormal(rng, p.multi_turns_median, p.multi_turns_sigma)))
        head = _tokens(_mixed(rng, p.multi_prompts))
        gaps = (0.0, *(_lognormal(rng, p.multi_gap_median, p.multi_gap_sigma) for _ in range(turns - 1)))
        inputs = tuple(_tokens(rng.normal(p.multi_input_mean, p.multi_input_std)) for _ in range(turns))
        outputs = tuple(_tokens(rng.normal(p.multi_output_mean, p.multi_output_std)) for _ in range(turns))
        return Session(_key(rng), head, gaps, inputs, outputs)

    return draw


def _agentic(rng: np.random.Generator, p: Parameters) -> Draw:
    def gap() -> float:
        return min(p.agentic_gap_max, _lognormal(rng, p.agentic_gap_median, p.agentic_gap_sigma))

    def draw() -> Session:
        drawn = round(_lognormal(rng, p.agentic_turns_median, p.agentic_turns_sigma))
        turns = min(p.agentic_turns_max, max(p.agentic_turns_min, drawn))
        head = _tokens(_mixed(rng, p.agentic_prompts))
        gaps = (0.0, *(gap() for _ in range(turns - 1)))
        inputs = tuple(_tokens(_mixed(rng, p.agentic_inputs)) for _ in range(turns))
        sigma = p.agentic_output_sigma
        outputs = tuple(_tokens(_lognormal(rng, p.agentic_output_median, sigma)) for _ in range(turns))
        return Session(_key(rng), head, gaps, inputs, outputs)

    return draw


def exact(shares: Sequence[float]) -> list[float]:
    """Return the shares, scaled to add up to 1."""
    total = math.fsum(shares)
    return [share / total for share in shares]


def _mixed(rng: np.random.Generator, mixture: Mixture) -> float:
    weights = exact([weight for weight, _, _ in mixture])
    _, median, sigma = mixture[int(rng.choice(len(mixture), p=weights))]
    return _lognormal(rng, median, sigma)


def _lognormal(rng: np.random.Generator, median: float, sigma: float) -> float:
    return float(median * math.exp(sigma * rng.standard_normal()))


def _right_skewed(rng: np.random.Generator, mean: float, std: float) -> float:
    variance = math.log1p((std / mean) ** 2)
    return _lognormal(rng, mean * math.exp(-variance / 2), math.sqrt(variance))


def _tokens(drawn: float) -> int:
    return max(1, round(drawn))


def _key(rng: np.random.Generator) -> int:
    return int(rng.integers(0, 2**64, dtype=np.uint64))
