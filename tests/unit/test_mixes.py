"""The generated traffic has the figures of the paper's Appendix F, and its blocks form prefixes as its texts do."""

import json
import math
import statistics
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from replay.appendix_f import APPENDIX_F, Session, popularity, session_draw
from replay.mixes import BLOCK_TOKENS, MIXES, READINGS, Mix, Phase, Request, Traffic, block_ids, constant, generate
from replay.scenarios import curves, drift, read_mixes
from service.errors import InvalidInput

DRAWN = 6000
THIRDS = Mix(1 / 3, 1 / 3, 1 / 3)


@pytest.fixture(scope="module")
def sessions() -> dict[str, list[Session]]:
    """Many sessions of each kind."""
    made: dict[str, list[Session]] = {}
    for kind in ("single", "multi", "agentic"):
        draw = session_draw(kind, APPENDIX_F, 0)
        made[kind] = [draw() for _ in range(DRAWN)]
    return made


@pytest.fixture(scope="module")
def thirds() -> tuple[Request, ...]:
    """An hour of equal thirds."""
    return generate(constant(THIRDS), 0)


def _turns(sessions: list[Session]) -> list[int]:
    return [len(session.inputs) for session in sessions]


def _log_spread(values: list[float], low: float, high: float) -> float:
    """Return the log-space spread by the quartiles of the values strictly between two clips."""
    logs = sorted(math.log(value) for value in values if low < value < high)
    one, _, three = statistics.quantiles(logs, n=4)
    return (three - one) / 1.349


def test_single_turn_lengths_have_mean_spread_and_skew(sessions: dict[str, list[Session]]) -> None:
    """Input: mean 2048, std 128, skewed right; output: mean 512, std 256, skewed left, and cut at 1 token."""
    given = np.array([session.inputs[0] for session in sessions["single"]])
    made = np.array([session.outputs[0] for session in sessions["single"]])
    assert given.mean() == pytest.approx(2048, rel=0.01)
    assert given.std() == pytest.approx(128, rel=0.05)
    assert ((given - given.mean()) ** 3).mean() > 0
    assert made.mean() == pytest.approx(512, rel=0.03)
    # The mirror of the log-normal reaches below 1 token in 4.4 % of the draws; cut there, 256 become 224.
    assert (made == 1).mean() == pytest.approx(0.044, abs=0.01)
    assert made.std() == pytest.approx(224, rel=0.04)
    assert ((made - made.mean()) ** 3).mean() < 0
    assert made.min() >= 1


def test_fifteen_percent_of_single_turns_have_no_fixed_prompt(sessions: dict[str, list[Session]]) -> None:
    """`no_system_prompt_frac` is 0.15."""
    without = sum(session.head_tokens == 0 for session in sessions["single"]) / DRAWN
    assert without == pytest.approx(0.15, abs=0.015)


def test_services_are_as_popular_as_zipf_mandelbrot_says(sessions: dict[str, list[Session]]) -> None:
    """p(r) ~ (r + 5)^-1.3 over 100 services; 8.3 % for the first, 45.4 % for the first ten."""
    shares = popularity(APPENDIX_F)
    assert shares[0] == pytest.approx(0.083, abs=0.001)
    assert shares[:10].sum() == pytest.approx(0.454, abs=0.001)
    drawn = Counter(session.shared_key for session in sessions["single"] if session.shared_tokens)
    assert len(drawn) <= 100
    found = [count / drawn.total() for _, count in drawn.most_common(10)]
    assert found[0] == pytest.approx(shares[0], abs=0.015)
    assert sum(found) == pytest.approx(shares[:10].sum(), abs=0.03)


