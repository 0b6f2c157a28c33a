"""Runs pytest on two folders at a time, since one mostly waits: the second one's output comes when both are done.

`python -m tests.two_runs FOLDER FOLDER [ARGUMENT …]`: the arguments go to both. Exit code: the first that is not 0; a
folder in which the arguments leave no test (5) counts for nothing, unless that is so in both.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import FrameType

NO_TESTS = 5


def command(folder: str, arguments: Sequence[str]) -> list[str]:
    """Return how pytest is called."""
    return [sys.executable, "-m", "pytest", folder, *arguments]


def verdict(codes: Sequence[int]) -> int:
    """Return one exit code for several."""
    if all(code == NO_TESTS for code in codes):
        return NO_TESTS
    return next((code for code in codes if code not in (0, NO_TESTS)), 0)


def interrupted(*_: int | FrameType | None) -> None:
    """End as for Ctrl-C, which a shell does not send to what runs in its background."""
    raise KeyboardInterrupt


def main(seen: str, kept: str, *arguments: str) -> int:
    """Run both; what `kept` prints is shown after what `seen` does."""
    signal.signal(signal.SIGTERM, interrupted)
    with tempfile.TemporaryFile() as log:
        runs = [
            subprocess.Popen(command(seen, arguments)),
            subprocess.Popen(command(kept, arguments), stdout=log, stderr=subprocess.STDOUT),
        ]
        try:
            codes = [run.wait() for run in runs]
        except KeyboardInterrupt:
            # Each ends what it started before it ends itself.
            for run in runs:
                run.send_signal(signal.SIGINT)
            for run in runs:
                run.wait()
            return 130
        finally:
            log.seek(0)
            sys.stdout.buffer.write(log.read())
            sys.stdout.flush()
    return verdict(codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
