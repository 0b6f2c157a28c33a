"""`cacheroute engine status | policy | history` as their users run them, against servers that answer, refuse or lie."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from engine_patch.policy import POLICIES
from planner.cli.engine_policy import NAMES
from tests.contract.wakman_servers import Engine, constant, listening, patched, run

KEY = "correct-horse"


def test_status_of_several_servers() -> None:
    """All servers and engines are listed in the order given; JSON and YAML agree; the table has what people compare."""
    with patched(Engine(), Engine(policy="arc", mode="arc")) as one, patched(Engine()) as two:
        done = run("status", "--url", one, "--url", f"{two}/", "-o", "json")
        document = json.loads(done.stdout)
        assert done.stderr == ""
        assert [(s["url"], s["error"], len(s["engines"])) for s in document["servers"]] == [(one, "", 2), (two, "", 1)]
        assert [e["policy"] for e in document["servers"][0]["engines"]] == ["lru", "arc"]
        assert yaml.safe_load(run("status", "--url", one, "--url", two, "-o", "yaml").stdout) == document
        table = run("status", "--url", one, "--url", two).stdout
        for words in ("policy", "s3fifo", "0.52", "0.41", "2023-11-14 22:13:20+00:00", "s3fifo would hit 52.0 %", two):
            assert words in table
        listed = run("status", "-o", "json", CACHEROUTE_ENGINE_URLS=f"{one} {two}")
        assert json.loads(listed.stdout) == document


def test_an_order_reaches_every_engine() -> None:
    """`policy` orders all engines of all servers with reason and actor, and prints what each did."""
    engines = [Engine(), Engine(), Engine()]
    with patched(*engines[:2]) as one, patched(engines[2]) as two:
        order = ("policy", "s3fifo", "--url", one, "--url", two, "--reason", "scans", "--actor", "mira")
        document = json.loads(run(*order, "-o", "json").stdout)
        assert [[e["to"] for e in s["engines"]] for s in document["servers"]] == [["s3fifo"] * 2, ["s3fifo"]]
        assert [engine.orders for engine in engines] == [[("s3fifo", "mira", "scans")]] * 3
        table = run("policy", "auto", "--url", one, "--reason", "over").stdout
        assert "auto" in table
        mode, actor, why = engines[0].orders[-1]
        assert (mode, why) == ("auto", "over")
        assert actor
        history = json.loads(run("history", "--url", one, "--limit", "1", "-o", "json").stdout)
        assert [e["why"] for e in history["servers"][0]["engines"][0]["history"]] == ["over"]
        assert "scans" in run("history", "--url", one).stdout


def test_the_key_is_sent() -> None:
    """By option or variable; without it the server refuses, exit code 3, and the key is never printed."""
    with patched(Engine(), key=KEY) as url:
        assert run("status", "--url", url, "--api-key", KEY).stdout
        assert run("status", "--url", url, CACHEROUTE_ENGINE_API_KEY=KEY).stdout
        assert "wants a key; give its own by --api-key" in run("status", "--url", url, exit_code=3).stderr
        wrong = run("policy", "arc", "--url", url, "--reason", "r", "--api-key", "hunter2", exit_code=3)
        assert "refuses the key that it was given" in wrong.stderr
        assert "hunter2" not in wrong.stdout + wrong.stderr
    with constant(403) as url:
        assert "shut off by what stands before it" in run("status", "--url", url, exit_code=3).stderr


def test_an_engine_that_is_not_attached() -> None:
    """`status` says why and exits with 0, with --check 1; an order is refused with exit code 3."""
    left = Engine(attached=False, reason="a KV connector is on", policy=None, mode="off", shadow=None)
    with patched(left) as url:
        assert "not attached: a KV connector is on" in run("status", "--url", url).stderr
        run("status", "--url", url, "--check", exit_code=1)
        done = run("policy", "arc", "--url", url, "--reason", "r", "-o", "json", exit_code=3)
        assert "a KV connector is on" in done.stderr
        assert json.loads(done.stdout)["servers"][0]["engines"][0]["ok"] is False
        assert left.orders == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"shadow": {"up": False}}, "shadow process does not run"),
        ({"shadow": {"up": False}, "mode": "arc"}, ""),
        ({"control_file": {"path": "/etc/w.json", "state": "ignored", "why": "not JSON"}}, "/etc/w.json is ignored"),
        ({"control_file": {"path": "/etc/w.json", "state": "missing", "why": "none yet", "looked_s": 0.7}}, ""),
        ({"control_file": {"path": "/etc/w.json", "state": "gone", "why": "it was removed", "ignored": 3}}, ""),
        ({"control_file": {"path": "/etc/w.json", "state": "obeyed", "looked_s": 90.2}}, "not answered for 90 s"),
        (
            {"shadow": {"up": False, "gave_up": True, "error": "no memory"}},
            "a restart of the engine tries again): no memory",
        ),
    ],
)
def test_check_is_for_scripts(changes: dict[str, Any], words: str) -> None:
    """`--check` is 1 with a sentence when something is amiss: no shadow that `auto` needs, a control file ignored or
    hanging; a file that was removed on purpose is nothing amiss."""
    with patched(Engine(**changes)) as url:
        done = run("status", "--url", url, "--check", exit_code=1 if words else 0)
        assert words in done.stderr
        assert bool(done.stderr) is bool(words)


@pytest.mark.parametrize("changes", [{"attached": False, "reason": "switched off by mira"}, {"shadow": {"up": False}}])
def test_a_shadow_that_has_ended_says_nothing(changes: dict[str, Any]) -> None:
    """After `off`, or while its process is down, no rates, residual or decision are shown as if they were live."""
    rates = {"lru": 0.41, "s3fifo": 0.52}
    told = {"residual": 0.0042, "last_decision": {"text": "s3fifo it is", "rates": rates}, "mode": "lru"}
    with patched(Engine(**told)) as live, patched(Engine(**{**told, **changes})) as ended:
        for words in ("0.0042", "0.52", "s3fifo it is"):
            assert words in run("status", "--url", live).stdout
            assert words not in run("status", "--url", ended).stdout


def test_a_decision_of_before_the_last_switch_says_so() -> None:
    """A decision that was about another live policy (somebody switched since) does not read as today's."""
    decision = {"text": "lru stays, it is the best.", "live": "lru", "switch": False}
    with (
        patched(Engine(policy="lru", last_decision=decision)) as before,
        patched(
            Engine(policy="arc", last_decision=decision),
            Engine(policy="arc", last_decision={**decision, "switch": True}),
        ) as after,
    ):
        assert "(before" not in run("status", "--url", before).stdout
        assert run("status", "--url", after).stdout.count("(before the last switch) lru stays") == 1


