"""`cacheroute plan` and `cacheroute planner` as their users run them: documents, exit codes, words, a real server."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml

from service.keys import KEY_CHECK, format_hash, hash_key
from service.plan import decode
from service.store import Store

REPORT = {
    "keys",
    "rate_rps",
    "endpoints",
    "slots_per_endpoint",
    "slots_used",
    "admitted",
    "admitted_rate_share",
    "max_copies",
    "max_over_mean",
    "outcome",
    "build_ms",
    "sha256",
}


class Server(Protocol):
    url: str


def run(*arguments: object, exit_code: int | None = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run one command without the caller's own settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", *map(str, arguments)],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert exit_code in (None, done.returncode), done
    assert "Traceback" not in done.stderr
    return done


def document(*arguments: object, **environ: str) -> Any:
    return json.loads(run(*arguments, "-o", "json", exit_code=0, **environ).stdout)


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "rates.csv"
    path.write_text("key,rate_rps\nacme,8\nglobex,3\ninitech,2\nhooli,1\n")
    return path


@pytest.fixture
def plan(tmp_path: Path, rates: Path) -> Path:
    path = tmp_path / "plan"
    run(*build(rates), "--out", path)
    return path


def build(rates: Path, **changed: object) -> list[object]:
    options = {"endpoints": 3, "slots": 2, "replica_cap": 4} | changed
    return [
        "plan",
        "build",
        "--rates",
        rates,
        *(x for k, v in options.items() for x in ("--" + k.replace("_", "-"), v)),
    ]


def test_build_prints_one_document_and_writes_the_same_bytes_each_time(tmp_path: Path, rates: Path) -> None:
    """JSON holds exactly the documented fields, its sha256 is the file's, and the order of rows changes no byte."""
    one, two = tmp_path / "one", tmp_path / "two"
    report = document(*build(rates), "--out", one)
    assert set(report) == REPORT
    assert (report["keys"], report["admitted"], report["slots_used"], report["max_copies"]) == (4, 4, 5, 2)
    assert report["sha256"] == hashlib.sha256(one.read_bytes()).hexdigest()
    header, *lines = rates.read_text().splitlines()
    rates.write_text("\n".join([header, *reversed(lines)]))
    as_yaml = yaml.safe_load(run(*build(rates), "--out", two, "-o", "yaml").stdout)
    assert one.read_bytes() == two.read_bytes()
    assert set(as_yaml) == REPORT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "rates.csv", "two"]


def test_a_table_has_no_colours_or_lines_when_piped(rates: Path) -> None:
    """Piped tables are plain aligned columns."""
    out = run(*build(rates)).stdout
    assert out.splitlines()[0].split() == ["field", "value"]
    assert out.isascii()
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"endpoints": 0}, "--endpoints 0"),
        ({"endpoints": "no-such-file"}, "no-such-file"),
        ({"slots": 0, "replica_cap": 0}, "--replica-cap 0"),
        ({"method": "guess"}, "guess"),
        ({"slots": "many"}, "--slots"),
        ({"sloots": 3}, "--sloots"),
        ({"out": "/nonexistent/plan"}, "/nonexistent/plan"),
    ],
)
def test_unusable_options_exit_2_and_name_themselves(rates: Path, changed: dict[str, object], words: str) -> None:
    """Bad usage and unreadable input exit 2 with nothing on standard output."""
    done = run(*build(rates, **changed), exit_code=2)
    assert words in done.stderr
    assert done.stdout == ""


def test_a_fault_in_the_rates_exits_2_and_leaves_an_earlier_plan(plan: Path, rates: Path) -> None:
    """A malformed CSV is one line on standard error; the file that --out names stays as it was."""
    before = plan.read_bytes()
    rates.write_text("key,rate_rps\nacme,8\nacme,9\n")
    done = run(*build(rates), "--out", plan, exit_code=2)
    assert f"{rates} line 3 column 'key': 'acme' stands on line 2 too" in done.stderr
    assert done.stderr.count("\n") == 1
    assert plan.read_bytes() == before


