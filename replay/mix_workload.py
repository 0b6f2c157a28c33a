"""Turns a mix of the WAKMan paper's traffic into requests to be played; pure, seeded.

1. A mix is `S/M/A`, single-turn, multi-turn and agentic requests in percent; several, with commas between, follow each
   other, each for an equal part of the time (traffic that turns). The generator is `replay.mixes`.
2. Keys are overlaid as for a trace (`replay.workload`, rules 1 and 2): requests that share a block share a key, so all
   requests of a service do.
3. A block id becomes 16 words seeded by the id alone; where a prompt ends within a block, the first words of it.

What a conversation goes on with is the generator's, not what an engine answered: a next turn hits what was sent before,
and not the answers in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from replay.appendix_f import APPENDIX_F
from replay.mixes import BLOCK_TOKENS, Mix, Phase, Request, Traffic, generate
from replay.traces import TraceRequest
from replay.workload import head_law, overlay_keys, prompt_text, sessions
from service.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class MixRequest:
    """A request as it will be sent: engine seconds from the start, key, tokens in and out, ids of 16-token blocks."""

    at_s: float
    key: str
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def prompt(self) -> str:
        """Return the text, exactly `prompt_tokens` words of 4 bytes; about 3 µs a block."""
        return prompt_text(self.blocks, self.prompt_tokens, BLOCK_TOKENS)


def parse_mixes(text: str) -> tuple[Mix, ...]:
    """Return the mixes that `S/M/A[,S/M/A…]` names; InvalidInput when it does not."""
    try:
        mixes = [tuple(int(share) for share in part.split("/")) for part in text.split(",")]
        if not all(len(mix) == 3 and min(mix) >= 0 and sum(mix) == 100 for mix in mixes):
            raise ValueError
    except ValueError:
        raise InvalidInput(
            f"--mix {text!r} is no mix",
            "give single-turn/multi-turn/agentic in whole percent that add up to 100, as 100/0/0 or 0/100/0,100/0/0",
        ) from None
    return tuple(Mix(single / 100, multi / 100, agentic / 100) for single, multi, agentic in mixes)


def build_mix(
    mixes: Sequence[Mix], *, tenants: int, duration_s: float, rate_rps: float, seed: int
) -> tuple[MixRequest, ...]:
    """Return the requests of `duration_s` engine seconds at `rate_rps` in all; InvalidInput when there is not one."""
    phases = tuple(Phase(duration_s / len(mixes), mix, mix) for mix in mixes)
    made = generate(Traffic("demo", phases, replace(APPENDIX_F, rate=rate_rps)), seed)
    if not made:
        raise InvalidInput(
            f"not one request falls into {duration_s:g} engine seconds at {rate_rps:g} requests/s",
            "raise the duration, the rate or the speed",
        )
    trace = [TraceRequest(r.at_s - made[0].at_s, r.prompt_tokens, r.output_tokens, _ids(r)) for r in made]
    keys = overlay_keys(sessions(trace), head_law(tenants), Random(f"{seed} tenants"))
    return tuple(
        MixRequest(r.at_s, key, r.prompt_tokens, r.output_tokens, r.blocks) for r, key in zip(trace, keys, strict=True)
    )


def _ids(request: Request) -> tuple[int, ...]:
    """Return the ids of the prompt's blocks; the last one may go on behind the prompt, or be of this request alone."""
    ids: list[int] = request.blocks[: -(-request.prompt_tokens // BLOCK_TOKENS)].tolist()
    if len(ids) * BLOCK_TOKENS < request.prompt_tokens:
        ids.append(-1 - (request.session << 16) - request.turn)
    return tuple(ids)
