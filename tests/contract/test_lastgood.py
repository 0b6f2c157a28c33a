"""The table on disk: written whole, believed no more than Redis, and served by a start that Redis does not answer."""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from replay.processes import free_ports
from service.errors import InvalidInput
from service.feed import Feed
from service.files import check_folder
from service.fleet import Fleet
from service.keys import KEY_CHECK, hash_key
from service.lastgood import LastGood
from service.pb import ext_proc_pb2 as pb
from service.plan import Plan, encode
from service.published import Head
from service.rates import Rates
from service.settings import ServiceSettings, load_settings
from service.store import Store
from service.table import Current
from service.telemetry import Telemetry

SALT = "a salt that is long enough"


class Server(Protocol):
    url: str

    def kill(self) -> None: ...
    def start(self) -> None: ...


def plan_of(*keys: int, version: int = 3, endpoints: tuple[str, ...] = ("a", "b"), salt: str = "") -> Plan:
    plan = Plan(
        endpoints=endpoints,
        key_hashes=array("Q", keys),
        target_offsets=array("I", range(len(keys) + 1)),
        targets=array("I", [1] * len(keys)),
        rates_rps=array("f", [1.0] * len(keys)),
        key_check=hash_key(KEY_CHECK, salt.encode()),
    )
    return plan.published(version=version, epoch=7, created_at=1000.0, actor="me", reason="why")


def with_head(plan: Plan) -> tuple[bytes, Head]:
    data = encode(plan)
    sha256 = hashlib.sha256(data).hexdigest()
    return data, Head(plan.version, plan.epoch, sha256, plan.created_at, plan.actor, plan.reason)


class Disk:
    """One process's view of the folder."""

    def __init__(self, folder: Path, **given: object) -> None:
        check_folder("CACHEROUTE_STATE_DIR", folder)  # as a start does
        endpoint = ("a=10.0.0.1:80", "b=10.0.0.2:80")
        chosen: dict[str, object] = {"endpoint": endpoint, "pool": "p", "redis_url": "redis://127.0.0.1:1", **given}
        self.settings: ServiceSettings = load_settings({}, state_dir=str(folder), **chosen)
        self.telemetry = Telemetry(CollectorRegistry())
        self.copy = LastGood(self.settings, self.telemetry)

    def failures(self, cause: str) -> float:
        name = "cacheroute_table_file_failures_total"
        return self.telemetry.registry.get_sample_value(name, {"cause": cause}) or 0.0


async def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """The next process serves the same table, and knows where it has it from."""
    await Disk(tmp_path / "state").copy.save(*with_head(plan_of(5, 6)))
    table = await Disk(tmp_path / "state").copy.load()
    assert table is not None
    assert (table.version, table.epoch, table.created_at, table.source) == (3, 7, 1000.0, "disk")
    assert table.targets == {5: ("b",), 6: ("b",)}
    assert table.sha256 == with_head(plan_of(5, 6))[1].sha256
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["p.plan"], "nothing else is left"


async def test_without_the_setting_nothing_is_kept(tmp_path: Path) -> None:
    """No folder is named by default: nothing is read or written, and nothing fails."""
    settings = load_settings({}, endpoint=("a=10.0.0.1:80",))
    copy = LastGood(settings, Telemetry(CollectorRegistry()))
    await copy.save(*with_head(plan_of(1)))
    assert await copy.load() is None
    assert await Disk(tmp_path).copy.load() is None, "an empty folder is no fault"
    assert Disk(tmp_path).failures("unreadable") == 0


def head_line(path: Path) -> tuple[dict[str, Any], bytes]:
    line, _, data = path.read_bytes().partition(b"\n")
    return json.loads(line), data


def with_fields(path: Path, **fields: object) -> None:
    head, data = head_line(path)
    path.write_bytes(json.dumps({**head, **fields}).encode() + b"\n" + data)


