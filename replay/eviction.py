"""Counts what a trace would hit in a prefix cache under an eviction policy: no time, one request after the other.

1. A request names its blocks by chained ids, in prompt order. Its hits are the leading ids that are cached; the whole
   request is looked up before anything is inserted.
2. Room is then made for the rest, by evictions from among the blocks that are not the request's own, and all its blocks
   are freed tail first, as vLLM does. Of a request with more blocks than the cache only the head is kept.
3. Cached blocks behind the first miss (orphans that were not evicted yet) give way to the newly computed ones.

A trace of single ids is one of requests with one block each. Nothing is pinned longer than its request, outputs are not
cached, and a prompt may be hit whole; a real engine differs in all three (engine_patch.shadow follows one).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from engine_patch import bounds, oracle
from engine_patch.policy import new_queue
from replay.traces import read_trace, trace_lines
from service.errors import InvalidInput

MAX_ID = 2**63 - 1


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """Ids of blocks, request by request; `chained`: a request's ids hang on each other, else each stands alone."""

    requests: Sequence[Sequence[int]]
    chained: bool

    def blocks(self) -> list[int]:
        """Return all ids, in prompt order."""
        return list(chain.from_iterable(self.requests))


def read_blocks(path: Path) -> BlockTrace:
    """Return the blocks of a file of Mooncake JSONL or of one whole number a line, plain or gzip.

    The first line that is not empty tells which. Raise InvalidInput, naming the line, for what is neither.
    """
    ids: list[tuple[int]] = []
    for number, line in trace_lines(path):
        text = line.strip()
        if not text:
            continue
        if not ids and text.startswith(b"{"):
            return _requests(path)
        try:
            block = int(text.decode("ascii")) if text.isdigit() else -1
        except ValueError:  # more digits than Python reads
            block = -1
        if not 0 <= block <= MAX_ID:
            shown = repr(text[:40].decode("utf-8", "replace"))
            raise InvalidInput(
                f"trace {path}, line {number}: {shown} is not a whole number from 0 to 2^63 - 1",
                "give one id a line, or Mooncake JSONL from the first line on",
            )
        ids.append((block,))
    if not ids:
        raise InvalidInput(f"trace {path} holds no request", "give Mooncake JSONL, or one id a line")
    return BlockTrace(ids, chained=False)


def hits(policy: str, trace: BlockTrace, capacity: int) -> int:
    """Return how many blocks of a trace hit in `capacity` blocks under a policy by name; about 0.5 µs a block."""
    no_blocks: tuple[int, ...] = ()
    queue = new_queue(policy, capacity, no_blocks)
    found = 0
    for request in trace.requests:
        blocks = request[:capacity]
        known = queue.prefix(blocks)
        found += known
        queue.take(blocks[:known])
        queue.discard_all(blocks[known:])
        queue.evict_many(max(0, len(queue) + len(blocks) - capacity))
        queue.append_chain(blocks[known:], None, blocks[known - 1] if known else None)
        queue.append_chain(blocks[:known])
    return found


def oracle_hits(policy: str, trace: BlockTrace, capacity: int) -> int:
    """Return the hits of libcachesim's LRU or S3-FIFO (engine_patch.oracle), each id counted by itself."""
    return sum(oracle.hits(policy, trace.blocks(), capacity))


def bound_hits(trace: BlockTrace, capacity: int) -> tuple[int, int]:
    """Return the hits that no policy can beat: of an infinite cache, and of Belady's MIN with `capacity` blocks.

    Of a request with more blocks than the cache MIN sees the head, as the policies do (rule 2).
    """
    heads = [block for request in trace.requests for block in request[:capacity]]
    return bounds.infinite(trace.blocks()), bounds.belady(heads, capacity)


def _requests(path: Path) -> BlockTrace:
    requests = [request.blocks for request in read_trace(path)]
    for number, request in enumerate(requests, 1):
        if len(set(request)) < len(request):
            raise InvalidInput(
                f"trace {path}, request {number}: an id stands twice in hash_ids",
                "give chained ids: an id stands for its block and all before it",
            )
    return BlockTrace(requests, chained=True)
