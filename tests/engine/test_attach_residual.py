"""The shadow of the live policy hits what vLLM's own block manager hits, whatever stands in several blocks there."""

from random import Random
from typing import NamedTuple

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager

from engine_patch import attach, free_queue
from engine_patch.attachment import Attachment
from engine_patch.block_manager import _Request
from tests.engine.attached import BLOCK, Ears, bare, with_ears
from tests.engine.residual import residual

REQUESTS, SEEDS, POOL = 1000, 2, 63
LIMIT = 0.005


class Asked(NamedTuple):
    """Hashes and tokens of a prompt, and of it with its answer."""

    hashes: list[bytes]
    tokens: int
    all_hashes: list[bytes]
    all_tokens: int


class Traffic:
    """A third of the prompts come again, in full: one of three hot ones, or one of the last."""

    def __init__(self, seed: int, aligned: bool, same_answer: bool, hot: bool) -> None:
        self.rng = Random(seed)
        self.aligned, self.same_answer = aligned, same_answer
        self.hot = [self.fresh(4) for _ in range(3)] if hot else []
        self.past: list[Asked] = []

    def fresh(self, count: int) -> list[bytes]:
        return [self.rng.getrandbits(64).to_bytes(8, "little") for _ in range(count)]

    def ask(self) -> Asked:
        rng = self.rng
        again = rng.random() < 1 / 3 and self.past
        if again and not self.hot:
            known = self.past[-1 - min(len(self.past) - 1, int(rng.expovariate(1 / 8)))]
            return known if self.same_answer else self.answered(known.hashes, known.tokens)
        if again:
            hashes = rng.choice(self.hot)
        else:
            hashes = self.fresh(12 if self.hot else rng.randint(1, 8))
        rest = 0 if self.aligned and (again or not self.hot) else rng.randint(1, BLOCK - 1)
        asked = self.answered(hashes, len(hashes) * BLOCK + rest)
        self.past.append(asked)
        return asked

    def answered(self, hashes: list[bytes], tokens: int) -> Asked:
        answer = self.fresh(self.rng.randint(0, 3))
        all_hashes = hashes + answer
        return Asked(hashes, tokens, all_hashes, max(tokens, len(all_hashes) * BLOCK + 3))


class Server:
    """vLLM's block manager with the patch on it, and requests side by side, in chunks where asked."""

    def __init__(self, policy: str, side_by_side: int, chunk: int) -> None:
        self.scheduler, self.blocks = bare(POOL)
        outcome = attach.attach(self.scheduler, {"WAKMAN_POLICY": policy})
        assert isinstance(outcome, Attachment)
        self.outcome = outcome
        self.side_by_side, self.chunk = side_by_side, chunk or 1 << 30
        self.manager, self.running = self.scheduler.kv_cache_manager, self.blocks._running
        self.partial: list[tuple[str, Asked]] = []
        self.done: list[tuple[str, Asked]] = []

    def serve(self, traffic: Traffic, twins: float) -> None:
        """Serve all of it; `twins`: how many come twice at once."""
        rng, waiting, started = Random(7), [], 0
        while started < REQUESTS or self.partial or self.done:
            for item in list(self.partial):
                self.compute(item)
            while started < REQUESTS and len(self.running) < self.side_by_side:
                if not waiting:
                    waiting += [traffic.ask()] * (1 + (rng.random() < twins))
                if not self.start(f"r{started}", waiting[0]):
                    break
                waiting.pop(0)
                started += 1
            if self.done and (len(self.running) >= self.side_by_side or not self.partial or rng.random() < 0.5):
                request_id, asked = self.done.pop(rng.randrange(len(self.done)))
                self.blocks.finish(request_id, asked.all_hashes, asked.all_tokens)
        assert self.blocks.num_free == POOL
        engine = self.outcome._engine
        assert free_queue.check(engine.queue, self.outcome._state, engine.pool) is None
        self.outcome.detach("the test is over")

    def start(self, request_id: str, asked: Asked) -> bool:
        """Admit a request and compute its first chunk, as the scheduler does; False when there is no room."""
        request = self.running[request_id] = _Request(request_id, list(asked.hashes), asked.tokens)
        found, hit = self.manager.get_computed_blocks(request)[:2]
        new = min(self.chunk, asked.tokens - hit)
        if self.manager.allocate_slots(request, new, hit, found, full_sequence_must_fit=True) is None:
            del self.running[request_id]
            return False
        self.manager.record_prefix_cache_stats(request, hit)
        request.num_computed_tokens = hit + new
        (self.done if request.num_computed_tokens == asked.tokens else self.partial).append((request_id, asked))
        return True

    def compute(self, item: tuple[str, Asked]) -> None:
        """Compute the next chunk; a request without room is aborted."""
        request = self.running[item[0]]
        new = min(self.chunk, request.num_tokens - request.num_computed_tokens)
        if self.manager.allocate_slots(request, new) is None:
            self.partial.remove(item)
            self.manager.free(self.running.pop(item[0]))
            return
        request.num_computed_tokens += new
        if request.num_computed_tokens == request.num_tokens:
            self.partial.remove(item)
            self.done.append(item)


def residuals(
    policy: str,
    patch: pytest.MonkeyPatch,
    *,
    aligned: bool = True,
    same_answer: bool = False,
    hot: bool = False,
    side_by_side: int = 6,
    chunk: int = 0,
    twins: float = 0.0,
    eagle: bool = False,
) -> list[float]:
    """Return the residual of each seed."""
    ears: Ears = with_ears(patch)
    stock = KVCacheManager.__init__
    if eagle:
        patch.setattr(KVCacheManager, "__init__", lambda self, *a, **k: stock(self, *a, **{**k, "use_eagle": True}))
    found = []
    for seed in range(SEEDS):
        ears.told.clear()
        Server(policy, side_by_side, chunk).serve(Traffic(seed, aligned, same_answer, hot), twins)
        found.append(residual(ears.told, policy, POOL, BLOCK, int(eagle)))
    return found


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
@pytest.mark.parametrize("side_by_side", [1, 8])
def test_block_aligned_prompts_that_come_again(policy: str, side_by_side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes its last block anew: copies take room, and half a point of the hit rate is not lost over it."""
    for hot in (False, True):
        for found in residuals(policy, monkeypatch, hot=hot, side_by_side=side_by_side):
            assert abs(found) < LIMIT, hot


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_answers_that_come_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer given before is computed anew, into copies of its blocks."""
    for found in residuals(policy, monkeypatch, aligned=False, same_answer=True):
        assert abs(found) < LIMIT


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_prompts_computed_side_by_side(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal prompts at once, in chunks: the second finds what the first has computed until then, and makes copies."""
    for found in residuals(policy, monkeypatch, chunk=4 * BLOCK, twins=0.5):
        assert abs(found) < LIMIT


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_prompts_that_take_their_blocks_in_chunks(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prompt does not hold yet evicts nothing yet."""
    for found in residuals(policy, monkeypatch, chunk=4 * BLOCK, hot=True, side_by_side=8):
        assert abs(found) < LIMIT


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_an_engine_that_drops_the_end_of_each_hit(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With EAGLE each hit leaves a copy of its last block."""
    for hot in (False, True):
        for found in residuals(policy, monkeypatch, eagle=True, hot=hot):
            assert abs(found) < LIMIT, hot
