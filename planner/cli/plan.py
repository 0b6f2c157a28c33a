"""`cacheroute plan`: build a plan from a file of rates, look at plans, publish one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, Table, emit, note, pairs
from service.errors import InvalidInput, InvalidPlan, PlanConflict

if TYPE_CHECKING:
    from service.plan import Plan
    from service.store import Store

ACK_WAIT_S = 3.0
SHOWN_ROWS = 20


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="Build, show and publish plans.")
    group.command("build")(build)
    group.command("show")(show)
    group.command("publish")(publish)
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
    from replay.files import write_whole
    from service.keys import KEY_CHECK, hash_key
    from service.plan import decode, encode

    salt = _salt()
    key_check = hash_key(KEY_CHECK, salt)
    built = build_plan(
        read_csv(rates, salt=salt, prefixes=token_budget > 0),
        endpoint_names(endpoints),
        rules=Rules(
            slots_per_endpoint=slots,
            replica_cap_rps=replica_cap,
            copies_max=copies_max,
            incumbent_bonus=incumbent_bonus,
            resident_s=resident_s,
            residency=residency,
            tokens_per_endpoint=token_budget,
        ),
        key_check=key_check,
        previous=None if previous is None else decode(_read(previous), key_check=key_check),
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

    from service.plan import decode

    if plan is not None and not plan.isdecimal():
        found = decode(_read(Path(plan)))
    else:
        found = asyncio.run(_fetch(_store(redis, pool), None if plan is None else int(plan)))
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

    from service.keys import KEY_CHECK, hash_key
    from service.plan import decode

    # Checked whole before Redis is touched: what services would refuse is not published.
    found = decode(_read(plan), key_check=hash_key(KEY_CHECK, _salt()))
    published, refusals = asyncio.run(_publish(_store(redis, pool), found, if_version, actor or _login(), reason))
    document = {"version": published.version, "epoch": published.epoch}
    emit(document, output, pairs(document))
    for instance, error in refusals:
        note(f"service {instance} refuses it and serves the plan before: {error}")
    if refusals:
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
        return published, await _refusals(store, published, instances)
    finally:
        await store.close()


async def _refusals(store: "Store", published: "Plan", instances: set[str]) -> list[tuple[str, str]]:
    """Wait until each instance serves the plan or says why not; one that stays silent is no refusal."""
    import asyncio

    deadline = asyncio.get_running_loop().time() + ACK_WAIT_S
    while True:
        acks = [ack for ack in await store.read_acks() if ack.instance in instances]
        served = {ack.instance for ack in acks if (ack.epoch, ack.version) >= (published.epoch, published.version)}
        refused = [(ack.instance, ack.error) for ack in acks if ack.error and ack.at > published.created_at]
        if len(served) + len(refused) >= len(instances) or asyncio.get_running_loop().time() > deadline:
            return refused
        await asyncio.sleep(0.05)


async def _fetch(store: "Store", version: int | None) -> "Plan":
    """Return the published plan as services take it, or an earlier version that is still kept."""
    from service.keys import KEY_CHECK, hash_key
    from service.plan import decode
    from service.store import verify

    try:
        head = await store.read_head()
        if version is None and not head.version:
            raise InvalidPlan("missing", f"pool {store.pool!r} has no plan; build one and `plan publish` it")
        if version is None or version == head.version:
            data = await store.read_plan_bytes(head.version)
            return verify(data, head, key_check=hash_key(KEY_CHECK, _salt()))
        return decode(await store.read_plan_bytes(version))
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


def _store(redis: str | None, pool: str | None) -> "Store":
    from service.store import Store

    if not redis:
        raise InvalidInput("no Redis is named", "give --redis redis://host:port/db or set CACHEROUTE_REDIS_URL")
    return Store(redis, pool or "default")


def _salt() -> bytes:
    import os

    from planner.settings import refuse_unknown_variables
    from service.settings import check_salt

    refuse_unknown_variables(os.environ)
    try:
        return check_salt(os.environ.get("CACHEROUTE_KEY_SALT", "")).encode()
    except ValueError as exc:
        raise InvalidInput(f"CACHEROUTE_KEY_SALT: {exc}", "use the services' salt") from exc


def _login() -> str:
    from getpass import getuser

    try:
        return getuser()
    except (KeyError, OSError, ImportError):  # a container whose user id has no name
        return "cli"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InvalidInput(
            f"plan {path} cannot be read: {exc.strerror}", "name a file that `plan build` wrote"
        ) from exc
