"""Decides from warm shadows: each minute, on decayed rates, with a margin and a dwell, and never against the evidence.

1. Every candidate policy has a shadow of the whole pool (shadow.py), fed all the time.
2. Each `interval_s` the sums of hits and of tokens looked up are halved every `half_life_s` and the window's added: the
   rates that are compared weigh requests alike, and a quiet minute counts for little. 120 s, with a margin of a
   point, were chosen by served runs on a seed that no figure of docs/engine-evaluation.md is from: 60 s and half a
   point switched 13 times an hour between policies that are alike, and each switch costs; 180 s follow traffic that
   swaps every five minutes too late.
3. The candidate with the highest rate becomes live when it beats the live one by more than `margin` and that has been
   live for `dwell_s`. On a tie the live one stays; LRU is live at the start.
4. Nothing is switched on less than `min_requests` requests and `min_blocks` blocks (decayed sums).
5. Nothing is switched while the shadows are cold: they are warm from the start when the pool was empty then;
   otherwise, and after lost events, once as many blocks have come into the pool as it holds.
6. The residual is the hit rate of a shadow that goes through every switch of the live pool with it, less the engine's
   own hit rate over the same requests; these sums halve every `residual_half_life_s` only, as one long prompt at the
   edge of eviction is no fault of the shadow. Right after a switch the pool still holds what the other policy kept,
   and so does this shadow: a copy of the old live one's, converted. Once a pool of blocks has come in and it holds
   what the candidate's own shadow does, but for 1 % (LRU: soon; S3-FIFO's main remembers long), that one takes its
   place. Above `residual` nothing is switched: the shadows are wrong about this engine.
7. With a sample the rates are estimates and the residual is not measured; the last one that was, still binds.
"""

from collections.abc import Sequence

import numpy as np

from engine_patch.decision import BEST, BETTER, DWELL, EVIDENCE, MARGIN, RESIDUAL, WARMING, Decision, percent, points
from engine_patch.events import Hashes
from engine_patch.lane import Lane
from engine_patch.shadow import PoolShadow

ALIKE = 0.01  # of the pool: two shadows of one policy that differ in no more blocks are taken for one


