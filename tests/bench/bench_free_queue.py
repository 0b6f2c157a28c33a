"""What our free-block queues cost beside vLLM's own; goals: 1.25 times stock on the whole path, 25 ms a switch.

Run as `python tests/bench/bench_free_queue.py`; without vLLM it goes on in the environment of `make engine`.
1. Whole path: vLLM's own KVCacheManager (look-up, allocation, caching, free) on three patterns with the pool full, the
   same requests for every queue, in turns of some 0.1 s; hits and hashes are told as an attached engine tells them.
2. Single operations of the block pool, 1, 16 and 256 blocks a call.
3. Switches between two policies of a full pool.
Figures are CPU time, min / median / max over the rounds, and the ratio to stock of medians and of minima.
"""

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any, NoReturn

from stats import machine, spread

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engine_patch import free_queue  # noqa: E402  # where it is run as a file, the root is not on the path

POLICIES = ("stock", "lru", "s3fifo", "arc")
IN_FLIGHT = 8
BLOCK = 16
Pattern = Callable[[Random, int], Iterator[tuple[list[bytes], list[bytes]]]]


def ratios(values: list[float], stock: list[float]) -> str:
    """Return how many times stock, by medians and by minima."""
    return f"x {median(values) / median(stock):.2f} (min {min(values) / min(stock):.2f})"


def new_manager(num_blocks: int) -> Any:
    """Return a KVCacheManager of one full-attention group."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    return KVCacheManager(
        config, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
    )


def attach(manager: Any) -> free_queue.LinkedState:
    """Adopt the manager's queue, and tell it of hits and hashes as the attached engine does."""
    pool, coordinator = manager.block_pool, manager.coordinator
    state = free_queue.adopt(pool.free_block_queue, pool)
    allocate, cache = coordinator.allocate_new_computed_blocks, pool.cache_full_blocks

    def allocate_new_computed_blocks(*args: Any, **kwargs: Any) -> Any:
        blocks = kwargs["new_computed_blocks"] if kwargs else args[1]
        if blocks[0]:
            free_queue.hit(state, blocks[0])
        return allocate(*args, **kwargs)

    def cache_full_blocks(
        request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int, *args: Any, **kwargs: Any
    ) -> None:
        before = len(pool.cached_block_hash_to_block)
        cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        grown = len(pool.cached_block_hash_to_block) - before
        free_queue.cached(state, blocks, num_cached_blocks, num_full_blocks, grown)

    coordinator.allocate_new_computed_blocks = allocate_new_computed_blocks
    pool.cache_full_blocks = cache_full_blocks
    return state


def unique(rng: Random, count: int) -> list[bytes]:
    """Return hashes that were never there."""
    return [rng.randbytes(32) for _ in range(count)]


