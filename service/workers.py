"""Runs N service processes on one gRPC port, as one service to whoever looks from outside.

1. The port is held here (`service.ports`); each worker listens on it by itself, and the kernel deals out connections.
2. A worker is `python -m service --worker`: a new program, since gRPC does not survive a fork. What it is to do comes
   as one JSON line on its standard input, which then stays open: when it closes we are gone, and the worker ends.
3. The first worker is started alone, so that a fault of the settings is told once and ends the start with its exit
   code. After the start a worker that ends unasked, or cannot be started, is started again, at once and then ever
   later. One that answers nothing at `HANGS` looks, or is not ready after `STARTS`, is killed, and started again too.
4. The HTTP port is ours. Workers answer on sockets in a private folder; `service.aggregate` makes one answer of theirs.
5. Without Redis nobody else tells workers of each other's load: each is given the sum of the others' every
   `load_exchange_s`, and answers with its own. With Redis each is an instance like any other.
6. SIGTERM goes on to the workers; the end comes when the last has drained, or is past its time and killed. Workers
   are process groups of their own: a Ctrl-C reaches them through us, once.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from service.aggregate import Load, load_of_others
from service.errors import InvalidInput
from service.folder import socket_folder
from service.front import WorkerPort, build_front
from service.http import LOAD_PATH, http_port, listen_http
from service.ports import hold_port
from service.settings import ServiceSettings, split_address
from service.tls import Pair, first_pair

WORKER_OPTION = "--worker"

READY_POLL_S = 0.1
BACKOFF_S = (0.1, 30.0)
# How often each worker is asked whether it lives, and after how many looks without any answer it is killed: about half
# a minute, and more than one for its start. Looks count, not seconds: those pass unseen while all of us are stopped.
WATCH_S = 5.0
HANGS = 5
STARTS = 12
# A worker that has run this long is taken as sound: its next end is answered at once again.
SOUND_S = 60.0
# Beyond the time that a worker has to drain.
ENDING_S = 8.0

CANNOT_START = "allow this user more processes, open files or memory (ulimit -u, ulimit -n, the container's limits)"
HANGING = "worker answers nothing any more, killing it"
NOT_READY = "worker does not get ready, killing it; its last log line says what it waits for"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Seat:
    """What one worker is told by its supervisor, beside the settings. http: path of its socket."""

    number: int
    http: str
    pair: Pair | None = None

    def write(self, settings: ServiceSettings) -> bytes:
        """Return the line that a worker reads."""
        seat = asdict(self) | {"pair": [p and p.decode("latin-1") for p in self.pair] if self.pair else None}
        return json.dumps({"seat": seat, "settings": settings.model_dump()}).encode() + b"\n"


def read_seat(line: bytes) -> tuple[Seat, ServiceSettings]:
    """Return what `Seat.write` wrote."""
    told = json.loads(line)
    seat, pair = told["seat"], told["seat"].pop("pair")
    settings = ServiceSettings(**told["settings"])
    return Seat(**seat, pair=Pair(*(p and p.encode("latin-1") for p in pair)) if pair else None), settings


def end_with_supervisor(orphan: Callable[[], None], *, within_s: float) -> None:
    """Call `orphan` in the running loop when the supervisor's end of standard input closes.

    A process that has not ended `within_s` after that is ended outright: nobody else would.
    """
    loop = asyncio.get_running_loop()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # The loop has closed: we are ending anyway.
            loop.call_soon_threadsafe(orphan)
        time.sleep(within_s)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor", daemon=True).start()


def leave(seat: Seat) -> None:
    """Remove what the supervisor can remove no more; the last worker removes the folder."""
    with contextlib.suppress(OSError):
        os.unlink(seat.http)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(seat.http))


@dataclass(slots=True)
class _Worker:
    port: WorkerPort
    process: Process | None = None
    restarts: int = 0
    load: Load = field(default_factory=dict)
    # Looks since this process last answered.
    misses: int = 0

    def send(self, number: int) -> None:
        """Send a signal; nothing happens when it does not run."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def supervise(settings: ServiceSettings, in_force: Mapping[str, object]) -> int:
    """Run the workers until SIGTERM; return the exit code.  in_force: what to log at the start.

    Raise InvalidInput when a port is taken or a certificate cannot be used.
    """
    pair = first_pair(settings)
    with socket_folder() as folder:
        holder, listen = hold_port(settings.listen)
        with holder:
            return asyncio.run(Workers(settings, listen, pair, folder).run(in_force))


