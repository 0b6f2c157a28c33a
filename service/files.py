"""Writes a file whole or not at all: whoever reads it finds the old one or the new one, never a part.

A disk may answer never. What serves requests asks it through `Aside`: in a thread that nobody waits for at the end of
the process, as one does for those of an executor.
"""

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TypeVar

from service.errors import InvalidInput

# How long the one who starts the service waits to hear whether a folder can be used.
LOOK_S = 2.0

T = TypeVar("T")


class Aside:
    """Runs work that may hang, one piece at a time."""

    def __init__(self) -> None:
        """Nothing is started yet."""
        self._free = asyncio.Lock()

    async def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Return what `work` does; raise its error, or TimeoutError when it, and what came before it, take too long."""
        async with asyncio.timeout(limit_s):
            await self._free.acquire()
            loop = asyncio.get_running_loop()
            answer: asyncio.Future[T] = loop.create_future()

            def settle(tell: Callable[[], None]) -> None:
                self._free.release()
                if not answer.done():
                    tell()

            def in_thread() -> None:
                try:
                    tell = partial(answer.set_result, work())
                except Exception as exc:
                    tell = partial(answer.set_exception, exc)
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(settle, tell)

            try:
                Thread(target=in_thread, daemon=True).start()
            except RuntimeError as exc:
                self._free.release()
                raise OSError(errno.EAGAIN, str(exc)) from exc
            return await answer


def write_whole(option: str, path: Path, data: bytes) -> None:
    """Write a file that a person named; raise InvalidInput when it cannot be written.

    option: what named the path, for the error.
    """
    try:
        replace_file(path, data)
    except OSError as exc:
        raise InvalidInput(
            f"{option} {path} cannot be written: {exc.strerror}", "name a file in a folder you may write to"
        ) from exc


def check_folder(option: str, folder: Path) -> None:
    """Make the folder if only itself is missing; raise InvalidInput when no file can be written there.

    One that does not answer within LOOK_S passes: who uses it notices, and a start must not hang.
    option: what named the folder, for the error.
    """
    faults: list[OSError] = []

    def look() -> None:
        try:
            folder.mkdir(exist_ok=True)
            descriptor, probe = tempfile.mkstemp(dir=folder, prefix=".probe.")
            os.close(descriptor)
            os.unlink(probe)
        except OSError as exc:
            faults.append(exc)

    thread = Thread(target=look, daemon=True)
    thread.start()
    thread.join(LOOK_S)
    for exc in faults:
        raise InvalidInput(
            f"{option} {folder}: {exc.strerror}",
            "name a folder that may be written to; it is made if the one above it exists",
        ) from exc


def replace_file(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write next to `path`, then rename, so that it survives the loss of power at any point; raise OSError.

    private: for the owner's eyes only; else as public as any file one writes.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not private:  # mkstemp makes files for their owner alone
            os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    # Some network file systems know no sync of a folder; the rename was done all the same.
    with contextlib.suppress(OSError):
        os.fsync(folder)
    os.close(folder)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
