"""The simulated engine's switcher: it follows, decides, obeys or only shows, and answers as a real engine does."""

import ast
import inspect
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import engine_patch.attachment
from engine_patch.decision import REASONS
from engine_patch.settings import EngineSettings
from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest
from replay.engine_switch import EngineSwitch
from replay.presets import Preset

FAST = Preset("fast", 0.01, 0.005, 1e-5, 0.0, 0.0, 0.0, kv_blocks=60)
BLOCK = 4
SECONDS = 400


def digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=32).digest()


def scan(seconds: int = SECONDS, offset_s: float = 0.0) -> list[tuple[float, EngineRequest]]:
    """Two prefixes of 8 blocks, each back after 90 blocks, a pool and a half, mostly never repeated: LRU loses all."""
    requests = []
    for n in range(seconds):
        shared = [digest("hot", n // 3 % 2, i) for i in range(8)] if n % 3 == 0 else []
        own = [digest("cold", n, i) for i in range(15 - len(shared))]
        requests.append((offset_s + n, EngineRequest(f"{offset_s}-{n}", 60, 2, [*shared, *own])))
    return requests


def engine(mode: str, kv_blocks: int = 60, **options: float) -> tuple[EngineModel, EngineSwitch]:
    """Return an idle engine and its switcher; decisions every 20 s unless told otherwise."""
    model = EngineModel(FAST, kv_blocks, block_size=BLOCK, policy="lru" if mode == "auto" else mode)
    options = {"interval_s": 20.0, "dwell_s": 20.0, **options}
    switch = EngineSwitch(model.cache, EngineSettings(policy=mode, **options))  # type: ignore[arg-type]
    model.follower = switch
    return model, switch


def serve(model: EngineModel, requests: list[tuple[float, EngineRequest]]) -> None:
    for at_s, request in requests:
        model.submit(request, at_s)
    model.advance(requests[-1][0] + 100)


def test_auto_leaves_lru_on_a_scan_and_gains_by_it() -> None:
    """Traffic that LRU cannot serve from cache makes `auto` switch, and more is hit than under LRU."""
    plain, _ = engine("lru")
    serve(plain, scan())
    model, switch = engine("auto")
    serve(model, scan())
    assert plain.hit_tokens == 0
    history = switch.history()
    first = history[0]
    assert [entry["from"] for entry in history] == ["lru", *(entry["to"] for entry in history[:-1])]
    assert all(entry["from"] != entry["to"] for entry in history)
    assert (first["from"], first["cause"], first["actor"]) == ("lru", "auto", "switcher")
    assert first["to"] == first["decision"]["policy"] != "lru"
    assert first["rates"][first["to"]] > first["rates"]["lru"] + switch.settings.margin
    assert model.hit_tokens > 0.1 * model.queried_tokens
    status = switch.status()
    assert status["policy"] == model.cache.policy == switch.history()[-1]["to"]
    assert status["switches"] == len(switch.history())
    decided = status["last_decision"]
    assert decided["reason"] in REASONS
    assert decided["switch"] or decided["live"] == status["policy"]


@settings(max_examples=10, deadline=None)
@given(st.lists(st.floats(0.001, 30.0), min_size=1, max_size=5))
def test_how_often_the_engine_is_looked_at_changes_no_decision(strides: list[float]) -> None:
    """Equal requests at equal virtual times give equal switches at equal times, however the model is advanced."""
    told = []
    for often in (False, True):
        model, switch = engine("auto")
        now_s, turn = 0.0, 0
        for at_s, request in scan(150):
            while often and now_s + strides[turn % len(strides)] < at_s:
                now_s += strides[turn % len(strides)]
                turn += 1
                model.advance(now_s)
            model.submit(request, at_s)
        model.advance(1000.0)
        told.append([(e["decision"]["t"], e["from"], e["to"], e["rates"]) for e in switch.history()])
    assert told[0] == told[1] != []


def test_a_held_policy_is_only_advised() -> None:
    """Once an operator holds a policy, decisions go on being taken and shown, and none is obeyed."""
    model, switch = engine("auto")
    assert switch.set_mode("lru", "me", "I say so")["ok"]
    heard: list[str] = []
    switch.listeners.append(lambda event, told: heard.append(f"{event} {told.get('reason')}"))
    serve(model, scan())
    assert model.cache.policy == "lru"
    assert "decision better" in heard
    assert switch.history() == []


def test_an_engine_that_is_told_its_policy_follows_nothing() -> None:
    """Without `auto` there is no estimator; the first `auto` begins one, warm only after a whole pool of new blocks."""
    model, switch = engine("arc", kv_blocks=2000)
    serve(model, scan(60))
    assert switch.status()["shadow"]["up"] is False
    assert switch.status()["last_decision"] is None
    answer = switch.set_mode("auto", "me", "let it decide")
    assert (answer["from"], answer["to"], answer["mode"]) == ("arc", "arc", "auto")
    reasons: list[str] = []
    switch.listeners.append(lambda _, told: reasons.append(told.get("reason", "")))
    serve(model, scan(300, 1000.0))
    assert switch.status()["shadow"]["up"] is True
    assert "warming" in reasons
    assert reasons[-1] not in {"warming", "evidence"}


def test_off_is_for_good() -> None:
    """`off` goes back to LRU, ends the estimator, says why, and refuses what is ordered afterwards."""
    model, switch = engine("s3fifo")
    switch.set_mode("auto", "me", "to have a shadow")
    assert switch.set_mode("off", "me", "enough")["ok"]
    serve(model, scan(30))
    status = switch.status()
    assert (status["attached"], status["policy"], model.cache.policy) == (False, None, "lru")
    assert "enough" in status["reason"]
    assert status["shadow"]["up"] is False
    assert "not attached" in switch.set_mode("auto", "me", "again")["error"]


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_the_shadow_says_what_the_engine_hits(policy: str) -> None:
    """The live policy's shadow is within a point of the engine's own hit rate: the events tell all that matters."""
    model, switch = engine(policy)
    switch.set_mode("auto", "me", "to have a shadow")
    switch.set_mode(policy, "me", "and to keep the policy")
    serve(model, scan(SECONDS))
    residual = switch.status()["residual"]
    assert residual is not None
    assert abs(residual) <= 0.01


def test_a_reset_and_a_preemption_are_followed() -> None:
    """After a reset the shadow expects no hit, and what is computed anew after a preemption counts for nothing."""
    model, switch = engine("auto", interval_s=5.0)
    serve(model, scan(40))
    model.reset_prefix_cache()
    serve(model, scan(40, 500.0))
    assert abs(switch.status()["residual"]) <= 0.01
    small = EngineModel(FAST, kv_blocks=4, block_size=4, max_seqs=8)
    follower = EngineSwitch(small.cache, EngineSettings(policy="auto", interval_s=1.0))
    small.follower = follower
    for name, prompt, output in (("a", 4, 9), ("b", 7, 4), ("c", 4, 1)):
        small.submit(EngineRequest(name, prompt, output, [digest(name, i) for i in range(4)]), 0.0)
    small.advance(50.0)
    small.submit(EngineRequest("later", 4, 1, [digest("later")]), 100.0)
    small.advance(200.0)
    assert small.preemptions == 1
    assert follower.status()["last_decision"]["requests"] == 3


def test_status_and_history_have_an_attachments_fields() -> None:
    """Whoever reads a real engine's status and history finds the same fields here."""
    tree = ast.parse(inspect.getsource(engine_patch.attachment))
    keys = {
        function.name: {
            key.value
            for node in ast.walk(function)
            if isinstance(node, ast.Dict)
            for key in node.keys
            if isinstance(key, ast.Constant)
        }
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name in {"status", "_note"}
    }
    model, switch = engine("auto")
    serve(model, scan(150))
    assert keys["status"] - {"up", "reason", "error"} <= set(switch.status())
    assert set(switch.history()[0]) == keys["_note"]
