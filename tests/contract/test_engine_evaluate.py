"""`cacheroute engine evaluate` as a process: what it starts ends with it."""

import subprocess
import sys
import time

import psutil

PATIENCE_S = 60.0


def test_nothing_is_left_of_a_killed_evaluation() -> None:
    """Killed in the middle, with no chance to clean up, it leaves none of its processes behind."""
    arguments = ["engine", "evaluate", "--manager", "own", "--processes", "2", "--no-bounds"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    below: list[psutil.Process] = []
    try:
        until = time.monotonic() + PATIENCE_S
        # The evaluation, its two workers, and their resource tracker.
        while len(below) < 4:
            assert process.poll() is None
            assert time.monotonic() < until, below
            below = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.05)
        process.kill()
        assert psutil.wait_procs(below, timeout=PATIENCE_S)[1] == []
    finally:
        process.kill()
        process.wait()
        for left in below:
            if left.is_running():
                left.kill()
