"""Starts a whole fleet on this machine: Valkey, engines, the service, Envoy, the planner, on loopback only.

1. All ports are chosen together, so that every part knows the others' addresses before any of them runs.
2. Valkey, engines and the service start at once, Envoy's configuration is built meanwhile; all are awaited under one
   deadline, then the service's own view of the engines; the planner comes last.
3. A part that does not become ready fails the start: what runs is ended, and the error has that part's last lines.
4. The end, by whatever comes (leaving the block, an error, Ctrl-C, SIGTERM, SIGHUP), is the reverse order. When this
   process is killed outright, the kernel ends the parts.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from engine_patch.settings import AUTO, known_policies
from replay.processes import POLL_S, Process, answers_http, answers_ping, free_ports, stop_together, wait_ready
from replay.programs import envoy_program, envoy_version, valkey_program
from service.errors import InvalidInput, ServerUnavailable
from service.settings import split_address

HOST = "127.0.0.1"
KEY_HEADER = "x-tenant-id"
MODEL = "sim-model"
CLI = (sys.executable, "-m", "planner.cli")
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
ONCE_TIMEOUT_S = 60.0
DRAIN_S = 2.0  # Well within the grace of a stop: nobody waits for a lab to end.


@dataclass(frozen=True, slots=True)
class LabSettings:
    """What a lab is made of; a value out of its range is refused when the lab is built.

    kv_blocks: KV-cache blocks an engine (None: the preset's own).  workdir: where logs and the configuration go
    (None: a temporary folder, removed at the end).  gateway_port: 0 takes a free one.  envoy: the program (None: the
    wheel's, or the one on PATH); any of 1.36 to 1.40 does.  eviction_policy: of every engine, or `auto`;
    eviction_interval_s: engine seconds between two decisions of `auto` (None: the engine's own).
    """

    engines: int = 6
    speed: float = 1.0
    preset: str = "70b-fp8-tp2"
    kv_blocks: int | None = None
    eviction_policy: str = "lru"
    eviction_interval_s: float | None = None
    stream_interval_s: float = 0.02
    pool: str = "lab"
    slots_per_endpoint: int = 64
    replica_cap_rps: float = 4.0
    planner: bool = True
    plan_interval_s: float = 30.0
    rate_window_s: float = 30.0
    start_timeout_s: float = 60.0
    workdir: Path | None = None
    seed: int = 0
    gateway_port: int = 0
    envoy: Path | None = None


@dataclass(frozen=True, slots=True)
class LabEngine:
    """One simulated vLLM; `address` is `ip:port` as Envoy and the service know it."""

    name: str
    address: str

    @property
    def url(self) -> str:
        """Where it answers by itself, past the gateway."""
        return f"http://{self.address}"


class Lab:
    """A running fleet as a context manager; from the main thread only (see `replay.processes`)."""

    def __init__(self, settings: LabSettings | None = None) -> None:
        """Choose addresses and start nothing; raise InvalidInput for a setting or a missing program."""
        self.settings = s = settings or LabSettings()
        _refuse(s)
        self._programs = {"valkey": valkey_program(), "envoy": s.envoy.absolute() if s.envoy else envoy_program()}
        self._envoy_version = envoy_version(self._programs["envoy"])
        ports = [f"{HOST}:{port}" for port in free_ports(5 + s.engines)]
        self._valkey, self._service, self._service_http, self._gateway, self._admin = ports[:5]
        if s.gateway_port:
            self._gateway = f"{HOST}:{s.gateway_port}"
        self.pool = s.pool
        self.model = MODEL
        self.engines = tuple(LabEngine(f"engine-{i}", address) for i, address in enumerate(ports[5:]))
        self.redis_url = f"redis://{self._valkey}/0"
        self.gateway_url = f"http://{self._gateway}"
        self.service_url = f"http://{self._service_http}"
        self.envoy_admin_url = f"http://{self._admin}"
        self._temporary = s.workdir is None
        self.workdir = Path()
        self._parts: dict[str, Process] = {}
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Start everything; raise ServerUnavailable, with nothing left running, when a part does not get ready."""
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish is kept
                self._previous_handlers[number] = signal.signal(number, _end)
        try:
            self._start_all()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything in reverse order."""
        self._end_all()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names that `start`, `stop`, `kill`, `restart` and `log_tail` take, in the order of their start."""
        return tuple(self._parts)

    @property
    def access_log(self) -> Path:
        """Envoy's access log, one JSON document a line."""
        return self.workdir / "envoy-access.jsonl"

    def pid(self, part: str) -> int | None:
        """Return the part's process id, None when it does not run."""
        return self._part(part).pid

    def start(self, part: str) -> None:
        """Start a part that was ended, on the port it had, and wait until it is ready."""
        process = self._part(part)
        process.start()
        wait_ready([process], timeout_s=self.settings.start_timeout_s)

    def stop(self, part: str, sig: int = signal.SIGTERM) -> None:
        """End a part and wait for its end; by force when the signal does not do it within 5 s."""
        self._part(part).stop(sig)

    def kill(self, part: str) -> None:
        """End a part at once."""
        self._part(part).kill()

    def send_signal(self, part: str, sig: int) -> None:
        """Send a part a signal and do not wait for anything."""
        self._part(part).send_signal(sig)

    def log_tail(self, part: str, lines: int = 20) -> str:
        """Return the last lines that a part wrote."""
        return self._part(part).log_tail(lines)

    def reset_prefix_caches(self) -> None:
        """Empty the prefix cache of every engine; raise ServerUnavailable when one does not."""
        for engine in self.engines:
            status, body = _request(engine.address, "POST", "/reset_prefix_cache", name=engine.name)
            if status != 200:
                raise ServerUnavailable(f"{engine.name} did not empty its prefix cache: {status} {body.decode()[:200]}")

    def set_eviction(self, policy: str, reason: str) -> None:
        """Have every engine evict by `policy`, or decide by itself (`auto`); ServerUnavailable when one does not."""
        order = json.dumps({"policy": policy, "reason": reason, "actor": "lab"}).encode()
        for engine in self.engines:
            status, body = _request(engine.address, "POST", "/v1/wakman/policy", name=engine.name, body=order)
            if status != 200:
                raise ServerUnavailable(f"{engine.name} did not take {policy}: {status} {body.decode()[:200]}")

    def eviction_history(self) -> dict[str, list[dict[str, Any]]]:
        """Return each engine's changes of its eviction policy, oldest first."""
        return {
            engine.name: json.loads(_request(engine.address, "GET", "/v1/wakman/history", name=engine.name)[1])[
                "engines"
            ][0]["history"]
            for engine in self.engines
        }

    def fleet(self) -> list[dict[str, Any]]:
        """Return the endpoints as the service sees them (`/fleet`)."""
        _, body = _request(self._service_http, "GET", "/fleet", name="service")
        endpoints: list[dict[str, Any]] = json.loads(body)["endpoints"]
        return endpoints

    def plan_once(self) -> dict[str, Any]:
        """Run one planner cycle over the rates so far and return its record; raise ServerUnavailable when it fails."""
        command = [*self._planner_command("once"), "-o", "json"]
        try:
            done = subprocess.run(
                command,
                env=self._environment(),
                cwd=self.workdir,
                capture_output=True,
                text=True,
                timeout=ONCE_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as exc:
            raise ServerUnavailable(f"planner once did not end within {ONCE_TIMEOUT_S:.0f} s") from exc
        if done.returncode != 0:
            raise ServerUnavailable(f"planner once ended with exit code {done.returncode}: {done.stderr.strip()}")
        record: dict[str, Any] = json.loads(done.stdout)
        return record

    def _start_all(self) -> None:
        s = self.settings
        began = time.monotonic()
        self.workdir = Path(tempfile.mkdtemp(prefix="cacheroute-lab-")) if s.workdir is None else s.workdir.resolve()
        try:
            self.workdir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise InvalidInput(
                f"workdir {self.workdir} cannot be made: {exc.strerror}", "give a folder to write to"
            ) from exc
        self._add("valkey", self._valkey_command(), lambda: answers_ping(self._valkey))
        for engine in self.engines:
            self._add(engine.name, self._engine_command(engine), _http_check(engine.address, "/health"))
        self._add("service", self._service_command(), _http_check(self._service_http, "/healthz"))
        self._add("envoy", self._envoy_command(), _http_check(self._admin, "/ready"))
        if s.planner:
            self._add("planner", self._planner_command("run"), self._planner_started)

        first = [p for name, p in self._parts.items() if name not in {"envoy", "planner"}]
        for process in first:
            process.start()
        self._write_envoy_config()
        self._parts["envoy"].start()
        wait_ready([*first, self._parts["envoy"]], timeout_s=s.start_timeout_s, since_s=began)
        while not all(e["ready"] for e in self.fleet()):  # It may have probed an engine before that one listened.
            if time.monotonic() - began > s.start_timeout_s:
                raise self._parts["service"].late(s.start_timeout_s)
            time.sleep(POLL_S)
        if s.planner:
            self.start("planner")

    def _planner_started(self) -> bool:
        # It listens nowhere; this is the first line that it logs.
        return "planner_started" in self._parts["planner"].log_tail(since_start=True)

    def _end_all(self) -> None:
        # A second Ctrl-C must not leave half a fleet; each group ends within its grace anyway.
        handlers: dict[int, Any] = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, *ENDING_SIGNALS)}
        try:
            engines = [self._parts[e.name] for e in self.engines if e.name in self._parts]
            for group in ("planner", "envoy", "service"):
                if group in self._parts:
                    self._parts[group].stop()
            stop_together(engines)
            if "valkey" in self._parts:
                self._parts["valkey"].stop()
        finally:
            if self._temporary and self.workdir != Path():
                shutil.rmtree(self.workdir, ignore_errors=True)
            for number, handler in (handlers | self._previous_handlers).items():
                signal.signal(number, handler)
            self._previous_handlers.clear()

    def _add(self, name: str, argv: list[str], ready: Callable[[], bool]) -> None:
        self._parts[name] = Process(
            name, argv, log=self.workdir / f"{name}.log", ready=ready, env=self._environment(), cwd=self.workdir
        )

    def _part(self, name: str) -> Process:
        if name not in self._parts:
            raise InvalidInput(f"the lab has no part {name!r}", f"choose one of {', '.join(self._parts)}")
        return self._parts[name]

    def _environment(self) -> dict[str, str]:
        """The caller's environment without its own settings of a service or planner, and with the lab's."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        return {
            **inherited,
            "CACHEROUTE_RATE_WINDOW_S": f"{self.settings.rate_window_s:g}",
            "CACHEROUTE_DRAIN_S": f"{DRAIN_S:g}",
            "CACHEROUTE_DRAIN_NOTICE_S": "0",
        }

    def _valkey_command(self) -> list[str]:
        _, port = split_address(self._valkey)
        keep_nothing = ["--save", "", "--appendonly", "no"]
        return [str(self._programs["valkey"]), "--bind", HOST, "--port", str(port), *keep_nothing]

    def _engine_command(self, engine: LabEngine) -> list[str]:
        s = self.settings
        command = [*CLI, "sim-engine", "--listen", engine.address, "--name", engine.name, "--model", MODEL]
        command += ["--preset", s.preset, "--speed", f"{s.speed:g}", "--seed", str(s.seed)]
        command += ["--stream-interval-s", f"{s.stream_interval_s:g}", "--drain-s", f"{DRAIN_S:g}"]
        command += ["--eviction-policy", s.eviction_policy]
        if s.eviction_interval_s is not None:
            command += ["--eviction-interval-s", f"{s.eviction_interval_s:g}"]
        return command if s.kv_blocks is None else [*command, "--kv-blocks", str(s.kv_blocks)]

    def _service_command(self) -> list[str]:
        listen = ["--listen", self._service, "--http", self._service_http, "--key-header", KEY_HEADER]
        return [*CLI, "serve", *listen, *self._pool_options()]

    def _planner_command(self, mode: str) -> list[str]:
        s = self.settings
        capacity = ["--slots", str(s.slots_per_endpoint), "--replica-cap", f"{s.replica_cap_rps:g}"]
        # Whoever asks for one cycle wants its plan now: beside the loop, and unjudged.
        how = ["--interval-s", f"{s.plan_interval_s:g}"] if mode == "run" else ["--force", "--no-gate"]
        return [*CLI, "planner", mode, *self._pool_options(), *capacity, *how]

    def _pool_options(self) -> list[str]:
        endpoints = [option for e in self.engines for option in ("--endpoint", f"{e.name}={e.address}")]
        return ["--redis", self.redis_url, "--pool", self.pool, *endpoints]

    def _envoy_command(self) -> list[str]:
        command = [str(self._programs["envoy"]), "-c", str(self.workdir / "envoy.json"), "--concurrency", "1"]
        return [*command, "--disable-hot-restart", "--log-level", "warning", "--file-flush-interval-msec", "200"]

    def _write_envoy_config(self) -> None:
        from replay.envoy_config import EnvoySettings, build_bootstrap

        bootstrap = build_bootstrap(
            EnvoySettings(
                listen=self._gateway,
                admin=self._admin,
                service=self._service,
                engines=tuple(e.address for e in self.engines),
                access_log=str(self.access_log),
                key_headers=(KEY_HEADER,),
                envoy_version=self._envoy_version,
            )
        )
        (self.workdir / "envoy.json").write_text(json.dumps(bootstrap, indent=2) + "\n")


def _refuse(settings: LabSettings) -> None:
    above_zero: Mapping[str, float] = {
        "speed": settings.speed,
        "stream_interval_s": settings.stream_interval_s,
        "replica_cap_rps": settings.replica_cap_rps,
        "plan_interval_s": settings.plan_interval_s,
        "start_timeout_s": settings.start_timeout_s,
    }
    faults = [f"{name} = {value:g} is not above 0" for name, value in above_zero.items() if not value > 0]
    at_least_one: Mapping[str, float] = {
        "engines": settings.engines,
        "slots_per_endpoint": settings.slots_per_endpoint,
        "rate_window_s": settings.rate_window_s,
    }
    faults += [f"{name} = {value:g} is below 1" for name, value in at_least_one.items() if not value >= 1]
    if faults:
        raise InvalidInput(f"lab: {'; '.join(faults)}", "give a larger value")
    known = (AUTO, *known_policies())
    if settings.eviction_policy not in known:
        raise InvalidInput(
            f"lab: the eviction policy {settings.eviction_policy!r} is unknown", f"choose among {', '.join(known)}"
        )


def _http_check(address: str, path: str) -> Callable[[], bool]:
    return lambda: answers_http(address, path)


def _request(address: str, method: str, path: str, *, name: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*split_address(address), timeout=10)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as exc:
        raise ServerUnavailable(f"{name} at {address} does not answer {method} {path}: {exc}") from exc
    finally:
        connection.close()


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
