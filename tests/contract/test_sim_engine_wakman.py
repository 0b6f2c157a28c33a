"""Eviction of a real `cacheroute sim-engine` process: steered over HTTP, by `cacheroute engine`, and by itself."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMAND = (sys.executable, "-m", "planner.cli", "sim-engine", "--listen", "127.0.0.1:0")
DEADLINE_S = 30.0


@contextmanager
def running(*options: str) -> Iterator[str]:
    """Run an engine on a free port and yield its URL; it is gone afterwards."""
    with subprocess.Popen((*COMMAND, *options), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("{"), line + process.stderr.read()
            yield f"http://{json.loads(line)['address']}"
        finally:
            process.kill()


@pytest.fixture
def url() -> Iterator[str]:
    with running() as started:
        yield started


def ask(url: str, body: bytes | None = None) -> tuple[int, Any]:
    """Return status and JSON of a GET, or of a POST of `body`."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=DEADLINE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code, json.loads(fault.read())


def text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
        return str(answer.read().decode())


def complete(url: str, prompt: str) -> dict[str, Any]:
    """Return the answer to a prompt of one new token."""
    body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not check():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"


def test_an_operator_steers_over_http(url: str) -> None:
    """An order is obeyed at once and stands in status, history and both pages of metrics, with who gave it and why."""
    status, told = ask(f"{url}/v1/wakman/status")
    (engine,) = told["engines"]
    assert status == 200
    assert (engine["attached"], engine["policy"], engine["mode"], engine["switches"]) == (True, "lru", "lru", 0)
    order = json.dumps({"policy": "s3fifo", "reason": "a trial", "actor": "ann"}).encode()
    status, told = ask(f"{url}/v1/wakman/policy", order)
    assert status == 200
    (done,) = told["engines"]
    assert (done["ok"], done["from"], done["to"]) == (True, "lru", "s3fifo")
    status, told = ask(f"{url}/v1/wakman/history")
    (entry,) = told["engines"][0]["history"]
    assert (entry["from"], entry["to"], entry["cause"], entry["actor"], entry["why"]) == (
        "lru", "s3fifo", "manual", "ann", "a trial",
    )  # fmt: skip
    for page in (text(f"{url}/metrics"), text(f"{url}/v1/wakman/metrics")):
        assert 'wakman_policy{engine="0",policy="s3fifo"} 1.0' in page
        assert 'wakman_policy{engine="0",policy="lru"} 0.0' in page
        assert 'wakman_switches_total{engine="0",from="lru",to="s3fifo",cause="manual"} 1.0' in page
    assert "vllm:prefix_cache_hits_total" in text(f"{url}/metrics")
    assert complete(url, "still serving")["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"policy": "mru"}', 400, "unknown policy 'mru'"),
        (b'{"policy": "lru", "because": ""}', 400, "unknown field 'because'"),
        (b'{"policy"', 400, "not JSON"),
        (b'{"policy": "' + b"x" * 20_000 + b'"}', 413, "more than"),
    ],
)
def test_a_bad_order_is_refused_in_words(url: str, body: bytes, status: int, words: str) -> None:
    """What is no order is answered by its status and a sentence, and changes nothing."""
    found, told = ask(f"{url}/v1/wakman/policy", body)
    assert (found, words in told["error"]) == (status, True), told
    assert ask(f"{url}/v1/wakman/status")[1]["engines"][0]["switches"] == 0


def test_after_off_orders_are_refused(url: str) -> None:
    """`off` leaves an engine that serves by LRU, says so, and refuses orders with 409."""
    assert ask(f"{url}/v1/wakman/policy", b'{"policy": "off", "reason": "enough"}')[0] == 200
    engine = ask(f"{url}/v1/wakman/status")[1]["engines"][0]
    assert (engine["attached"], engine["policy"]) == (False, None)
    assert "enough" in engine["reason"]
    status, told = ask(f"{url}/v1/wakman/policy", b'{"policy": "auto"}')
    assert status == 409
    assert "not attached" in told["error"]
    assert 'wakman_attached{engine="0"} 0.0' in text(f"{url}/metrics")
    assert complete(url, "still serving")["usage"]["completion_tokens"] == 1


def test_an_engine_switches_by_itself() -> None:
    """In mode auto, traffic that LRU cannot serve from cache ends with another policy, and the reason is told."""
    options = ("--kv-blocks", "200", "--speed", "100", "--eviction-policy", "auto", "--eviction-interval-s", "5")
    with running(*options) as url:
        sent = 0

        def switched() -> bool:
            nonlocal sent
            for _ in range(20):
                # Each of five prompts of 25 blocks comes back after nine others: more blocks than there are.
                shared = sent % 2 == 0
                seed = sent // 2 % 5 if shared else 1000 + sent
                complete(url, f"{seed:04d}" * 400 + f"{sent:08d}")
                sent += 1
            return bool(ask(f"{url}/v1/wakman/history")[1]["engines"][0]["history"])

        until(switched, "a switch")
        entry = ask(f"{url}/v1/wakman/history")[1]["engines"][0]["history"][0]
        assert (entry["from"], entry["cause"], entry["actor"]) == ("lru", "auto", "switcher")
        assert entry["to"] != "lru"
        assert entry["rates"][entry["to"]] > entry["rates"]["lru"]
        assert f"from lru to {entry['to']}" in entry["why"]
        page = text(f"{url}/metrics")
        assert f'wakman_switches_total{{engine="0",from="lru",to="{entry["to"]}",cause="auto"}} 1.0' in page
        assert 'wakman_shadow_up{engine="0"} 1.0' in page
        assert f'wakman_shadow_hit_rate{{engine="0",policy="{entry["to"]}"}}' in page


def test_the_command_line_reads_and_steers_it(url: str) -> None:
    """`cacheroute engine status` and `engine policy` work on a simulated engine as on a real one."""

    def engine(*arguments: str) -> Any:
        command = (sys.executable, "-m", "planner.cli", "engine", *arguments, "--url", url, "-o", "json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=Path(__file__).parent)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert '"lru"' in json.dumps(engine("status"))
    engine("policy", "arc", "--reason", "a trial")
    assert ask(f"{url}/v1/wakman/status")[1]["engines"][0]["policy"] == "arc"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--eviction-policy", "mru"), "--eviction-policy 'mru' is none of auto, lru, s3fifo"),
        (("--eviction-policy", "off"), "--eviction-policy 'off' is none of"),
        (("--eviction-interval-s", "0"), "--eviction-interval-s 0"),
        (("--eviction-preset", "none"), "--eviction-preset 'none' is none of default, paper"),
    ],
)
def test_bad_options_are_one_clear_line(options: tuple[str, ...], words: str) -> None:
    """An option that cannot be used ends the command with code 2 and a line that names it."""
    done = subprocess.run((*COMMAND, *options), capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
