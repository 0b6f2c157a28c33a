"""`cacheroute status`: which plan is published, who serves it, and how the services see the fleet."""

from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from planner.cli.output import Format, OutputOption, PoolOption, RedisOption, Table, emit, note, open_store, pairs
from planner.cli.pool import freeze_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from service.ledger import Freeze, Ledger
    from service.published import Ack, Head, Publication


class Instance(TypedDict):
    """One service process. age_s: since its plan was published; seen_s: since it said so; lag_s: see `lag`.

    state: `in_step`; `behind` and not yet there; `refused`, and `error` says why; `ahead` of a head that was lost or
    went back; `diverged`, another plan stands under the version that it serves.
    source: where its table came from: `redis`, `disk`, or empty without one.
    """

    instance: str
    version: int
    epoch: int
    state: str
    lag_versions: int
    lag_s: float
    age_s: float
    seen_s: float
    source: str
    overrides: int
    error: str


class Endpoint(TypedDict):
    """One endpoint as all services together see it; ready when all say so, draining when one does, inflight the sum."""

    name: str
    address: str
    ready: bool
    draining: bool
    inflight: int
    inflight_elsewhere: int
    ready_instances: int
    instances: int


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(status)


def status(
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 unless a service lives and all serve the published plan.")
    ] = False,
    redis: RedisOption = None,
    pool: PoolOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show which plan is published, which one each service serves, and how they see the endpoints.

    A service that said nothing for 15 s (or for three times its CACHEROUTE_PLAN_POLL_S) is not listed.
    """
    import asyncio
    import time

    from service.published import Head

    store = open_store(redis, pool)
    head, acks, log, frozen = asyncio.run(_read(store))
    now = time.time()
    instances = [instance_of(ack, head, log, now) for ack in acks]
    endpoints = merge(acks)
    document = {
        "pool": store.pool,
        "version": head.version,
        "epoch": head.epoch,
        "age_s": round(max(0.0, now - head.created_at), 3) if head != Head() else 0.0,
        "instances": instances,
        "frozen": freeze_of(frozen),
        "endpoints": endpoints,
        "overrides": [],
    }
    emit(document, output, *_tables(document, instances, endpoints))
    amiss = [i for i in instances if i["state"] != "in_step"]
    if frozen is not None:
        note(f"frozen by {frozen.actor}: {frozen.reason}; planners publish nothing (`plan freeze --off` ends it)")
    if not instances:
        note(f"no service of pool {store.pool!r} lives; compare CACHEROUTE_POOL and CACHEROUTE_REDIS_URL with theirs")
    for instance in amiss:
        if instance["error"]:
            note(f"service {instance['instance']} {instance['state']}: {instance['error']}")
    if check and (amiss or not instances):
        raise typer.Exit(1)


async def _read(store: "Ledger") -> "tuple[Head, list[Ack], list[Publication], Freeze | None]":
    """Return the head, what the services say, the log when somebody does not serve the head, and the freeze."""
    try:
        head = await store.read_head()
        acks = await store.read_acks(fleets=True)
        behind = any((ack.epoch, ack.version) < (head.epoch, head.version) for ack in acks)
        return head, acks, await store.read_log() if behind else [], await store.read_freeze()
    finally:
        await store.close()


def instance_of(ack: "Ack", head: "Head", log: "Sequence[Publication]", now: float) -> Instance:
    """Return the row of one service; log: newest first; now: unix s."""
    versions, since = lag(ack, head, log)
    return Instance(
        instance=ack.instance,
        version=ack.version,
        epoch=ack.epoch,
        state=state_of(ack, head),
        lag_versions=versions,
        lag_s=round(max(0.0, now - since), 3) if versions else 0.0,
        age_s=round(max(0.0, now - ack.created_at), 3) if ack.version else 0.0,
        seen_s=round(max(0.0, now - ack.at), 3),
        source=ack.source,
        overrides=0,
        error=ack.error,
    )


def state_of(ack: "Ack", head: "Head") -> str:
    """Return how a service stands to the head."""
    serving, published = (ack.epoch, ack.version), (head.epoch, head.version)
    if serving == published:
        return "diverged" if ack.error else "in_step"
    if serving > published:
        return "ahead"
    return "refused" if ack.error else "behind"


def lag(ack: "Ack", head: "Head", log: "Sequence[Publication]") -> tuple[int, float]:
    """Return how many publications a service does not serve yet, and when the first of them was made (unix s).

    The log may be shorter than that; then at least the head is missing, since its own time.
    """
    if (ack.epoch, ack.version) >= (head.epoch, head.version):
        return 0, 0.0
    missed = [p.at for p in log if (ack.epoch, ack.version) < (p.epoch, p.version) <= (head.epoch, head.version)]
    return max(1, len(missed)), min(at for at in (head.created_at, *missed) if at or not missed)


def merge(acks: "Iterable[Ack]") -> list[Endpoint]:
    """Return the endpoints of all services, by name; one whose address they see differently is listed with each."""
    merged: dict[tuple[str, str], Endpoint] = {}
    for ack in acks:
        for view in ack.fleet:
            row = merged.setdefault(
                (view.name, view.address),
                Endpoint(
                    name=view.name,
                    address=view.address,
                    ready=True,
                    draining=False,
                    inflight=0,
                    inflight_elsewhere=0,
                    ready_instances=0,
                    instances=0,
                ),
            )
            row["ready"] = row["ready"] and view.ready
            row["draining"] = row["draining"] or view.draining
            row["inflight"] += view.inflight
            row["ready_instances"] += view.ready
            row["instances"] += 1
    return [row for _, row in sorted(merged.items())]


def _tables(document: "dict[str, object]", instances: list[Instance], endpoints: list[Endpoint]) -> tuple[Table, ...]:
    shown = ("instance", "state", "version", "epoch", "lag_versions", "lag_s", "age_s", "seen_s", "source")
    summary = {name: document[name] for name in ("pool", "version", "epoch", "age_s")}
    tables = [pairs(summary)]
    if instances:
        tables.append(Table(shown, [tuple(i[name] for name in shown) for i in instances]))  # type: ignore[literal-required]
    if endpoints:
        columns = ("name", "address", "ready", "draining", "inflight", "ready_instances", "instances")
        tables.append(Table(columns, [tuple(e[name] for name in columns) for e in endpoints]))  # type: ignore[literal-required]
    return tuple(tables)
