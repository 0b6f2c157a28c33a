"""Compares eviction policies, and WAKMan in its presets, on mixes of traffic: one served run for each of them.

1. A case is one traffic and one seed. Every policy of `policies` serves the whole trace (`replay.served`), then every
   preset of `presets` does, starting from LRU, its estimator fed in process with the events that an attached engine
   records. `default` has all of `pool` to choose from, `pair` is the same estimator with LRU and S3-FIFO alone, `paper`
   the paper's estimator with those two.
2. Bounds of the same trace: `infinite` (a cache that forgets nothing) and `belady` (evict what is needed last).
3. Of several seeds the means are reported, with each seed's own figures beside them. Of a mix:
   hit          rate by name; `wakman` is the first preset, others are `wakman-NAME`; tokens of prompts, 0 to 1
   best_static  the best of `policies`, whether `wakman` may choose it or not
   regret       of `wakman`: the best rate of all names minus its own
   recovered    (wakman - lru) / (best static - lru); None where that gap is 1 point or less
   recovered_pair  the paper's: (wakman - worse) / (better - worse) of LRU and S3-FIFO, by preset; None at 1 point
   over_worse   of `wakman`: its rate minus that of the worst policy of `pool`
   switches     of `wakman`, a run
4. Finished runs can be kept and used again: `replay.evaluation_log`.

Numpy and the standard library alone. An hour's mix takes 3 to 10 s a policy, 20 s a preset.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay.mixes import READINGS, Request, Traffic, generate
from replay.scenarios import Recorded, curves, drift, mixes, read_traffic
from replay.served import Blocks, OwnBlocks, serve

POINT = 0.01
PAIR = ("lru", "s3fifo")
PRESETS = ("default", "pair", "paper")
BOUNDS = "bounds"
MANAGERS = ("vllm", "own")
SETS: Mapping[str, Callable[[], tuple[Traffic, ...]]] = {"mixes": mixes, "drift": drift, "curves": curves}


@dataclass(frozen=True, slots=True)
class Settings:
    """What to compare. Runs of equal blocks, reading and manager can be used again, whatever else was run beside them.

    traffic: a name of SETS, or the path of a file (`replay.scenarios`, rules 4 and 5). blocks: how many the pool has.
    pool: what the preset `default` chooses from; `policies` are run by themselves.
    """

    traffic: str = "mixes"
    blocks: int = 16_000
    seeds: tuple[int, ...] = (0,)
    policies: tuple[str, ...] = ("lru", "s3fifo", "arc")
    presets: tuple[str, ...] = ("default", "paper")
    pool: tuple[str, ...] = ("lru", "s3fifo", "arc")
    reading: str = "requests"
    manager: str = "own"
    bounds: bool = True

    def fingerprint(self) -> str:
        """Tell the settings that results depend on, as one line of JSON."""
        fields = asdict(self)
        return json.dumps({name: fields[name] for name in ("blocks", "reading", "manager")})

    def run_name(self, preset: str) -> str:
        """Return how a run of a preset is called in the results file; what `default` chose from belongs to it."""
        return f"{preset}:{','.join(self.pool)}" if preset == "default" else preset

    def names(self) -> list[str]:
        """Return what each case is run under: policies, presets, and the bounds."""
        return [*self.policies, *map(self.run_name, self.presets), *([BOUNDS] if self.bounds else ())]

    def cases(self) -> list[tuple[Traffic | Recorded, int]]:
        """Return what is to be run, seed by seed."""
        named = SETS[self.traffic]() if self.traffic in SETS else read_traffic(Path(self.traffic))
        return [(traffic, seed) for seed in self.seeds for traffic in named]


class Wakman:
    """The estimator of an engine, in process; its decisions are carried out at once."""

    def __init__(self, preset: str, settings: Settings, block_tokens: int) -> None:
        """`preset` is one of PRESETS."""
        from engine_patch.estimator import Estimator

        self.pool = settings.pool if preset == "default" else PAIR
        self._estimator: Any = Estimator(
            "paper" if preset == "paper" else "default", self.pool, settings.blocks, block_tokens
        )
        self._estimator.policy(0.0, "lru", "start")

    def started(self, at_s: float, number: int, request: Request, hit_tokens: int, free_blocks: int) -> str | None:
        """Tell of a start; the policy to switch to, or None."""
        self._estimator.admitted(
            at_s,
            str(number),
            request.blocks[: request.prompt_blocks],
            request.prompt_tokens,
            hit_tokens,
            request.block_tokens,
            free_blocks=free_blocks,
        )
        decision = self._estimator.decide(at_s)
        if decision is None or not decision.switch:
            return None
        self._estimator.policy(at_s, decision.policy, "auto")
        return str(decision.policy)

    def ended(self, at_s: float, number: int, request: Request) -> None:
        """Tell of an end."""
        held = -(-(request.prompt_tokens + request.output_tokens) // request.block_tokens)
        self._estimator.freed(at_s, str(number), request.blocks[: request.cached_blocks], held)


def run_case(
    traffic: Traffic | Recorded, seed: int, names: Sequence[str], settings: Settings
) -> Iterator[dict[str, Any]]:
    """Serve one traffic under each of these (`Settings.names`); yield a line of the results file for each."""
    trace = traffic.requests(seed) if isinstance(traffic, Recorded) else generate(traffic, seed, settings.reading)
    tokens = trace[0].block_tokens
    make = _blocks(settings.manager)
    hashes = [make.hashes(request.blocks.tobytes()) for request in trace]
    for name in names:
        line: dict[str, Any] = {"settings": settings.fingerprint(), "mix": traffic.name, "seed": seed, "name": name}
        if name == BOUNDS:
            yield line | _bounds(trace, settings.blocks)
            continue
        preset = name.partition(":")[0]
        decider = Wakman(preset, settings, tokens) if preset in PRESETS else None
        policy = "lru" if decider is not None else name
        served = serve(trace, hashes, make(settings.blocks, policy, tokens), decider)
        yield line | {
            "hit": round(served.hit_rate, 6),
            "switches": [[round(at_s, 1), policy] for at_s, policy in served.switches],
            "requests": served.started,
            "refused": served.refused,
            "mean_free": round(served.mean_free, 1),
            "waited_s": round(served.waited_s / max(1, served.started), 3),
        }


def summarise(lines: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return the document: settings, a row a mix (rule 3), and means and medians over the mixes."""
    by_mix: dict[str, dict[int, dict[str, Mapping[str, Any]]]] = {}
    for line in sorted(lines, key=lambda line: int(line["seed"])):
        by_mix.setdefault(str(line["mix"]), {}).setdefault(int(line["seed"]), {})[str(line["name"])] = line
    rows = [_row(mix, found, settings) for mix, found in by_mix.items()]
    given = asdict(settings) | {
        name: list(getattr(settings, name)) for name in ("seeds", "policies", "presets", "pool")
    }
    return {"settings": given, "mixes": rows, "summary": _summary(rows, settings)}


