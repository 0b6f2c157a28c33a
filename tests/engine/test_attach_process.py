"""The EngineCore in a process of its own gets the patch by entry point: attached, switched by RPC, same answers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_model import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.newest


def run(**environ: str) -> dict[str, Any]:
    """Run the program with these variables; return what it told."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "WAKMAN_"))}
    command = [sys.executable, "-m", "tests.engine.engine_program"]
    started = subprocess.Popen(
        command,
        env={**inherited, **ENVIRONMENT, **environ},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = started.communicate(timeout=900)
    finally:
        # Whatever became of the program, its engine goes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    lines = [line for line in log.splitlines() if line.startswith("TOLD ")]
    assert started.returncode == 0, log[-3000:]
    assert len(lines) == 1, log[-3000:]
    told: dict[str, Any] = json.loads(lines[0][5:])
    return {**told, "log": log}


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_by_entry_point_in_the_engines_process(method: str) -> None:
    """Spawned or forked: the entry point attaches in the engine's process, RPC switches it, and no answer changes.

    The worker is a process of its own (`mp`); engines in the tests' own process have theirs beside them (`uni`).
    """
    told = run(VLLM_WORKER_MULTIPROC_METHOD=method)
    start, end = told["start"], told["end"]
    assert told["executor"] == "mp"
    assert start["attached"], start
    assert start["pid"] != told["here"]
    assert (start["policy"], start["mode"], start["support"]) == ("lru", "auto", "tested")
    assert start["shadow"]["up"]
    assert told["answers"]["lru"] == told["answers"]["s3fifo"] == told["answers"]["arc"] == told["answers"]["stock"]
    assert told["hot"]["s3fifo"] > told["hot"]["lru"]
    assert [(entry["from"], entry["to"]) for entry in told["history"]["history"]] == [
        ("lru", "s3fifo"),
        ("s3fifo", "arc"),
    ]
    assert (end["attached"], end["reason"]) == (False, "switched off by test: enough")
    assert not told["shadow_left"]
    assert told["log"].count("wakman: attached: ") == 1


def test_a_misspelt_setting_leaves_the_engine_stock() -> None:
    """An unknown policy in the environment: the engine serves, one line says why it is not attached."""
    told = run(WAKMAN_POLICY="lfu")
    assert told["start"]["attached"] is False
    assert "WAKMAN_POLICY='lfu': unknown policy" in told["start"]["reason"]
    assert len(told["answers"]["stock"]) == 40
    assert told["log"].count("wakman: not attached: ") == 1
