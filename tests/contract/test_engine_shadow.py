"""`cacheroute engine shadow`: what it prints, and what it says to input that it cannot use."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from replay.demo import EXCERPT

LINE = '{"timestamp": %d, "input_length": %d, "output_length": 1, "hash_ids": %s}\n'


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", "engine", "shadow", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=90,
    )


def requests(path: Path, *paths: list[int]) -> Path:
    path.write_text("".join(LINE % (at, 512 * len(ids), ids) for at, ids in enumerate(paths)))
    return path


def ids(path: Path, *values: object) -> Path:
    path.write_text("".join(f"{value}\n" for value in values))
    return path


def test_the_document_has_what_the_surface_promises() -> None:
    """JSON holds blocks, capacity and one ratio a policy; the bounds are above all of them."""
    done = run(EXCERPT, "--capacity", 1000, "-o", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["blocks"] == 41_702
    assert document["capacity"] == 1_000
    assert list(document["hit_ratio"]) == ["lru", "s3fifo", "arc"]
    assert all(0 < ratio < document["bounds"]["belady"] for ratio in document["hit_ratio"].values())
    assert document["bounds"]["belady"] < document["bounds"]["infinite"]
    assert document["counting"] == "prefix"


def test_hits_of_a_request_are_its_leading_blocks(tmp_path: Path) -> None:
    """A cached block behind a missing one is no hit; requests are looked up whole before anything is inserted."""
    trace = requests(tmp_path / "t", [1, 2, 3], [1, 2, 4], [9, 3])
    done = run(trace, "--capacity", 10, "--policy", "lru", "-o", "json")
    assert json.loads(done.stdout)["hit_ratio"] == {"lru": 2 / 8}


def test_the_tail_of_a_request_goes_first(tmp_path: Path) -> None:
    """Blocks are inserted tail first, so what is evicted of a request is its end."""
    trace = requests(tmp_path / "t", [1, 2, 3], [7], [1, 2, 3])
    done = run(trace, "--capacity", 3, "--policy", "lru", "-o", "json")
    assert json.loads(done.stdout)["hit_ratio"] == {"lru": 2 / 7}


def test_single_ids_are_counted_one_by_one(tmp_path: Path) -> None:
    """With one id a line each is a request of its own, and --oracle runs libcachesim's rules."""
    trace = ids(tmp_path / "t", *range(20), *range(20))
    document = json.loads(run(trace, "--capacity", 20, "--oracle", "-o", "json").stdout)
    assert document["hit_ratio"] == {"lru": 0.5, "s3fifo": 0.5}
    assert document["counting"] == "single"
    assert document["oracle"] is True


def test_gzip_is_read_and_a_table_is_for_people(tmp_path: Path) -> None:
    """A packed trace is told by its content; the table has a row for each policy and bound, and counts the blocks."""
    trace = tmp_path / "t"
    trace.write_bytes(gzip.compress(b"1\n2\n\n1\n"))
    done = run(trace, "--capacity", 2, "--policy", " lru,arc,lru")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "3 blocks of 3 requests, 2 blocks of cache"
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [
        [name, "33.33"] for name in ("lru", "arc", "(belady)", "(infinite)")
    ]


def test_says_what_was_cut(tmp_path: Path) -> None:
    """Requests that the cache cannot hold are told on standard error; of them the head is kept."""
    trace = requests(tmp_path / "t", [1, 2, 3, 4], [1, 2, 3, 4])
    done = run(trace, "--capacity", 2, "--policy", "lru", "-o", "json")
    assert "2 requests have more blocks than the cache" in done.stderr
    document = json.loads(done.stdout)
    assert document["hit_ratio"] == {"lru": 2 / 8}
    assert document["requests_too_long"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fifo"], "no policy 'fifo'; choose among lru, s3fifo, s3fifo-25, s3fifo-t2, s3fifo-paper-free"),
        (["--policy", ""], "names no policy"),
        (["--policy", "lru,,arc"], "no policy ''"),
        (["--policy", "arc", "--oracle"], "--oracle cannot run arc; it follows libcachesim's lru and s3fifo"),
        (["--oracle", "--capacity", "19"], "S3-FIFO cannot run with 19 blocks; give --capacity 20 or more"),
        (["--capacity", "0"], "--capacity is 0; a cache holds 1 block or more"),
        (["--capacity", "-3"], "--capacity is -3"),
        (["--capacity", "many"], "Invalid value for '--capacity'"),
    ],
)
def test_refuses_what_cannot_be_run(tmp_path: Path, arguments: list[str], words: str) -> None:
    """A wrong option is usage: exit code 2, one line that says what there is instead, nothing on standard output."""
    trace = ids(tmp_path / "t", 1, 2, 1)
    done = run(trace, "--capacity", 4, *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "holds no request"),
        (b"\n\n", "holds no request"),
        (b"1\n2\nx3\n", "line 3: 'x3' is not a whole number"),
        (b"1\n-2\n", "line 2: '-2' is not a whole number"),
        (b"1\n9223372036854775808\n", "line 2: '9223372036854775808' is not a whole number"),
        (b"1\n" + b"9" * 5000 + b"\n", "line 2"),
        (b"1\n2.5\n", "line 2: '2.5'"),
        (b"1\n\xff\xfe\n", "line 2"),
        ("1\n²\n".encode(), "line 2"),
        (b'1\n{"timestamp": 0}\n', "line 2"),
        ((LINE % (0, 512, [1])).encode() + b"7\n", "line 2: not a JSON object"),
        ((LINE % (0, 512, [1])).encode() + b'{"timestamp": 1, "inp', "line 2: the last line is cut off"),
        ((LINE % (0, 1024, [1])).encode(), "line 1: hash_ids has 1 blocks but input_length 1024 needs 2"),
        ((LINE % (0, 1024, [1, 1])).encode(), "request 1: an id stands twice in hash_ids"),
        (gzip.compress(b"1\n2\n3\n" * 100)[:-9], "the gzip data are truncated"),
    ],
)
def test_refuses_a_trace_that_it_cannot_read(tmp_path: Path, text: bytes, words: str) -> None:
    """A trace is used whole or not at all; the message names the line."""
    trace = tmp_path / "t"
    trace.write_bytes(text)
    done = run(trace, "--capacity", 4)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


def test_refuses_a_trace_that_is_not_there(tmp_path: Path) -> None:
    """A missing file and a folder are told as such."""
    for path, words in ((tmp_path / "none", "does not exist"), (tmp_path, "cannot be read")):
        done = run(path, "--capacity", 4)
        assert done.returncode == 2
        assert words in done.stderr
