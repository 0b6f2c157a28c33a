"""The copy on disk of the last table in service, so that a start while Redis is away has one.

1. The file `<state_dir>/<pool>.plan` is one line of JSON, the head, and the plan's bytes as Redis had them. It is
   replaced whole, in a thread: disks can be slow.
2. It is believed as little as Redis: the same digest, schema, rules and salt check, and it must be of this pool.
3. What is wrong with it is one log line with the remedy and one counter; the start goes on without it.
4. Workers and processes may share the folder: they write the same content, and who finds its own plan there, or a
   newer one, writes nothing.
"""

import asyncio
import contextlib
import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import structlog

from service.errors import InvalidPlan
from service.files import check_folder, replace_file
from service.keys import KEY_CHECK, hash_key
from service.published import Head, verify
from service.settings import ServiceSettings
from service.table import Table, build_table
from service.telemetry import Seldom, Telemetry

STATE_DIR = "CACHEROUTE_STATE_DIR"
FORMAT = "cacheroute-table-1"
HEAD_MAX_BYTES = 65536
# No longer value fits into Redis.
PLAN_MAX_BYTES = 512 * 1024 * 1024
# A process that was killed while it wrote leaves its temporary file; no writing takes this long.
ABANDONED_S = 3600

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class LastGood:
    """One pool's file."""

    def __init__(self, settings: ServiceSettings, telemetry: Telemetry) -> None:
        """Raise InvalidInput for a folder that cannot be used; without the setting nothing is ever read or written."""
        if settings.state_dir:
            check_folder(STATE_DIR, Path(settings.state_dir))
        self.enabled = bool(settings.state_dir)
        self.path = Path(settings.state_dir) / f"{settings.pool}.plan"
        self._pool, self._telemetry = settings.pool, telemetry
        self._key_check = hash_key(KEY_CHECK, settings.key_salt.encode())
        self._seldom = Seldom()
        self._unusable = False

    def load(self) -> Table | None:
        """Return the table of the file; None without one, or when it cannot be used, which is counted and logged."""
        if not self.enabled:
            return None
        self._tidy()
        try:
            head, pool, data = self._read()
            if pool != self._pool:
                raise InvalidPlan("pool", f"it is a table of pool {pool!r}")
            return build_table(verify(data, head, key_check=self._key_check), head.sha256, "disk")
        except FileNotFoundError:
            return None
        except InvalidPlan as exc:
            self.refuse(exc)
        except OSError as exc:
            self._failed("unreadable", f"{exc.strerror}; give the service the right to read it")
        return None

    def refuse(self, exc: InvalidPlan) -> None:
        """Count and log why the file's table is not used; the next plan is written over it."""
        self._failed(exc.cause, f"{exc}; it is replaced with the next plan, or delete it")

    async def save(self, data: bytes, head: Head) -> None:
        """Write a published plan that is in service; a failure is counted and logged."""
        if self.enabled:
            await asyncio.to_thread(self._save, data, head)

    def _save(self, data: bytes, head: Head) -> None:
        line = json.dumps({"format": FORMAT, "pool": self._pool, **asdict(head)}).encode() + b"\n"
        try:
            if self._unusable or not self._has(line, len(data), head):
                replace_file(self.path, line + data)
                self._unusable = False
        except OSError as exc:
            self._telemetry.table_file_failures.labels("write").inc()
            if self._seldom.may("write"):
                log.error(
                    "table not kept on disk, a start without Redis would have an older one or none",
                    path=str(self.path),
                    error=f"{exc.strerror}; make room, or let the service write to CACHEROUTE_STATE_DIR",
                )

    def _has(self, line: bytes, length: int, head: Head) -> bool:
        """Return whether the file is this very plan, or a newer one."""
        try:
            with self.path.open("rb") as file:
                found = file.readline(HEAD_MAX_BYTES)
                size = os.fstat(file.fileno()).st_size
            if found == line:
                return size == len(line) + length
            there = _parse(found)[0]
        except (InvalidPlan, FileNotFoundError):
            return False
        return (there.epoch, there.version) > (head.epoch, head.version)

    def _read(self) -> tuple[Head, str, bytes]:
        with self.path.open("rb") as file:
            head, pool = _parse(file.readline(HEAD_MAX_BYTES))
            data = file.read(PLAN_MAX_BYTES)
            if file.read(1):
                raise InvalidPlan("corrupt", "it is larger than any plan")
            return head, pool, data

    def _failed(self, cause: str, error: str) -> None:
        self._unusable = True
        self._telemetry.table_file_failures.labels(cause).inc()
        if self._seldom.may(cause):
            log.error("table on disk not used", path=str(self.path), cause=cause, error=error)

    def _tidy(self) -> None:
        with contextlib.suppress(OSError):
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
