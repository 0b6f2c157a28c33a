"""Reading and smearing traces."""

import gzip
import json
from pathlib import Path
from random import Random

import pytest

from replay.demo import EXCERPT
from replay.traces import TraceRequest, read_trace, smear
from service.errors import InvalidInput

GOOD = {"timestamp": 3000, "input_length": 513, "output_length": 7, "hash_ids": [0, 5]}


def _write(folder: Path, *documents: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{d if isinstance(d, str) else json.dumps(d)}\n" for d in documents))
    return path


def test_reads_a_line(tmp_path: Path) -> None:
    """A line becomes seconds, tokens and block ids."""
    assert read_trace(_write(tmp_path, GOOD)) == (TraceRequest(3.0, 513, 7, (0, 5)),)


def test_gzip_is_told_by_content(tmp_path: Path) -> None:
    """A packed trace reads as the plain one does, whatever its name."""
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read_trace(path) == (TraceRequest(3.0, 513, 7, (0, 5)),)


def test_blank_lines_and_further_fields_are_ignored(tmp_path: Path) -> None:
    """Blank lines and fields that nobody needs do no harm."""
    assert len(read_trace(_write(tmp_path, GOOD, "", GOOD | {"more": 1}))) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{nonsense", "not JSON at column 2"),
        ("[1, 2]", "not a JSON object"),
        ({"timestamp": 0, "input_length": 1, "hash_ids": [0]}, "field output_length is missing"),
        (GOOD | {"timestamp": "soon"}, 'timestamp is "soon"'),
        (GOOD | {"timestamp": True}, "timestamp is true"),
        (GOOD | {"timestamp": -1}, "timestamp is -1"),
        (GOOD | {"timestamp": float("nan")}, "timestamp is NaN"),
        (GOOD | {"input_length": 513.5}, "input_length is 513.5"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length is 0"),
        (GOOD | {"output_length": -2}, "output_length is -2"),
        (GOOD | {"hash_ids": "0 5"}, "hash_ids is not a list"),
        (GOOD | {"hash_ids": [0, -5]}, "hash_ids is not a list"),
        (GOOD | {"hash_ids": [0]}, "hash_ids has 1 blocks but input_length 513 needs 2"),
        (GOOD | {"timestamp": 2999}, "timestamp 2999 ms is before that of the request above, 3000 ms"),
    ],
)
def test_faulty_line_is_refused_by_name(tmp_path: Path, line: object, message: str) -> None:
    """A faulty line refuses the whole trace, naming file, line, fault and remedy."""
    path = _write(tmp_path, GOOD, line)
    with pytest.raises(InvalidInput) as caught:
        read_trace(path)
    assert f"{path}, line 2: {message}" in str(caught.value)
    assert caught.value.remedy


def test_not_utf8_is_refused(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are a fault of their line."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"timestamp": "\xff"}\n')
    with pytest.raises(InvalidInput, match="line 1: not JSON"):
        read_trace(path)


def test_cut_last_line_is_called_so(tmp_path: Path) -> None:
    """A last line without its end says that the copy is incomplete, not that the JSON is wrong."""
    path = _write(tmp_path, GOOD, GOOD)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidInput, match=r"line 2: the last line is cut off; copy the file again"):
        read_trace(path)


@pytest.mark.parametrize("keep", [5, 0.5, 0.99])
def test_truncated_gzip_is_refused(tmp_path: Path, keep: float) -> None:
    """A packed trace that was cut anywhere is refused, with the line up to which it could be read."""
    data = EXCERPT.read_bytes()
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(data[: int(keep if keep > 1 else keep * len(data))])
    with pytest.raises(InvalidInput, match=r"line \d+: the gzip data are truncated or damaged"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"", b"\n\n", gzip.compress(b"")])
def test_empty_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    """A trace without a request is refused."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="holds no request"):
        read_trace(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    """A path that cannot be read is named."""
    with pytest.raises(InvalidInput, match=r"absent\.jsonl does not exist"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_trace(tmp_path)


def test_shipped_excerpt() -> None:
    """The shipped excerpt is what its SOURCE.md says."""
    trace = read_trace(EXCERPT)
    assert len(trace) == 1500
    assert sum(request.prompt_tokens for request in trace) / 1500 == pytest.approx(13_987.8, abs=0.1)
    assert {request.blocks[0] for request in trace} == {0}
    assert len({block for request in trace for block in request.blocks}) == 30_634


def test_smear_keeps_order_and_bins() -> None:
    """Requests of one timestamp are spread over its bin, in their order, and never into the next timestamp."""
    ticks_s = [0.0] * 40 + [3.0] * 30 + [5.999] * 5 + [9.0] * 20
    trace = [TraceRequest(at_s, index + 1, 1, (0,)) for index, at_s in enumerate(ticks_s)]
    spread = smear(trace, Random(1))
    times_s = [request.at_s for request in spread]
    assert [request.prompt_tokens for request in spread] == [request.prompt_tokens for request in trace]
    assert times_s == sorted(times_s)
    assert all(tick_s <= at_s < tick_s + 3.0 for tick_s, at_s in zip(ticks_s, times_s, strict=True))
    assert times_s[69] < 5.999 <= times_s[70]
    assert times_s[0] > 0
    assert times_s[39] > 2.5


def test_smear_is_seeded() -> None:
    """Equal seeds give equal times."""
    trace = read_trace(EXCERPT)
    assert smear(trace, Random(3)) == smear(trace, Random(3))
    assert smear(trace, Random(3)) != smear(trace, Random(4))