def test_who_holds_a_policy_is_said() -> None:
    """A held policy comes with who, since when and why, also where it was live already; one that nobody ordered is the
    environment's; of engines that choose, or that are not attached, nothing is said."""
    order = {"mode": "lru", "cause": "manual", "actor": "mira", "why": "an incident", "at": 1_700_000_000.0}
    held, started = Engine(mode="lru", order=order), Engine(mode="arc", policy="arc", order=None)
    with patched(held, started) as url:
        table = run("status", "--url", url).stdout.split("held", 1)[1]
        rows = [line.split() for line in table.splitlines()[1:]]
        assert rows[0][1:] == ["0", "lru", "2023-11-14", "22:13:20+00:00", "mira", "an", "incident"]
        assert rows[1][-2:] == ["WAKMAN_POLICY", "-"]
    off = Engine(attached=False, reason="switched off by mira", mode="off", order={**order, "mode": "off"})
    with patched(Engine(order={**order, "mode": "auto"}), off) as url:
        assert "held" not in run("status", "--url", url).stdout


def test_an_engine_without_switches_says_so() -> None:
    """An empty history is a sentence, not silence."""
    with patched(Engine()) as url:
        done = run("history", "--url", url)
        assert (done.stdout, done.stderr) == ("", f"{url} engine 0: no switch since its start\n")


