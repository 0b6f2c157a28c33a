"""How long counting and reading a window of a million keys hold the server, by its own slow log; goal: at most 20 ms.

Durations are the server's: from the start of a command to its end, without waiting and without the network.
"""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import redis
from stats import machine, spread

from planner.rates import Window, rates_from_windows
from replay.processes import Process, answers_ping, free_ports, wait_ready
from replay.programs import valkey_program
from service.store import Store

KEYS = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
# As many new keys as one process counts in a second at most, so that the table grows as it does in use.
BATCH = 20_000
COUNTS = (500, 1000, 2000, 5000, 10_000)


class Slow:
    """The server's slow log of commands above 30 us; below are, above all, those that a script runs one by one."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        client.config_set("slowlog-log-slower-than", 30)
        client.config_set("slowlog-max-len", 100_000)

    def durations_ms(self, *names: bytes) -> list[float]:
        """Return the durations of commands of these names since this was last asked."""
        entries = self._client.slowlog_get(100_000)
        self._client.slowlog_reset()
        return [e["duration"] / 1e3 for e in entries if e["command"].split(b" ")[0].upper() in names]


async def measure(url: str, port: int) -> None:
    """Fill one window, then read it with several step sizes."""
    store, client, rng = Store(url, "bench"), redis.Redis(port=port), Random(0)
    slow = Slow(client)
    keys = [rng.getrandbits(64) for _ in range(KEYS)]
    for batch, first in enumerate(range(0, KEYS, BATCH)):
        await store.add_rates(0, dict.fromkeys(keys[first : first + BATCH], 1), instance="x:1", batch=batch, ttl_s=9999)
    took = slow.durations_ms(b"EVALSHA", b"EVAL")
    print(f"adding {KEYS:,} new keys, {len(took)} calls of up to 2,000: {spread(took)} ms a call")
    for batch, first in enumerate(range(0, KEYS, 4 * BATCH)):
        await store.add_rates(0, dict.fromkeys(keys[first : first + BATCH], 1), instance="y:1", batch=batch, ttl_s=9999)
    took = slow.durations_ms(b"EVALSHA", b"EVAL")
    print(f"adding to keys that are there, {len(took)} calls: {spread(took)} ms a call")
    name = store._key("rates", 0)
    for count in COUNTS:
        cursor, steps, began = 0, 0, time.perf_counter()
        while True:
            cursor, _ = client.hscan(name, cursor, count=count)  # type: ignore[misc]
            steps += 1
            if not cursor:
                break
        whole = time.perf_counter() - began
        print(f"HSCAN COUNT {count:>6}: {spread(slow.durations_ms(b'HSCAN'))} ms a step, {steps} steps, {whole:.1f} s")
    began = time.perf_counter()
    counted = await store.read_window(0)
    read = time.perf_counter()
    window = Window.of(0, 30, counted)
    made = time.perf_counter()
    rates_from_windows([window] * 4, 30.0, 1e9)
    print(
        f"the planner: reading {read - began:.1f} s, keeping {made - read:.2f} s, "
        f"{len(window.key_hashes) * 12 / 1e6:.0f} MB, rates of 4 such {time.perf_counter() - made:.2f} s"
    )
    print(f"memory of the window in the server: {client.memory_usage(name, samples=0) / 1e6:.0f} MB")
    slow.durations_ms()
    client.hgetall(name)  # type: ignore[unused-coroutine]
    print(f"for comparison: HGETALL {spread(slow.durations_ms(b'HGETALL'), 0)} ms")
    print(f"lazyfree-lazy-expire = {client.config_get('lazyfree-lazy-expire')['lazyfree-lazy-expire']}")  # type: ignore[index]
    client.config_set("lazyfree-lazy-user-del", "no")
    client.delete(name)
    print(f"a window that ends, freed at once (DEL): {spread(slow.durations_ms(b'DEL'), 0)} ms")
    client.close()
    await store.close()


def main() -> None:
    """Print min / median / max of every command."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        server = Process(
            "valkey",
            [valkey_program(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            log=Path(folder) / "log",
            ready=lambda: answers_ping(f"127.0.0.1:{port}"),
            env=os.environ,
            cwd=Path(folder),
        )
        server.start()
        try:
            wait_ready([server], timeout_s=20)
            print(f"server-side durations, min / median / max ({machine()})")
            asyncio.run(measure(f"redis://127.0.0.1:{port}/0", port))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
