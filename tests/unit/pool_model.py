"""An engine's KV pool as vLLM runs it, block by block, and random traffic on it: what shadows are compared with.

Written apart from engine_patch.shadow on purpose: physical blocks with ids, copies of one content, references counted a
block at a time. Only the order of eviction is the keyed queues' own.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from random import Random

from engine_patch.policy import converted, new_queue

BLOCK = 16


@dataclass
class Running:
    """A request and the blocks that it holds."""

    number: int
    hashes: list[int]
    tokens: int
    blocks: list[int]
    cached: int = 0


class Pool:
    """All blocks of one engine under one policy, which can be switched."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.hash_of: list[int | None] = [None] * num_blocks
        self.by_hash: dict[int, list[int]] = {}
        self.queue = new_queue(policy, num_blocks, range(num_blocks), self._elsewhere)
        self.queries = self.hits = self.copies = 0

    def _elsewhere(self, block: int, content: Hashable) -> bool:
        return any(other != block for other in self.by_hash.get(content, ()))  # type: ignore[call-overload]

    def switch(self, policy: str) -> None:
        """Make another policy the live one."""
        self.queue = converted(self.queue, policy, self.num_blocks, self._elsewhere)

    def start(self, number: int, hashes: list[int], tokens: int, counted: bool = True) -> tuple[Running, int] | None:
        """Admit a request: its state and its hit tokens; None when its prompt does not fit now."""
        found: list[int] = []
        for value in hashes[: (tokens - 1) // BLOCK]:
            if value not in self.by_hash:
                break
            found.append(self.by_hash[value][0])
        new = -(-tokens // BLOCK) - len(found)
        if new + sum(1 for block in found if not self.refs[block]) > len(self.queue):
            return None
        if counted:
            self.queue.take(found)
        else:
            self.queue.discard_all(found)
        for block in found:
            self.refs[block] += 1
        request = Running(number, hashes, tokens, found + self._allocate(new), len(found))
        self._commit(request, len(hashes))
        if counted:
            self.queries += tokens
            self.hits += len(found) * BLOCK
        return request, len(found) * BLOCK

    def finish(self, request: Running, hashes: list[int], tokens: int) -> None:
        """Write the output (as far as blocks are left) and free all."""
        new = -(-tokens // BLOCK) - len(request.blocks)
        if 0 < new <= len(self.queue):
            request.blocks += self._allocate(new)
        request.hashes = hashes
        self._commit(request, min(len(hashes), len(request.blocks)))
        self.free(request)

    def free(self, request: Running) -> None:
        """Take a request's blocks out of use, tail first."""
        unhashed = []
        for at in range(len(request.blocks) - 1, -1, -1):
            block = request.blocks[at]
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            value = self.hash_of[block]
            if value is None:
                unhashed.append(block)
            elif self.by_hash[value][0] != block:
                self.queue.append_copy(block, value, self.hash_of[request.blocks[at - 1]] if at else None)
            else:
                self.queue.append(block, value, self.hash_of[request.blocks[at - 1]] if at else None)
        for block in unhashed:
            self.queue.prepend(block)

    def _allocate(self, count: int) -> list[int]:
        blocks = self.queue.evict_many(count)
        for block in blocks:
            value = self.hash_of[block]
            if value is not None:
                self.by_hash[value].remove(block)
                if not self.by_hash[value]:
                    del self.by_hash[value]
                self.hash_of[block] = None
            self.refs[block] = 1
        return blocks

    def _commit(self, request: Running, until: int) -> None:
        for at in range(request.cached, until):
            value = request.hashes[at]
            holders = self.by_hash.setdefault(value, [])
            self.copies += bool(holders)
            holders.append(request.blocks[at])
            self.hash_of[request.blocks[at]] = value
        request.cached = max(request.cached, until)


@dataclass
class Traffic:
    """Conversations, shared system prompts and one-off prompts; `again_share` of all come again with their answers."""

    seed: int
    system_share: float = 0.4
    single_share: float = 0.3
    blocks_max: int = 40
    again_share: float = 0.0
    rng: Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.systems = [self._fresh(self.rng.randint(4, self.blocks_max)) for _ in range(30)]
        self.sessions: list[list[int]] = []
        self.asked: list[tuple[list[int], list[int]]] = []

    def _fresh(self, count: int) -> list[int]:
        return [self.rng.getrandbits(64) for _ in range(count)]

    def prompts(self, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (hashes of the prompt, hashes with the output)."""
        rng = self.rng
        for _ in range(count):
            if self.again_share and self.asked and rng.random() < self.again_share:
                yield self.asked[-1 - min(len(self.asked) - 1, int(rng.expovariate(0.1)))]
                continue
            draw = rng.random()
            if draw < self.system_share:
                prompt = self.systems[int(rng.random() ** 2 * len(self.systems))] + self._fresh(rng.randint(1, 10))
            elif draw < self.system_share + self.single_share or not self.sessions:
                prompt = self._fresh(rng.randint(5, self.blocks_max))
            else:
                prompt = self.sessions[max(0, len(self.sessions) - 1 - int(rng.expovariate(0.05)))] + self._fresh(
                    rng.randint(1, 6)
                )
            full = prompt + self._fresh(rng.randint(0, 6))
            self.asked.append((prompt, full))
            yield prompt, full
            if draw >= self.system_share:
                self.sessions.append(full)
