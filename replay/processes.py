"""Starts, watches and ends the child processes of a lab, so that no end of ours leaves one behind.

1. A child leads a session of its own: a terminal's Ctrl-C reaches us alone, and we end the children in our order.
2. The kernel kills a child when we die, however we die (engine_patch.parent, Linux). It watches the THREAD that started
   the child, not the process: start children from the main thread only, which is asserted.
3. Standard output and error go to one log file a child; a restart appends to it.
4. Ready is what the caller's check says, asked until a deadline. A child that ends early, or is late, is reported with
   its exit code and the last lines it wrote.
5. Stop is a signal, a grace, then SIGKILL to the whole session.
"""

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from engine_patch import parent
from service.errors import ServerUnavailable
from service.settings import split_address

POLL_S = 0.02
PROBE_TIMEOUT_S = 1.0
GRACE_S = 5.0
LOG_TAIL_BYTES = 64 * 1024
# Below are the ports that servers are usually told to use.
PORTS_FROM = 16000


class Process:
    """One child process under a name, which can be ended and started again any number of times."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        log: Path,
        ready: Callable[[], bool],
        env: Mapping[str, str],
        cwd: Path,
    ) -> None:
        """Start nothing yet.

        argv: a program's path and its arguments.  ready: asked while the child starts; never raises, answers within a
        second or so.
        """
        self.name = name
        self.argv = [str(a) for a in argv]
        self.log = log
        self._ready = ready
        self._env = dict(env)
        self._cwd = cwd
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The process id, None when it does not run."""
        return self._child.pid if self._child is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the child was started and has not ended."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the child ended (negative: by that signal); None when it runs or never did."""
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        """Start the child and return at once; raise ServerUnavailable when the program cannot be run at all."""
        assert threading.current_thread() is threading.main_thread(), "children die with the thread that started them"
        assert not self.running, f"{self.name} runs already"
        if not os.access(self.argv[0], os.X_OK):
            raise ServerUnavailable(f"{self.name} cannot be run: {self.argv[0]} is no program")
        tied = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid())] if sys.platform == "linux" else []
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._child = subprocess.Popen(
                [*tied, *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )

    def check_ready(self) -> bool:
        """Return whether the child serves by now; raise ServerUnavailable when it has ended instead."""
        if not self.running:
            how = _describe(self.exit_code)
            raise ServerUnavailable(f"{self.name} ended with {how} before it was ready{self._said()}")
        return self._ready()

    def late(self, waited_s: float) -> ServerUnavailable:
        """Return the error for a child that still runs and was not ready in time."""
        return ServerUnavailable(f"{self.name} was not ready within {waited_s:g} s{self._said()}")

    def stop(self, sig: int = signal.SIGTERM, *, grace_s: float = GRACE_S) -> None:
        """Ask the child to end and wait for it; end its whole session by force after `grace_s`."""
        self.send_signal(sig)
        self.wait(grace_s)
        self.kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child's end; return whether it has ended."""
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_s)
        return not self.running

    def kill(self) -> None:
        """End the child's whole session at once and reap it."""
        if self._child is None:
            return
        # The child is not reaped yet, so its id cannot belong to somebody else.
        if self._child.returncode is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def send_signal(self, sig: int) -> None:
        """Send the child a signal; nothing happens when it has ended."""
        if self._child is not None:
            self._child.send_signal(sig)

    def log_tail(self, lines: int = 20, *, since_start: bool = False) -> str:
        """Return the last lines that the child wrote, of this start only when `since_start`."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start if since_start else 0, end - LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _said(self) -> str:
        tail = self.log_tail(since_start=True)
        if not tail:
            return "; it wrote nothing"
        return "; its last lines:\n" + "\n".join(f"  {self.name} | {line}" for line in tail.splitlines())


def wait_ready(processes: Iterable[Process], *, timeout_s: float, since_s: float | None = None) -> None:
    """Return when all are ready; raise ServerUnavailable for the first that ended or is late.

    since_s: from when the timeout counts, on the monotonic clock (None: now).
    """
    waiting, deadline = list(processes), (time.monotonic() if since_s is None else since_s) + timeout_s
    while True:
        waiting = [p for p in waiting if not p.check_ready()]
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise waiting[0].late(timeout_s)
        time.sleep(POLL_S)


def stop_together(processes: Sequence[Process], *, grace_s: float = GRACE_S) -> None:
    """Ask all to end, then wait for all; force those that are left after `grace_s`."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for process in processes:
        process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def free_ports(count: int) -> list[int]:
    """Return distinct TCP ports of 127.0.0.1 that are free now.

    Below those that the kernel gives to outgoing connections, any of which could take one between this call and the
    child's bind. All are held at once while choosing, so none is named twice. Another process that picks ports may
    still be faster; the child then ends early and says so.
    """
    holders: list[socket.socket] = []
    try:
        while len(holders) < count:
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holders.append(holder)
            _bind(holder)
        return [holder.getsockname()[1] for holder in holders]
    finally:
        for holder in holders:
            holder.close()


def _bind(holder: socket.socket) -> None:
    try:
        first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_outgoing = 0
    for _ in range(200 if first_outgoing > PORTS_FROM + 1000 else 0):
        with contextlib.suppress(OSError):
            holder.bind(("127.0.0.1", random.randrange(PORTS_FROM, first_outgoing)))
            return
    holder.bind(("127.0.0.1", 0))


def answers_http(address: str, path: str) -> bool:
    """Return whether GET `path` at `ip:port` answers 200."""
    host, port = split_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def answers_ping(address: str) -> bool:
    """Return whether a Redis or Valkey at `ip:port` answers PING."""
    try:
        with socket.create_connection(split_address(address), timeout=PROBE_TIMEOUT_S) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _describe(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {signal.Signals(-exit_code).name}"
