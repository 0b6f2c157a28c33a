"""What is remembered of evicted contents goes in the order in which it came."""

from collections import OrderedDict
from random import Random

import pytest

from engine_patch.ghost import RUN, STALE, Ghost


@pytest.mark.parametrize("seed", range(6))
def test_does_what_an_ordered_dict_does(seed: int) -> None:
    """Runs added, contents found again and taken out, the oldest forgotten: the same contents in the same order."""
    rng = Random(seed)
    ghost: Ghost[int] = Ghost()
    model: OrderedDict[int, None] = OrderedDict()
    names = (80, 300, 3_000)[seed % 3]
    for step in range(1_500):
        count = rng.choice((1, 2, RUN // 2, RUN + 6))
        new = [name for name in rng.sample(range(names), count) if name not in model]
        model.update(dict.fromkeys(new))
        ghost.add(new)
        for name in rng.sample(range(names), names // rng.choice((4, 60))):
            assert (name in ghost) == (name in model)
            if name in model:
                del model[name]
                ghost.remove(name)
        if rng.random() < 0.7:
            most = rng.choice((0, names // 8, names // 2))
            ghost.trim(most)
            while len(model) > most:
                model.popitem(last=False)
        assert len(ghost) == len(model)
        if step % 10 == 0:
            assert list(ghost) == list(model)
            assert set(ghost._stale) <= {name for run in ghost._log for name in run}


def test_what_is_found_again_takes_no_room() -> None:
    """A ghost of which everything is found again, without end, stays small."""
    ghost: Ghost[int] = Ghost()
    for number in range(20_000):
        ghost.add([number, number + 100_000])
        ghost.remove(number)
        if number >= 100:
            ghost.remove(number - 100 + 100_000)
    assert len(ghost) == 100
    assert sum(len(run) for run in ghost._log) <= 2 * len(ghost) + 2 * STALE


def test_cleared_it_is_as_new() -> None:
    """Nothing is left, and what is added later counts from there."""
    ghost: Ghost[str] = Ghost()
    ghost.add(["a", "b", "c"])
    ghost.remove("b")
    ghost.clear()
    assert not ghost
    ghost.add(["b", "a"])
    ghost.trim(1)
    assert list(ghost) == ["a"]
