"""The link neither waits nor raises, whatever stands at the other end of its pipes."""

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from engine_patch import link as link_module
from engine_patch.decision import Decision
from engine_patch.events import Recorder
from engine_patch.link import STARTS, ShadowLink
from engine_patch.settings import EngineSettings
from engine_patch.shadow_command import environment

DECISION = Decision(
    t=1.0,
    policy="arc",
    live="lru",
    since=0.0,
    switch=True,
    reason="better",
    text="Switch from lru to arc.",
    window_s=60.0,
    rates={"lru": 0.1, "arc": 0.2},
    window_rates={"lru": 0.1, "arc": 0.2},
    advantage=0.1,
    margin=0.005,
    residual=None,
    requests=100,
    blocks=1000,
)


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make links to a process that runs the given Python text; closed at the end."""
    made: list[ShadowLink] = []

    def make(text: str, **options: Any) -> ShadowLink:
        monkeypatch.setattr(link_module, "command", lambda given: [sys.executable, "-S", "-c", text])
        link = ShadowLink(
            EngineSettings(), Recorder(max_bytes=1 << 20), num_blocks=100, block_size=16, backoff_s=0.01, **options
        )
        made.append(link)
        link.start()
        return link

    yield make
    for link in made:
        link.close()


def polled(link: ShadowLink, until: Any, limit_s: float = 20.0) -> list[Decision]:
    """Poll until something holds; return the decisions."""
    decisions: list[Decision] = []
    end = time.monotonic() + limit_s
    while not until():
        assert time.monotonic() < end, link.status()
        decisions += link.poll()
        time.sleep(0.005)
    return decisions


def test_what_it_says_is_heard(linked: Any) -> None:
    """Decisions, state and errors come through, also when lines arrive in pieces."""
    line = f'{{"decision": {DECISION.to_json()}}}\n'
    link = linked(
        f'import sys, time\nfor c in {line!r} + \'{{"state": {{"lag_s": 2.5}}}}\\n{{"error": "oh"}}\\n\':\n'
        "    sys.stdout.write(c); sys.stdout.flush()\ntime.sleep(60)"
    )
    decisions = polled(link, lambda: link.status()["error"] == "oh")
    assert decisions == [DECISION]
    status = link.status()
    assert (status["up"], status["lag_s"], status["decisions"], status["garbage"]) == (True, 2.5, 1, 0)
    assert status["rates"] == {"lru": 0.1, "arc": 0.2}


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xfe\x00\n",
        b'{"decision": 5}\n',
        b'{"decision": {"policy": "lru"}}\n',
        f'{{"decision": {replace(DECISION, rates=[]).to_json()}}}\n'.encode(),  # type: ignore[arg-type]
        f'{{"decision": {replace(DECISION, reason="mood").to_json()}}}\n'.encode(),
        b"[1]\n",
        b"[" * 20_000 + b"\n",
        b'{"x": 1}\n',
        b"NaN\n",
    ],
)
def test_garbage_is_counted_and_its_speaker_ended(linked: Any, said: bytes) -> None:
    """Lines of no known form decide nothing; a process that says many of them is killed and started again."""
    link = linked(f"import os, time\nwhile True: os.write(1, {said[:50]!r} * 1 + {said[50:]!r}); time.sleep(.002)")
    first = link.status()["pid"]
    assert polled(link, lambda: link.status()["starts"] >= 2) == []
    assert link.status()["pid"] != first


def test_a_line_without_end_takes_no_memory(linked: Any) -> None:
    """What has no line end is thrown away, not collected."""
    link = linked("import os\nwhile True: os.write(1, b'x' * 65536)")
    polled(link, lambda: link.status()["garbage"] > 3)
    assert len(link._line) <= link_module.LINE_BYTES


def test_a_shadow_that_is_no_more_has_no_rates(linked: Any) -> None:
    """What it decided was heard; its rates go with it."""
    line = f'{{"decision": {DECISION.to_json()}}}\n'
    link = linked(f"import sys; sys.stdout.write({line!r}); sys.stdout.flush(); sys.exit(7)")
    assert DECISION in polled(link, lambda: link.status()["gave_up"])
    assert link.status()["rates"] == {}


def test_a_process_that_ends_is_started_again_only_so_often(linked: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It is started again after a pause, STARTS times in all, and then given up, each time with a line in the log."""
    link = linked("import sys; sys.exit(7)")
    polled(link, lambda: link.status()["gave_up"])
    status = link.status()
    assert (status["up"], status["starts"], status["pid"]) == (False, STARTS, None)
    assert "status 7" in status["error"]
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.wakman"]
    assert len(lines) == STARTS
    assert all("ended with status 7" in line for line in lines)
    assert ["given up" in line for line in lines] == [False] * (STARTS - 1) + [True]
    link.recorder.reset(0.0)
    assert link.poll() == []


