"""Starts what a test module attaches to each other: services, backends and one Envoy that a test configures freely.

1. An `Attachment` begins with the project's own bootstrap and no listener. Each listener, pool and service that a test
   adds is a copy of the lab's, as the JSON document that Envoy reads, which the test then changes.
2. Many listeners on one Envoy are many gateways: each has its own filters, and starting it costs a hundred times less.
"""

import asyncio
import copy
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from replay.envoy_config import POOL_CLUSTER, SERVICE_CLUSTER, EnvoySettings, build_bootstrap
from replay.processes import Process, answers_http, free_ports, wait_ready
from replay.programs import envoy_program, envoy_version
from service.errors import InvalidInput
from service.settings import split_address
from tests.e2e.backend import Backend
from tests.e2e.bootstrap import Json, processor, route

UNUSED = "127.0.0.1:1"
START_S = 30.0
STATS_S = 0.2
# A busy machine shall not decide a test.
NEVER = "30s"
PATIENCE_S = 30.0


class Attachment:
    """The parts of one module; add them, then `with` starts and ends them."""

    def __init__(self, workdir: Path, backends: Sequence[str]) -> None:
        """backends: every address that the backend answers on; those of pools may have others, which are dead."""
        try:
            self._envoy_program = envoy_program()
        except InvalidInput as exc:
            pytest.skip(str(exc))
        self.backend = Backend(backends)
        self.urls: dict[str, str] = {}
        self.services: dict[str, Process] = {}
        self._service_urls: dict[str, str] = {}
        self._workdir = workdir
        self._ports = free_ports(40)
        self.admin = self.address()
        settings = EnvoySettings(
            listen=UNUSED,
            admin=self.admin,
            service=UNUSED,
            engines=(UNUSED,),
            access_log=str(self.log),
            envoy_version=envoy_version(self._envoy_program),
        )
        self.document = build_bootstrap(settings)
        resources = self.document["static_resources"]
        (self._listener,) = resources["listeners"]
        clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
        self._service, self._pool = clusters[SERVICE_CLUSTER], clusters[POOL_CLUSTER]
        resources["listeners"], resources["clusters"] = [], []
        self.document["stats_flush_interval"] = f"{STATS_S}s"
        self._service["track_cluster_stats"] = {"request_response_sizes": True}

    @property
    def log(self) -> Path:
        """Envoy's access log."""
        return self._workdir / "access.jsonl"

    def address(self) -> str:
        """Return an address that nobody uses."""
        return f"127.0.0.1:{self._ports.pop()}"

    def service(self, name: str, endpoints: Sequence[str], **settings: str) -> Json:
        """Add a service process over these endpoints and return its cluster; settings: by name, without CACHEROUTE_."""
        listen, http = self.address(), self.address()
        endpoint = ",".join(f"{address.replace(':', '-')}={address}" for address in endpoints)
        given = {"listen": listen, "http": http, "endpoint": endpoint, "slow_start_s": "0"}
        given |= {"drain_notice_s": "0", "drain_s": "0.2"} | settings
        clean = {k: v for k, v in os.environ.items() if not k.startswith("CACHEROUTE_")}
        self.services[name] = Process(
            name,
            [sys.executable, "-m", "planner.cli", "serve"],
            log=self._workdir / f"{name}.log",
            ready=lambda: answers_http(http, "/healthz"),
            env={**clean, **{f"CACHEROUTE_{k.upper()}": v for k, v in given.items()}},
            cwd=self._workdir,
        )
        self._service_urls[name] = f"http://{http}"
        return self.service_cluster(name, listen)

    def service_cluster(self, name: str, address: str) -> Json:
        """Add the cluster of an external processor alone, which may be dead, and return it."""
        return self._add_cluster(self._service, name, [address])

    def pool(self, name: str, hosts: Sequence[str], *, h2: bool = False) -> Json:
        """Add a pool of model servers and return its cluster."""
        cluster = self._add_cluster(self._pool, name, hosts)
        if h2:
            (options,) = cluster["typed_extension_protocol_options"].values()
            options["explicit_http_config"] = {"http2_protocol_options": {}}
        return cluster

    def gateway(self, name: str, *, service: str, pool: str) -> Json:
        """Add a listener and return its connection manager's configuration."""
        listener = copy.deepcopy(self._listener)
        address = self.address()
        listener["name"] = name
        listener["address"] = _socket_address(address)
        manager: Json = listener["filter_chains"][0]["filters"][0]["typed_config"]
        manager["stat_prefix"] = name
        processor(manager)["grpc_service"]["envoy_grpc"]["cluster_name"] = service
        processor(manager)["message_timeout"] = NEVER
        route(manager)["route"]["cluster"] = pool
        self.document["static_resources"]["listeners"].append(listener)
        self.urls[name] = f"http://{address}"
        return manager

    def _add_cluster(self, like: Json, name: str, hosts: Sequence[str]) -> Json:
        cluster = copy.deepcopy(like)
        cluster["name"] = cluster["load_assignment"]["cluster_name"] = name
        cluster["connect_timeout"] = NEVER
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [{"endpoint": {"address": _socket_address(address)}} for address in hosts]}
        ]
        self.document["static_resources"]["clusters"].append(cluster)
        return cluster

    def __enter__(self) -> Self:
        config = self._workdir / "envoy.json"
        config.write_text(json.dumps(self.document))
        options = ["--concurrency", "1", "--use-dynamic-base-id", "--service-node", "test", "--service-cluster", "test"]
        options += ["--log-level", "warning", "-c", str(config)]
        self._envoy = Process(
            "envoy",
            [self._envoy_program, *options],
            log=self._workdir / "envoy.log",
            ready=lambda: answers_http(self.admin, "/ready"),
            env=os.environ,
            cwd=self._workdir,
        )
        self.backend.start()
        try:
            # Services first, so that Envoy's first check of their health finds them.
            for parts in ([*self.services.values()], [self._envoy]):
                for process in parts:
                    process.start()
                wait_ready(parts, timeout_s=START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self._envoy, *self.services.values()):
            process.kill()
        self.backend.stop()

    def restart(self, name: str) -> None:
        """Start a service that was killed and wait until it serves."""
        self.services[name].start()
        wait_ready([self.services[name]], timeout_s=START_S)

    def fleet(self, service: str) -> list[Json]:
        """Return the endpoints as a service sees them."""
        endpoints: list[Json] = _get_json(f"{self._service_urls[service]}/fleet")["endpoints"]
        return endpoints

    def inflight(self, service: str) -> int:
        """Return how many requests a service has in flight."""
        return sum(e["inflight"] for e in self.fleet(service))

    async def drained(self) -> None:
        """Wait until no service that runs has a request in flight or a stream open."""

        def empty() -> bool:
            return not any(self.inflight(n) or self.metric(n, "cacheroute_streams") for n in self.services)

        await until(empty, "nothing in flight")

    def metric(self, service: str, name: str, **labels: str) -> float:
        """Return the sum of a service's samples of this name that have these labels, 0 when there is none."""
        text = _get(f"{self._service_urls[service]}/metrics").decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def envoy_stat(self, name: str) -> int:
        """Return a counter or gauge of Envoy by its exact name, 0 when there is none."""
        stats = _get_json(f"http://{self.admin}/stats?filter=^{name}$&format=json")["stats"]
        return sum(int(s["value"]) for s in stats if s.get("name") == name)

    def bytes_answered(self, service: str) -> int:
        """Return the bytes that a service has sent in streams that have ended; late by STATS_S."""
        text = _get(f"http://{self.admin}/stats/prometheus?filter=upstream_rs_body_size").decode()
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.endswith("_sum") and sample.labels.get("envoy_cluster_name") == service
        )

    def healthy(self, cluster: str) -> bool:
        """Return whether Envoy takes a cluster of one host for alive; its worker learns it a moment later."""
        return self.envoy_stat(f"cluster.{cluster}.membership_healthy") == 1

    def host_stats(self, address: str, name: str) -> list[int]:
        """Return a gauge or counter that Envoy keeps of a host, for each pool that has the host."""
        lines = [line.split("::") for line in _get(f"http://{self.admin}/clusters").decode().splitlines()]
        return [int(line[3]) for line in lines if line[1:3] == [address, name]]


async def until(check: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait until `check()` holds."""
    deadline = time.monotonic() + within_s
    while not check():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.02)


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def _get_json(url: str) -> Any:
    return json.loads(_get(url))


def _socket_address(address: str) -> Json:
    host, port = split_address(address)
    return {"socket_address": {"address": host, "port_value": port}}
