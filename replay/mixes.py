"""Makes the mixed traffic of the WAKMan paper (arXiv 2610.36355, section 3.1 and Appendix F): requests, seeded.

1. History. The prompt of a turn is all that came before it in its session, outputs included, and the turn's input. So
   the full blocks of a session are one growing list, of which each turn reads a longer prefix.
2. A block is 16 tokens. Its id is 64 bits, mixed from the key of the text that it belongs to (a service's prompt, a
   session) and its index there: an equal id means an equal prefix, as with chained hashes.
3. Times are open loop, arrival to arrival. Sessions start as a Poisson process would, given their number: at
   independent times, uniform where the mix is constant. What would arrive after the end is cut.
4. `frac`. The appendix calls it the share of new sessions and gives an arrival rate in requests, which can be read in
   three ways. `requests`: the share of requests, `rate` requests/s in all. `sessions`: the share of sessions, `rate`
   requests/s in all. `session-rate`: the share of sessions, `rate` sessions/s. In the first two, sessions are drawn
   until the requests within the trace reach their number, so the rate is exact.

Each kind draws from a stream of its own: the same seed gives the same sessions of a kind in every mix, more or fewer.
Numpy and the standard library alone; about 0.5 s for the 5,400 requests of an hour.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from replay.appendix_f import APPENDIX_F, KINDS, Parameters, Session, exact, session_draw

BLOCK_TOKENS = 16
READINGS = ("requests", "sessions", "session-rate")
Blocks: TypeAlias = "npt.NDArray[np.uint64]"


@dataclass(frozen=True, slots=True)
class Mix:
    """Shares of single-turn, multi-turn and agentic traffic; they add up to 1."""

    single: float
    multi: float
    agentic: float

    def __post_init__(self) -> None:
        assert min(self.shares) >= 0, "a share is negative"
        assert abs(sum(self.shares) - 1) < 1e-9, "shares do not add up to 1"

    @property
    def shares(self) -> tuple[float, float, float]:
        """In the order of KINDS."""
        return self.single, self.multi, self.agentic

    def __str__(self) -> str:
        """As the paper writes it: S/M/A in percent."""
        return "/".join(f"{100 * share:.0f}" for share in self.shares)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of traffic whose mix goes linearly from `start` to `end`; constant where the two are equal."""

    seconds: float
    start: Mix
    end: Mix


@dataclass(frozen=True, slots=True)
class Traffic:
    """What to generate: a name, its phases one after another, and the figures of the kinds."""

    name: str
    phases: tuple[Phase, ...]
    parameters: Parameters = APPENDIX_F

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return sum(phase.seconds for phase in self.phases)

    def shares_at(self, at_s: float) -> tuple[float, float, float]:
        """Return the shares of the kinds at a time."""
        for phase in self.phases[:-1]:
            if at_s < phase.seconds:
                break
            at_s -= phase.seconds
        else:
            phase = self.phases[-1]
        done = at_s / phase.seconds
        one, two, three = (a + (b - a) * done for a, b in zip(phase.start.shares, phase.end.shares, strict=True))
        return one, two, three


def constant(mix: Mix, seconds: float = 3600, parameters: Parameters = APPENDIX_F, name: str = "") -> Traffic:
    """Return traffic of one mix."""
    return Traffic(name or str(mix), (Phase(seconds, mix, mix),), parameters)


# The paper names three of its 20 (0/100/0, 0/50/50, 33/33/33). Here: all 15 of the 25 % grid, and five inside it.
INTERIOR = (
    Mix(1 / 3, 1 / 3, 1 / 3),
    Mix(0.6, 0.2, 0.2),
    Mix(0.2, 0.6, 0.2),
    Mix(0.2, 0.2, 0.6),
    Mix(0.4, 0.1, 0.5),
)
MIXES = (*(Mix(s / 4, m / 4, (4 - s - m) / 4) for s in range(4, -1, -1) for m in range(4 - s, -1, -1)), *INTERIOR)


