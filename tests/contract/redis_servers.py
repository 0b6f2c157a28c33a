"""Real Valkeys in every mode that production has: behind TLS, with users, watched by Sentinels, as a Cluster."""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import redis

from replay.processes import Process, free_ports, stop_together, wait_ready
from replay.programs import valkey_program

MASTER = "cacheroute-master"
SLOTS = 16384


def answers(port: int) -> bool:
    """Return whether a server or Sentinel of that port talks, if only to say that it wants a password."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16)[:5] in (b"+PONG", b"-NOAU", b"-NOPE")
    except OSError:
        return False


def process(directory: Path, port: int, *arguments: str) -> Process:
    """Return one Valkey, not started, that keeps nothing on disk."""
    folder = directory / str(port)
    folder.mkdir()
    plain = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    plain += ["--repl-diskless-sync-delay", "0"]
    return Process(
        f"valkey-{port}",
        [valkey_program(), *plain, *arguments],
        log=folder / "log",
        ready=lambda: answers(port),
        env=os.environ,
        cwd=folder,
    )


@contextlib.contextmanager
def running(*processes: Process) -> Iterator[None]:
    """Keep them up for the block."""
    try:
        for one in processes:
            one.start()
        wait_ready(processes, timeout_s=30)
        yield
    finally:
        stop_together(processes)


def eventually(true: Callable[[], object], what: str, within_s: float = 40.0) -> None:
    """Wait until it is so; servers that are just starting may refuse meanwhile."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(redis.RedisError):
            if true():
                return
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Watched:
    """A master, a replica and three Sentinels, the first of which is listed and dead."""

    def __init__(self, directory: Path) -> None:
        dead, *self._sentinel_ports = free_ports(6)
        self.port, self.replica_port = self._sentinel_ports.pop(), self._sentinel_ports.pop()
        self.master = process(directory, self.port)
        self.replica = process(directory, self.replica_port, "--replicaof", f"127.0.0.1 {self.port}")
        self._sentinels = [self._sentinel(directory, port) for port in self._sentinel_ports]
        hosts = ",".join(f"127.0.0.1:{port}" for port in (dead, *self._sentinel_ports))
        self.url = f"redis+sentinel://{hosts}/{MASTER}?sentinel_username=watcher&sentinel_password=watch%26see"

    @staticmethod
    def _sentinel(directory: Path, port: int) -> Process:
        folder = directory / str(port)
        folder.mkdir()
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            "user default off\n"
            "user watcher on >watch&see -@all +sentinel|masters +ping\n"
            "user peer on >peer allchannels +@all\nsentinel sentinel-user peer\nsentinel sentinel-pass peer\n"
        )
        return Process(
            f"sentinel-{port}",
            [valkey_program(), config, "--sentinel"],
            log=folder / "log",
            ready=lambda: answers(port),
            env=os.environ,
            cwd=folder,
        )

    @contextlib.contextmanager
    def running(self) -> Iterator["Watched"]:
        """Keep all up; return when every Sentinel knows the others and the replica."""
        with running(self.master, self.replica, *self._sentinels), redis.Redis(port=self.port) as master:
            # A Sentinel that finds no replica at first looks again only after ten seconds.
            eventually(lambda: "online" in str(master.info("replication")), "no replication")
            for port in self._sentinel_ports:
                sentinel = redis.Redis(port=port, username="peer", password="peer")
                sentinel.execute_command("SENTINEL", "MONITOR", MASTER, "127.0.0.1", self.port, 2)
                for name, value in (("down-after-milliseconds", 1000), ("failover-timeout", 3000)):
                    sentinel.execute_command("SENTINEL", "SET", MASTER, name, value)
                sentinel.close()
            for port in self._sentinel_ports:
                with redis.Redis(port=port, username="peer", password="peer") as sentinel:
                    eventually(lambda s=sentinel: s.execute_command("SENTINEL", "CKQUORUM", MASTER), "no quorum")  # type: ignore[misc]
                    eventually(lambda s=sentinel: len(s.sentinel_slaves(MASTER)) == 1, "no replica")  # type: ignore[misc]
            yield self


class Cluster:
    """Three masters, and one replica of the master that has a given key's slot."""

    def __init__(self, directory: Path, key: str) -> None:
        ports = free_ports(8)
        self.ports, self._bus = ports[:4], ports[4:]
        self.nodes = [self._node(directory, port, bus) for port, bus in zip(self.ports, self._bus, strict=True)]
        self._key = key
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in (self.ports[1], self.ports[0]))

    @staticmethod
    def _node(directory: Path, port: int, bus: int) -> Process:
        clustered = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port", str(bus)]
        return process(directory, port, *clustered)

    @contextlib.contextmanager
    def running(self) -> Iterator["Cluster"]:
        """Keep all up; return when every node says that the Cluster is whole."""
        with running(*self.nodes), contextlib.ExitStack() as stack:
            clients = [stack.enter_context(redis.Redis(port=port)) for port in self.ports]
            for index, client in enumerate(clients):
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.ports[0], self._bus[0])
            third = SLOTS // 3
            ranges = [(0, third), (third + 1, 2 * third), (2 * third + 1, SLOTS - 1)]
            for client, (first, last) in zip(clients[:3], ranges, strict=True):
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            slot = int(clients[0].execute_command("CLUSTER", "KEYSLOT", self._key))
            self.owner = next(i for i, (first, last) in enumerate(ranges) if first <= slot <= last)
            owner_id = clients[self.owner].execute_command("CLUSTER", "MYID").decode()

            def met() -> bool:
                return all(f"cluster_known_nodes:{len(clients)}" in info(client) for client in clients)

            def info(client: "redis.Redis") -> str:
                return str(client.execute_command("CLUSTER", "INFO"))

            eventually(met, "the nodes never met")
            eventually(lambda: clients[3].execute_command("CLUSTER", "REPLICATE", owner_id), "no replica")
            eventually(
                lambda: all("cluster_state:ok" in info(client) for client in clients), "the Cluster is not whole"
            )
            eventually(lambda: clients[3].info()["master_link_status"] == "up", "no replication")
            yield self


class Authority:
    """A certificate authority of the test's own, by the openssl program."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.certificate = directory / "ca.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem"),
        )

    def issue(self, name: str, subject_alternative: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Return certificate and key of somebody."""
        extensions = self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={subject_alternative}\n")
        self._openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self._directory / f"{name}.pem", self._directory / f"{name}.key"

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)


@contextlib.asynccontextmanager
async def tls_in_front(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Terminate TLS in front of a server, whose program may be built without it; yield the port."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def bridge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        writer.close()

    listener = await asyncio.start_server(bridge, "127.0.0.1", 0, ssl=context)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
