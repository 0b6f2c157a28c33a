"""How an evaluation is summed up: regret, recovered gap, means over seeds; and what the bounds count."""

from typing import Any

import numpy as np
import pytest

from replay.evaluation import Settings, run_case, summarise
from replay.mixes import Mix, constant
from replay.scenarios import read_traffic
from service.errors import InvalidInput

SETTINGS = Settings(policies=("lru", "s3fifo", "arc"), presets=("default", "paper"), seeds=(0, 1))


def line(name: str, hit: float, seed: int = 0, switches: int = 0) -> dict[str, Any]:
    """A kept run."""
    made = [[float(number), "arc"] for number in range(switches)]
    return {"settings": SETTINGS.fingerprint(), "mix": "m", "seed": seed, "name": name, "hit": hit, "switches": made}


def row(*lines: dict[str, Any]) -> dict[str, Any]:
    """The only row of a summary."""
    return summarise(lines, SETTINGS)["mixes"][0]  # type: ignore[no-any-return]


DEFAULT = SETTINGS.run_name("default")


def test_recovered_is_the_share_of_the_gap_to_the_best_static_policy() -> None:
    """LRU 0.30, S3-FIFO 0.35, ARC 0.40, WAKMan 0.39: nine tenths recovered, a regret of one point."""
    found = row(line("lru", 0.3), line("s3fifo", 0.35), line("arc", 0.4), line(DEFAULT, 0.39), line("paper", 0.34))
    assert found["hit"] == {"lru": 0.3, "s3fifo": 0.35, "arc": 0.4, "wakman": 0.39, "wakman-paper": 0.34}
    assert found["best_static"] == "arc"
    assert found["recovered"] == pytest.approx(0.9)
    assert found["regret"] == pytest.approx(0.01)
    assert found["over_worse"] == pytest.approx(0.09)
    assert found["recovered_pair"]["wakman-paper"] == pytest.approx(0.8)


def test_a_gap_of_a_point_or_less_is_not_judged() -> None:
    """0.9 points between LRU and the best: no share of it is given, but the regret is."""
    found = row(line("lru", 0.3), line("s3fifo", 0.305), line("arc", 0.309), line(DEFAULT, 0.28))
    assert found["recovered"] is None
    assert found["recovered_pair"]["wakman"] is None
    assert found["regret"] == pytest.approx(0.029)
    assert found["over_worse"] == pytest.approx(-0.02)


def test_the_best_of_all_names_counts_for_regret() -> None:
    """WAKMan above every static policy has none."""
    assert row(line("lru", 0.3), line("arc", 0.4), line(DEFAULT, 0.41))["regret"] == 0


def test_seeds_are_averaged_and_kept_apart() -> None:
    """Means of hit rates and switches; each seed's own rates stand beside them."""
    found = row(
        *(line("lru", rate, seed) for seed, rate in enumerate((0.2, 0.4))),
        *(line(DEFAULT, rate, seed, switches) for seed, (rate, switches) in enumerate(((0.3, 2), (0.5, 5)))),
    )
    assert found["seeds"] == [0, 1]
    assert found["hit"] == pytest.approx({"lru": 0.3, "wakman": 0.4})
    assert found["switches"] == 3.5
    assert found["by_seed"] == [{"lru": 0.2, "wakman": 0.3}, {"lru": 0.4, "wakman": 0.5}]


def test_a_pool_of_its_own_is_a_run_of_its_own() -> None:
    """Kept runs of the default preset with another pool are not taken for this one's."""
    other = Settings(pool=("lru", "arc")).run_name("default")
    assert other != DEFAULT
    assert "wakman" not in row(line("lru", 0.3), line(other, 0.4))["hit"]


def test_bounds_lie_above_every_policy() -> None:
    """Infinite and Belady, on a trace that all policies serve."""
    settings = Settings(blocks=1500, policies=("lru", "s3fifo", "s3fifo-25", "arc"), presets=())
    lines = {
        found["name"]: found for found in run_case(constant(Mix(0.4, 0.3, 0.3), 240), 2, settings.names(), settings)
    }
    bounds = lines.pop("bounds")
    assert bounds["infinite"] >= bounds["belady"] >= max(found["hit"] for found in lines.values()) > 0


def test_a_recorded_trace_is_served_in_its_own_blocks(tmp_path: Any) -> None:
    """Blocks of 512 tokens, ids of the trace for full prompt blocks; output blocks are like no other."""
    path = tmp_path / "two.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 3000, "input_length": 1600, "output_length": 10, "hash_ids": [0, 1, 3, 4]}\n'
    )
    (traffic,) = read_traffic(path)
    one, two = traffic.requests(0)  # type: ignore[union-attr]
    assert (one.prompt_blocks, one.block_tokens, len(one.blocks)) == (2, 512, 3)
    assert one.blocks[:2].tolist() == [0, 1]
    assert two.blocks.tolist() == [0, 1, 3]
    assert not np.isin(one.blocks[2:], two.blocks).any()
    settings = Settings(traffic=str(path), blocks=100, policies=("lru",), presets=(), bounds=False)
    (found,) = run_case(traffic, 0, settings.names(), settings)
    assert found["hit"] == pytest.approx(1024 / 2700, abs=1e-6)


def test_a_bad_trace_is_refused_before_any_process_starts(tmp_path: Any) -> None:
    path = tmp_path / "cut.jsonl"
    with pytest.raises(InvalidInput, match=r"cut\.jsonl does not exist"):
        read_traffic(path)
    path.write_text('{"timestamp": 0, "input_length": 10, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1,')
    with pytest.raises(InvalidInput, match=r"cut\.jsonl, line 2"):
        read_traffic(path)
