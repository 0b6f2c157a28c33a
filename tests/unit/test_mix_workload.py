"""A mix becomes requests to be played: shares, sharing, keys, exact lengths."""

import pytest

from replay.mix_workload import build_mix, parse_mixes
from replay.mixes import BLOCK_TOKENS, Mix
from service.errors import InvalidInput


def test_a_mix_is_read_as_the_paper_writes_it() -> None:
    """S/M/A in percent; several follow each other."""
    assert parse_mixes("100/0/0") == (Mix(1.0, 0.0, 0.0),)
    assert parse_mixes("0/100/0,75/15/10") == (Mix(0.0, 1.0, 0.0), Mix(0.75, 0.15, 0.1))


@pytest.mark.parametrize("text", ["", "100", "50/50", "50/50/50", "120/-20/0", "a/b/c", "100/0/0,", "33.3/33.3/33.4"])
def test_what_is_no_mix_is_refused(text: str) -> None:
    """Anything else is refused by name, with an example."""
    with pytest.raises(InvalidInput, match=r"is no mix.*as 100/0/0"):
        parse_mixes(text)


def test_requests_share_what_the_mix_says_they_share() -> None:
    """Prompts have their exact length; equal leading ids are equal text; who shares a block shares a key."""
    requests = build_mix(parse_mixes("60/20/20"), tenants=16, duration_s=300, rate_rps=1.0, seed=1)
    assert 300 <= len(requests) <= 315  # sessions are whole
    assert requests[0].at_s == 0.0
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    keys: dict[int, str] = {}
    shared = 0
    for request in requests:
        assert len(request.prompt()) == 4 * request.prompt_tokens
        assert len(request.blocks) == -(-request.prompt_tokens // BLOCK_TOKENS)
        shared += request.blocks[0] in keys
        for block in request.blocks:
            assert keys.setdefault(block, request.key) == request.key
    assert shared > 100
    first = {request.blocks[0]: request for request in requests}
    again = next(request for request in requests if first[request.blocks[0]] is not request)
    other = first[again.blocks[0]]
    same = sum(a == b for a, b in zip(again.blocks, other.blocks, strict=False))
    assert again.prompt()[: 64 * (same - 1)] == other.prompt()[: 64 * (same - 1)] != ""


def test_traffic_turns_and_is_reproducible() -> None:
    """Of two mixes each has its half of the time, and equal arguments give equal requests."""
    arguments = {"tenants": 8, "duration_s": 600.0, "rate_rps": 1.0, "seed": 3}
    turning = build_mix(parse_mixes("100/0/0,0/0/100"), **arguments)  # type: ignore[arg-type]
    assert turning == build_mix(parse_mixes("100/0/0,0/0/100"), **arguments)  # type: ignore[arg-type]
    early = {r.blocks[0] for r in turning if r.at_s < 295}
    # Single-turn services come back under their prompt's first block; sessions of agents only within themselves.
    late = [r for r in turning if r.at_s > 305]
    assert late
    assert sum(r.blocks[0] in early for r in late) < 0.05 * len(late)


def test_nothing_to_play_is_refused() -> None:
    """A time in which no request falls is refused with the remedy."""
    with pytest.raises(InvalidInput, match="raise the duration"):
        build_mix(parse_mixes("100/0/0"), tenants=8, duration_s=1.0, rate_rps=0.1, seed=0)
