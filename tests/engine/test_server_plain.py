"""`vllm serve` without VLLM_PLUGINS, as most run it: no routes, no metrics of ours; the control file still steers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.attached import mixed
from tests.engine.serving import Server, serving

pytestmark = [pytest.mark.newest, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def control_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control") / "wakman.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, control_file: Path) -> Iterator[Server]:
    environ = {"WAKMAN_CONTROL_FILE": str(control_file)}
    with serving(tmp_path_factory.mktemp("server"), environ) as found:
        yield found


def test_there_are_no_routes_and_no_metrics(server: Server) -> None:
    """Every route is 404 and /metrics has none of our names; the log says that the engine is attached."""
    for path in ("status", "history", "metrics"):
        assert server.ask(f"/v1/wakman/{path}")[0] == 404
    assert server.ask("/v1/wakman/policy", {"policy": "arc"})[0] == 404
    assert not any(name.startswith("wakman_") for name in server.metrics())
    assert "wakman: attached" in server.log


def test_the_control_file_steers(server: Server, control_file: Path) -> None:
    """A switch by the file happens while requests run, is one line in the log, and changes no answer."""
    prompts = mixed(31, 10)
    wanted = [server.complete(tokens) for tokens in prompts]
    for policy, before in (("s3fifo", "lru"), ("arc", "s3fifo"), ("lru", "arc")):
        new = control_file.with_suffix(".new")
        new.write_text(json.dumps({"policy": policy, "actor": "helm", "reason": "a test"}))
        new.chmod(0o644)
        new.rename(control_file)
        until = time.monotonic() + 60
        while f"wakman: {before} -> {policy}" not in server.log:
            assert [server.complete(tokens) for tokens in prompts] == wanted
            assert time.monotonic() < until, server.log[-2000:]
    assert [server.complete(tokens) for tokens in prompts] == wanted
    assert "(file, helm): a test" in server.log
    assert "Traceback" not in server.log
