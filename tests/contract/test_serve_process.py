"""`cacheroute serve` as a process: health services, the HTTP port, draining, and every way to start it wrongly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from replay.processes import free_ports
from service.keys import format_hash, hash_key
from service.pb import ext_proc_pb2 as pb
from tests.contract.serving import Serving, until

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
HEALTH_NAMES = ("", "liveness", "readiness", "inference-extension", "envoy.service.ext_proc.v3.ExternalProcessor")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def environment(**extra: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    return {**clean, **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "planner.cli", "serve", *arguments]


ENDPOINT = "--endpoint=a=127.0.0.1:1"


class Server(Protocol):
    url: str


class Served:
    def __init__(self, **settings: str) -> None:
        self.grpc_port, self.http_port = free_ports(2)
        self.process = subprocess.Popen(
            command(
                f"--listen=127.0.0.1:{self.grpc_port}",
                f"--http=127.0.0.1:{self.http_port}",
                "--endpoint=a=127.0.0.1:1",
                "--endpoint=b=127.0.0.1:2",
            ),
            env=environment(**{"CACHEROUTE_PROBE_INTERVAL_S": "60", "CACHEROUTE_DRAIN_S": "20", **settings}),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                if self.get("/healthz")[0] == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"not serving: {self.process.communicate()[1]}", pytrace=False)
            time.sleep(0.05)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}")
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def get(self, path: str) -> tuple[int, bytes, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=5) as response:
                return response.status, response.read(), response.headers["content-type"]
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read(), exc.headers["content-type"]

    def json(self, path: str) -> Any:
        return json.loads(self.get(path)[1])

    def status_of(self, name: str) -> Any:
        return self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5).status


@pytest.fixture
def served() -> Iterator[Served]:
    yield from running(CACHEROUTE_DRAIN_NOTICE_S="0")


@pytest.fixture
def noticing() -> Iterator[Served]:
    """A service that goes on answering for longer than any test waits."""
    yield from running(CACHEROUTE_DRAIN_NOTICE_S="600")


def running(**settings: str) -> Iterator[Served]:
    served = Served(**settings)
    yield served
    served.channel.close()
    served.process.kill()
    served.process.communicate()


def test_health_services_of_the_endpoint_picker_protocol(served: Served) -> None:
    """The names that gateways ask, and the empty one, answer SERVING without plan or Redis; others are unknown."""
    for name in HEALTH_NAMES:
        assert served.status_of(name) == SERVING, name
    with pytest.raises(grpc.RpcError) as caught:
        served.status_of("nobody")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_http_port_has_the_documented_fields(served: Served) -> None:
    """/fleet, /table and /explain have exactly the fields that commands document; /metrics is Prometheus text."""
    assert served.json("/healthz") == {"status": "ok"}
    fleet = served.json("/fleet")["endpoints"]
    assert [e["name"] for e in fleet] == ["a", "b"]
    facts = {"name", "address", "ready", "draining", "warming", "inflight", "inflight_elsewhere"}
    assert set(fleet[0]) == facts
    assert served.json("/table") == {"version": 0, "epoch": 0, "age_s": 0.0, "keys": 0, "overrides": 0, "source": ""}
    explained = served.json("/explain?key=acme")
    assert set(explained) == {"key_hash", "reason", "rule", "targets", "candidates", "fairness"}
    assert explained["fairness"] is None
    assert explained["reason"] == "cold"
    assert explained["targets"] == []
    assert {c["name"] for c in explained["candidates"]} == {"a", "b"}
    assert "acme" not in json.dumps(explained)
    assert served.get("/explain")[0] == 400
    assert "longer than 256 bytes" in served.json(f"/explain?key={'x' * 257}")["rule"]
    assert "is not UTF-8" in served.json("/explain?key=a%FF")["rule"]
    assert served.json("/explain?key=%C3%A9+%26")["key_hash"] == format_hash(hash_key("é &".encode()))
    status, body, content_type = served.get("/metrics")
    assert (status, content_type.split(";")[0]) == (200, "text/plain")
    text = body.decode()
    for name in (
        "cacheroute_picks_total",
        "cacheroute_plan_version",
        "cacheroute_endpoint_inflight",
        "process_cpu_seconds",
    ):
        assert name in text
    assert 'cacheroute_picks_total{reason="cold"} 0.0' in text, "explaining a key counts nothing"


def test_sigterm_drains(served: Served) -> None:
    """After SIGTERM the health services refuse new work, a stream in flight lives on, and its end ends the process."""
    requests: list[pb.ProcessingRequest] = []
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    requests.append(message)
    release = False

    def stream() -> Iterator[pb.ProcessingRequest]:
        yield message
        while not release:
            time.sleep(0.01)

    call = served.channel.stream_stream(
        METHOD,
        request_serializer=pb.ProcessingRequest.SerializeToString,
        response_deserializer=pb.ProcessingResponse.FromString,
    )(stream())
    assert next(call).WhichOneof("response") == "request_headers"
    assert sum(e["inflight"] for e in served.json("/fleet")["endpoints"]) == 1
    watch = served.health.Watch(health_pb2.HealthCheckRequest(service="readiness"))
    assert next(watch).status == SERVING
    served.process.send_signal(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    watch.cancel()
    assert served.get("/healthz")[0] == 503
    assert sum(e["inflight"] for e in served.json("/fleet")["endpoints"]) == 1
    assert served.process.poll() is None
    release = True
    assert list(call) == []
    _, log = served.process.communicate(timeout=30)
    assert served.process.returncode == 0
    events = [json.loads(line)["event"] for line in log.splitlines()]
    assert events[0] == "serving"
    assert events[-2:] == ["draining", "stopped"]
    assert json.loads(log.splitlines()[-1])["inflight"] == 0


def test_new_requests_are_answered_until_the_notice_has_gone_round(noticing: Served) -> None:
    """After SIGTERM health says NOT_SERVING, but for liveness, and gateways that have not seen it yet are answered."""
    watch = noticing.health.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=30)
    assert next(watch).status == SERVING
    noticing.process.send_signal(signal.SIGTERM)
    assert next(watch).status == NOT_SERVING
    watch.cancel()
    assert noticing.get("/healthz")[0] == 503
    for name in HEALTH_NAMES:
        assert noticing.status_of(name) == (SERVING if name == "liveness" else NOT_SERVING), name
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    for _ in range(2):
        with grpc.insecure_channel(f"127.0.0.1:{noticing.grpc_port}") as channel:
            call = channel.stream_stream(
                METHOD,
                request_serializer=pb.ProcessingRequest.SerializeToString,
                response_deserializer=pb.ProcessingResponse.FromString,
            )(iter([message]), timeout=10)
            assert next(call).WhichOneof("response") == "request_headers"
    assert noticing.process.poll() is None


def test_those_who_watch_the_health_do_not_hold_the_end_up() -> None:
    """A gateway's health stream is told NOT_SERVING and ended, and the process ends long before `drain_s`."""
    for served in running(CACHEROUTE_DRAIN_NOTICE_S="0", CACHEROUTE_DRAIN_S="600"):
        watches = [served.health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "liveness")]
        for watch in watches:
            assert next(watch).status == SERVING
        served.process.send_signal(signal.SIGTERM)
        assert [answer.status for answer in watches[0]] == [NOT_SERVING]
        assert list(watches[1]) == []
        served.process.communicate(timeout=30)
        assert served.process.returncode == 0


