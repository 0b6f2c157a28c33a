"""`--workers N`: several processes that are one service to gateways, operators and Prometheus."""

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from structlog.testing import capture_logs

from service.folder import socket_folder
from service.front import NO_WORKER, WorkerPort, build_front
from service.http import listen_private
from service.keys import format_hash, hash_key
from service.settings import ServiceSettings
from service.workers import Workers, _environment, _Worker
from tests.contract.serving import Held, Serving, environment, until

WORKERS = 3
# With so many connections the kernel leaves a worker without any once in ten billion times.
CONNECTIONS = 60
ROOT = Path(__file__).parents[2]


class Server(Protocol):
    url: str


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path / "log", workers=str(WORKERS)) as serving:
        yield serving


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """For tests that leave it as they found it."""
    with Serving(tmp_path_factory.mktemp("shared") / "log", workers=str(WORKERS)) as serving:
        yield serving


def hold(serving: Serving, count: int = CONNECTIONS) -> list[Held]:
    return [Held(serving.channel()) for _ in range(count)]


def test_connections_reach_every_worker_and_counts_add_up(shared: Serving) -> None:
    """Each worker gets streams; /fleet has the sum of what they have in flight, /metrics each one's."""
    held = hold(shared)
    streams = shared.samples("cacheroute_streams")
    assert set(streams) == {"0", "1", "2"}
    assert all(streams.values()), streams
    assert sum(streams.values()) == CONNECTIONS
    assert shared.inflight() == CONNECTIONS
    assert all(e["inflight_elsewhere"] == 0 for e in shared.json("/fleet")["endpoints"]), "there is nobody else"
    for request in held:
        request.end()
    until(lambda: shared.inflight() == 0, "all taken back")


@pytest.mark.parametrize("redis", [False, True])
def test_workers_know_of_each_others_load(tmp_path: Path, valkey: Server, pool: str, redis: bool) -> None:
    """Every worker sees all requests in flight, its own and its siblings', with Redis and without; and their end."""
    more = {"redis_url": valkey.url, "pool": pool} if redis else {}
    with Serving(tmp_path / "log", workers=str(WORKERS), **more) as serving:
        held = hold(serving)

        def seen() -> list[float]:
            totals = [0.0] * WORKERS
            for name in ("cacheroute_endpoint_inflight", "cacheroute_endpoint_inflight_elsewhere"):
                for endpoint in "ab":
                    for worker, value in serving.samples(name, endpoint=endpoint).items():
                        totals[int(worker)] += value
            return totals

        until(lambda: seen() == [CONNECTIONS] * WORKERS, "all see all")
        assert serving.inflight() == CONNECTIONS
        for request in held:
            request.end()
        until(lambda: seen() == [0] * WORKERS, "all see the end")