def test_help_names_every_policy() -> None:
    """What `policy --help` lists is what there is."""
    assert NAMES.split(", ") == ["auto", *POLICIES, "off"]
    told = " ".join(run("policy", "--help").stdout.split())
    assert NAMES in told


def test_an_unknown_policy_is_refused_by_the_server() -> None:
    """Exit code 3 and the known policies: the server knows them, and may be newer than the command."""
    engine = Engine()
    with patched(engine) as url:
        done = run("policy", "lfu", "--url", url, "--reason", "r", exit_code=3)
        assert "unknown policy 'lfu'; there are auto, lru" in done.stderr
        assert engine.orders == []


def test_servers_that_do_not_answer_as_ours_do() -> None:
    """Each gives one sentence: 5 when it or its engine cannot be reached, 3 when it refuses or is no such server."""
    with constant(404, b"{}") as none, constant(200, b"<html>") as page, constant(200, b"[1]") as other:
        told = run("status", "--url", none, exit_code=3).stderr
        assert "VLLM_PLUGINS=wakman" in told
        assert "WAKMAN_CONTROL_FILE" in told
        for url in (page, other):
            assert "is it a vLLM server?" in run("status", "--url", url, exit_code=3).stderr
    with constant(503, b'{"error": "an engine did not answer within 10 s"}') as silent, constant(502, b"<html>") as bad:
        assert "did not answer within 10 s" in run("status", "--url", silent, exit_code=5).stderr
        assert "answers 502" in run("status", "--url", bad, exit_code=5).stderr
    assert "cannot be reached" in run("status", "--url", "http://127.0.0.1:1", exit_code=5).stderr


def test_the_key_does_not_follow_a_redirect() -> None:
    """A server that sends elsewhere is not followed: the key would go along."""
    asked: list[Mapping[str, str]] = []

    def elsewhere(
        method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        asked.append(headers)
        return 200, b"{}", {}

    with listening(elsewhere) as there, constant(307, Location=f"{there}/v1/wakman/status") as url:
        told = run("status", "--url", url, "--api-key", KEY, exit_code=3).stderr
        assert f"answers 307, a redirect that is not followed; name {there}/v1/wakman/status" in told
    assert asked == []


def test_a_simulated_engine_is_seen_and_steered_alike() -> None:
    """The lab's engines have the same routes: an order to one is obeyed, seen and remembered."""
    command = (sys.executable, "-m", "planner.cli", "sim-engine", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = "http://" + json.loads(process.stderr.readline())["address"]
            run("policy", "s3fifo", "--url", url, "--reason", "scans", "--actor", "mira")
            (engine,) = json.loads(run("status", "--url", url, "-o", "json").stdout)["servers"][0]["engines"]
            assert (engine["attached"], engine["policy"], engine["mode"]) == (True, "s3fifo", "s3fifo")
            assert (engine["order"]["actor"], engine["order"]["why"]) == ("mira", "scans")
            assert "scans" in run("history", "--url", url).stdout
            assert "unknown policy" in run("policy", "lfu", "--url", url, "--reason", "r", exit_code=3).stderr
        finally:
            process.kill()


@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("status", "--url", ""),
        ("policy", "arc", "--url", " , ", "--reason", "r"),
        ("status", "--url", "ftp://host"),
        ("status", "--url", "http://"),
        ("status", "--url", "http://host:99999"),
        ("status", "--url", "http://user:hunter2@host"),
        ("policy", "arc", "--url", "http://127.0.0.1:1"),
        ("policy", "arc", "--url", "http://127.0.0.1:1", "--reason", " "),
        ("history", "--url", "http://127.0.0.1:1", "--limit", "0"),
    ],
)
def test_usage(arguments: tuple[str, ...]) -> None:
    """No server, a URL that is none, no reason: exit code 2, and nobody is asked."""
    done = run(*arguments, exit_code=2)
    assert done.stdout == ""
    assert done.stderr
    assert "hunter2" not in done.stderr
