"""The engine model: schedule, step times, prefix hits, preemption, aborts, determinism."""

import random
from collections.abc import Hashable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest, RequestState
from replay.presets import PRESETS, Preset, find_preset
from service.errors import InvalidInput

# One second a step whatever is in it, so that times count steps.
COUNTING = Preset("counting", 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, kv_blocks=1000)
# Every term is visible, all in whole numbers.
TERMS = Preset("terms", 100.0, 50.0, 1.0, 2.0, 3.0, 1000.0, kv_blocks=1000)


def test_a_hand_computed_schedule() -> None:
    """Decodes go first, then prefill in order of arrival, chunked by the budget; arrivals join at a boundary."""
    model = EngineModel(COUNTING, block_size=4, max_batched_tokens=10, max_seqs=8)
    a = model.submit(EngineRequest("a", 12, 4), 0.0)  # idle engine: step 0-1 has 10 tokens of a
    b = model.submit(EngineRequest("b", 9, 2), 0.0)  # step 1-2: 2 of a, 8 of b; a's first token
    c = model.submit(EngineRequest("c", 1, 1), 0.5)  # step 2-3: a, 1 of b, 1 of c; first tokens of b and c
    assert model.advance(0.999) == []
    assert (model.num_running, model.num_waiting) == (1, 2)
    assert model.advance(2.0) == [a]
    assert model.advance(9.0) == [b, c, c, b, a]
    assert [(s.first_token_s, s.finished_s) for s in (a, b, c)] == [(2.0, 5.0), (3.0, 4.0), (3.0, 3.0)]
    assert (model.steps, model.busy_s, model.generation_tokens, model.prompt_tokens) == (5, 5.0, 7, 22)
    assert model.cache.num_pinned == 0
    assert model.next_event_s() is None


def test_each_term_of_the_step_time() -> None:
    """A step lasts max(floor, base + token) + pairs + context + sequences of what is in it."""
    model = EngineModel(TERMS, block_size=4, max_batched_tokens=60, max_seqs=8)
    a = model.submit(EngineRequest("a", 10, 3), 0.0)
    model.advance(1e9)
    prefill = 100 + 2 * 10 * 5 + 1000
    decode_1, decode_2 = 100 + 3 * 10 + 1000, 100 + 3 * 11 + 1000
    assert a.first_token_s == prefill
    assert a.finished_s == prefill + decode_1 + decode_2
    start = 2e9
    b = model.submit(EngineRequest("b", 70, 1), start)
    model.advance(1e12)
    first = (50 + 60) + 2 * 60 * 30 + 1000
    second = 100 + 2 * 10 * (60 + 5) + 1000
    assert b.finished_s == start + first + second