def test_fixed_prompts_come_from_their_mixture() -> None:
    """Weights 0.1, 0.6, 0.2, 0.1 about 8000, 2500, 1000 and 300 tokens; a service keeps its length."""
    lengths: dict[int, int] = {}
    for seed in range(20):
        draw = session_draw("single", APPENDIX_F, seed)
        for _ in range(1500):
            session = draw()
            if session.shared_tokens:
                assert lengths.setdefault(session.shared_key, session.shared_tokens) == session.shared_tokens
    values = list(lengths.values())
    shares = [
        sum(low <= length < high for length in values) / len(values)
        for low, high in ((6000, 1e9), (1580, 6000), (560, 1580), (0, 560))
    ]
    assert shares == pytest.approx([0.1, 0.6, 0.2, 0.1], abs=0.03)
    assert statistics.median(v for v in values if v > 6000) == pytest.approx(8000, rel=0.02)


def test_conversations_have_their_turns_gaps_and_lengths(sessions: dict[str, list[Session]]) -> None:
    """Turns: median 3, sigma 0.6, at least 2. Gaps: median 60 s, sigma 0.5. Input 1024 +- 128, output 768 +- 64."""
    made = sessions["multi"]
    turns = _turns(made)
    assert statistics.median(turns) == 3
    assert min(turns) == 2
    assert statistics.fmean(turns) == pytest.approx(3.7, abs=0.1)
    gaps = [gap for session in made for gap in session.gaps_s[1:]]
    assert statistics.median(gaps) == pytest.approx(60, rel=0.03)
    assert _log_spread(gaps, 0, math.inf) == pytest.approx(0.5, rel=0.05)
    for values, mean, std in (
        ([tokens for session in made for tokens in session.inputs], 1024, 128),
        ([tokens for session in made for tokens in session.outputs], 768, 64),
    ):
        assert statistics.fmean(values) == pytest.approx(mean, rel=0.01)
        assert statistics.stdev(values) == pytest.approx(std, rel=0.05)
    heads = [session.head_tokens for session in made]
    shares = [sum(low <= head < high for head in heads) / DRAWN for low, high in ((790, 1e9), (270, 790), (0, 270))]
    assert shares == pytest.approx([0.2, 0.5, 0.3], abs=0.03)
    assert not any(session.shared_tokens for session in made)


def test_agents_have_their_turns_gaps_and_lengths(sessions: dict[str, list[Session]]) -> None:
    """Turns: median 7 within 5 and 15. Gaps: median 6 s, sigma 2.5, 300 s at most. Output: median 126, sigma 1.4."""
    made = sessions["agentic"]
    turns = _turns(made)
    assert statistics.median(turns) == pytest.approx(7, abs=0.6)
    assert (min(turns), max(turns)) == (5, 15)
    assert statistics.fmean(turns) == pytest.approx(9.3, abs=0.2)
    gaps = [gap for session in made for gap in session.gaps_s[1:]]
    assert statistics.median(gaps) == pytest.approx(6, rel=0.06)
    assert max(gaps) == 300
    assert sum(gap == 300 for gap in gaps) / len(gaps) == pytest.approx(0.059, abs=0.005)
    outputs = [tokens for session in made for tokens in session.outputs]
    assert statistics.median(outputs) == pytest.approx(126, rel=0.04)
    assert _log_spread([float(tokens) for tokens in outputs], 1, math.inf) == pytest.approx(1.4, rel=0.05)
    inputs = [tokens for session in made for tokens in session.inputs]
    # 85 % about 600 (sigma 0.5), 15 % about 3000 (sigma 0.2): nearly all above 1800 are of the second.
    assert sum(tokens > 1800 for tokens in inputs) / len(inputs) == pytest.approx(0.15 + 0.85 * 0.014, abs=0.015)
    heads = [session.head_tokens for session in made]
    assert sum(head < 1448 for head in heads) / DRAWN == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("mix", [THIRDS, Mix(0, 1, 0), Mix(0.25, 0.25, 0.5)], ids=str)
def test_a_share_is_one_of_requests_at_the_rate(mix: Mix) -> None:
    """Read as `requests`, 1.5 requests/s for an hour are 5,400, of each kind its share; the last session ends it."""
    trace = generate(constant(mix), 3)
    count = Counter(request.kind for request in trace)
    for kind, share in zip(("single", "multi", "agentic"), mix.shares, strict=True):
        assert 0 <= count[kind] - 5400 * share <= 16
    assert all(0 <= request.at_s < 3600 for request in trace)
    assert [request.at_s for request in trace] == sorted(request.at_s for request in trace)


