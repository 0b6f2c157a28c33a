"""The copy on disk of the last table in service, so that a start while Redis is away has one.

1. The file `<state_dir>/<pool>.plan` is one line of JSON, the head, and the plan's bytes as Redis had them. It is
   replaced whole. It is its owner's alone, since hashes of keys without a salt can be guessed.
2. It is believed as little as Redis: the same digest, schema, rules and salt check, and it must be of this pool.
3. What is wrong with it is one log line with the remedy and one counter; the start goes on without it. So it does
   when the disk takes longer than LIMIT_S, as one that is mounted from elsewhere may for ever.
4. Workers and processes may share the folder: they write the same content, and who finds its own plan there, or a
   newer one, writes nothing. Who served the file's table and was told by Redis of an older plan writes that one.
"""

import asyncio
import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict
from io import BufferedReader
from pathlib import Path

import structlog

from service.errors import InvalidPlan
from service.files import Aside, replace_file
from service.keys import KEY_CHECK, hash_key
from service.published import Head, verify
from service.settings import ServiceSettings
from service.table import Table, build_table
from service.telemetry import Seldom, Telemetry

FORMAT = "cacheroute-table-1"
HEAD_MAX_BYTES = 65536
# No longer value fits into Redis.
PLAN_MAX_BYTES = 512 * 1024 * 1024
# A process that was killed while it wrote leaves its temporary file; no writing takes this long.
ABANDONED_S = 3600
LIMIT_S = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LastGood:
    """One pool's file."""

    def __init__(self, settings: ServiceSettings, telemetry: Telemetry) -> None:
        """Read and write nothing yet, and without the setting never; the folder was checked by who starts us."""
        self.enabled = bool(settings.state_dir)
        self.path = Path(settings.state_dir) / f"{settings.pool}.plan"
        self._pool, self._telemetry = settings.pool, telemetry
        self._key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
        self._seldom = Seldom()
        self._unusable = False
        self._aside = Aside()

    async def load(self) -> Table | None:
        """Return the table of the file; None without one, or when it cannot be used, which is counted and logged."""
        if not self.enabled:
            return None
        self._unusable = True  # until it is known that it is not, since nobody may wait for that
        try:
            table = await asyncio.to_thread(self._build, *await self._aside.run(self._read, LIMIT_S))
            self._unusable = False
            return table
        except FileNotFoundError:
            self._unusable = False
        except InvalidPlan as exc:
            self.refuse(exc)
        except TimeoutError:
            self._failed("unreadable", f"no answer in {LIMIT_S:g} s; look at the disk of CACHEROUTE_STATE_DIR")
        except OSError as exc:
            self._failed("unreadable", f"{exc.strerror}; give the service the right to read it")
        return None

    def overrule(self) -> None:
        """Write the next plan over the file's even if that is newer: Redis does not know it."""
        self._unusable = True

    def refuse(self, exc: InvalidPlan) -> None:
        """Count and log why the file's table is not used; the next plan is written over it."""
        self._failed(exc.cause, f"{exc}; it is replaced with the next plan, or delete it")

    async def save(self, data: bytes, head: Head) -> None:
        """Write a published plan that is in service; a failure is counted and logged."""
        if self.enabled:
            try:
                await self._aside.run(lambda: self._save(data, head), LIMIT_S)
            except OSError as exc:
                self._telemetry.table_file_failures.labels("unwritable").inc()
                if self._seldom.may("unwritable"):
                    why = f"no answer in {LIMIT_S:g} s" if isinstance(exc, TimeoutError) else exc.strerror
                    log.error(
                        "table not kept on disk, a start without Redis would have an older one or none",
                        path=str(self.path),
                        error=f"{why}; make room, or let the service write to CACHEROUTE_STATE_DIR",
                    )

    def _save(self, data: bytes, head: Head) -> None:
        line = json.dumps({"format": FORMAT, "pool": self._pool, **asdict(head)}).encode() + b"\n"
        if self._unusable or not self._has(line, len(data), head):
            replace_file(self.path, line + data, private=True)
            self._unusable = False

    def _build(self, head: Head, pool: str, data: bytes) -> Table:
        if pool != self._pool:
            raise InvalidPlan("pool", f"it is a table of pool {pool!r}")
        return build_table(verify(data, head, key_check=self._key_check), head.sha256, "disk")

    def _has(self, line: bytes, length: int, head: Head) -> bool:
        """Return whether the file is this very plan, or a newer one."""
        try:
            with self._open() as (file, size):
                found = file.readline(HEAD_MAX_BYTES)
            if found == line:
                return size == len(line) + length
            there = _parse(found)[0]
        except (InvalidPlan, FileNotFoundError):
            return False
        return (there.epoch, there.version) > (head.epoch, head.version)

    def _read(self) -> tuple[Head, str, bytes]:
        self._look_at_folder()
        with self._open() as (file, size):
            if size > HEAD_MAX_BYTES + PLAN_MAX_BYTES:
                raise InvalidPlan("corrupt", "it is larger than any plan")
            head, pool = _parse(file.readline(HEAD_MAX_BYTES))
            return head, pool, file.read(size)

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[BufferedReader, int]]:
        """Open the file, with its size in bytes; raise OSError for what is no file, which could be read for ever."""
        # A pipe would be waited for until somebody writes to it.
        with open(self.path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no file; move it away")
            yield file, found.st_size

    def _failed(self, cause: str, error: str) -> None:
        self._unusable = True
        self._telemetry.table_file_failures.labels(cause).inc()
        if self._seldom.may(cause):
            log.error("table on disk not used", path=str(self.path), cause=cause, error=error)

    def _look_at_folder(self) -> None:
        with contextlib.suppress(OSError):
            mode = self.path.parent.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                log.warning(
                    "anybody on this machine may replace the table on disk",
                    path=str(self.path.parent),
                    remedy="take the right to write from others (chmod o-w); a volume that only this pod has is safe",
                )
            for left in self.path.parent.glob(f".{self.path.name}.*"):
                if time.time() - left.stat().st_mtime > ABANDONED_S:
                    left.unlink()


def _parse(line: bytes) -> tuple[Head, str]:
    """Return head and pool of a file's first line; raise InvalidPlan for anything that we do not write."""
    try:
        fields = json.loads(line)
        if fields.pop("format") != FORMAT:
            raise InvalidPlan("format", "another version of the service wrote it")
        pool = fields.pop("pool")
        head = Head(
            version=int(fields["version"]),
            epoch=int(fields["epoch"]),
            sha256=str(fields["sha256"]),
            created_at=float(fields["created_at"]),
            actor=str(fields["actor"]),
            reason=str(fields["reason"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as exc:
        raise InvalidPlan("corrupt", "it is no table, or only a part of one") from exc
    return head, str(pool)
