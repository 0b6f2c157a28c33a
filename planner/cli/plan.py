"""`cacheroute plan`: build a plan from a file of rates, look at plans, publish one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from planner.cli import plan_changes, plan_history
from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, Table, emit, note, open_store, pairs
from planner.cli.pool import find, key_check, login, read_file, refusals, salt
from service.errors import InvalidPlan, PlanConflict

if TYPE_CHECKING:
    from service.plan import Plan
    from service.store import Store

SHOWN_ROWS = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Build, show, publish, compare and roll back plans.")
    group.command("build")(build)
    group.command("show")(show)
    group.command("publish")(publish)
    plan_changes.register(group)
    plan_history.register(group)
    app.add_typer(group, name="plan")


def build(
    rates: Annotated[Path, typer.Option(metavar="FILE.csv", help="Columns key,rate_rps; others are ignored.")],
    endpoints: Annotated[str, typer.Option(metavar="N|FILE", help="How many, or a file of one name a line.")],
    slots: Annotated[int, typer.Option(metavar="W", help="Keys that one endpoint keeps warm, on average.")],
    replica_cap: Annotated[float, typer.Option(metavar="Q", help="Requests/s of one key that one endpoint bears.")],
    previous: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="The plan in service: its keys stay where they are if they can.")
    ] = None,
    method: Annotated[
        Literal["sticky", "lpt"], typer.Option(help="sticky moves few keys; lpt deals all out anew.")
    ] = "sticky",
    epsilon: Annotated[float, typer.Option(metavar="E", help="Most load above the mean before a key moves.")] = 0.05,
    keys_budget: Annotated[float, typer.Option(metavar="SHARE", help="Most keys that may move for balance.")] = 0.1,
    rate_budget: Annotated[float, typer.Option(metavar="SHARE", help="Most of their rate that may.")] = 0.2,
    copies_max: Annotated[int, typer.Option(min=0, metavar="K", help="Most copies of one key; 0: no limit.")] = 0,
    incumbent_bonus: Annotated[
        float, typer.Option(metavar="D", help="How much more the rate of a key counts that has slots already.")
    ] = 0.25,
    token_budget: Annotated[
        int, typer.Option(min=0, metavar="B", help="Tokens an endpoint keeps warm, instead of slots (prefix_tokens).")
    ] = 0,
    resident_s: Annotated[
        float, typer.Option(metavar="TAU", help="Seconds that an unused prefix stays in a cache; 0: not known.")
    ] = 0.0,
    residency: Annotated[
        float, typer.Option(metavar="THETA", help="Least requests to a copy in that time for a key to get slots.")
    ] = 0.5,
    out: Annotated[Path | None, typer.Option(metavar="PLAN", help="Write the plan here.")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Build a plan and print what it does; the same input gives the same bytes.

    outcome: `even`, no endpoint is more than E above the mean, or than fresh LPT could do; `budget`, the budget was
    spent before that; `uneven`, no move leads there; `fresh`, all keys were dealt out anew.
    """
    from planner.admission import Rules
    from planner.build import build as build_plan
    from planner.build import endpoint_names, report_of
    from planner.rates import read_csv
    from planner.sticky import Limits
    from service.files import write_whole
    from service.plan import decode, encode

    ours, names = key_check(), endpoint_names(endpoints)
    before = None if previous is None else decode(read_file(previous), key_check=ours)
    if before is not None and before.endpoints and not set(names).intersection(before.endpoints):
        raise InvalidPlan(
            "endpoint",
            f"--previous {previous} names none of the endpoints in --endpoints, {names[0]} first, but "
            f"{before.endpoints[0]}: it is another pool's; leave it out to deal all keys out anew",
        )
    built = build_plan(
        read_csv(rates, salt=salt(), prefixes=token_budget > 0),
        names,
        rules=Rules(
            slots_per_endpoint=slots,
            replica_cap_rps=replica_cap,
            copies_max=copies_max,
            incumbent_bonus=incumbent_bonus,
            resident_s=resident_s,
            residency=residency,
            tokens_per_endpoint=token_budget,
        ),
        key_check=ours,
        previous=before,
        method=method,
        limits=Limits(epsilon=epsilon, keys_share=keys_budget, rate_share=rate_budget),
    )
    if out is not None:
        write_whole("--out", out, encode(built.plan))
        note(f"wrote {out}")
    report = report_of(built)
    emit(report, output, pairs(report))


