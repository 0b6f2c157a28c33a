"""CPU per request of the service beside a bare grpc.aio ext_proc echo, in one run; goal: ratio at most 1.15.

The servers are processes of their own and get the same streams in turn (A B C A B C …): request headers as Envoy sends
them (20 headers), the reply read, response headers, the reply read, end. CPU is user + system time of the server
process. The echo decodes each message and answers a fixed reply, which is the least any Python processor can do. The
goal is over the echo as grpc.aio comes, on asyncio's own event loop; the same echo on uvloop, which the service runs
on, stands beside it.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import grpc
from echo_server import SERVICE
from stats import cpu_s, machine, spread

from replay.processes import free_ports
from service.pb import ext_proc_pb2 as pb

ROUNDS, STREAMS, CONCURRENT = 9, 1500, 8
PICKED = b"127.0.0.1:18001"  # all endpoints differ in the last digit
ECHO, ECHO_UVLOOP, OURS = "bare grpc.aio echo", "the echo on uvloop", "cacheroute serve"


def messages() -> tuple[bytes, bytes]:
    """One request's headers and one response's, as Envoy sends them."""
    request = pb.ProcessingRequest()
    headers = request.request_headers.headers.headers
    for key, value in (
        (":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "llm.example"),
        ("content-type", "application/json"), ("content-length", "48213"), ("accept", "*/*"),
        ("user-agent", "openai-python/2.0"), ("x-forwarded-proto", "http"), ("x-tenant-id", "tenant-17"),
        ("x-request-id", "8a0f2d6e-4b1c-4f3a-9c70-1f6f2b7a9d10"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"),
        *((f"x-filler-{i}", "0123456789abcdef") for i in range(8)),
    ):  # fmt: skip
        headers.add(key=key, raw_value=value.encode())
    response = pb.ProcessingRequest()
    for key, value in ((":status", "200"), ("content-type", "text/event-stream"), ("server", "uvicorn")):
        response.response_headers.headers.headers.add(key=key, raw_value=value.encode())
    attributes = response.attributes["envoy.filters.http.ext_proc"].fields
    attributes["upstream.address"].string_value = PICKED.decode()
    attributes["upstream.request_attempt_count"].number_value = 1
    return request.SerializeToString(), response.SerializeToString()


async def drive(port: int, pid: int) -> float:
    """Run one round of streams; return the server's CPU per request, µs."""
    first, second = messages()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        method = channel.stream_stream(f"/{SERVICE}/Process")

        async def client(streams: int) -> None:
            for _ in range(streams):
                call = method()
                await call.write(first)
                reply = await call.read()
                # The endpoint that was picked serves, as it nearly always does.
                start = reply.index(PICKED[:-1])
                await call.write(second.replace(PICKED, reply[start : start + len(PICKED)]))
                await call.read()
                await call.done_writing()
                await call.read()

        await client(50)
        before = cpu_s(pid)
        await asyncio.gather(*(client(STREAMS // CONCURRENT) for _ in range(CONCURRENT)))
        return (cpu_s(pid) - before) / (STREAMS // CONCURRENT * CONCURRENT) * 1e6


def main() -> None:
    """Print the figures and their ratios, paired round by round."""
    ports = dict(zip((ECHO, ECHO_UVLOOP, OURS), free_ports(3), strict=True))
    echo = [sys.executable, str(Path(__file__).with_name("echo_server.py"))]
    picked = ["--destination", PICKED.decode()]
    endpoints = [f"--endpoint=e{i}=127.0.0.1:{18001 + i}" for i in range(6)]
    listen = [f"--listen=127.0.0.1:{ports[OURS]}", f"--http=127.0.0.1:{free_ports(1)[0]}"]
    commands = {
        ECHO: [*echo, str(ports[ECHO]), *picked],
        ECHO_UVLOOP: [*echo, str(ports[ECHO_UVLOOP]), *picked, "--uvloop"],
        OURS: [sys.executable, "-m", "planner.cli", "serve", *listen, *endpoints],
    }
    # Probes would find nobody: they are the same work whatever the traffic, and put off here.
    environment = {**os.environ, "CACHEROUTE_PROBE_INTERVAL_S": "3600", "CACHEROUTE_PROBE_FAILURES": "99"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    processes = {
        name: subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        for name, command in commands.items()
    }
    figures: dict[str, list[float]] = {name: [] for name in processes}
    try:
        time.sleep(2)
        for name, process in processes.items():
            asyncio.run(drive(ports[name], process.pid))
        for _ in range(ROUNDS):
            for name, values in figures.items():
                values.append(asyncio.run(drive(ports[name], processes[name].pid)))
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(20)
    print(f"server CPU per request, µs, min / median / max of {ROUNDS} rounds of {STREAMS} streams ({machine()})")
    for name, values in figures.items():
        print(f"  {name:20} {spread(values, 0)}")
    for bare in (ECHO, ECHO_UVLOOP):
        ratios = [ours / other for ours, other in zip(figures[OURS], figures[bare], strict=True)]
        print(f"  {OURS} over {bare}, paired: {spread(ratios)}")


if __name__ == "__main__":
    main()