def test_metrics_of_all_workers_are_one_valid_text(shared: Serving) -> None:
    """Each family stands once, each series once, all of a worker's under its number, the supervisor's own beside."""
    families = shared.families()
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    text = shared.get("/metrics")[1]
    described = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(described) == len(set(described)) == len(names)
    samples = [(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples]
    assert len(samples) == len(set(samples))
    assert all("worker" in dict(labels) for _, labels in samples)
    assert shared.samples("process_cpu_seconds_total").keys() == {"0", "1", "2", "supervisor"}
    numbers = {str(n) for n in range(WORKERS)}
    assert shared.samples("cacheroute_worker_up") == dict.fromkeys(numbers, 1)
    picks = shared.samples("cacheroute_picks_total", reason="cold")
    assert shared.samples("cacheroute_decide_seconds_bucket", le="+Inf") == picks
    assert set(picks) == numbers


def test_people_see_one_service(shared: Serving) -> None:
    """/table is the oldest of all with each worker's beside, /explain any worker's, /healthz says how many serve."""
    assert shared.json("/healthz") == {"status": "ok", "workers": WORKERS, "serving": WORKERS}
    table = shared.json("/table")
    assert (table["version"], table["epoch"]) == (0, 0)
    assert [w["worker"] for w in table["workers"]] == list(range(WORKERS))
    assert {c["name"] for c in shared.json("/explain?key=acme")["candidates"]} == {"a", "b"}
    assert shared.get("/explain")[0] == 400
    assert "is not UTF-8" in shared.json("/explain?key=a%FF")["rule"]
    assert shared.json("/explain?key=%C3%A9+%26")["key_hash"] == format_hash(hash_key("é &".encode()))


def test_a_worker_that_dies_is_started_again_and_forgotten_meanwhile(serving: Serving) -> None:
    """Scrapes go on without it, health says that one is missing, and what it had in flight counts no more."""
    hold(serving)
    victim = serving.workers()[0]
    victim.suspend()
    # A worker that does not answer is left out; the others are not.
    until(lambda: sorted(serving.samples("cacheroute_worker_up").values()) == [0, 1, 1], "one is missing")
    assert len(serving.samples("cacheroute_streams")) == WORKERS - 1
    assert serving.json("/healthz") == {"status": "starting", "workers": WORKERS, "serving": WORKERS - 1}
    assert serving.get("/healthz")[0] == 503
    victim.send_signal(signal.SIGKILL)
    until(lambda: serving.get("/healthz")[0] == 200, "all serve again")
    assert sorted(serving.samples("cacheroute_worker_restarts_total").values()) == [0, 0, 1]
    assert 0 < serving.inflight() < CONNECTIONS
    (line,) = serving.told("worker ended, starting it again")
    assert line["exit_code"] == -signal.SIGKILL
    assert Held(serving.channel()).reply.WhichOneof("response") == "request_headers"


def test_sigterm_drains_all_workers(serving: Serving) -> None:
    """Health says so at once, requests in flight live on, and the end comes with exit code 0 when they end."""
    held = hold(serving)
    serving.process.send_signal(signal.SIGTERM)
    until(lambda: serving.json("/healthz")["status"] == "draining", "draining")
    assert serving.get("/healthz")[0] == 503
    until(lambda: len(serving.told("draining")) == WORKERS + 1, "all were told")
    assert serving.process.poll() is None
    assert serving.inflight() == CONNECTIONS
    for request in held:
        request.end()
    assert serving.process.wait(30) == 0
    assert serving.events()[-1]["event"] == "stopped"
    assert [line["inflight"] for line in serving.told("stopped")[:-1]] == [0] * WORKERS


def test_workers_end_with_a_supervisor_that_is_killed(serving: Serving) -> None:
    """Nothing is left behind, in flight or not, and the port is free for the next one while the last requests end."""
    held, workers = hold(serving), serving.workers()
    sockets = [Path(str(c.laddr)) for worker in workers for c in worker.net_connections("unix")]
    (folder,) = {path.parent for path in sockets if path.suffix == ".sock"}
    assert folder.stat().st_mode & 0o77 == 0, "nobody else may open it"
    serving.process.kill()
    serving.process.wait()

    def port_is_free() -> bool:
        with socket.create_server(("127.0.0.1", serving.grpc_port)):
            return True

    until(port_is_free, "the port is free")
    for request in held:
        request.end()
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
    assert not folder.exists()


def test_nobody_joins_a_port_that_workers_share(shared: Serving) -> None:
    """A second service on the port is refused, even while no worker listens on it."""
    for worker in shared.workers():
        worker.suspend()
    for workers in ("1", "2"):
        done = serve(listen=f"127.0.0.1:{shared.grpc_port}", http="127.0.0.1:0", workers=workers)
        assert done.returncode == 2
        assert f"--listen 127.0.0.1:{shared.grpc_port}: Address already in use" in done.stderr
    for worker in shared.workers():
        worker.resume()


def test_a_free_port_is_chosen_once_for_all(tmp_path: Path) -> None:
    """With port 0 all workers listen on the same port, which the log tells."""
    with Serving(tmp_path / "log", workers="2", listen="127.0.0.1:0") as serving:
        until(lambda: len(serving.told("serving")) == 3, "both workers and the supervisor say so")
        ports = {line["port"] for line in serving.told("serving")}
        (at,) = [line["http_port"] for line in serving.told("serving") if "http_port" in line]
        assert at == serving.http_port
        assert len(ports) == 1
        (serving.grpc_port,) = ports
        assert serving.grpc_port
        for _ in range(20):
            Held(serving.channel()).end()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"redis_url": "127.0.0.1:6379"}, "redis://"),
        ({"tls_cert": "/none/tls.crt", "tls_key": "/none/tls.key"}, "CACHEROUTE_TLS_CERT /none/tls.crt cannot be read"),
        ({"http": "127.0.0.1:{taken}"}, "--http 127.0.0.1:{taken}: Address already in use"),
        ({"discover": "dns:engines", "endpoint": ""}, "CACHEROUTE_DISCOVER"),
    ],
)
def test_a_wrong_start_is_told_once(settings: dict[str, str], told: str) -> None:
    """What cannot be used ends the start of all workers with exit code 2 and one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        given = {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "workers": "2"} | settings
        done = serve(**{k: v.replace("{taken}", port) for k, v in given.items()})
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert told.replace("{taken}", port) in line


def test_a_folder_that_is_too_long_for_sockets_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's limit for the path of a socket is met before anything is started."""
    (tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("x" * 100)))
    done = serve(listen="127.0.0.1:0", http="127.0.0.1:0", workers="2")
    assert done.returncode == 2
    assert "set TMPDIR to a shorter one" in done.stderr


