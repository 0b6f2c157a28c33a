"""Random work for one of vLLM's block pools: requests that share prefixes, copies, and what else may happen to it.

1. A request is a chain of block hashes from a small random tree, so prefixes are found again and contents get copies.
   It looks up, takes its hits, allocates the rest, gets hashes for what is full, grows, and gives all back tail first.
2. Beside requests: blocks without hashes, `evict_blocks`, `unpin_blocks` (where the version has it), resets.
3. Who listens is told what a keyed queue would be told: the same random work, seed for seed, for any listener.
"""

import hashlib
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from engine_patch import free_queue

BLOCK = 16
# operation -> how often
REQUESTS = {"start": 30.0, "grow": 15.0, "finish": 30.0}
OTHERS = {"unhashed": 4.0, "evict": 2.0, "unpin": 2.0, "reset": 0.3}


def new_pool(num_blocks: int) -> Any:
    """Return a block pool of vLLM's own with `num_blocks` free blocks beside the null block."""
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(num_gpu_blocks=num_blocks + 1, enable_caching=True, hash_block_size=BLOCK)


def stock_class() -> type:
    """Return vLLM's class of the free-block queue."""
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    return FreeKVCacheBlockQueue  # type: ignore[no-any-return]


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Return the chained hashes of blocks that hold path[0], path[1], …"""
    hashes, parent = [], b""
    for step in path:
        parent = hashlib.sha256(parent + step.to_bytes(4, "big")).digest()
        hashes.append(parent)
    return hashes


@dataclass
class Running:
    """A request that holds blocks; `hashed` of them have a hash, in prompt order."""

    hashes: list[bytes]
    blocks: list[Any] = field(default_factory=list)
    hashed: int = 0


class Listener:
    """Is told what happens to the pool's free blocks; the base class hears nothing."""

    def hits(self, blocks: list[Any]) -> None: ...

    def evicted(self, blocks: list[Any]) -> None: ...

    def hashed(self, running: Running, first: int) -> None: ...

    def freed(self, blocks: list[Any]) -> None: ...

    def reset(self) -> None: ...


class PoolDriver:
    """One pool, adopted or stock, and the requests that run on it."""

    def __init__(
        self,
        seed: int,
        num_blocks: int,
        adopted: bool = True,
        listener: Listener | None = None,
        others: tuple[str, ...] = tuple(OTHERS),
        copies: bool = True,
    ) -> None:
        self.rng = Random(seed)
        self.pool = new_pool(num_blocks)
        self.queue = self.pool.free_block_queue
        self.state = free_queue.adopt(self.queue, self.pool) if adopted else None
        self.listener = listener or Listener()
        self.running: list[Running] = []
        self.operations = 0
        self._copies = copies
        self._choices = {**REQUESTS, **{name: OTHERS[name] for name in others}}

    def lookup(self, hashes: list[bytes], most: int) -> list[Any]:
        """Return the blocks of the longest known prefix, as vLLM finds them."""
        found: list[Any] = []
        for value in hashes[:most]:
            blocks = self.pool.get_cached_block(value, [0])
            if blocks is None:
                break
            found += blocks
        return found

    def start(self, hashes: list[bytes], full: int, extra: int = 0, most: int | None = None) -> Running | None:
        """Admit a request whose first `full` blocks get their hashes at once, with `extra` blocks without one."""
        found = self.lookup(hashes, len(hashes) - 1 if most is None else most)[:full]
        new = full - len(found) + extra
        if new + sum(block.ref_cnt == 0 for block in found) > self.queue.num_free_blocks:
            return None
        if found:
            self.listener.hits(found)
            if self.state is not None:
                free_queue.hit(self.state, found)
            self.pool.touch(found)
        request = Running(hashes, list(found), len(found))
        self.allocate(request, new)
        self.hash_up_to(request, full)
        self.running.append(request)
        return request

    def allocate(self, request: Running, count: int) -> None:
        """Give the request `count` more blocks."""
        blocks = self.pool.get_new_blocks(count)
        self.listener.evicted(blocks)
        request.blocks += blocks

    def hash_up_to(self, request: Running, until: int) -> None:
        """Make the request's blocks findable up to `until`."""
        first = request.hashed
        until = min(until, len(request.hashes), len(request.blocks))
        if not self._copies:
            new = (at for at in range(first, until) if self.pool.get_cached_block(request.hashes[at], [0]) is not None)
            until = next(new, until)
        if until <= first:
            return
        self.pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=request.hashes),
            blocks=request.blocks,
            num_cached_blocks=first,
            num_full_blocks=until,
            block_size=BLOCK,
            kv_cache_group_id=0,
        )
        request.hashed = until
        if self.state is not None:
            free_queue.cached(self.state, request.blocks, first, until)
        self.listener.hashed(request, first)

    def finish(self, request: Running) -> None:
        """Give the request's blocks back, tail first."""
        self.running = [other for other in self.running if other is not request]
        freed = [block for block in reversed(request.blocks) if block.ref_cnt == 1]
        self.listener.freed(freed)
        self.pool.free_blocks(reversed(request.blocks))

    def random_path(self, branches: int, longest: int) -> tuple[int, ...]:
        """Return a path in the tree; low branches are likelier."""
        rng = self.rng
        return tuple(min(rng.randrange(branches), rng.randrange(branches)) for _ in range(rng.randint(1, longest)))

    def step(self, branches: int = 3, longest: int = 8) -> str:
        """Do one random operation and return its name."""
        self.operations += 1
        rng = self.rng
        name = rng.choices(list(self._choices), list(self._choices.values()))[0]
        if name == "start":
            hashes = chain(self.random_path(branches, longest))
            full = rng.randint(1, len(hashes)) if self._copies else len(hashes)
            # vLLM looks one token less far than the prompt: a whole number of blocks makes a copy of the last.
            self.start(hashes, full, rng.randrange(2), most=full - 1 if self._copies and rng.random() < 0.5 else full)
        elif name == "grow" and self.running:
            request = rng.choice(self.running)
            count = rng.randrange(3)
            if count <= self.queue.num_free_blocks:
                self.allocate(request, count)
            self.hash_up_to(request, len(request.blocks) - rng.randrange(2))
        elif name == "finish" and self.running:
            self.finish(rng.choice(self.running))
        elif name == "unhashed" and self.queue.num_free_blocks:
            request = Running([])
            self.allocate(request, rng.randint(0, min(3, self.queue.num_free_blocks)))
            self.running.append(request)
        elif name == "evict":
            self.pool.evict_blocks(set(rng.sample(range(1, len(self.pool.blocks)), 2)))
        elif name == "unpin" and self.running and hasattr(self.pool, "unpin_blocks"):
            request = rng.choice(self.running)
            self.running = [other for other in self.running if other is not request]
            self.pool.unpin_blocks(request.blocks, lambda block: None)
        elif name == "reset":
            while self.running and rng.random() < 0.9:
                self.finish(self.running[-1])
            if self.pool.reset_prefix_cache():
                self.listener.reset()
                if self.state is not None:
                    free_queue.reset(self.state)
        return name
