"""What the shadows and the recorder cost a block, on the paper's equal mix; goal: LRU with S3-FIFO at most 0.7 µs.

The trace is Appendix F at 33/33/33, served by a clock alone: a request is freed 20 ms an output token after it came.
A block is one hash of an admitted prompt; what its free costs is in it. CPU time of this process; parsing, interning
and bookkeeping that all policies share are in "none", and in each of the others once.
"""

import heapq
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stats import machine, spread

from engine_patch.default_preset import DefaultPreset
from engine_patch.events import Recorder
from engine_patch.paper_preset import replay
from engine_patch.shadow import PoolShadow
from replay.mixes import Mix, constant, generate

POOLS, REPEATS = (16_384, 65_536), 5
SETS: tuple[tuple[str, ...], ...] = ((), ("lru",), ("s3fifo",), ("arc",), ("lru", "s3fifo"), ("lru", "s3fifo", "arc"))
Step = tuple[bool, int, np.ndarray, int, int]


def steps(seconds: float = 3600) -> list[Step]:
    """Return (admitted or freed, request, hashes, tokens or hashes in all, blocks held) in order of time."""
    made: list[Step] = []
    running: list[tuple[float, int, np.ndarray, int, int]] = []
    for number, request in enumerate(generate(constant(Mix(1 / 3, 1 / 3, 1 / 3), seconds), seed=0)):
        while running and running[0][0] <= request.at_s:
            _, ended, tail, hashes, held = heapq.heappop(running)
            made.append((False, ended, tail, hashes, held))
        blocks = (
            np.frombuffer(request.blocks, dtype="<u8")
            if isinstance(request.blocks, bytes)
            else np.asarray(request.blocks)
        )
        full, tokens = request.prompt_tokens // 16, request.prompt_tokens
        made.append((True, number, blocks[:full], tokens, 0))
        end_s = request.at_s + tokens / 20_000 + 0.02 * request.output_tokens
        held = -(-(tokens + request.output_tokens) // 16)
        heapq.heappush(running, (end_s, number, blocks[full:], len(blocks), held))
    return made


def shadow_us(trace: list[Step], policies: tuple[str, ...], num_blocks: int, sample: float = 1.0) -> float:
    """Return the CPU time a block."""
    shadow = PoolShadow(policies, num_blocks, 16, sample)
    blocks = 0
    began = time.process_time()
    for admitted, request, hashes, count, held in trace:
        if admitted:
            blocks += len(hashes)
            shadow.admitted(request, hashes, count)
        else:
            shadow.freed(request, hashes, count, held)
    return (time.process_time() - began) / blocks * 1e6


def hits(trace: list[Step], num_blocks: int) -> list[int]:
    """Return the hit tokens of each admission, as an engine under LRU would tell them."""
    shadow = PoolShadow(("lru",), num_blocks, 16)
    lane, told = shadow.lanes[0], []
    for admitted, request, hashes, count, held in trace:
        before = lane.hit_blocks
        if admitted:
            shadow.admitted(request, hashes, count)
        else:
            shadow.freed(request, hashes, count, held)
        told.append((lane.hit_blocks - before) * 16)
    return told


def preset_us(trace: list[Step], told: list[int], num_blocks: int) -> float:
    """Return the CPU time a block of the whole estimator with its default candidates."""
    preset = DefaultPreset(("lru", "s3fifo", "arc"), num_blocks, 16)
    blocks = 0
    began = time.process_time()
    for at, (admitted, request, hashes, count, held) in enumerate(trace):
        if admitted:
            blocks += len(hashes)
            preset.admitted(at * 0.3, request, hashes, count, told[at], True)
        else:
            preset.freed(at * 0.3, request, hashes, count, held)
        preset.decide(at * 0.3)
    return (time.process_time() - began) / blocks * 1e6


def paper_us(trace: list[Step], policy: str, capacity: int) -> float:
    """Return the CPU time a block of the paper's cold replay."""
    log = [hashes for admitted, _, hashes, _, _ in trace if admitted]
    began = time.process_time()
    replay(policy, capacity, log)
    return (time.process_time() - began) / sum(map(len, log)) * 1e6


def recorder_us(blocks: int) -> float:
    """Return the CPU time to record one request of so many blocks: admitted, freed with two more, frames taken."""
    hashes = [bytes([at % 256]) * 32 for at in range(blocks + 2)]
    recorder, rounds = Recorder(), max(20, 20_000 // blocks)
    began = time.process_time()
    for at in range(rounds):
        recorder.admitted(1.0, "request", hashes[:blocks], blocks * 16 + 5, 0, 16, free_blocks=1000)
        recorder.freed(2.0, "request", hashes, blocks + 3)
        if at % 8 == 7:
            recorder.take(3.0)
    return (time.process_time() - began) / rounds * 1e6


def main() -> None:
    """Print min / median / max over repeats."""
    trace = steps()
    blocks = [len(hashes) for admitted, _, hashes, _, _ in trace if admitted]
    print(f"{len(blocks)} requests, {np.mean(blocks):.0f} blocks each on average; CPU µs a block, {machine()}")
    for num_blocks in POOLS:
        for policies in SETS:
            costs = [shadow_us(trace, policies, num_blocks) for _ in range(REPEATS)]
            print(f"  pool {num_blocks:6}  {' + '.join(policies) or 'none':20} {spread(costs, 2)}")
        costs = [shadow_us(trace, SETS[-1], num_blocks, 0.05) for _ in range(REPEATS)]
        print(f"  pool {num_blocks:6}  {'all three, 5 % sample':20} {spread(costs, 2)}")
        told = hits(trace, num_blocks)
        costs = [preset_us(trace, told, num_blocks) for _ in range(REPEATS)]
        print(f"  pool {num_blocks:6}  {'default preset':20} {spread(costs, 2)}")
    for policy in ("lru", "s3fifo"):
        costs = [paper_us(trace, policy, POOLS[0]) for _ in range(REPEATS)]
        print(f"  paper's cold replay, {policy:8}       {spread(costs, 2)}")
    print("recorder, CPU µs a request (both events and the frame)")
    for size in (16, 64, 512, 6250):
        costs = [recorder_us(size) for _ in range(REPEATS)]
        print(f"  {size:5} blocks  {spread(costs, 1)}")


if __name__ == "__main__":
    main()
