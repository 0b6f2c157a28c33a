"""The folder for the sockets of workers, which nobody else can open.

It is locked while its supervisor lives. One that was killed leaves it behind, and the next supervisor of the same user
that starts removes it: the lock tells, not a process id, which may be another's by now or in another container.
"""

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from service.errors import InvalidInput

PREFIX = "cacheroute-workers-"
# A younger one may belong to a supervisor that has not locked it yet.
YOUNG_S = 60.0
# The system's limit for the path of a socket, without the socket's name.
PATH_MAX_BYTES = 107 - len("/63.sock")


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """Give a new folder, removed at the end; raise InvalidInput when there can be none, or its path is too long."""
    _remove_left()
    with contextlib.ExitStack() as ending:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            ending.callback(_remove, folder)
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            ending.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise InvalidInput(f"no folder for the workers' sockets: {exc.strerror}", "set TMPDIR to one") from exc
        if len(os.fsencode(folder)) > PATH_MAX_BYTES:
            raise InvalidInput(f"{folder.parent} is too long a path for sockets", "set TMPDIR to a shorter one")
        yield folder


def _remove(folder: Path) -> None:
    """Remove the sockets and the folder; one that holds anything else stays."""
    with contextlib.suppress(OSError):
        for path in folder.glob("*.sock"):
            path.unlink()
        folder.rmdir()


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(lock)
                if found.st_uid != os.geteuid() or time.time() - found.st_mtime < YOUNG_S:
                    continue
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)
            finally:
                os.close(lock)
