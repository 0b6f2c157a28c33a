"""Writes a file whole or not at all: whoever reads it finds the old one or the new one, never a part."""

import contextlib
import os
import tempfile
from pathlib import Path

from service.errors import InvalidInput


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

    option: what named the folder, for the error.
    """
    try:
        folder.mkdir(exist_ok=True)
        descriptor, probe = tempfile.mkstemp(dir=folder, prefix=".probe.")
        os.close(descriptor)
        os.unlink(probe)
    except OSError as exc:
        raise InvalidInput(
            f"{option} {folder}: {exc.strerror}",
            "name a folder that may be written to; it is made if the one above it exists",
        ) from exc


def replace_file(path: Path, data: bytes) -> None:
    """Write next to `path`, then rename, so that it survives the loss of power at any point; raise OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for their owner alone; a result is as public as any file one writes.
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
