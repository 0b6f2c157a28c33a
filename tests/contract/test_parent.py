"""A process tied to the one that started it, by the kernel itself: as a call, and as a program that becomes another."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine_patch import parent

PATIENCE_S = 20.0
ROOT = Path(parent.__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")

CALL = "import os, time; from engine_patch.parent import die_with; die_with(os.getppid()); print('up', flush=True); "
WAITS = "time.sleep(600)"


def ended(pid: int) -> bool:
    """Whether the process ends within PATIENCE_S; it is killed where not."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("as_program", [False, True])
def test_it_ends_with_a_parent_that_is_killed(as_program: bool) -> None:
    """SIGKILL of the parent, which can clean up nothing, ends the child."""
    child = [sys.executable, "-c", CALL + WAITS]
    if as_program:
        plain = "import time; print('up', flush=True); " + WAITS
        child = [sys.executable, "-I", "-S", parent.__file__, "PARENT", sys.executable, "-c", plain]
    starter = (
        "import os, subprocess, sys, time; "
        "child = subprocess.Popen([a if a != 'PARENT' else str(os.getpid()) for a in sys.argv[1:]]); "
        "print(child.pid, flush=True); " + WAITS
    )
    process = subprocess.Popen([sys.executable, "-c", starter, *child], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    with process:
        assert process.stdout is not None
        said = sorted((process.stdout.readline(), process.stdout.readline()))
        assert said[1] == "up\n"
        process.kill()
    assert ended(int(said[0]))


def test_it_ends_at_once_when_its_parent_is_gone_already() -> None:
    """Who is no longer the parent when the kernel is asked would never be noticed: no program is begun."""
    nobody = str(os.getppid())
    call = f"from engine_patch.parent import die_with; die_with({nobody}); print('went on')"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    program = [sys.executable, "-I", "-S", parent.__file__, nobody, sys.executable, "-c", "print('went on')"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the process that started this one is gone\n"


def test_the_program_has_its_arguments_and_its_environment() -> None:
    """What it becomes is exactly what was asked for: arguments, variables, process id."""
    show = "import os, sys; print(sys.argv[1:], os.environ['SHOWN'], os.getpid(), sys.flags.isolated)"
    command = [sys.executable, "-I", "-S", parent.__file__, str(os.getpid()), sys.executable, "-c", show, "a b", ""]
    process = subprocess.Popen(command, env={**os.environ, "SHOWN": "yes"}, stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=60)[0] == f"['a b', ''] yes {process.pid} 0\n"
