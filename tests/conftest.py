"""What tests of every kind share: a real Valkey, a pool of its own for each test, and where whole traces are."""

import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.programs import valkey_program


class Valkey:
    """One real server on a port of its own that a test may kill and start again; it keeps nothing on disk."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [valkey_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            cwd=self._directory,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            if time.monotonic() > deadline:
                pytest.fail("Valkey did not answer PING within 20 s", pytrace=False)
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


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