def test_other_readings_count_sessions() -> None:
    """`sessions`: shares are of sessions, at the same rate of requests. `session-rate`: 1.5 sessions/s."""
    by_sessions = generate(constant(Mix(0.5, 0, 0.5), 600), 0, "sessions")
    assert 900 <= len(by_sessions) <= 915
    kinds = Counter({request.session: request.kind for request in by_sessions}.values())
    assert kinds["single"] / kinds.total() == pytest.approx(0.5, abs=0.12)
    by_rate = generate(constant(THIRDS, 600), 0, "session-rate")
    assert len({request.session for request in by_rate}) == pytest.approx(900, abs=2)
    assert len(by_rate) > 2000
    with pytest.raises(ValueError, match="sessions, session-rate"):
        generate(constant(THIRDS, 600), 0, "bytes")
    assert READINGS == ("requests", "sessions", "session-rate")


def test_a_turn_reads_all_that_came_before_it(thirds: tuple[Request, ...]) -> None:
    """The prompt of a turn is longer than what the turn before it left, and begins with the very same blocks."""
    last: dict[int, Request] = {}
    for request in thirds:
        before = last.get(request.session)
        if before is not None:
            assert request.turn == before.turn + 1
            assert request.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert np.array_equal(request.blocks[: len(before.blocks)], before.blocks)
        assert len(request.blocks) == (request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS
        last[request.session] = request


def test_only_fixed_prompts_are_shared_between_sessions(thirds: tuple[Request, ...]) -> None:
    """Two sessions share blocks only as the prefix of one service, never the block in which its prompt ends."""
    owner: dict[int, set[int]] = {}
    prefix: dict[int, int] = {}
    for request in thirds:
        for index, block in enumerate(request.blocks.tolist()):
            owner.setdefault(block, set()).add(request.session if request.kind != "single" else -1)
            assert prefix.setdefault(block, index) == index
    assert all(len(sessions) == 1 for sessions in owner.values())
    single = [request for request in thirds if request.kind == "single"]
    times = Counter(block for request in single for block in request.blocks.tolist())
    for request in single:
        counts = [times[block] for block in request.blocks.tolist()]
        shared = sum(count > 1 for count in counts)
        assert all(count > 1 for count in counts[:shared])


def test_equal_seeds_give_equal_traffic_and_others_do_not() -> None:
    """The seed decides everything."""
    one, same, other = (generate(constant(THIRDS, 300), seed) for seed in (1, 1, 2))
    assert [request.blocks.tolist() for request in one] == [request.blocks.tolist() for request in same]
    assert [request.at_s for request in one] == [request.at_s for request in same]
    assert [request.at_s for request in one] != [request.at_s for request in other]


def test_ids_of_a_text_do_not_depend_on_how_much_of_it_there_is() -> None:
    """Block i of a text has one id, whoever asks for how many; other texts share none."""
    assert block_ids(5, 10).tolist() == block_ids(5, 100)[:10].tolist()
    assert not set(block_ids(5, 1000).tolist()) & set(block_ids(6, 1000).tolist())
    assert block_ids(2**64 - 1, 0).size == 0


def test_there_are_twenty_mixes_and_those_the_paper_names() -> None:
    """15 of the 25 % grid, five inside it; each once."""
    names = [str(mix) for mix in MIXES]
    assert len(set(names)) == len(names) == 20
    assert {"0/100/0", "33/33/33", "0/50/50"} <= set(names)


def test_a_drift_changes_the_mix_over_time() -> None:
    """In a line from A to B the first quarter is mostly A's kinds, the last mostly B's; a swap swaps them whole."""
    line = Traffic("line", (Phase(2000, Mix(1, 0, 0), Mix(0, 1, 0)),))
    assert line.shares_at(500) == pytest.approx((0.75, 0.25, 0))
    trace = generate(line, 0)
    first = [request.turn for request in trace if request.at_s < 500 and request.kind == "multi"]
    assert len(first) / sum(request.at_s < 500 for request in trace) < 0.3
    assert sum(request.kind == "single" for request in trace) / len(trace) == pytest.approx(0.5, abs=0.01)
    swap = Traffic("swap", (Phase(300, Mix(1, 0, 0), Mix(1, 0, 0)), Phase(300, Mix(0, 1, 0), Mix(0, 1, 0))))
    assert {request.kind for request in generate(swap, 0) if request.at_s < 300} == {"single"}
    assert {request.kind for request in generate(swap, 0) if request.at_s >= 300} == {"multi"}


def test_named_traffic_is_two_hours_of_drift_and_one_parameter_at_a_time() -> None:
    """Six drifts of two hours; every point of the curves changes one parameter of Appendix F."""
    assert [(traffic.name, traffic.seconds) for traffic in drift()] == [
        (name, 7200) for name in ("swap-60", "swap-30", "swap-15", "swap-7.5", "drift", "near-tie")
    ]
    for traffic in curves():
        changed = [
            name
            for name in APPENDIX_F.__slots__  # type: ignore[attr-defined]
            if getattr(traffic.parameters, name) != getattr(APPENDIX_F, name)
        ]
        assert len(changed) <= 1, traffic.name


def test_mixes_are_read_from_a_file(tmp_path: Path) -> None:
    """A file may name mixes, lengths and parameters, or phases."""
    path = tmp_path / "mixes.json"
    path.write_text(
        json.dumps(
            [
                {"single": 0.5, "multi": 0.25, "agentic": 0.25},
                {"name": "fast", "single": 0, "multi": 1, "agentic": 0, "seconds": 60, "parameters": {"rate": 3}},
                {"name": "two", "phases": [{"seconds": 60, "from": [1, 0, 0], "to": [0, 0, 1]}]},
                {
                    "name": "heads",
                    "single": 1,
                    "multi": 0,
                    "agentic": 0,
                    "parameters": {"single_prompts": [[1, 64, 0]]},
                },
            ]
        )
    )
    plain, fast, two, heads = read_mixes(path)
    assert (plain.name, plain.seconds) == ("50/25/25", 3600)
    assert len(generate(fast, 0)) == pytest.approx(180, abs=10)
    assert two.phases[0].end == Mix(0, 0, 1)
    assert heads.parameters.single_prompts == ((1, 64, 0),)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not JSON"),
        ("{}", "not a list"),
        ("[]", "not a list"),
        ("[3]", "entry 1: is not an object"),
        ('[{"single": 1, "multi": 0}]', "'agentic' is missing|agentic is missing"),
        ('[{"single": 1, "multi": 1, "agentic": 0}]', "1 in all"),
        ('[{"single": -1, "multi": 2, "agentic": 0}]', "1 in all"),
        ('[{"single": "x", "multi": 0, "agentic": 0}]', "not a number"),
        ('[{"single": NaN, "multi": 1, "agentic": 0}]', "not a number"),
        ('[{"single": 1, "multi": 0, "agentic": 0, "seconds": 0}]', "'seconds' is 0"),
        ('[{"single": 1, "multi": 0, "agentic": 0, "colour": 1}]', "unknown field 'colour'"),
        ('[{"single": 1, "multi": 0, "agentic": 0, "parameters": {"speed": 1}}]', "unknown parameter 'speed'"),
        ('[{"single": 1, "multi": 0, "agentic": 0, "parameters": {"rate": 0}}]', "too small"),
        ('[{"single": 1, "multi": 0, "agentic": 0}, {"single": 1, "multi": 0, "agentic": 0}]', "entry 2: the name"),
        ('[{"name": "x", "phases": []}]', "empty"),
        ('[{"name": "x", "phases": [{"from": [1, 0, 0]}]}]', "seconds is missing"),
    ],
)
def test_a_file_that_is_no_list_of_mixes_is_refused(tmp_path: Path, text: str, word: str) -> None:
    """The fault names the entry and what is wrong."""
    path = tmp_path / "mixes.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=word):
        read_mixes(path)
    with pytest.raises(InvalidInput, match="No such file"):
        read_mixes(tmp_path / "none.json")
