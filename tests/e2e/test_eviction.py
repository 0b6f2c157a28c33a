"""A fleet whose engines choose their eviction policy: they switch under traffic, and nobody notices but the cache."""

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from replay.lab import Lab, LabSettings
from replay.programs import envoy_program
from service.errors import InvalidInput

REQUESTS_MOST = 3_000


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    try:
        envoy_program()
    except InvalidInput as exc:
        pytest.skip(str(exc))
    settings = LabSettings(
        engines=2, planner=False, speed=100.0, kv_blocks=200, eviction_policy="auto", eviction_interval_s=5.0
    )
    with Lab(settings) as running:
        yield running


def ask(lab: Lab, prompt: str, key: str) -> tuple[int, int]:
    """Send one request through the gateway; return its status and how many tokens came."""
    body = json.dumps({"model": lab.model, "prompt": prompt, "max_tokens": 2}).encode()
    headers = {"content-type": "application/json", "x-tenant-id": key}
    request = urllib.request.Request(f"{lab.gateway_url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, json.loads(answer.read())["usage"]["completion_tokens"]


def test_engines_switch_and_every_request_succeeds(lab: Lab) -> None:
    """Traffic that LRU serves from no cache makes both engines leave it, while requests go on without a fault."""
    outcomes: list[object] = []
    switched = threading.Event()

    def send(first: int) -> None:
        for sent in range(first, REQUESTS_MOST, 2):
            # Each of five prompts of 25 blocks comes back after nine others: more blocks than an engine has.
            seed = sent // 4 % 5 if sent // 2 % 2 == 0 else 1000 + sent
            try:
                outcomes.append(ask(lab, f"{first}{seed:07d}" * 200 + f"{sent:08d}", f"tenant-{first}"))
            except OSError as exc:
                outcomes.append(exc)
            if switched.is_set():
                return

    senders = [threading.Thread(target=send, args=(first,)) for first in (0, 1)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        if all(lab.eviction_history().values()):
            switched.set()
        senders[0].join(0.2)
        senders[1].join(0.2)
    history = lab.eviction_history()
    assert switched.is_set(), history
    for entries in history.values():
        assert (entries[0]["from"], entries[0]["cause"]) == ("lru", "auto")
        assert entries[0]["to"] != "lru"
    assert set(outcomes) == {(200, 2)}


def test_an_operator_steers_the_whole_fleet(lab: Lab) -> None:
    """`set_eviction` reaches every engine, `cacheroute engine status` reads it, and requests go on."""
    lab.set_eviction("arc", "a trial")
    for engine in lab.engines:
        command = [sys.executable, "-m", "planner.cli", "engine", "status", "--url", engine.url, "-o", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert '"policy": "arc"' in done.stdout
    assert [entries[-1]["why"] for entries in lab.eviction_history().values()] == ["a trial"] * 2
    assert ask(lab, "hello", "somebody") == (200, 2)
