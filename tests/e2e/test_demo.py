"""The demonstration as its user runs it, shortened: real parts, both policies, a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "planner.cli", "demo"]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a short demonstration in a process of its own."""
    command = [*COMMAND, "--duration", "4", "--rate", "1.5", "--engines", "3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment())


def test_demo_compares_two_policies_and_reports(tmp_path: Path) -> None:
    """Both policies serve the same requests without a failure; the second by a plan; the report has the fields."""
    report, picture = tmp_path / "report.json", tmp_path / "result.svg"
    done = demo("--report", str(report), "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert set(found) == {"verdict", "reason", "seed", "trace", "engines", "requests", "policies"}
    assert found["verdict"] in {"win", "tie", "lose"}
    assert found["engines"] == 3
    flat, cacheroute = found["policies"]
    assert set(flat) == set(cacheroute) == {
        "policy", "requests", "failed", "token_hit_rate", "ttft_p50_s", "ttft_p99_s", "max_over_mean", "planned_share",
        "plan_version",
    }  # fmt: skip
    assert (flat["policy"], flat["plan_version"], flat["planned_share"]) == ("flat-lb", 0, 0.0)
    assert (cacheroute["policy"], cacheroute["plan_version"]) == ("cacheroute", 1)
    assert cacheroute["planned_share"] > 0.5
    for policy in (flat, cacheroute):
        assert policy["requests"] == found["requests"] > 50
        assert policy["failed"] == 0
        assert 0 < policy["ttft_p50_s"] <= policy["ttft_p99_s"]
        assert 0 <= policy["token_hit_rate"] < 1
        assert policy["max_over_mean"] >= 1
    for word in ("flat-lb", "cacheroute", "overlaid", found["reason"]):
        assert word in done.stdout
    assert picture.read_text().startswith("<svg")


def test_demo_with_failed_requests_ends_with_1() -> None:
    """When an engine is killed in the second pass, the result is shown, failures are told, and the exit code is 1."""
    command = [*COMMAND, "--duration", "6", "--rate", "1", "--engines", "2"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert running.stderr is not None
    for line in running.stderr:
        if "pass 2" in line:
            break
    engines = [p for p in psutil.Process(running.pid).children(recursive=True) if "sim-engine" in p.cmdline()]
    assert len(engines) == 2
    engines[0].kill()
    out, err = running.communicate(timeout=90)
    assert running.returncode == 1, err
    assert "requests failed" in err
    assert "WIN" not in out
    assert "cacheroute" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--engines", "0"], "--engines 0"),
        (["--speed", "0"], "--speed 0"),
        (["--rate", "-1"], "--rate -1"),
        (["--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
        (["--report", "/nowhere/report.json"], "/nowhere"),
    ],
)
def test_demo_refuses_before_it_starts(arguments: list[str], told: str) -> None:
    """What cannot be used is told in one line, with exit code 2, and nothing is started."""
    done = demo(*arguments)
    assert done.returncode == 2
    assert told in done.stderr.splitlines()[-1]
    assert "starting" not in done.stderr
