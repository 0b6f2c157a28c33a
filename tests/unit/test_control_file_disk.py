"""The control file and its disk: removed, moved, unreadable, huge, hanging; and the thread that looks at it."""

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine_patch.control_file import MAX_BYTES, ControlFile, Order
from tests.unit.test_control_file import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "wakman.json"


@pytest.fixture
def file(path: Path) -> ControlFile:
    return ControlFile(str(path))


def test_a_file_that_is_removed_leaves_its_order(
    path: Path, file: ControlFile, caplog: pytest.LogCaptureFixture
) -> None:
    """To remove the file is no order and no fault: `gone`, said once, not counted; written again it is an order."""
    caplog.set_level("INFO")
    write(path, {"policy": "arc"})
    file.look()
    order = file.take()
    assert order is not None
    file.answered(order)
    path.unlink()
    for _ in range(3):
        file.look()
    status = file.status()
    assert (status["state"], status["ignored"], status["obeyed"]["policy"]) == ("gone", 0, "arc")
    assert "removed" in status["why"]
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"{path} was removed" in record.getMessage()
    assert file.take() is None
    write(path, {"policy": "arc"})
    file.look()
    assert file.take() == Order("arc")
    file.answered(order)
    assert file.status()["state"] == "obeyed"


def test_a_bad_file_that_is_removed_is_a_fault_no_more(path: Path, file: ControlFile) -> None:
    """Removing what was ignored ends the complaint, and its count stays; bad again, it is ignored again."""
    for count in (1, 2):
        write(path, b"{")
        file.look()
        assert (file.status()["state"], file.status()["ignored"]) == ("ignored", count)
        path.unlink()
        file.look()
        assert (file.status()["state"], file.status()["ignored"]) == ("gone", count)


@pytest.mark.parametrize("error", ["", "unknown policy 'lfu'"])
def test_an_order_outlives_its_file(path: Path, file: ControlFile, error: str) -> None:
    """An engine that takes no steps obeys when it wakes up, also when the file is gone by then: so it says still."""
    write(path, {"policy": "arc"})
    file.look()
    path.unlink()
    file.look()
    order = file.take()
    assert order == Order("arc")
    file.answered(order, error)
    status = file.status()
    assert (status["state"], status["ignored"], status["obeyed"] is None) == ("gone", int(bool(error)), bool(error))


def test_a_file_that_cannot_be_read_any_more_is_ignored(path: Path, file: ControlFile) -> None:
    """A folder put in its place, or a file in the place of its folder, is no removal: `ignored`, counted once."""
    inner = path.parent / "mount" / "wakman.json"
    inner.parent.mkdir()
    write(inner, {"policy": "arc"})
    file = ControlFile(str(inner))
    file.look()
    inner.unlink()
    inner.parent.rmdir()
    inner.parent.write_text("")
    for _ in range(2):
        file.look()
    assert (file.status()["state"], file.status()["why"]) == ("ignored", "Not a directory")
    assert file.status()["ignored"] == 1
    inner.parent.unlink()
    file.look()
    assert file.status()["state"] == "gone"


def test_a_huge_file_is_not_read(path: Path, file: ControlFile) -> None:
    """Of a file of a terabyte no more is read than tells that it is too long."""
    write(path, {"policy": "arc"})
    os.truncate(path, 1 << 40)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    file.look()
    assert file.take() is None
    assert file.status()["why"] == f"more than {MAX_BYTES} bytes"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began < 50 << 10


@pytest.mark.parametrize("call", ["stat", "open", "read"])
def test_a_file_system_that_hangs_holds_only_its_thread(
    path: Path, file: ControlFile, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While any of its calls hangs, orders are taken, the status says for how long, and closing waits for nothing."""
    answers, asked = threading.Event(), threading.Event()
    real = getattr(os, call)

    def hangs(*arguments: Any, **more: Any) -> Any:
        if threading.current_thread().name == "wakman-control-file":
            asked.set()
            assert answers.wait(60)
        return real(*arguments, **more)

    write(path, {"policy": "arc"})
    with monkeypatch.context() as patch:
        patch.setattr(os, call, hangs)
        file.start()
        assert asked.wait(60)
        try:
            assert file.take() is None
            assert eventually(lambda: file.status()["looked_s"] > 0)
            assert file.status()["state"] == "waiting"
            file.close()
        finally:
            answers.set()
    assert eventually(lambda: all(t.name != "wakman-control-file" for t in threading.enumerate()))
    assert file.status()["state"] == "closed"


def test_a_config_map_is_followed(tmp_path: Path) -> None:
    """A link that is pointed elsewhere, as Kubernetes does with a ConfigMap, is a new order."""
    for name, policy in (("one", "lru"), ("two", "arc")):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "wakman.json", {"policy": policy})
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "wakman.json").symlink_to("..data/wakman.json")
    file = ControlFile(str(tmp_path / "wakman.json"))
    file.look()
    assert file.take() == Order("lru")
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    file.look()
    assert file.take() == Order("arc")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """A path through a file, or a name that is too long, is a state and no exception, and counts once."""
    (tmp_path / "plain").write_text("")
    for path in (str(tmp_path / "plain" / "wakman.json"), str(tmp_path / ("x" * 300))):
        file = ControlFile(path)
        file.look()
        file.look()
        assert (file.status()["state"], file.status()["ignored"]) == ("ignored", 1)
        assert file.status()["why"]


def test_the_thread_looks_by_itself_and_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started, it finds each write without being asked, and ends when closed."""
    monkeypatch.setattr("engine_patch.control_file.LOOK_S", 0.01)
    file = ControlFile(str(path))
    file.start()
    for policy in ("lru", "arc"):
        write(path, {"policy": policy})
        assert eventually(file.take) == Order(policy)
    file.close()
    assert eventually(lambda: all(t.name != "wakman-control-file" for t in threading.enumerate()))


def eventually(condition: Any, timeout_s: float = 20) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.005)
    return found
