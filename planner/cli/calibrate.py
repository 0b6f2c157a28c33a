"""`cacheroute calibrate`: how much one endpoint bears, and what its cache keeps."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.output import Format, OutputOption, Table, emit, note, pairs
from service.errors import InvalidInput

if TYPE_CHECKING:
    from planner.calibrate import CalibrateSettings, Measured
    from planner.calibration import Fleet


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    endpoint: Annotated[str, typer.Option(metavar="http://HOST:PORT", help="One vLLM, best with no other traffic.")],
    slo_ttft_p99_s: Annotated[float, typer.Option(metavar="S", help="Bound on the p99 of time to first token.")] = 1.0,
    slo_itl_p99_s: Annotated[
        float | None, typer.Option(metavar="S", help="Bound on the p99 of a request's mean gap between tokens.  [none]")
    ] = None,
    prefix_tokens: Annotated[int, typer.Option(metavar="N", help="Shared by all prompts of a tenant.")] = 2048,
    unique_tokens: Annotated[int, typer.Option(metavar="N", help="Of each prompt's own, behind the prefix.")] = 512,
    output_tokens: Annotated[int, typer.Option(metavar="N", help="Of each answer.")] = 128,
    max_rps: Annotated[float, typer.Option(metavar="R", help="Never more load than this.")] = 100.0,
    max_minutes: Annotated[float, typer.Option(metavar="M", help="Never longer than this.")] = 60.0,
    headroom: Annotated[float, typer.Option(metavar="SHARE", help="Taken off what was measured.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of arrivals, prefix and interval.")] = 0,
    rates: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Show plans of these rates at other caps; with --endpoints.")
    ] = None,
    endpoints: Annotated[
        str | None, typer.Option(metavar="N|FILE", help="The fleet of those plans: how many, or names one a line.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result as JSON.")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Load one endpoint with one tenant's traffic, ever more, until the SLO breaks; the planner's settings from that.

    Exit code 1 when the SLO is not crossed between the lowest load and --max-rps; the result then says what it is not.
    """
    import asyncio
    import json

    from planner.calibrate import CalibrateSettings
    from planner.calibrate import calibrate as measure
    from planner.calibration import document
    from service.files import check_folder, write_whole

    slos = {"ttft": slo_ttft_p99_s} | ({} if slo_itl_p99_s is None else {"itl": slo_itl_p99_s})
    settings = CalibrateSettings(
        endpoint=endpoint,
        slos=slos,
        prefix_tokens=prefix_tokens,
        unique_tokens=unique_tokens,
        output_tokens=output_tokens,
        max_rps=max_rps,
        max_minutes=max_minutes,
        headroom=headroom,
        seed=seed,
    )
    fleet = _fleet(rates, endpoints)
    if out is not None:
        if out.is_dir():
            raise InvalidInput(f"--out {out} is a folder", "name a file")
        check_folder("--out", out.parent)
    try:
        found = asyncio.run(measure(settings, lambda measured: note(_line(measured, settings))))
    except KeyboardInterrupt:
        note("stopped; nothing was written and nothing is in flight")
        raise typer.Exit(130) from None
    result = document(found, fleet)
    if out is not None:
        write_whole("--out", out, json.dumps(result, indent=2, allow_nan=False, ensure_ascii=False).encode() + b"\n")
        note(f"wrote {out}")
    emit(result, output, *_tables(result))
    if result["result"]["censored"]:
        note(f"no crossing was found ({result['result']['censored']}); the notes say why")
        raise typer.Exit(1)


def _fleet(rates: Path | None, endpoints: str | None) -> "Fleet | None":
    """Return whose plans to show; read before anything is measured."""
    if (rates is None) != (endpoints is None):
        raise InvalidInput("--rates and --endpoints belong together", "give both or none")
    if rates is None or endpoints is None:
        return None
    from planner.build import endpoint_names
    from planner.calibration import Fleet
    from planner.rates import read_csv

    return Fleet(read_csv(rates), endpoint_names(endpoints))


def _line(measured: "Measured", settings: "CalibrateSettings") -> str:
    step = measured.step
    if not step.requests:
        return f"{step.rate_rps:.4g} requests/s: no request ended"
    remark = ", the client was late: left out" if step.late else ", cut short" if step.cut else ""
    return (
        f"{step.rate_rps:.4g} requests/s: {step.requests} requests, {measured.failed} failed, "
        f"{100 * step.share_over(settings.slos):.2f} % later than the SLO{remark}"
    )


def _tables(result: dict[str, Any]) -> list[Table]:
    head = {name: result[name] for name in ("endpoint", "model", "engine_version", "slo_p99_s", "result", "cache")}
    steps = result["steps"]
    tables = [pairs(head)]
    if steps:
        tables.append(Table(list(steps[0]), [list(step.values()) for step in steps], "steps"))
    if rows := result["sensitivity"]:
        flat = [{str(name): value for name, value in pairs(row).rows} for row in rows]
        columns = list(dict.fromkeys(name for row in flat for name in row))
        tables.append(Table(columns, [[row.get(name) for name in columns] for row in flat], "if it were otherwise"))
    if lines := result["settings"]:
        tables.append(Table(("settings for the planner",), [(f"{name}={value}",) for name, value in lines.items()]))
    if notes := result["notes"]:
        tables.append(Table(("notes",), [(words,) for words in notes]))
    return tables
