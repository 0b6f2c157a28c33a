"""The served loop: order, hits, waiting and refusals on our own blocks, and what a decider is told and may do."""

import numpy as np
import pytest

from replay.mixes import Request, block_ids
from replay.served import PREFILL_TOKENS_S, TPOT_S, OwnBlocks, Served, serve


def request(at_s: float, key: int, prompt: int = 160, output: int = 16) -> Request:
    """A request whose text is the first tokens of text `key`."""
    return Request(at_s, key, "single", 0, prompt, output, block_ids(key, (prompt + output) // 16))


def served(trace: list[Request], blocks: int, policy: str = "lru", **more: object) -> Served:
    """Serve a trace on our own blocks."""
    hashes = [OwnBlocks.hashes(r.blocks.tobytes()) for r in trace]
    return serve(trace, hashes, OwnBlocks(blocks, policy), **more)  # type: ignore[arg-type]


def test_a_repeated_prompt_hits_all_but_its_last_token() -> None:
    """160 tokens are 10 blocks; the last token must be computed, so 9 of them are hit."""
    result = served([request(0, 1), request(100, 1)], 100)
    assert (result.hit_tokens, result.prompt_tokens) == (144, 320)
    assert result.hit_rate == pytest.approx(0.45)


def test_the_next_turn_hits_prompt_and_output_of_the_one_before() -> None:
    """The last output token is never computed: 160 + 33 tokens leave 12 full blocks."""
    turn = request(0, 1, 160, 33)
    later = request(100, 1, 400, 16)
    assert served([turn, later], 100).hit_tokens == 12 * 16
    assert served([request(0, 1, 160, 32), later], 100).hit_tokens == 11 * 16


def test_prompt_blocks_are_hit_while_their_request_runs_and_output_blocks_are_not() -> None:
    """A second request with the same text starts once the first has been prefilled."""
    assert served([request(0, 1, 160, 3200), request(1, 1, 320, 16)], 1000).hit_tokens == 160


def test_a_request_waits_until_its_prompt_fits() -> None:
    """10 of 12 blocks are held until the first request has ended: prefill and 100 tokens of output."""
    times: list[float] = []
    result = served(
        [request(0, 1, 160, 100), request(0.5, 2)], 12, told=lambda at_s, _number, _hits: times.append(at_s)
    )
    ends_s = 160 / PREFILL_TOKENS_S + 100 * TPOT_S
    assert times == pytest.approx([0, ends_s])
    assert result.waited_s == pytest.approx(ends_s - 0.5)
    # 7 output blocks did not fit beside the prompt: somebody would have been preempted.
    assert result.outputs_left_out == 1


def test_a_prompt_larger_than_the_pool_is_refused_and_the_rest_served() -> None:
    """It counts in no rate, and what runs ends first."""
    result = served([request(0, 1), request(1, 2, 1600), request(2, 1)], 20)
    assert (result.refused, result.started) == (1, 2)
    assert result.hit_tokens == 144


def test_prefill_is_one_request_at_a_time() -> None:
    """Two requests that arrive together start one prefill apart."""
    times: list[float] = []
    served([request(0, 1, 2000), request(0, 2, 2000)], 1000, told=lambda at_s, _n, _h: times.append(at_s))
    assert times == pytest.approx([0, 2000 / PREFILL_TOKENS_S])


class Once:
    """A decider that orders one switch, and notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def started(self, at_s: float, number: int, request: Request, hit_tokens: int, free_blocks: int) -> str | None:
        """Order S3-FIFO at the second start."""
        self.heard.append(("start", number))
        assert free_blocks >= 0
        return "s3fifo" if number == 1 else None

    def ended(self, at_s: float, number: int, request: Request) -> None:
        """Note it."""
        self.heard.append(("end", number))


def test_a_decider_hears_everything_in_order_and_its_switch_is_carried_out() -> None:
    """Each request starts and ends once; the switch is reported with its time, and nothing cached is lost by it."""
    decider = Once()
    result = served([request(0, 1), request(10, 2), request(20, 1)], 100, decider=decider)
    assert decider.heard == [("start", 0), ("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    assert result.switches == [(10, "s3fifo")]
    assert result.hit_tokens == 144


def test_hashes_are_the_ids() -> None:
    """The 8-byte ids, as integers."""
    ids = np.array([1, 2**64 - 1], dtype=np.uint64)
    assert OwnBlocks.hashes(ids.tobytes()) == [1, 2**64 - 1]