def _row(mix: str, found: Mapping[int, Mapping[str, Mapping[str, Any]]], settings: Settings) -> dict[str, Any]:
    shown = {name: name for name in settings.policies}
    for place, preset in enumerate(settings.presets):
        shown["wakman" if not place else f"wakman-{preset}"] = settings.run_name(preset)
    by_seed = [{name: runs[run]["hit"] for name, run in shown.items() if run in runs} for runs in found.values()]
    hit = _means(by_seed)
    bounds = [runs[BOUNDS] for runs in found.values() if BOUNDS in runs]
    pool = [name for name in settings.pool if name in hit]
    row: dict[str, Any] = {"mix": mix, "seeds": list(found), "hit": hit}
    static = [name for name in settings.policies if name in hit]
    row["best_static"] = best = max(static, key=hit.__getitem__) if static else None
    wakman = hit.get("wakman")
    if wakman is not None and best is not None and "lru" in hit:
        row["regret"] = round(max(hit.values()) - wakman, 6)
        gap = hit[best] - hit["lru"]
        row["recovered"] = round((wakman - hit["lru"]) / gap, 4) if gap > POINT else None
        if pool:
            row["over_worse"] = round(wakman - min(hit[name] for name in pool), 6)
    made = {
        name: [len(runs[run]["switches"]) for runs in found.values() if run in runs]
        for name, run in shown.items()
        if name.startswith("wakman")
    }
    row["switches"] = round(statistics.fmean(made["wakman"]), 2) if made.get("wakman") else 0
    row["bounds"] = _means([{name: line[name] for name in ("infinite", "belady")} for line in bounds])
    row["by_seed"] = by_seed
    for name in (name for name in hit if name.startswith("wakman")):
        row.setdefault("recovered_pair", {})[name] = _recovered_pair(hit, name)
        row.setdefault("switches_by_preset", {})[name] = round(statistics.fmean(made[name]), 2)
    return row