def show(
    plan: Annotated[
        str | None, typer.Argument(metavar="[PLAN|VERSION]", help="A file, or a published version.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"Most keys to list, hottest first.  [table: {SHOWN_ROWS}, else all]")
    ] = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show a plan: what it was built from, the load it expects of each endpoint, and where each key goes.

    Without an argument, the published one.
    """
    import asyncio

    (found,) = asyncio.run(find([plan], redis, pool))
    if limit is None:
        limit = SHOWN_ROWS if output is Format.TABLE else len(found)
    document, tables = _describe(found, limit)
    emit(document, output, *tables)


def publish(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file that `plan build --out` wrote.")],
    if_version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only when version N is the published one; 0: none yet.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Who publishes.  [the login name]")] = None,
    reason: Annotated[str, typer.Option(help="Why; kept in the pool's log.")] = "",
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Publish a plan to every service of the pool; exit code 4 when somebody else published meanwhile.

    Waits up to 3 s for the services to say that they serve it; exit code 1 when one of them refuses it.
    """
    import asyncio

    from service.plan import decode

    # Checked whole before Redis is touched: what services would refuse is not published.
    found = decode(read_file(plan), key_check=key_check())
    published, refused = asyncio.run(_publish(open_store(redis, pool), found, if_version, actor or login(), reason))
    document = {"version": published.version, "epoch": published.epoch}
    emit(document, output, pairs(document))
    for instance, error in refused:
        note(f"service {instance} refuses it and serves the plan before: {error}")
    if refused:
        raise typer.Exit(1)


async def _publish(
    store: "Store", plan: "Plan", if_version: int | None, actor: str, reason: str
) -> "tuple[Plan, list[tuple[str, str]]]":
    """Return the plan as published, and which instances refuse it and why."""
    try:
        head = await store.read_head()
        if if_version is not None and head.version != if_version:
            raise PlanConflict(if_version, head.version)
        instances = {ack.instance for ack in await store.read_acks()}
        published = await store.publish(plan, expected=head, actor=actor, reason=reason)
        return published, await refusals(store, published, instances)
    finally:
        await store.close()


def _describe(plan: "Plan", limit: int) -> tuple[dict[str, object], tuple[Table, ...]]:
    from datetime import UTC, datetime

    from planner.build import shape_of
    from service.keys import format_hash

    parameters, shape = plan.parameters, shape_of(plan)
    summary: dict[str, object] = {
        "version": plan.version,
        "epoch": plan.epoch,
        "created_at": plan.created_at,
        "actor": plan.actor,
        "reason": plan.reason,
        "sha256": plan.content_sha256(),
        "method": parameters.method,
        "keys": parameters.keys_seen,
        "rate_rps": parameters.rate_rps,
        "slots_per_endpoint": parameters.slots_per_endpoint,
        "replica_cap_rps": parameters.replica_cap_rps,
        "slots_used": shape.slots_used,
        "admitted": shape.admitted,
        "admitted_rate_share": shape.admitted_rate_share,
        "max_copies": shape.max_copies,
        "max_over_mean": shape.max_over_mean,
    }
    endpoints = [
        {"name": name, "slots_used": slots, "load_rps": load}
        for name, slots, load in zip(plan.endpoints, shape.slots, shape.loads_rps, strict=True)
    ]
    assignments = [
        {
            "key_hash": format_hash(plan.key_hashes[row]),
            "rate_rps": plan.rates_rps[row],
            "targets": list(plan.target_names(row)),
        }
        for row in range(min(limit, len(plan)))
    ]
    when = datetime.fromtimestamp(plan.created_at, UTC).isoformat(timespec="seconds") if plan.created_at else None
    tables = [
        pairs({**summary, "created_at": when}),
        Table(("endpoint", "slots_used", "load_rps"), [tuple(e.values()) for e in endpoints]),
    ]
    if assignments:
        title = "" if len(assignments) == len(plan) else f"hottest {len(assignments)} of {len(plan)} keys (--limit)"
        tables.append(Table(("key_hash", "rate_rps", "targets"), [tuple(a.values()) for a in assignments], title))
    return {**summary, "endpoints": endpoints, "assignments": assignments}, tuple(tables)
