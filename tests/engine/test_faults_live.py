"""A real engine without a prefix cache, which the patch must leave alone: it serves, and the status says why."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from tests.engine.attached import answers, attachment_of, environment, mixed, no_hook_left, queue_of

Engines = Callable[..., Any]

pytestmark = pytest.mark.newest


def test_an_engine_without_a_prefix_cache_is_left_alone(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the stock queue and no hook, answers, and refuses orders with the same reason."""
    said = "prefix caching is off"
    with environment(monkeypatch, WAKMAN_POLICY="s3fifo"):
        llm = engines(enable_prefix_caching=False)
    there = attachment_of(llm)
    assert (there.status()["attached"], there.status()["reason"]) == (False, said)
    assert type(queue_of(llm)) is FreeKVCacheBlockQueue
    assert no_hook_left(llm) == []
    assert len(answers(llm, mixed(1, 4))) == 4
    assert said in there.set_mode("arc", "test", "")["error"]