@dataclass(frozen=True, slots=True)
class Request:
    """One request; `blocks` are the ids of all full blocks, the first `prompt_blocks` of them the prompt's."""

    at_s: float
    session: int
    kind: str
    turn: int
    prompt_tokens: int
    output_tokens: int
    blocks: Blocks = field(repr=False)
    block_tokens: int = BLOCK_TOKENS

    @property
    def prompt_blocks(self) -> int:
        """How many blocks the prompt fills."""
        return self.prompt_tokens // self.block_tokens

    @property
    def computed_tokens(self) -> int:
        """How many tokens have KV when it ends: the last output token is sampled, and never computed."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def cached_blocks(self) -> int:
        """How many blocks can be hit once it has ended."""
        return self.computed_tokens // self.block_tokens


def generate(traffic: Traffic, seed: int, reading: str = "requests") -> tuple[Request, ...]:
    """Return the requests in order of arrival. Equal arguments give equal requests.

    reading: what `frac` and the rate mean (rule 5); ValueError when there is no such reading.
    """
    if reading not in READINGS:
        raise ValueError(f"no reading {reading!r}; there are {', '.join(READINGS)}")
    rate, seconds = traffic.parameters.rate, traffic.seconds
    draws = {kind: session_draw(kind, traffic.parameters, seed) for kind in KINDS}
    starts = np.random.default_rng([seed, len(KINDS)])
    requests: list[Request] = []
    number = 0

    def add(kind: str, at_s: float) -> int:
        nonlocal number
        made = list(_requests(draws[kind](), number, kind, at_s, seconds))
        number += 1
        requests.extend(made)
        return len(made)

    if reading == "requests":
        for index, kind in enumerate(KINDS):
            # The shares are piecewise linear, so the middle of each phase is its mean.
            wanted = round(rate * sum(_middle(phase, index) * phase.seconds for phase in traffic.phases))
            while wanted > 0:
                wanted -= add(kind, _start(starts, traffic, index))
    else:
        wanted = round(rate * seconds)
        while wanted > 0:
            at_s = float(starts.random()) * seconds
            kind = KINDS[int(starts.choice(len(KINDS), p=exact(traffic.shares_at(at_s))))]
            sent = add(kind, at_s)
            wanted -= sent if reading == "sessions" else 1
    return tuple(sorted(requests, key=lambda request: (request.at_s, request.session, request.turn)))


def block_ids(key: int, count: int) -> Blocks:
    """Return the ids of the first `count` blocks of a text (splitmix64 of its key and the index)."""
    mixed = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def _requests(session: Session, number: int, kind: str, at_s: float, end_s: float) -> Iterator[Request]:
    """Yield the session's requests before `end_s`."""
    total = session.head_tokens + sum(session.inputs) + sum(session.outputs)
    blocks = block_ids(session.key, total // BLOCK_TOKENS)
    shared = session.shared_tokens // BLOCK_TOKENS
    if shared:
        blocks = np.concatenate((block_ids(session.shared_key, shared), blocks[shared:]))
    tokens = session.head_tokens
    for turn, (gap_s, given, made) in enumerate(zip(session.gaps_s, session.inputs, session.outputs, strict=True)):
        at_s += gap_s
        if at_s >= end_s:
            return
        prompt = tokens + given
        tokens = prompt + made
        yield Request(at_s, number, kind, turn, prompt, made, blocks[: tokens // BLOCK_TOKENS])


def _start(rng: np.random.Generator, traffic: Traffic, kind: int) -> float:
    """Draw when a session of the kind starts: density as the kind's share (by rejection)."""
    while True:
        at_s = float(rng.random()) * traffic.seconds
        if rng.random() < traffic.shares_at(at_s)[kind]:
            return at_s


def _middle(phase: Phase, kind: int) -> float:
    return (phase.start.shares[kind] + phase.end.shares[kind]) / 2
