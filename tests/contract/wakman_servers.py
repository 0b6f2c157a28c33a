"""Servers that answer `/v1/wakman` by the code that does so in vLLM's API server, and `cacheroute engine` as a process.

Only the engines are stand-ins. Other servers answer whatever a test says.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine_patch import control, endpoint
from engine_patch.policy import POLICIES


class Engine:
    """An attached engine that obeys."""

    control = None

    def __init__(self, **changes: Any) -> None:
        self.told: dict[str, Any] = {
            "attached": True,
            "reason": "",
            "policy": "lru",
            "mode": "auto",
            "since": 1_700_000_000.0,
            "switches": 0,
            "residual": 0.001,
            "shadow": {"up": True, "rates": {"lru": 0.41, "s3fifo": 0.52}},
            "last_decision": {"text": "s3fifo would hit 52.0 % of the tokens, lru 41.0 %: switch."},
            **changes,
        }
        self.orders: list[tuple[str, str, str]] = []

    def poll(self, now: float) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return self.told

    def history(self) -> list[dict[str, Any]]:
        names = ("lru", *(mode for mode, _, _ in self.orders))
        return [
            {"at": 1_700_000_000.0 + n, "from": names[n], "to": mode, "cause": "manual", "actor": actor, "why": why}
            for n, (mode, actor, why) in enumerate(self.orders)
        ]

    def set_mode(self, mode: str, actor: str, why: str, cause: str = "manual") -> dict[str, Any]:
        self.orders.append((mode, actor, why))
        self.told = {**self.told, "mode": mode, "policy": mode if mode in POLICIES else self.told["policy"]}
        return self.told


class Behind:
    """The engines behind one server, asked as vLLM's are."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines

    async def ask(self, method: str, *arguments: str) -> list[dict[str, Any]]:
        return [control.answer(engine, index, method, *arguments) for index, engine in enumerate(self.engines)]


Answer = Callable[[str, str, bytes, Mapping[str, str]], tuple[int, bytes, Mapping[str, str]]]


@contextlib.contextmanager
def listening(answer: Answer) -> Iterator[str]:
    """Serve what `answer(method, path, body, headers)` returns, at the URL that is yielded."""

    class Asked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, page, headers = answer(self.command, self.path, body, self.headers)
            self.send_response(code)
            for name, value in {"Content-Length": str(len(page)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(page)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def patched(*engines: Engine, key: str = "") -> contextlib.AbstractContextManager[str]:
    """A vLLM server with these engines, and a key if one is given."""
    behind: Any = Behind(*engines)

    def answer(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, Mapping[str, str]]:
        if key and headers.get("Authorization") != f"Bearer {key}":
            return 401, b'{"error":"Unauthorized"}', {}
        answers: dict[tuple[str, str], Callable[[], Any]] = {
            ("GET", "/v1/wakman/status"): lambda: endpoint.answer_status(behind),
            ("GET", "/v1/wakman/history"): lambda: endpoint.answer_history(behind),
            ("POST", "/v1/wakman/policy"): lambda: endpoint.answer_policy(behind, body, "127.0.0.1"),
        }
        code, document = asyncio.run(answers[method, path]())
        return code, json.dumps(document).encode(), {"Content-Type": "application/json"}

    return listening(answer)


def constant(code: int, page: bytes = b"", **headers: str) -> contextlib.AbstractContextManager[str]:
    """A server that always answers this."""
    return listening(lambda *_: (code, page, headers))


def run(*arguments: str, exit_code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "engine", *arguments],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == exit_code, done
    assert "Traceback" not in done.stderr
    return done
