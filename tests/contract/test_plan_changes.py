"""`plan diff`, `explain`, `history`, `rollback` and `freeze` as their users run them, on a real server."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from service.errors import InvalidPlan
from service.keys import KEY_CHECK, format_hash, hash_key
from service.ledger import Ledger
from service.plan import decode
from service.published import EndpointView, verify

DIFF = {
    "keys_changed",
    "keys_changed_fraction",
    "rate_moved_fraction",
    "slots_new_fraction",
    "max_over_mean_before",
    "max_over_mean_after",
    "warmup_tokens",
}


class Server(Protocol):
    url: str


@pytest.fixture
async def ledger(valkey: Server, pool: str) -> AsyncIterator[Ledger]:
    ledger = Ledger(valkey.url, pool)
    yield ledger
    await ledger.close()


@pytest.fixture
def at(valkey: Server, pool: str) -> tuple[str, ...]:
    return ("--redis", valkey.url, "--pool", pool)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run one command without the caller's own settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    whole = [sys.executable, "-m", "planner.cli", *map(str, arguments)]
    return subprocess.run(whole, env=inherited, capture_output=True, text=True, timeout=60)


def run(*arguments: object, exit_code: int | None = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    command = [sys.executable, "-m", "planner.cli", "plan", *map(str, arguments)]
    done = subprocess.run(command, env={**inherited, **environ}, capture_output=True, text=True, timeout=60)
    assert exit_code in (None, done.returncode), done
    assert "Traceback" not in done.stderr
    return done


def document(*arguments: object, **environ: str) -> Any:
    return json.loads(run(*arguments, "-o", "json", **environ).stdout)


def built(folder: Path, name: str, rates: dict[str, float], *options: object) -> Path:
    """Return the file of a plan for the endpoints a and b, with two slots each unless said otherwise."""
    (folder / f"{name}.csv").write_text("key,rate_rps\n" + "".join(f"{k},{v}\n" for k, v in rates.items()))
    (folder / "names").write_text("a\nb\n")
    out = folder / name
    run("build", "--rates", folder / f"{name}.csv", "--endpoints", folder / "names", "--slots", 2, "--replica-cap", 100,
        *options, "--out", out)  # fmt: skip
    return out


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Path, Path]:
    """Two plans: acme and globex change places, and initech gives its slot to umbrella."""
    one = built(tmp_path, "one", {"acme": 8, "globex": 7, "hooli": 2, "initech": 1})
    two = built(tmp_path, "two", {"globex": 8, "acme": 7, "hooli": 2, "umbrella": 1}, "--method", "lpt")
    return one, two


def test_diff_tells_what_moves(plans: tuple[Path, Path], at: tuple[str, ...]) -> None:
    """Of files or versions, the published one when NEW is left out: the documented numbers and each endpoint's load."""
    one, two = plans
    found = document("diff", one, two, "--prefix-tokens", 1000)
    assert set(found) >= DIFF
    assert (found["keys_in_both"], found["admitted"], found["dropped"]) == (3, 1, 1)
    assert (found["keys_changed"], found["keys_changed_fraction"]) == (2, pytest.approx(2 / 3))
    assert found["rate_moved_fraction"] == pytest.approx(15 / 18)
    assert found["slots_new_fraction"] == 0.75
    assert (found["moved_targets"], found["warmup_tokens"]) == (2, 2000)
    assert found["max_over_mean_after"] == pytest.approx(1.0)
    loads = {e["name"]: (e["load_before_rps"], e["load_after_rps"]) for e in found["endpoints"]}
    assert set(loads) == {"a", "b"}
    assert sum(after for _, after in loads.values()) == pytest.approx(18)
    run("publish", one, *at)
    run("publish", two, *at)
    for which in ((1, 2), (1,), (one, 2), (one,)):
        assert document("diff", *which, *at, "--prefix-tokens", 1000) == found
    nothing = document("diff", 2, *at)
    assert (nothing["keys_changed"], nothing["slots_new_fraction"], nothing["warmup_tokens"]) == (0, 0.0, 0)
    assert "load_before_rps" in run("diff", one, two).stdout
    assert yaml.safe_load(run("diff", one, two, "--prefix-tokens", 1000, "-o", "yaml").stdout) == found


