"""Keeps the finished runs of an evaluation in a file, one line of JSON each, so that none has to be made again.

1. A file that holds anything else (another kind of JSON, a trace, a document, no regular file) is refused, untouched: a
   mistyped `--out` costs nobody's data. An empty file will do.
2. Runs are written whole, each at once, at the end. Who is killed at it leaves a torn last line: it is cut off when the
   log is opened again. A torn line that others were written behind is passed over. Either way the run is made again.
3. Runs of other settings lie in the same file and are left alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from replay.evaluation import Settings
from service.errors import InvalidInput
from service.files import check_folder

# Every run begins so: by it a torn one is told from what is not ours.
START = b'{"settings": "'
# Switches make a line long, four bytes a second at the very most.
LINE_BYTES = 1 << 20

Run = tuple[str, int, str]


class RunLog:
    """One results file. runs: those of these settings by (mix, seed, name).  torn: lines passed over or cut off."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Read what is there; InvalidInput for what is no run log or cannot be written, which is then as it was."""
        self.path = path
        self.runs: dict[Run, dict[str, Any]] = {}
        self.torn = 0
        self._settings = settings.fingerprint()
        try:
            if not path.exists() and not path.is_symlink():
                check_folder("--out", path.parent)
            elif not path.is_file():
                raise self._refused("a folder" if path.is_dir() else "no regular file")
            else:
                with path.open("r+b") as file:
                    self._read(file)
        except OSError as exc:
            raise self._failed(exc) from exc

    def keep(self, line: Mapping[str, Any]) -> None:
        """Add a run; InvalidInput when it cannot be written."""
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as exc:
            raise self._failed(exc) from exc

    def _read(self, file: BinaryIO) -> None:
        """Take in the runs, and mend the end of the file: what is written next begins a line."""
        number = 0
        while line := file.readline(LINE_BYTES):
            number += 1
            ended = line.endswith(b"\n")
            if not ended and len(line) == LINE_BYTES:
                raise self._refused(f"line {number} is longer than any run")
            if not line.strip():
                continue
            try:
                run = _run(line)
            except ValueError:
                # So few bytes of a run may be there that they are only the beginning of its beginning.
                if not line.startswith(START) and (ended or not START.startswith(line)):
                    raise self._refused(f"line {number} is no run") from None
                self.torn += 1
                if not ended:
                    file.truncate(file.tell() - len(line))
                continue
            if run is None:
                raise self._refused(f"line {number} is no run")
            if run["settings"] == self._settings:
                self.runs[run["mix"], run["seed"], run["name"]] = run
            if not ended:
                file.write(b"\n")

    def _refused(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"--out {self.path} is not a file of finished runs ({why}), and was left as it is",
            "name a new file, or one that `engine evaluate --out` wrote",
        )

    def _failed(self, exc: OSError) -> InvalidInput:
        return InvalidInput(f"--out {self.path}: {exc.strerror or exc}", "name a file that can be written")


def _run(line: bytes) -> dict[str, Any] | None:
    """Return the run that a line tells, None when it tells something else; ValueError when it is no JSON."""
    try:
        found = json.loads(line)
    except RecursionError:
        return None
    kinds = (("settings", str), ("mix", str), ("seed", int), ("name", str))
    if not isinstance(found, dict) or not all(isinstance(found.get(name), kind) for name, kind in kinds):
        return None
    return found if {"hit", "switches"} <= found.keys() or {"infinite", "belady"} <= found.keys() else None
