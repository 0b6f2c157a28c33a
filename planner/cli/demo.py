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
    mix: Annotated[
        str | None, typer.Option(help="Single/multi-turn/agentic traffic instead of a trace, in %: 100/0/0[,S/M/A…].")
    ] = None,
    eviction: Annotated[
        str, typer.Option(help="Adds a pass with this eviction policy; auto: each engine decides, and may switch.")
    ] = "lru",
    kv_blocks: Annotated[int | None, typer.Option(help="KV-cache blocks of an engine.  [40,071; a mix: 5,333]")] = None,
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

    To see engines switch their eviction policy: --eviction auto --mix 100/0/0.

    Exit code 1 when any request failed.
    """
    from rich.console import Console

    from replay.demo import DemoSettings, run_demo
    from replay.report import document, draw, show, write

    out, err = Console(), Console(stderr=True)
    settings = DemoSettings(
        trace=trace,
        mix=mix,
        eviction=eviction,
        kv_blocks=kv_blocks,
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
    show(result.verdict, result.policies, result.conditions, out, result.eviction)
    if report is not None:
        write(report, document(result.verdict, result.policies, result.conditions, result.eviction))
    if picture is not None:
        draw(picture, result.verdict, result.policies, result.conditions, result.eviction)
    if result.failed:
        for failure in result.failures[:FAILURES_SHOWN]:
            err.print(f"failed: {failure}", markup=False, highlight=False)
        err.print(f"{result.failed} requests failed")
        raise typer.Exit(1)
