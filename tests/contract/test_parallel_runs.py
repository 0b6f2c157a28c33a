"""`make unit` runs two folders at a time and says what one run over both would have said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.two_runs import verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("codes", "said"), [([0, 0], 0), ([0, 1], 1), ([2, 0], 2), ([5, 0], 0), ([0, 5], 0), ([5, 5], 5), ([5, 1], 1)]
)
def test_the_exit_code_is_that_of_one_run(codes: list[int], said: int) -> None:
    """A failure in either is one; no test is found only where neither folder has one."""
    assert verdict(codes) == said


def folders(tmp_path: Path, seen: str, kept: str) -> list[str]:
    """Make two folders with a test each and return how they are run."""
    for name, body in (("seen", seen), ("kept", kept)):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"test_{name}.py").write_text(f"import time\n\ndef test_{name}():\n    {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return [sys.executable, "-m", "tests.two_runs", str(tmp_path / "seen"), str(tmp_path / "kept")]


def test_both_outputs_are_shown_and_either_failure_counts(tmp_path: Path) -> None:
    """The folder that runs behind is reported whole, after the other."""
    run = folders(tmp_path, "pass", "assert 'kept' == 'lost'")
    ended = subprocess.run([*run, "-q"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert 0 < ended.stdout.find("1 passed") < ended.stdout.find("assert 'kept' == 'lost'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    """Neither of the two goes on."""
    run = folders(tmp_path, "time.sleep(60)", "print(); open('pid', 'w').write('here'); time.sleep(60)")
    with subprocess.Popen(
        [*run, "-q", "--rootdir", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        until = time.monotonic() + 30
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode == 130
    running = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False).stdout
    assert running == ""
