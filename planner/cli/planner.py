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
WindowsOption = Annotated[
    int | None, typer.Option(metavar="N", help="Newest rate windows to plan from, at most.  [240]")
]
EpsilonOption = Annotated[
    float | None, typer.Option(metavar="E", help="Most load above the mean before a key moves.  [0.05]")
]
GateOption = Annotated[
    bool | None, typer.Option("--gate/--no-gate", help="Judge a plan before it is published.  [gate]")
]


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
    epsilon: EpsilonOption = None,
    gate: GateOption = None,
    force: Annotated[bool, typer.Option("--force", help="Take the lead from a planner that has it.")] = False,
    anew: Annotated[
        bool, typer.Option("--anew", help="As if no plan were published: for a new salt, or endpoints renamed.")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Run one cycle and print its record.

    Exit code 4 when another planner leads the pool, 3 when there is nothing that could be planned from; the published
    plan stays. Every setting can also come from the environment as CACHEROUTE_PLANNER_<NAME>; the command line wins.
    """
    import asyncio

    settings = _settings(redis, pool, endpoint, slots, replica_cap, windows, epsilon, gate)
    from planner.job import once as run_once

    record = dict(asyncio.run(run_once(settings, force=force, anew=anew)))
    if record["decision"] == "no_rates":
        note(
            f"no service counted a request of pool {settings.pool!r} in the newest {settings.windows} windows of "
            f"{settings.rate_window_s} s; CACHEROUTE_RATE_WINDOW_S must be what the services have"
        )
    elif record["decision"] not in ("published", "unchanged"):
        note(str(record["reason"]))
    emit(record, output, pairs({name: value for name, value in record.items() if name != "memory"}))


def run(
    redis: RedisOption = None,
    pool: PoolOption = None,
    endpoint: EndpointOption = None,
    slots: SlotsOption = None,
    replica_cap: CapOption = None,
    windows: WindowsOption = None,
    epsilon: EpsilonOption = None,
    gate: GateOption = None,
    interval_s: Annotated[float | None, typer.Option(help="Seconds between two cycles.  [300]")] = None,
) -> None:
    """Run a cycle each interval, and when an endpoint is lost or load shifts, until SIGTERM.

    Of several planners of a pool one leads, and another takes over when it dies. One JSON line a cycle on standard
    error. Every setting can also come from the environment as CACHEROUTE_PLANNER_<NAME>; the command line wins.
    """
    import asyncio

    settings = _settings(redis, pool, endpoint, slots, replica_cap, windows, epsilon, gate, interval_s)
    from planner.job import run as run_job

    asyncio.run(run_job(settings))


def _settings(
    redis: str | None,
    pool: str | None,
    endpoint: list[str] | None,
    slots: int | None,
    replica_cap: float | None,
    windows: int | None,
    epsilon: float | None,
    gate: bool | None,
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
        epsilon=epsilon,
        gate=gate,
        interval_s=interval_s,
    )
    configure_logging(settings.log_level)
    return settings
