"""A small engine under an estimator's orders, and traffic that one policy serves better than the other."""

from random import Random
from typing import Any

from engine_patch.decision import Decision
from engine_patch.estimator import Estimator
from tests.unit.pool_model import BLOCK, Pool

SIZE = 400
STEP_S = 1.0
Past = list[list[int]]


def recency(rng: Random, sessions: Past) -> tuple[list[int], list[int]]:
    """Sessions that come back while they are young: LRU's traffic."""
    if len(sessions) > 12:
        del sessions[: len(sessions) - 12]
    if sessions and rng.random() < 0.8:
        before = sessions.pop(rng.randrange(len(sessions)))
        prompt = (before if len(before) < 60 else before[:4]) + [rng.getrandbits(64) for _ in range(3)]
    else:
        prompt = [rng.getrandbits(64) for _ in range(8)]
    full = prompt + [rng.getrandbits(64) for _ in range(2)]
    sessions.append(full)
    return prompt, full


def popular(rng: Random, prompts: Past) -> tuple[list[int], list[int]]:
    """A few prompts come back between many that never do: S3-FIFO's traffic."""
    if not prompts:
        prompts += [[rng.getrandbits(64) for _ in range(20)] for _ in range(10)]
    if rng.random() < 0.4:
        prompt = [*prompts[rng.randrange(len(prompts))], rng.getrandbits(64)]
    else:
        prompt = [rng.getrandbits(64) for _ in range(40)]
    return prompt, prompt


def unrelated(rng: Random, past: Past) -> tuple[list[int], list[int]]:
    """Nothing ever comes back."""
    prompt = [rng.getrandbits(64) for _ in range(5)]
    return prompt, prompt


class Engine:
    """A pool under the estimator's orders, one request at a time."""

    def __init__(
        self, seed: int, preset: str = "default", policies: tuple[str, ...] = ("lru", "s3fifo"), **options: Any
    ) -> None:
        self.pool = Pool("lru", SIZE)
        self.estimator = Estimator(preset, policies, SIZE, BLOCK, **options)
        self.rng = Random(seed)
        self.pasts: dict[Any, Past] = {}
        self.t = 0.0
        self.number = 0
        self.decisions: list[Decision] = []
        self.obey = True
        self.off: int | None = 0

    @property
    def switches(self) -> list[Decision]:
        """The decisions that switched."""
        return [decision for decision in self.decisions if decision.switch]

    def serve(self, kind: Any, seconds: float) -> "Engine":
        """Serve this traffic."""
        end = self.t + seconds
        while self.t < end:
            self.t += STEP_S
            self.number += 1
            prompt, full = kind(self.rng, self.pasts.setdefault(kind, []))
            tokens = len(prompt) * BLOCK + 5
            got = self.pool.start(self.number, prompt, tokens)
            assert got is not None
            request, hit_tokens = got
            told = None if self.off is None else hit_tokens + self.off
            free = len(self.pool.queue)
            self.estimator.admitted(self.t, self.number, prompt, tokens, told, free_blocks=free)
            self.pool.finish(request, full, tokens + BLOCK * (len(full) - len(prompt)))
            self.estimator.freed(self.t, self.number, full, len(request.blocks))
            self.decide()
        return self

    def decide(self) -> None:
        """Ask, and do as is said."""
        decision = self.estimator.decide(self.t)
        if decision is not None:
            self.decisions.append(decision)
            if decision.switch and self.obey:
                self.switch(decision.policy)

    def switch(self, policy: str) -> None:
        """Make a policy the live one."""
        self.pool.switch(policy)
        self.estimator.policy(self.t, policy, "test")
