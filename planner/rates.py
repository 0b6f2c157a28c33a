"""Measured request rates of keys, from a CSV file or from the windows that services count in.

Windows become rates as an average that forgets by requests and not by time:

1. A window weighs 2^-(requests of the whole pool in later windows / `half_life_events`). What a count says does not
   depend on how long it took to come about; how many are needed to tell the keys at the cut from each other depends on
   the number of slots (`half_life_of`).
2. A key's rate is the sum of weight times its requests, over the sum of weight times seconds covered, at least
   `LEAST_COVERED_S`. So a window that has just begun, or is cut off by the end of what was counted, adds as little as
   it is long.
3. A window covers the time in which some process says that it counted: from the start of counting inside the first
   window, and in the open one until counts were last handed on. An empty window was silence if somebody says that he
   counted there; otherwise nobody was there, and it says nothing.
4. A process that does not say when it counted is taken to have counted all the window, until now if it is open.
5. A window that begins after now is a wrong clock's; it waits until its time.
6. Windows that weigh less than `LEAST_WEIGHT` are left out.
"""

import csv
import hashlib
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput
from service.keys import hash_key
from service.rates import Counted

KEY, RATE, PREFIX = "key", "rate_rps", "prefix_tokens"
# Beyond any fleet; it keeps sums and the plan's 32-bit rates finite.
MAX_RATE_RPS = 1e12
LEAST_COVERED_S = 1.0
LEAST_WEIGHT = 0.01
HALF_LIFE_EVENTS = 250_000
HALF_LIFE_EVENTS_PER_SLOT = 16
COUNT_MAX = 2**32 - 1
# Windows are added up in lots of about so many counts, which bounds what a sum takes.
MERGED_AT = 4_000_000
MAX_PREFIX_TOKENS = 10**9


@dataclass(frozen=True, slots=True, eq=False)
class KeyRates:
    """Rates of distinct keys in one canonical order, by key hash, so that the source's order changes nothing.

    key_hashes: uint64, length n, rising.  rates_rps: float64, length n, finite, not negative.
    total_rps: their exactly rounded sum.  prefix_tokens: length of each key's prefix, above 0; None: not known.
    """

    key_hashes: NDArray[np.uint64]
    rates_rps: NDArray[np.float64]
    total_rps: float
    prefix_tokens: NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls, key_hashes: Iterable[int], rates_rps: Iterable[float], prefix_tokens: Iterable[float] | None = None
    ) -> "KeyRates":
        """Return the rates in canonical order; the hashes must be distinct."""
        hashes = np.fromiter(key_hashes, dtype=np.uint64)
        rates = np.fromiter(rates_rps, dtype=np.float64)
        order = np.argsort(hashes)
        sizes = None if prefix_tokens is None else np.fromiter(prefix_tokens, dtype=np.float64)[order]
        return cls(hashes[order], rates[order], math.fsum(rates.tolist()), sizes)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self.key_hashes)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """What was counted in one window: `start_s` (unix s) and `length_s` long.

    key_hashes: uint64, length n, rising.  counts: uint32, length n, above 0; 12 bytes a key in all.
    covered_s: how much of it was counted in; None: all of it so far.  until_s: unix s until when it was.
    requests: their sum.  sha256: digest of all of this.
    """

    start_s: int
    length_s: int
    key_hashes: NDArray[np.uint64]
    counts: NDArray[np.uint32]
    covered_s: float | None
    until_s: float
    requests: int
    sha256: bytes

    @classmethod
    def of(cls, start_s: int, length_s: int, counted: Counted) -> "Window":
        """Return it from what the store holds; about 0.5 s for 1M keys."""
        # A single key of more than 4 billion requests in a window is nobody's count.
        counts = {key: min(n, COUNT_MAX) for key, n in counted.counts.items() if n > 0}
        hashes = np.fromiter(counts, dtype=np.uint64, count=len(counts))
        order = np.argsort(hashes)
        hashes = hashes[order]
        values = np.fromiter(counts.values(), dtype=np.uint32, count=len(counts))[order]
        spans = [span for span in counted.spans if span is not None]
        whole = not counted.spans or len(spans) < len(counted.spans)
        covered_s = None if whole else _covered(spans, start_s, start_s + length_s)
        until_s = min(start_s + length_s, max((span[1] for span in spans), default=start_s))
        if whole:
            until_s = start_s + length_s
        digest = hashlib.sha256(f"{start_s} {length_s} {covered_s} {until_s}".encode())
        digest.update(hashes.tobytes())
        digest.update(values.tobytes())
        requests = int(values.sum(dtype=np.uint64))
        return cls(start_s, length_s, hashes, values, covered_s, until_s, requests, digest.digest())

    def covered_by(self, now_s: float) -> float:
        """Return the seconds of it that were counted in."""
        if self.covered_s is None:
            return max(0.0, min(now_s - self.start_s, float(self.length_s)))
        return self.covered_s


