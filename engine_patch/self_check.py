"""When the queue of an attached engine is checked: after each switch, and every so often; a slice before each step.

After a switch a check takes the place of one that is under way: it looks at everything anew. One that is only due waits
for it, so that with many blocks, few steps and short times between, each check still comes to its end.
"""

from typing import Any

from engine_patch.free_queue import LinkedState, Sweep


class SelfCheck:
    """The checks of one queue; times are monotonic seconds."""

    def __init__(self, queue: Any, state: LinkedState, pool: Any, every_s: float, now: float) -> None:
        """every_s: seconds from one to the next, 0 for none but those after switches."""
        self.ended = self.failed = 0
        self._parts: tuple[Any, LinkedState, Any] | None = (queue, state, pool)
        self._every_s = every_s or float("inf")
        self._due = now + self._every_s
        self._sweep: Sweep | None = None

    @property
    def under_way(self) -> bool:
        """Whether there is more to look at before the next step."""
        return self._sweep is not None

    def is_due(self, now: float) -> bool:
        """Return whether it is time for the next one, once; not while one is under way."""
        if now < self._due or self.under_way:
            return False
        self._due = now + self._every_s
        return True

    def begin(self) -> str | None:
        """Look at the first slice; return what is wrong."""
        if self._parts is not None:
            self._sweep = Sweep(*self._parts)
        return self.go_on()

    def stop(self) -> None:
        """Let go of the queue: it is not ours any more. What was counted stays."""
        self._parts = self._sweep = None
        self._due = float("inf")

    def go_on(self) -> str | None:
        """Look at the next slice, about 1 ms, if there is one; after the last one count. Return what is wrong."""
        sweep = self._sweep
        if sweep is None:
            return None
        wrong = sweep.step()
        if wrong is not None or sweep.done:
            self._sweep = None
            self.ended += 1
            self.failed += wrong is not None
        return wrong
