"""A `cacheroute serve` of its own for a test, and what a gateway and an operator see of it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from replay.processes import free_ports
from service.pb import ext_proc_pb2 as pb

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
PATIENCE_S = 30.0


def environment(**settings: str) -> dict[str, str]:
    """Return the caller's environment with these settings and no others; names without CACHEROUTE_."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
    return {**clean, **{f"CACHEROUTE_{k.upper()}": v for k, v in settings.items()}}


def until(check: Callable[[], Any], what: str, within_s: float = PATIENCE_S) -> Any:
    """Wait until `check()` holds and return what it returned."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError):
            if found := check():
                return found
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.1)


class Serving:
    """A running service as a context manager; it is killed at the end if it still runs."""

    def __init__(self, log: Path, **settings: str) -> None:
        """log: where its standard error goes.  settings: without CACHEROUTE_."""
        self.grpc_port, self.http_port = free_ports(2)
        self._log = log
        given = {"listen": f"127.0.0.1:{self.grpc_port}", "http": f"127.0.0.1:{self.http_port}"}
        given |= {"endpoint": "a=127.0.0.1:1,b=127.0.0.1:2", "probe_interval_s": "60", "probe_failures": "1000"}
        given |= {"drain_notice_s": "0", "drain_s": "20", "load_exchange_s": "0.05"} | settings
        self._environment = environment(**given)
        self._channels: list[grpc.Channel] = []

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "planner.cli", "serve"], env=self._environment, stderr=log
            )
        try:
            until(lambda: self.get("/healthz")[0] == 200 or self.process.poll() is not None, "serving")
            if self.process.poll() is not None:
                pytest.fail(f"ended at the start: {self.log()}", pytrace=False)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for channel in self._channels:
            channel.close()
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """Return what it wrote."""
        return self._log.read_text()

    def events(self) -> list[dict[str, Any]]:
        """Return its log lines."""
        return [json.loads(line) for line in self.log().splitlines()]

    def told(self, event: str) -> list[dict[str, Any]]:
        """Return its log lines of one event."""
        return [line for line in self.events() if line["event"] == event]

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()

    def json(self, path: str) -> Any:
        """Return the document at a path, whatever its status."""
        return json.loads(self.get(path)[1])

    def families(self) -> list[Metric]:
        """Return all metric families of /metrics."""
        status, text = self.get("/metrics")
        assert status == 200
        return list(text_string_to_metric_families(text))

    def samples(self, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a metric by worker, "" where there is only one process."""
        return {
            s.labels.get("worker", ""): s.value
            for family in self.families()
            for s in family.samples
            if s.name == name and labels.items() <= s.labels.items()
        }

    def inflight(self) -> int:
        """Return what /fleet says is in flight."""
        return sum(e["inflight"] for e in self.json("/fleet")["endpoints"])

    def workers(self) -> list[psutil.Process]:
        """Return its child processes."""
        return psutil.Process(self.process.pid).children()

    def channel(self, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
        """Return a channel with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.ssl_target_name_override", "localhost")]
        target = f"127.0.0.1:{self.grpc_port}"
        if credentials is None:
            channel = grpc.insecure_channel(target, options=options[:1])
        else:
            channel = grpc.secure_channel(target, credentials, options=options)
        self._channels.append(channel)
        return channel

    def terminate(self) -> int:
        """Ask it to end and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


class Held:
    """A request in flight: its headers were answered, and it stays until `end`."""

    def __init__(self, channel: grpc.Channel) -> None:
        """Raise grpc.RpcError when it is not answered."""
        self._over = False
        self._call = channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )(self._messages(), timeout=PATIENCE_S * 2)
        self.reply: pb.ProcessingResponse = next(self._call)

    def _messages(self) -> Iterator[pb.ProcessingRequest]:
        message = pb.ProcessingRequest()
        message.request_headers.SetInParent()
        yield message
        while not self._over:
            time.sleep(0.01)

    def end(self) -> None:
        """End it as Envoy does; raise grpc.RpcError when the stream had broken."""
        self._over = True
        assert list(self._call) == []