def test_a_worker_without_a_supervisor_ends() -> None:
    """The option is for supervisors: without what they tell on standard input nothing starts."""
    done = subprocess.run(
        [sys.executable, "-m", "service", "--worker"], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert done.returncode == 1
    assert b"supervisor" in done.stderr


def test_secrets_are_not_told(tmp_path: Path) -> None:
    """Neither salt nor weighted keys stand in the log or on a command line; keys are told by their hash."""
    secrets = {"key_salt": "sixteen bytes of salt", "fair_weight": "acme-corp=3", "fleet_inflight_max": "100"}
    with Serving(tmp_path / "log", workers="2", **secrets) as serving:
        started = serving.events()[0]
        assert (started["event"], started["workers"]) == ("starting", 2), "the first line has the settings in force"
        assert list(started["fair_weight"].values()) == [3.0]
        assert started["key_salt"] == "set"
        shown = serving.log() + "".join(" ".join(process.cmdline()) for process in serving.workers())
        assert "sixteen" not in shown
        assert "acme-corp" not in shown


@dataclass
class Alone:
    """One worker whose process is `sleep`, and the supervisor's tasks for it."""

    workers: Workers
    worker: _Worker
    starts: list[float]
    fail: set[int]
    told: Sequence[Mapping[str, Any]] = ()

    async def answers(self) -> web.AppRunner:
        """Let it serve."""

        async def healthz(_: web.Request) -> web.Response:
            return web.json_response({})

        app = web.Application()
        app.router.add_get("/healthz", healthz)
        return await listen_private(app, self.worker.port.path)


@pytest.fixture
async def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Alone]:
    settings = ServiceSettings(endpoint=("a=127.0.0.1:1",), workers=1, drain_notice_s=0)
    workers = Workers(settings, "127.0.0.1:1", None, tmp_path)
    alone = Alone(workers, _Worker(WorkerPort(0, str(tmp_path / "0.sock"))), [], set())
    workers._workers.append(alone.worker)
    start = asyncio.create_subprocess_exec

    async def sleep(*_command: str, **given: Any) -> Any:
        alone.starts.append(time.monotonic())
        if len(alone.starts) in alone.fail:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return await start("sleep", "600", **given)

    monkeypatch.setattr("service.workers.asyncio.create_subprocess_exec", sleep)
    monkeypatch.setattr("service.workers.BACKOFF_S", (0.01, 0.01))
    monkeypatch.setattr("service.workers.WATCH_S", 0.02)
    with capture_logs() as alone.told:
        yield alone
    if alone.worker.process is not None:
        alone.worker.send(signal.SIGKILL)
        await alone.worker.process.wait()
    await alone.worker.port.close()


