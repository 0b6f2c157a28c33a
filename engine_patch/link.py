"""The engine's end of the shadow process: starts it, feeds it, reads its decisions; never waits for it, never raises.

1. `start` says that a process is wanted; it is started then, and by `poll` again when it has ended: after 1, 2, 4, …
   s, at most STARTS times in a row (a process that lived STEADY_S starts the row anew).
2. `poll`, from the engine's own thread, writes what the recorder has as far as the pipe takes it at once, and reads
   what the process said. Both ends of the pipes in this process never block.
3. While the pipe takes nothing, events wait in the recorder, which is bounded and then starts over with a gap. A pipe
   that holds something and from which nothing is taken for STALL_S, full or not, belongs to a process that is stopped
   or stuck: it is killed, and another started.
4. The process ends with this one, however that ends: its input ends, and the kernel is told to kill it. It inherits
   no other descriptor and no variable that starts with VLLM_.
5. What it says is believed only as far as it is a line of JSON of a known form; after GARBAGE other lines it is killed.

Cost of a poll with nothing to do: about 5 µs; with a batch of 100,000 blocks below 1 ms.
"""

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import sys
import termios
import time
from typing import IO, Any

from engine_patch.decision import Decision
from engine_patch.events import Recorder
from engine_patch.shadow_command import command, environment
from engine_patch.shadow_process import Options

logger = logging.getLogger("vllm.wakman")

STARTS = 8
STEADY_S = 600.0
BACKOFF_MAX_S = 300.0
STALL_S = 60.0
FLUSH_S, FLUSH_BYTES = 0.25, 256 << 10
GARBAGE = 20
LINE_BYTES = 64 << 10
PIPE_BYTES = 1 << 20
END_S = 1.0
F_SETPIPE_SZ = 1031


