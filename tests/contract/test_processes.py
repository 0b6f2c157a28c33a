"""Child processes as the operating system really treats them: readiness, ends, logs, and a parent that dies."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from replay.processes import Process, answers_http, answers_ping, free_ports, stop_together, wait_ready
from service.errors import ServerUnavailable

PATIENCE_S = 20.0
Make = Callable[..., Process]
WAITS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes children out of a line of Python, ready when they have written `up`; all are ended after the test."""
    made: list[Process] = []

    def one(code: str, *, name: str = "part", ready: Callable[[], bool] | None = None) -> Process:
        log = tmp_path / f"{name}-{len(made)}.log"
        process = Process(
            name,
            [sys.executable, "-c", code],
            log=log,
            ready=ready or (lambda: "up" in process.log_tail(since_start=True)),
            env=dict(os.environ),
            cwd=tmp_path,
        )
        made.append(process)
        return process

    yield one
    for process in made:
        process.kill()


def test_start_wait_stop(make: Make) -> None:
    """A child runs from start to stop, and says how it ended."""
    process = make(WAITS)
    assert (process.running, process.pid, process.exit_code) == (False, None, None)
    process.start()
    wait_ready([process], timeout_s=PATIENCE_S)
    assert process.running
    assert process.pid is not None
    process.stop()
    assert (process.running, process.pid, process.exit_code) == (False, None, -signal.SIGTERM)


def test_both_streams_are_logged_and_a_restart_appends(make: Make) -> None:
    """Standard output and error go to the log; a second start adds to it, and its own lines can be told apart."""
    process = make("import sys, os; print('out'); sys.stdout.flush(); print('err up', os.getpid(), file=sys.stderr)")
    pids = []
    for _ in range(2):
        process.start()
        pids.append(process.pid)
        assert process.wait(PATIENCE_S)
    assert len(process.log_tail().splitlines()) == 4
    assert process.log_tail(since_start=True) == f"out\nerr up {pids[1]}"
    assert process.log_tail(1) == f"err up {pids[1]}"


def test_early_end_is_reported(make: Make) -> None:
    """A child that ends before it is ready is named with its exit code and its own last lines."""
    process = make("import sys; print('cannot: no such thing'); sys.exit(3)", name="server")
    process.start()
    with pytest.raises(ServerUnavailable) as caught:
        wait_ready([process], timeout_s=PATIENCE_S)
    assert str(caught.value) == (
        "server ended with exit code 3 before it was ready; its last lines:\n  server | cannot: no such thing"
    )


def test_early_end_by_a_signal_in_silence_is_reported(make: Make) -> None:
    """A child that a signal ended, and that wrote nothing, is described so."""
    process = make("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    process.start()
    with pytest.raises(ServerUnavailable, match="ended with signal SIGKILL before it was ready; it wrote nothing"):
        wait_ready([process], timeout_s=PATIENCE_S)


def test_an_early_end_is_noticed_while_another_is_awaited(make: Make) -> None:
    """One dead child fails the wait at once, although the one before it is not ready yet."""
    slow, dead = make(WAITS, name="slow", ready=lambda: False), make("raise SystemExit(1)", name="dead")
    slow.start()
    dead.start()
    with pytest.raises(ServerUnavailable, match=r"^dead ended with exit code 1"):
        wait_ready([slow, dead], timeout_s=PATIENCE_S)


def test_late_child_is_reported(make: Make) -> None:
    """A child that is not ready by the deadline is named with what it wrote so far."""
    process = make(WAITS, ready=lambda: False)
    process.start()
    while "up" not in process.log_tail():
        time.sleep(0.01)
    with pytest.raises(ServerUnavailable, match=r"part was not ready within 0\.1 s; its last lines:\n  part \| up"):
        wait_ready([process], timeout_s=0.1)


def test_missing_program_is_reported(tmp_path: Path) -> None:
    """A program that is not there is named, and nothing is started."""
    process = Process("part", [tmp_path / "nothing"], log=tmp_path / "log", ready=lambda: True, env={}, cwd=tmp_path)
    with pytest.raises(ServerUnavailable, match=r"part cannot be run: .*nothing is no program"):
        process.start()
    assert not process.running


def test_child_that_ignores_the_signal_is_killed(make: Make) -> None:
    """After the grace a child is ended by force."""
    process = make(DEAF)
    process.start()
    wait_ready([process], timeout_s=PATIENCE_S)
    process.stop(grace_s=0.1)
    assert process.exit_code == -signal.SIGKILL


def test_stop_together_shares_one_grace(make: Make) -> None:
    """All are asked before any is awaited, and those that stay are ended by force."""
    processes = [make(DEAF), make(WAITS), make(DEAF), make(WAITS)]
    for process in processes:
        process.start()
    wait_ready(processes, timeout_s=PATIENCE_S)
    stop_together(processes, grace_s=0.3)
    killed, ended = -signal.SIGKILL, -signal.SIGTERM
    assert [p.exit_code for p in processes] == [killed, ended, killed, ended]


def test_child_leads_a_session_of_its_own(make: Make) -> None:
    """A terminal's Ctrl-C does not reach a child: it is no member of our session or process group."""
    process = make(WAITS)
    process.start()
    wait_ready([process], timeout_s=PATIENCE_S)
    assert process.pid is not None
    assert os.getpgid(process.pid) == os.getsid(process.pid) == process.pid


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_of_a_killed_parent_are_killed(tmp_path: Path) -> None:
    """When the process that started them is killed outright, children are ended, even those that ignore SIGTERM."""
    parent = f"""
import json, os, sys, time
from pathlib import Path
from replay.processes import Process, wait_ready
here = Path({str(tmp_path)!r})
ps = [Process(f"p{{i}}", [sys.executable, "-c", {DEAF!r}], log=here / f"{{i}}.log", ready=lambda: True,
              env=dict(os.environ), cwd=here) for i in range(2)]
for p in ps:
    p.start()
while not all("up" in p.log_tail() for p in ps):
    time.sleep(0.01)
print(json.dumps([p.pid for p in ps]), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pids = json.loads(process.stdout.readline())
            assert all(map(runs, pids))
        finally:
            process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while left := list(filter(runs, pids)):
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"{len(left)} children outlived their parent")
        time.sleep(0.01)


async def test_start_from_another_thread_is_refused(make: Make) -> None:
    """A child dies with the thread that started it, so only the main thread may start one."""
    process = make(WAITS)
    with pytest.raises(AssertionError, match="thread"):
        await asyncio.to_thread(process.start)
    assert not process.running


def test_free_ports_are_distinct_and_free() -> None:
    """Ports that are chosen together are all different, and each can be listened on."""
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_probes_of_what_does_not_answer() -> None:
    """A port where nothing listens, and a server that talks nonsense, are not ready, and no exception says so."""
    [closed] = free_ports(1)
    assert not answers_http(f"127.0.0.1:{closed}", "/health")
    assert not answers_ping(f"127.0.0.1:{closed}")


def test_probe_of_a_real_valkey(valkey: object) -> None:
    """A real Valkey answers the ping."""
    assert answers_ping(f"127.0.0.1:{valkey.port}")  # type: ignore[attr-defined]