async def eventually(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not check():
            await asyncio.sleep(0.01)


async def test_a_worker_that_cannot_be_started_is_tried_again(alone: Alone) -> None:
    """When the system has no room for a process, that is told with the remedy, and the next try comes."""
    alone.fail |= {2, 3}
    running = asyncio.create_task(alone.workers._run(0))
    await eventually(lambda: alone.worker.process)
    alone.worker.send(signal.SIGKILL)
    await eventually(lambda: len(alone.starts) == 4 and alone.worker.process)
    assert alone.worker.restarts == 1
    alone.workers._stop.set()
    assert await running == 0
    (first, second) = [line for line in alone.told if line["event"] == "worker cannot be started, trying again"]
    assert "Resource temporarily unavailable" in first["error"]
    assert "ulimit" in second["remedy"]


async def test_a_fault_of_the_supervisor_ends_it(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of ours that breaks lets workers drain and ends the process with the fault, for whoever restarts it."""

    async def broken(_: object) -> None:
        await eventually(lambda: alone.worker.process)
        raise ZeroDivisionError

    monkeypatch.setattr(alone.workers, "_exchange", broken)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(alone.workers._run(0), 30)
    assert alone.worker.process is None, "it was ended"


async def test_a_worker_that_hangs_is_killed_and_started_again(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has served and answers nothing any more is told and killed; while it answers it is left alone."""
    monkeypatch.setattr("service.workers.STARTS", 1_000_000)
    running = asyncio.create_task(alone.workers._run(0))
    await eventually(lambda: alone.worker.process)
    http = await alone.answers()
    await eventually(lambda: alone.worker.port.served)
    await asyncio.sleep(0.2)
    assert alone.worker.restarts == 0
    await http.cleanup()
    await eventually(lambda: alone.worker.restarts == 1 and alone.worker.process)
    alone.workers._stop.set()
    await running
    assert "worker answers nothing any more, killing it" in [line["event"] for line in alone.told]


async def test_a_worker_that_does_not_get_ready_is_killed_and_started_again(alone: Alone) -> None:
    """A start that hangs is told with the worker's number, and tried anew."""
    running = asyncio.create_task(alone.workers._run(0))
    await eventually(lambda: alone.worker.restarts >= 1)
    alone.workers._stop.set()
    await running
    assert any(line["worker"] == 0 for line in alone.told if line["event"].startswith("worker does not get ready"))


async def test_the_first_worker_must_get_ready(alone: Alone) -> None:
    """When the first one hangs in its start the service ends with exit code 1."""
    await alone.workers._start(alone.worker)
    assert await asyncio.wait_for(alone.workers._failed_first(), 30) == 1


async def test_without_any_answer_there_is_no_fleet(tmp_path: Path) -> None:
    """/fleet and /table answer 503 while no worker does, not an empty fleet; /metrics says that none is up."""
    port = WorkerPort(0, str(tmp_path / "none.sock"))
    app = build_front([port], draining=lambda: False, restarts=lambda: [0], others_known=False)
    async with TestClient(TestServer(app)) as client:
        for path in ("/fleet", "/table", "/explain?key=a"):
            answer = await client.get(path)
            assert (answer.status, await answer.json()) == (503, NO_WORKER)
        assert 'cacheroute_worker_up{worker="0"} 0.0' in await (await client.get("/metrics")).text()
        openmetrics = await client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        assert (await openmetrics.text()).endswith("# EOF\n")
    await port.close()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_ctrl_c_ends_all_without_a_traceback(tmp_path: Path, workers: str) -> None:
    """At a terminal the signal reaches the whole group: the supervisor, not each worker, acts on it, at any moment."""
    log = tmp_path / "log"
    with log.open("wb") as written:
        given = {"endpoint": "a=127.0.0.1:1", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "drain_notice_s": "0"}
        process = subprocess.Popen(
            [sys.executable, "-m", "planner.cli", "serve"],
            env=environment(workers=workers, **given),
            stderr=written,
            start_new_session=True,
        )
    until(
        lambda: handles(process.pid, signal.SIGTERM), "it can be told"
    )  # Python itself handles the other from the start
    if workers != "1":
        (child,) = until(lambda: psutil.Process(process.pid).children(), "a worker starts")
        assert os.getpgid(child.pid) != process.pid
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_workers_are_of_this_package_whatever_the_folder_holds(tmp_path: Path) -> None:
    """A folder `service` where it is started is not run."""
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__init__.py").write_text("")
    (tmp_path / "service" / "__main__.py").write_text("import sys; sys.exit('another program')")
    given = {"endpoint": "a=127.0.0.1:1", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "workers": "2"}
    process = subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from planner.cli import main; main()",
            "serve",
        ],
        env=environment(drain_notice_s="0", **given),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # Nobody listens where the endpoint is, and a worker may find that out before another one serves.
    events: list[str] = []
    while events.count("serving") < 3:
        line = process.stderr.readline()
        assert line, f"it ended after {events}"
        events.append(json.loads(line)["event"])
    process.terminate()
    process.communicate(timeout=30)
    assert events[0] == "starting"
    assert set(events) <= {"starting", "serving", "endpoint unready"}


def test_a_checkout_is_found_before_what_else_is_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers get our own folder first and keep the rest; an installed package needs none of it."""
    monkeypatch.setenv("PYTHONPATH", "/other")
    assert _environment()["PYTHONPATH"] == f"{ROOT}:/other"
    monkeypatch.delenv("PYTHONPATH")
    assert _environment()["PYTHONPATH"] == str(ROOT)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(ROOT))
    assert "PYTHONPATH" not in _environment()


def test_folders_of_supervisors_that_were_killed_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody has locked go; one in use, one that is just being made, and what is not ours stay."""
    # pytest's own folders may have paths too long for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as here:
        _check_folders(Path(here), monkeypatch)


def _check_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with socket_folder() as used:
        left, young, full = (tmp_path / f"cacheroute-workers-{name}" for name in ("left", "young", "full"))
        for folder in (left, young, full):
            folder.mkdir()
            (folder / "0.sock").touch()
        (full / "letter").touch()
        (tmp_path / "cacheroute-workers-link").symlink_to(full)
        (tmp_path / "other").mkdir()
        for folder in (left, full, used):
            os.utime(folder, (1e9, 1e9))
        with socket_folder() as mine:
            there = {path.name for path in tmp_path.iterdir()}
            assert there == {used.name, mine.name, young.name, full.name, "cacheroute-workers-link", "other"}
        assert not mine.exists()
    assert not used.exists()
    assert (full / "letter").exists()


def test_no_argument_is_ignored() -> None:
    """`python -m service` takes none; a wrong one ends the start with exit code 2 and one line."""
    done = subprocess.run(
        [sys.executable, "-m", "service", "--help", "--no-such-option"],
        env=environment(endpoint="a=127.0.0.1:1", listen="127.0.0.1:0", http="127.0.0.1:0"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "'--help'" in line
    assert "cacheroute serve" in line


def serve(**settings: str) -> "subprocess.CompletedProcess[str]":
    given = {"endpoint": "a=127.0.0.1:1"} | settings
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", "serve"],
        env=environment(**{k: v for k, v in given.items() if v}),
        capture_output=True,
        text=True,
        timeout=60,
    )
