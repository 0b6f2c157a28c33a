"""`cacheroute plan diff`, `explain`, `rollback`: what changed, why a key is where it is, and how to go back."""

from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, Table, emit, note, open_store, pairs
from planner.cli.pool import changes_of, fetch, find, key_check, login, refusals, said, salt
from service.errors import InvalidPlan, PlanConflict

if TYPE_CHECKING:
    from planner.rates import KeyRates
    from service.ledger import Ledger
    from service.plan import Plan
    from service.published import Ack

# What is assumed of a key's prefix when nobody says.
PREFIX_TOKENS = 2048

PrefixOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="N",
        envvar="CACHEROUTE_PLANNER_PREFIX_TOKENS",
        help=f"Mean length of a key's prefix, for the warm-up.  [{PREFIX_TOKENS}]",
    ),
]


def register(group: typer.Typer) -> None:
    """Add the commands to `plan`."""
    group.command("diff")(diff)
    group.command("explain")(explain)
    group.command("rollback")(rollback)


def diff(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A file, or a version.")],
    new: Annotated[
        str | None, typer.Argument(metavar="[NEW]", help="A file, or a version.  [the published one]")
    ] = None,
    prefix_tokens: PrefixOption = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what changes when NEW replaces OLD: keys and rate moved, load of each endpoint, warm-up to expect.

    Load before is that of the old targets at the new rates. warmup_tokens: a prefix for each new target of a key that
    both plans have.
    """
    import asyncio

    before, after = asyncio.run(find([old, new], redis, pool))
    document = changes_of(before, after, prefix_tokens or PREFIX_TOKENS)
    emit(document, output, *_tables(document))


def explain(
    key: Annotated[str, typer.Argument(metavar="KEY", help="As requests carry it; only its hash leaves this process.")],
    version: Annotated[
        int | None, typer.Option(min=1, metavar="VERSION", help="A version that is still kept.  [the published one]")
    ] = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Tell why a key is in the plan or not, where it goes, and how loaded those endpoints are.

    rank, cut_rps: the key's place among the admitted ones, and the lowest rate among them. rate_now_rps, rank_now: by
    what is counted now, and its place among all keys_now.
    """
    import asyncio

    from service.keys import hash_key, normalise

    key_hash = hash_key(normalise(key.encode(errors="surrogateescape")), salt())
    document = asyncio.run(_explain(open_store(redis, pool), key_hash, version))
    targets = document["targets"]
    assert isinstance(targets, list)
    plain = {name: value for name, value in document.items() if name != "targets"}
    tables = [pairs(plain)]
    if targets:
        tables.append(Table(tuple(targets[0]), [tuple(target.values()) for target in targets]))
    emit(document, output, *tables)


def rollback(
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept in the pool's log.")],
    to: Annotated[
        int | None, typer.Option(min=1, metavar="VERSION", help="A version that is kept.  [the one before]")
    ] = None,
    if_version: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Only when version N is the published one.")
    ] = None,
    actor: Annotated[str | None, typer.Option(help="Who publishes.  [the login name]")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Publish nothing, show what would change.")] = False,
    prefix_tokens: PrefixOption = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Publish an earlier plan's assignment again, as a new version; the newest ten are kept.

    Planners go on from it and may publish another: `plan freeze` keeps them away. Exit codes as of `plan publish`.
    """
    import asyncio

    reason = said(reason)
    document, refused, frozen = asyncio.run(
        _rollback(
            open_store(redis, pool), to, if_version, actor or login(), reason, dry_run, prefix_tokens or PREFIX_TOKENS
        )
    )
    changes = document["changes"]
    assert changes is None or isinstance(changes, dict)
    plain = pairs({name: value for name, value in document.items() if name != "changes"})
    emit(document, output, plain, *(_tables(changes) if changes else ()))
    if not dry_run and not frozen:
        note("planners go on from this plan; `plan freeze --reason TEXT` keeps them away")
    for instance, error in refused:
        note(f"service {instance} refuses it and serves the plan before: {error}")
    if refused:
        raise typer.Exit(1)


def _tables(changes: dict[str, object]) -> tuple[Table, Table]:
    endpoints = changes["endpoints"]
    assert isinstance(endpoints, list)
    return (
        pairs({name: value for name, value in changes.items() if name != "endpoints"}),
        Table(("endpoint", "load_before_rps", "load_after_rps"), [tuple(e.values()) for e in endpoints]),
    )


async def _explain(ledger: "Ledger", key_hash: int, version: int | None) -> dict[str, object]:
    from planner.build import shape_of
    from service.keys import format_hash

    try:
        plan = await fetch(ledger, version)
        if plan.key_check != key_check():
            raise InvalidPlan("salt", f"plan {plan.version} was built with another salt; set its CACHEROUTE_KEY_SALT")
        rates = await _rates_now(ledger, plan)
    finally:
        await ledger.close()
    row = plan.key_hashes.index(key_hash) if key_hash in plan.key_hashes else None
    names = () if row is None else plan.target_names(row)
    loads = dict(zip(plan.endpoints, shape_of(plan).loads_rps, strict=True))
    mean = sum(loads.values()) / len(loads) if loads else 0.0
    now_rps, rank_now = _rank(rates, key_hash)
    cut = min(plan.rates_rps, default=0.0)
    rate = None if row is None else plan.rates_rps[row]
    rank = None if rate is None else sum(other > rate for other in plan.rates_rps) + 1
    return {
        "key_hash": format_hash(key_hash),
        "version": plan.version,
        "epoch": plan.epoch,
        "admitted": row is not None,
        "why": _why(plan, rate, rank, len(names), cut, now_rps, rank_now, len(rates)),
        "rate_rps": rate,
        "rank": rank,
        "admitted_keys": len(plan),
        "cut_rps": cut,
        "copies": len(names),
        "rate_now_rps": now_rps,
        "rank_now": rank_now,
        "keys_now": len(rates),
        "targets": [
            {"name": name, "load_rps": loads[name], "load_over_mean": loads[name] / mean if mean else 1.0}
            for name in names
        ],
    }


def _why(
    plan: "Plan",
    rate: float | None,
    rank: int | None,
    copies: int,
    cut: float,
    now_rps: float,
    rank_now: int | None,
    keys_now: int,
) -> str:
    if rate is not None:
        cap = plan.parameters.replica_cap_rps
        return (
            f"admitted: by rate it is {rank} of {len(plan)} keys in the plan; {rate:.4g} requests/s are "
            f"{copies} {'copy' if copies == 1 else 'copies'} where one bears {cap:.4g}"
        )
    if not len(plan):
        return f"the plan has no keys, every request is balanced: {plan.reason or 'no reason was given'}"
    if rank_now is None:
        return "not admitted: no request of it is in the windows that planners read"
    place = f"by today's rate it is {rank_now} of {keys_now} keys"
    if now_rps < cut:
        return f"not admitted: {place}; {now_rps:.4g} requests/s are below the cut, {cut:.4g}"
    return (
        f"not admitted: {place}; {now_rps:.4g} requests/s are not below the cut, {cut:.4g}, so it came up since, or "
        "its copies did not fit, or it does not stay in a cache; the next plan looks again"
    )


def _rank(rates: "KeyRates", key_hash: int) -> tuple[float, int | None]:
    """Return the rate of a key and its place by rate, None: it has no rate."""
    import numpy as np

    at = int(np.searchsorted(rates.key_hashes, np.uint64(key_hash)))
    if at == len(rates) or int(rates.key_hashes[at]) != key_hash or not rates.rates_rps[at]:
        return 0.0, None
    return float(rates.rates_rps[at]), int((rates.rates_rps > rates.rates_rps[at]).sum()) + 1


async def _rates_now(ledger: "Ledger", plan: "Plan") -> "KeyRates":
    """Return the rates as a planner with this plan's parameters measures them."""
    import os
    import time

    from planner.settings import PlannerSettings, load_settings
    from planner.windows import Windows

    settings: PlannerSettings = load_settings(
        os.environ,
        redis_url="unused",
        pool=ledger.pool,
        endpoint=plan.endpoints or ("unused",),
        slots_per_endpoint=max(1, plan.parameters.slots_per_endpoint),
        replica_cap_rps=1.0,
    )
    rates, _ = await Windows(ledger, settings).read(time.time())
    return rates


async def _rollback(
    ledger: "Ledger",
    to: int | None,
    if_version: int | None,
    actor: str,
    reason: str,
    dry_run: bool,
    prefix_tokens: float,
) -> tuple[dict[str, object], list[tuple[str, str]], bool]:
    """Return what is printed, who refuses the plan, and whether planners are kept away."""
    from service.plan import decode

    try:
        head = await ledger.read_head()
        if if_version is not None and head.version != if_version:
            raise PlanConflict(if_version, head.version)
        version = head.version - 1 if to is None else to
        if version < 1 or version == head.version:
            raise InvalidPlan(
                "version",
                f"pool {ledger.pool!r} has no plan before version {head.version}; `plan history` lists what is kept",
            )
        earlier = decode(await ledger.read_plan_bytes(version), key_check=key_check())
        acks = await ledger.read_acks(fleets=True)
        _refuse_foreign(earlier, version, acks)
        document: dict[str, object] = {
            "version": head.version + 1,
            "epoch": head.epoch,
            "rolled_back_to": version,
            "dry_run": dry_run,
            "changes": await _changes(ledger, earlier, prefix_tokens),
        }
        frozen = await ledger.read_freeze() is not None
        if dry_run:
            return document, [], frozen
        words = f"Rollback to version {version}: {reason}"
        published = await ledger.publish(earlier, expected=head, actor=actor, reason=words)
        document |= {"version": published.version, "epoch": published.epoch}
        return document, await refusals(ledger, published, {ack.instance for ack in acks}), frozen
    finally:
        await ledger.close()


async def _changes(ledger: "Ledger", earlier: "Plan", prefix_tokens: float) -> dict[str, object] | None:
    """Return what the rollback changes; None when the published plan is none that anybody can read."""
    try:
        return changes_of(await fetch(ledger, None), earlier, prefix_tokens)
    except InvalidPlan as exc:
        note(f"what would change cannot be told: {exc}")
        return None


def _refuse_foreign(plan: "Plan", version: int, acks: "list[Ack]") -> None:
    names = {view.name for ack in acks for view in ack.fleet}
    if names and plan.endpoints and not names.intersection(plan.endpoints):
        raise InvalidPlan(
            "endpoint", f"plan {version} names none of the endpoints that services have, {min(names)} first"
        )
