"""Reads an operator's control file: one JSON object that names the policy, watched without I/O on the engine's thread.

1. A daemon thread looks at the file once a second (`LOOK_S`) and opens it only when device, inode, mtime or size differ
   from the last look. A file system that hangs holds that thread and nothing else.
2. Content: `{"policy": NAME, "reason": TEXT, "actor": TEXT}`, the last two optional; at most `MAX_BYTES`.
3. It is obeyed only if it is a regular file that belongs to root or to the engine's own user and that not everybody may
   write. What was opened is what is judged, so a file swapped in between gains nothing. Links are followed (a ConfigMap
   is one).
4. Anything else (half-written, not JSON, a field too many, a directory, foreign) is ignored and counted once, the order
   before it stays in force, and `status` and one line in the log say why.
5. Each write is one order, also when it says the same as the last: whoever writes wants it. It is handed out once.
6. To remove the file (`rm`, a ConfigMap or its key deleted, a link to nowhere) is no order and no fault: what was
   ordered stays, the state is `gone`, the log says it once, nothing is counted. Only a restart forgets it.

Replace the file by renaming a new one over it; a write in place may be seen half-done, and is then read again.
"""

import json
import logging
import os
import stat
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

LOOK_S = 1.0
MAX_BYTES = 16_384
MAX_TEXT = 300
FIELDS = ("policy", "reason", "actor")

logger = logging.getLogger("vllm.wakman")


@dataclass(frozen=True)
class Order:
    """What an operator asks for. policy: a policy, `auto` or `off`, as written: the engine knows which exist."""

    policy: str
    reason: str = ""
    actor: str = ""


def plain_text(text: str, most: int = MAX_TEXT) -> str:
    """Return `text` as one printable line of at most `most` characters, fit for logs and tables."""
    return "".join(c if c.isprintable() else " " for c in text.strip())[:most]


def parsed_order(content: bytes) -> Order:
    """Return what a control file or a request's body asks for; ValueError says in a few words what is wrong with it."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("not JSON (empty, or half-written)" if not content.strip() else "not JSON") from None
    if not isinstance(value, dict):
        raise ValueError('not an object such as {"policy": "lru", "reason": "..."}')
    unknown = sorted(map(plain_text, value.keys() - set(FIELDS)))
    if unknown:
        raise ValueError(f"unknown field {unknown[0][:40]!r}; known are {', '.join(FIELDS)}")
    for name in FIELDS:
        if not isinstance(value.get(name, ""), str):
            raise ValueError(f"{name!r} is not a string")
    policy = plain_text(value.get("policy", ""), 64)
    if not policy:
        raise ValueError("'policy' is missing")
    return Order(policy, plain_text(value.get("reason", "")), plain_text(value.get("actor", "")))


class ControlFile:
    """One control file. `look` reads it (any thread, one at a time); `take` and `status` never touch the disk."""

    def __init__(self, path: str) -> None:
        """Nothing is read before `look` or `start`."""
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._orders: deque[Order] = deque(maxlen=1)
        self._obeyed: dict[str, Any] | None = None
        self._state, self._why = "waiting", "not looked at yet"
        self._ignored = 0
        self._looked_at: float | None = None
        self._ended = threading.Event()

    def start(self) -> None:
        """Look once a second from now on, in a daemon thread of its own."""
        self._looked_at = time.monotonic()
        threading.Thread(target=self._watch, name="wakman-control-file", daemon=True).start()

    def close(self) -> None:
        """Look no more; returns at once, also while a look hangs."""
        self._ended.set()

    def take(self) -> Order | None:
        """Return an order that nobody took yet; about 0.1 µs when there is none."""
        return self._orders.pop() if self._orders else None

    def answered(self, order: Order, error: str = "") -> None:
        """Take note of what became of an order: obeyed, or refused by the engine with this error."""
        gone = self._state == "gone"
        if error:
            self._ignore(error, shown=not gone)
        else:
            self._obeyed = {"policy": order.policy, "reason": order.reason, "actor": order.actor, "at": time.time()}
            if not self._orders and not gone:
                self._state, self._why = "obeyed", ""

    def status(self) -> dict[str, Any]:
        """Return its state and why: `waiting` to be looked at, `missing` since the start, `read` but not yet taken by
        the engine, `obeyed`, `ignored`, `gone` (removed), or `closed`.

        obeyed: the last order that was, with its time (unix s).  ignored: how many contents were, since the start.
        looked_s: seconds since the last look, or since the start where there was none yet; much more than `LOOK_S` when
        the file system hangs; None where nobody watches.
        """
        looked_s = None if self._looked_at is None else round(time.monotonic() - self._looked_at, 1)
        closed = self._ended.is_set()
        return {
            "path": self.path,
            "state": "closed" if closed else self._state,
            "why": "the engine is detached or shut down, and reads it no more" if closed else self._why,
            "obeyed": self._obeyed,
            "ignored": self._ignored,
            "looked_s": looked_s,
        }

    def look(self) -> None:
        """Read the file if it is another one than at the last look; never raises."""
        if self._ended.is_set():
            return
        try:
            self._look()
        except FileNotFoundError:
            if self._seen is not None:
                self._seen = None
                self._state, self._why = "gone", "it was removed; what was ordered last stays, until a restart"
                logger.info("wakman: the control file %s was removed; what was ordered last stays", self.path)
            elif self._state == "waiting":
                self._state, self._why = "missing", "there is no such file yet"
                logger.info("wakman: the control file %s does not exist yet", self.path)
        except ValueError as exc:
            self._ignore(str(exc))
        except OSError as exc:
            failed = (-1, exc.errno or 0)
            if self._seen != failed:
                self._seen = failed
                self._ignore(exc.strerror or type(exc).__name__)
        except Exception as exc:  # the thread must live
            self._ignore(f"{type(exc).__name__} while reading it")
        self._looked_at = time.monotonic()

    def _look(self) -> None:
        if self._signature(os.stat(self.path)) == self._seen:
            return
        # O_NONBLOCK: opening a FIFO would wait for its writer.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            self._seen = self._signature(found)
            _refuse_foreign(found)
            content = os.read(descriptor, MAX_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        order = parsed_order(content)
        self._state, self._why = "read", "the engine has not taken it yet"
        self._orders.append(order)

    @staticmethod
    def _signature(found: os.stat_result) -> tuple[int, ...]:
        # Mode and owner: a file that was refused for them is read again once they are right.
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode, found.st_uid)

    def _ignore(self, why: str, *, shown: bool = True) -> None:
        self._ignored += 1
        if shown:
            self._state, self._why = "ignored", why
        logger.warning("wakman: the control file %s is ignored: %s", self.path, why)

    def _watch(self) -> None:
        while True:
            self.look()
            if self._ended.wait(LOOK_S):
                return


def _refuse_foreign(found: os.stat_result) -> None:
    """Raise ValueError unless rule 3 lets this file be obeyed."""
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file")
    if found.st_uid not in (0, os.geteuid()):
        raise ValueError(f"it belongs to user {found.st_uid}, neither to root nor to the engine's own ({os.geteuid()})")
    if found.st_mode & stat.S_IWOTH:
        raise ValueError("everybody may write it; chmod o-w")