def _summary(rows: Sequence[Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return means and medians over the rows, of what was run in each of them."""
    names = [name for name in (rows[0]["hit"] if rows else ()) if all(name in row["hit"] for row in rows)]
    rates = {name: [row["hit"][name] for row in rows] for name in names}
    best = [max(row["hit"].values()) for row in rows]
    summary: dict[str, Any] = {
        "mixes": len(rows),
        "mean_hit": {name: round(statistics.fmean(found), 6) for name, found in rates.items()},
        "max_regret": {
            name: round(max(top - rate for top, rate in zip(best, found, strict=True)), 6)
            for name, found in rates.items()
        },
    }
    if "lru" in names:
        lru = statistics.fmean(rates["lru"])
        gains = {name: round(statistics.fmean(found) - lru, 6) for name, found in rates.items()}
        summary["mean_gain_over_lru"] = gains
    if set(PAIR) <= set(names):
        won = sum(one > other for one, other in zip(rates["s3fifo"], rates["lru"], strict=True))
        summary["wins"] = {"lru": len(rows) - won, "s3fifo": won}
    if "wakman" in names:
        summary["recovered_median"] = _median([row.get("recovered") for row in rows])
        summary["recovered_pair_median"] = {
            name: _median([_recovered_pair(row["hit"], name) for row in rows]) for name in names if "wakman" in name
        }
        summary["worst_over_worse_static"] = min(
            (row["over_worse"] for row in rows if "over_worse" in row), default=None
        )
    return summary


def _recovered_pair(hit: Mapping[str, float], name: str) -> float | None:
    if not set(PAIR) <= set(hit):
        return None
    worse, better = sorted(hit[policy] for policy in PAIR)
    return round((hit[name] - worse) / (better - worse), 4) if better - worse > POINT else None


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over those rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(statistics.fmean(row[name] for row in rows if name in row), 6) for name in names}


def _median(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return round(statistics.median(found), 4) if found else None


def _blocks(manager: str) -> Any:
    if manager == "own":
        return OwnBlocks
    from engine_patch.block_manager import VllmBlocks

    return VllmBlocks


def _bounds(trace: Sequence[Request], blocks: int) -> dict[str, float]:
    """Count every block hit, not the contiguous prefix, with output there at once: above what can be had."""
    from engine_patch.bounds import belady, infinite

    ids = np.concatenate([request.blocks for request in trace]).tolist()
    tokens = sum(request.prompt_tokens for request in trace)
    hits = {"infinite": infinite(ids), "belady": belady(ids, blocks)}
    return {name: round(count * trace[0].block_tokens / tokens, 6) for name, count in hits.items()}


__all__ = ["READINGS", "Blocks", "Settings", "Wakman", "run_case", "summarise"]
