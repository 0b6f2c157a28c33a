"""CPU of the service a request against the length of the response, at a real Envoy; goal: flat up to 300 chunks.

Three ways to attach, one Envoy each, one service each:

- headers: as the lab and the attach recipes configure it. Bodies never leave Envoy.
- duplex: FULL_DUPLEX_STREAMED response bodies, as some gateways hardwire: each chunk comes and is sent back.
- duplex both: request bodies too.

1. The same number of requests a second, over the same time, has answers of 1, 30 or 300 chunks, so background work
   weighs the same in all; it is measured beside, without requests.
2. Whatever its length, the answer's chunks up to 301 pass another Envoy, which has no processor, at the same time: the
   machine is equally busy, and its caches equally cold, in all measurements.
3. Envoy counts the messages that it and the service exchange, which no noise touches: flat is flat there.
4. Every answer is checked byte for byte.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from chunk_server import PAYLOAD
from gateways import ENVOY, Site, answers_tcp, bootstrap, envoy, envoy_count, http_filters, process, service, variant
from stats import cpu_s, machine, spread

from replay.lab import HOST, KEY_HEADER
from replay.processes import Process, free_ports, wait_ready

CHUNKS, RATE_RPS = (1, 30, 300), 15
FULL, SEND = "FULL_DUPLEX_STREAMED", "SEND"
MODES = {
    "headers": {},
    "duplex": {"response_body_mode": FULL},
    "duplex both": {"response_body_mode": FULL, "request_body_mode": FULL, "request_trailer_mode": SEND},
}
BODY = b'{"prompt": "' + b"word " * 800 + b'"}'


def start(stack: ExitStack, site: Site, mode: str) -> tuple[str, str, Process]:
    """Start an Envoy and a service; return Envoy's URL, its admin address and the service."""
    listen, admin, grpc, http = (f"{HOST}:{port}" for port in free_ports(4))
    document = bootstrap(site, listen, admin, grpc)
    processor = next(f for f in http_filters(document) if "ext_proc" in f["name"])["typed_config"]
    processor["processing_mode"] |= MODES[mode]
    parts = {"service": service(site, grpc, http), "envoy": envoy(site, f"envoy {mode}", document, admin)}
    for part in parts.values():
        stack.callback(part.stop)
        part.start()
    wait_ready(parts.values(), timeout_s=40)
    return f"http://{listen}", admin, parts["service"]


def start_bare(stack: ExitStack, site: Site) -> str:
    """Start an Envoy without a processor; return its URL."""
    listen, admin = (f"{HOST}:{port}" for port in free_ports(2))
    bare = envoy(site, "bare", variant(bootstrap(site, listen, admin, admin), ENVOY), admin)
    stack.callback(bare.stop)
    bare.start()
    wait_ready([bare], timeout_s=40)
    return f"http://{listen}"


async def load(url: str, bare: str, chunks: int, seconds: float) -> int:
    """Send requests at their times; return how many there were, AssertionError when an answer is not what was sent."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(base: str, chunks: int, number: int) -> None:
            headers = {KEY_HEADER: f"tenant-{number % 64}"}
            async with client.post(f"{base}/{chunks}", data=BODY, headers=headers) as response:
                body = await response.read()
                assert response.status == 200, (response.status, body[:200])
                assert body == PAYLOAD * chunks, f"{len(body)} bytes of {len(PAYLOAD) * chunks}"

        began, count = time.perf_counter(), int(seconds * RATE_RPS)
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / RATE_RPS - time.perf_counter()))
                group.create_task(one(bare, max(CHUNKS) + 1 - chunks, number))
                if chunks:
                    group.create_task(one(url, chunks, number))
    return count


def main() -> None:
    """Print CPU a request of the service by mode and length, min / median / max, and the ratios to one chunk."""
    parser = argparse.ArgumentParser(description="CPU of the service against the length of responses")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    options = parser.parse_args()
    figures: dict[tuple[str, int], list[float]] = {(mode, chunks): [] for mode in MODES for chunks in (0, *CHUNKS)}
    counted: dict[tuple[str, int], list[float]] = {key: [] for key in figures}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        backend = f"{HOST}:{free_ports(1)[0]}"
        site = Site(Path(folder), (backend,), "", "bench")
        command = [sys.executable, str(Path(__file__).with_name("chunk_server.py")), backend.rpartition(":")[2]]
        server = process(site, "backend", command, lambda: answers_tcp(backend))
        stack.callback(server.stop)
        server.start()
        wait_ready([server], timeout_s=20)
        gateways = {mode: start(stack, site, mode) for mode in MODES}
        bare = start_bare(stack, site)
        for url, _, _ in gateways.values():
            asyncio.run(load(url, bare, 30, 1))
        for number in range(options.rounds):
            for mode in list(MODES)[:: 1 if number % 2 else -1]:
                url, admin, part = gateways[mode]
                assert part.pid is not None, f"the service of {mode!r} has ended:\n{part.log_tail()}"
                for chunks in (0, *CHUNKS):
                    before, messages_before = cpu_s(part.pid), envoy_count(admin, "ext_proc.stream_msgs")
                    count = asyncio.run(load(url, bare, chunks, options.seconds))
                    figures[mode, chunks].append((cpu_s(part.pid) - before) / count * 1e3)
                    counted[mode, chunks].append((envoy_count(admin, "ext_proc.stream_msgs") - messages_before) / count)
    print(f"CPU of the service, ms a request at {RATE_RPS}/s, background included, min / median / max of", end=" ")
    print(f"{options.rounds} rounds ({machine()})")
    for mode in MODES:
        print(f"  {mode:12} without requests {spread(figures[mode, 0], 3)}")
        for chunks in CHUNKS:
            ratios = [a / b for a, b in zip(figures[mode, chunks], figures[mode, CHUNKS[0]], strict=True)]
            print(f"  {mode:12} {chunks:3} chunks {spread(figures[mode, chunks], 3)}   over 1 chunk", end=" ")
            print(f"{spread(ratios)}   messages a request {spread(counted[mode, chunks], 1)}")


if __name__ == "__main__":
    main()
