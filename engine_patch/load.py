"""Decides which share of the blocks the shadows follow: all, or 5 % while they cannot keep up.

1. Behind: a batch arrives more than LAG_S after it was sent, the shadows need more than BUSY of a core, or events
   were lost on the way here.
2. Behind -> the sampled share, for HOLD_S at least.
3. Back to all once the blocks that come in, at the cost a block had when all were followed, need less than CALM of a
   core.
4. Each change starts the shadows cold, so the two thresholds lie far apart.
"""

LAG_S = 5.0
BUSY, CALM = 0.6, 0.2
HOLD_S = 300.0
SPAN_S = 10.0  # over which the need is averaged
SAMPLED = 0.05


class Load:
    """What the shadows cost, as the process that feeds them sees it; `now` is its clock, in seconds."""

    def __init__(self, now: float, sampled: float = SAMPLED, cost_s: float = 1e-6) -> None:
        """cost_s: CPU time of a block when all are followed, until it is known."""
        self.sampled = sampled
        self.sample = 1.0
        self.busy = 0.0
        """Share of one core that the shadows took over the last SPAN_S."""
        self.lag_s = 0.0
        self._cost_s = cost_s
        self._since = self._span_began = now
        self._cpu_s = 0.0
        self._blocks = 0

    def took(self, now: float, lag_s: float, cpu_s: float, blocks: int, lost: bool) -> float:
        """Learn what a batch took; return the share of the blocks to follow from now on."""
        self.lag_s = lag_s
        self._cpu_s += cpu_s
        self._blocks += blocks
        span_s, rate = now - self._span_began, 0.0
        measured = span_s >= SPAN_S
        if measured:
            self.busy, rate = self._cpu_s / span_s, self._blocks / span_s
            if self.sample == 1 and self._blocks >= 1000:
                self._cost_s = self._cpu_s / self._blocks
            self._span_began, self._cpu_s, self._blocks = now, 0.0, 0
        if self.sample == 1:
            if lost or lag_s > LAG_S or (measured and self.busy > BUSY):
                self.sample, self._since = self.sampled, now
        elif lost or lag_s > LAG_S:
            self._since = now
        elif measured and now - self._since >= HOLD_S and rate * self._cost_s < CALM:
            self.sample, self._since = 1.0, now
        return self.sample
