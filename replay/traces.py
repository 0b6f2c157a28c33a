"""Reads request traces in Mooncake's JSONL format: one request a line, its prompt given as the ids of 512-token blocks.

A line is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [id, …]}`. Ids are chained: an
equal id means an equal prefix up to and including that block, so two requests share the prompt that their leading equal
ids cover. The last block may be partial.
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

from service.errors import InvalidInput

BLOCK_TOKENS = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: arrival in seconds from the trace's zero, tokens in and out, block ids of the prompt."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> tuple[TraceRequest, ...]:
    """Return the requests of a Mooncake JSONL file, plain or gzip (told by content), in the file's order.

    Raise InvalidInput naming file, line and remedy for anything that is not such a trace: an unusable trace is refused
    whole. About 10 µs a line.
    """
    requests: list[TraceRequest] = []
    for number, line in trace_lines(path):
        if not line.strip():
            continue
        request = _parse(path, number, line)
        if requests and request.at_s < requests[-1].at_s:
            raise _fault(
                path,
                number,
                f"timestamp {request.at_s * 1000:g} ms is before that of the request above, "
                f"{requests[-1].at_s * 1000:g} ms",
                "sort the trace by timestamp",
            )
        requests.append(request)
    if not requests:
        raise InvalidInput(f"trace {path} holds no request", "give a file of Mooncake JSONL lines")
    return tuple(requests)


def trace_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its newline); faults of the file itself become InvalidInput."""
    number = 0
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if packed else raw
            for line in lines:
                number += 1
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as exc:
        raise _fault(
            path, number + 1, f"the gzip data are truncated or damaged ({exc})", "copy the file again"
        ) from exc
    except FileNotFoundError as exc:
        raise InvalidInput(f"trace {path} does not exist", "give the path of a Mooncake JSONL file") from exc
    except OSError as exc:
        raise InvalidInput(f"trace {path} cannot be read ({exc.strerror})", "give a file you may read") from exc


def smear(trace: Sequence[TraceRequest], rng: Random, bin_s: float = 3.0) -> tuple[TraceRequest, ...]:
    """Return the trace with requests of one timestamp spread over the time that the timestamp stands for.

    Mooncake's clock ticks every 3 s, which makes bursts of ten that nobody sent. Each group of equal timestamps t is
    spread uniformly over [t, min(t + bin_s, next timestamp)), in its old order; nothing overtakes.
    """
    groups = [(at_s, list(group)) for at_s, group in groupby(trace, key=lambda request: request.at_s)]
    starts = [at_s for at_s, _ in groups[1:]] + [math.inf]
    spread: list[TraceRequest] = []
    for (at_s, group), following_s in zip(groups, starts, strict=True):
        width_s = min(bin_s, following_s - at_s)
        offsets_s = sorted(rng.random() * width_s for _ in group)
        spread += [replace(request, at_s=at_s + offset_s) for request, offset_s in zip(group, offsets_s, strict=True)]
    return tuple(spread)


def _parse(path: Path, number: int, line: bytes) -> TraceRequest:
    try:
        document = json.loads(line)
    except ValueError as exc:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
        if not line.endswith(b"\n"):
            raise _fault(path, number, "the last line is cut off", "copy the file again") from exc
        where = f" at column {exc.colno}: {exc.msg}" if isinstance(exc, json.JSONDecodeError) else f": {exc}"
        raise _fault(path, number, f"not JSON{where}", "correct or remove the line") from exc
    if not isinstance(document, dict):
        raise _fault(path, number, "not a JSON object", f"give an object with {', '.join(FIELDS)}")
    missing = [name for name in FIELDS if name not in document]
    if missing:
        raise _fault(path, number, f"field {', '.join(missing)} is missing", f"each line needs {', '.join(FIELDS)}")
    timestamp_ms = document["timestamp"]
    if not _is_number(timestamp_ms) or timestamp_ms < 0:
        raise _fault(path, number, f"timestamp is {_quote(timestamp_ms)}", "it must be milliseconds, 0 or more")
    prompt_tokens = _positive(path, number, document, "input_length")
    output_tokens = _positive(path, number, document, "output_length")
    blocks = document["hash_ids"]
    if not isinstance(blocks, list) or not all(type(block) is int and block >= 0 for block in blocks):
        raise _fault(path, number, "hash_ids is not a list of whole numbers, 0 or more", "correct the line")
    needed = math.ceil(prompt_tokens / BLOCK_TOKENS)
    if len(blocks) != needed:
        raise _fault(
            path,
            number,
            f"hash_ids has {len(blocks)} blocks but input_length {prompt_tokens} needs {needed}",
            f"give one id per {BLOCK_TOKENS} tokens",
        )
    return TraceRequest(timestamp_ms / 1000, prompt_tokens, output_tokens, tuple(blocks))


def _positive(path: Path, number: int, document: dict[str, Any], name: str) -> int:
    value = document[name]
    if type(value) is not int or value < 1:
        raise _fault(path, number, f"{name} is {_quote(value)}", "it must be a whole number of tokens, 1 or more")
    return value


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _quote(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _fault(path: Path, number: int, what: str, remedy: str) -> InvalidInput:
    return InvalidInput(f"trace {path}, line {number}: {what}", remedy)
