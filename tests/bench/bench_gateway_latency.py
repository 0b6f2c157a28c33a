"""Latency that the service adds at a real Envoy, at 200 requests/s; goals: p50 at most 1.5 ms, p99 at most 10 ms.

One Envoy has two listeners over the same backend (a third listener of it that answers at once): one as the lab
configures it, one without the ext_proc filter. One client sends 200 requests/s to each, in turn, at fixed times
whatever the answers do, over connections that stay open; both see the same moments of a noisy machine.
"""

import asyncio
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from stats import machine, quantile, spread

from replay.envoy_config import EnvoySettings, build_bootstrap
from replay.processes import answers_http, free_ports
from replay.programs import envoy_program

RATE_RPS, ROUND_S, ROUNDS = 200, 6, 5


def bootstrap(gateway: str, bare: str, backend: str, admin: str, service: str, log: str) -> dict[str, Any]:
    """The lab's configuration plus a listener without ext_proc and the backend itself."""
    document = build_bootstrap(EnvoySettings(gateway, admin, service, (backend,), log))
    listeners = document["static_resources"]["listeners"]
    host, port = bare.split(":")
    second = copy.deepcopy(listeners[0])
    second["name"] = "bare"
    second["address"] = {"socket_address": {"address": host, "port_value": int(port)}}
    connections = second["filter_chains"][0]["filters"][0]["typed_config"]
    connections["http_filters"] = [f for f in connections["http_filters"] if "ext_proc" not in f["name"]]
    third = copy.deepcopy(second)
    third["name"] = "backend"
    third["address"]["socket_address"]["port_value"] = int(backend.split(":")[1])
    virtual_host = third["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0]
    virtual_host["routes"] = [
        {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "ok"}}}
    ]
    document["static_resources"]["listeners"] += [second, third]
    return document


async def measure(urls: dict[str, str]) -> dict[str, list[float]]:
    """Return latencies in ms by listener over one round."""
    got: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(name: str, i: int) -> None:
            started = time.perf_counter()
            async with session.get(urls[name], headers={"x-tenant-id": f"tenant-{i % 64}"}) as response:
                await response.read()
                assert response.status == 200, response.status
            got[name].append((time.perf_counter() - started) * 1e3)

        tasks, start = [], time.perf_counter()
        gap = 1 / RATE_RPS / len(urls)
        for i in range(ROUND_S * RATE_RPS * len(urls)):
            await asyncio.sleep(max(0.0, start + i * gap - time.perf_counter()))
            name = list(urls)[i % len(urls)]
            tasks.append(asyncio.create_task(one(name, i)))
        await asyncio.gather(*tasks)
    return got


def main() -> None:
    """Print p50 and p99 of both listeners and what the service adds, over 5 rounds."""
    gateway, bare, backend, admin, service, http = (f"127.0.0.1:{p}" for p in free_ports(6))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "envoy.json")
        config.write_text(json.dumps(bootstrap(gateway, bare, backend, admin, service, f"{folder}/access")))
        environment = {**os.environ, "CACHEROUTE_PROBE_INTERVAL_S": "1"}
        parts = [
            subprocess.Popen([sys.executable, "-m", "planner.cli", "serve", "--listen", service, "--http", http,
                              "--endpoint", f"backend={backend}"], env=environment, stderr=subprocess.DEVNULL),
            subprocess.Popen([str(envoy_program()), "-c", str(config), "--concurrency", "1", "--disable-hot-restart",
                              "--log-level", "error"]),
        ]  # fmt: skip
        try:
            deadline = time.monotonic() + 30
            while not (answers_http(http, "/healthz") and answers_http(admin, "/ready")):
                assert time.monotonic() < deadline, "not ready within 30 s"
                time.sleep(0.05)
            urls = {"with": f"http://{gateway}/", "without": f"http://{bare}/"}
            asyncio.run(measure(urls))
            rounds = [asyncio.run(measure(urls)) for _ in range(ROUNDS)]
            assert answers_http(http, "/healthz")
        finally:
            for part in parts:
                part.terminate()
            for part in parts:
                part.wait(20)
    print(f"latency at Envoy, {RATE_RPS} requests/s each, ms, min / median / max of {ROUNDS} rounds ({machine()})")
    for q, label in ((0.5, "p50"), (0.99, "p99")):
        figures = {name: [quantile(r[name], q) for r in rounds] for name in ("without", "with")}
        added = [w - wo for w, wo in zip(figures["with"], figures["without"], strict=True)]
        print(f"  {label}  no ext_proc {spread(figures['without'])}   cacheroute {spread(figures['with'])}", end="")
        print(f"   added {spread(added)}")


if __name__ == "__main__":
    main()
