"""`cacheroute calibrate` as its users run it, against a real simulated engine: document, files, exit codes, Ctrl-C.

A busy machine may make the client late; then steps do not count, and the document says so. What is asserted holds in
either case, and no timing decides.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from planner.calibrate import _step
from planner.capacity import read_page
from planner.ladder import Next
from planner.target import Target, Traffic
from replay.processes import free_ports

COMMAND = (sys.executable, "-m", "planner.cli")
# Long prompts of which nearly nothing is shared: 4,064 tokens take the engine 0.46 s, whatever stands beside them.
TRAFFIC = ("--prefix-tokens", 64, "--unique-tokens", 4000, "--output-tokens", 8)
BORNE_AT_MOST_RPS = 1 / 0.45
DEADLINE_S = 60.0


@dataclass
class Engine:
    """A running engine."""

    process: subprocess.Popen[str]
    url: str

    def in_flight(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=DEADLINE_S) as answer:
            page = read_page(answer.read().decode())
        assert page.running is not None
        assert page.waiting is not None
        return page.running + page.waiting


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """Run an engine 20 times faster than time, with a small cache whose blocks are all watched."""
    options = ("--speed", "20", "--preset", "70b-bf16-tp2", "--kv-blocks", "4000", "--max-model-len", "8000")
    watched = ("--kv-cache-metrics", "--kv-cache-metrics-sample", "0.5")
    command = (*COMMAND, "sim-engine", "--listen", "127.0.0.1:0", *options, *watched)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith("{"), line + process.stderr.read()
            yield Engine(process, f"http://{json.loads(line)['address']}")
        finally:
            process.kill()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine() as started:
        yield started


def command(*arguments: object) -> list[str]:
    return [*COMMAND, "calibrate", *map(str, arguments)]


def run(*arguments: object, exit_codes: tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode in exit_codes, done
    assert "Traceback" not in done.stderr
    return done


def started(engine: Engine, *arguments: object) -> subprocess.Popen[str]:
    """Return a calibration that has taken its first step and goes on for long."""
    long = ("--slo-ttft-p99-s", 2, "--max-minutes", 1, *TRAFFIC)
    process = subprocess.Popen(
        command("--endpoint", engine.url, *long, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    assert "requests/s: " in process.stderr.readline()
    return process


def test_measures_an_endpoint_and_writes_all_it_was_read_from(engine: Engine, tmp_path: Path) -> None:
    """The document on standard output is the file; it has provenance, steps, cap, cache, sensitivity and settings."""
    out = tmp_path / "calibration.json"
    out.write_text("{")
    slo = ("--slo-ttft-p99-s", 4, "--slo-itl-p99-s", 30, "--max-minutes", 0.25)
    done = run("--endpoint", engine.url, *slo, *TRAFFIC, "--out", out, "-o", "json", exit_codes=(0, 1))
    found: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]

    assert (found["endpoint"], found["model"], found["seed"]) == (engine.url, "sim-model", 0)
    assert found["engine_version"].endswith("+cacheroute.sim")
    assert found["simulated"]["preset"] == "70b-bf16-tp2"
    assert found["slo_p99_s"] == {"ttft": 4.0, "itl": 30.0}
    assert found["traffic"]["prompt_tokens_seen"] == 4064
    assert found["tool"]["version"]

    rates = [step["rate_rps"] for step in found["steps"]]
    assert rates
    assert all(later <= 1.51 * max(rates[:i]) for i, (_, later) in enumerate(pairwise(rates), start=1))
    for step in found["steps"]:
        assert step["failed"] == 0
        assert 0 <= step["share_over_slo"] <= 1
        assert step["counts"] == (step["lag_p99_s"] <= 0.4)
        assert step["hit_share"] == pytest.approx(64 / 4064, abs=0.01)

    result = found["result"]
    assert done.returncode == (1 if result["censored"] else 0)
    if result["censored"] != "client":
        assert result["replica_cap_rps"] == pytest.approx(0.9 * result["crossing_rps"], rel=2e-3)
        # The engine computes a prompt after the other: above that rate the queue outgrows any SLO within a step.
        assert result["crossing_rps"] <= 1.4 * BORNE_AT_MOST_RPS
        low, high = result["chance_95_rps"]
        assert low <= high
        assert {(row["varied"], row["times"]) for row in found["sensitivity"]} >= {
            ("replica_cap", 0.75),
            ("replica_cap", 1.25),
            ("slo", 0.75),
            ("slo", 1.25),
        }
        assert found["settings"]["CACHEROUTE_PLANNER_REPLICA_CAP_RPS"] == f"{result['replica_cap_rps']:g}"
        cache = found["cache"]
        assert cache["cache_tokens"] == 64_000
        assert 1 <= cache["slots_per_endpoint"] <= 64_000 // 4064
        assert (cache["resident_how"], cache["resident_s"] > 0) == ("measured", True)
    assert engine.in_flight() == 0


async def test_a_step_that_is_clearly_broken_is_cut_short(engine: Engine) -> None:
    """Ten times what the engine bears: the step ends early, broken, and what it had sent is closed."""
    async with aiohttp.ClientSession(engine.url) as client:
        target = Target(client, engine.url, model="sim-model", speed=20.0)
        measured = await _step(target, Traffic(64, 4000, 8, seed=0), {"ttft": 2.0}, Next(20.0, 100.0))
        assert measured.step.cut
        assert measured.span_s < 100.0
        assert measured.step.requests < measured.sent < 2000
        assert measured.step.share_over({"ttft": 2.0}) > 0.05
        assert len(asyncio.all_tasks()) == 1
        await target.idle()
    assert engine.in_flight() == 0


def test_never_loads_more_than_it_may(engine: Engine, tmp_path: Path) -> None:
    """An SLO that holds at --max-rps is no crossing: exit code 1, and a file that says what is not known."""
    out = tmp_path / "calibration.json"
    limits = ("--slo-ttft-p99-s", 2, "--max-rps", 0.8, "--max-minutes", 0.2)
    done = run("--endpoint", engine.url, *limits, *TRAFFIC, "--out", out, exit_codes=(1,))
    found = json.loads(out.read_text())
    assert found["result"]["censored"] in {"above", "client"}
    assert max(step["rate_rps"] for step in found["steps"]) <= 0.8
    assert "result.censored" in done.stdout
    assert "no crossing was found" in done.stderr


def test_ctrl_c_leaves_nothing_in_flight_and_nothing_written(engine: Engine, tmp_path: Path) -> None:
    """It ends with 130 and one line of words; what was in the file stays; the engine soon has no request."""
    out = tmp_path / "calibration.json"
    out.write_text("before")
    with started(engine, "--out", out) as process:
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, stdout) == (130, "")
    assert "nothing is in flight" in stderr
    assert "Traceback" not in stderr
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]
    end = time.monotonic() + DEADLINE_S
    while engine.in_flight():
        assert time.monotonic() < end, "requests stay in flight"
        time.sleep(0.05)


def test_an_endpoint_that_goes_away_is_told(tmp_path: Path) -> None:
    """It was there when the run began: exit code 5, one line, and no file."""
    out = tmp_path / "calibration.json"
    with running_engine() as engine, started(engine, "--out", out) as process:
        engine.process.kill()
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 5, stderr
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1].startswith("cacheroute: ")
    assert "cannot be reached" in stderr
    assert not out.exists()


def test_an_endpoint_that_is_not_there_is_told() -> None:
    """Exit code 5 and one line that names it."""
    (port,) = free_ports(1)
    done = run("--endpoint", f"http://127.0.0.1:{port}", exit_codes=(5,))
    assert done.stderr.startswith(f"cacheroute: http://127.0.0.1:{port} cannot be reached")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--endpoint", "localhost:8000", "--headroom", 2), "--endpoint 'localhost:8000'"),
        (("--endpoint", "http://127.0.0.1:1", "--rates", "r.csv"), "--rates and --endpoints belong together"),
        (("--endpoint", "http://127.0.0.1:1", "--out", "/proc/none/x"), "--out"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(options: tuple[object, ...], said: str) -> None:
    """Exit code 2 and one line that names the option."""
    done = run(*options, exit_codes=(2,))
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_prompt_that_the_model_does_not_take_is_refused(engine: Engine) -> None:
    """Exit code 2 before any load: the engine takes 8,000 tokens."""
    done = run("--endpoint", engine.url, "--prefix-tokens", 9000, exit_codes=(2,))
    assert "takes 8000" in done.stderr
