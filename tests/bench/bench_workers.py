"""What more workers bring: requests/s, CPU a request, and how evenly one Envoy spreads its streams over them.

1. Sixty-four clients send one request after the other through an Envoy with two worker threads, as fast as answers
   come. All parts share this machine: requests/s show the gain only where cores are to be had.
2. The kernel deals connections out to workers, and Envoy opens another one, per thread, only when all it has are full
   of streams (`CACHEROUTE_STREAMS_PER_CONNECTION`). So few streams at a time may all go to one worker.
3. Every measurement starts Envoy and service afresh, since which worker gets a connection is drawn once.

Share: the busiest worker's part of the CPU that all workers took; 1 over their number is even.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from chunk_server import PAYLOAD
from gateways import Site, answers_tcp, bootstrap, envoy, envoy_count, process, service
from stats import cpu_s, machine, spread

from replay.lab import HOST, KEY_HEADER
from replay.processes import free_ports, wait_ready
from service.settings import split_address

CLIENTS, ENVOY_THREADS = 64, 2
# workers, streams a connection (0: the default)
CASES = ((1, 0), (2, 0), (2, 8), (3, 8))
END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Round:
    """One measurement."""

    rps: float
    cpu_ms: float
    share: float
    connections: tuple[int, ...]
    bypassed: int


class Client(asyncio.Protocol):
    """Sends a request, and the next one when it is answered."""

    def __init__(self, number: int) -> None:
        self.answered = 0
        self.refused = b""
        head = f"POST /1 HTTP/1.1\r\nhost: llm\r\n{KEY_HEADER}: tenant-{number}\r\ncontent-length: 2\r\n\r\n"
        self._request = head.encode() + b"{}"
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count an answer that is whole."""
        self._got += data
        if self._got.endswith(END):
            self.refused = self.refused or (b"" if PAYLOAD in self._got else self._got)
            self._got = b""
            self.answered += 1
            self.transport.write(self._request)


@contextmanager
def system(site: Site, workers: int, streams: int) -> Iterator[tuple[str, str, int, int]]:
    """Start a service and an Envoy; yield Envoy's two addresses, the service's process id and gRPC port."""
    listen, admin, grpc, http = (f"{HOST}:{port}" for port in free_ports(4))
    env = {"CACHEROUTE_STREAMS_PER_CONNECTION": str(streams)} if streams else {}
    document = bootstrap(site, listen, admin, grpc)
    parts = [
        service(site, grpc, http, "--workers", str(workers), env=env),
        envoy(site, "envoy", document, admin, ENVOY_THREADS),
    ]
    try:
        for part in parts:
            part.start()
        wait_ready(parts, timeout_s=40)
        assert parts[0].pid is not None
        yield listen, admin, parts[0].pid, int(grpc.rpartition(":")[2])
    finally:
        for part in parts:
            part.stop()


async def measure(address: str, admin: str, pids: list[int], grpc_port: int, seconds: float) -> Round:
    """Run the clients; pids: the processes that serve."""
    loop, clients = asyncio.get_running_loop(), [Client(number) for number in range(CLIENTS)]
    for client in clients:
        await loop.create_connection(lambda c=client: c, *split_address(address))  # type: ignore[misc]
    await asyncio.sleep(1)
    answered, cpu = sum(c.answered for c in clients), {pid: cpu_s(pid) for pid in pids}
    bypassed = envoy_count(admin, "ext_proc.failure_mode_allowed")
    began = loop.time()
    await asyncio.sleep(seconds)
    took_s, count = loop.time() - began, sum(c.answered for c in clients) - answered
    used = [cpu_s(pid) - before for pid, before in cpu.items()]
    connections = tuple(sorted((connections_of(pid, grpc_port) for pid in pids), reverse=True))
    for client in clients:
        client.transport.abort()
        assert not client.refused, client.refused[:300]
    bypassed = envoy_count(admin, "ext_proc.failure_mode_allowed") - bypassed
    return Round(count / took_s, sum(used) / count * 1e3, max(used) / sum(used), connections, bypassed)


def connections_of(pid: int, port: int) -> int:
    """Return how many connections a process has accepted on that port."""
    return sum(
        c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port
        for c in psutil.Process(pid).net_connections(kind="tcp")
    )


def main() -> None:
    """Print every case, min / median / max."""
    parser = argparse.ArgumentParser(description="requests/s and evenness by number of workers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    options = parser.parse_args()
    rounds: dict[tuple[int, int], list[Round]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        backend = f"{HOST}:{free_ports(1)[0]}"
        site = Site(Path(folder), (backend,), "", "bench")
        command = [sys.executable, str(Path(__file__).with_name("chunk_server.py")), backend.rpartition(":")[2]]
        server = process(site, "backend", command, lambda: answers_tcp(backend))
        stack.callback(server.stop)
        server.start()
        wait_ready([server], timeout_s=20)
        for _ in range(options.rounds):
            for workers, streams in CASES:
                with system(site, workers, streams) as (address, admin, pid, port):
                    pids = [child.pid for child in psutil.Process(pid).children(recursive=True)] or [pid]
                    found = asyncio.run(measure(address, admin, pids, port, options.seconds))
                    rounds[workers, streams].append(found)
    print(f"{CLIENTS} clients, Envoy with {ENVOY_THREADS} threads ({machine()})")
    print(f"min / median / max of {options.rounds} starts")
    for (workers, streams), of in rounds.items():
        print(f"  {workers} workers, {streams or 'default'} streams a connection")
        print(f"    requests/s {spread([r.rps for r in of], 0)}   CPU ms a request {spread([r.cpu_ms for r in of], 3)}")
        print(f"    busiest worker's share {spread([r.share for r in of])}   connections by worker", end=" ")
        print(" ".join("+".join(map(str, r.connections)) for r in of))
        print(f"    requests that Envoy did not wait for {sum(r.bypassed for r in of)}")


if __name__ == "__main__":
    main()
