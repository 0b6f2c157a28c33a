"""Traffic that changes, the six ways of algorithms: the default preset is never a point under the worse static policy.

Miniatures: 400 blocks, a request a second, half an hour; A is what S3-FIFO serves better, B what LRU does.
"""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.unit.switched_engine import Engine, Past, popular, recency

LENGTH_S = 1800.0
Share = Callable[[float], float]  # of B, at this second


def swapped(minutes: float) -> Share:
    """A and B by turns."""
    return lambda at_s: float(int(at_s // (60 * minutes)) % 2)


SCENARIOS: dict[str, Share] = {
    "swap each 10 min": swapped(10),
    "swap each 5 min": swapped(5),
    "swap each 2.5 min": swapped(2.5),
    "swap each minute": swapped(1),
    "drift from A to B": lambda at_s: at_s / LENGTH_S,
    "half and half": lambda at_s: 0.5,
}


def hit_rate(share: Share, policy: str | None) -> tuple[float, int]:
    """Return the engine's hit rate, and how often it switched; policy None: as the estimator says."""
    engine = Engine(0)
    if policy is not None:
        engine.obey = False
        engine.switch(policy)
    pasts: dict[Any, Past] = {popular: [], recency: []}

    def kind(rng: Random, past: Past) -> tuple[list[int], list[int]]:
        chosen = recency if rng.random() < share(engine.t) else popular
        return chosen(rng, pasts[chosen])

    engine.serve(kind, LENGTH_S)
    return engine.pool.hits / engine.pool.queries, len(engine.switches) if policy is None else 0


@pytest.mark.parametrize("name", SCENARIOS)
def test_changing_traffic_is_not_served_worse_than_by_the_worse_policy(name: str) -> None:
    """Above the worse static policy less a point, and switched in fewer than every second window."""
    (lru, _), (s3fifo, _) = hit_rate(SCENARIOS[name], "lru"), hit_rate(SCENARIOS[name], "s3fifo")
    rate, switches = hit_rate(SCENARIOS[name], None)
    assert rate > min(lru, s3fifo) - 0.01, (lru, s3fifo)
    assert switches <= LENGTH_S / 60 / 2
    print(f"{name}: lru {lru:.3f} s3fifo {s3fifo:.3f} switched {rate:.3f} ({switches} switches)")
