"""The sketch's rules: never under the truth, over it only by chance and within its noise."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.sketch import Sketch

HASHES = st.integers(0, 2**64 - 1)
# Halves of a few values: keys that share some cells, in all ways.
COLLIDING = st.builds(lambda first, step: step << 32 | first, st.integers(0, 7), st.integers(0, 7))


@given(st.lists(st.one_of(HASHES, COLLIDING), max_size=400))
def test_an_estimate_is_never_under_the_truth(keys: list[int]) -> None:
    """Also in a sketch so small that everything collides; adding one raises no estimate by more than one."""
    sketch, truth = Sketch(8), Counter[int]()
    for key in keys:
        before = sketch.estimate(key)
        truth[key] += 1
        assert sketch.add(key) == sketch.estimate(key) == before + 1
    for key, n in truth.items():
        assert n <= sketch.estimate(key) <= len(keys)
    assert sketch.added == len(keys)


@pytest.mark.parametrize("seed", range(5))
def test_only_cells_below_the_new_estimate_are_raised(seed: int) -> None:
    """Estimates are those of rows kept by the rule itself, written down here in another way."""
    rng = random.Random(seed)
    sketch, rows = Sketch(8), [[0] * 8 for _ in range(4)]
    for _ in range(300):
        key = rng.randrange(8) << 32 | rng.randrange(8)
        own = [(row, ((key & 0xFFFFFFFF) + row * (key >> 32)) % 8) for row in range(4)]
        estimate = min(rows[row][cell] for row, cell in own) + 1
        for row, cell in own:
            rows[row][cell] = max(rows[row][cell], estimate)
        assert sketch.add(key) == estimate


@given(st.lists(HASHES, max_size=200), HASHES)
def test_only_keys_that_share_cells_disturb(keys: list[int], other: int) -> None:
    """A key that was never added is estimated at most as the additions whose cells it shares in every row."""
    sketch = Sketch(16)

    def cells(key: int) -> list[int]:
        return [((key & 0xFFFFFFFF) + row * (key >> 32)) % 16 for row in range(4)]

    for key in keys:
        sketch.add(key)
    most = min(sum(cells(key)[row] == cells(other)[row] for key in keys) for row in range(4))
    assert sketch.estimate(other) <= most


@pytest.mark.parametrize("seed", range(3))
def test_errors_are_within_the_noise(seed: int) -> None:
    """50,000 keys, a hundred of them hot, in 4 x 4,096 cells: no hot key is over by more than `noise`."""
    rng = random.Random(seed)
    keys = [rng.getrandbits(64) for _ in range(50_000)]
    stream = keys + keys[:100] * 200
    rng.shuffle(stream)
    sketch, truth = Sketch(4096), Counter(stream)
    for key in stream:
        sketch.add(key)
    assert sketch.noise == 2 * len(stream) // 4096
    over = [sketch.estimate(key) - truth[key] for key in keys]
    assert min(over) >= 0
    assert max(over[:100]) <= sketch.noise
    assert sum(sketch.estimate(key) > sketch.noise for key in keys[100:]) <= 0.01 * len(keys)
