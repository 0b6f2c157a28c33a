"""The gateways that the side-by-side benchmark compares, each started alone in front of the same engines.

| name | what routes |
|---|---|
| envoy | Envoy, LEAST_REQUEST (two choices), no ext_proc: the floor |
| envoy + echo | the same Envoy, asking a bare grpc.aio echo that picks nothing, for each request as it asks ours |
| cacheroute | Envoy as the lab configures it, `cacheroute serve` with one worker, Valkey with a published plan |
| envoy maglev | Envoy, MAGLEV on the tenant header with hash_balance_factor 125, no ext_proc |
| sglang-router | the wheel `sglang-router` in front of the engines, cache_aware |

All Envoys share listener, access log, health checks and timeouts, and have one worker thread. sglang-router runs with
the settings that its documentation recommends for production (cache_aware, threshold 0.3, balance 64 and 1.5, which are
its defaults too); it logs two lines a request by default, so it is run at `--log-level warn`, in its favour.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stats import cpu_s

from replay.envoy_config import EnvoySettings, build_bootstrap
from replay.lab import CLI, HOST, KEY_HEADER
from replay.processes import Process, answers_http, free_ports, wait_ready
from replay.programs import envoy_program
from service.settings import split_address

ENVOY, ECHO, OURS, MAGLEV, SGLANG = NAMES = ("envoy", "envoy + echo", "cacheroute", "envoy maglev", "sglang-router")
SGLANG_WHEEL = "sglang-router==0.3.2"
SGLANG_VENV = Path(__file__).parents[2] / "build" / "sglang-router"
SGLANG_OPTIONS = (
    *("--policy", "cache_aware", "--cache-threshold", "0.3"),
    *("--balance-abs-threshold", "64", "--balance-rel-threshold", "1.5"),
    *("--log-level", "warn", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"),
)
LEAST_REQUEST_TYPE = "type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest"
LEAST_REQUEST = {
    "policies": [
        {
            "typed_extension_config": {
                "name": "envoy.load_balancing_policies.least_request",
                "typed_config": {"@type": LEAST_REQUEST_TYPE},
            }
        }
    ]
}
START_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class Site:
    """What the gateways stand in front of: engines' `ip:port`, a Valkey with the plan of `pool`, where logs go."""

    folder: Path
    engines: tuple[str, ...]
    redis: str
    pool: str


@dataclass(slots=True)
class Gateway:
    """A running gateway. admin: its Envoy's, if it has one.  processes: whose CPU its requests cost, by part."""

    name: str
    address: str
    admin: str
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://{self.address}"

    def bypassed(self) -> int:
        """Return how many requests Envoy sent on without the answer of its processor; 0 where there is none."""
        return envoy_count(self.admin, "ext_proc.failure_mode_allowed") if "envoy" in self.processes else 0

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each part so far."""
        return {part: cpu_s(process.pid) for part, process in self.processes.items() if process.pid is not None}


def environment() -> dict[str, str]:
    """Return the caller's environment without settings of its own."""
    return {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}


def process(site: Site, name: str, argv: list[str], ready: Any, env: dict[str, str] | None = None) -> Process:
    """Return a process that is not started; its log is in the site's folder."""
    log = site.folder / f"{name.replace(' ', '-')}.log"
    return Process(name, argv, log=log, ready=ready, env={**environment(), **(env or {})}, cwd=site.folder)


def answers_tcp(address: str) -> bool:
    """Return whether somebody listens."""
    try:
        with socket.create_connection(split_address(address), timeout=1):
            return True
    except OSError:
        return False


def bootstrap(site: Site, listen: str, admin: str, processor: str) -> dict[str, Any]:
    """Return the lab's Envoy configuration for these addresses."""
    return build_bootstrap(
        EnvoySettings(listen, admin, processor, site.engines, str(site.folder / "access.jsonl"), (KEY_HEADER,))
    )


