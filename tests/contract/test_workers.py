"""`--workers N`: several processes that are one service to gateways, operators and Prometheus."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tests.contract.serving import Held, Serving, environment, until

WORKERS = 3
# With so many connections the kernel leaves a worker without any once in ten billion times.
CONNECTIONS = 60


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
    (folder,) = {Path(c.laddr).parent for w in workers for c in w.net_connections("unix") if c.laddr.endswith(".sock")}
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
    secrets = {"key_salt": "sixteen bytes of salt", "fair_weight": "acme-corp=3"}
    with Serving(tmp_path / "log", workers="2", **secrets) as serving:
        (started,) = until(lambda: [e for e in serving.told("serving") if "workers" in e], "its settings are told")
        assert list(started["fair_weight"].values()) == [3.0]
        assert started["key_salt"] == "set"
        shown = serving.log() + "".join(" ".join(process.cmdline()) for process in serving.workers())
        assert "sixteen" not in shown
        assert "acme-corp" not in shown


def serve(**settings: str) -> "subprocess.CompletedProcess[str]":
    given = {"endpoint": "a=127.0.0.1:1"} | settings
    return subprocess.run(
        [sys.executable, "-m", "planner.cli", "serve"],
        env=environment(**{k: v for k, v in given.items() if v}),
        capture_output=True,
        text=True,
        timeout=60,
    )