class ShadowLink:
    """One engine's link; all calls from one thread."""

    def __init__(
        self,
        settings: Any,
        recorder: Recorder,
        *,
        num_blocks: int,
        block_size: int,
        engine: int = 0,
        policy: str = "lru",
        dropped: int = 0,
        stall_s: float = STALL_S,
        backoff_s: float = 1.0,
    ) -> None:
        """settings: EngineSettings, or what has its policies, preset, interval_s, margin, dwell_s, residual, sample."""
        self.recorder = recorder
        self.engine = engine
        self._settings = settings
        self._num_blocks, self._block_size, self._policy = num_blocks, block_size, policy
        self._dropped, self._stall_s, self._backoff_s = dropped, stall_s, backoff_s
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._attempts = self._starts = self._garbage = self._decisions = 0
        self._retry_at = self._started_at = self._read_at = self._flushed_at = 0.0
        self._written = self._read = 0
        self._pending = memoryview(b"")
        self._line = bytearray()
        self._state: dict[str, Any] = {}
        self._rates: dict[str, float] = {}
        self._error: str | None = None

    @property
    def up(self) -> bool:
        """The process runs, as far as is known."""
        return self._process is not None

    def start(self) -> None:
        """Want the process, and start it."""
        self._wanted = True
        self._attempts, self._retry_at = 0, 0.0
        self.poll()

    def poll(self) -> list[Decision]:
        """Start, feed and hear the process, as much of it as can be done at once; return what it decided."""
        try:
            return self._poll(time.monotonic()) if self._wanted else []
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
            self._end()
            return []

    def status(self) -> dict[str, Any]:
        """Return plain values: of this end, of the last decision, and what the process last said of itself."""
        return {
            "up": self.up,
            "pid": self._process.pid if self._process is not None else None,
            "starts": self._starts,
            "error": self._error,
            "gave_up": self._wanted and not self.up and self._attempts >= STARTS,
            "dropped": self.recorder.dropped,
            "waiting_bytes": self.recorder.waiting_bytes + len(self._pending),
            "garbage": self._garbage,
            "decisions": self._decisions,
            "rates": self._rates,
            **self._state,
        }

    def close(self) -> None:
        """End the process, which has nothing to save; returns within milliseconds, END_S at most."""
        self._wanted = False
        self._end()
        if self._process is not None:
            with contextlib.suppress(Exception):
                self._process.wait(END_S)
        self._forget(time.monotonic())

    def _poll(self, now: float) -> list[Decision]:
        if self._process is None:
            if now < self._retry_at or self._attempts >= STARTS:
                return []
            self._launch(now)
            return []
        code = self._process.poll()
        decisions = self._hear()
        if code is not None:
            self._error = self._error or f"the shadow process ended with status {code}"
            self._forget(now)
            self._log(now)
            return decisions
        self._feed(now)
        return decisions

    def _launch(self, now: float) -> None:
        self._attempts += 1
        self._retry_at = now + min(BACKOFF_MAX_S, self._backoff_s * 2 ** (self._attempts - 1))
        fresh = not self._starts and not self.recorder.dropped
        if not fresh:
            self.recorder.gap()
        try:
            process = subprocess.Popen(
                command(self._options(fresh)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=environment(os.environ),
                close_fds=True,
                bufsize=0,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._error = f"the shadow process cannot be started: {error}"
            self._log(now)
            return
        self._process = process
        self._starts += 1
        self._started_at = self._read_at = now
        self._written = self._read = 0
        self._error = None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(_pipe(process.stdin), F_SETPIPE_SZ, PIPE_BYTES)

    def _log(self, now: float) -> None:
        again = f"next try in {self._retry_at - now:.0f} s" if self._attempts < STARTS else "given up"
        logger.warning("wakman: no shadow, so nothing is decided: %s; %s", self._error, again)

    def _options(self, fresh: bool) -> Options:
        settings = self._settings
        live = self.recorder.live or self._policy
        if settings.preset == "paper":
            overrides: dict[str, Any] = {"live": live}
        else:
            overrides = {
                "live": live,
                "fresh": fresh,
                "margin": settings.margin,
                "dwell_s": settings.dwell_s,
                "residual": settings.residual,
                "dropped": self._dropped,
            }
        if settings.interval_s:
            overrides["interval_s"] = settings.interval_s
        return Options(
            parent=os.getpid(),
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            policies=tuple(settings.policies),
            preset=settings.preset,
            overrides=overrides,
            sample=settings.sample,
        )

    def _feed(self, now: float) -> None:
        if self._stalled(now):
            self._error = f"the shadow process read nothing for {self._stall_s:g} s and was killed"
            self._end()
            return
        if not self._pending:
            waiting = self.recorder.waiting_bytes
            if not waiting or (waiting < FLUSH_BYTES and now - self._flushed_at < FLUSH_S):
                return
            frame = self.recorder.take(now)
            if frame is None:
                return
            self._flushed_at = now
            self._pending = memoryview(frame)
        assert self._process is not None
        try:
            while self._pending:
                written = os.write(_pipe(self._process.stdin), self._pending)
                self._pending = self._pending[written:]
                self._written += written
        except BlockingIOError:
            pass
        except OSError as error:
            self._error = f"the shadow process does not read: {error}"
            self._end()

    def _stalled(self, now: float) -> bool:
        """Tell whether something has lain in the pipe for too long with nothing taken out of it."""
        assert self._process is not None
        unread = 0
        with contextlib.suppress(OSError):
            unread = int.from_bytes(fcntl.ioctl(_pipe(self._process.stdin), termios.FIONREAD, bytes(4)), sys.byteorder)
        read = self._written - unread
        if not unread or read != self._read:
            self._read, self._read_at = read, now
        return now - self._read_at > self._stall_s

    def _hear(self) -> list[Decision]:
        decisions: list[Decision] = []
        assert self._process is not None
        try:
            data = os.read(_pipe(self._process.stdout), LINE_BYTES)
        except OSError:  # nothing to read, or nobody there
            return decisions
        self._line += data
        if b"\n" in data:
            *lines, rest = bytes(self._line).split(b"\n")
            self._line = bytearray(rest)
            for line in lines:
                self._heard(line, decisions)
        if len(self._line) > LINE_BYTES:
            self._line.clear()
            self._garbage += 1
        if self._garbage > GARBAGE:
            self._error = "the shadow process says what cannot be understood and was killed"
            self._garbage = 0
            self._end()
        return decisions

    def _heard(self, line: bytes, decisions: list[Decision]) -> None:
        try:
            said = json.loads(line)
            if not isinstance(said, dict):
                raise ValueError("not an object")
            if "decision" in said:
                decision = Decision.from_dict(said["decision"])
                self._rates = decision.rates
                self._decisions += 1
                decisions.append(decision)
            elif isinstance(said.get("state"), dict):
                self._state = said["state"]
            elif isinstance(said.get("error"), str):
                self._error = said["error"][:500]
            else:
                raise ValueError("of no known form")
        except (ValueError, TypeError, RecursionError):
            self._garbage += 1

    def _end(self) -> None:
        """Kill the process; the next poll reaps it."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()
        self._pending = memoryview(b"")

    def _forget(self, now: float) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError, ValueError):
                    if pipe is not None:
                        pipe.close()
        if now - self._started_at >= STEADY_S:
            self._attempts = 0
        self._retry_at = now + min(BACKOFF_MAX_S, self._backoff_s * 2 ** max(0, self._attempts - 1))
        self._pending = memoryview(b"")
        self._line.clear()
        self._state = {}
        self._rates = {}  # of a shadow that is no more


def _pipe(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    return pipe.fileno()
