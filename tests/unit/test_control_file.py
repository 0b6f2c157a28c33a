"""The control file: what is obeyed, and what is ignored and counted."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from engine_patch.control_file import MAX_BYTES, ControlFile, Order, parsed_order


def write(path: Path, content: object) -> None:
    """Replace the file as an operator should: a new one, renamed over the old one."""
    new = path.with_suffix(".new")
    new.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    new.chmod(0o644)
    new.rename(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "wakman.json"


@pytest.fixture
def file(path: Path) -> ControlFile:
    return ControlFile(str(path))


def test_an_order_is_handed_out_once(path: Path, file: ControlFile) -> None:
    """A written order is taken once, whoever looks how often; the status follows it from waiting to obeyed."""
    assert file.take() is None
    assert file.status()["state"] == "waiting"
    file.look()
    assert file.status()["state"] == "missing"
    write(path, {"policy": "s3fifo", "reason": "scans", "actor": "mira"})
    file.look()
    file.look()
    assert file.status()["state"] == "read"
    order = file.take()
    assert order == Order("s3fifo", "scans", "mira")
    assert file.take() is None
    file.answered(order)
    file.look()
    assert file.take() is None
    status = file.status()
    assert (status["state"], status["why"], status["ignored"]) == ("obeyed", "", 0)
    assert status["obeyed"]["policy"] == "s3fifo"
    assert abs(status["obeyed"]["at"] - time.time()) < 60


def test_each_write_is_an_order(path: Path, file: ControlFile) -> None:
    """Writing the same again is a new order, so that the file outranks a command given since; a mere look is none."""
    for _ in range(2):
        write(path, {"policy": "lru"})
        file.look()
        assert file.take() == Order("lru")
        file.look()
        assert file.take() is None


def test_the_newest_of_two_writes_is_obeyed(path: Path, file: ControlFile) -> None:
    """An engine that takes nothing for a while obeys what was written last, not all of it."""
    for policy in ("lru", "arc"):
        write(path, {"policy": policy})
        file.look()
    assert file.take() == Order("arc")
    assert file.take() is None


def test_an_answer_to_an_older_order_does_not_hide_a_newer(path: Path, file: ControlFile) -> None:
    """An order written while the one before was being obeyed is still shown as not taken."""
    write(path, {"policy": "lru"})
    file.look()
    order = file.take()
    assert order is not None
    write(path, {"policy": "arc"})
    file.look()
    file.answered(order)
    assert file.status()["state"] == "read"
    assert file.status()["obeyed"]["policy"] == "lru"
    assert file.take() == Order("arc")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "half-written"),
        (b'{"policy": "lr', "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 5000, "not JSON"),
        (b'"lru"', "not an object"),
        ({"polcy": "lru"}, "unknown field 'polcy'"),
        ({"reason": "?"}, "'policy' is missing"),
        ({"policy": ""}, "'policy' is missing"),
        ({"policy": 3}, "not a string"),
        ({"policy": "lru", "reason": ["x"]}, "not a string"),
        (b" " * (MAX_BYTES + 1), "more than"),
    ],
)
def test_what_is_no_order_is_ignored_and_counted_once(
    path: Path, file: ControlFile, content: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last good order stays, status and one log line say why, and looking again does not count again."""
    write(path, {"policy": "arc"})
    file.look()
    good = file.take()
    assert good is not None
    file.answered(good)
    write(path, content)
    for _ in range(3):
        file.look()
    status = file.status()
    assert file.take() is None
    assert (status["state"], status["ignored"], status["obeyed"]["policy"]) == ("ignored", 1, "arc")
    assert why in status["why"]
    (record,) = caplog.records
    assert why in record.getMessage()
    assert str(path) in record.getMessage()
    write(path, {"policy": "lru"})
    file.look()
    assert file.take() == Order("lru")


def test_a_file_written_in_place_is_read_when_it_is_whole(path: Path, file: ControlFile) -> None:
    """A half-written file is ignored, and obeyed once the rest is there."""
    with path.open("wb", buffering=0) as out:
        out.write(b'{"policy": ')
        file.look()
        assert file.take() is None
        out.write(b'"arc"}')
    file.look()
    assert file.take() == Order("arc")


@pytest.mark.parametrize(
    ("mode", "obeyed"), [(0o600, True), (0o444, True), (0o400, True), (0o664, True), (0o666, False), (0o602, False)]
)
def test_a_file_that_everybody_may_write_is_refused(path: Path, file: ControlFile, mode: int, obeyed: bool) -> None:
    """World-writable is refused, read-only is fine; chmod alone, without another write, makes it good."""
    write(path, {"policy": "lru"})
    path.chmod(mode)
    file.look()
    assert (file.take() is not None) is obeyed
    if not obeyed:
        assert "everybody may write" in file.status()["why"]
        path.chmod(0o644)
        file.look()
        assert file.take() == Order("lru")


def test_a_foreign_file_is_refused(path: Path, file: ControlFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of another user than root and the engine's own is refused."""
    write(path, {"policy": "lru"})
    if os.geteuid() == 0:
        os.chown(path, 4711, 0)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    file.look()
    assert file.take() is None
    assert "belongs to user" in file.status()["why"]


def test_what_is_no_file_is_refused_at_once(path: Path, file: ControlFile) -> None:
    """A directory and a FIFO without a writer are ignored without waiting; a dangling link is a missing file."""
    path.mkdir()
    file.look()
    assert file.status()["why"] == "a directory"
    path.rmdir()
    os.mkfifo(path, 0o600)
    began = threading.Thread(target=file.look, daemon=True)
    began.start()
    began.join(20)
    assert not began.is_alive()
    assert file.status()["why"] == "not a regular file"
    path.unlink()
    path.symlink_to(path.parent / "nowhere")
    file.look()
    assert file.status()["state"] == "gone"
    assert file.take() is None


def test_a_refusal_is_kept_apart_from_what_is_obeyed(path: Path, file: ControlFile) -> None:
    """When the engine refuses (an unknown policy), the status says its words and the order before stays."""
    for policy, error in (("arc", ""), ("lfu", "unknown policy 'lfu'")):
        write(path, {"policy": policy})
        file.look()
        order = file.take()
        assert order is not None
        file.answered(order, error)
    status = file.status()
    assert (status["state"], status["why"], status["ignored"]) == ("ignored", "unknown policy 'lfu'", 1)
    assert status["obeyed"]["policy"] == "arc"


def test_text_for_people_cannot_forge_a_log_line() -> None:
    """Line breaks and escapes in reason and actor become spaces, and long ones are cut."""
    order = parsed_order(json.dumps({"policy": "lru", "reason": "a\nINFO b\x1b[2J", "actor": "x" * 5000}).encode())
    assert order.reason == "a INFO b [2J"
    assert len(order.actor) == 300