HARMS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "empty": ("corrupt", lambda path: path.write_bytes(b"")),
    "garbage": ("corrupt", lambda path: path.write_bytes(os.urandom(5000))),
    "nested": ("corrupt", lambda path: path.write_bytes(b"[" * 60000)),
    "half a head": ("corrupt", lambda path: path.write_bytes(path.read_bytes()[:40])),
    "half a plan": ("checksum", lambda path: path.write_bytes(path.read_bytes()[:-3])),
    "a bit more": ("checksum", lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "one bit": ("checksum", lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x7f")),
    "another version": ("version", lambda path: with_fields(path, version=9)),
    "no number": ("corrupt", lambda path: with_fields(path, version="new")),
    "infinite": ("corrupt", lambda path: with_fields(path, epoch=float("inf"))),
    "a format to come": ("format", lambda path: with_fields(path, format="cacheroute-table-2")),
    "another pool": ("pool", lambda path: with_fields(path, pool="q")),
    "a folder": ("unreadable", lambda path: (path.unlink(), path.mkdir())),
}


@pytest.mark.parametrize("harm", HARMS)
async def test_a_file_that_cannot_be_used_is_told_and_left(tmp_path: Path, harm: str) -> None:
    """One log line with what to do, one counter by cause, no table; and what comes next is written over it."""
    await Disk(tmp_path).copy.save(*with_head(plan_of(5)))
    cause, do = HARMS[harm]
    do(tmp_path / "p.plan")
    disk = Disk(tmp_path)
    with capture_logs() as lines:
        assert await disk.copy.load() is None
    assert [(line["log_level"], line["cause"], line["path"]) for line in lines] == [
        ("error", cause, str(tmp_path / "p.plan"))
    ]
    assert "replaced with the next plan" in lines[0]["error"] or "right to read" in lines[0]["error"]
    assert disk.failures(cause) == 1
    if harm != "a folder":
        await disk.copy.save(*with_head(plan_of(5)))
        assert await Disk(tmp_path).copy.load() is not None


async def test_a_table_of_another_salt_is_not_served(tmp_path: Path) -> None:
    """Every key would miss in silence, so it is refused like one from Redis, by the same cause."""
    await Disk(tmp_path).copy.save(*with_head(plan_of(5)))
    disk = Disk(tmp_path, key_salt=SALT)
    assert await disk.copy.load() is None
    assert disk.failures("salt") == 1
    await Disk(tmp_path, key_salt=SALT).copy.save(*with_head(plan_of(5, version=4, salt=SALT)))
    assert await Disk(tmp_path, key_salt=SALT).copy.load() is not None


async def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Who finds its own plan writes nothing, who is late leaves a newer one, readers see whole files only."""
    disks = [Disk(tmp_path) for _ in range(6)]
    await disks[0].copy.save(*with_head(plan_of(1)))
    written = (tmp_path / "p.plan").stat().st_ino
    await disks[1].copy.save(*with_head(plan_of(1)))
    assert (tmp_path / "p.plan").stat().st_ino == written
    await disks[1].copy.save(*with_head(plan_of(1, version=2)))
    assert head_line(tmp_path / "p.plan")[0]["version"] == 3
    seen: set[int] = set()

    async def read() -> None:
        for _ in range(60):
            table = await Disk(tmp_path).copy.load()
            assert table is not None
            seen.add(table.version)

    plans = [with_head(plan_of(*range(1000), version=version)) for version in range(4, 40)]
    await asyncio.gather(read(), *(disk.copy.save(*plan) for plan in plans for disk in disks))
    assert len(seen) > 1, "reading and writing went on together"
    assert [path.name for path in tmp_path.iterdir()] == ["p.plan"]


async def test_a_disk_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A write that fails is one line and a counter each time; the old file stays whole."""
    disk = Disk(tmp_path)
    await disk.copy.save(*with_head(plan_of(1)))
    before = (tmp_path / "p.plan").read_bytes()
    moved = tmp_path.with_name("elsewhere")
    tmp_path.rename(moved)
    with capture_logs() as lines:
        for version in (4, 5):
            await disk.copy.save(*with_head(plan_of(1, version=version)))
    assert [line["event"] for line in lines] == [
        "table not kept on disk, a start without Redis would have an older one or none"
    ]
    assert disk.failures("unwritable") == 2
    moved.rename(tmp_path)
    assert (tmp_path / "p.plan").read_bytes() == before


def test_a_folder_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    """It is made when only itself is missing; anything else is told with its name, exit code 2."""
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "no" / "parent", tmp_path / "file", Path("/proc/state")):
        with pytest.raises(InvalidInput, match=f"CACHEROUTE_STATE_DIR {folder}"):
            Disk(folder)