class DefaultPreset:
    """The shadows, their decayed sums, and the decision at the end of each window."""

    def __init__(
        self,
        policies: Sequence[str],
        num_blocks: int,
        block_size: int,
        *,
        interval_s: float = 60.0,
        half_life_s: float = 120.0,
        margin: float = 0.01,
        dwell_s: float = 60.0,
        residual: float = 0.01,
        residual_half_life_s: float = 300.0,
        sample: float = 1.0,
        dropped: int = 0,
        min_requests: float = 20.0,
        min_blocks: float = 500.0,
        live: str = "lru",
        fresh: bool = True,
    ) -> None:
        self.policies = tuple(policies)
        self.interval_s, self.half_life_s = interval_s, half_life_s
        self.margin, self.dwell_s, self.residual_limit = margin, dwell_s, residual
        self.residual_half_life_s = residual_half_life_s
        self.min_requests, self.min_blocks = min_requests, min_blocks
        self.num_blocks, self.block_size, self._dropped = num_blocks, block_size, dropped
        self.live = live
        self.since: float | None = None
        self.residual: float | None = None
        self._started: float | None = None
        self._fill(sample, fresh)

    def _fill(self, sample: float, fresh: bool) -> None:
        """Start with empty shadows and sums."""
        names = self.policies if self.live in self.policies else (*self.policies, self.live)
        self.shadow = PoolShadow(names, self.num_blocks, self.block_size, sample, self._dropped)
        self._followed = self._lane(self.live)
        self._retire_at = 0
        self._cold = not fresh
        # Requests, blocks looked up, tokens; the engine's hit tokens, tokens where it said them, hit blocks there.
        self._now = np.zeros(6)
        self._sums = np.zeros(3)
        self._measured = np.zeros(3)  # the last three, which decay more slowly
        self._last: dict[str, int] = {}
        self._hits: dict[str, float] = {}
        self._window: dict[str, int] = {}
        self._queried_last = 0
        self._queried = 0.0

    @property
    def sample(self) -> float:
        """Share of the blocks that the shadows follow."""
        return self.shadow.sample

    def set_sample(self, sample: float) -> None:
        """Follow another share of the blocks; the shadows start cold."""
        if sample != self.shadow.sample:
            self._fill(sample, False)

    def admitted(
        self,
        t: float,
        request: object,
        hashes: Hashes | Sequence[int],
        num_tokens: int,
        hit_tokens: int | None,
        counted: bool,
        free_blocks: int | None = None,
    ) -> None:
        """A request got its blocks."""
        self.begin(t)
        followed = self._followed
        before = followed.hit_blocks
        self.shadow.admitted(request, hashes, num_tokens, counted, hit_tokens, free_blocks)
        if not counted:
            return
        now = self._now
        now[0] += 1
        now[1] += len(hashes)
        now[2] += num_tokens
        if hit_tokens is not None and not self._cold:
            now[3] += hit_tokens
            now[4] += num_tokens
            now[5] += followed.hit_blocks - before

    def freed(
        self,
        t: float,
        request: object,
        tail: Hashes | Sequence[int],
        num_hashes: int,
        num_blocks: int,
        free_blocks: int | None = None,
    ) -> None:
        """A request gave its blocks back; `tail` are the hashes behind those it was admitted with."""
        self.begin(t)
        self.shadow.freed(request, tail, num_hashes, num_blocks, free_blocks)

    def reset(self, t: float) -> None:
        """The engine forgot all that it had cached."""
        self.begin(t)
        self.shadow.reset()

    def lost(self) -> None:
        """Events are missing here: the shadows are cold, and what the residual was is no longer known."""
        self.shadow.lost()
        self._cold = True
        self._settle(self._lane(self.live))
        for lane in self.shadow.lanes:
            lane.inserted = 0
        self._now[3:] = 0
        self._measured[:] = 0
        self.residual = None

    def begin(self, t: float) -> None:
        """Start the first window at the first event."""
        if self._started is None:
            self._started = t
            if self.since is None:
                self.since = t

    def policy(self, t: float, name: str) -> None:
        """`name` is live from t on."""
        self.begin(t)
        if name == self.live:
            return
        old = self._followed
        fresh = self.shadow.mirror(old, name)
        if name not in self.policies:
            # Its shadow is new each time: it takes over what the live one before it had hit, so that rates compare.
            own = self._lane(self.live)
            fresh.hit_blocks = own.hit_blocks - self._last.get(self.live, 0)
            self._last[name], self._hits[name] = 0, self._hits.get(self.live, 0.0)
        self.live, self.since = name, t
        if old.policy not in self.policies or self._retire_at:
            self.shadow.lanes.remove(old)
        self._followed = fresh
        self._retire_at = self.shadow.capacity
        self.shadow.lanes.append(fresh)

    def decide(self, t: float) -> Decision | None:
        """Return the decision of the window that ends now, or None before its end."""
        if self._started is None or t < self._started + self.interval_s:
            return None
        window_s, self._started = t - self._started, t
        if self._followed.inserted >= self.shadow.capacity:
            self._cold = False
        if self._retire_at and self.live in self.policies and self._followed.inserted >= self._retire_at:
            own = self._lane(self.live)
            if self.shadow.differing(own, self._followed) <= ALIKE * self.shadow.capacity:
                self._settle(own)
        requests, blocks = int(self._now[0]), int(self._now[1])
        self._measured = self._measured * 0.5 ** (window_s / self.residual_half_life_s) + self._now[3:]
        rates, window_rates = self._rates(0.5 ** (window_s / self.half_life_s))
        if self.shadow.sample == 1 and self._sums[0] >= self.min_requests and self._measured[1] > 0:
            said, tokens, hits = self._measured.tolist()
            self.residual = (hits * self.block_size - said) / tokens
        return self._judge(t, window_s, rates, window_rates, requests, blocks)

    def _judge(
        self,
        t: float,
        window_s: float,
        rates: dict[str, float],
        window_rates: dict[str, float],
        requests: int,
        blocks: int,
    ) -> Decision:
        live, since = self.live, self.since if self.since is not None else t
        other = max((policy for policy in self.policies if policy != live), key=rates.__getitem__, default=live)
        advantage = rates[other] - rates[live]
        compared = f"{other} {percent(rates[other])} against {live} {percent(rates[live])}, {points(advantage)}"
        if self._sums[0] < self.min_requests or self._sums[1] < self.min_blocks:
            reason = EVIDENCE
            text = f"{live} stays: {self._sums[0]:.0f} requests and {self._sums[1]:.0f} blocks are too few to tell."
        elif self._cold:
            reason = WARMING
            text = f"{live} stays: the shadows have not seen a whole pool of blocks yet, or lost events ({compared})."
        elif self.residual is not None and abs(self.residual) > self.residual_limit:
            reason = RESIDUAL
            text = (
                f"{live} stays: its shadow is {points(self.residual)} off the engine's own hit rate, more than "
                f"{percent(self.residual_limit)} ({compared})."
            )
        elif advantage <= 0:
            reason, text = BEST, f"{live} stays, it is the best ({compared})."
        elif advantage <= self.margin:
            reason, text = MARGIN, f"{live} stays: the margin is {points(self.margin)} ({compared})."
        elif t - since < self.dwell_s:
            reason, text = DWELL, f"{live} stays, live for {t - since:.0f} s of {self.dwell_s:.0f} s ({compared})."
        else:
            reason, text = BETTER, f"Switch from {live} to {other} ({compared}, margin {points(self.margin)})."
        if self.sample < 1:
            text += f" Estimated from {percent(self.sample)} of the blocks."
        switch = reason == BETTER
        return Decision(
            t=t,
            policy=other if switch else live,
            live=live,
            since=since,
            switch=switch,
            reason=reason,
            text=text,
            window_s=window_s,
            rates=rates,
            window_rates=window_rates,
            advantage=advantage,
            margin=self.margin,
            residual=self.residual if self.sample == 1 else None,
            requests=requests,
            blocks=blocks,
            sample=self.sample,
        )

    def _rates(self, decay: float) -> tuple[dict[str, float], dict[str, float]]:
        """Close the window: return the decayed rates and the window's own."""
        self._sums = self._sums * decay + self._now[:3]
        queried = self.shadow.queried_blocks - self._queried_last
        self._queried_last = self.shadow.queried_blocks
        self._queried = self._queried * decay + queried
        rates, window_rates = {}, {}
        for policy in (*self.policies, self.live):
            if policy in rates:
                continue
            lane = self._lane(policy)
            hits = lane.hit_blocks - self._last.get(policy, 0)
            self._last[policy] = lane.hit_blocks
            self._hits[policy] = self._hits.get(policy, 0.0) * decay + hits
            rates[policy] = self._rate(self._hits[policy], self._queried, self._sums)
            window_rates[policy] = self._rate(hits, queried, self._now)
        self._now = np.zeros(6)
        return rates, window_rates

    def _rate(self, hits: float, queried: float, sums: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
        """Share of prompt tokens: hits of the blocks followed, times the share of tokens that are in full blocks."""
        if not queried or not sums[2]:
            return 0.0
        return float(hits / queried * sums[1] * self.block_size / sums[2])

    def _lane(self, policy: str) -> Lane:
        """Return a candidate's own shadow; for a live policy that is no candidate, the one that follows the pool."""
        return next(lane for lane in self.shadow.lanes if lane.policy == policy)

    def _settle(self, lane: Lane) -> None:
        """Follow the live policy by this shadow from now on."""
        if lane is not self._followed and self._retire_at:
            self.shadow.lanes.remove(self._followed)
        self._followed = lane
        self._retire_at = 0
