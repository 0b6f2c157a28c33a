"""The process beside an engine that runs its shadows: batches of events on stdin, decisions on stdout.

1. It is started by link.py with one argument, a JSON object of Options. It imports numpy and this package's pure
   half, never vllm, so that no plugin runs and about 40 MB are taken beside the shadows.
2. Input: frames (events.py). Each one is fed to the estimator, which is asked for a decision before each event, at the
   event's own time, and at the frame's.
3. Output: a JSON object a line: {"decision": …}, {"state": …} at most every STATE_S and only after input, {"error": …}.
4. It ends when its input ends, with status 0; when the engine is gone (the kernel kills it then, and it looks itself
   every few seconds); on input that is no frame, status 3: where the next frame begins cannot be known.
5. A fault of the shadows costs their content only: an error line, fresh ones, cold. After FAULTS in a row, status 4.
6. A terminal's Ctrl-C reaches the whole group; it is the engine's affair, so the signal is ignored here.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_patch.decision import Decision
from engine_patch.estimator import Estimator
from engine_patch.events import ADMITTED, FRAME_BYTES, FREED, POLICY, Batch, batch, events, frame_size
from engine_patch.load import SAMPLED, Load
from engine_patch.parent import die_with

MAX_FRAME_BYTES = 256 << 20
READ_BYTES = 1 << 20
LOOK_S = 2.0
STATE_S = 5.0
FAULTS = 5
NICE = 10
BAD_INPUT, BROKEN = 3, 4


@dataclass(frozen=True)
class Options:
    """What the process is started with."""

    parent: int
    num_blocks: int
    block_size: int
    policies: tuple[str, ...]
    preset: str = "default"
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the estimator; `fresh` says whether the pool was empty at the first event."""
    sample: float = 0.0
    """Share of the blocks to follow; 0: all, fewer under load."""

    def to_json(self) -> str:
        """Return the process's argument."""
        return json.dumps(asdict(self))


class Shadows:
    """The estimator and the state that is told of it."""

    def __init__(self, options: Options, now: float) -> None:
        self.options = options
        self.load = Load(now, options.sample or SAMPLED)
        self.fresh = bool(options.overrides.get("fresh", True))
        self.live = str(options.overrides.get("live", "lru"))
        self.events = 0
        self.gaps = 0
        self.frames = 0
        self.estimator = self._new(self.fresh, options.sample or 1.0)

    def feed(self, frame: Batch, lag_s: float) -> list[Decision]:
        """Take a frame; return the decisions that fell due."""
        began = time.process_time()
        estimator, decisions, blocks = self.estimator, [], 0
        first, self.frames = not self.frames, self.frames + 1
        lost = frame.gap and not (first and self.fresh and not frame.dropped)
        if lost:
            self.gaps += 1
            estimator.lost()
        for event in events(frame):
            decision = estimator.decide(event.t)
            if decision is not None:
                decisions.append(decision)
            if event.kind == ADMITTED:
                blocks += len(event.hashes)
                estimator.admitted(
                    event.t,
                    event.request,
                    event.hashes,
                    event.num_prompt_tokens,
                    event.hit_tokens,
                    free_blocks=event.free_blocks,
                    counted=event.counted,
                )
            elif event.kind == FREED:
                estimator.freed_tail(
                    event.t,
                    event.request,
                    event.hashes,
                    event.num_hashes,
                    event.num_blocks,
                    free_blocks=event.free_blocks,
                )
            elif event.kind == POLICY:
                self.live = event.name
                estimator.policy(event.t, event.name, event.why)
            else:
                estimator.reset(event.t)
            self.events += 1
        decision = estimator.decide(frame.t)
        if decision is not None:
            decisions.append(decision)
        if not self.options.sample and self.options.preset == "default":
            behind = lost and not first
            sample = self.load.took(time.monotonic(), lag_s, time.process_time() - began, blocks, behind)
            estimator.set_sample(sample)
        return decisions

    def renew(self) -> None:
        """Start over with empty shadows."""
        self.estimator = self._new(False, self.estimator.sample)

    def state(self) -> dict[str, Any]:
        """Return what the engine's status shows."""
        estimator = self.estimator
        return {
            "lag_s": round(self.load.lag_s, 3),
            "busy": round(self.load.busy, 4),
            "sample": estimator.sample,
            "live": estimator.live,
            "events": self.events,
            "gaps": self.gaps,
            "open_requests": estimator.open_requests,
            "rss_mib": round(_rss_mib(), 1),
        }

    def _new(self, fresh: bool, sample: float) -> Estimator:
        options = self.options
        overrides = {**options.overrides, "live": self.live}
        overrides.pop("fresh", None)
        if options.preset == "default":
            overrides |= {"fresh": fresh, "sample": sample}
        return Estimator(options.preset, options.policies, options.num_blocks, options.block_size, **overrides)


def main(arguments: list[str] | None = None) -> int:
    """Run until the input ends; return the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    options = Options(**{**given, "policies": tuple(given["policies"])})
    die_with(options.parent)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        return _run(options)
    except BrokenPipeError:
        return 0


def _run(options: Options) -> int:
    shadows = Shadows(options, time.monotonic())
    waiting = bytearray()
    told_at, faults = 0.0, 0
    _say({"state": shadows.state()})
    while True:
        if not select.select([0], [], [], LOOK_S)[0]:
            if options.parent and os.getppid() != options.parent:
                return 0
            continue
        data = os.read(0, READ_BYTES)
        if not data:
            return 0
        waiting += data
        while len(waiting) >= FRAME_BYTES:
            try:
                head = bytes(waiting[:FRAME_BYTES])
                size = frame_size(head)
                if size > MAX_FRAME_BYTES:
                    raise ValueError("a frame of events is too long")
            except ValueError as error:
                _say({"error": str(error)})
                return BAD_INPUT
            if len(waiting) < FRAME_BYTES + size:
                break
            frame = batch(head, bytes(waiting[FRAME_BYTES : FRAME_BYTES + size]))
            del waiting[: FRAME_BYTES + size]
            try:
                for decision in shadows.feed(frame, max(0.0, time.monotonic() - frame.sent)):
                    _say({"decision": decision.as_dict()})
                faults = 0
            except BrokenPipeError:
                raise
            except Exception as error:
                faults += 1
                _say({"error": f"{type(error).__name__}: {error}"[:500]})
                if faults >= FAULTS:
                    return BROKEN
                shadows.renew()
        if time.monotonic() - told_at >= STATE_S:
            told_at = time.monotonic()
            _say({"state": shadows.state()})


def _say(what: dict[str, Any]) -> None:
    data = memoryview(json.dumps(what, separators=(",", ":")).encode() + b"\n")
    while data:
        data = data[os.write(1, data) :]


def _rss_mib() -> float:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


if __name__ == "__main__":
    sys.exit(main())