def test_the_port_is_listened_on_when_it_is_answered(tmp_path: Path) -> None:
    """While the start waits for others nobody can connect, so nobody hangs; the end that is asked for then comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent, (tmp_path / "log").open("wb") as log:
        silent.bind(("127.0.0.1", 0))
        port, http = free_ports(2)
        process = subprocess.Popen(
            command("--discover=dns:engines.test:1", f"--listen=127.0.0.1:{port}", f"--http=127.0.0.1:{http}"),
            env=environment(CACHEROUTE_DNS_SERVER=f"127.0.0.1:{silent.getsockname()[1]}"),
            stderr=log,
        )
        until(lambda: status_of(http) == 503, "it starts")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        assert status_of(http) == 503, "it was still starting"
        process.terminate()
        assert process.wait(30) == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "log").read_text().splitlines()]
    assert events == ["draining", "stopped"]


def status_of(http: int) -> int:
    """Return the status of /healthz."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http}/healthz", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_process_can_be_told_to_end_before_it_runs(tmp_path: Path, workers: str) -> None:
    """SIGTERM while it still loads, as soon as any handler is there, ends it with exit code 0, before it serves."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent, (tmp_path / "log").open("wb") as log:
        silent.bind(("127.0.0.1", 0))
        process = subprocess.Popen(
            command("--discover=dns:engines.test:1", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"),
            env=environment(
                CACHEROUTE_DNS_SERVER=f"127.0.0.1:{silent.getsockname()[1]}",
                CACHEROUTE_WORKERS=workers,
                TMPDIR=str(tmp_path),
            ),
            stderr=log,
        )
        until(lambda: handles(process.pid, signal.SIGTERM), "it can be told")
        process.terminate()
        assert process.wait(30) == 0
    assert '"serving"' not in (tmp_path / "log").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"], "nothing is left"


def test_sigterm_before_the_handlers_of_the_loop_is_no_crash() -> None:
    """From the first line of the program on, SIGTERM ends it with exit code 0."""
    program = """
