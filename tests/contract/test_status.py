"""`cacheroute status` as its users run it: documents, words, exit codes, with real services and a real server."""

import asyncio
import json
import os
import subprocess
import sys
import time
from array import array
from typing import Any, Protocol

import pytest
import yaml

from service.keys import KEY_CHECK, hash_key
from service.plan import Plan
from service.published import EndpointView
from service.store import Store


class Server(Protocol):
    url: str


def plan_of(*endpoints: str) -> Plan:
    return Plan(
        endpoints=endpoints,
        key_hashes=array("Q", [1]),
        target_offsets=array("I", [0, 1]),
        targets=array("I", [0]),
        rates_rps=array("f", [1.0]),
        key_check=hash_key(KEY_CHECK),
    )


def run(*arguments: str, exit_code: int | None = 0) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    done = subprocess.run(
        [sys.executable, "-m", "planner.cli", "status", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert exit_code in (None, done.returncode), done
    assert "Traceback" not in done.stderr
    return done


async def publish(store: Store, *endpoints: str) -> None:
    await store.publish(plan_of(*endpoints), expected=await store.read_head(), actor="", reason="")


async def test_the_documented_fields(valkey: Server, pool: str) -> None:
    """The document is the same in JSON and YAML; the table has every service; words go to standard error."""
    at = ("--redis", valkey.url, "--pool", pool)
    store = Store(valkey.url, pool)
    await publish(store, "a")
    first = (await store.read_head()).epoch
    await publish(store, "a", "b")
    fleet = [EndpointView("a", "10.0.0.1:80", True, False, 2)]
    await store.write_ack("one", version=2, epoch=first, error="", created_at=time.time(), source="redis", fleet=fleet)
    await store.write_ack("two", version=1, epoch=first, error="it is foreign", source="disk", fleet=fleet)
    done = run(*at, "-o", "json")
    document = json.loads(done.stdout)
    assert document.keys() == {"pool", "version", "epoch", "age_s", "instances", "frozen", "endpoints", "overrides"}
    assert (document["pool"], document["version"], document["epoch"]) == (pool, 2, first)
    assert document["overrides"] == []
    one, two = document["instances"]
    assert (one["instance"], one["state"], one["lag_versions"], one["lag_s"], one["source"]) == (
        "one", "in_step", 0, 0.0, "redis",
    )  # fmt: skip
    assert (two["instance"], two["state"], two["lag_versions"], two["error"]) == ("two", "refused", 1, "it is foreign")
    assert two["lag_s"] >= 0
    ages = ["lag_versions", "lag_s", "age_s", "seen_s"]
    assert set(one) == {"instance", "version", "epoch", "state", *ages, "source", "overrides", "error"}
    assert document["endpoints"] == [
        {
            "name": "a",
            "address": "10.0.0.1:80",
            "ready": True,
            "draining": False,
            "inflight": 4,
            "inflight_elsewhere": 0,
            "ready_instances": 2,
            "instances": 2,
        }
    ]
    assert done.stderr == "service two refused: it is foreign\n"
    assert yaml.safe_load(run(*at, "-o", "yaml").stdout).keys() == document.keys()
    table = run(*at).stdout
    assert all(word in table for word in ("one", "two", "refused", "10.0.0.1:80", pool))
    await store.close()


@pytest.mark.parametrize(("said", "code"), [("", 0), ("not ours", 1)])
async def test_check_is_for_scripts(valkey: Server, pool: str, said: str, code: int) -> None:
    """`--check` answers by exit code: 0 in step, 1 when a service is not or none lives; without it the code is 0."""
    at = ("--redis", valkey.url, "--pool", pool)
    nobody = run(*at, "--check", exit_code=1)
    assert f"no service of pool '{pool}' lives" in nobody.stderr
    assert run(*at, exit_code=0).stdout
    store = Store(valkey.url, pool)
    await publish(store, "a")
    head = await store.read_head()
    await store.write_ack("one", version=head.version - bool(said), epoch=head.epoch, error=said)
    run(*at, "--check", exit_code=code)
    run(*at, exit_code=0)
    await store.close()


def test_what_cannot_be_asked() -> None:
    """Exit code 5 when Redis is away, 2 when none or no good one is named; the password is not repeated."""
    assert "cannot be used" in run("--redis", "redis://:hunter2@127.0.0.1:1/0", exit_code=5).stderr
    assert "--redis" in run(exit_code=2).stderr
    done = run("--redis", "redis://:hunter2@h:x", exit_code=2)
    assert "hunter2" not in done.stdout + done.stderr
    assert done.stderr.count("\n") == 1


def test_real_services_tell_of_themselves(valkey: Server, pool: str) -> None:
    """Two services with different fleets: both are listed with what they serve, and the endpoints are merged."""
    at = ("--redis", valkey.url, "--pool", pool)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    serve = [sys.executable, "-m", "planner.cli", "serve", "--listen=127.0.0.1:0", "--http=127.0.0.1:0", *at]
    services = [
        subprocess.Popen(
            [*serve, "--endpoint=shared=127.0.0.1:1", f"--endpoint={name}=127.0.0.1:{port}"],
            env={**environ, "CACHEROUTE_INSTANCE": name, "CACHEROUTE_DRAIN_NOTICE_S": "0"},
            stderr=subprocess.PIPE,
        )
        for name, port in (("one", 2), ("two", 3))
    ]

    async def publish_for_one() -> None:
        store = Store(valkey.url, pool)
        await publish(store, "one")
        await store.close()

    def until(true: Any) -> Any:
        deadline = time.monotonic() + 30
        while not true(document := json.loads(run(*at, "-o", "json").stdout)):
            assert time.monotonic() < deadline, document
        return document

    try:
        until(lambda d: [i["state"] for i in d["instances"]] == ["in_step", "in_step"])
        asyncio.run(publish_for_one())
        found = until(lambda d: [i["state"] for i in d["instances"]] == ["in_step", "refused"])
        assert [(i["instance"], i["version"], i["source"]) for i in found["instances"]] == [
            ("one", 1, "redis"),
            ("two", 0, ""),
        ]
        assert "names none of this fleet's endpoints" in found["instances"][1]["error"]
        assert [(e["name"], e["instances"]) for e in found["endpoints"]] == [("one", 1), ("shared", 2), ("two", 1)]
        run(*at, "--check", exit_code=1)
    finally:
        for service in services:
            service.terminate()
        for service in services:
            service.communicate(timeout=20)
    assert json.loads(run(*at, "-o", "json").stdout)["instances"] == [], "who ends leaves the list at once"