async def test_a_pipe_in_its_place_holds_nobody(tmp_path: Path) -> None:
    """What is no file is not waited for: it is told, and the next plan takes its place."""
    os.mkfifo(tmp_path / "p.plan")
    disk = Disk(tmp_path)
    async with asyncio.timeout(20):
        assert await disk.copy.load() is None
    assert disk.failures("unreadable") == 1
    await disk.copy.save(*with_head(plan_of(5)))
    assert await Disk(tmp_path).copy.load() is not None


async def test_a_disk_that_hangs_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither start, nor saving, nor a folder's check waits longer than its limit; each is counted and told once."""
    hung, disk = threading.Event(), Disk(tmp_path)
    monkeypatch.setattr("service.lastgood.LIMIT_S", 0.2)
    monkeypatch.setattr("service.files.LOOK_S", 0.2)

    def hang(*_: object, **__: object) -> None:
        hung.wait(30)

    with monkeypatch.context() as patched, capture_logs() as lines:
        patched.setattr("service.lastgood.os.open", hang)
        patched.setattr("service.files.Path.mkdir", hang)
        async with asyncio.timeout(20):
            assert await disk.copy.load() is None
            for _ in range(2):
                await disk.copy.save(*with_head(plan_of(5)))
            check_folder("CACHEROUTE_STATE_DIR", tmp_path)
    assert (disk.failures("unreadable"), disk.failures("unwritable")) == (1, 2)
    assert ["no answer in 0.2 s" in line["error"] for line in lines] == [True, True]
    hung.set()
    await until(lambda: not disk.copy._aside._free.locked(), "the work that hung ends")
    await disk.copy.save(*with_head(plan_of(5)))
    assert await Disk(tmp_path).copy.load() is not None, "a disk that is back is used again"