import os, signal, service.__main__
service.__main__.supervise = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
service.__main__.main()
"""
    variables = environment(CACHEROUTE_ENDPOINT="a=127.0.0.1:1", CACHEROUTE_WORKERS="2")
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    (mask,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_disk_that_hangs_does_not_hang_the_start(tmp_path: Path) -> None:
    """A table file that gives no answer is told, and the service starts without it, and ends."""
    os.mkfifo(tmp_path / "default.plan")
    with Serving(
        tmp_path / "log", redis_url="redis://127.0.0.1:1/0", state_dir=str(tmp_path), drain_notice_s="0"
    ) as serving:
        assert serving.json("/table")["version"] == 0
        assert serving.told("table on disk not used")
        assert serving.terminate() == 0


@pytest.mark.parametrize("redis", ["alive", "dead"])
def test_sigterm_right_after_the_start(valkey: Server, pool: str, redis: str) -> None:
    """A process that is told to end while it still connects to Redis ends, whether Redis answers or not."""
    url = valkey.url if redis == "alive" else "redis://127.0.0.1:1/0"
    for _ in range(4):
        process = subprocess.Popen(
            command(
                "--listen=127.0.0.1:0",
                "--http=127.0.0.1:0",
                "--endpoint=a=127.0.0.1:1",
                f"--redis={url}",
                f"--pool={pool}",
            ),
            env=environment(CACHEROUTE_DRAIN_NOTICE_S="0"),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "serving" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        try:
            _, log = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"still there after 20 s: {process.communicate()[1]}")
        assert process.returncode == 0, log
        assert json.loads(log.splitlines()[-1])["event"] == "stopped"


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        ([ENDPOINT, "--listen=127.0.0.1:{taken}"], {}, "--listen 127.0.0.1:{taken}: Address already in use"),
        ([ENDPOINT, "--listen=127.0.0.1:0", "--http=127.0.0.1:{taken}"], {}, "--http 127.0.0.1:{taken}"),
        (["--listen=nowhere"], {}, "--listen (CACHEROUTE_LISTEN) = 'nowhere'"),
        (["--endpoint=a=host:80"], {}, "not an IP address"),
        (["--endpoint=a=10.0.0.1:80", "--endpoint=a=10.0.0.2:80"], {}, "name a stands twice"),
        ([ENDPOINT, "--redis=127.0.0.1:6379", "--listen=127.0.0.1:0", "--http=127.0.0.1:0"], {}, "redis://"),
        ([], {}, "no endpoint is named; give --endpoint"),
        ([], {"CACHEROUTE_LISTN": "x"}, "CACHEROUTE_LISTN"),
        ([], {"CACHEROUTE_PROBE_INTERVAL_S": "soon"}, "CACHEROUTE_PROBE_INTERVAL_S"),
        (["--lisen=x"], {}, "No such option: --lisen"),
    ],
)
def test_a_wrong_start_is_told_in_one_line(arguments: list[str], variables: dict[str, str], told: str) -> None:
    """What cannot be used ends the start with exit code 2 and names the option or variable."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            command(*(a.replace("{taken}", port) for a in arguments)),
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert told.replace("{taken}", port) in lines[-1]
    if not told.startswith("No such option"):
        assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
