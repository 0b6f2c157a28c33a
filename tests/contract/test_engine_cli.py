"""`cacheroute engine status | policy | history` as their users run them, against servers that answer, refuse or lie.

The good server's answers are made by the code that answers inside vLLM's API server; only the engines are stand-ins.
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

import pytest
import yaml

from engine_patch import control, endpoint
from engine_patch.policy import POLICIES

KEY = "correct-horse"


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


def test_status_of_several_servers() -> None:
    """All servers and engines are listed in the order given; JSON and YAML agree; the table has what people compare."""
    with patched(Engine(), Engine(policy="arc", mode="arc")) as one, patched(Engine()) as two:
        done = run("status", "--url", one, "--url", f"{two}/", "-o", "json")
        document = json.loads(done.stdout)
        assert done.stderr == ""
        assert [(s["url"], s["error"], len(s["engines"])) for s in document["servers"]] == [(one, "", 2), (two, "", 1)]
        assert [e["policy"] for e in document["servers"][0]["engines"]] == ["lru", "arc"]
        assert yaml.safe_load(run("status", "--url", one, "--url", two, "-o", "yaml").stdout) == document
        table = run("status", "--url", one, "--url", two).stdout
        for words in ("policy", "s3fifo", "0.52", "0.41", "2023-11-14 22:13:20+00:00", "s3fifo would hit 52.0 %", two):
            assert words in table
        listed = run("status", "-o", "json", CACHEROUTE_ENGINE_URLS=f"{one} {two}")
        assert json.loads(listed.stdout) == document


def test_an_order_reaches_every_engine() -> None:
    """`policy` orders all engines of all servers with reason and actor, and prints what each did."""
    engines = [Engine(), Engine(), Engine()]
    with patched(*engines[:2]) as one, patched(engines[2]) as two:
        order = ("policy", "s3fifo", "--url", one, "--url", two, "--reason", "scans", "--actor", "mira")
        document = json.loads(run(*order, "-o", "json").stdout)
        assert [[e["to"] for e in s["engines"]] for s in document["servers"]] == [["s3fifo"] * 2, ["s3fifo"]]
        assert [engine.orders for engine in engines] == [[("s3fifo", "mira", "scans")]] * 3
        table = run("policy", "auto", "--url", one, "--reason", "over").stdout
        assert "auto" in table
        mode, actor, why = engines[0].orders[-1]
        assert (mode, why) == ("auto", "over")
        assert actor
        history = json.loads(run("history", "--url", one, "--limit", "1", "-o", "json").stdout)
        assert [e["why"] for e in history["servers"][0]["engines"][0]["history"]] == ["over"]
        assert "scans" in run("history", "--url", one).stdout


def test_the_key_is_sent() -> None:
    """By option or variable; without it the server refuses, exit code 3, and the key is never printed."""
    with patched(Engine(), key=KEY) as url:
        assert run("status", "--url", url, "--api-key", KEY).stdout
        assert run("status", "--url", url, CACHEROUTE_ENGINE_API_KEY=KEY).stdout
        assert "--api-key" in run("status", "--url", url, exit_code=3).stderr
        wrong = run("policy", "arc", "--url", url, "--reason", "r", "--api-key", "hunter2", exit_code=3)
        assert "hunter2" not in wrong.stdout + wrong.stderr


def test_an_engine_that_is_not_attached() -> None:
    """`status` says why and exits with 0, with --check 1; an order is refused with exit code 3."""
    left = Engine(attached=False, reason="a KV connector is on", policy=None, mode="off", shadow=None)
    with patched(left) as url:
        assert "not attached: a KV connector is on" in run("status", "--url", url).stderr
        run("status", "--url", url, "--check", exit_code=1)
        done = run("policy", "arc", "--url", url, "--reason", "r", "-o", "json", exit_code=3)
        assert "a KV connector is on" in done.stderr
        assert json.loads(done.stdout)["servers"][0]["engines"][0]["ok"] is False
        assert left.orders == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"shadow": {"up": False}}, "shadow process does not run"),
        ({"shadow": {"up": False}, "mode": "arc"}, ""),
        ({"control_file": {"path": "/etc/w.json", "state": "ignored", "why": "not JSON"}}, "/etc/w.json is ignored"),
        ({"control_file": {"path": "/etc/w.json", "state": "missing", "why": "none yet"}}, ""),
    ],
)
def test_check_is_for_scripts(changes: dict[str, Any], words: str) -> None:
    """`--check` is 1 with a sentence when something is amiss: no shadow that `auto` needs, a control file ignored."""
    with patched(Engine(**changes)) as url:
        done = run("status", "--url", url, "--check", exit_code=1 if words else 0)
        assert words in done.stderr
        assert bool(done.stderr) is bool(words)


def test_an_unknown_policy_is_refused_by_the_server() -> None:
    """Exit code 3 and the known policies: the server knows them, and may be newer than the command."""
    engine = Engine()
    with patched(engine) as url:
        done = run("policy", "lfu", "--url", url, "--reason", "r", exit_code=3)
        assert "unknown policy 'lfu'; there are auto, lru" in done.stderr
        assert engine.orders == []


def test_servers_that_do_not_answer_as_ours_do() -> None:
    """Each gives one sentence: 5 when it or its engine cannot be reached, 3 when it refuses or is no such server."""
    with constant(404, b"{}") as none, constant(200, b"<html>") as page, constant(200, b"[1]") as other:
        assert "VLLM_PLUGINS=wakman" in run("status", "--url", none, exit_code=3).stderr
        for url in (page, other):
            assert "is it a vLLM server?" in run("status", "--url", url, exit_code=3).stderr
    with constant(503, b'{"error": "an engine did not answer within 10 s"}') as silent, constant(502, b"<html>") as bad:
        assert "did not answer within 10 s" in run("status", "--url", silent, exit_code=5).stderr
        assert "answers 502" in run("status", "--url", bad, exit_code=5).stderr
    assert "cannot be reached" in run("status", "--url", "http://127.0.0.1:1", exit_code=5).stderr


def test_one_server_of_two_is_away() -> None:
    """What the other says is printed all the same, and the exit code is the worst."""
    with patched(Engine()) as url:
        done = run("status", "--url", "http://127.0.0.1:1", "--url", url, "-o", "json", exit_code=5)
        away, there = json.loads(done.stdout)["servers"]
        assert "cannot be reached" in away["error"]
        assert there["engines"][0]["policy"] == "lru"


def test_the_key_does_not_follow_a_redirect() -> None:
    """A server that sends elsewhere is not followed: the key would go along."""
    asked: list[Mapping[str, str]] = []

    def elsewhere(
        method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        asked.append(headers)
        return 200, b"{}", {}

    with listening(elsewhere) as there, constant(307, Location=f"{there}/v1/wakman/status") as url:
        assert "answers 307" in run("status", "--url", url, "--api-key", KEY, exit_code=3).stderr
    assert asked == []


def test_a_simulated_engine_is_seen_and_steered_alike() -> None:
    """The lab's engines have the same routes: an order to one is obeyed, seen and remembered."""
    command = (sys.executable, "-m", "planner.cli", "sim-engine", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = "http://" + json.loads(process.stderr.readline())["address"]
            run("policy", "s3fifo", "--url", url, "--reason", "scans", "--actor", "mira")
            (engine,) = json.loads(run("status", "--url", url, "-o", "json").stdout)["servers"][0]["engines"]
            assert (engine["attached"], engine["policy"], engine["mode"]) == (True, "s3fifo", "s3fifo")
            assert "scans" in run("history", "--url", url).stdout
            assert "unknown policy" in run("policy", "lfu", "--url", url, "--reason", "r", exit_code=3).stderr
        finally:
            process.kill()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "--url", "ftp://host"),
        ("status", "--url", "http://"),
        ("status", "--url", "http://host:99999"),
        ("status", "--url", "http://user:hunter2@host"),
        ("policy", "arc", "--url", "http://127.0.0.1:1"),
        ("policy", "arc", "--url", "http://127.0.0.1:1", "--reason", " "),
        ("history", "--url", "http://127.0.0.1:1", "--limit", "0"),
    ],
)
def test_usage(arguments: tuple[str, ...]) -> None:
    """No server, a URL that is none, no reason: exit code 2, and nobody is asked."""
    done = run(*arguments, exit_code=2)
    assert done.stdout == ""
    assert done.stderr
    assert "hunter2" not in done.stderr
