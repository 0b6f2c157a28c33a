"""Calibration without an endpoint: settings, what a request's latency is, and what the document says."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibrate import CalibrateSettings, Calibration, Measured, _latency_s
from planner.calibration import Fleet, document
from planner.capacity import Page
from planner.ladder import Step
from planner.rates import KeyRates
from planner.target import Traffic
from replay.player import PlayedRequest
from service.errors import InvalidInput

SETTINGS = CalibrateSettings(
    endpoint="http://127.0.0.1:8000",
    slos={"ttft": 1.0},
    prefix_tokens=2000,
    unique_tokens=500,
    output_tokens=100,
    max_rps=100.0,
    max_minutes=60.0,
)
PAGE = Page(0.0, 0.0, 0.0, 100_000, 0.0, 0.0, 0.0)


def measured(rate: float, over: float, *, late: bool = False, failed: int = 0) -> Measured:
    """Return a step of 1,000 requests in 100 s, of which that share came after 1.1 s, the others after 0.2 s."""
    late_ones = np.arange(1000) % 100 < over * 100
    latencies = np.where(late_ones, 1.1, 0.2)
    latencies[:failed] = np.inf
    after = replace(PAGE, prompt_tokens=250_000.0, hit_tokens=200_000.0, generation_tokens=10_000.0)
    step = Step(rate, 100.0, {"ttft": latencies}, late=late)
    return Measured(step, 1000, failed, ("status 500: no",) if failed else (), 2500.0, 0.2, PAGE, after, 100.0)


def said(*steps: Measured, first: Page | None = PAGE, fleet: Fleet | None = None, **changed: Any) -> dict[str, Any]:
    """Return the document of these steps, which must be plain JSON."""
    found = Calibration(replace(SETTINGS, **changed), "m", "0.32.0", first, 0.1, 2.0, "ab", list(steps))
    result = document(found, fleet, at_s=0.0)
    return json.loads(json.dumps(result, allow_nan=False))  # type: ignore[no-any-return]


HELD, BROKEN = measured(10.0, 0.0), measured(12.0, 0.5)


def test_the_cap_is_the_crossing_less_the_headroom() -> None:
    """The crossing lies between the last load that held and the first that did not; the cap is rounded down."""
    result = said(HELD, BROKEN, headroom=0.25)["result"]
    assert result["censored"] is None
    assert 10.0 < result["crossing_rps"] < 12.0
    assert result["replica_cap_rps"] == pytest.approx(0.75 * result["crossing_rps"], rel=1e-3)
    assert result["replica_cap_rps"] <= 0.75 * result["crossing_rps"]
    low, high = result["chance_95_rps"]
    assert low <= result["crossing_rps"] <= high


def test_says_which_end_the_crossing_is_beyond() -> None:
    """Above: the cap is what was borne. Below, or without a step that counts: there is no cap, and no setting of it."""
    above = said(HELD, measured(11.0, 0.0))
    assert (above["result"]["censored"], above["result"]["replica_cap_rps"]) == ("above", 9.9)
    assert "may bear more" in " ".join(above["notes"])
    below = said(measured(0.5, 1.0))
    client = said(measured(0.5, 0.0, late=True))
    assert (below["result"]["censored"], client["result"]["censored"]) == ("below", "client")
    for document_ in (below, client):
        assert document_["result"]["replica_cap_rps"] is None
        assert "CACHEROUTE_PLANNER_REPLICA_CAP_RPS" not in document_["settings"]
        assert document_["sensitivity"] == []
    assert "broken at the lowest load, 0.5" in " ".join(below["notes"])
    assert "could not send in time" in " ".join(client["notes"])


def test_a_late_step_counts_for_nothing() -> None:
    """It stands in the document, marked, and changes no result."""
    with_late = said(HELD, BROKEN, measured(5.0, 1.0, late=True))
    assert with_late["result"] == said(HELD, BROKEN)["result"]
    assert [step["counts"] for step in with_late["steps"]] == [True, True, False]


def test_the_cache_is_read_from_the_step_below_the_crossing() -> None:
    """100,000 tokens of which a fifth runs leave 32 keys of 2,500; 600 tokens/s fill 80,000 free ones in 133 s."""
    result = said(HELD, BROKEN)
    assert result["cache"] == {
        "cache_tokens": 100_000,
        "kv_usage_under_load": 0.2,
        "free_tokens": 80_000,
        "slots_per_endpoint": 32,
        "tokens_per_endpoint": 64_000,
        "resident_s": 133.33,
        "resident_how": "estimated",
        "evictions_seen": 0,
        "filled_tokens_per_s": 600.0,
    }
    settings = result["settings"]
    assert settings["CACHEROUTE_PLANNER_SLOTS_PER_ENDPOINT"] == "32"
    assert settings["CACHEROUTE_PLANNER_TOKENS_PER_ENDPOINT"] == "64000"
    assert settings["CACHEROUTE_PLANNER_RESIDENT_S"] == "133.33"
    assert float(settings["CACHEROUTE_PLANNER_REPLICA_CAP_RPS"]) == result["result"]["replica_cap_rps"]
    assert "--kv-cache-metrics" in " ".join(result["notes"])


def test_every_setting_named_is_one_of_the_planner() -> None:
    """What is to be pasted is taken by the planner as it stands."""
    from planner.settings import load_settings

    lines = said(HELD, BROKEN)["settings"]
    assert len(lines) == 8
    with pytest.MonkeyPatch.context() as patch:
        for name, value in lines.items():
            patch.setenv(name, value)
        settings = load_settings(lines, redis_url="redis://r", endpoint=("a",))
    assert settings.slots_per_endpoint == 32
    assert settings.resident_s == 133.33


def test_an_endpoint_without_metrics_still_has_a_cap() -> None:
    """Nothing is said of the cache that is not known; the cap does not need it."""
    silent = replace(HELD, before=None, after=None, kv_usage=None)
    result = said(silent, replace(BROKEN, before=None, after=None, kv_usage=None), first=None)
    assert list(result["settings"]) == ["CACHEROUTE_PLANNER_REPLICA_CAP_RPS"]
    assert result["cache"]["slots_per_endpoint"] is None
    assert result["cache"]["resident_how"] == "unknown"


def test_failed_requests_are_told_and_have_no_p99() -> None:
    """More than 1 in 100 failed: the p99 is not finite and so not given; the note says what went wrong."""
    result = said(measured(5.0, 0.0), measured(12.0, 0.0, failed=50))
    assert result["result"]["censored"] is None
    assert result["steps"][1]["ttft_p99_s"] is None
    assert result["steps"][1]["share_over_slo"] == 0.05
    assert "status 500: no" in " ".join(result["notes"])


def test_sensitivity_covers_cap_and_slo() -> None:
    """A quarter less cap needs more copies, a quarter more fewer; a tighter SLO is crossed no later."""
    result = said(HELD, measured(11.0, 0.02), BROKEN)
    rows = {(row["varied"], row["times"]): row for row in result["sensitivity"]}
    assert set(rows) == {(name, times) for name in ("replica_cap", "slo") for times in (0.75, 1.25)} | {
        ("replica_cap", 1.0)
    }
    copies = [rows["replica_cap", times]["copies_of_a_key"]["4 x cap"] for times in (0.75, 1.0, 1.25)]
    assert copies == [6, 4, 4]
    assert rows["slo", 0.75]["replica_cap_rps"] <= 1.001 * result["result"]["replica_cap_rps"]
    assert rows["slo", 1.25]["censored"] == "above"


def test_sensitivity_with_rates_is_of_their_plans() -> None:
    """With the fleet's rates it says what each cap makes of the plan."""
    fleet = Fleet(KeyRates.of([1, 2, 3], [30.0, 8.0, 1.0]), ("a", "b", "c", "d", "e"))
    rows = said(HELD, BROKEN, fleet=fleet)["sensitivity"]
    copies = {row["times"]: row["max_copies"] for row in rows if row["varied"] == "replica_cap"}
    assert copies == {0.75: 5, 1.0: 4, 1.25: 3}
    assert {row["admitted"] for row in rows} == {3}
    assert all(row["max_over_mean"] >= 1 for row in rows)


