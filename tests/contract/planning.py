"""A `planner run` process whose log lines can be waited for."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


class PlannerProcess:
    """One planner of the endpoints a and b, two slots each; settings by their names."""

    def __init__(self, url: str, pool: str, log: Path, **settings: object) -> None:
        self._log = log
        command = ["planner", "run", "--redis", url, "--pool", pool, "--endpoint", "a", "--endpoint", "b"]
        # One copy a key: how many a rate needs would depend on how long the open window has lasted.
        command += ["--slots", "2", "--replica-cap", "1e6", "--no-gate"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        environ |= {f"CACHEROUTE_PLANNER_{name.upper()}": str(value) for name, value in settings.items()}
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([sys.executable, "-m", "planner.cli", *command], stderr=stderr, env=environ)

    def events(self) -> list[dict[str, object]]:
        """Return the lines that are whole."""
        return [json.loads(line) for line in self._log.read_text().splitlines(keepends=True) if line.endswith("\n")]

    async def until(self, after: int = 0, **wanted: object) -> int:
        """Wait for a line that holds the wanted fields at or after a position; return the position behind it."""
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            for position, event in enumerate(self.events()[after:], start=after):
                if wanted.items() <= event.items():
                    return position + 1
            assert self.process.poll() is None, self._log.read_text()
            await asyncio.sleep(0.02)
        pytest.fail(f"no line with {wanted} in:\n{self._log.read_text()}")

    def end(self) -> None:
        """Kill it, stopped or not."""
        self.process.kill()
        self.process.wait()
