"""Turns a trace into the requests of a demonstration: tenant keys, prompts and send times; pure, seeded.

1. Sessions. Two requests belong together when they share a block that is not common to (nearly) all requests. Common
   is a block that stands in at least `COMMON_SHARE` of the requests: a system prompt, not a conversation. Groups are
   closed over sharing (union-find), so no shared prefix but the common one ever crosses two sessions.
2. Keys. No public trace carries tenants. Each session is given to one of `tenants` keys, drawn by the steep head law
   (below); all requests of a session carry its key. This is an overlay, to be called that wherever figures stand.
3. Prompts. A block id becomes 512 words seeded by the id alone, so equal ids give equal text; a partial last block is
   the first words of its block. A word is a space and three letters: 4 bytes, one token of the simulated engine, and
   one token of the usual BPE vocabularies (checked against cl100k_base).
4. Times. The first n requests, scaled to the offered rate; their gaps keep the trace's pattern.

The steep law is w(r) = (r + 4.5)^-0.6223 · e^(-r / 44161) over ranks r = 1, 2, …: with 128,824 keys its Gini
coefficient is 0.756, the top 4 % of keys carry 47 % and the top key 0.27 %, the statistics that CacheRoute (arXiv
2608.19677) gives of its production traffic. Those three do not determine the head; of the laws that meet them this one
is steep.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128
from itertools import accumulate
from random import Random

from replay.traces import BLOCK_TOKENS, TraceRequest, smear
from service.errors import InvalidInput

COMMON_SHARE = 0.9

# 256 common words, so that a byte chooses one.
_TEXT = """
ace act add age ago aid aim air all and any apt arc are ark arm art ask ate bad bag ban bar bat bay bed bee bet big
bit bow box boy bud bug bus but buy cab can cap car cat cop cow cry cup cut dad dam day den did die dig dim dip doc
dog dot dry due ear eat egg ego elf end era eye fan far fat fed fee few fig fin fit fix fly fog for fox fun fur gap
gas get god got gun guy gym had ham hat hen her hey him hip his hit hop hot how hub ice icy ill ink inn its jam jar
jaw jet job joy jug key kid kit lab lad lap law lay led leg let lid lie lip log lot low mad man map mat may men met
mix mom mud mug nap net new nod nor not now nut oak odd off oil old one our out owe own pad pan pay pen pet pie pig
pin pit pop pot pub put ram ran rat raw ray red rid rim rip rob rod row rub rug run sad sat saw say sea see set sex
she shy sin sip sir sit six sky son sow spy sum sun tab tag tan tap tax tea ten the tie tin tip toe tom ton too top
toy try tub two use van vet via war was way web wed wet who why win wit won yes yet you zip zoo
"""
_WORDS = tuple(f" {word}" for word in _TEXT.split())


@dataclass(frozen=True, slots=True)
class PlayRequest:
    """A request as it will be sent: engine seconds from the start, key, tokens in and out, block ids of the prompt."""

    at_s: float
    key: str
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def prompt(self) -> str:
        """Return the text, exactly `prompt_tokens` words of 4 bytes; about 25 µs a block, so it is made when sent."""
        return prompt_text(self.blocks, self.prompt_tokens)


def build_workload(
    trace: Sequence[TraceRequest], *, tenants: int, duration_s: float, rate_rps: float | None, seed: int
) -> tuple[PlayRequest, ...]:
    """Return the requests of the first `duration_s` engine seconds at `rate_rps` (None: as fast as recorded).

    Fewer when the trace is shorter. Sessions and keys are those of the whole trace, so they do not depend on the
    duration. Equal arguments give equal requests. Raise InvalidInput when not one request falls into the duration.
    """
    # A stream of its own for each use: drawing more of one thing must not change another.
    arrivals = smear(trace, Random(f"{seed} arrivals"))
    keys = overlay_keys(sessions(trace), head_law(tenants), Random(f"{seed} tenants"))
    if rate_rps is None:
        played = sum(request.at_s - arrivals[0].at_s < duration_s for request in arrivals)
    else:
        played = min(len(arrivals), math.floor(duration_s * rate_rps))
        if played < 1:
            raise InvalidInput(
                f"not one request falls into {duration_s:g} engine seconds at {rate_rps:g} requests/s",
                "raise the duration, the rate or the speed",
            )
    times_s = send_times(arrivals[:played], rate_rps)
    return tuple(
        PlayRequest(at_s, key, request.prompt_tokens, request.output_tokens, request.blocks)
        for at_s, key, request in zip(times_s, keys, arrivals, strict=False)
    )


def head_law(keys: int) -> tuple[float, ...]:
    """Return the shares of the top `keys` ranks of the steep law, largest first, renormalised to 1."""
    weights = [(rank + 4.5) ** -0.6223 * math.exp(-rank / 44161) for rank in range(1, keys + 1)]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)


def sessions(trace: Sequence[TraceRequest]) -> tuple[int, ...]:
    """Return each request's session: the index of the session's first request. O(all blocks), about 0.3 µs each."""
    counts = Counter(block for request in trace for block in set(request.blocks))
    common = {block for block, count in counts.items() if count >= COMMON_SHARE * len(trace)}
    parent = list(range(len(trace)))
    first_with: dict[int, int] = {}
    for index, request in enumerate(trace):
        for block in request.blocks:
            if block not in common:
                one, other = sorted((_root(parent, first_with.setdefault(block, index)), _root(parent, index)))
                parent[other] = one
    return tuple(_root(parent, index) for index in range(len(trace)))


def overlay_keys(session_of: Sequence[int], law: Sequence[float], rng: Random) -> tuple[str, ...]:
    """Return each request's key: one draw by `law` a session, in the order in which sessions first appear."""
    cumulative = list(accumulate(law))
    width = len(str(len(law)))
    key_of: dict[int, str] = {}
    for session in session_of:
        if session not in key_of:
            rank = rng.choices(range(1, len(law) + 1), cum_weights=cumulative)[0]
            key_of[session] = f"tenant-{rank:0{width}d}"
    return tuple(key_of[session] for session in session_of)


def send_times(arrivals: Sequence[TraceRequest], rate_rps: float | None) -> tuple[float, ...]:
    """Return engine seconds from the first arrival; stretched so that the mean rate is `rate_rps` when one is given."""
    first_s, last_s = arrivals[0].at_s, arrivals[-1].at_s
    scale = 1.0
    if rate_rps is not None and last_s > first_s:
        scale = (len(arrivals) - 1) / rate_rps / (last_s - first_s)
    return tuple((request.at_s - first_s) * scale for request in arrivals)


def prompt_text(blocks: Sequence[int], prompt_tokens: int, block_tokens: int = BLOCK_TOKENS) -> str:
    """Return the text of a prompt: `prompt_tokens` words, block i gives those from i · `block_tokens` on."""
    choices = b"".join(shake_128(str(block).encode()).digest(block_tokens) for block in blocks)
    return "".join(map(_WORDS.__getitem__, choices[:prompt_tokens]))


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index
