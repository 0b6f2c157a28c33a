"""What holds of Mooncake's whole conversation trace; left out, in one line, where it is not at hand."""

from pathlib import Path

import pytest

from replay.demo import EXCERPT
from replay.traces import BLOCK_TOKENS, read_trace
from replay.workload import sessions


def test_the_excerpt_is_its_beginning(traces: Path) -> None:
    """What is shipped is the first 1,500 requests, unchanged."""
    whole = read_trace(traces / "mooncake_conversation.jsonl")
    assert len(whole) == 12_031
    assert read_trace(EXCERPT) == whole[:1500]


def test_sessions_share_nothing_but_the_common_block(traces: Path) -> None:
    """No block but the one that all prompts begin with stands in two sessions, so no tenant boundary cuts a reuse."""
    whole = read_trace(traces / "mooncake_conversation.jsonl")
    session_of = sessions(whole)
    assert len(set(session_of)) == 7373
    owner: dict[int, int] = {}
    for request, session in zip(whole, session_of, strict=True):
        for block in request.blocks[1:]:
            assert owner.setdefault(block, session) == session
    assert {request.blocks[0] for request in whole} == {0}


def test_reuse_is_what_was_measured(traces: Path) -> None:
    """A cache that never forgets would serve 37 % of all prompt tokens."""
    seen: set[int] = set()
    hits = tokens = 0
    for request in read_trace(traces / "mooncake_conversation.jsonl"):
        known = next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        hits += min(known * BLOCK_TOKENS, request.prompt_tokens)
        tokens += request.prompt_tokens
        seen.update(request.blocks)
    assert hits / tokens == pytest.approx(0.3736, abs=5e-4)
