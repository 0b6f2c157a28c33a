"""`cacheroute planner`: the job that plans from measured rates, as a loop or one cycle."""

from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, emit, note, pairs

if TYPE_CHECKING:
    from planner.settings import PlannerSettings

EndpointOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME[=IP:PORT]", help="One endpoint by its stable name, as the service is given it."),
]
SlotsOption = Annotated[
    int | None, typer.Option("--slots", metavar="W", help="Keys that one endpoint keeps warm, on average.")
]
CapOption = Annotated[
    float | None, typer.Option("--replica-cap", metavar="Q", help="Requests/s of one key that one endpoint bears.")
]
WindowsOption = Annotated[int | None, typer.Option(metavar="N", help="Newest rate windows to plan from.  [10]")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Plan from the rates that services measure, and publish.")
    group.command("once")(once)
    group.command("run")(run)
    app.add_typer(group, name="planner")


def once(
    redis: RedisOption = None,
    pool: PoolOption = None,
    endpoint: EndpointOption = None,
    slots: SlotsOption = None,
    replica_cap: CapOption = None,
    windows: WindowsOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run one cycle and print its record.

    Every setting can also come from the environment as CACHEROUTE_PLANNER_<NAME>; the command line wins.
    """
    import asyncio

    settings = _settings(redis, pool, endpoint, slots, replica_cap, windows)
    from planner.job import once as run_once

    record = dict(asyncio.run(run_once(settings)))
    if record["decision"] == "no_rates":
        note(
            f"no service counted a request of pool {settings.pool!r} in the newest {settings.windows} windows of "
            f"{settings.rate_window_s} s; CACHEROUTE_RATE_WINDOW_S must be what the services have"
        )
    emit(record, output, pairs(record))


def run(
    redis: RedisOption = None,
    pool: PoolOption = None,
    endpoint: EndpointOption = None,
    slots: SlotsOption = None,
    replica_cap: CapOption = None,
    windows: WindowsOption = None,
    interval_s: Annotated[float | None, typer.Option(help="Seconds between two cycles.  [300]")] = None,
) -> None:
    """Run a cycle each interval until SIGTERM; one JSON line a cycle on standard error.

    Every setting can also come from the environment as CACHEROUTE_PLANNER_<NAME>; the command line wins.
    """
    import asyncio

    settings = _settings(redis, pool, endpoint, slots, replica_cap, windows, interval_s)
    from planner.job import run as run_job

    asyncio.run(run_job(settings))


def _settings(
    redis: str | None,
    pool: str | None,
    endpoint: list[str] | None,
    slots: int | None,
    replica_cap: float | None,
    windows: int | None,
    interval_s: float | None = None,
) -> "PlannerSettings":
    """Return the settings, and log as they say from here on."""
    import os

    from planner.settings import load_settings
    from service.telemetry import configure_logging

    settings = load_settings(
        os.environ,
        redis_url=redis,
        pool=pool,
        endpoint=tuple(endpoint) if endpoint else None,
        slots_per_endpoint=slots,
        replica_cap_rps=replica_cap,
        windows=windows,
        interval_s=interval_s,
    )
    configure_logging(settings.log_level)
    return settings