def _environment() -> dict[str, str]:
    """Return the environment in which `-P -m service` runs this very package, whatever the current folder holds."""
    home = str(Path(__file__).resolve().parent.parent)
    # Where it is installed it is found, and that folder must not come before the standard library.
    if home in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        return dict(os.environ)
    path = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{home}{os.pathsep}{path}" if path else home}


class Workers:
    """The processes of one service, and the HTTP port in front of them."""

    def __init__(self, settings: ServiceSettings, listen: str, pair: Pair | None, folder: Path) -> None:
        """listen: the address that workers share.  folder: private, for their sockets.  Nothing is started yet."""
        self._settings, self._listen, self._pair, self._folder = settings, listen, pair, folder
        self._workers: list[_Worker] = []
        self._stop = asyncio.Event()

    async def run(self, in_force: Mapping[str, object]) -> int:
        """Run until SIGTERM, or until the first worker turns out unable to start; return the exit code."""
        for ending_signal in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(ending_signal, self._stop.set)
        async with contextlib.AsyncExitStack() as ending:
            for number in range(self._settings.workers):
                port = WorkerPort(number, str(self._folder / f"{number}.sock"))
                ending.push_async_callback(port.close)
                self._workers.append(_Worker(port))
            app = build_front(
                [w.port for w in self._workers],
                draining=self._stop.is_set,
                restarts=lambda: [w.restarts for w in self._workers],
                others_known=bool(self._settings.redis_url),
            )
            http = await listen_http(app, self._settings.http)
            ending.push_async_callback(http.cleanup)
            log.info("starting", pid=os.getpid(), **in_force)
            try:
                await self._start(self._workers[0])
            except OSError as exc:
                raise InvalidInput(f"no worker can be started: {exc.strerror}", CANNOT_START) from exc
            if code := await self._failed_first():
                return code
            return await self._run(http_port(http))

    async def _run(self, http: int) -> int:
        """Keep all workers until SIGTERM, then end them; raise what ended one of our own tasks, if one did."""
        keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        stop = asyncio.create_task(self._stop.wait())
        works: list[Coroutine[Any, Any, None]] = [self._announce(http), *(self._watch(w) for w in self._workers)]
        if not self._settings.redis_url:  # With Redis each worker is told by it, and more.
            works += [self._exchange(worker) for worker in self._workers]
        others = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait([stop, *others, *keepers], return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            log.info("draining", pid=os.getpid(), workers=len(self._workers))
            code = await self._end(keepers)
            for other in others:
                if other.done():
                    other.result()
            return code
        finally:
            for task in (stop, *others, *keepers):
                task.cancel()
            await asyncio.wait([stop, *others, *keepers])

    async def _start(self, worker: _Worker) -> None:
        """Start its process; raise OSError when the system has no room for it."""
        settings = self._settings.model_copy(
            update={"listen": self._listen, "instance": f"{self._settings.instance}-w{worker.port.number}"}
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(worker.port.path)
        worker.misses, worker.port.served = 0, False
        worker.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "service", WORKER_OPTION), stdin=PIPE, env=_environment(), process_group=0
        )
        assert worker.process.stdin is not None, "its input is a pipe"
        worker.process.stdin.write(Seat(worker.port.number, worker.port.path, self._pair).write(settings))
        if self._stop.is_set():
            worker.send(signal.SIGTERM)

    async def _failed_first(self) -> int:
        """Wait until the first worker serves; return its exit code if it ends instead, 1 if it does neither, else 0."""
        first = self._workers[0]
        assert first.process is not None, "it was started"
        ends = asyncio.get_running_loop().time() + STARTS * WATCH_S
        while not self._stop.is_set() and not await first.port.serves():
            if first.process.returncode is not None:
                return first.process.returncode or 1
            if asyncio.get_running_loop().time() > ends:
                self._kill(first, NOT_READY)
                await first.process.wait()
                return 1
            await asyncio.sleep(READY_POLL_S)
        return 0

    async def _keep(self, worker: _Worker) -> int:
        """Start a worker as often as it ends, until all shall end; return its last exit code."""
        pause_s = BACKOFF_S[0]
        number = worker.port.number
        while True:
            started = time.monotonic()
            code = 0
            try:
                if worker.process is None:
                    if self._stop.is_set():
                        return 0
                    await self._start(worker)
            except OSError as exc:
                told = {"worker": number, "error": exc.strerror, "pause_s": pause_s, "remedy": CANNOT_START}
                log.error("worker cannot be started, trying again", **told)
            else:
                assert worker.process is not None, "it was started"
                code = await worker.process.wait()
                worker.process, worker.load = None, {}
                if self._stop.is_set():
                    return code
                if time.monotonic() - started > SOUND_S:
                    pause_s = BACKOFF_S[0]
                worker.restarts += 1
                log.error("worker ended, starting it again", worker=number, exit_code=code, pause_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
                    return code
            pause_s = min(2 * pause_s, BACKOFF_S[1])

    async def _watch(self, worker: _Worker) -> None:
        """Kill a worker that hangs: the kernel goes on dealing it connections, and they get no answer."""
        while True:
            await asyncio.sleep(WATCH_S)
            process = worker.process
            if process is None:
                continue
            answer = await worker.port.ask("GET", "/healthz")
            if process is not worker.process or self._stop.is_set():
                continue
            port = worker.port
            port.served = port.served or (answer is not None and answer[0] == 200)
            worker.misses = 0 if answer is not None and port.served else worker.misses + 1
            if worker.misses >= (HANGS if port.served else STARTS):
                self._kill(worker, HANGING if port.served else NOT_READY)
                worker.misses = 0

    def _kill(self, worker: _Worker, why: str) -> None:
        log.error(why, worker=worker.port.number, pid=worker.process and worker.process.pid)
        worker.send(signal.SIGKILL)

    async def _end(self, keepers: Sequence[asyncio.Task[int]]) -> int:
        """Let all drain; return 0 when each did."""
        for worker in self._workers:
            worker.send(signal.SIGTERM)
        await asyncio.wait(keepers, timeout=self._settings.drain_notice_s + self._settings.drain_s + ENDING_S)
        for worker in self._workers:
            if worker.process is not None:
                self._kill(worker, "worker did not end in time, killing it")
        codes = await asyncio.gather(*keepers)
        log.info("stopped", exit_codes=codes)
        # One that was still starting knows no SIGTERM yet and ends by it.
        return 0 if set(codes) <= {0, -signal.SIGTERM} else 1

    async def _announce(self, http: int) -> None:
        while not all([await worker.port.serves() for worker in self._workers]):  # noqa: ASYNC110  # other processes
            await asyncio.sleep(READY_POLL_S)
        log.info("serving", pid=os.getpid(), port=split_address(self._listen)[1], http_port=http)
        await self._stop.wait()

    async def _exchange(self, worker: _Worker) -> None:
        while True:
            await asyncio.sleep(self._settings.load_exchange_s)
            others = load_of_others({w.port.number: w.load for w in self._workers}, worker.port.number)
            answer = await worker.port.ask("POST", LOAD_PATH, json=others)
            worker.load = json.loads(answer[1]) if answer is not None and answer[0] == 200 else {}
