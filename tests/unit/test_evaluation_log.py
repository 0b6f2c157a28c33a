"""The file of finished runs: whose it is not, it leaves alone; what a crash tore, it mends."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from replay.evaluation import Settings
from replay.evaluation_log import LINE_BYTES, RunLog
from service.errors import InvalidInput

SETTINGS = Settings(blocks=500)
RECORD = Path(__file__).resolve().parents[2] / "docs" / "engine-evaluation.jsonl"


def run(name: str, settings: Settings = SETTINGS, **more: Any) -> dict[str, Any]:
    """A finished run."""
    return {
        "settings": settings.fingerprint(),
        "mix": "a/b",
        "seed": 3,
        "name": name,
        "hit": 0.5,
        "switches": [[1.5, "arc"]],
        **more,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log with two runs."""
    log = RunLog(tmp_path / "runs.jsonl", SETTINGS)
    for name in ("lru", "arc"):
        log.keep(run(name))
    return log.path


def names(log: RunLog) -> list[str]:
    return [name for _, _, name in log.runs]


def test_what_is_kept_is_found_again(path: Path) -> None:
    """Runs, bounds among them, are found by mix, seed and name; of equal ones the last counts."""
    log = RunLog(path, SETTINGS)
    log.keep(run("arc", hit=0.7))
    bounds = {name: run("bounds")[name] for name in ("settings", "mix", "seed", "name")}
    log.keep({**bounds, "infinite": 0.9, "belady": 0.8})
    log = RunLog(path, SETTINGS)
    assert (names(log), log.torn) == (["lru", "arc", "bounds"], 0)
    assert log.runs["a/b", 3, "arc"]["hit"] == 0.7


def test_runs_of_other_settings_are_not_taken(path: Path) -> None:
    """A kept run counts only for equal blocks, reading and manager, and stays where it is."""
    before = path.read_bytes()
    for other in (Settings(blocks=501), Settings(blocks=500, reading="sessions"), Settings(blocks=500, manager="vllm")):
        assert names(RunLog(path, other)) == []
    assert path.read_bytes() == before


def test_the_runs_of_record_are_a_log() -> None:
    """The figures of docs/engine-evaluation.md are kept in this form."""
    before = RECORD.read_bytes()
    assert len(RunLog(RECORD, Settings()).runs) > 300
    assert RECORD.read_bytes() == before


@pytest.mark.parametrize("left", [1, 5, 30, 100])
def test_a_torn_last_line_is_cut_off(path: Path, left: int) -> None:
    """However little of a run was written, it is gone, counted once, and the next run begins a line."""
    whole = path.read_bytes()
    torn = json.dumps(run("s3fifo")).encode()[:left]
    path.write_bytes(whole + torn)
    log = RunLog(path, SETTINGS)
    assert (names(log), log.torn) == (["lru", "arc"], 1)
    assert path.read_bytes() == whole
    log.keep(run("s3fifo"))
    again = RunLog(path, SETTINGS)
    assert (names(again), again.torn) == (["lru", "arc", "s3fifo"], 0)


def test_a_run_that_lacks_its_line_break_alone_is_whole(path: Path) -> None:
    """An editor took the last line break away: nothing is lost, and nothing is written into that line."""
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    log = RunLog(path, SETTINGS)
    log.keep(run("s3fifo"))
    assert (names(RunLog(path, SETTINGS)), log.torn) == (["lru", "arc", "s3fifo"], 0)


def test_a_torn_line_in_the_middle_is_passed_over(path: Path) -> None:
    """Whatever was written behind a torn line, as older versions did, only the runs of that line are made again."""
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:40] + first + second)
    log = RunLog(path, SETTINGS)
    assert (names(log), log.torn) == (["arc"], 1)
    assert path.read_bytes() == first[:40] + first + second


@pytest.mark.parametrize(
    "content",
    [
        b"key,rate\na,1\n",
        b"# Notes\n",
        b"{\n",
        b'{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n',
        b'[{"name": "mine", "single": 1, "multi": 0, "agentic": 0, "seconds": 60}]',
        b'{"settings": "of something else"}',
        b'{"settings": {"blocks": 500}, "mix": "m", "seed": 0, "name": "lru", "hit": 1, "switches": []}\n',
        b"\x1f\x8b\x08\x00 packed",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"settings": "' + b"x" * (2 * LINE_BYTES),
        b"no line ends here " * LINE_BYTES,
    ],
)
@pytest.mark.parametrize("behind", [False, True])
def test_what_is_no_log_is_refused_and_untouched(path: Path, content: bytes, behind: bool) -> None:
    """Any other file, also one that begins with runs: one sentence that names it, not a byte of it is changed."""
    content = path.read_bytes() + content if behind else content
    path.write_bytes(content)
    before = path.stat()
    with pytest.raises(
        InvalidInput, match=r"--out .*runs\.jsonl is not a file of finished runs \(line \d is "
    ) as caught:
        RunLog(path, SETTINGS)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_an_empty_file_will_do(path: Path) -> None:
    """`mktemp` makes one; blank lines are nobody's data either."""
    for empty in (b"", b"\n \n", b"  "):
        path.write_bytes(empty)
        log = RunLog(path, SETTINGS)
        log.keep(run("lru"))
        assert names(RunLog(path, SETTINGS)) == ["lru"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, a FIFO that nobody writes to, a link to nowhere: refused at once."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path, why in ((tmp_path, "a folder"), (tmp_path / "fifo", "no regular"), (tmp_path / "link", "no regular")):
        with pytest.raises(InvalidInput, match=why):
            RunLog(path, SETTINGS)
    assert not (tmp_path / "nowhere").exists()


def test_what_cannot_be_written_is_said_before_any_run(path: Path, tmp_path: Path) -> None:
    """A folder that is missing, a path through a file, a name that is too long."""
    for bad in (tmp_path / "no" / "such" / "runs", path / "runs", tmp_path / ("x" * 300)):
        with pytest.raises(InvalidInput, match="--out"):
            RunLog(bad, SETTINGS)


def test_a_full_disk_is_said() -> None:
    """A run that cannot be written is an error with the system's own word for it."""
    log = RunLog.__new__(RunLog)
    log.path = Path("/dev/full")
    with pytest.raises(InvalidInput, match="--out /dev/full: No space left"):
        log.keep(run("lru"))
