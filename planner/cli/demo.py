"""`cacheroute demo`: the whole fleet on this machine, a real trace, two policies, a verdict."""

from pathlib import Path
from typing import Annotated

import typer

FAILURES_SHOWN = 5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo)


def demo(
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL, plain or gzip.  [an excerpt of Mooncake's conversations]")
    ] = None,
    engines: Annotated[int, typer.Option(help="Simulated vLLM servers.")] = 6,
    duration: Annotated[float, typer.Option(help="Seconds in which a pass sends its requests.")] = 43.0,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second of the engines' time.  [the trace's own]")
    ] = None,
    speed: Annotated[float, typer.Option(help="How much faster than real time the engines run.")] = 12.0,
    seed: Annotated[int, typer.Option(help="Of arrivals, tenants and the verdict's interval.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the result as it is printed, as SVG.")] = None,
) -> None:
    """Play a real trace through Envoy and a simulated fleet, first without a plan, then with one, and compare.

    Exit code 1 when any request failed.
    """
    from rich.console import Console

    from replay.demo import DemoSettings, run_demo
    from replay.report import document, draw, show, write

    out, err = Console(), Console(stderr=True)
    settings = DemoSettings(
        trace=trace,
        engines=engines,
        duration_s=duration,
        rate_rps=rate,
        speed=speed,
        seed=seed,
        report=report,
        picture=picture,
    )
    try:
        result = run_demo(settings, out, err)
    except KeyboardInterrupt:
        err.print("stopped; nothing is left running")
        raise typer.Exit(130) from None
    show(result.verdict, result.policies, result.conditions, out)
    if report is not None:
        write(report, document(result.verdict, result.policies, result.conditions))
    if picture is not None:
        draw(picture, result.verdict, result.policies, result.conditions)
    if result.failed:
        for failure in result.failures[:FAILURES_SHOWN]:
            err.print(f"failed: {failure}", markup=False, highlight=False)
        err.print(f"{result.failed} requests failed")
        raise typer.Exit(1)