def test_diff_says_what_it_cannot_compare(plans: tuple[Path, Path], tmp_path: Path, at: tuple[str, ...]) -> None:
    """A missing file is exit 2, a version that is not there and a plan of another salt exit 3, no Redis named 2."""
    one, _ = plans
    assert "no-such-plan" in run("diff", "no-such-plan", one, exit_code=2).stderr
    assert "version 7 is not in pool" in run("diff", 7, one, *at, exit_code=3).stderr
    assert "has no plan" in run("diff", one, *at, exit_code=3).stderr
    assert "--redis" in run("diff", one, exit_code=2).stderr
    salted = tmp_path / "salted"
    run("build", "--rates", tmp_path / "one.csv", "--endpoints", 2, "--slots", 2, "--replica-cap", 9, "--out", salted,
        CACHEROUTE_KEY_SALT="another salt of 16 bytes")  # fmt: skip
    done = run("diff", one, salted, exit_code=3)
    assert "different salts" in done.stderr
    assert done.stderr.count("\n") == 1
    foreign = run("build", "--rates", tmp_path / "one.csv", "--endpoints", 2, "--slots", 2, "--replica-cap", 9,
                  "--previous", one, exit_code=3)  # fmt: skip
    assert "another pool's" in foreign.stderr


async def test_explain_says_why(plans: tuple[Path, Path], at: tuple[str, ...], ledger: Ledger) -> None:
    """Admitted: rank, copies, and the load of each target; not admitted: where it stands by what is counted now."""
    run("publish", plans[0], *at)
    start_s = int(time.time()) // 30 * 30
    counts = {hash_key(b"acme"): 50, hash_key(b"rare"): 1}
    await ledger.add_rates(start_s, counts, instance="x", batch=1, ttl_s=600, span=(start_s, start_s + 10))
    acme = document("explain", " acme ", *at)
    assert (acme["key_hash"], acme["admitted"], acme["rate_rps"]) == (format_hash(hash_key(b"acme")), True, 8.0)
    assert (acme["rank"], acme["admitted_keys"], acme["copies"], acme["cut_rps"]) == (1, 4, 1, 1.0)
    (target,) = acme["targets"]
    assert (target["name"], target["load_rps"]) == ("a", 9.0)
    assert "by rate it is 1 of 4 keys in the plan" in acme["why"]
    rare = document("explain", "rare", *at)
    assert (rare["admitted"], rare["targets"], rare["rank"]) == (False, [], None)
    assert (rare["rank_now"], rare["keys_now"], rare["rate_now_rps"]) == (2, 2, pytest.approx(0.1, rel=0.2))
    assert "below the cut, 1" in rare["why"]
    done = run("explain", "never-asked", *at)
    assert "no request of it is in the windows" in done.stdout
    assert "never-asked" not in done.stdout + done.stderr, "a key is its hash in all that is printed"
    run("publish", plans[1], *at)
    assert document("explain", "initech", "--version", 1, *at)["admitted"]
    assert not document("explain", "initech", *at)["admitted"]
    salted = run("explain", "acme", *at, exit_code=3, CACHEROUTE_KEY_SALT="another salt of 16 bytes")
    assert "salt" in salted.stderr