def cluster(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the cluster of that name."""
    found: dict[str, Any] = next(c for c in document["static_resources"]["clusters"] if c["name"] == name)
    return found


def http_filters(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the HTTP filters of the one listener, to be changed in place."""
    listener = document["static_resources"]["listeners"][0]
    filters: list[dict[str, Any]] = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    return filters


def variant(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the lab's configuration changed into that of one gateway."""
    policy = cluster(document, "pool")["load_balancing_policy"]
    override = policy["policies"][0]["typed_extension_config"]["typed_config"]
    if name in {ENVOY, MAGLEV}:
        fallback = override["fallback_policy"]
        cluster(document, "pool")["load_balancing_policy"] = LEAST_REQUEST if name == ENVOY else fallback
        filters = http_filters(document)
        filters[:] = [f for f in filters if "ext_proc" not in f["name"]]
        clusters = document["static_resources"]["clusters"]
        clusters[:] = [c for c in clusters if c["name"] == "pool"]
    elif name == ECHO:
        override["fallback_policy"] = LEAST_REQUEST
    return document


def envoy(site: Site, name: str, document: dict[str, Any], admin: str, concurrency: int = 1) -> Process:
    """Return an Envoy with this configuration, not started."""
    path = site.folder / f"{name.replace(' ', '-')}.json"
    path.write_text(json.dumps(document))
    command = [str(envoy_program()), "-c", str(path), "--concurrency", str(concurrency)]
    command += ["--disable-hot-restart", "--log-level", "error"]
    return process(site, name, command, lambda: answers_http(admin, "/ready"))


def service(site: Site, listen: str, http: str, *options: str, env: dict[str, str] | None = None) -> Process:
    """Return `cacheroute serve` in front of the site's engines, not started."""
    endpoints = [option for i, e in enumerate(site.engines) for option in ("--endpoint", f"engine-{i}={e}")]
    redis = ["--redis", site.redis, "--pool", site.pool] if site.redis else []
    command = [*CLI, "serve", "--listen", listen, "--http", http, "--key-header", KEY_HEADER, *endpoints, *redis]
    return process(site, "service", [*command, *options], lambda: answers_http(http, "/healthz"), env)


@contextmanager
def running(name: str, site: Site, valkey: Process) -> Iterator[Gateway]:
    """Start the gateway of that name and end it, whatever happens. valkey: its CPU is counted for ours."""
    listen, admin, other, http = (f"{HOST}:{port}" for port in free_ports(4))
    gateway = Gateway(name, listen, admin)
    if name == SGLANG:
        gateway.processes["router"] = _sglang(site, listen, other)
    else:
        document = variant(bootstrap(site, listen, admin, other), name)
        gateway.processes["envoy"] = envoy(site, name, document, admin)
        if name == ECHO:
            program = [sys.executable, str(Path(__file__).with_name("echo_server.py")), other.rpartition(":")[2]]
            env = {"PYTHONPATH": str(Path(__file__).parents[2])}
            gateway.processes["echo"] = process(site, "echo", program, lambda: answers_tcp(other), env)
        elif name == OURS:
            gateway.processes["service"] = service(site, other, http, env={"CACHEROUTE_DRAIN_S": "1"})
    started = list(gateway.processes.values())
    try:
        for part in started:
            part.start()
        wait_ready(started, timeout_s=START_TIMEOUT_S)
        if name == OURS:
            gateway.processes["valkey"] = valkey
            wait_for_plan(http)
        yield gateway
    finally:
        for part in started:
            part.stop()


def wait_for_plan(http: str) -> None:
    """Return when the service serves a published plan."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while read_json(http, "/table")["version"] < 1:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the service does not serve the plan after {START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def read_json(address: str, path: str) -> Any:
    """Return the JSON document that GET answers with."""
    with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as answer:
        return json.load(answer)


def envoy_count(admin: str, name: str) -> int:
    """Return the sum of Envoy's counters whose name has `name` in it."""
    with urllib.request.urlopen(f"http://{admin}/stats?filter={name}", timeout=5) as answer:
        return sum(int(line.rpartition(b": ")[2]) for line in answer)


def _sglang(site: Site, listen: str, metrics: str) -> Process:
    (host, port), (_, metrics_port) = split_address(listen), split_address(metrics)
    command = [str(SGLANG_VENV / "bin" / "sglang-router"), "launch", "--host", host, "--port", str(port)]
    command += ["--prometheus-host", host, "--prometheus-port", str(metrics_port), *SGLANG_OPTIONS]
    command += ["--worker-urls", *(f"http://{engine}" for engine in site.engines)]

    def ready() -> bool:
        if not answers_http(listen, "/readiness"):
            return False
        return sum(worker["is_healthy"] for worker in read_json(listen, "/workers")["workers"]) == len(site.engines)

    return process(site, "sglang-router", command, ready)


def install_sglang() -> str:
    """Return an empty string when the peer can be run, installing it into a venv of its own once; else why not."""
    program = SGLANG_VENV / "bin" / "sglang-router"
    if program.exists():
        return ""
    try:
        venv.create(SGLANG_VENV, with_pip=True)
        pip = [str(SGLANG_VENV / "bin" / "pip"), "install", "-q", "--disable-pip-version-check", SGLANG_WHEEL]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as exc:
        return str(exc)
    return "" if done.returncode == 0 and program.exists() else done.stderr.strip()[-300:]
