"""The real shadow process beside a real parent: it decides, and whatever is done to it costs the parent nothing."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from engine_patch.decision import Decision
from engine_patch.events import Recorder
from engine_patch.link import ShadowLink
from engine_patch.settings import EngineSettings
from engine_patch.shadow_process import BAD_INPUT, Options

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = EngineSettings(interval_s=2.0, dwell_s=0.0, policies=("lru", "s3fifo"))


class Feed:
    """Traffic that S3-FIFO serves better, in a time of its own: a second a request."""

    def __init__(self, link: ShadowLink) -> None:
        self.link = link
        self.rng = Random(0)
        self.t = 0.0
        self.popular = [self.fresh(20) for _ in range(10)]

    def fresh(self, count: int) -> list[bytes]:
        """Return new hashes."""
        return [hashlib.sha256(self.rng.randbytes(8)).digest() for _ in range(count)]

    def requests(self, count: int) -> None:
        """Record so many."""
        for _ in range(count):
            self.t += 1.0
            hashes = self.rng.choice(self.popular) if self.rng.random() < 0.4 else self.fresh(40)
            name = str(self.t)
            self.link.recorder.admitted(self.t, name, hashes, len(hashes) * 16 + 5, None, 16, free_blocks=300)
            self.link.recorder.freed(self.t + 0.5, name, hashes, len(hashes) + 1)

    def until(self, done: Callable[[], bool], limit_s: float = 60.0) -> list[Decision]:
        """Poll as an engine does, until something holds."""
        decisions: list[Decision] = []
        end = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end, self.link.status()
            decisions += self.link.poll()
            time.sleep(0.01)
        return decisions


@pytest.fixture
def feed() -> Iterator[Feed]:
    """A running process, that has spoken."""
    link = ShadowLink(SETTINGS, Recorder(1 << 20), num_blocks=400, block_size=16, backoff_s=0.05, stall_s=1.0)
    made = Feed(link)
    link.start()
    made.until(lambda: "rss_mib" in link.status())
    yield made
    link.close()


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pid: int, limit_s: float = 20.0) -> bool:
    """Wait for its end."""
    end = time.monotonic() + limit_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_it_decides_what_the_events_say(feed: Feed) -> None:
    """Events in, decisions out, in the events' own time: S3-FIFO is better, and becomes live when told."""
    feed.link.recorder.policy(0.0, "lru", "start")
    feed.requests(120)
    decisions = feed.until(lambda: feed.link.status()["decisions"] >= 59)
    switch = next(decision for decision in decisions if decision.switch)
    assert switch.policy == "s3fifo"
    assert switch.rates["s3fifo"] > switch.rates["lru"] + switch.margin
    feed.link.recorder.policy(feed.t, "s3fifo", "auto")
    feed.requests(10)
    last = feed.until(lambda: feed.link.status()["decisions"] >= 63)[-1]
    assert last.live == "s3fifo"
    assert feed.link.status()["gaps"] == 0


def test_it_is_small_and_quiet(feed: Feed) -> None:
    """It holds three descriptors, runs nicely, imports no engine, and takes below 80 MB with a small pool."""
    process = psutil.Process(feed.link.status()["pid"])
    feed.requests(50)
    feed.until(lambda: feed.link.status()["decisions"] >= 20)
    assert process.memory_info().rss < 80 << 20
    assert process.nice() >= 10
    assert sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/fd")) == [0, 1, 2]
    assert process.num_threads() == 1
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "vllm" not in maps
    assert not process.net_connections()


def test_killed_it_comes_back_and_says_that_it_missed_something(feed: Feed) -> None:
    """SIGKILL: the next polls reap it (no zombie), start another, and that one is cold."""
    feed.requests(20)
    feed.until(lambda: feed.link.status()["decisions"] >= 8)
    pid = feed.link.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    feed.until(lambda: feed.link.status()["starts"] == 2 and "rss_mib" in feed.link.status())
    assert not psutil.pid_exists(pid)
    feed.requests(8)
    decisions = feed.until(lambda: feed.link.status()["decisions"] >= 11)
    assert {decision.reason for decision in decisions} <= {"evidence", "warming"}
    assert decisions[-1].live == "lru"


