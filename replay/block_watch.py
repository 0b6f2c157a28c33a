"""Watches how long sampled KV blocks live and lie idle, as vLLM does with `--kv-cache-metrics`.

1. A block is drawn when it is allocated, with chance `sample`, and watched until it is allocated again.
2. Its idle time counts from the last time a request took it (allocation or hit), not from that request's end: so does
   vLLM's. Of its uses the last `USES_KEPT` give the gaps.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

USES_KEPT = 4


@dataclass(frozen=True, slots=True)
class Evicted:
    """What a watched block's time was like, in seconds."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: tuple[float, ...]


@dataclass(slots=True)
class BlockWatch:
    """Keeps the times of the watched blocks; `now_s` is set by the engine before it touches its cache."""

    sample: float
    told: Callable[[Evicted], None]
    rng: Random
    now_s: float = 0.0
    _times: dict[int, tuple[float, list[float]]] = field(default_factory=dict)

    def allocated(self, blocks: Iterable[int]) -> None:
        """Tell of the blocks that lose what they held, and draw anew which to watch."""
        times, now_s, sample, chance = self._times, self.now_s, self.sample, self.rng.random
        for block in blocks:
            known = times.pop(block, None)
            if known is not None:
                born_s, uses_s = known
                last_s = uses_s[-1] if uses_s else born_s
                gaps_s = tuple(later - earlier for earlier, later in pairwise(uses_s))
                self.told(Evicted(now_s - born_s, now_s - last_s, gaps_s))
            if chance() < sample:
                times[block] = (now_s, [])

    def hit(self, blocks: Iterable[int]) -> None:
        """Note that a request uses these again."""
        for block in blocks:
            known = self._times.get(block)
            if known is not None:
                known[1].append(self.now_s)
                del known[1][:-USES_KEPT]
