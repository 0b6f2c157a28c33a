"""Runs the cases of an evaluation in processes of their own, in this interpreter or in that of a vLLM environment.

1. `main` reads one JSON document from standard input: {"settings": …, "cases": [[mix, seed, [name, …]], …],
   "processes": n, "parent": pid}. It writes each finished run as a line of JSON to standard output, in whatever order
   they end.
2. It imports numpy and the standard library alone, and vLLM where the settings ask for its block manager.
3. `run` starts it under the chosen interpreter, hands on each line, and says why when it dies.
4. It ends with whoever started it, and its own processes with it, however that one ends.

Used as `python -m replay.evaluation_process` by `cacheroute engine evaluate`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine_patch.parent import die_with
from replay.evaluation import Settings, run_case
from replay.mixes import Traffic
from replay.scenarios import Recorded
from service.errors import InvalidInput

_PROJECT = Path(__file__).resolve().parents[1]


def run(
    settings: Settings,
    cases: Sequence[tuple[str, int, Sequence[str]]],
    *,
    python: str,
    processes: int,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Run the cases under the interpreter `python`, calling `done` with each result as it comes.

    Raise InvalidInput, with the last words of the process, when it cannot be started or fails.
    """
    order = json.dumps(
        {"settings": asdict(settings), "cases": list(cases), "processes": processes, "parent": os.getpid()}
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(_PROJECT), os.getenv("PYTHONPATH"))))}
    # Each process has work for one core; vLLM's torch would else start threads for all of them.
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    # A file, not a pipe: nobody reads it until the end, and a full pipe would stop the process.
    with tempfile.TemporaryFile("w+") as words:
        try:
            process = subprocess.Popen(
                [python, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env=environment,
            )
        except OSError as exc:
            raise InvalidInput(
                f"the interpreter {python} cannot be started: {exc.strerror}", "give --engine-python PATH"
            ) from exc
        with process:
            _talk(process, order, done)
        words.seek(0)
        lines = words.read().strip().splitlines()
    if process.returncode:
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise InvalidInput(
            f"the evaluation failed under {python}: {last}", "run it there by hand, or use --manager own"
        )


def _talk(process: "subprocess.Popen[str]", order: str, done: Callable[[dict[str, Any]], None]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(order)
        process.stdin.close()
        for line in process.stdout:
            # An engine's libraries write to standard output as they please.
            if line.startswith("{"):
                done(json.loads(line))
    except BrokenPipeError:
        pass
    except BaseException:
        process.terminate()
        raise


def main() -> None:
    """Do what standard input says."""
    order = json.load(sys.stdin)
    die_with(order["parent"])
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in order["settings"].items()
    }
    settings = Settings(**given)
    wanted = {(str(mix), int(seed)): names for mix, seed, names in order["cases"]}
    # Spawned, not forked: vLLM's imports start threads.
    with ProcessPoolExecutor(
        max(1, order["processes"]), mp_context=get_context("spawn"), initializer=die_with, initargs=(os.getpid(),)
    ) as pool:
        futures = [
            pool.submit(_lines, traffic, seed, wanted[traffic.name, seed], settings)
            for traffic, seed in settings.cases()
            if (traffic.name, seed) in wanted
        ]
        for future in as_completed(futures):
            for line in future.result():
                print(json.dumps(line), flush=True)


def _lines(traffic: Traffic | Recorded, seed: int, names: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    return list(run_case(traffic, seed, names, settings))


if __name__ == "__main__":
    main()
