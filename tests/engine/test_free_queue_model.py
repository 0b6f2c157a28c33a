"""The linked queue inside vLLM's pool evicts what the keyed queue of the same policy evicts, block for block."""

from collections.abc import Hashable
from typing import Any

import pytest

from engine_patch import chains, free_queue
from engine_patch.policy import POLICIES, EvictionQueue, converted, new_queue
from tests.engine.pool_driver import Listener, PoolDriver, Running, stock_class

OPERATIONS = 6_000
PREPENDS = hasattr(stock_class(), "prepend_n")
KEYED = [policy for policy in POLICIES if policy != "lru"]


class Keyed(Listener):
    """A keyed queue of block ids that is told what happens to a pool, and says when the pool evicts something else."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.held: dict[Hashable, dict[int, None]] = {}  # content -> blocks that hold it, oldest first
        self.content: dict[int, bytes] = {}
        self.parent: dict[int, bytes | None] = {}
        self.copies = 0
        self.queue: EvictionQueue[int] = new_queue(policy, num_blocks, range(1, num_blocks + 1), self.elsewhere)

    def elsewhere(self, block: int, content: Hashable) -> bool:
        """Tell whether another block holds the content."""
        return any(other != block for other in self.held[content])

    def order(self, block: int) -> tuple[bytes, int]:
        """Siblings go by hash, then by age."""
        content = self.content.get(block, b"")
        held = list(self.held.get(content, ()))
        return content, held.index(block) if block in held else -1

    def switch(self, policy: str) -> None:
        self.queue = converted(self.queue, policy, self.num_blocks, self.elsewhere)

    def hits(self, blocks: list[Any]) -> None:
        for block in blocks:
            self.queue.hit(block.block_id)
            if not block.ref_cnt:
                self.queue.remove(block.block_id)

    def evicted(self, blocks: list[Any]) -> None:
        evicted = []
        for _ in blocks:
            # One by one: the second of two copies is alone when the first has gone.
            block = self.queue.evict()
            evicted.append(block)
            content = self.content.pop(block, None)
            if content is not None:
                del self.held[content][block]
        assert evicted == [block.block_id for block in blocks]

    def hashed(self, running: Running, first: int) -> None:
        for at in range(first, running.hashed):
            block, content = running.blocks[at].block_id, running.hashes[at]
            self.held.setdefault(content, {})[block] = None
            self.content[block] = content
            self.parent[block] = running.hashes[at - 1] if at else None

    def freed(self, blocks: list[Any]) -> None:
        unhashed = [block.block_id for block in blocks if block.block_hash is None]
        for block in reversed(unhashed):
            self.queue.prepend(block)
        for block in (block.block_id for block in blocks if block.block_hash is not None):
            content = self.content[block]
            oldest = next(iter(self.held[content]))
            self.copies += oldest != block
            add = self.queue.append if oldest == block else self.queue.append_copy
            add(block, content, self.parent[block])

    def reset(self) -> None:
        self.queue.reset()
        self.held.clear()
        self.content.clear()


@pytest.fixture
def siblings_by_hash(monkeypatch: pytest.MonkeyPatch) -> list[Keyed]:
    """Lets keyed queues orphan siblings in the order of their hashes, as the linked ones do; for the model put in."""
    models: list[Keyed] = []

    def several(kids: Any) -> list[int]:
        return sorted(kids if type(kids) is dict else (kids,), key=models[0].order)

    monkeypatch.setattr(chains, "_several", several)
    return models


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", KEYED)
def test_evicts_what_the_keyed_queue_evicts(policy: str, seed: int, siblings_by_hash: list[Keyed]) -> None:
    """One policy, random requests with copies of contents and orphans: every eviction is the keyed queue's."""
    size = (16, 30, 60)[seed]
    model = Keyed(policy, size)
    siblings_by_hash.append(model)
    driver = PoolDriver(100 + seed, size, listener=model, others=("unhashed", "reset"))
    free_queue.switch(driver.queue, driver.state, policy)
    for _ in range(OPERATIONS):
        driver.step(branches=4, longest=9)
    assert model.copies > 100, "the case has no copies"
    assert list(model.queue) == [block.block_id for block in driver.queue.get_all_free_blocks()]


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_switch_converts_as_the_keyed_queues_do(seed: int, copies: bool, siblings_by_hash: list[Keyed]) -> None:
    """Policies switched at random: the order after each switch and every eviction are the keyed queues'.

    With copies, LRU is left out: vLLM's own code evicts a copy without passing on what hung on it; before 0.23 too,
    where it appends blocks without a hash.
    """
    size = (16, 30, 60)[seed]
    model = Keyed("lru", size)
    siblings_by_hash.append(model)
    driver = PoolDriver(200 + seed, size, listener=model, others=("unhashed", "reset"), copies=copies)
    switches = 0
    for _ in range(OPERATIONS):
        if driver.rng.random() < 0.02 or not switches:
            policy = driver.rng.choice(KEYED if copies or not PREPENDS else POLICIES)
            if policy != driver.state.policy:
                free_queue.switch(driver.queue, driver.state, policy)
                model.switch(policy)
                switches += 1
                assert list(model.queue) == [block.block_id for block in driver.queue.get_all_free_blocks()]
        driver.step(branches=4, longest=9)
    assert switches > 50
