"""`cacheroute engine evaluate` as a process: what it starts ends with it, and what it did not write it leaves alone."""

import subprocess
import sys
import time
from pathlib import Path

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


def test_a_file_that_it_did_not_write_is_left_alone(tmp_path: Path) -> None:
    """`--out` over somebody's trace: exit code 2 and one line before any run, and the trace is as it was."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n')
    before = trace.read_bytes()
    # Were it taken, the run would come to an end.
    arguments = ["--mixes", str(trace), "--out", str(trace), "--manager", "own", "--policies", "lru", "--no-bounds"]
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "engine", "evaluate", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"--out {trace} is not a file of finished runs (line 1 is no run), and was left as it is" in done.stderr
    assert trace.read_bytes() == before