def test_publish_and_show(valkey: Server, pool: str, plan: Path) -> None:
    """What is published is shown from Redis by default, by version, and equals what the file shows."""
    at = ("--redis", valkey.url, "--pool", pool)
    first = document("plan", "publish", plan, "--actor", "me", "--reason", "try", *at)
    assert set(first) == {"version", "epoch"}
    assert first["version"] == 1
    assert document("plan", "publish", plan, CACHEROUTE_REDIS_URL=valkey.url, CACHEROUTE_POOL=pool)["version"] == 2
    shown, earlier, file = (document("plan", "show", *which, *at) for which in ((), ("1",), (plan,)))
    assert (shown["version"], earlier["version"], file["version"]) == (2, 1, 0)
    assert (earlier["actor"], earlier["reason"], earlier["epoch"]) == ("me", "try", first["epoch"])
    assert shown["sha256"] == earlier["sha256"] == file["sha256"] == hashlib.sha256(plan.read_bytes()).hexdigest()
    assert shown["assignments"] == file["assignments"]
    assert shown["assignments"][0] == {
        "key_hash": format_hash(hash_key(b"acme")),
        "rate_rps": 8.0,
        "targets": ["endpoint-0", "endpoint-1"],
    }
    assert [e["slots_used"] for e in shown["endpoints"]] == [2, 1, 2]
    assert "hottest 1 of 4 keys" in run("plan", "show", "--limit", 1, *at).stdout


def test_publication_upon_another_version_is_a_conflict(valkey: Server, pool: str, plan: Path) -> None:
    """--if-version that is not the published one exits 4 and names both; with the right one it publishes."""
    at = ("--redis", valkey.url, "--pool", pool)
    done = run("plan", "publish", plan, "--if-version", 3, *at, exit_code=4)
    assert "expected plan version 3" in done.stderr
    assert document("plan", "publish", plan, "--if-version", 0, *at)["version"] == 1
    run("plan", "publish", plan, "--if-version", 0, *at, exit_code=4)
    assert document("plan", "show", *at)["version"] == 1


def test_what_services_would_refuse_is_not_published(valkey: Server, pool: str, plan: Path, rates: Path) -> None:
    """Bytes that are no plan, and a plan of another salt, exit 3; a missing file exits 2; nothing is published."""
    at = ("--redis", valkey.url, "--pool", pool)
    run("plan", "publish", rates, *at, exit_code=3)
    assert (
        "CACHEROUTE_KEY_SALT"
        in run("plan", "publish", plan, *at, exit_code=3, CACHEROUTE_KEY_SALT="another salt of 16 bytes").stderr
    )
    run("plan", "publish", "no-such-plan", *at, exit_code=2)
    assert f"pool '{pool}' has no plan" in run("plan", "show", *at, exit_code=3).stderr


def test_a_server_that_is_away_exits_5(plan: Path) -> None:
    """Redis that does not answer is exit code 5 with its address; no Redis at all is exit code 2 with the remedy."""
    assert "127.0.0.1:1" in run("plan", "publish", plan, "--redis", "redis://127.0.0.1:1/0", exit_code=5).stderr
    assert "CACHEROUTE_REDIS_URL" in run("plan", "publish", plan, exit_code=2).stderr


async def test_once_plans_from_the_counts_and_prints_its_record(valkey: Server, pool: str) -> None:
    """One cycle: the record as JSON, and the plan it names is the published one."""
    options = ["--redis", valkey.url, "--pool", pool, "--endpoint", "a=10.0.0.1:80", "--endpoint", "b=10.0.0.2:80"]
    command = ["planner", "once", *options, "--slots", 2, "--replica-cap", 100, "--windows", 4]
    assert f"no service counted a request of pool '{pool}'" in run(*command).stderr
    store, start_s = Store(valkey.url, pool), int(time.time()) // 5 * 5
    await store.add_rates(start_s, {hash_key(b"acme"): 5, hash_key(b"hooli"): 1}, instance="x", batch=1, ttl_s=60)
    record = document(*command, CACHEROUTE_RATE_WINDOW_S="5")
    assert (record["decision"], record["version"], record["keys"], record["admitted"]) == ("published", 1, 2, 2)
    plan = decode(await store.read_plan_bytes(1), key_check=hash_key(KEY_CHECK))
    assert (plan.content_sha256(), plan.endpoints) == (record["sha256"], ("a", "b"))
    await store.close()