@pytest.mark.parametrize(
    ("name", "tokens", "cached", "source_ms", "tolerance"),
    [
        ("70b-fp8-tp2", 1024, 0, 85.0, 0.02),
        ("70b-fp8-tp2", 4096, 0, 341.8, 0.02),
        ("70b-fp8-tp2", 1024, 8192, 102.4, 0.02),
        ("8b-bf16-tp1", 4096, 0, 90.1, 0.08),
        ("70b-bf16-tp2", 4096, 0, 466.0, 0.02),
        ("70b-bf16-tp2", 8192, 0, 970.0, 0.02),
    ],
)
def test_prefill_takes_what_the_source_says(
    name: str, tokens: int, cached: int, source_ms: float, tolerance: float
) -> None:
    """A lone prompt's first token comes after AIConfigurator's prefill time, within the fit's stated error."""
    model = EngineModel(find_preset(name), max_batched_tokens=8192)
    start = 0.0
    if cached:
        model.submit(EngineRequest("before", cached, 1, range(cached // 16)), 0.0)
        model.advance(start := 100.0)
    state = model.submit(EngineRequest("r", cached + tokens, 1, range(cached // 16)), start)
    model.advance(1000.0)
    assert state.cached_tokens == cached
    assert state.first_token_s is not None
    assert (state.first_token_s - start) * 1000 == pytest.approx(source_ms, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "batch", "context", "source_ms", "tolerance"),
    [
        ("70b-fp8-tp2", 1, 1024, 17.3, 0.02),
        ("70b-fp8-tp2", 64, 1024, 21.2, 0.03),
        ("70b-fp8-tp2", 64, 8192, 33.9, 0.06),
        ("8b-bf16-tp1", 64, 1024, 10.3, 0.09),
        ("8b-bf16-tp1", 128, 2048, 18.5, 0.1),
        ("70b-bf16-tp2", 64, 1024, 32.6, 0.02),
    ],
)
def test_decode_takes_what_the_source_says(
    name: str, batch: int, context: int, source_ms: float, tolerance: float
) -> None:
    """A batch that only decodes makes a token per sequence in AIConfigurator's step time, within the stated error."""
    preset = replace(find_preset(name), kv_blocks=100_000)
    model = EngineModel(preset)
    for n in range(batch):
        model.submit(EngineRequest(str(n), context, 10_000), 0.0)
    states = model.advance(batch * context * 2e-4 + 1)
    assert len(states) == batch
    steps, tokens, busy_s = model.steps, model.generation_tokens, model.busy_s
    # As many steps on both sides of the context that the source is for.
    model.advance(busy_s + 0.5)
    assert model.generation_tokens - tokens == batch * (model.steps - steps)
    drift_s = preset.kv_s * batch * (sum(s.computed for s in states) / batch - context)
    step_s = (model.busy_s - busy_s) / (model.steps - steps) - drift_s
    assert step_s * 1000 == pytest.approx(source_ms, rel=tolerance)


def test_blocks_are_hittable_once_their_step_is_planned() -> None:
    """Of two equal prompts admitted to one step the second shares the first's blocks."""
    model = EngineModel(COUNTING, block_size=4, max_seqs=8)
    model.submit(EngineRequest("idle", 1, 1), 0.0)
    a = model.submit(EngineRequest("a", 10, 1, "xy"), 0.0)
    b = model.submit(EngineRequest("b", 10, 1, "xy"), 0.0)
    model.advance(2.0)
    assert (a.cached_tokens, b.cached_tokens) == (0, 8)
    assert a.finished_s == b.finished_s == 2.0
    assert (model.queried_tokens, model.hit_tokens) == (21, 8)


def test_generated_blocks_are_cached_up_to_the_last_computed_token() -> None:
    """The next turn of a chat hits prompt and answer, but not a block that holds the answer's last token."""
    model = EngineModel(COUNTING, block_size=4)
    model.submit(EngineRequest("turn 1", 6, 6, "abc"), 0.0)  # 12 tokens, 11 of them computed: 2 full blocks
    model.advance(100.0)
    second = model.submit(EngineRequest("turn 2", 20, 1, "abcde"), 100.0)
    model.advance(200.0)
    assert second.cached_tokens == 8
    third = model.submit(EngineRequest("turn 1 longer", 6, 7, "abc"), 200.0)
    model.advance(300.0)
    assert third.cached_tokens == 4
    fourth = model.submit(EngineRequest("turn 2 longer", 20, 1, "abcXX"), 300.0)
    model.advance(400.0)
    assert fourth.cached_tokens == 12


def test_the_youngest_is_preempted_and_computed_anew() -> None:
    """When a decode needs a block and none is free, the youngest request gives up all of its own and waits in front."""
    model = EngineModel(COUNTING, kv_blocks=4, block_size=4, max_seqs=8)
    a = model.submit(EngineRequest("a", 4, 9), 0.0)
    b = model.submit(EngineRequest("b", 7, 4), 0.0)
    c = model.submit(EngineRequest("c", 4, 1), 0.0)
    # a needs 1, 2, 3 blocks; b 2, and a third one at its 9th token, when a has 2 of the 4.
    model.advance(4.0)
    assert (b.preemptions, model.preemptions, model.num_running, model.num_waiting) == (1, 1, 1, 2)
    assert b.generated == 2
    model.advance(30.0)
    assert a.finished_s == 9.0
    assert a.preemptions == 0
    assert b.finished_s is not None
    assert c.first_token_s is not None
    assert b.finished_s > a.finished_s
    assert c.first_token_s >= b.first_token_s  # type: ignore[operator]
    assert (a.generated, b.generated, c.generated) == (9, 4, 1)
    assert model.cache.num_pinned == 0


def test_a_request_that_does_not_fit_holds_up_those_behind_it() -> None:
    """Admission is first come first served: a small request does not overtake a large one that waits for blocks."""
    model = EngineModel(COUNTING, kv_blocks=8, block_size=4, max_seqs=8)
    first = model.submit(EngineRequest("first", 20, 5), 0.0)
    large = model.submit(EngineRequest("large", 20, 1), 0.0)
    small = model.submit(EngineRequest("small", 1, 1), 0.0)
    model.advance(4.0)
    assert (model.num_running, model.num_waiting) == (1, 2)
    model.advance(100.0)
    assert first.finished_s == 5.0
    assert large.admitted_s == small.admitted_s == 5.0


def test_max_seqs_bounds_the_batch() -> None:
    """No more than max_seqs requests run at once, however many tokens are left."""
    model = EngineModel(COUNTING, max_seqs=2)
    states = [model.submit(EngineRequest(str(n), 1, 2), 0.0) for n in range(5)]
    model.advance(100.0)
    assert [s.finished_s for s in states] == [2.0, 3.0, 4.0, 5.0, 6.0]


def test_an_abort_frees_blocks_wherever_the_request_is() -> None:
    """Aborted while waiting, in prefill or decoding, a request leaves nothing behind and no later news."""
    model = EngineModel(COUNTING, block_size=4, max_batched_tokens=8, max_seqs=2)
    decoding = model.submit(EngineRequest("decoding", 4, 50), 0.0)
    prefilling = model.submit(EngineRequest("prefilling", 100, 5), 0.0)
    waiting = model.submit(EngineRequest("waiting", 4, 5), 0.0)
    model.advance(3.5)
    assert (model.num_running, model.num_waiting) == (2, 1)
    for state in (waiting, prefilling, decoding):
        model.abort(state.request.request_id, 3.5)
        model.abort(state.request.request_id, 3.5)
        assert state.status == "aborted"
    assert (model.num_running, model.num_waiting, model.cache.num_pinned) == (0, 0, 0)
    assert model.advance(100.0) == []
    assert model.next_event_s() is None
    assert decoding.generated == 3
    again = model.submit(EngineRequest("decoding", 4, 1), 100.0)
    assert model.advance(101.0) == [again, again]


@pytest.mark.parametrize(
    ("prompt", "output", "remedy"), [(0, 1, "at least 1"), (1, 0, "at least 1"), (17, 1, "shorten"), (10, 8, "shorten")]
)
def test_refuses_what_can_never_run(prompt: int, output: int, remedy: str) -> None:
    """Empty requests and those above the whole KV cache are refused with the remedy, and leave the engine idle."""
    model = EngineModel(COUNTING, kv_blocks=4, block_size=4)
    with pytest.raises(InvalidInput, match=remedy):
        model.submit(EngineRequest("r", prompt, output), 0.0)
    assert model.next_event_s() is None
    model.submit(EngineRequest("r", 10, 7), 0.0)
    with pytest.raises(InvalidInput, match="in flight already"):
        model.submit(EngineRequest("r", 1, 1), 0.0)


def test_refuses_an_engine_that_could_not_work() -> None:
    """A batch smaller than its requests, no block, and an unknown preset are refused."""
    with pytest.raises(InvalidInput, match="needs a token a step"):
        EngineModel(COUNTING, max_batched_tokens=8, max_seqs=9)
    with pytest.raises(InvalidInput, match="at least 1"):
        EngineModel(COUNTING, kv_blocks=0)
    with pytest.raises(InvalidInput, match="use one of: 70b-fp8-tp2"):
        find_preset("405b")


def test_a_reset_makes_the_next_request_cold() -> None:
    """After a reset an equal prompt is computed whole."""
    model = EngineModel(COUNTING, block_size=4)
    model.submit(EngineRequest("a", 9, 1, "xy"), 0.0)
    model.advance(10.0)
    assert model.reset_prefix_cache() == 2
    b = model.submit(EngineRequest("b", 9, 1, "xy"), 10.0)
    model.advance(20.0)
    assert b.cached_tokens == 0


def arrivals(seed: int, count: int) -> list[tuple[float, EngineRequest]]:
    """Return requests of a few shared prefixes at random times."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for n in range(count):
        now += rng.choice((0.0, rng.expovariate(20.0), rng.expovariate(2.0)))
        prompt, output, group = rng.randint(1, 40), rng.randint(1, 20), rng.randrange(3)
        shared = rng.randrange(10)
        hashes: list[Hashable] = [(group, i) if i < shared else (group, n, i) for i in range((prompt + output) // 4)]
        requests.append((now, EngineRequest(str(n), prompt, output, hashes)))
    return requests


def outcome(states: list[RequestState]) -> list[tuple[object, ...]]:
    """Return all that a request can show."""
    return [
        (s.status, s.admitted_s, s.first_token_s, s.finished_s, s.generated, s.cached_tokens, s.preemptions)
        for s in states
    ]


SMALL = Preset("small", 0.02, 0.005, 1e-3, 1e-5, 1e-5, 1e-4, kv_blocks=18)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.lists(st.floats(0.001, 3.0), min_size=1, max_size=5))
def test_small_advances_equal_a_big_one(seed: int, strides: list[float]) -> None:
    """How often the model is advanced changes nothing: not a time, not a hit, not a preemption."""
    requests = arrivals(seed, 30)
    once, often = (EngineModel(SMALL, block_size=4, max_batched_tokens=24, max_seqs=8) for _ in range(2))
    all_once = [once.submit(request, at) for at, request in requests]
    once.advance(1e6)
    all_often, now, turn = [], 0.0, 0
    for at, request in requests:
        while now + strides[turn % len(strides)] < at:
            now += strides[turn % len(strides)]
            turn += 1
            often.advance(now)
            often.next_event_s()
        all_often.append(often.submit(request, at))
    while (event_s := often.next_event_s()) is not None:
        often.advance(event_s)
    assert outcome(all_often) == outcome(all_once)
    assert (once.steps, once.busy_s, once.hit_tokens) == (often.steps, often.busy_s, often.hit_tokens)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_work_is_conserved_and_order_kept(seed: int) -> None:
    """Requests get all their tokens; steps neither overlap nor idle while there is work; admission keeps order."""
    requests = arrivals(seed, 30)
    model = EngineModel(SMALL, block_size=4, max_batched_tokens=24, max_seqs=8)
    states = [model.submit(request, at) for at, request in requests]
    model.advance(1e6)
    assert all(s.status == "finished" and s.generated == s.request.output_tokens for s in states)
    assert model.generation_tokens == sum(s.request.output_tokens for s in states)
    assert model.prompt_tokens == model.queried_tokens == sum(s.request.prompt_tokens for s in states)
    assert model.hit_tokens == sum(s.cached_tokens for s in states)
    assert all(s.cached_tokens < s.request.prompt_tokens for s in states)
    admitted = [s.admitted_s for s in states]
    assert admitted == sorted(admitted)  # type: ignore[type-var]
    spans = sorted((s.arrived_s, s.finished_s) for s in states if s.finished_s is not None)
    covered, end = 0.0, 0.0
    for start, stop in spans:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    assert model.busy_s == pytest.approx(covered)
    assert model.cache.num_pinned == 0


class PlainEngine:
    """The rules of vLLM's scheduler request by request, step by step, no shortcut; the cache is the real one."""

    def __init__(self, model: EngineModel) -> None:
        self.model, self.cache = model, EngineModel(model.preset, block_size=model.cache.block_size).cache
        self.waiting: list[dict] = []  # type: ignore[type-arg]
        self.running: list[dict] = []  # type: ignore[type-arg]
        self.now = 0.0

    def step(self) -> None:
        size, budget, preempted = self.cache.block_size, self.model.max_batched_tokens, False
        work: list[tuple[dict, int]] = []  # type: ignore[type-arg]
        for r in list(self.running):
            if r not in self.running:
                continue
            n = min(r["prompt"] + r["generated"] - r["computed"], budget)
            while (new := self.cache.allocate(-(-(r["computed"] + n) // size) - len(r["blocks"]))) is None:
                victim = self.running.pop()
                work = [(other, m) for other, m in work if other is not victim]
                self.cache.release(victim["blocks"])
                victim.update(blocks=[], computed=0, decoding=False, preemptions=victim["preemptions"] + 1)
                self.waiting.insert(0, victim)
                preempted = True
                if victim is r:
                    break
            if new is not None:
                budget -= self.take(r, new, n, work)
        while not preempted and self.waiting and budget and len(self.running) < self.model.max_seqs:
            r = self.waiting[0]
            length = r["prompt"] + r["generated"]
            hits = self.cache.lookup(r["hashes"], length)
            if not self.cache.fits(hits, -(-length // size) - len(hits)):
                break
            self.cache.pin(hits)
            r.update(blocks=hits, computed=len(hits) * size)
            r.setdefault("cached", len(hits) * size)
            self.running.append(self.waiting.pop(0))
            n = min(length - r["computed"], budget)
            new = self.cache.allocate(-(-(r["computed"] + n) // size) - len(r["blocks"]))
            assert new is not None
            budget -= self.take(r, new, n, work)
        p = self.model.preset
        tokens = sum(n for _, n in work)
        prefills = [(r, n) for r, n in work if r["chunk"]]
        decodes = [r for r, _ in work if not r["chunk"]]
        self.now += (
            max(p.floor_s, p.base_s + p.token_s * tokens)
            + p.pair_s2 * sum(n * (r["computed"] - n / 2) for r, n in prefills)
            + p.kv_s * sum(r["computed"] - 1 for r in decodes)
            + p.seq_s * len(work)
        )
        for r, _ in work:
            if r["computed"] == r["prompt"] + r["generated"]:
                r["generated"] += 1
                r.setdefault("first", self.now)
                if r["generated"] == r["output"]:
                    r["end"] = self.now
                    self.running.remove(r)
                    self.cache.release(r["blocks"])

    def take(self, r: dict, new: list[int], n: int, work: list) -> int:  # type: ignore[type-arg]
        size = self.cache.block_size
        r["blocks"] += new
        # All that is computed before a request's next token is due is prefill, also after a preemption.
        r["chunk"] = not r["decoding"]
        self.cache.commit(r["blocks"], r["hashes"], r["computed"] // size, (r["computed"] + n) // size)
        r["computed"] += n
        r["decoding"] = r["computed"] == r["prompt"] + r["generated"]
        work.append((r, n))
        return n


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 100_000), st.integers(12, 30), st.integers(8, 40), st.integers(1, 8))
def test_agrees_with_a_plain_scheduler(seed: int, kv_blocks: int, budget: int, max_seqs: int) -> None:
    """Times, hits and preemptions are those of a scheduler that walks every request in every step."""
    requests = [request for _, request in arrivals(seed, 25)]
    requests = [r for r in requests if r.prompt_tokens + r.output_tokens <= kv_blocks * 4]
    preset = replace(SMALL, kv_blocks=kv_blocks)
    model = EngineModel(preset, block_size=4, max_batched_tokens=budget, max_seqs=max_seqs)
    plain = PlainEngine(model)
    # All at once, behind a request that occupies the first step: both sides then see the same queue.
    head = EngineRequest("head", 1, 1)
    states = [model.submit(request, 0.0) for request in (head, *requests)]
    rows = [
        {
            "prompt": r.prompt_tokens, "output": r.output_tokens, "hashes": r.hashes, "generated": 0, "computed": 0,
            "blocks": [], "preemptions": 0, "decoding": False,
        }
        for r in (head, *requests)
    ]  # fmt: skip
    plain.waiting = rows[:1]
    plain.step()
    plain.waiting = rows[1:]
    while plain.waiting or plain.running:
        plain.step()
    model.advance(1e6)
    for state, row in zip(states, rows, strict=True):
        assert state.first_token_s == pytest.approx(row["first"])
        assert state.finished_s == pytest.approx(row["end"])
        assert (state.cached_tokens, state.preemptions) == (row["cached"], row["preemptions"])
    assert list(model.cache.free) == list(plain.cache.free)


def test_a_stretch_of_decodes_is_foreseen_exactly() -> None:
    """While all decode, the next event is the first end, computed ahead, and advancing to it brings it."""
    for preset in PRESETS:
        model = EngineModel(preset)
        for n in range(10):
            model.submit(EngineRequest(str(n), 100 + n, 300 + 7 * n), 0.0)
        while model.num_waiting or model.advance(model.next_event_s() or 0.0) == []:
            model.advance(model.next_event_s() or 0.0)
        finished = 0
        while (event_s := model.next_event_s()) is not None:
            # The sum of the steps and the closed form differ by rounding.
            changed = model.advance(event_s + 1e-9)
            assert changed
            assert all(s.finished_s == pytest.approx(event_s) for s in changed if s.status == "finished")
            finished += sum(s.status == "finished" for s in changed)
        assert finished == 10
