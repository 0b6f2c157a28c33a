"""CPU per request of the service beside a bare grpc.aio ext_proc echo, in one run; goal: ratio at most 1.15.

Both servers are processes of their own and get the same streams in turn (A B A B …): request headers as Envoy sends
them (20 headers), the reply read, response headers, the reply read, end. CPU is user + system time of the server
process. The echo decodes each message and answers a fixed reply, which is the least any Python processor can do.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import psutil
from stats import machine, spread

from service.extproc import CONTINUE, SERVICE
from service.pb import ext_proc_pb2 as pb

ROUNDS, STREAMS, CONCURRENT = 9, 1500, 8


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
    attributes["upstream.address"].string_value = "127.0.0.1:18001"
    attributes["upstream.request_attempt_count"].number_value = 1
    return request.SerializeToString(), response.SerializeToString()


def echo(port: int) -> None:
    """Serve the bare echo until killed."""
    reply = pb.ProcessingResponse()
    option = reply.request_headers.response.header_mutation.set_headers.add()
    option.header.key, option.header.raw_value = "x-gateway-destination-endpoint", b"127.0.0.1:18001"
    fields = reply.dynamic_metadata.fields["envoy.lb"].struct_value.fields
    fields["x-gateway-destination-endpoint"].string_value = "127.0.0.1:18001"
    fixed = {"request_headers": reply.SerializeToString(), **CONTINUE}

    async def process(requests, _context):  # type: ignore[no-untyped-def]
        async for request in requests:
            yield fixed[request.WhichOneof("request")]

    async def run() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(
            process, request_deserializer=pb.ProcessingRequest.FromString, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(run())


def cpu_s(process: psutil.Process) -> float:
    """User and system time of a process so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def drive(port: int, process: psutil.Process) -> float:
    """Run one round of streams; return the server's CPU per request, µs."""
    first, second = messages()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        method = channel.stream_stream(f"/{SERVICE}/Process")

        async def client(streams: int) -> None:
            for _ in range(streams):
                call = method()
                for message in (first, second):
                    await call.write(message)
                    await call.read()
                await call.done_writing()
                await call.read()

        await client(50)
        before = cpu_s(process)
        await asyncio.gather(*(client(STREAMS // CONCURRENT) for _ in range(CONCURRENT)))
        return (cpu_s(process) - before) / (STREAMS // CONCURRENT * CONCURRENT) * 1e6


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main() -> None:
    """Print both figures and their ratio, round by round paired."""
    ports = {"echo": free_port(), "service": free_port()}
    endpoints = [f"--endpoint=e{i}=127.0.0.1:{18001 + i}" for i in range(6)]
    # Probes would find nobody: they are the same work whatever the traffic, and put off here.
    environment = {**os.environ, "CACHEROUTE_PROBE_INTERVAL_S": "3600", "CACHEROUTE_PROBE_FAILURES": "99"}
    service = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", "serve", f"--listen=127.0.0.1:{ports['service']}",
         f"--http=127.0.0.1:{free_port()}", *endpoints],
        env=environment, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    peer = multiprocessing.get_context("spawn").Process(target=echo, args=(ports["echo"],), daemon=True)
    peer.start()
    processes = {"echo": psutil.Process(peer.pid), "service": psutil.Process(service.pid)}
    figures: dict[str, list[float]] = {"echo": [], "service": []}
    try:
        time.sleep(2)
        for name in figures:
            asyncio.run(drive(ports[name], processes[name]))
        for _ in range(ROUNDS):
            for name, values in figures.items():
                values.append(asyncio.run(drive(ports[name], processes[name])))
    finally:
        service.send_signal(signal.SIGTERM)
        service.wait(20)
        peer.terminate()
        peer.join()
    ratios = [ours / bare for ours, bare in zip(figures["service"], figures["echo"], strict=True)]
    print(f"server CPU per request, µs, min / median / max of {ROUNDS} rounds of {STREAMS} streams ({machine()})")
    print(f"  bare grpc.aio echo   {spread(figures['echo'], 0)}")
    print(f"  cacheroute serve     {spread(figures['service'], 0)}")
    print(f"  ratio, paired        {spread(ratios)}")


if __name__ == "__main__":
    main()
