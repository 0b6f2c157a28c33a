"""Cost of a simulated engine: µs a step and a request of the model alone, and CPU a request of the whole HTTP server.

The server runs as a process of its own at speed 10 and is sent 2,000-token prompts of which half is shared, for
streamed answers of 100 tokens, 32 at a time. CPU is user + system time of the server process.
"""

import asyncio
import json
import subprocess
import sys
from random import Random
from time import perf_counter

import aiohttp
import psutil
from stats import machine, spread

from engine_patch.settings import EngineSettings
from replay.block_cache import chain_hashes
from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest
from replay.engine_switch import EngineSwitch
from replay.presets import find_preset

ROUNDS, REQUESTS, CONCURRENT = 5, 300, 32


def decode_step_us(batch: int) -> float:
    """Time a step in which `batch` sequences decode."""
    model = EngineModel(find_preset("70b-fp8-tp2"))
    for n in range(batch):
        model.submit(EngineRequest(str(n), 1000 + n, 4000), 0.0)
    model.advance(batch * 0.1 + 10)
    first, start = model.steps, perf_counter()
    model.advance(model.busy_s + 40)
    return (perf_counter() - start) * 1e6 / (model.steps - first)


def request_us(prompt_tokens: int, output_tokens: int, mode: str = "lru") -> float:
    """Time a request from submission to its end, steps included, half of the prompt shared; about 20 in flight."""
    model = EngineModel(find_preset("70b-fp8-tp2"), policy="lru" if mode == "auto" else mode)
    model.follower = EngineSwitch(model.cache, EngineSettings(policy=mode))
    rng, now = Random(0), 0.0
    shared = rng.randbytes(prompt_tokens * 2)
    prompts = [shared + rng.randbytes(prompt_tokens * 2 + output_tokens * 4) for _ in range(REQUESTS)]
    start = perf_counter()
    for n, tokens in enumerate(prompts):
        now += 0.1
        model.submit(EngineRequest(str(n), prompt_tokens, output_tokens, chain_hashes(tokens)), now)
    model.advance(now + 1000)
    return (perf_counter() - start) * 1e6 / REQUESTS


def served_cpu_us(stream_interval_s: float) -> tuple[float, float]:
    """Return CPU µs a request and requests/s (wall) of a server process."""
    command = (sys.executable, "-m", "planner.cli", "sim-engine", "--listen", "127.0.0.1:0", "--speed", "10")
    options = ("--stream-interval-s", str(stream_interval_s))
    with subprocess.Popen((*command, *options), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = f"http://{json.loads(process.stderr.readline())['address']}/v1/chat/completions"
            return asyncio.run(load(url, psutil.Process(process.pid)))
        finally:
            process.kill()


async def load(url: str, server: psutil.Process) -> tuple[float, float]:
    """Send the requests and return what they cost."""
    rng, gate = Random(0), asyncio.Semaphore(CONCURRENT)
    words = [a + b + c + " " for a in "bcd" for b in "aeo" for c in "tgnr"]
    shared = "".join(rng.choices(words, k=1000))

    async def ask(session: aiohttp.ClientSession, prompt: str) -> None:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 100, "stream": True}
        async with gate, session.post(url, json=body) as answer:
            assert (await answer.read()).endswith(b"[DONE]\n\n")

    prompts = [shared + "".join(rng.choices(words, k=1000)) for _ in range(REQUESTS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, prompt) for prompt in prompts[:20]))
        before, start = server.cpu_times(), perf_counter()
        await asyncio.gather(*(ask(session, prompt) for prompt in prompts))
        after, wall_s = server.cpu_times(), perf_counter() - start
    cpu_s = after.user - before.user + after.system - before.system
    return cpu_s * 1e6 / REQUESTS, REQUESTS / wall_s


def main() -> None:
    """Print min/median/max."""
    print(f"simulated engine, min / median / max of {ROUNDS} rounds ({machine()})")
    for batch in (1, 16, 64, 256):
        print(f"  step, {batch:3} decoding, µs: {spread([decode_step_us(batch) for _ in range(ROUNDS)])}")
    for prompt, output in ((1200, 100), (12_000, 350)):
        figures = spread([request_us(prompt, output) for _ in range(ROUNDS)])
        print(f"  request of {prompt} + {output} tokens, model and hashes, µs: {figures}")
    for mode in ("s3fifo", "arc", "auto"):
        figures = spread([request_us(12_000, 350, mode) for _ in range(ROUNDS)])
        print(f"  the latter under {mode}, µs: {figures}")
    for interval_s in (0.02, 0.1):
        served = [served_cpu_us(interval_s) for _ in range(3)]
        print(f"  request of 2000 + 100 tokens over HTTP, an event each {interval_s} s:")
        print(f"    CPU µs: {spread([cpu for cpu, _ in served])}; requests/s: {spread([rate for _, rate in served])}")


if __name__ == "__main__":
    main()