def scan(rng: Random, _: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield prompts that nobody sends again."""
    while True:
        yield unique(rng, 250), unique(rng, 6)


def single(rng: Random, num_blocks: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield one of many system prompts, the first ones likelier, and text of its own."""
    prompts = [unique(rng, 128) for _ in range(num_blocks // 64)]
    while True:
        yield prompts[int(len(prompts) * rng.random() ** 4)] + unique(rng, 60), unique(rng, 20)


def agentic(rng: Random, num_blocks: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Yield the turns of many sessions, all that came before in each prompt."""
    tools = [unique(rng, 200) for _ in range(10)]
    sessions: list[list[bytes]] = []
    while True:
        if len(sessions) < num_blocks // 500:
            sessions.append(list(rng.choice(tools)))
        history = rng.choice(sessions)
        history += unique(rng, 24)
        output = unique(rng, 8)
        yield list(history), output
        history += output
        if len(history) > 600:
            sessions = [other for other in sessions if other is not history]


PATTERNS: dict[str, Pattern] = {"scan": scan, "single": single, "agentic": agentic}


class Path:
    """One manager and the requests on it, a few in flight."""

    leaves_hashes = False

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.manager = new_manager(num_blocks)
        self.running: list[Any] = []
        self.state: free_queue.LinkedState | None = None
        self.hits = self.blocks = self.number = 0
        if policy != "stock":
            self.state = attach(self.manager)
            self.state.clears_hashes &= not self.leaves_hashes
            free_queue.switch(self.manager.block_pool.free_block_queue, self.state, policy)

    def run(self, requests: list[tuple[list[bytes], list[bytes]]]) -> float:
        """Serve requests; return µs a block."""
        manager, blocks = self.manager, 0
        started = time.process_time()
        for prompt, output in requests:
            self.number += 1
            tokens = BLOCK * len(prompt) + 5
            request = SimpleNamespace(
                request_id=str(self.number),
                block_hashes=prompt,
                num_tokens=tokens,
                num_prompt_tokens=tokens,
                num_computed_tokens=0,
                num_preemptions=0,
                num_in_flight_tokens=0,
                shared_prefix_boundary=0,
                skip_reading_prefix_cache=False,
                status=None,
                kv_cache_report_mode="incremental",
            )
            found, hit = manager.get_computed_blocks(request)[:2]
            while manager.allocate_slots(request, tokens - hit, hit, found, full_sequence_must_fit=True) is None:
                self.finish(self.running.pop(0))
                found, hit = manager.get_computed_blocks(request)[:2]
            request.num_computed_tokens = tokens
            request.output = output
            self.hits += hit // BLOCK
            self.running.append(request)
            if len(self.running) > IN_FLIGHT:
                self.finish(self.running.pop(0))
            blocks += len(prompt) + len(output)
        took = time.process_time() - started
        self.blocks += blocks
        return took / blocks * 1e6

    def finish(self, request: Any) -> None:
        """Make the output and give all back."""
        request.block_hashes = request.block_hashes + request.output
        made = BLOCK * len(request.output)
        request.num_tokens += made
        self.manager.allocate_slots(request, made)
        self.manager.free(request)


def whole_path(num_blocks: int, rounds: int, policies: tuple[str, ...], patterns: list[str]) -> None:
    """Print µs a block of every queue on every pattern."""
    print(f"\nwhole path, {num_blocks:,} blocks, us a block, min / median / max of {rounds} rounds")
    for name in patterns:
        source = PATTERNS[name](Random(0), num_blocks)
        paths = {policy: Path(policy, num_blocks) for policy in policies}
        filled = 0
        while filled < 2.5 * num_blocks:
            requests = [next(source) for _ in range(200)]
            filled += sum(len(prompt) + len(output) for prompt, output in requests) // (1 if name == "scan" else 2)
            for path in paths.values():
                path.run(requests)
        for path in paths.values():
            path.hits = path.blocks = 0
        figures: dict[str, list[float]] = {policy: [] for policy in policies}
        gc.collect()
        gc.freeze()
        for turn in range(rounds):
            requests = [next(source) for _ in range(100)]
            order = policies[turn % len(policies) :] + policies[: turn % len(policies)]
            for policy in order:
                figures[policy].append(paths[policy].run(requests))
        gc.unfreeze()
        for policy in policies:
            ratio = ratios(figures[policy], figures[policies[0]])
            rate = paths[policy].hits / paths[policy].blocks
            print(f"  {name:8} {policy:18} {spread(figures[policy])}   {ratio}   hits {rate:.3f}", flush=True)


def operations(num_blocks: int, rounds: int, policies: tuple[str, ...]) -> None:
    """Print ns a block of single operations of the block pool."""
    print(f"\nsingle operations, {num_blocks:,} blocks, ns a block, min / median / max of {rounds} rounds")
    for size in (1, 16, 256):
        figures: dict[str, dict[str, list[float]]] = {}
        pools = {policy: Operations(policy, num_blocks, size) for policy in policies}
        for _ in range(rounds):
            for policy in policies:
                for name, value in pools[policy].round():
                    figures.setdefault(name, {}).setdefault(policy, []).append(value)
        for name, by_policy in figures.items():
            for policy in policies:
                ratio = ratios(by_policy[policy], by_policy[policies[0]])
                print(f"  {name:24} k={size:<4} {policy:18} {spread(by_policy[policy], 0)}   {ratio}", flush=True)


class Operations:
    """A full pool on which each operation is timed by itself."""

    def __init__(self, policy: str, num_blocks: int, size: int) -> None:
        self.manager = new_manager(num_blocks)
        self.pool = self.manager.block_pool
        self.size = size
        self.rng = Random(1)
        self.state: free_queue.LinkedState | None = None
        if policy != "stock":
            self.state = attach(self.manager)
            free_queue.switch(self.pool.free_block_queue, self.state, policy)
        while len(self.pool.cached_block_hash_to_block) < num_blocks:
            self.pool.free_blocks(reversed(self.filled(min(256, num_blocks))))

    def filled(self, count: int) -> list[Any]:
        """Return new blocks with hashes, in use."""
        blocks = self.pool.get_new_blocks(count)
        self.cache(blocks)
        return blocks

    def cache(self, blocks: list[Any]) -> None:
        """Give blocks hashes that were never there."""
        request = SimpleNamespace(block_hashes=unique(self.rng, len(blocks)))
        self.pool.cache_full_blocks(request, blocks, 0, len(blocks), BLOCK, 0)

    def round(self, calls: int = 2048) -> list[tuple[str, float]]:
        """Return (operation, ns a block), each over about 2,048 blocks."""
        pool, size = self.pool, self.size
        many = max(1, calls // size)
        figures: list[tuple[str, float]] = []

        def timed(name: str, work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
            started = time.process_time()
            done = [work(item) for item in items]
            figures.append((name, (time.process_time() - started) / (many * size) * 1e9))
            return done

        taken = timed("get, hashes evicted", pool.get_new_blocks, [size] * many)
        for blocks in taken:
            self.cache(blocks)
        timed("free, hashed", pool.free_blocks, [list(reversed(blocks)) for blocks in taken])
        timed("touch, free", self.hit, taken)
        timed("touch, in use", self.hit, taken)
        for blocks in taken:
            pool.free_blocks(reversed(blocks))
        timed("free, hit", pool.free_blocks, [list(reversed(blocks)) for blocks in taken])
        bare = [pool.get_new_blocks(size) for _ in range(many)]
        timed("free, no hash", pool.free_blocks, bare)
        timed("get, no hash", pool.get_new_blocks, [size] * many)
        for blocks in bare:
            self.cache(blocks)
            pool.free_blocks(reversed(blocks))
        return figures

    def hit(self, blocks: list[Any]) -> None:
        """Count a hit where somebody counts, and pin."""
        if self.state is not None:
            free_queue.hit(self.state, blocks)
        self.pool.touch(blocks)


def switches(num_blocks: int, rounds: int) -> None:
    """Print ms of switches on a full pool."""
    print(f"\nswitches, {num_blocks:,} blocks, ms, min / median / max of {rounds} rounds")
    path = Path("lru", num_blocks)
    queue, state = path.manager.block_pool.free_block_queue, path.state
    assert state is not None
    source = PATTERNS["single"](Random(0), num_blocks)
    figures: dict[str, list[float]] = {}
    fresh: list[float] = []
    for _ in range(rounds):
        empty = Path("lru", num_blocks)
        started = time.process_time()
        assert empty.state is not None
        free_queue.switch(empty.manager.block_pool.free_block_queue, empty.state, "s3fifo")
        fresh.append((time.process_time() - started) * 1e3)
    figures["lru -> s3fifo, all empty"] = fresh
    slices: list[float] = []
    lasts: list[float] = []
    whole: list[float] = []
    while path.blocks < 6 * num_blocks:
        path.run([next(source) for _ in range(200)])
    for _ in range(rounds):
        for policy in ("s3fifo", "lru", "arc", "s3fifo", "s3fifo-25", "arc", "lru"):
            name = f"{state.policy} -> {policy}"
            started = time.process_time()
            free_queue.switch(queue, state, policy)
            figures.setdefault(name, []).append((time.process_time() - started) * 1e3)
            taken: list[float] = []
            sweep = free_queue.Sweep(queue, state, path.manager.block_pool)
            while not sweep.done:
                started = time.process_time()
                assert sweep.step() is None
                taken.append((time.process_time() - started) * 1e3)
            slices += taken[:-1]
            lasts.append(taken[-1])
            started = time.process_time()
            assert free_queue.check(queue, state, path.manager.block_pool) is None
            whole.append((time.process_time() - started) * 1e3)
            # Enough for full ghosts.
            done = path.blocks
            while path.blocks < done + 3 * num_blocks:
                path.run([next(source) for _ in range(200)])
    figures["a slice of the check"] = slices
    figures["its last, with counts"] = lasts
    figures["all in one walk (tests)"] = whole
    for name, values in figures.items():
        print(f"  {name:26} {spread(values, 3)}", flush=True)


def within_vllm() -> NoReturn:
    """Become the same program in the newest vLLM's environment, which is installed when need be."""
    from tests.engine.environment import NEWEST, python_of

    python, before = python_of(NEWEST)
    path = os.pathsep.join(map(str, (*before, ROOT)))
    os.execve(python, [str(python), *sys.argv], {**os.environ, "PYTHONPATH": path})


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="*", default=[65_536, 262_144])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=["path", "operations", "switches"])
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--leave-hashes", action="store_true", help="evict as where vLLM's code is not the known one")
    parser.add_argument("--patterns", nargs="*", default=list(PATTERNS))
    options = parser.parse_args()
    try:
        import vllm
    except ModuleNotFoundError:
        within_vllm()
    Path.leaves_hashes = options.leave_hashes
    print(f"free-block queues in vLLM {vllm.__version__} ({machine()})")
    for num_blocks in options.blocks:
        if "path" in options.only:
            whole_path(num_blocks, options.rounds, tuple(options.policies), options.patterns)
        if "operations" in options.only:
            operations(num_blocks, options.rounds, tuple(options.policies))
    if "switches" in options.only:
        for num_blocks in sorted({8_192, *options.blocks}):
            switches(num_blocks, min(options.rounds, 3))


if __name__ == "__main__":
    sys.exit(main())
