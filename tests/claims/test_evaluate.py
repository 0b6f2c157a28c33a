"""What docs/engine-evaluation.md claims of policies and presets, in a short form: less time, few mixes, our own blocks.

The whole record takes an hour; see the commands in that document. Everything is seeded, so each figure is exact.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replay.evaluation import Settings, run_case, summarise
from replay.mixes import Mix, constant

pytestmark = pytest.mark.timeout(1200)

SECONDS = 1500
SINGLE, AGENTIC = Mix(1, 0, 0), Mix(0, 0.25, 0.75)
SETTINGS = Settings(policies=("lru", "s3fifo", "arc"), presets=("default", "paper"), bounds=False, seeds=(11,))
Runs = Callable[[Mix], dict[str, Any]]


@pytest.fixture(scope="module")
def row() -> Runs:
    """The row of a mix, run once."""
    known: dict[str, dict[str, Any]] = {}

    def find(mix: Mix) -> dict[str, Any]:
        if str(mix) not in known:
            lines = list(run_case(constant(mix, SECONDS), 11, SETTINGS.names(), SETTINGS))
            known[str(mix)] = summarise(lines, SETTINGS)["mixes"][0]
        return known[str(mix)]

    return find


def test_s3fifo_wins_on_single_turns_and_lru_on_agents(row: Runs) -> None:
    """No static policy is the best everywhere (the paper's main finding): more than 5 and 1 points, either way."""
    single, agentic = row(SINGLE)["hit"], row(AGENTIC)["hit"]
    assert single["s3fifo"] > single["lru"] + 0.05
    assert agentic["lru"] > agentic["s3fifo"] + 0.01


def test_the_default_preset_follows_the_traffic(row: Runs) -> None:
    """It recovers most of the gap from LRU on single turns, stays near LRU on agents, and beats the paper's preset."""
    single, agentic = row(SINGLE), row(AGENTIC)
    assert single["recovered"] > 0.8
    assert agentic["hit"]["wakman"] > agentic["hit"]["lru"] - 0.01
    assert single["hit"]["wakman"] > single["hit"]["wakman-paper"]
    assert single["regret"] < 0.03


def test_an_evaluation_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Kept runs are not repeated; a line torn by a crash is said, cut and run again; the document is the same."""
    mixes = tmp_path / "mixes.json"
    mixes.write_text(json.dumps([{"name": "short", "single": 1, "multi": 0, "agentic": 0, "seconds": 120}]))
    out = tmp_path / "runs.jsonl"

    def evaluate() -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "planner.cli", "engine", "evaluate", "--mixes", str(mixes), "--blocks", "2000"),
                *("--manager", "own", "--policies", "lru,arc", "--preset", "default", "--out", str(out), "-o", "json"),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout), done.stderr

    first, _ = evaluate()
    assert set(first["mixes"][0]) >= {"mix", "hit", "best_static", "regret", "recovered", "switches"}
    assert set(first["mixes"][0]["hit"]) == {"lru", "arc", "wakman"}
    again, words = evaluate()
    assert again == first
    assert "4 of 4 runs are in" in words
    whole = out.read_text()
    lines = whole.splitlines()
    out.write_text("\n".join([*lines[:-1], lines[-1][:30]]))
    repaired, words = evaluate()
    assert repaired == first
    assert "1 torn line" in words
    assert "3 of 4 runs are in" in words
    assert sorted(out.read_text().splitlines()) == sorted(lines)
    assert "torn" not in evaluate()[1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--manager", "vlm"], "there are vllm, own"),
        (["--manager", "vllm"], "--engine-python"),
        (["--manager", "vllm", "--engine-python", "/nowhere/python"], "cannot be started"),
        (["--policies", "lru,mru"], "'mru' is unknown"),
        (["--preset", "fast"], "there are default, pair, paper"),
        (["--reading", "bytes"], "there are requests, sessions, session-rate"),
        (["--mixes", "/nowhere.json"], "No such file"),
        (["--only", "1/2/3"], "is not in --mixes"),
        (["--manager", "own", "--only", "100/0/0", "--out", "/nowhere/at/all.jsonl"], "--out"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(arguments: list[str], word: str) -> None:
    """Exit code 2 and one line that says what to do, before anything is run."""
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "engine", "evaluate", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