@pytest.mark.parametrize(
    ("options", "environ", "words"),
    [
        ([], {}, ["--redis", "--endpoint", "--slots", "--replica-cap", "CACHEROUTE_PLANNER_REPLICA_CAP_RPS"]),
        (["--endpoint", "a", "--endpoint", "a", "--slots", "0"], {}, ["a stands twice", "--slots", "= 0"]),
        (["--endpoint", "a=nowhere"], {}, ["'nowhere' is not HOST:PORT"]),
        ([], {"CACHEROUTE_PLANNER_SLOTS": "2"}, ["CACHEROUTE_PLANNER_SLOTS", "CACHEROUTE_PLANNER_SLOTS_PER_ENDPOINT"]),
        ([], {"CACHEROUTE_POOOL": "x"}, ["CACHEROUTE_POOOL", "CACHEROUTE_POOL"]),
        ([], {"CACHEROUTE_RATE_WINDOW_S": "0"}, ["CACHEROUTE_RATE_WINDOW_S", "--redis"]),
        (["--epsilon", "-0.1"], {}, ["--epsilon (CACHEROUTE_PLANNER_EPSILON) = -0.1"]),
        ([], {"CACHEROUTE_PLANNER_EPSILON": "nan", "CACHEROUTE_PLANNER_RESIDENCY": "-1"}, ["EPSILON", "RESIDENCY"]),
    ],
)
@pytest.mark.parametrize("mode", ["once", "run"])
def test_settings_are_refused_all_at_once(
    mode: str, options: list[str], environ: dict[str, str], words: list[str]
) -> None:
    """Every missing, wrong or unknown setting is named in one line, with exit code 2."""
    done = run("planner", mode, *options, exit_code=2, **environ)
    assert all(word in done.stderr for word in words), done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_from_the_environment(valkey: Server, pool: str) -> None:
    """Everything can come from variables, lists comma-separated."""
    record = document(
        "planner",
        "once",
        CACHEROUTE_REDIS_URL=valkey.url,
        CACHEROUTE_POOL=pool,
        CACHEROUTE_PLANNER_ENDPOINT="a, b=10.0.0.1:80",
        CACHEROUTE_PLANNER_SLOTS_PER_ENDPOINT="2",
        CACHEROUTE_PLANNER_REPLICA_CAP_RPS="1.5",
    )
    assert record["decision"] == "no_rates"


@pytest.mark.parametrize("group", [["plan"], ["plan", "build"], ["planner", "once"]])
def test_help_names_the_commands(group: list[str]) -> None:
    """--help exits 0."""
    assert "Usage" in run(*group, "--help").stdout


def test_publish_tells_which_services_refuse(valkey: Server, pool: str, rates: Path, tmp_path: Path) -> None:
    """A plan for other endpoints is published, refused by the service, and told with exit code 1; its own is served."""
    names, foreign, own = tmp_path / "names", tmp_path / "foreign.plan", tmp_path / "own.plan"
    names.write_text("vllm-0=127.0.0.1:1\n")
    build = ("plan", "build", "--rates", rates, "--slots", 4, "--replica-cap", 100)
    run(*build, "--endpoints", 2, "--out", foreign)
    run(*build, "--endpoints", names, "--out", own)
    at = ("--redis", valkey.url, "--pool", pool)
    serve = [sys.executable, "-m", "planner.cli", "serve", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    environ["CACHEROUTE_INSTANCE"] = "one"
    service = subprocess.Popen([*serve, "--endpoint=vllm-0=127.0.0.1:1", *at], env=environ, stderr=subprocess.PIPE)
    try:
        assert service.stderr is not None
        assert b"serving" in service.stderr.readline()
        deadline = time.monotonic() + 30
        while run("plan", "publish", foreign, *at, exit_code=None).returncode != 1:
            assert time.monotonic() < deadline, "its first ack makes it known; until then nobody is waited for"
        refused = run("plan", "publish", foreign, *at, "-o", "json", exit_code=1)
        assert set(json.loads(refused.stdout)) == {"version", "epoch"}
        assert "service one refuses it" in refused.stderr
        assert "names none of this fleet's endpoints" in refused.stderr
        assert run("plan", "publish", own, *at).stderr == ""
    finally:
        service.terminate()
        service.communicate(timeout=20)


@pytest.mark.parametrize(
    ("options", "word"),
    [(["--epsilon", "-0.1"], "--epsilon"), (["--epsilon", "nan"], "--epsilon"), (["--residency", "-1"], "--residency")],
)
def test_a_rule_out_of_range_is_refused(
    valkey: Server, pool: str, rates: Path, tmp_path: Path, options: list[str], word: str
) -> None:
    """A parameter of the rules that is out of its range is one line and exit code 3, and nothing is written."""
    plan = tmp_path / "plan"
    done = run(*build(rates), "--out", plan, *options, exit_code=3)
    assert word in done.stderr
    assert done.stderr.count("\n") == 1
    assert not plan.exists()
    name = f"CACHEROUTE_PLANNER_{word[2:].upper()}"
    at = ["--redis", valkey.url, "--pool", pool, "--endpoint", "a", "--slots", "2", "--replica-cap", "1"]
    done = run("planner", "once", *at, exit_code=3, **{name: options[1]})
    assert name in done.stderr
    assert done.stderr.count("\n") == 1