def test_stopped_it_is_replaced(feed: Feed) -> None:
    """SIGSTOP: no poll waits; the recorder drops what does not fit; who reads nothing for stall_s is killed."""
    pid, slowest = feed.link.status()["pid"], 0.0
    os.kill(pid, signal.SIGSTOP)

    def replaced() -> bool:
        nonlocal slowest
        feed.requests(20)
        began = time.thread_time()
        feed.link.poll()
        slowest = max(slowest, time.thread_time() - began)
        return bool(feed.link.status()["starts"] == 2)

    feed.until(replaced)
    assert slowest < 1.0
    assert feed.link.recorder.waiting_bytes <= 1 << 20
    assert gone(pid)
    feed.until(lambda: "rss_mib" in feed.link.status())
    feed.requests(20)
    feed.until(lambda: feed.link.status()["decisions"] > 0)


def test_ctrl_c_does_not_end_it(feed: Feed) -> None:
    """SIGINT, which a terminal sends to the whole group, is the engine's affair."""
    os.kill(feed.link.status()["pid"], signal.SIGINT)
    feed.requests(20)
    feed.until(lambda: feed.link.status()["decisions"] >= 5)
    assert feed.link.status()["starts"] == 1


def options(**changes: object) -> Options:
    """Options of a process whose parent is this one."""
    return Options(os.getpid(), 100, 16, ("lru", "s3fifo"), **changes)  # type: ignore[arg-type]


def run(given: bytes, **changes: object) -> tuple[int, list[dict[str, object]]]:
    """Run the process on this input; return its status and what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "engine_patch.shadow_process", options(**changes).to_json()],
        input=given,
        capture_output=True,
        cwd=ROOT,
        timeout=60,
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_it_ends_with_its_input() -> None:
    """The end of its input is a good end."""
    status, said = run(b"")
    assert status == 0
    assert list(said[0]) == ["state"]


def test_input_that_is_no_frame_ends_it() -> None:
    """Where the next frame begins cannot be known: it says so and ends with status 3."""
    status, said = run(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 3)
    assert status == BAD_INPUT
    assert said[-1] == {"error": "not a frame of events"}


def test_a_frame_that_lies_costs_the_shadows_not_the_process() -> None:
    """A frame whose events make no sense is reported; the shadows start anew, and the next frames are read."""
    recorder = Recorder()
    recorder.admitted(1.0, "a", [b"12345678"], 20, 0)
    good = recorder.take(0.0)
    assert good is not None
    bad = bytearray(good)
    bad[40] = 77  # the event's kind
    status, said = run(bytes(bad) + good + bytes(bad) + good)
    assert status == 0
    assert [line for line in said if "error" in line] == [{"error": "ValueError: an event of kind 77 is not known"}] * 2
    status, _ = run(bytes(bad) * 9)
    assert status == 4


@pytest.mark.parametrize(
    "how", ["killed", "killed, its pipe held open by another", "killed while its child is stopped"]
)
def test_it_ends_with_its_parent(how: str) -> None:
    """A parent that is killed cannot close anything; the kernel ends the process all the same."""
    text = """
        import os, sys, time
        from engine_patch.events import Recorder
        from engine_patch.link import ShadowLink
        from engine_patch.settings import EngineSettings
        link = ShadowLink(EngineSettings(), Recorder(), num_blocks=100, block_size=16)
        link.start()
        while "rss_mib" not in link.status():
            link.poll(); time.sleep(.01)
        other = 0
        if sys.argv[1] == "held":
            other = os.fork()
            if other == 0:
                time.sleep(60); os._exit(0)
        print(link.status()["pid"], other, flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), "held" if "held" in how else "plain"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child, other = map(int, parent.stdout.readline().split())
        if "stopped" in how:
            os.kill(child, signal.SIGSTOP)
        assert alive(child)
        parent.kill()
        parent.wait(20)
        assert gone(child)
    finally:
        parent.kill()
        parent.wait(20)
        if parent.stdout is not None:
            parent.stdout.close()
        if other:
            os.kill(other, signal.SIGKILL)


def test_no_descriptor_left(feed: Feed) -> None:
    """An engine that is out of descriptors goes on polling; the process comes when there are some again."""
    held: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.kill(feed.link.status()["pid"], signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + 20), hard))
    try:
        feed.until(lambda: not feed.link.up)
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(20):
            assert feed.link.poll() == []
            time.sleep(0.01)
        assert "cannot be started" in feed.link.status()["error"]
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    feed.until(lambda: "rss_mib" in feed.link.status())
