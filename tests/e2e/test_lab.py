"""The lab itself: it comes up whole or says why not, and leaves nothing behind, however it ends."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from replay.lab import Lab, LabSettings
from replay.programs import envoy_program
from service.errors import InvalidInput, ServerUnavailable

PATIENCE_S = 30.0
# A lab of its own process that says what it started, then waits.
SCRIPT = """
import json, time
from pathlib import Path
from replay.lab import Lab, LabSettings
with Lab(LabSettings(engines=2)) as lab:
    urls = [lab.gateway_url, lab.envoy_admin_url, lab.service_url, lab.redis_url, *(e.url for e in lab.engines)]
    pids = [lab.pid(part) for part in lab.parts]
    print(json.dumps({"urls": urls, "pids": pids, "workdir": str(lab.workdir)}), flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _envoy() -> None:
    try:
        envoy_program()
    except InvalidInput as exc:
        pytest.skip(str(exc))


@pytest.fixture
def own_lab() -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A lab in a process of its own, and what it started."""
    started: dict[str, Any] = {"pids": []}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            yield process, started
        finally:
            process.kill()
            for pid in filter(runs, started["pids"]):  # Only when the test failed.
                os.kill(pid, signal.SIGKILL)
            shutil.rmtree(started.get("workdir", ""), ignore_errors=True)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listens(url: str) -> bool:
    host, port = re.match(r"\w+://([\d.]+):(\d+)", url).groups()  # type: ignore[union-attr]
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def wait_until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.02)


def assert_nothing_is_left(started: dict[str, Any]) -> None:
    wait_until(lambda: not any(map(runs, started["pids"])), "every part ended")
    wait_until(lambda: not any(map(listens, started["urls"])), "every port free")


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if runs(child.pid)}


def test_killed_lab_leaves_nothing(own_lab: tuple[subprocess.Popen[str], dict[str, Any]]) -> None:
    """When the lab's process is killed outright, every part ends and every port is free."""
    process, started = own_lab
    assert len(started["pids"]) == 6
    assert all(map(runs, started["pids"]))
    assert all(map(listens, started["urls"]))
    process.kill()
    assert_nothing_is_left(started)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_ended_lab_leaves_nothing(
    own_lab: tuple[subprocess.Popen[str], dict[str, Any]], number: signal.Signals, exit_code: int
) -> None:
    """Ctrl-C and SIGTERM end every part, free every port and remove the temporary folder."""
    process, started = own_lab
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == exit_code
    assert not any(map(runs, started["pids"]))
    assert not any(map(listens, started["urls"]))
    assert not Path(started["workdir"]).exists()


def test_lab_command_prints_what_works(tmp_path: Path) -> None:
    """`cacheroute lab` prints addresses that answer, keeps logs where it is told, and Ctrl-C ends it with 0."""
    command = [sys.executable, "-m", "planner.cli", "lab", "--engines", "1", "--workdir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            printed: list[str] = []
            while not printed or not printed[-1].startswith("Ctrl-C"):
                line = process.stdout.readline()
                assert line, "the command ended early"
                printed.append(line)
            parts = {child.pid for child in psutil.Process(process.pid).children()}
            curl = next(line for line in printed if line.startswith("curl -si"))
            url, body = re.search(r"curl -si (\S+) .* -d '(.*)'", curl).groups()  # type: ignore[union-attr]
            headers = {"content-type": "application/json", "x-tenant-id": "acme"}
            with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=20) as response:
                served = response.headers["x-cacheroute-served"]
            assert any(line.startswith("engine-0") and served in line for line in printed)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert parts
    assert not any(map(runs, parts))
    assert {"envoy.json", "envoy-access.jsonl", "service.log", "planner.log"} <= set(os.listdir(tmp_path))


def test_part_that_fails_to_start_is_reported_with_its_last_lines() -> None:
    """A port in use fails the start: the error names the part and quotes it, and nothing is left running."""
    before = children()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = LabSettings(engines=1, planner=False, gateway_port=taken.getsockname()[1])
        with pytest.raises(ServerUnavailable, match=r"(?s)^envoy ended with exit code 1 .*Address already in use"):
            Lab(settings).__enter__()
    assert children() == before


def test_part_that_does_not_get_ready_is_reported() -> None:
    """A part that is late fails the start by name, and nothing is left running."""
    before = children()
    with pytest.raises(ServerUnavailable, match=r"was not ready within 0\.05 s"):
        Lab(LabSettings(engines=1, planner=False, start_timeout_s=0.05)).__enter__()
    assert children() == before


def test_bad_option_of_a_part_is_reported_in_its_own_words() -> None:
    """A setting that only a part can judge fails the start with that part's message."""
    with pytest.raises(ServerUnavailable, match=r"(?s)^engine-0 ended with exit code 2 .*no-such-preset"):
        Lab(LabSettings(engines=1, planner=False, preset="no-such-preset")).__enter__()


def test_plan_once_plans_from_the_traffic_so_far(shared_lab: Lab) -> None:
    """One planner cycle over a lab's traffic publishes a plan, which the service takes, that admits its keys."""
    body = json.dumps({"model": shared_lab.model, "prompt": "the cat", "max_tokens": 1}).encode()
    for i in range(10):
        headers = {"content-type": "application/json", "x-tenant-id": f"planned-{i % 2}"}
        request = urllib.request.Request(f"{shared_lab.gateway_url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            response.read()

    def planned() -> bool:
        shared_lab.plan_once()  # Again while the counts of the last second are still on their way.
        with urllib.request.urlopen(f"{shared_lab.service_url}/explain?key=planned-1", timeout=20) as response:
            return json.loads(response.read())["reason"] == "planned"

    wait_until(planned, "a plan in service that admits the key")


def test_reset_prefix_caches_empties_every_engine(shared_lab: Lab) -> None:
    """After the reset, a prompt that was cached is computed anew."""
    prompt = "the cat sat on the mat and the dog ran " * 20
    body = json.dumps({"model": shared_lab.model, "prompt": prompt, "max_tokens": 1}).encode()

    def cached_tokens(url: str) -> int:
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            usage = json.loads(response.read())["usage"]
        return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    for engine in shared_lab.engines:
        cached_tokens(engine.url)
        assert cached_tokens(engine.url) > 0
    shared_lab.reset_prefix_caches()
    assert [cached_tokens(engine.url) for engine in shared_lab.engines] == [0] * len(shared_lab.engines)


def test_unknown_part_is_refused(shared_lab: Lab) -> None:
    """A part's name that the lab lacks is refused with those it has."""
    with pytest.raises(InvalidInput, match=r"'engine-9'.*engine-0"):
        shared_lab.kill("engine-9")
