"""Shadows of a whole KV pool: what each eviction policy would have kept, had it been live on this very traffic.

1. A block is known by its content's hash. Blocks in use are the same under every policy, so they are counted once, by
   reference (pins.py); a policy owns the hashed free blocks alone (lane.py): at most `num_blocks` - blocks in use.
   Whatever is beyond that is evicted when requests take blocks; blocks never used, or freed without a hash, are thus
   used first, as in vLLM.
2. Admission: look up the whole request (its hit is the contiguous run of known blocks, at most
   (num_tokens - 1) // block_size, less what the engine drops of it), count the hits, pin all blocks of the prompt,
   evict. A lookup that the engine does not count (preempted and admitted again) pins and evicts only; one of those that
   hit nothing read no cache.
3. Free: take the blocks of the output, evict for them, unpin; those that nobody else uses go back tail first.
4. What is computed although it is there makes a copy, which takes room and cannot be hit (copies.py).
5. The engine says how many blocks are free at each event. What it uses beyond what requests told of is answers being
   written and copies in use; what it does not use yet is the rest of prompts that are computed in chunks. And what it
   did not find of what others use is not computed yet: nobody hits it, whatever the policy.
6. With `sample` < 1 only that share of the blocks is followed, chosen by hash, in a pool of num_blocks * sample. A hit
   is then the run of known blocks among the sampled ones: never less than the true one, and nearer to it than
   counting every known block.
7. Chains are ranges of small numbers (chain_ids.py) and queues hold ranges (spans.py), so that the cost is by request
   more than by block. When the numbers run out, those that no queue, ghost or request knows are taken back.

Cost: tests/bench/bench_shadow.py. How near it comes: tests/unit/test_shadow.py, tests/engine/test_attach_events.py.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from engine_patch.chain_ids import NOBODY, ChainIds, Range, beginning, behind, length
from engine_patch.events import Hashes
from engine_patch.lane import Copied, Lane
from engine_patch.pins import Pins
from engine_patch.span_policies import new_spans

_MIX = np.uint64(0x9E3779B97F4A7C15)
IDS_PER_BLOCK, IDS_MIN = 6, 8192
# A request: the ranges that it pins; how many blocks it holds without a hash; how many hashes it came with; its copies.
Open = tuple[list[Range], int, int, Copied]


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
        self._dropped = dropped
        self.capacity = max(1, round(num_blocks * sample))
        self.ids = ChainIds(max(IDS_MIN, IDS_PER_BLOCK * self.capacity))
        self._pins = Pins(self.ids.size)
        self.lanes = [
            Lane(policy, new_spans(policy, self.ids, self.capacity), self.ids, self._pins) for policy in policies
        ]
        self.queried_blocks = 0
        """Full blocks that counted requests looked up; of the sampled ones, where there is a sample."""
        self._threshold = np.uint64(min(round(sample * 2**32), 2**32))
        # Blocks in use: with a hash, without; and those that no event told of, less those that were told of too early.
        self._held = self._unhashed = self._untold = 0
        self._open: dict[object, Open] = {}

    @property
    def in_use(self) -> int:
        """Blocks that requests hold, as far as they told; of the sample, where there is one."""
        return self._held + self._sampled_count(self._unhashed)

    @property
    def open_requests(self) -> int:
        """Requests admitted and not freed."""
        return len(self._open)

    def hashes_known(self, request: object) -> int:
        """Return how many hashes a request was admitted with; 0 when it is not known."""
        return self._open[request][2] if request in self._open else 0

    def contents(self, lane: Lane) -> list[int]:
        """Return the hashes of a lane's free blocks, near the order of eviction; copies have none."""
        names = self.ids.names[lane.queue.blocks()]
        hashes: list[int] = names[names != NOBODY].tolist()
        return hashes

    def differing(self, one: Lane, other: Lane) -> int:
        """Return how many contents are free in one of the lanes only."""
        names = self.ids.names
        return len(np.setxor1d(names[one.queue.blocks()], names[other.queue.blocks()]))

    def admitted(
        self,
        request: object,
        hashes: Hashes | Sequence[int],
        num_tokens: int,
        counted: bool = True,
        hit_tokens: int | None = None,
        free_blocks: int | None = None,
    ) -> None:
        """Look up and pin a request of `num_tokens` whose full blocks have these hashes.

        hit_tokens, free_blocks: what the engine found, and how many blocks were free after that; None: not known.
        """
        if request in self._open:
            self._release(request)
        blocks = np.asarray(hashes, dtype=np.uint64)
        size, known = self.block_size, len(blocks)
        unhashed = max(0, -(-num_tokens // size) - known)
        limit = 0 if hit_tokens == 0 and not counted else (num_tokens - 1) // size
        computed = known if hit_tokens is None else hit_tokens // size + self._dropped
        if self.sample < 1:
            kept = self._sampled(blocks)
            blocks = blocks[kept]
            limit, computed = np.searchsorted(kept, (limit, computed)).tolist()
        count = len(blocks)
        self._make_room(2 * count)
        new = self.ids.used
        ranges = self.ids.ranges(blocks)
        used, fresh = self._pins.unused(ranges)
        computed = min(used, computed)
        if free_blocks is not None:
            # Make room first for what has been written since the last event.
            self._tell(free_blocks, count - min(computed, limit) + self._sampled_count(unhashed))
            self._evict()
        # Among sampled blocks the last of a hit is mostly none of them.
        dropped = self._dropped if self.sample == 1 else 0
        copied: Copied = {}
        for lane in self.lanes:
            hits = lane.admit(ranges, fresh, new, computed, limit, dropped, copied)
            lane.inserted += count - hits
            if counted and hits:
                lane.hit_blocks += hits
                lane.queue.hit(beginning(ranges, hits))
        if counted:
            self.queried_blocks += count
        self._pins.add(ranges)
        self._held += count - used
        self._unhashed += unhashed
        self._open[request] = (ranges, unhashed, known, copied)
        if free_blocks is not None:
            self._tell(free_blocks)
        self._evict()
        if self._held > 2 * self.capacity:
            # More than a pool holds: requests whose end was never told.
            self._release(next(iter(self._open)))
            self._evict()

    def freed(
        self,
        request: object,
        tail: Hashes | Sequence[int],
        num_hashes: int,
        num_blocks: int,
        free_blocks: int | None = None,
    ) -> None:
        """Unpin a request: of the blocks it was admitted with the first, with `tail` behind them `num_hashes` in all.

        `num_blocks`: how many it held; `free_blocks`: how many were free until then, where known. A request that is not
        known pins and frees `tail`, which is then its own chain.
        """
        end = np.asarray(tail, dtype=np.uint64)
        stays = num_hashes - len(end)
        if self.sample < 1:
            end = end[self._sampled(end)]
        count = len(end)
        self._make_room(2 * count)
        stranger = request not in self._open
        ranges, unhashed, known, copied = self._open.pop(request, ([], 0, 0, {}))
        if self.sample == 1 and 0 <= stays < known and ranges:
            # It stopped before the others were computed: they hold nothing that could be hit.
            rest = behind(ranges, stays)
            ranges = beginning(ranges, stays)
            self._unpin(rest)
            for lane in self.lanes:
                lane.vanished(rest, copied)
        held = max(0, num_blocks - num_hashes)
        self._unhashed += held - unhashed
        if count:
            new = self.ids.used
            written = self.ids.ranges(end, ranges[-1][1] - 1 if ranges else -1)
            used, fresh = self._pins.unused(written)
            for lane in self.lanes:
                if stranger:
                    lane.admit(written, fresh, new, used, count, 0, copied)
                else:
                    lane.extend(ranges, written, fresh, new, copied)
                lane.inserted += count
            self._pins.add(written)
            self._held += count - used
            ranges = [*ranges, *written]
        if free_blocks is not None:
            self._tell(free_blocks)
        else:
            # What it wrote was among what no event had told of.
            self._untold = max(0, self._untold - count - self._sampled_count(max(0, held - unhashed)))
        self._evict()
        self._unhashed -= held
        self._give_back(ranges, copied)

    def reset(self) -> None:
        """Forget every content; what requests hold stays theirs, and cannot be hit."""
        self.ids.compact(np.zeros(self.ids.used, dtype=np.bool_), np.empty(0, dtype=np.int64), self.ids.size)
        self._pins.counts[:] = 0
        for lane in self.lanes:
            lane.queue = new_spans(lane.policy, self.ids, self.capacity)
        for request, (ranges, unhashed, known, _) in self._open.items():
            held = length(ranges)
            self._open[request] = ([], unhashed + held, known, {})
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
        return Lane(policy, queue, self.ids, self._pins)

    def _sampled(self, hashes: Hashes) -> npt.NDArray[np.intp]:
        return np.flatnonzero((hashes * _MIX >> np.uint64(32)) < self._threshold)

    def _sampled_count(self, blocks: int) -> int:
        return blocks if self.sample == 1 else round(blocks * self.sample)

    def _tell(self, free_blocks: int, since: int = 0) -> None:
        """Learn how many blocks were free in the engine; `since`: how many it had taken that are not held here yet."""
        self._untold = self._sampled_count(self.num_blocks - free_blocks) - since - self.in_use

    def _evict(self) -> None:
        room = max(0, self.capacity - self.in_use - self._untold)
        for lane in self.lanes:
            excess = len(lane.queue) - room
            if excess > 0:
                lane.queue.evict(excess)

    def _release(self, request: object) -> None:
        ranges, unhashed, _, copied = self._open.pop(request)
        self._unhashed -= unhashed
        self._give_back(ranges, copied)

    def _give_back(self, ranges: list[Range], copied: Copied) -> None:
        unused = self._unpin(ranges)
        for lane in self.lanes:
            lane.returned(ranges, unused, copied)

    def _unpin(self, ranges: list[Range]) -> list[Range]:
        """Return those that nobody uses any more."""
        self._pins.remove(ranges)
        unused = self._pins.unused(ranges)[1]
        self._held -= length(unused)
        return unused

    def _make_room(self, count: int) -> None:
        """Have `count` ids left to give."""
        ids = self.ids
        if ids.used + count <= ids.size:
            return
        wanted = self._pins.counts[: ids.used] > 0
        for lane in self.lanes:
            lane.queue.mark(wanted)
        for *_, copied in self._open.values():
            wanted[list(copied.values())] = True
        new = np.cumsum(wanted) - 1
        kept = int(np.count_nonzero(wanted))
        size = max(ids.size, 2 * (kept + count))
        self._pins.renumber(wanted, size)
        for lane in self.lanes:
            lane.queue.renumber(wanted, new, size)
        for request, (ranges, unhashed, known, copied) in self._open.items():
            moved = [(int(new[low]), int(new[high - 1]) + 1) for low, high in ranges]
            copies = {int(new[content]): int(new[copy]) for content, copy in copied.items()}
            self._open[request] = (moved, unhashed, known, copies)
        ids.compact(wanted, new, size)
