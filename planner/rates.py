"""Measured request rates of keys, from a CSV file or from the windows that services count in.

A window's rate is requests over seconds covered, and covered is the time from the start of the oldest window that holds
any request until now:

1. Windows without a request before that one say nothing, since nobody may have counted then; windows without a request
   after it count as silence.
2. The newest window is still open, so the time reaches to now and not to its end.
3. Under one second the counts of services have not all arrived; a second is assumed.

When counting began inside the oldest window, rates read up to one window's length too low, all keys alike, which
changes the number of copies but neither order nor balance.
"""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from service.errors import InvalidInput
from service.keys import hash_key

KEY, RATE, PREFIX = "key", "rate_rps", "prefix_tokens"
# Beyond any fleet; it keeps sums and the plan's 32-bit rates finite.
MAX_RATE_RPS = 1e12
LEAST_COVERED_S = 1.0
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


def rates_from_windows(
    windows: Mapping[int, Mapping[int, int]], *, now_s: float, least_covered_s: float = LEAST_COVERED_S
) -> KeyRates:
    """Return requests/s of each key over all windows, by the rules of this module; no keys when no window holds any.

    windows: window start (unix s) -> key hash -> requests.
    """
    counts: dict[int, int] = {}
    for window in windows.values():
        for key_hash, requests in window.items():
            counts[key_hash] = counts.get(key_hash, 0) + requests
    covered_s = max(now_s - min(windows, default=now_s), least_covered_s)
    return KeyRates.of(counts, (requests / covered_s for requests in counts.values()))


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