def test_a_disk_that_hangs_does_not_hold_the_end() -> None:
    """A process whose disk never answers ends all the same."""
    program = (
        "import asyncio, contextlib, time\n"
        "from service.files import Aside\n"
        "with contextlib.suppress(TimeoutError):\n"
        "    asyncio.run(Aside().run(lambda: time.sleep(600), 0.1))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


async def test_the_file_is_its_owners(tmp_path: Path) -> None:
    """Others may not read the plan's hashes; a folder where they may put another plan is told, with what to do."""
    folder = tmp_path / "state"
    await Disk(folder).copy.save(*with_head(plan_of(5)))
    assert (folder / "p.plan").stat().st_mode & 0o777 == 0o600
    for mode, told in ((0o755, 0), (0o1777, 0), (0o777, 1)):
        folder.chmod(mode)
        with capture_logs() as lines:
            assert await Disk(folder).copy.load() is not None
        assert [line["log_level"] for line in lines] == ["warning"] * told, oct(mode)
        assert all("chmod o-w" in line["remedy"] for line in lines)


class Rig:
    def __init__(self, url: str, disk: Disk) -> None:
        self.fleet = Fleet((("a", "10.0.0.1:80"), ("b", "10.0.0.2:80")))
        self.current, self.store = Current(), Store(url, disk.settings.pool)
        rates = Rates(30, 300, first_batch=int(time.time() * 1000))
        self.feed = Feed(self.store, disk.settings, self.fleet, self.current, rates, disk.telemetry, disk.copy)


@contextlib.asynccontextmanager
async def following(url: str, disk: Disk) -> AsyncIterator[Rig]:
    rig = Rig(url, disk)
    await rig.feed.restore()
    task = asyncio.create_task(rig.feed.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await rig.store.close()


async def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def test_redis_wins_when_it_is_newer_and_not_when_it_is_empty(
    own_valkey: Server, pool: str, tmp_path: Path
) -> None:
    """What is in service is kept; a start serves it, an empty Redis leaves it, a newer plan replaces it."""
    given: dict[str, Any] = {"pool": pool, "plan_poll_s": 0.1, "instance": "x"}
    async with following(own_valkey.url, Disk(tmp_path, **given)) as rig:
        bare = replace(plan_of(5), version=0, epoch=0)
        await rig.store.publish(bare, expected=Head(), actor="", reason="")
        await until((tmp_path / f"{pool}.plan").exists, "nothing was kept")
    own_valkey.kill()
    own_valkey.start()
    async with following(own_valkey.url, Disk(tmp_path, **given)) as rig:
        assert (rig.current.table.version, rig.current.table.source) == (1, "disk")
        first = rig.current.table.epoch
        async with asyncio.timeout(20):
            while not (acks := await rig.store.read_acks()):
                await asyncio.sleep(0.02)
        assert (acks[0].version, acks[0].epoch, acks[0].source) == (1, first, "disk")
        assert acks[0].error == "served from disk, the pool has no plan; publish one"
        await asyncio.sleep(0.5)  # some polls of an empty Redis
        assert rig.current.table.version == 1
        await asyncio.sleep(max(0.0, first + 1 - time.time()))  # the clock names epochs in seconds
        await rig.store.publish(replace(plan_of(5, 6), version=0), expected=Head(), actor="", reason="")
        await until(lambda: len(rig.current.table.targets) == 2, "the newer plan is not followed")
        assert rig.current.table.source == "redis"
        assert rig.current.table.epoch > first
        await until(lambda: head_line(tmp_path / f"{pool}.plan")[0]["epoch"] > first, "it was not kept")


@pytest.mark.parametrize("later_s", [100_000, 0])
async def test_a_table_from_disk_gives_way_to_any_plan_of_redis(
    own_valkey: Server, pool: str, tmp_path: Path, later_s: int
) -> None:
    """An older plan, or another one of the same version, replaces the disk's, and is kept in its place."""
    given: dict[str, Any] = {"pool": pool, "plan_poll_s": 0.1, "instance": "x"}
    store = Store(own_valkey.url, pool)
    await store.publish(replace(plan_of(5, 6), version=0, epoch=0), expected=Head(), actor="", reason="")
    head = await store.read_head()
    kept = replace(plan_of(1, 2, 3), version=head.version, epoch=head.epoch + later_s)
    await Disk(tmp_path, **given).copy.save(*with_head(kept))
    async with following(own_valkey.url, Disk(tmp_path, **given)) as rig:
        assert (len(rig.current.table.targets), rig.current.table.source) == (3, "disk")
        await until(lambda: set(rig.current.table.targets) == {5, 6}, "Redis is not followed")
        assert (rig.current.table.epoch, rig.current.table.source) == (head.epoch, "redis")
        await until(lambda: head_line(tmp_path / f"{pool}.plan")[0]["epoch"] == head.epoch, "the disk has the old one")
        assert head_line(tmp_path / f"{pool}.plan")[0]["sha256"] == head.sha256
    await store.close()
    own_valkey.kill()
    async with following(own_valkey.url, Disk(tmp_path, **given)) as rig:
        assert set(rig.current.table.targets) == {5, 6}


async def test_a_table_that_redis_confirms_is_one_of_redis(own_valkey: Server, pool: str, tmp_path: Path) -> None:
    """Once Redis has the plan that came from disk, a head that goes back is no longer followed."""
    given: dict[str, Any] = {"pool": pool, "plan_poll_s": 0.1, "instance": "x"}
    store = Store(own_valkey.url, pool)
    for keys in ((1,), (1, 2)):
        bare = replace(plan_of(*keys), version=0, epoch=0)
        await store.publish(bare, expected=await store.read_head(), actor="", reason="")
    head = await store.read_head()
    data = await store.read_plan_bytes(head.version)
    await Disk(tmp_path, **given).copy.save(data, head)
    async with following(own_valkey.url, Disk(tmp_path, **given)) as rig:
        assert (rig.current.table.version, rig.current.table.source) == (2, "disk")
        await until(lambda: rig.current.table.source == "redis", "it is not confirmed")
        old = await store.read_plan_bytes(1)
        digest = hashlib.sha256(old).hexdigest()
        await store._redis.hset(f"{{cacheroute:{pool}}}:head", mapping={"version": 1, "sha256": digest})
        async with asyncio.timeout(20):
            while not any("went back" in ack.error for ack in await store.read_acks()):
                await asyncio.sleep(0.02)
        assert rig.current.table.version == 2
    await store.close()


async def test_a_table_for_other_endpoints_is_not_restored(tmp_path: Path) -> None:
    """A table that names none of the fleet is refused; a fleet still to be discovered refuses nothing."""
    await Disk(tmp_path).copy.save(*with_head(plan_of(5, endpoints=("y", "z"))))
    disk = Disk(tmp_path)
    rig = Rig("redis://127.0.0.1:1/0", disk)
    await rig.feed.restore()
    assert (rig.current.table.version, disk.failures("endpoint")) == (0, 1)
    rig.fleet.update([])
    await rig.feed.restore()
    assert rig.current.table.version == 3
    await rig.store.close()


class Served:
    """`cacheroute serve` as a process."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.grpc_port, self.http_port = free_ports(2)
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        listen = [f"--listen=127.0.0.1:{self.grpc_port}", f"--http=127.0.0.1:{self.http_port}"]
        endpoints = ["--endpoint=a=127.0.0.1:1", "--endpoint=b=127.0.0.1:2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "planner.cli", "serve", *listen, *endpoints, *arguments],
            env={**clean, "CACHEROUTE_PROBE_INTERVAL_S": "60", "CACHEROUTE_DRAIN_NOTICE_S": "0", **variables},
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Served":
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError):
                self.json("/healthz")  # An error while the gRPC port is not open, though the HTTP port is.
                return self
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"not serving: {self.process.communicate()[1]}", pytrace=False)
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.log = self.process.communicate(timeout=20)[1]
        finally:
            self.process.kill()

    def json(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as response:
            return json.loads(response.read())

    def reason_of(self, key: str) -> str:
        """Return why the answer to a request with this key is what it is, by the metadata that Envoy would log."""
        request = pb.ProcessingRequest()
        request.request_headers.headers.headers.add(key="x-tenant-id", raw_value=key.encode())
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )(iter([request]))
            (reply,) = call
        return str(reply.dynamic_metadata.fields["cacheroute"].struct_value.fields["reason"].string_value)


def test_a_start_without_redis_has_the_plan(own_valkey: Server, pool: str, tmp_path: Path) -> None:
    """With Redis once and a plan published, both end; the service comes up alone and picks as planned at once."""
    key, at = "acme", ("--redis", own_valkey.url, "--pool", pool)
    state = {"CACHEROUTE_STATE_DIR": str(tmp_path / "state")}

    async def publish() -> None:
        store = Store(own_valkey.url, pool)
        await store.publish(replace(plan_of(hash_key(key.encode())), version=0), expected=Head(), actor="", reason="")
        await store.close()

    with Served(*at, **state) as served:
        assert served.reason_of(key) == "cold"
        asyncio.run(publish())
        deadline = time.monotonic() + 20
        while not (tmp_path / "state" / f"{pool}.plan").exists():
            assert time.monotonic() < deadline, "nothing was kept"
            time.sleep(0.05)
        assert served.reason_of(key) == "planned"
        assert served.json("/table")["source"] == "redis"
    own_valkey.kill()
    with Served(*at, **state) as served:
        assert served.reason_of(key) == "planned"
        table = served.json("/table")
        assert (table["version"], table["keys"], table["source"]) == (1, 1, "disk")
    events = [json.loads(line)["event"] for line in served.log.splitlines()]
    assert events.index("plan from disk in service") < events.index("serving")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_wrong_folder_is_told_in_one_line(tmp_path: Path, workers: str) -> None:
    """`serve` ends with exit code 2 and names the variable and the folder, workers or not."""
    state = {"CACHEROUTE_REDIS_URL": "redis://127.0.0.1:1"}
    served = Served(**state, CACHEROUTE_STATE_DIR=str(tmp_path / "no" / "parent"), CACHEROUTE_WORKERS=workers)
    log = served.process.communicate(timeout=30)[1]
    assert served.process.returncode == 2, log
    assert f"CACHEROUTE_STATE_DIR {tmp_path / 'no' / 'parent'}: No such file or directory" in log.splitlines()[-1]
    assert "Traceback" not in log


def test_the_head_line_is_all_of_the_head(tmp_path: Path) -> None:
    """A field that Head gains is written too, or the copy would lose it in silence."""
    asyncio.run(Disk(tmp_path).copy.save(*with_head(plan_of(1))))
    assert head_line(tmp_path / "p.plan")[0].keys() == {"format", "pool", *asdict(Head())}