def _covered(spans: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the length of the spans' union inside the window."""
    covered, reached = 0.0, start_s
    for span in sorted(spans):
        began, until = max(span[0], reached), min(span[1], end_s)
        if began < until:
            covered, reached = covered + until - began, until
    return covered


def half_life_of(slots: int) -> int:
    """Return after how many requests one counts half, unless it is set; slots: of the whole pool.

    250,000 is an hour's memory (the sum of all weights) at 100 requests/s: the best, or within 0.5 points of the
    admitted share of the best, at drifts up to a factor of e^0.3 an hour. 16 a slot is three arrivals a half-life at
    the cut, where a slot's share of requests is about a fifth of the mean. tests/claims/noise.py has the tables.
    """
    return max(HALF_LIFE_EVENTS, HALF_LIFE_EVENTS_PER_SLOT * slots)


def weight_of(later_events: int, half_life_events: float) -> float:
    """Return the weight of a window after which so many requests were counted."""
    return float(2.0 ** -(later_events / half_life_events))


def rates_from_windows(windows: Iterable[Window], now_s: float, half_life_events: float) -> KeyRates:
    """Return requests/s of each key by the rules of this module; no keys when no window holds any.

    windows: distinct, in any order.  half_life_events: above 0; infinite: a plain mean.
    About 0.15 s for a million counts, a key counting anew in each window. They are added up in lots of `MERGED_AT`, so
    that it takes 45 MB for 720,000 of them and at most 360 MB.
    """
    covered_s, later = 0.0, 0
    waiting: list[tuple[NDArray[np.uint64], NDArray[np.float64]]] = []
    waits = 0
    for window in sorted((w for w in windows if w.start_s <= now_s), key=lambda w: -w.start_s):
        if (weight := weight_of(later, half_life_events)) < LEAST_WEIGHT:
            break
        later += window.requests
        covered_s += weight * window.covered_by(now_s)
        waiting.append((window.key_hashes, window.counts.astype(np.float64) * weight))
        waits += len(window.key_hashes)
        if waits > MERGED_AT:
            waiting, waits = [_merged(waiting)], 0
    hashes, requests = _merged(waiting)
    rates = requests / max(covered_s, LEAST_COVERED_S)
    return KeyRates(hashes, rates, math.fsum(rates.tolist()))


def _merged(
    parts: list[tuple[NDArray[np.uint64], NDArray[np.float64]]],
) -> tuple[NDArray[np.uint64], NDArray[np.float64]]:
    """Return distinct hashes, rising, and the sums of what stands at each."""
    if not parts:
        return np.empty(0, dtype=np.uint64), np.empty(0)
    hashes, at = np.unique(np.concatenate([hashes for hashes, _ in parts]), return_inverse=True)
    sums = np.bincount(at, weights=np.concatenate([values for _, values in parts]), minlength=len(hashes))
    return hashes, sums.astype(np.float64, copy=False)


def read_csv(path: Path, *, salt: bytes = b"", prefixes: bool = False) -> KeyRates:
    """Return the rates of a CSV file with the columns `key` and `rate_rps`; others are ignored, empty lines too.

    prefixes: read the column `prefix_tokens` as well, which must then be there.
    Raise InvalidInput that names file, line, column and value for the first fault found; about 0.25 s for 128,824 rows.
    """
    header, rows = _parse(path, text := _read(path), (KEY, RATE, PREFIX) if prefixes else (KEY, RATE))
    if not rows:
        raise InvalidInput(f"{path}: no rows below the header", "add one line for each key")
    at_key, at_rate = header.index(KEY), header.index(RATE)
    keys = [row[at_key] for row in rows]
    hashes = [hash_key(key.encode(), salt) for key in keys]
    try:
        rates = np.array(list(map(float, (row[at_rate] for row in rows))))
    except ValueError:
        _refuse_first_fault(path, text, header, salt)
    if (
        not ((rates >= 0) & (rates <= MAX_RATE_RPS)).all()
        or len(set(hashes)) != len(hashes)
        or any(not key or key[0].isspace() or key[-1].isspace() for key in keys)
        or any("_" in row[at_rate] for row in rows)
    ):
        _refuse_first_fault(path, text, header, salt)
    return KeyRates.of(hashes, rates, _prefixes(path, text, header.index(PREFIX)) if prefixes else None)


def _prefixes(path: Path, text: str, at: int) -> list[float]:
    sizes = []
    for line, row in list(_numbered(text))[1:]:
        if not row[at].isascii() or not row[at].isdecimal() or not 0 < int(row[at]) <= MAX_PREFIX_TOKENS:
            raise InvalidInput(
                f"{path} line {line} column {PREFIX!r}: {row[at]!r} is not a number of tokens above 0",
                "write the length of the key's shared prefix in tokens",
            )
        sizes.append(float(row[at]))
    return sizes


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise InvalidInput(f"{path} cannot be read: {exc.strerror}", "name a readable CSV file") from exc
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise InvalidInput(
            f"{path} line {line}: byte 0x{data[exc.start]:02x} is not UTF-8", "save the file as UTF-8"
        ) from exc
    if not text.strip():
        raise InvalidInput(f"{path} is empty", f"write a header `{KEY},{RATE}` and one line for each key")
    return text


def _parse(path: Path, text: str, columns: tuple[str, ...]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of equal length, without empty lines; each of `columns` stands once in the header."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [row for row in reader if row]
    except csv.Error as exc:
        raise InvalidInput(f"{path} line {reader.line_num}: {exc}", "close the quotes there or double them") from exc
    header = [name.strip() for name in lines[0]]
    for column in columns:
        if (found := header.count(column)) != 1:
            what = "no column" if found == 0 else f"{found} columns"
            raise InvalidInput(
                f"{path} line 1: {what} {column!r} among {', '.join(map(repr, header))}",
                f"name one column {column!r} in a comma-separated header",
            )
    if set(map(len, lines)) != {len(header)}:
        for line, row in _numbered(text):
            if len(row) != len(header):
                raise InvalidInput(
                    f"{path} line {line}: {len(row)} columns, the header has {len(header)}",
                    "add what is missing there, or quote a value that holds a comma",
                )
    return header, lines[1:]


def _numbered(text: str) -> Iterable[tuple[int, list[str]]]:
    """Yield the line on which each row begins, with the row."""
    reader, begins = csv.reader(io.StringIO(text, newline=""), strict=True), 1
    for row in reader:
        if row:
            yield begins, row
        begins = reader.line_num + 1


def _refuse_first_fault(path: Path, text: str, header: list[str], salt: bytes) -> NoReturn:
    """Go through the rows one by one, which the quick checks avoid, and raise for the first that has a fault."""
    at_key, at_rate = header.index(KEY), header.index(RATE)
    seen: dict[int, int] = {}
    for line, row in list(_numbered(text))[1:]:
        key, value = row[at_key], row[at_rate]
        where = f"{path} line {line} column"
        if key.strip() != key or not key:
            raise InvalidInput(
                f"{where} {KEY!r}: {key!r} is empty or has blanks around it, as no header value has",
                "take the blanks or the line out",
            )
        try:
            rate = float(value.replace("_", "?"))
        except ValueError:
            raise InvalidInput(f"{where} {RATE!r}: {value!r} is not a number", "write requests/s, like 2.5") from None
        if not 0 <= rate <= MAX_RATE_RPS:
            kind = "negative" if rate < 0 else f"above {MAX_RATE_RPS:g}" if math.isfinite(rate) else "not finite"
            raise InvalidInput(f"{where} {RATE!r}: {value!r} is {kind}", "write requests/s, 0 or more")
        first = seen.setdefault(hash_key(key.encode(), salt), line)
        if first != line:
            raise InvalidInput(f"{where} {KEY!r}: {key!r} stands on line {first} too", "keep one line for each key")
    raise AssertionError("the quick checks found a fault that the slow ones do not know")