@pytest.mark.parametrize("error", [OSError(errno.EAGAIN, "fork"), OSError(errno.EMFILE, "files"), ValueError("null")])
def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """No process, no descriptor: the status says why, the engine hears nothing of it, and a later try works."""
    real, failing = subprocess.Popen, True

    def fail(*arguments: Any, **options: Any) -> Any:
        if failing:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(link_module.subprocess, "Popen", fail)
    monkeypatch.setattr(
        link_module, "command", lambda given: [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    )
    link = ShadowLink(EngineSettings(), Recorder(), num_blocks=100, block_size=16, backoff_s=0.01)
    link.start()
    assert not link.up
    assert "cannot be started" in link.status()["error"]
    failing = False
    polled(link, lambda: link.up)
    link.close()
    assert link.poll() == []


def test_no_program_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is not there (embedded Python) costs a line in the status."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    link = ShadowLink(EngineSettings(), Recorder(), num_blocks=100, block_size=16)
    link.start()
    assert "cannot be started" in link.status()["error"]


def test_a_reader_that_reads_nothing_costs_events_not_time(linked: Any) -> None:
    """With a full pipe the recorder stays in its bound and tells the gap; after stall_s the process is killed."""
    link = linked("import time; time.sleep(600)", stall_s=2.0)
    hashes = [bytes([at]) * 32 for at in range(200)]
    pid, slowest = link.status()["pid"], 0.0

    def stalled() -> bool:
        for _ in range(100):
            link.recorder.admitted(1.0, "a", hashes, 3200, 0)
        nonlocal slowest
        began = time.thread_time()
        link.poll()
        slowest = max(slowest, time.thread_time() - began)
        return bool(link.status()["pid"] != pid)

    polled(link, stalled)
    assert link.recorder.dropped > 0
    assert link.recorder.waiting_bytes <= link.recorder.max_bytes
    assert slowest < 1.0
    frame = link.recorder.take(0.0)
    assert frame is None or link.status()["waiting_bytes"] >= 0


def test_a_reader_that_stopped_is_replaced_though_its_pipe_is_not_full(linked: Any) -> None:
    """A few bytes that lie unread for stall_s are enough: light traffic would fill the pipe in hours only."""
    link = linked("import time; time.sleep(600)", stall_s=0.3)
    pid = link.status()["pid"]
    link.recorder.admitted(1.0, "a", [bytes(32)], 16, 0)
    polled(link, lambda: link.status()["error"] is not None)
    assert "read nothing" in link.status()["error"]
    polled(link, lambda: link.status()["pid"] not in (pid, None))


def test_a_reader_that_has_read_all_is_left_alone(linked: Any) -> None:
    """Silence is no stall: with nothing unread no time counts."""
    # Longer than an interpreter takes to start on a busy machine.
    link = linked("import sys\nwhile sys.stdin.buffer.read(1): pass", stall_s=4.0)
    pid = link.status()["pid"]
    link.recorder.admitted(1.0, "a", [bytes(32)], 16, 0)
    end = time.monotonic() + 5.0
    polled(link, lambda: time.monotonic() > end)
    assert (link.status()["pid"], link.status()["error"]) == (pid, None)


def test_the_environment_starts_no_plugin() -> None:
    """None of vLLM's variables and none of ours reach the process; one thread for numpy."""
    ours = environment({"VLLM_PLUGINS": "x", "WAKMAN_POLICY": "lru", "PATH": "/bin", "LD_PRELOAD": "tc.so"})
    assert not [name for name in ours if name.startswith(("VLLM_", "WAKMAN_"))]
    assert (ours["PATH"], ours["LD_PRELOAD"], ours["OMP_NUM_THREADS"]) == ("/bin", "tc.so", "1")


def test_close_ends_it_at_once_even_when_it_is_deaf(linked: Any) -> None:
    """Closing does not wait for the process's goodwill, may be repeated, and stops for good."""
    link = linked("import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)")
    process = link._process
    began = time.monotonic()
    link.close()
    link.close()
    assert time.monotonic() - began < 5
    assert process is not None
    assert process.returncode == -9
    assert link.poll() == []
    assert not link.up
