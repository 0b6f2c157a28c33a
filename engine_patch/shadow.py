"""Shadows of a whole KV pool: what each eviction policy would have kept, had it been live on this very traffic.

1. A block is known by its content's hash. Blocks in use are the same under every policy, so they are counted once, by
   reference; a policy owns the hashed free blocks alone: at most `num_blocks` - blocks in use. Whatever is beyond that
   is evicted when requests take blocks; blocks never used, or freed without a hash, are thus used first, as in vLLM.
2. Admission: look up the whole request (its hit is the contiguous run of known blocks, at most
   (num_tokens - 1) // block_size, less what the engine drops of it), count the hits, pin all blocks of the prompt,
   evict. A lookup that the engine does not count (preempted and admitted again, or one that skips reading) pins and
   evicts only.
3. Free: take the blocks of the output, evict for them, unpin; those that nobody else uses go back tail first.
4. A request pins its chain from the first block on, so what others pin of it is a beginning.
5. With `sample` < 1 only that share of the blocks is followed, chosen by hash, in a pool of num_blocks * sample. A hit
   is then the run of known blocks among the sampled ones: never less than the true one, and nearer to it than
   counting every known block.
6. Chains are ranges of small numbers (chain_ids.py) and queues hold ranges (spans.py), so that the cost is by request
   more than by block. When the numbers run out, those that no queue, ghost or request knows are taken back.

Where a content stands in several blocks, a shadow has one; prompts computed side by side make such copies, and they
cost below 0.2 points of fidelity at 17 copies in 100 requests (tests/unit/test_shadow.py). Cost:
tests/bench/bench_shadow.py.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine_patch.chain_ids import ChainIds, Range
from engine_patch.events import Hashes
from engine_patch.span_policies import new_spans
from engine_patch.spans import SpanQueue

_MIX = np.uint64(0x9E3779B97F4A7C15)
IDS_PER_BLOCK, IDS_MIN = 6, 8192


class Lane:
    """One policy's shadow: its free blocks, and what it has hit so far."""

    __slots__ = ("hit_blocks", "inserted", "policy", "queue")

    def __init__(self, policy: str, queue: SpanQueue) -> None:
        self.policy = policy
        self.queue = queue
        self.hit_blocks = 0
        """Hits of counted requests."""
        self.inserted = 0
        """Blocks that came into the pool."""


