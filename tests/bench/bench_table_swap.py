"""How long taking a plan of 128,824 keys into service keeps the event loop from running; goal: at most 60 ms."""

import asyncio
import hashlib
import sys
import time
from array import array
from random import Random

from stats import machine, spread

from service.keys import KEY_CHECK, hash_key
from service.plan import Plan, encode
from service.store import Head, verify
from service.table import Current, Table, build_table

KEYS, R = 128_824, 30


def plan() -> Plan:
    """A plan of the paper's size with one to three copies a key."""
    rng = Random(0)
    offsets, targets = array("I", [0]), array("I")
    for i in range(KEYS):
        targets.extend(rng.sample(range(R), 1 + (i % 20 == 0) + (i % 100 == 0)))
        offsets.append(len(targets))
    return Plan(
        endpoints=tuple(f"endpoint-{i}" for i in range(R)),
        key_hashes=array("Q", sorted({rng.getrandbits(64) for _ in range(KEYS)})),
        target_offsets=offsets,
        targets=targets,
        rates_rps=array("f", [1.0] * KEYS),
        key_check=hash_key(KEY_CHECK),
        version=1,
        epoch=1,
    )


async def swap(data: bytes, current: Current) -> tuple[float, float]:
    """Do what the service does for a new plan; return its duration and the loop's worst gap, ms."""
    head = Head(version=1, epoch=1, sha256=hashlib.sha256(data).hexdigest())
    worst, stop = 0.0, False

    async def ticker() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not stop:
            await asyncio.sleep(0)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    def build() -> tuple[Plan, Table]:
        decoded = verify(data, head, key_check=hash_key(KEY_CHECK))
        return decoded, build_table(decoded)

    ticking = asyncio.create_task(ticker())
    await asyncio.sleep(0.05)
    worst, started = 0.0, time.perf_counter()
    decoded, table = await asyncio.to_thread(build)
    box: list[object] = [current.table, decoded]
    current.table = table
    del decoded, table
    await asyncio.to_thread(box.clear)
    took = time.perf_counter() - started
    stop = True
    await ticking
    return took * 1e3, worst * 1e3


def main() -> None:
    """Print min/median/max over 11 swaps of a full table for another."""
    data, current = encode(plan()), Current()

    async def runs() -> list[tuple[float, float]]:
        await swap(data, current)
        return [await swap(data, current) for _ in range(11)]

    figures = asyncio.run(runs())
    print(f"swap in {KEYS} keys, plan of {len(data) / 1e6:.2f} MB, ms, min / median / max of 11 ({machine()})")
    print(f"  worst event-loop stall   {spread([stall for _, stall in figures])}")
    print(f"  whole swap, in a thread  {spread([took for took, _ in figures])}")
    print(f"  (interpreter switch interval {sys.getswitchinterval() * 1e3:.0f} ms)")


if __name__ == "__main__":
    main()
