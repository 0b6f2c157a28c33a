"""Keys, prompts and times of the demonstration's requests."""

from collections import Counter, defaultdict
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.demo import EXCERPT
from replay.traces import TraceRequest, read_trace
from replay.workload import build_workload, head_law, overlay_keys, prompt_text, send_times, sessions
from service.errors import InvalidInput


def _trace(*blocks: tuple[int, ...]) -> list[TraceRequest]:
    return [TraceRequest(float(i), 512 * len(ids), 1, ids) for i, ids in enumerate(blocks)]


def test_head_law_has_the_published_statistics() -> None:
    """Over 128,824 keys the steep law has Gini 0.756, 47 % in the top 4 % and 0.271 % in the top key."""
    n = 128_824
    law = head_law(n)
    gini = 1 - 2 * sum((rank - 0.5) * share for rank, share in enumerate(law, start=1)) / n
    assert abs(gini) == pytest.approx(0.7560, abs=5e-5)
    assert sum(law[: round(0.04 * n)]) == pytest.approx(0.4700, abs=5e-5)
    assert law[0] == pytest.approx(0.00271, abs=1e-5)


@given(st.integers(1, 500))
def test_head_law_is_a_law(keys: int) -> None:
    """Shares sum to one and fall with the rank."""
    law = head_law(keys)
    assert len(law) == keys
    assert sum(law) == pytest.approx(1)
    assert all(one > other for one, other in pairwise(law))


def test_common_block_makes_no_session() -> None:
    """A block that (nearly) all requests begin with joins nobody; any other shared block does, through others too."""
    trace = _trace((0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 5), (0, 4, 6))
    assert sessions(trace) == (0, 1, 0, 1, 4, 1)


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(tuple), min_size=1, max_size=40))
def test_requests_that_share_an_uncommon_block_are_one_session(blocks: list[tuple[int, ...]]) -> None:
    """Whatever the trace, no block but a common one is found in two sessions."""
    session_of = sessions(_trace(*blocks))
    counts = Counter(block for ids in blocks for block in ids)
    found: dict[int, set[int]] = defaultdict(set)
    for ids, session in zip(blocks, session_of, strict=True):
        for block in ids:
            found[block].add(session)
    assert all(len(found[block]) == 1 for block in found if counts[block] < 0.9 * len(blocks))
    assert all(session_of[session] == session for session in session_of)


def test_shipped_excerpt_has_its_sessions() -> None:
    """All requests of the excerpt share block 0 and nothing else in common: 1,120 conversations remain."""
    assert len(set(sessions(read_trace(EXCERPT)))) == 1120


def test_session_has_one_key_and_law_decides_whose() -> None:
    """Every session has exactly one key, and keys get about the sessions that the law gives them."""
    session_of = [i % 20_000 for i in range(40_000)]
    keys = overlay_keys(session_of, head_law(64), Random(0))
    assert keys[:20_000] == keys[20_000:]
    counts = Counter(keys[:20_000])
    assert counts["tenant-01"] / 20_000 == pytest.approx(head_law(64)[0], rel=0.1)
    assert counts["tenant-64"] / 20_000 == pytest.approx(head_law(64)[-1], rel=0.25)


@given(st.integers(1, 3000), st.integers(0, 2**62))
def test_prompt_has_exactly_its_tokens(prompt_tokens: int, block: int) -> None:
    """A prompt is `prompt_tokens` words of a space and three letters: 4 bytes a token."""
    blocks = range(block, block + -(-prompt_tokens // 512))
    text = prompt_text(blocks, prompt_tokens)
    assert len(text.encode()) == 4 * prompt_tokens
    words = text[1:].split(" ")
    assert len(words) == prompt_tokens
    assert all(len(word) == 3 and word.isalpha() for word in words)


def test_equal_blocks_give_equal_text() -> None:
    """A block's text depends on its id alone, a partial block is the beginning of it, another id is other text."""
    whole = prompt_text((7, 8), 1024)
    assert prompt_text((7, 8), 600) == whole[: 4 * 600]
    assert prompt_text((3, 8), 1024)[4 * 512 :] == whole[4 * 512 :]
    assert prompt_text((9, 8), 1024)[: 4 * 16] != whole[: 4 * 16]


def test_times_are_scaled_to_the_offered_rate() -> None:
    """A given rate is the mean rate of what is played, and gaps keep their proportions; None keeps recorded times."""
    arrivals = [TraceRequest(at_s, 1, 1, (0,)) for at_s in (10.0, 11.0, 13.0, 20.0)]
    assert send_times(arrivals, None) == (0.0, 1.0, 3.0, 10.0)
    assert send_times(arrivals, 3.0) == pytest.approx((0.0, 0.1, 0.3, 1.0))
    assert send_times(arrivals[:1], 3.0) == (0.0,)


def test_workload_is_cut_by_duration() -> None:
    """The duration in engine seconds, and the rate when given, decide how many of the first requests are played."""
    trace = read_trace(EXCERPT)
    recorded = build_workload(trace, tenants=64, duration_s=100, rate_rps=None, seed=0)
    assert recorded[-1].at_s < 100
    assert [r.blocks for r in recorded] == [r.blocks for r in trace[: len(recorded)]]
    offered = build_workload(trace, tenants=64, duration_s=100, rate_rps=5, seed=0)
    assert len(offered) == 500
    assert offered[-1].at_s == pytest.approx(499 / 5)
    assert len(build_workload(trace, tenants=64, duration_s=1e6, rate_rps=5, seed=0)) == 1500


def test_workload_is_seeded_and_keys_do_not_depend_on_duration() -> None:
    """Equal arguments give equal requests; a longer duration only appends."""
    trace = read_trace(EXCERPT)
    short, again, longer, other = (
        build_workload(trace, tenants=64, duration_s=duration_s, rate_rps=None, seed=seed)
        for duration_s, seed in ((50, 0), (50, 0), (90, 0), (50, 1))
    )
    assert short == again == longer[: len(short)]
    assert [r.key for r in short] != [r.key for r in other]


def test_too_short_a_duration_is_refused() -> None:
    """A duration into which no request falls is refused with a remedy."""
    with pytest.raises(InvalidInput, match="raise the duration"):
        build_workload(_trace((0,)), tenants=2, duration_s=0.1, rate_rps=1, seed=0)
