"""`cacheroute engine evaluate`: eviction policies, and WAKMan choosing among them, on mixes of traffic."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.output import Format, OutputOption, Table, emit, note
from service.errors import InvalidInput

if TYPE_CHECKING:
    from replay.evaluation import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("evaluate")(evaluate)


def evaluate(
    mixes: Annotated[
        str,
        typer.Option(
            metavar="FILE|mixes|drift|curves",
            help="Traffic: a JSON file or a trace in JSONL (docs/engine-evaluation.md), or ours.",
        ),
    ] = "mixes",
    drift: Annotated[bool, typer.Option("--drift", help="Short for --mixes drift.")] = False,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this traffic of those; repeatable.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, metavar="N", help="Size of the pool, in blocks of 16 tokens.")] = 16_000,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            metavar="default|paper|pair",
            help="WAKMan by this preset; repeatable, the first is `wakman`.  [default, paper]",
        ),
    ] = None,
    policies: Annotated[str, typer.Option(metavar="P,…", help="Run by themselves.")] = "lru,s3fifo,arc",
    pool: Annotated[str, typer.Option(metavar="P,…", help="What preset default chooses from.")] = "lru,s3fifo,arc",
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="How many seeds.")] = 1,
    reading: Annotated[
        str, typer.Option(metavar="requests|sessions|session-rate", help="What shares and rate of a mix count.")
    ] = "requests",
    manager: Annotated[
        str | None,
        typer.Option(metavar="vllm|own", help="Whose block code.  [vllm where it can be imported, else own]"),
    ] = None,
    engine_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", envvar="CACHEROUTE_ENGINE_PYTHON", help="The interpreter that has vLLM (and numpy)."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="Side by side.")] = 1,
    bounds: Annotated[bool, typer.Option("--bounds/--no-bounds", help="Also an infinite cache, and Belady's.")] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep each finished run here; a run found here is not repeated.")
    ] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Serve each mix under every policy and preset, on vLLM's own block manager without a model; hit rates and regret.

    An hour's mix takes about a minute a seed. Hit rates are prompt tokens read from the KV cache.
    """
    import sys
    from importlib.util import find_spec

    from engine_patch.policy import POLICIES
    from replay.evaluation import MANAGERS, PRESETS, READINGS, Settings, summarise
    from replay.evaluation_log import RunLog
    from replay.evaluation_process import run

    if drift:
        mixes = "drift"
    here = find_spec("vllm") is not None
    if manager is None:
        manager = "vllm" if here or engine_python is not None else "own"
    for option, value, known in (
        ("--manager", (manager,), MANAGERS),
        ("--reading", (reading,), READINGS),
        ("--preset", tuple(preset or ()), PRESETS),
        ("--policies", _listed(policies), POLICIES),
        ("--pool", _listed(pool), POLICIES),
    ):
        for name in value:
            if name not in known:
                raise InvalidInput(f"{option} {name!r} is unknown", f"there are {', '.join(known)}")
    if manager == "vllm" and engine_python is None and not here:
        raise InvalidInput(
            "vLLM cannot be imported here", "give --engine-python PATH (CACHEROUTE_ENGINE_PYTHON), or --manager own"
        )
    settings = Settings(
        traffic=mixes,
        blocks=blocks,
        seeds=tuple(range(seed, seed + seeds)),
        policies=_listed(policies),
        presets=tuple(dict.fromkeys(preset or ("default", "paper"))),
        pool=_listed(pool),
        reading=reading,
        manager=manager,
        bounds=bounds,
    )
    cases = [(traffic.name, number) for traffic, number in settings.cases()]
    if only:
        names = {name for name, _ in cases}
        for name in only:
            if name not in names:
                raise InvalidInput(
                    f"--only {name!r} is not in --mixes {mixes}", f"there are {', '.join(sorted(names))}"
                )
        cases = [case for case in cases if case[0] in only]
    log = None if out is None else RunLog(out, settings)
    lines: dict[tuple[str, int, str], dict[str, Any]] = {}
    runs = [(mix, number, name) for mix, number in cases for name in settings.names()]
    if log is not None:
        lines = {run: log.runs[run] for run in runs if run in log.runs}
        if log.torn:
            note(f"{out}: {log.torn} torn line{'s' * (log.torn > 1)}, from a run killed while writing; made again")
        if lines:
            note(f"{len(lines)} of {len(runs)} runs are in {out} already")

    def done(line: dict[str, Any]) -> None:
        lines[line["mix"], line["seed"], line["name"]] = line
        if log is not None:
            log.keep(line)
        rate = f": {100 * line['hit']:.2f} %" if "hit" in line else ""
        note(f"{len(lines)}/{len(runs)} {line['mix']} seed {line['seed']} {line['name']}{rate}")

    missing = [(*case, [name for name in settings.names() if (*case, name) not in lines]) for case in cases]
    missing = [case for case in missing if case[2]]
    if missing:
        python = str(engine_python) if manager == "vllm" and engine_python is not None else sys.executable
        run(settings, missing, python=python, processes=processes, done=done)
    result = summarise([lines[run] for run in runs if run in lines], settings)
    emit(result, output, *_tables(result, settings))


def _listed(names: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _tables(result: dict[str, Any], settings: "Settings") -> list[Table]:
    rows = result["mixes"]
    if not rows:
        return []
    names, bounds = list(rows[0]["hit"]), list(rows[0]["bounds"])
    columns = ("mix", *names, *bounds, "best static", "regret", "recovered", "switches")
    cells = [
        (
            row["mix"],
            *(f"{100 * row['hit'][name]:.1f}" for name in names),
            *(f"{100 * row['bounds'][name]:.1f}" for name in bounds),
            row["best_static"],
            f"{100 * row['regret']:.1f}" if "regret" in row else None,
            f"{100 * row['recovered']:.0f} %" if row.get("recovered") is not None else None,
            f"{row['switches']:g}",
        )
        for row in rows
    ]
    seeds = f"{len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
    title = f"hit rate, % of prompt tokens, {settings.blocks} blocks, {seeds}, by {settings.manager}"
    summary = [(name, f"{100 * gain:+.2f}") for name, gain in result["summary"]["mean_gain_over_lru"].items()]
    return [Table(columns, cells, title), Table(("policy", "mean gain over LRU, points"), summary)]
