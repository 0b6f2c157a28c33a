"""What tests of every kind share: a real Valkey, a pool of its own for each test, and where whole traces are."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from replay.processes import Process, answers_ping, free_ports, wait_ready
from replay.programs import valkey_program

# No timing decides a test: an example may take as long as a busy machine needs, as in the profile for CI.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")

# A shell's background job has SIGINT ignored, and so would have whatever a test starts and then interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# These run in vLLM's environment: `make engine`.
collect_ignore = ["engine"]


class Valkey:
    """One real server on a port of its own that a test may kill and start again; it keeps nothing on disk."""

    def __init__(self, directory: Path) -> None:
        (self.port,) = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        listen = ["--port", str(self.port), "--bind", "127.0.0.1"]
        self._process = Process(
            "valkey",
            [valkey_program(), *listen, "--save", "", "--appendonly", "no"],
            log=directory / "valkey.log",
            ready=lambda: answers_ping(f"127.0.0.1:{self.port}"),
            env=os.environ,
            cwd=directory,
        )

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        self._process.start()
        wait_ready([self._process], timeout_s=20)

    def kill(self) -> None:
        self._process.kill()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """A real Valkey for the whole run; tests take a pool each and leave the server running."""
    server = Valkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A real Valkey for one test that kills it."""
    server = Valkey(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def pool() -> str:
    """A pool name that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of whole public traces; the test is left out, and says so, where there is none."""
    chosen = os.environ.get("CACHEROUTE_TRACES")
    folder = Path(chosen) if chosen else Path(__file__).resolve().parents[2] / "shared" / "traces"
    if not (folder / "mooncake_conversation.jsonl").is_file():
        pytest.skip(
            f"no whole traces in {folder}; set CACHEROUTE_TRACES to a folder that holds mooncake_conversation.jsonl"
        )
    return folder
