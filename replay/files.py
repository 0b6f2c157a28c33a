"""Writes a result file whole or not at all."""

import os
import tempfile
from pathlib import Path

from service.errors import InvalidInput


def write_whole(option: str, path: Path, data: bytes) -> None:
    """Write next to `path` and rename: whoever reads it finds the old file or the new one, never a part.

    option: what named the path, for the error.  Raise InvalidInput when it cannot be written.
    """
    try:
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
    except OSError as exc:
        raise InvalidInput(
            f"{option} {path} cannot be written: {exc.strerror}", "name a file in a folder you may write to"
        ) from exc


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