class PoolShadow:
    """One pool under several policies; the caller says what happened, in the order in which it happened."""

    def __init__(
        self, policies: Iterable[str], num_blocks: int, block_size: int, sample: float = 1.0, dropped: int = 0
    ) -> None:
        """dropped: how many blocks at the end of each hit the engine computes anew all the same (EAGLE: 1)."""
        assert num_blocks > 0
        assert block_size > 0
        assert 0 < sample <= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sample = sample
        # Among sampled blocks the last of a hit is mostly none of them.
        self._dropped = dropped if sample == 1 else 0
        self.capacity = max(1, round(num_blocks * sample))
        self.ids = ChainIds(max(IDS_MIN, IDS_PER_BLOCK * self.capacity))
        self.lanes = [Lane(policy, new_spans(policy, self.ids, self.capacity)) for policy in policies]
        self.queried_blocks = 0
        """Full blocks that counted requests looked up; of the sampled ones, where there is a sample."""
        self._threshold = np.uint64(min(round(sample * 2**32), 2**32))
        self._pins: npt.NDArray[np.int32] = np.zeros(self.ids.size, dtype=np.int32)
        self._held = self._unhashed = 0
        # request -> the ranges that it pins; how many it holds without a hash; how many hashes it came with
        self._open: dict[object, tuple[list[Range], int, int]] = {}

    @property
    def in_use(self) -> int:
        """Blocks that requests hold; of the sample, where there is one."""
        return self._held + (self._unhashed if self.sample == 1 else round(self._unhashed * self.sample))

    @property
    def open_requests(self) -> int:
        """Requests admitted and not freed."""
        return len(self._open)

    def hashes_known(self, request: object) -> int:
        """Return how many hashes a request was admitted with; 0 when it is not known."""
        return self._open.get(request, ((), 0, 0))[2]

    def contents(self, lane: Lane) -> list[int]:
        """Return the hashes of a lane's free blocks, near the order of eviction."""
        hashes: list[int] = self.ids.names[lane.queue.blocks()].tolist()
        return hashes

    def admitted(self, request: object, hashes: Hashes | Sequence[int], num_tokens: int, counted: bool = True) -> None:
        """Look up and pin a request of `num_tokens` whose full blocks have these hashes."""
        if request in self._open:
            self._release(request)
        blocks = np.asarray(hashes, dtype=np.uint64)
        known, limit = len(blocks), (num_tokens - 1) // self.block_size
        unhashed = max(0, -(-num_tokens // self.block_size) - known)
        if self.sample < 1:
            kept = self._sampled(blocks)
            blocks = blocks[kept]
            limit = int(np.searchsorted(kept, limit))
        count = len(blocks)
        self._make_room(count)
        ranges = self.ids.ranges(blocks)
        shared, fresh = self._unpinned(ranges)
        self._pin(ranges)
        self._held += count - shared
        self._unhashed += unhashed
        self._open[request] = (ranges, unhashed, known)
        if counted:
            self.queried_blocks += count
        for lane in self.lanes:
            found = shared + lane.queue.take(fresh)
            if found < count:
                lane.queue.discard(fresh)
                lane.inserted += count - found
            if counted:
                hits = max(0, min(found, limit) - self._dropped)
                lane.hit_blocks += hits
                if hits:
                    lane.queue.hit(beginning(ranges, hits))
        self._evict()
        if self._held > 2 * self.capacity:
            # More than a pool holds: requests whose end was never told.
            self._release(next(iter(self._open)))
            self._evict()

    def freed(self, request: object, tail: Hashes | Sequence[int], num_hashes: int, num_blocks: int) -> None:
        """Unpin a request: of the blocks it was admitted with the first, with `tail` behind them `num_hashes` in all.

        `num_blocks`: how many it held. A request that is not known pins and frees `tail`, which is then its own chain.
        """
        end = np.asarray(tail, dtype=np.uint64)
        stays = num_hashes - len(end)
        if self.sample < 1:
            end = end[self._sampled(end)]
        self._make_room(len(end))
        ranges, unhashed, known = self._open.pop(request, ([], 0, 0))
        if self.sample == 1 and 0 <= stays < known and ranges:
            # It stopped before the others were computed: they hold nothing that could be hit.
            kept = beginning(ranges, stays)
            self._unpin(behind(ranges, stays))
            ranges = kept
        held = max(0, num_blocks - num_hashes)
        self._unhashed += held - unhashed
        if len(end):
            new = self.ids.ranges(end, ranges[-1][1] - 1 if ranges else -1)
            shared, fresh = self._unpinned(new)
            self._pin(new)
            self._held += len(end) - shared
            for lane in self.lanes:
                found = lane.queue.take(fresh)
                lane.queue.discard(fresh)
                lane.inserted += len(end) - shared - found
            ranges = [*ranges, *new]
        self._evict()
        self._unhashed -= held
        self._give_back(ranges)

    def reset(self) -> None:
        """Forget every content; what requests hold stays theirs, and cannot be hit."""
        self.ids.compact(np.zeros(self.ids.used, dtype=np.bool_), np.empty(0, dtype=np.int64), self.ids.size)
        self._pins[:] = 0
        for lane in self.lanes:
            lane.queue = new_spans(lane.policy, self.ids, self.capacity)
        for request, (ranges, unhashed, known) in self._open.items():
            held = sum(high - low for low, high in ranges)
            self._open[request] = ([], unhashed + held, known)
            self._unhashed += held
        self._held = 0

    def lost(self) -> None:
        """Learn that events are missing: take every request as ended now, since nobody may ever tell its end."""
        for request in list(self._open):
            self._release(request)
        self._evict()

    def mirror(self, lane: Lane, policy: str) -> Lane:
        """Return a further lane: `lane`'s pool switched to `policy`, as an engine switches. O(blocks)."""
        queue = new_spans(policy, self.ids, self.capacity)
        queue.adopt(lane.queue)
        return Lane(policy, queue)

    def _sampled(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        return np.flatnonzero((hashes * _MIX >> np.uint64(32)) < self._threshold)

    def _evict(self) -> None:
        room = max(0, self.capacity - self.in_use)
        for lane in self.lanes:
            excess = len(lane.queue) - room
            if excess > 0:
                lane.queue.evict(excess)

    def _release(self, request: object) -> None:
        ranges, unhashed, _ = self._open.pop(request)
        self._unhashed -= unhashed
        self._give_back(ranges)

    def _give_back(self, ranges: list[Range]) -> None:
        ended = self._unpin(ranges)
        if ended:
            for lane in self.lanes:
                lane.queue.append(ended)

    def _pin(self, ranges: list[Range]) -> None:
        for low, high in ranges:
            self._pins[low:high] += 1

    def _unpin(self, ranges: list[Range]) -> list[Range]:
        """Return those that nobody uses any more."""
        for low, high in ranges:
            self._pins[low:high] -= 1
        _, ended = self._unpinned(ranges)
        self._held -= sum(high - low for low, high in ended)
        return ended

    def _unpinned(self, ranges: list[Range]) -> tuple[int, list[Range]]:
        """Return how many leading blocks are pinned, and the others."""
        shared = 0
        for at, (low, high) in enumerate(ranges):
            pinned = int(np.count_nonzero(self._pins[low:high]))
            shared += pinned
            if pinned < high - low:
                return shared, [(low + pinned, high), *ranges[at + 1 :]]
        return shared, []

    def _make_room(self, count: int) -> None:
        """Have `count` ids left to give."""
        ids = self.ids
        if ids.used + count <= ids.size:
            return
        wanted = self._pins[: ids.used] > 0
        for lane in self.lanes:
            lane.queue.mark(wanted)
        new = np.cumsum(wanted) - 1
        kept = int(np.count_nonzero(wanted))
        size = max(ids.size, 2 * (kept + count))
        pins = np.zeros(size, dtype=np.int32)
        pins[:kept] = self._pins[: ids.used][wanted]
        self._pins = pins
        for lane in self.lanes:
            lane.queue.renumber(wanted, new, size)
        for request, (ranges, unhashed, known) in self._open.items():
            self._open[request] = ([(int(new[low]), int(new[high - 1]) + 1) for low, high in ranges], unhashed, known)
        ids.compact(wanted, new, size)


def beginning(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return the ranges of the first `count` blocks."""
    kept: list[Range] = []
    for low, high in ranges:
        if count <= 0:
            break
        kept.append((low, min(high, low + count)))
        count -= high - low
    return kept


def behind(ranges: Sequence[Range], count: int) -> list[Range]:
    """Return the ranges behind the first `count` blocks."""
    rest: list[Range] = []
    for low, high in ranges:
        if count < high - low:
            rest.append((low + max(0, count), high))
        count -= high - low
    return rest
