"""`cacheroute plan history` and `freeze`: what happened to a pool's plan, and how to keep planners from changing it."""

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, Table, emit, open_store, pairs
from planner.cli.pool import duration_s, freeze_of, login, said
from service.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from service.ledger import Event, Freeze, Ledger
    from service.published import Head, Publication


class Entry(TypedDict):
    """One thing that happened. kind: `publication`, `cycle` (one that published nothing), `freeze` or `unfreeze`.

    at: unix s.  version, epoch: published by it, or at that time.  keys, sha256: of the plan, of a cycle the
    candidate's.  decision: of the planner, `operator` where one published.  kept: it can be rolled back to.
    """

    kind: str
    at: float
    version: int | None
    epoch: int | None
    decision: str | None
    actor: str
    keys: int | None
    kept: bool
    sha256: str | None
    trigger: str | None
    reason: str


def register(group: typer.Typer) -> None:
    """Add the commands to `plan`."""
    group.command("history")(history)
    group.command("freeze")(freeze)


def history(
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most entries, newest first.")] = 20,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what happened to the plan, newest first: publications, planners' cycles, freezes."""
    import asyncio
    from datetime import UTC, datetime

    ledger = open_store(redis, pool)
    head, frozen, entries = asyncio.run(_read(ledger, limit))
    document = {
        "pool": ledger.pool,
        "version": head.version,
        "epoch": head.epoch,
        "frozen": freeze_of(frozen),
        "entries": entries,
    }
    shown = ("version", "decision", "actor", "keys", "kept", "reason")
    rows = [
        (
            datetime.fromtimestamp(entry["at"], UTC).isoformat(timespec="seconds"),
            entry["kind"],
            *(entry[name] for name in shown),  # type: ignore[literal-required]
        )
        for entry in entries
    ]
    tables = [Table(("at", "kind", *shown), rows)]
    if frozen is not None:
        tables.insert(0, Table(("frozen_by", "reason"), [(frozen.actor, frozen.reason)]))
    emit(document, output, *tables)


def freeze(
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept in the pool's log.")] = "",
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="For how long, as 90s, 15m, 2h or 1d.  [until --off]")
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="End it.")] = False,
    actor: Annotated[str | None, typer.Option(help="Who does so.  [the login name]")] = None,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Keep planners from publishing; operators still may. A planner in the middle of a cycle is kept from it too."""
    import asyncio

    if off and ttl is not None:
        raise InvalidInput("--off has no --ttl", "leave one of them out")
    if not off:
        reason = said(reason)
    ttl_s = 0.0 if ttl is None else duration_s("--ttl", ttl)
    ledger = open_store(redis, pool)
    frozen = asyncio.run(_freeze(ledger, off, actor or login(), reason.strip(), ttl_s))
    document = {"pool": ledger.pool, "frozen": freeze_of(frozen)}
    emit(document, output, pairs(document))


async def _freeze(ledger: "Ledger", off: bool, actor: str, reason: str, ttl_s: float) -> "Freeze | None":
    try:
        if not off:
            return await ledger.freeze(actor=actor, reason=reason, ttl_s=ttl_s)
        await ledger.unfreeze(actor=actor, reason=reason)
        return None
    finally:
        await ledger.close()


async def _read(ledger: "Ledger", limit: int) -> "tuple[Head, Freeze | None, list[Entry]]":
    try:
        head, frozen = await ledger.read_head(), await ledger.read_freeze()
        publications, cycles = await ledger.read_log(limit), await ledger.read_cycles()
        return head, frozen, merge(head, publications, await ledger.read_events(), cycles)[:limit]
    finally:
        await ledger.close()


def merge(
    head: "Head",
    publications: "Sequence[Publication]",
    events: "Sequence[Event]",
    cycles: "Sequence[Mapping[str, Any]]",
) -> list[Entry]:
    """Return everything as one history, newest first; a cycle that published is one entry with its publication."""
    from service.store import PLANS_KEPT

    by_version = {(c.get("epoch"), c.get("version")): c for c in cycles if c.get("decision") in ("published", "flat")}
    entries = []
    for p in publications:
        cycle = by_version.get((p.epoch, p.version), {})
        entries.append(
            Entry(
                kind="publication",
                at=p.at,
                version=p.version,
                epoch=p.epoch,
                decision=str(cycle.get("decision", "operator")),
                actor=p.actor,
                keys=p.keys,
                kept=head.version - PLANS_KEPT < p.version <= head.version,
                sha256=p.sha256,
                trigger=cycle.get("trigger"),
                reason=p.reason,
            )
        )
    for e in events:
        ends = f" (for {e.ttl_s:g} s)" if e.ttl_s else ""
        entries.append(_entry(e.event, e.at, e.actor, e.reason + ends))
    for c in cycles:
        if c.get("decision") not in ("published", "flat"):
            entry = _entry("cycle", c["recorded_at"], str(c.get("planner", "")), str(c.get("reason", "")))
            entry["version"], entry["epoch"], entry["keys"] = c.get("version"), c.get("epoch"), c.get("admitted")
            entry["decision"], entry["sha256"] = c.get("decision"), c.get("sha256") or None
            entry["trigger"] = c.get("trigger")
            entries.append(entry)
    return sorted(entries, key=lambda e: (e["at"], e["version"] or 0, e["kind"] == "cycle"), reverse=True)


def _entry(kind: str, at: float, actor: str, reason: str) -> Entry:
    return Entry(
        kind=kind,
        at=at,
        version=None,
        epoch=None,
        decision=None,
        actor=actor,
        keys=None,
        kept=False,
        sha256=None,
        trigger=None,
        reason=reason,
    )
