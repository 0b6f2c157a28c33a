"""Decides as WAKMan's paper does: each 15 minutes, by a cold replay of the window's requests through both policies.

1. The log of a window holds the prompt hashes of each request in order of arrival, and the free blocks seen then.
2. At its end each policy replays the log from an empty cache, block by block: a hash that is there is a hit, whatever
   came before it in its request; else it is inserted, and a block evicted when the cache is full. The capacity is the
   mean number of free blocks. Output blocks and blocks in use play no part.
3. The hit rate is hits over all block hashes of the window.
4. S3-FIFO if its rate is strictly higher, else LRU; no margin, no dwell. With more policies: the highest, on a tie
   the one named first, LRU before all. What a switch to LRU does to the ghosts is the queue's affair (policy.py:
   forgotten).

Ours, since the text is silent: a hit moves a block to LRU's recent end and counts for S3-FIFO (moved when small gives
it up); ghosts hold `capacity` hashes; small gives the victim while it holds 10 % or more. The log keeps at most
LOG_BLOCKS of a window, the newest ones. Cost: 8 bytes a block kept; the replay takes 0.3 to 0.6 µs a block and
policy.

Source: WAKMan, section 2 (estimator, shadow policies, switching criteria).
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from engine_patch.decision import BEST, BETTER, EVIDENCE, Decision, percent, points
from engine_patch.events import Hashes
from engine_patch.policy import EvictionQueue, new_queue

LOG_BLOCKS = 16 << 20


class PaperPreset:
    """The window's log and the decision at its end."""

    def __init__(
        self, policies: Sequence[str], num_blocks: int, *, interval_s: float = 900.0, live: str = "lru"
    ) -> None:
        for policy in policies:
            new_queue(policy, 1)  # refuses an unknown name
        self.policies = tuple(sorted(policies, key=lambda policy: policy != "lru"))
        self.num_blocks = num_blocks
        self.interval_s = interval_s
        self.live = live
        self.residual: float | None = None
        self.sample = 1.0
        self.since: float | None = None
        self._started: float | None = None
        self._log: deque[Hashes] = deque()
        self._blocks = 0
        self._requests = 0
        self._free_sum = 0
        self._free_samples = 0

    def admitted(self, t: float, hashes: Hashes | Sequence[int], free_blocks: int | None) -> None:
        """Log a request."""
        self.begin(t)
        self._requests += 1
        self._log.append(np.asarray(hashes, dtype=np.uint64))
        self._blocks += len(hashes)
        while self._blocks > LOG_BLOCKS:
            self._blocks -= len(self._log.popleft())
        if free_blocks is not None:
            self._free_sum += free_blocks
            self._free_samples += 1

    def begin(self, t: float) -> None:
        """Start the first window at the first event."""
        if self._started is None:
            self._started = t
            if self.since is None:
                self.since = t

    def policy(self, t: float, name: str) -> None:
        """`name` is live from t on."""
        self.begin(t)
        if name != self.live:
            self.live, self.since = name, t

    def decide(self, t: float) -> Decision | None:
        """Return the decision of the window that ends now, or None before its end."""
        if self._started is None or t < self._started + self.interval_s:
            return None
        window_s, self._started = t - self._started, t
        capacity = round(self._free_sum / self._free_samples) if self._free_samples else self.num_blocks
        log, blocks, requests = self._log, self._blocks, self._requests
        self._log, self._blocks, self._requests, self._free_sum, self._free_samples = deque(), 0, 0, 0, 0
        rates = {policy: replay(policy, capacity, log) / blocks if blocks else 0.0 for policy in self.policies}
        chosen = max(self.policies, key=rates.__getitem__) if blocks else self.live
        switch = chosen != self.live
        others = [rate for policy, rate in rates.items() if policy != self.live]
        advantage = max(others, default=0.0) - rates.get(self.live, 0.0)
        told = ", ".join(f"{policy} {percent(rate)}" for policy, rate in rates.items())
        text = (
            f"A cold replay of {blocks} block hashes of {window_s:.0f} s at {capacity} blocks hits {told}: "
            + (f"switch from {self.live} to {chosen}" if switch else f"{self.live} stays")
            + f" (advantage {points(advantage)}, no margin)."
        )
        return Decision(
            t=t,
            policy=chosen,
            live=self.live,
            since=self.since if self.since is not None else t,
            switch=switch,
            reason=BETTER if switch else BEST if blocks else EVIDENCE,
            text=text,
            window_s=window_s,
            rates=rates,
            window_rates=rates,
            advantage=advantage,
            margin=0.0,
            residual=None,
            requests=requests,
            blocks=blocks,
            preset="paper",
            details={"capacity": float(capacity)},
        )


def replay(policy: str, capacity: int, log: Iterable[Hashes]) -> int:
    """Return how many hashes of the log a cache of `capacity` blocks would have hit, from empty, counted one by one."""
    if capacity < 1:
        return 0
    queue: EvictionQueue[int] = new_queue(policy, capacity)
    moves = not policy.startswith("s3fifo")
    size = hits = 0
    for hashes in log:
        for block in hashes.tolist():
            if block in queue:
                hits += 1
                queue.hit(block)
                if moves:
                    queue.remove(block)
                    queue.append(block)
            else:
                if size == capacity:
                    queue.evict()
                else:
                    size += 1
                queue.append(block)
    return hits
