"""Says which eviction policy the live traffic favours: events in, a decision at the end of each window out.

It has no clock: time is the events' own (seconds, any origin), so the same events give the same decisions, in the
process beside an engine (shadow_process.py), in an evaluation and in the simulated engine alike.

Presets: `default` (default_preset.py) and `paper` (paper_preset.py).
"""

from collections.abc import Sequence
from typing import Any

from engine_patch.decision import Decision
from engine_patch.default_preset import DefaultPreset
from engine_patch.events import Hashes
from engine_patch.paper_preset import PaperPreset

PRESETS = ("default", "paper")


class Estimator:
    """One pool's estimator; hashes are integers below 2**64 (an array of uint64 is the fastest), times in seconds."""

    def __init__(
        self, preset: str, policies: Sequence[str], num_blocks: int, block_size: int, **overrides: Any
    ) -> None:
        """Options of `default`: see DefaultPreset; of `paper`: interval_s (900) and live ("lru").

        Raises ValueError for an unknown preset, TypeError for an unknown option, and ValueError for an unknown policy.
        """
        self.preset = preset
        self.num_blocks, self.block_size = num_blocks, block_size
        self._warm: DefaultPreset | None = None
        self._paper: PaperPreset | None = None
        if preset == "default":
            self._warm = DefaultPreset(policies, num_blocks, block_size, **overrides)
        elif preset == "paper":
            self._paper = PaperPreset(policies, num_blocks, **overrides)
        else:
            raise ValueError(f"no preset is called {preset!r}; there are {', '.join(PRESETS)}")

    @property
    def live(self) -> str:
        """The policy that was last said to be live."""
        return (self._warm or self._paper).live  # type: ignore[union-attr]

    @property
    def residual(self) -> float | None:
        """Shadow of the live policy less the engine's own hit rate, at the last decision; None while not known."""
        return self._warm.residual if self._warm else None

    @property
    def sample(self) -> float:
        """Share of the blocks that is followed."""
        return self._warm.sample if self._warm else 1.0

    @property
    def open_requests(self) -> int:
        """Requests admitted and not freed."""
        return self._warm.shadow.open_requests if self._warm else 0

    def admitted(
        self,
        t: float,
        request_id: object,
        hashes: Hashes | Sequence[int],
        num_prompt_tokens: int,
        hit_tokens: int | None,
        block_size: int = 0,
        *,
        free_blocks: int | None = None,
        counted: bool = True,
    ) -> None:
        """A request got its blocks; see Recorder.admitted. `block_size` is the constructor's and not read."""
        if self._warm is not None:
            self._warm.admitted(t, request_id, hashes, num_prompt_tokens, hit_tokens, counted, free_blocks)
        elif self._paper is not None and counted:
            self._paper.admitted(t, hashes, free_blocks)

    def freed(
        self,
        t: float,
        request_id: object,
        hashes: Hashes | Sequence[int],
        num_blocks: int,
        *,
        free_blocks: int | None = None,
    ) -> None:
        """A request gave its `num_blocks` blocks back; `hashes`: all its full blocks, the output's included.

        free_blocks: the pool's free blocks until then.
        """
        if self._warm is not None:
            known = self._warm.shadow.hashes_known(request_id)
            self._warm.freed(t, request_id, hashes[known:], len(hashes), num_blocks, free_blocks)

    def freed_tail(
        self,
        t: float,
        request_id: object,
        tail: Hashes,
        num_hashes: int,
        num_blocks: int,
        *,
        free_blocks: int | None = None,
    ) -> None:
        """The same when only the hashes behind those of the admission are at hand, `num_hashes` in all."""
        if self._warm is not None:
            self._warm.freed(t, request_id, tail, num_hashes, num_blocks, free_blocks)

    def reset(self, t: float) -> None:
        """The engine forgot all that it had cached."""
        if self._warm is not None:
            self._warm.reset(t)

    def policy(self, t: float, name: str, why: str = "") -> None:
        """`name` is the live policy from t on."""
        preset = self._warm or self._paper
        assert preset is not None
        preset.policy(t, name)

    def lost(self) -> None:
        """Events are missing before the next one."""
        if self._warm is not None:
            self._warm.lost()

    def set_sample(self, sample: float) -> None:
        """Follow this share of the blocks from now on (default preset); the shadows start cold when it changes."""
        if self._warm is not None:
            self._warm.set_sample(sample)

    def decide(self, t: float) -> Decision | None:
        """Return the decision of the window that ends at t; None, at the cost of a comparison, while it runs on."""
        preset = self._warm or self._paper
        assert preset is not None
        return preset.decide(t)
