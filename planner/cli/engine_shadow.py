"""`cacheroute engine shadow`: what a trace would hit under each eviction policy, and what no policy can beat."""

from pathlib import Path
from typing import Annotated, Any

import typer

from planner.cli.output import Format, OutputOption, Table, emit, note
from service.errors import InvalidInput

DEFAULT = "lru,s3fifo,arc"
DEFAULT_ORACLE = "lru,s3fifo"


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("shadow")(shadow)


def shadow(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Mooncake JSONL, or one block id a line; .gz too.")],
    capacity: Annotated[int, typer.Option(metavar="BLOCKS", help="How many blocks the cache holds.")],
    policy: Annotated[
        str | None, typer.Option(metavar="A,B,…", help=f"Which policies.  [{DEFAULT}; with --oracle {DEFAULT_ORACLE}]")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Count as libcachesim's LRU and S3-FIFO do, each id by itself.")
    ] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Replay the block ids of TRACE through eviction policies and print the share of blocks that each would hit.

    Requests with hash_ids hit their leading cached blocks, are looked up whole, then inserted tail first, as in vLLM.
    With one id a line each line is a request of one block. Nothing runs in between and no output is cached.
    """
    from replay.eviction import BlockTrace, bound_hits, hits, oracle_hits, read_blocks

    names = _names(policy, capacity, oracle)
    blocks = read_blocks(trace)
    total = sum(map(len, blocks.requests))
    if oracle and blocks.chained:
        note("--oracle: the blocks of a request are counted one by one, in prompt order")
    count = oracle_hits if oracle else hits
    ratios = {name: count(name, blocks, capacity) / total for name in names}
    single = BlockTrace([(block,) for block in blocks.blocks()], chained=False)
    infinite, belady = bound_hits(single if oracle else blocks, capacity)
    too_long = 0 if oracle else sum(len(request) > capacity for request in blocks.requests)
    if too_long:
        note(f"{too_long} requests have more blocks than the cache: only their first {capacity} were kept")
    document = {
        "blocks": total,
        "capacity": capacity,
        "hit_ratio": ratios,
        "bounds": {"belady": belady / total, "infinite": infinite / total},
        "requests": len(blocks.requests),
        "distinct_blocks": total - infinite,
        "requests_too_long": too_long,
        "counting": "prefix" if blocks.chained and not oracle else "single",
        "oracle": oracle,
    }
    emit(document, output, *_tables(document))


def _names(policy: str | None, capacity: int, oracle: bool) -> list[str]:
    """Return the policies to run, once each; raise InvalidInput for what cannot be run."""
    from engine_patch.oracle import MIN_S3FIFO_CAPACITY
    from engine_patch.oracle import POLICIES as ORACLE_POLICIES
    from engine_patch.policy import POLICIES

    if capacity < 1:
        raise InvalidInput(f"--capacity is {capacity}", "a cache holds 1 block or more")
    given = policy if policy is not None else DEFAULT_ORACLE if oracle else DEFAULT
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    if names == [""]:
        raise InvalidInput("--policy names no policy", f"choose among {', '.join(POLICIES)}")
    for name in names:
        if name not in POLICIES:
            raise InvalidInput(f"--policy: there is no policy {name!r}", f"choose among {', '.join(POLICIES)}")
        if oracle and name not in ORACLE_POLICIES:
            raise InvalidInput(
                f"--oracle cannot run {name}",
                f"it follows libcachesim's {' and '.join(ORACLE_POLICIES)}; leave --oracle out for the others",
            )
    if oracle and "s3fifo" in names and capacity < MIN_S3FIFO_CAPACITY:
        raise InvalidInput(
            f"--oracle: libcachesim's S3-FIFO cannot run with {capacity} blocks",
            f"give --capacity {MIN_S3FIFO_CAPACITY} or more, or --policy lru",
        )
    return names


def _tables(document: dict[str, Any]) -> list[Table]:
    ratios, bounds = document["hit_ratio"], document["bounds"]
    best = max(ratios.values())
    rows: list[tuple[object, ...]] = [
        (name, f"{100 * ratio:.2f} %", f"{100 * (ratio - best):+.2f}" if ratio < best else "best")
        for name, ratio in ratios.items()
    ]
    rows += [(f"({name})", f"{100 * ratio:.2f} %", f"{100 * (ratio - best):+.2f}") for name, ratio in bounds.items()]
    title = f"{document['blocks']} blocks of {document['requests']} requests, {document['capacity']} blocks of cache"
    return [Table(("policy", "hit ratio", "points from the best"), rows, title)]
