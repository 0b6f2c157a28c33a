"""`make unit` runs its files in several processes and says what one run over all would have said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel_runs import shares, verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("codes", "said"), [([0, 0], 0), ([0, 1], 1), ([2, 0], 2), ([5, 0], 0), ([0, 5], 0), ([5, 5], 5), ([5, 1], 1)]
)
def test_the_exit_code_is_that_of_one_run(codes: list[int], said: int) -> None:
    """A failure in any is one; no test is found only where no run has one."""
    assert verdict(codes) == said


def test_every_file_is_in_one_share() -> None:
    """None is left out and none runs twice, for any number of runs."""
    folders = [str(ROOT / "tests" / name) for name in ("unit", "contract")]
    files = sorted(str(path) for folder in folders for path in Path(folder).rglob("test_*.py"))
    for count in (1, 2, 3, 7):
        assert sorted(file for share in shares(folders, count) for file in share) == files


def two(tmp_path: Path, first: str, second: str) -> list[str]:
    """Make two files with a test each and return how they are run, each by itself."""
    for name, body in (("a", first), ("b", second)):
        (tmp_path / f"test_{name}.py").write_text(f"import time\n\ndef test_{name}():\n    {body}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return [sys.executable, "-m", "tests.parallel_runs", "2", str(tmp_path), "--", "-q"]


def test_all_outputs_are_shown_and_any_failure_counts(tmp_path: Path) -> None:
    """The run that goes on behind is reported whole, after the first."""
    run = two(tmp_path, "pass", "assert 'kept' == 'lost'")
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert 0 < ended.stdout.find("1 passed") < ended.stdout.find("assert 'kept' == 'lost'")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    """None of the runs goes on."""
    run = two(tmp_path, "time.sleep(60)", "open('pid', 'w').write('here'); time.sleep(60)")
    with subprocess.Popen(
        [*run, "--rootdir", str(tmp_path)],
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
