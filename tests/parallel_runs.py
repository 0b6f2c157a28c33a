"""Runs pytest several times side by side, each on its share of the test files, since many tests mostly wait.

`python -m tests.parallel_runs COUNT FOLDER … [-- ARGUMENT …]`: files are dealt out in turn; the arguments go to all.
The first run's output is seen as it comes, that of the others once all are done. Exit code: the first that is not 0; a
run to which the arguments leave no test (5) counts for nothing, unless that is so in all.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

NO_TESTS = 5


def shares(folders: Sequence[str], count: int) -> list[list[str]]:
    """Return the test files of each run."""
    files = [str(path) for folder in folders for path in sorted(Path(folder).glob("**/test_*.py"))]
    return [files[at::count] for at in range(count)]


def verdict(codes: Sequence[int]) -> int:
    """Return one exit code for several."""
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def interrupted(*_: int | FrameType | None) -> None:
    """End as for Ctrl-C, which a shell does not send to what runs in its background."""
    raise KeyboardInterrupt


def main(count: str, *rest: str) -> int:
    """Run them all."""
    at = rest.index("--") if "--" in rest else len(rest)
    signal.signal(signal.SIGTERM, interrupted)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(number)) for number in range(1, int(count))]
        runs = []
        for files, log in zip(shares(rest[:at], int(count)), [None, *logs], strict=True):
            command = [sys.executable, "-m", "pytest", *files, *rest[at + 1 :]]
            if log is None:
                runs.append(subprocess.Popen(command))
            else:
                with log.open("wb") as out:
                    runs.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        try:
            return verdict([run.wait() for run in runs])
        except KeyboardInterrupt:
            # Each ends what it started before it ends itself.
            for run in runs:
                run.send_signal(signal.SIGINT)
            for run in runs:
                run.wait()
            return 130
        finally:
            for log in logs:
                sys.stdout.buffer.write(log.read_bytes())
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
