"""What load by prompt bytes and bounded spill do to TTFT and hits, on real traffic, with the production pick.

Six engine models (70b-fp8-tp2) in virtual time serve five stretches of 1,500 requests of Mooncake's conversation trace
at 3 requests/s, tenants overlaid as in the demo, four seeds each. The first stretch is the shipped excerpt; the others
need the whole trace (CACHEROUTE_TRACES, or ../shared/traces beside the checkout). Not a timing: the same seed gives
the same figures on any machine.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np

from replay.demo import EXCERPT
from replay.engine_model import EngineModel
from replay.engine_request import EngineRequest, RequestState
from replay.presets import find_preset
from replay.traces import BLOCK_TOKENS, read_trace
from replay.workload import PlayRequest, build_workload
from service.dispatch import pick
from service.fleet import ANSWER_WORK, Fleet, request_work
from service.keys import hash_key
from service.table import Table

ENGINES, RATE_RPS, SEEDS, TENANTS, TOKEN_BYTES = 6, 3.0, range(4), 64, 4
STRETCHES = (0, 6000, 9000, 3000, 10500)  # the spill rule was chosen on the first three, with other seeds
PRESET = find_preset("70b-fp8-tp2")


def plan(requests: Sequence[PlayRequest]) -> Table:
    """One copy a key, heaviest first to the least loaded endpoint: what the planner makes of these rates."""
    load, targets = [0] * ENGINES, {}
    for key, count in Counter(r.key for r in requests).most_common():
        index = load.index(min(load))
        load[index] += count
        targets[hash_key(key.encode())] = (f"engine-{index}",)
    return Table(1, 1, 0.0, targets)


def serve(requests: Sequence[PlayRequest], table: Table, seed: int, *, by_bytes: bool, spill: float) -> list[float]:
    """Return TTFT p50, p90, p99 (s), token hit rate and share of spilled requests of one run."""
    engines = [EngineModel(PRESET, PRESET.kv_blocks * 16 // BLOCK_TOKENS, BLOCK_TOKENS) for _ in range(ENGINES)]
    fleet = Fleet(tuple((f"engine-{i}", f"10.0.0.{i}:8000") for i in range(ENGINES)))
    of = {endpoint.name: engine for endpoint, engine in zip(fleet.endpoints, engines, strict=True)}
    rng, reasons = Random(seed), Counter[str]()
    charged, states = {}, list[tuple[RequestState, float]]()
    for number, request in enumerate(requests):
        for engine in engines:
            for state in engine.advance(request.at_s):
                if state.finished_s is not None and state.request.request_id in charged:
                    fleet.release(*charged.pop(state.request.request_id))
        work = request_work(request.prompt_tokens * TOKEN_BYTES) if by_bytes else ANSWER_WORK
        chosen = pick(table, fleet, hash_key(request.key.encode()), rng, work, spill)
        reasons[chosen.reason] += 1
        endpoint = chosen.endpoints[0]
        fleet.charge(endpoint, work)
        charged[str(number)] = (endpoint, work)
        full = request.blocks[: request.prompt_tokens // BLOCK_TOKENS]
        sent = EngineRequest(str(number), request.prompt_tokens, request.output_tokens, full)
        states.append((of[endpoint.name].submit(sent, request.at_s), request.at_s))
    for engine in engines:
        engine.advance(math.inf)
    ttft_s = [state.first_token_s - at_s for state, at_s in states if state.first_token_s is not None]
    hits = sum(state.cached_tokens for state, _ in states) / sum(r.prompt_tokens for r in requests)
    return [*map(float, np.percentile(ttft_s, (50, 90, 99))), hits, reasons["spill"] / len(requests)]


def main() -> None:
    """Print the mean over seeds for each stretch and variant."""
    folder = Path(os.environ.get("CACHEROUTE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    whole = folder / "mooncake_conversation.jsonl"
    trace = read_trace(whole if whole.is_file() else EXCERPT)
    if not whole.is_file():
        print(f"only the shipped excerpt: no {whole.name} in {folder}")
    for start in STRETCHES:
        if start >= len(trace):
            continue
        figures: dict[str, list[list[float]]] = {}
        for seed in SEEDS:
            requests = build_workload(
                trace[start : start + 1500], tenants=TENANTS, duration_s=1e9, rate_rps=RATE_RPS, seed=seed
            )
            planned = plan(requests)
            for name, table, by_bytes, spill in (
                ("no plan, load by requests", Table(), False, math.inf),
                ("no plan, load by bytes", Table(), True, math.inf),
                ("plan, never spill", planned, True, math.inf),
                ("plan, by requests, spill 1.25", planned, False, 1.25),
                ("plan, by bytes, spill 1.25", planned, True, 1.25),
            ):
                figures.setdefault(name, []).append(serve(requests, table, seed, by_bytes=by_bytes, spill=spill))
        print(f"requests {start} to {start + 1499}, mean of {len(SEEDS)} seeds")
        for name, rows in figures.items():
            p50, p90, p99, hits, spilled = np.mean(rows, axis=0)
            print(
                f"  {name:<30} TTFT p50 {p50:5.2f}  p90 {p90:5.1f}  p99 {p99:5.1f} s"
                f"   hits {100 * hits:4.1f} %   spilled {100 * spilled:3.0f} %"
            )


if __name__ == "__main__":
    main()