async def test_rollback_publishes_an_earlier_plan_as_a_new_version(
    plans: tuple[Path, Path], at: tuple[str, ...], ledger: Ledger
) -> None:
    """Versions never go back; the log has who and why; a dry run and a wrong --if-version publish nothing."""
    one, two = plans
    assert "before version 0" in run("rollback", "--reason", "x", *at, exit_code=3).stderr
    run("publish", one, *at)
    assert "no plan before version 1" in run("rollback", "--reason", "x", *at, exit_code=3).stderr
    run("publish", two, *at)
    dry = document("rollback", "--reason", "it is slow", "--dry-run", *at)
    assert (dry["version"], dry["rolled_back_to"], dry["dry_run"]) == (3, 1, True)
    assert set(dry["changes"]) >= DIFF
    assert dry["changes"]["keys_changed"] == 2
    run("rollback", "--reason", "x", "--if-version", 1, *at, exit_code=4)
    assert (await ledger.read_head()).version == 2
    done = run("rollback", "--reason", "it is slow", "--actor", "me", "--if-version", 2, *at, "-o", "json")
    assert json.loads(done.stdout)["version"] == 3
    assert "plan freeze" in done.stderr
    head = await ledger.read_head()
    plan = verify(await ledger.read_plan_bytes(3), head, key_check=hash_key(KEY_CHECK))
    assert plan.content_sha256() == decode(one.read_bytes()).content_sha256()
    assert (head.actor, head.reason) == ("me", "Rollback to version 1: it is slow")
    assert document("rollback", "--to", 2, "--reason", "x", *at)["version"] == 4
    assert "--reason" in run("rollback", *at, exit_code=2).stderr
    assert "--reason is empty" in run("rollback", "--reason", " ", *at, exit_code=2).stderr


async def test_what_cannot_be_rolled_back_to(plans: tuple[Path, Path], at: tuple[str, ...], ledger: Ledger) -> None:
    """A version that is gone, of another salt, or for endpoints that no service has: exit 3, nothing is published."""
    one, two = plans
    run("publish", one, *at)
    run("publish", two, *at)
    assert "version 9 is not in pool" in run("rollback", "--to", 9, "--reason", "x", *at, exit_code=3).stderr
    run("rollback", "--to", 2, "--reason", "x", *at, exit_code=3)
    salted = run("rollback", "--reason", "x", *at, exit_code=3, CACHEROUTE_KEY_SALT="another salt of 16 bytes")
    assert "salt" in salted.stderr
    fleet = [EndpointView("z", "10.0.0.1:80", True, False, 0)]
    await ledger.write_ack("one", version=2, epoch=1, error="", fleet=fleet)
    assert "names none of the endpoints that services have" in run("rollback", "--reason", "x", *at, exit_code=3).stderr
    assert (await ledger.read_head()).version == 2


async def test_a_reader_in_the_middle_of_a_fetch_gets_its_plan(
    plans: tuple[Path, Path], valkey: Server, pool: str, ledger: Ledger
) -> None:
    """Whoever has read the head finds those bytes, however many publications come before it fetches them."""
    plan = decode(plans[0].read_bytes())
    stop = threading.Event()

    def publish_on() -> None:
        async def go() -> None:
            mine = Ledger(valkey.url, pool)
            for _ in range(60):
                await mine.publish(plan, expected=await mine.read_head(), actor="", reason="")
            await mine.close()
            stop.set()

        asyncio.run(go())

    publisher = threading.Thread(target=publish_on)
    publisher.start()
    reads = 0
    while not stop.is_set() or not reads:
        head = await ledger.read_head()
        await asyncio.sleep(0.01)
        if head.version:
            verify(await ledger.read_plan_bytes(head.version), head, key_check=hash_key(KEY_CHECK))
            reads += 1
    publisher.join()
    kept = []
    for version in range(1, 61):
        ttl = await ledger._redis.ttl(ledger._key("plan", version))
        kept += [version] if ttl == -1 else []
    assert kept == list(range(51, 61))
    with pytest.raises(InvalidPlan):
        await ledger.read_plan_bytes(61)


