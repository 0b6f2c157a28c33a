"""What an engine's metrics say of its cache: W, the token budget, τ."""

import math
from dataclasses import replace

import pytest

from planner.capacity import EVICTIONS, read_page, residency, room
from replay.block_watch import BlockWatch, Evicted
from replay.engine_model import EngineModel
from replay.presets import find_preset
from replay.sim_metrics import SimMetrics

PAGE = """\
# HELP vllm:num_requests_running Requests
vllm:num_requests_running{{engine="0",model_name="m"}} 3.0
vllm:num_requests_running{{engine="1",model_name="m"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 9.0
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.2
vllm:kv_cache_usage_perc{{engine="1",model_name="m"}} 0.4
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="{blocks}"}} 1.0
vllm:cache_config_info{{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="1000"}} 1.0
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:generation_tokens_total{{engine="0",model_name="m"}} 500.0
vllm:kv_block_idle_before_evict_seconds_bucket{{engine="0",le="10.0",model_name="m"}} {low}
vllm:kv_block_idle_before_evict_seconds_bucket{{engine="0",le="20.0",model_name="m"}} {high}
vllm:kv_block_idle_before_evict_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {high}
vllm:kv_block_idle_before_evict_seconds_sum{{engine="0",model_name="m"}} {total}
"""


def page(
    blocks: object = 2000, prompt: float = 0, hits: float = 0, low: float = 0, high: float = 0, total: float = 0
) -> str:
    return PAGE.format(blocks=blocks, prompt=prompt, hits=hits, low=low, high=high, total=total)


def test_reads_all_engines_behind_one_port() -> None:
    """Blocks and requests of data-parallel engines add up, and usage is their mean."""
    seen = read_page(page())
    assert seen.cache_tokens == 3000 * 16
    assert (seen.running, seen.waiting) == (4.0, 0.0)
    assert seen.kv_usage == pytest.approx(0.3)
    assert seen.speed == 1.0


def test_what_an_engine_does_not_export_is_not_known() -> None:
    """An empty page, or a cache that has no size yet, gives None and no guess."""
    empty = read_page("")
    assert (empty.running, empty.kv_usage, empty.cache_tokens, dict(empty.idle)) == (None, None, None, {})
    assert read_page(page(blocks="None")).cache_tokens is None


def test_w_and_the_token_budget() -> None:
    """48,000 tokens of which 30 % run leave 33,600: 13 keys of 2,048 + 512, which hold 26,624 prefix tokens."""
    assert room(48_000, 0.3, 2048, 512) == room(48_000, 0.3, 2048.0, 512.0)
    here = room(48_000, 0.3, 2048, 512)
    assert (here.free_tokens, here.slots, here.budget_tokens) == (33_600, 13, 26_624)


def test_a_cache_that_is_too_small_still_keeps_one_key() -> None:
    """W is never 0: such an endpoint could take no part in a plan."""
    assert room(1000, 0.99, 2048, 512).slots == 1


@pytest.mark.parametrize(("mean_s", "tau_s"), [(13.0, 13.0), (4.0, 10.0), (90.0, 20.0)])
def test_tau_is_the_mean_of_measured_idle_times_within_the_bucket_of_the_median(mean_s: float, tau_s: float) -> None:
    """Only evictions between the pages count; a few blocks that went at once, or never nearly, do not move it far."""
    before = read_page(page(low=1000, high=1000, total=7e6))
    after = read_page(page(low=1020, high=1080, total=7e6 + 80 * mean_s))
    stays = residency([(before, after, 60.0)], 33_600)
    assert (stays.how, stays.evictions) == ("measured", 80)
    assert stays.seconds == pytest.approx(tau_s)


def test_tau_beyond_the_last_bound_is_the_mean() -> None:
    """Half an hour and more has no upper bound in vLLM's buckets."""
    after = replace(read_page(page()), idle={20.0: 0.0, math.inf: 40.0}, idle_sum_s=40 * 3000.0)
    assert residency([(read_page(page()), after, 60.0)], 33_600).seconds == 3000.0


def test_tau_is_estimated_from_what_fills_the_cache() -> None:
    """With few evictions: 33,600 free tokens over 6,000 computed ones in 60 s are 336 s; hits fill nothing."""
    after = read_page(page(prompt=10_000, hits=4_000, low=EVICTIONS - 1, high=EVICTIONS - 1))
    stays = residency([(read_page(page()), after, 60.0)], 33_600)
    assert (stays.how, stays.filled_tokens_per_s) == ("estimated", 100.0)
    assert stays.seconds == pytest.approx(336.0)


def test_tau_is_unknown_when_nothing_is_known() -> None:
    """Without a cache size, or without traffic, there is no estimate."""
    seen = read_page(page())
    assert residency([], 33_600).seconds is None
    assert residency([(seen, seen, 60.0)], 33_600).how == "unknown"
    assert residency([(seen, read_page(page(prompt=10)), 60.0)], None).how == "unknown"


def test_the_simulated_engine_exports_what_is_read() -> None:
    """Every metric that calibration reads is there under vLLM's name, the three of blocks only when asked for."""
    model = EngineModel(find_preset("70b-fp8-tp2"), kv_blocks=100)
    told = SimMetrics(model, "m", "e", 7.0, kv_cache_metrics=True)
    told.observe_eviction(Evicted(lifetime_s=50.0, idle_s=30.0, reuse_gaps_s=(4.0, 6.0)))
    text = told.render().decode()
    seen = read_page(text)
    assert (seen.running, seen.waiting, seen.kv_usage, seen.cache_tokens) == (0.0, 0.0, 0.0, 1600)
    assert seen.speed == 7.0
    assert seen.idle[math.inf] == seen.idle[30.0] == 1
    assert seen.idle[20.0] == 0
    assert seen.idle_sum_s == 30.0
    assert "vllm:kv_block_reuse_gap_seconds_count{" in text
    assert not read_page(SimMetrics(model, "m", "e", 1.0).render().decode()).idle


def test_watched_blocks_tell_how_long_they_lay_idle() -> None:
    """Idle is from the last hit, life from the allocation, and of the uses the last four give the gaps."""
    import random

    told: list[Evicted] = []
    watch = BlockWatch(1.0, told.append, random.Random(0))
    watch.allocated([7])
    for now_s in (10.0, 20.0, 22.0, 25.0, 26.0):
        watch.now_s = now_s
        watch.hit([7, 8])
    watch.now_s = 100.0
    watch.allocated([7, 8])
    assert told == [Evicted(100.0, 74.0, (2.0, 3.0, 1.0))]
    watch.now_s = 130.0
    watch.allocated([8])
    assert told[1:] == [Evicted(30.0, 30.0, ())]
    none = BlockWatch(0.0, told.append, random.Random(0))
    none.allocated([1])
    none.allocated([1])
    assert len(told) == 2
