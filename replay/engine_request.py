"""What goes into the engine model and how far it has come: a request, and its state in virtual time."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What the engine must know: sizes, and the chained hash of each full block of prompt plus output.

    Hashes may end early (a trace knows only the prompt's): later blocks are then never hit.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[Hashable] = ()


class StepClock:
    """How many steps an engine has ended; shared by the engine and its requests."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        self.steps = 0


class RequestState:
    """How far a request is; times are virtual seconds, None until it happened.

    `cached_tokens` is what the prefix cache spared at the first admission, as vLLM reports it.
    """

    __slots__ = (
        "_clock", "admitted_s", "arrived_s", "blocks", "cached_tokens", "computed_before", "decode_from", "finish_at",
        "finished_s", "first_token_s", "generated_before", "order", "preemptions", "request", "slot", "status",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, arrived_s: float, order: int, clock: StepClock) -> None:
        self.request = request
        self.arrived_s = arrived_s
        self.order = order
        self.status: Literal["waiting", "running", "finished", "aborted"] = "waiting"
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.cached_tokens = 0
        self.preemptions = 0
        self.blocks: list[int] = []
        # For the engine only. A decoding request is not touched in a step: to what it had before come the steps since
        # `decode_from` (-1: it does not decode); it ends at step `finish_at` and grows when steps % block size = slot.
        self._clock = clock
        self.decode_from = -1
        self.finish_at = -1
        self.slot = -1
        self.computed_before = 0
        self.generated_before = 0

    @property
    def generated(self) -> int:
        """How many output tokens there are by the end of the last step that was processed."""
        return self.generated_before + (self._clock.steps - self.decode_from if self.decode_from >= 0 else 0)

    @property
    def computed(self) -> int:
        """How many tokens have their KV in blocks, those of a planned prefill chunk included."""
        return self.computed_before + (self._clock.steps - self.decode_from if self.decode_from >= 0 else 0)


class Follower(Protocol):
    """Who follows what an engine does with its blocks; called as it happens, so a method may look at no later state."""

    def admitted(self, now_s: float, state: RequestState, tokens: int, free_blocks: int) -> None:
        """A request of `tokens` (with what it had generated before a preemption) got its `computed` ones from cache."""

    def freed(self, now_s: float, state: RequestState, hashed: int) -> None:
        """A request is about to give its blocks back; the first `hashed` of them can still be hit."""

    def reset(self, now_s: float) -> None:
        """Nothing can be hit any more."""

    def before_step(self, now_s: float) -> None:
        """A step is about to be planned: the one moment at which the eviction policy may be changed from here."""