async def test_a_freeze_is_seen_everywhere_and_ends(
    plans: tuple[Path, Path], at: tuple[str, ...], ledger: Ledger
) -> None:
    """Planners record it and publish nothing, operators publish; history and status show it; --off and --ttl end it."""
    frozen = document("freeze", "--reason", "migration", "--actor", "me", *at)["frozen"]
    assert (frozen["actor"], frozen["reason"], frozen["until"]) == ("me", "migration", None)
    assert document("history", *at)["frozen"] == frozen
    status = command("status", *at, "-o", "json")
    assert json.loads(status.stdout)["frozen"] == frozen
    assert "frozen by me: migration" in status.stderr
    await ledger.add_rates(int(time.time()) // 30 * 30, {1: 5}, instance="x", batch=1, ttl_s=600)
    planner = ("planner", "once", *at, "--endpoint", "a", "--slots", 1, "--replica-cap", 9, "-o", "json")
    once = command(*planner)
    assert (once.returncode, json.loads(once.stdout)["decision"]) == (0, "frozen")
    run("publish", plans[0], *at)
    assert document("freeze", "--off", "--actor", "you", *at)["frozen"] is None
    assert document("freeze", "--off", *at)["frozen"] is None
    assert json.loads(command(*planner).stdout)["version"] == 2
    brief = document("freeze", "--reason", "an hour", "--ttl", "1h", *at)["frozen"]
    assert brief["until"] == pytest.approx(time.time() + 3600, abs=60)
    assert 3500 < await ledger._redis.ttl(ledger._key("freeze")) <= 3600
    kinds = [(e["kind"], e["actor"]) for e in document("history", *at)["entries"]]
    kinds.reverse()
    assert [k for k, _ in kinds] == ["freeze", "cycle", "publication", "unfreeze", "publication", "freeze"]
    assert kinds[0] == ("freeze", "me")
    for wrong in (
        ("--ttl", "2h"),
        ("--reason", "x", "--ttl", "soon"),
        ("--off", "--ttl", "1h"),
        ("--reason", "x", "--ttl", "0s"),
    ):
        run("freeze", *wrong, *at, exit_code=2)


async def test_history_has_publications_and_cycles(
    plans: tuple[Path, Path], at: tuple[str, ...], ledger: Ledger
) -> None:
    """Newest first; a cycle that published is one entry with its publication; what can be rolled back to is marked."""
    assert document("history", *at)["entries"] == []
    run("publish", plans[0], "--actor", "me", "--reason", "first", *at)
    lease = (await ledger.lead("one", ttl_s=60)).value
    done = {"planner": "one", "trigger": "timer", "version": 2, "admitted": 4, "sha256": "ab"}
    plan, head = decode(plans[1].read_bytes()), await ledger.read_head()

    def record(published: Any) -> str:
        return json.dumps({**done, "decision": "published", "epoch": published.epoch, "reason": "better"})

    await ledger.publish(plan, expected=head, actor="planner", reason="better", lease=lease, record=record)
    kept = {**done, "decision": "kept", "epoch": head.epoch, "reason": "no gain"}
    await ledger.record(lease, json.dumps(kept))
    await ledger.record(lease, json.dumps(kept))
    found = document("history", *at)
    assert (found["version"], found["epoch"], found["frozen"]) == (2, head.epoch, None)
    newest, second, first = found["entries"]
    assert (newest["kind"], newest["decision"], newest["reason"], newest["actor"]) == (
        "cycle",
        "kept",
        "no gain",
        "one",
    )
    assert (second["kind"], second["decision"], second["version"], second["keys"]) == ("publication", "published", 2, 4)
    assert (first["decision"], first["actor"], first["reason"], first["kept"]) == ("operator", "me", "first", True)
    assert first["sha256"] == (await ledger.read_log())[-1].sha256
    assert len(document("history", "--limit", 1, *at)["entries"]) == 1
    assert "no gain" in run("history", *at).stdout
    for _ in range(10):
        await ledger.publish(plan, expected=await ledger.read_head(), actor="", reason="")
    assert not document("history", "--limit", 100, *at)["entries"][-1]["kept"]


def test_a_server_that_is_away_exits_5(plans: tuple[Path, Path]) -> None:
    """Every command that needs Redis says in one line that it cannot be used."""
    away = ("--redis", "redis://127.0.0.1:1/0")
    for command in (("history",), ("rollback", "--reason", "x"), ("freeze", "--reason", "x")):
        done = run(*command, *away, exit_code=5)
        assert done.stderr.count("\n") == 1
