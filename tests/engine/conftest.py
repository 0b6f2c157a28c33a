"""What the tests inside vLLM share: an offline environment without settings of ours, and engines in this process.

1. vLLM reads its environment once, at the first import: it is set here, before any test is collected.
2. An engine in this process takes about 3 s and holds process-wide state, so one is alive at a time; `engines` ends the
   one before it and cleans up behind it.
"""

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.tiny_model import ENGINE, ENVIRONMENT, tiny_model

os.environ.update(ENVIRONMENT)
# The EngineCore lives in this process; tests that want it in its own start a program.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# A test's engine gets the plugin when the test asks for it.
os.environ["VLLM_PLUGINS"] = ""
for _name in [name for name in os.environ if name.startswith("WAKMAN_")]:
    del os.environ[_name]

try:
    import vllm
except ModuleNotFoundError as exc:
    raise pytest.UsageError("tests/engine runs in vLLM's environment: make engine") from exc


@pytest.fixture(scope="session")
def vllm_version() -> tuple[int, ...]:
    """The version under test, (0, 32) for 0.32.0."""
    return tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., Any]]:
    """Starts `vllm.LLM` on the tiny model in this process, `ENGINE` changed by the arguments; one at a time."""
    alive: list[Any] = []

    def start(**changes: Any) -> Any:
        _end(alive)
        alive.append(vllm.LLM(**{"model": tiny_model(), **ENGINE, **changes}))
        return alive[-1]

    yield start
    _end(alive)


def _end(alive: list[Any]) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    if not alive:
        return
    core = alive.pop().llm_engine.engine_core
    core.shutdown()
    del core
    cleanup_dist_env_and_memory()
    gc.collect()