def test_what_a_latency_is() -> None:
    """In the endpoint's seconds; ITL is the mean gap between tokens; a failed request is later than anything."""
    played = PlayedRequest("k", 0.0, 1.0, 1.5, 3.5, 200, None, 2500, 2000, 101, None)
    assert _latency_s(played, "ttft", 2.0) == 1.0
    assert _latency_s(played, "itl", 2.0) == pytest.approx(0.04)
    assert _latency_s(replace(played, failure="the stream ended before [DONE]"), "ttft", 1.0) == float("inf")
    assert _latency_s(replace(played, completion_tokens=1), "itl", 1.0) == 2.0


def test_no_two_requests_share_more_than_the_prefix() -> None:
    """The prefix is one text for a seed; what follows differs between requests and between runs, at the same times."""
    one, two = Traffic(600, 40, 8, seed=5), Traffic(600, 40, 8, seed=5)
    first, second = one.step(50.0, 4.0), two.step(50.0, 4.0)
    assert [probe.at_s for probe in first] == [probe.at_s for probe in second]
    prompts = [probe.prompt() for probe in first + second]
    assert {len(prompt) for prompt in prompts} == {640 * 4}
    assert len({prompt[: 600 * 4] for prompt in prompts}) == 1
    assert len({prompt[600 * 4 : 600 * 4 + 64] for prompt in prompts}) == len(prompts)
    assert 150 < len(first) < 250
    assert Traffic(600, 40, 8, seed=6).request(0.0).prompt()[:2400] != prompts[0][:2400]


def test_every_fault_of_the_settings_is_told_at_once() -> None:
    """One line names each option, its value and what is allowed."""
    with pytest.raises(InvalidInput) as raised:
        replace(
            SETTINGS,
            endpoint="127.0.0.1:8000/v1",
            slos={"ttft": 0.0, "itl": float("nan")},
            prefix_tokens=0,
            output_tokens=1,
            max_rps=float("inf"),
            max_minutes=-1.0,
            headroom=1.0,
            seed=-1,
        )
    for option in (
        "--endpoint '127.0.0.1:8000/v1' is not http://HOST:PORT",
        "--slo-ttft-p99-s 0",
        "--slo-itl-p99-s nan",
        "--prefix-tokens 0 is below 1",
        "--output-tokens 1 is below 2",
        "--max-rps inf",
        "--max-minutes -1",
        "--headroom 1",
        "--seed -1",
    ):
        assert option in str(raised.value)
    assert "\n" not in str(raised.value)
