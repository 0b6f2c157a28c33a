"""The queues on vLLM's own KVCacheManager: a recorded trace under LRU, and what cannot be reached under the others."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from engine_patch.block_manager import BLOCK_TOKENS, VllmBlocks
from engine_patch.policy import POLICIES

ROOT = Path(__file__).resolve().parents[2]
EXCERPT = ROOT / "replay" / "data" / "mooncake_conversation_excerpt.jsonl.gz"
WHOLE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl"
PER_ID = 4  # blocks that stand for one of the trace's 512-token blocks
IN_FLIGHT = 12


def trace(path: Path) -> Iterator[tuple[list[bytes], int]]:
    """Yield (hashes of the prompt's full blocks, output blocks) of a Mooncake trace, 4 blocks for each of its ids."""
    import gzip
    import json

    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            row = json.loads(line)
            ids = [(8 * number + part).to_bytes(8, "big") for number in row["hash_ids"] for part in range(PER_ID)]
            yield ids, row["output_length"] * PER_ID // 512


class Replay:
    """Requests on one manager, some in flight; notes what block each of them got."""

    def __init__(self, num_blocks: int, policy: str) -> None:
        self.blocks = VllmBlocks(num_blocks, policy)
        self.manager = self.blocks._manager
        self.pool = self.manager.block_pool
        self.running: list[tuple[str, list[bytes], int]] = []
        self.parents: dict[bytes, bytes] = {}

    def serve(self, number: int, prompt: list[bytes], output: int) -> tuple[int | None, list[int]]:
        """Admit a request, ending older ones to make room; return its hit tokens and block ids."""
        tokens = len(prompt) * BLOCK_TOKENS + 1
        name = str(number)
        hit = self.blocks.start(name, prompt, tokens)
        while hit is None and self.running:
            self.end()
            hit = self.blocks.start(name, prompt, tokens)
        if hit is None:
            return None, []
        ids = self.manager.get_block_ids(name)[0]
        self.running.append((name, prompt, output))
        if len(self.running) > IN_FLIGHT:
            self.end()
        self.parents.update(zip(prompt[1:], prompt, strict=False))
        return hit, ids

    def end(self) -> None:
        """End the oldest request, its output included."""
        name, prompt, output = self.running.pop(0)
        made = [b"out" + name.encode() + b"/" + str(at).encode() for at in range(output)]
        whole = prompt + made
        self.parents.update(zip(whole[len(prompt) :], whole[len(prompt) - 1 :], strict=False))
        self.blocks.finish(name, whole, len(whole) * BLOCK_TOKENS + 1)

    def unreachable(self) -> list[Any]:
        """Return the free blocks with a hash that no look-up can reach."""
        known = {key[:-4] for key in self.pool.cached_block_hash_to_block._cache}
        dead: dict[bytes, bool] = {}

        def is_dead(content: bytes) -> bool:
            chain = []
            while content not in dead:
                chain.append(content)
                if content not in known:
                    dead[content] = True
                elif content not in self.parents:
                    dead[content] = False
                else:
                    content = self.parents[content]
                    continue
                break
            fate = dead[content]
            for passed in chain:
                dead[passed] = fate or passed not in known
                fate = dead[passed]
            return fate

        free = self.pool.free_block_queue.get_all_free_blocks()
        return [block for block in free if block._block_hash is not None and is_dead(block._block_hash[:-4])]


def same_as_vllm(path: Path, requests: int | None, num_blocks: int) -> int:
    """Replay a trace on vLLM's queue and on ours under LRU; return the hit tokens when all block ids are the same."""
    stock, ours = Replay(num_blocks, "stock"), Replay(num_blocks, "lru")
    hits = 0
    for number, (prompt, output) in enumerate(islice(trace(path), requests)):
        expected = stock.serve(number, prompt, output)
        assert ours.serve(number, prompt, output) == expected, f"request {number}"
        hits += expected[0] or 0
    order = [block.block_id for block in stock.pool.free_block_queue.get_all_free_blocks()]
    assert [block.block_id for block in ours.pool.free_block_queue.get_all_free_blocks()] == order
    assert ours.blocks.check() is None
    return hits


def test_lru_gives_the_block_ids_that_vllm_gives() -> None:
    """400 requests of the shipped trace with a pool that overflows: every request gets the very same blocks."""
    assert same_as_vllm(EXCERPT, 400, 8_000) > 0


@pytest.mark.newest
@pytest.mark.timeout(600)
def test_lru_gives_the_block_ids_that_vllm_gives_on_the_whole_trace() -> None:
    """All of the recorded hour, where it is at hand, else the whole excerpt."""
    whole = WHOLE.exists()
    assert same_as_vllm(WHOLE if whole else EXCERPT, None, 64_000 if whole else 16_000) > 0


def test_switching_to_a_policy_and_back_keeps_serving_the_trace() -> None:
    """Policies changed every 40 requests of the trace: the checks hold, and hits go on."""
    replay, rng, hits = Replay(8_000, "lru"), Random(0), 0
    for number, (prompt, output) in enumerate(islice(trace(EXCERPT), 400)):
        if number % 40 == 39:
            replay.blocks.switch(rng.choice(POLICIES))
            assert replay.blocks.check() is None
        hits += replay.serve(number, prompt, output)[0] or 0
    assert replay.blocks.check() is None
    assert hits > 0


def chats(rng: Random) -> Iterator[tuple[list[bytes], int]]:
    """Yield turns of many chats, each turn's prompt the whole chat before it: what leaves S3-FIFO most orphans."""
    running: list[tuple[bytes, list[bytes], int]] = []
    started = 0
    while True:
        if len(running) < 60 or rng.random() < 0.2:
            started += 1
            name = b"chat%d" % started
            running.append((name, [name + b"/%d" % at for at in range(20)], rng.randint(2, 6)))
        at = rng.randrange(len(running))
        name, history, left = running[at]
        yield history, 0
        if left:
            grown = history + [name + b"/%d" % number for number in range(len(history), len(history) + 12)]
            running[at] = (name, grown, left - 1)
        else:
            running.pop(at)


def share_unreachable(policy: str, linked: bool) -> tuple[float, int]:
    """Return (mean share of free hashed blocks that no look-up reaches, how many of them stood behind others)."""
    replay = Replay(1_500, policy)
    if not linked:
        del replay.pool.cache_full_blocks  # the hook that tells of chains
    shares, behind = [], 0
    for number, (prompt, output) in enumerate(islice(chats(Random(1)), 1_500)):
        replay.serve(number, prompt, output)
        if number > 500 and number % 50 == 0:
            dead = replay.unreachable()
            free = replay.pool.free_block_queue.get_all_free_blocks()
            shares.append(len(dead) / sum(block._block_hash is not None for block in free))
            hashed = [block for block in free if block._block_hash is not None]
            behind += sum(block is not front for block, front in zip(sorted_by(hashed, dead), hashed, strict=False))
    return sum(shares) / len(shares), behind


def sorted_by(order: list[Any], some: list[Any]) -> list[Any]:
    """Return `some` in the order in which they stand in `order`."""
    chosen = {id(block) for block in some}
    return [block for block in order if id(block) in chosen]


def test_lru_leaves_nothing_that_cannot_be_reached() -> None:
    """vLLM frees a request tail first, so under LRU a child never outlives its parent: the yardstick."""
    assert share_unreachable("lru", linked=True) == (0.0, 0)


@pytest.mark.newest
@pytest.mark.parametrize("policy", ["s3fifo", "s3fifo-25", "arc"])
def test_what_cannot_be_reached_is_evicted_first(policy: str) -> None:
    """No unreachable block stands behind one that can be reached; they are few, where without links they are many."""
    share, behind = share_unreachable(policy, linked=True)
    naive, _ = share_unreachable(policy, linked=False)
    print(f"{policy}: {share:.2%} of free hashed blocks unreachable, {naive:.2%} without links")
    assert behind == 0
    assert share <= naive / 2
