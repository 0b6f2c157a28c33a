"""`cacheroute engine policy`: one order to all engines of all servers, and what became of it at each.

1. An engine obeyed (yes), did not (no), or may have (unknown: it did not answer in time, or the answer was lost on its
   way; a step of the engine comes first). Nothing is taken back where others failed.
2. Unless all obeyed the last line on standard error says how many did and what to do. To give the same order again
   does no harm: who runs by it already changes nothing.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.engine_servers import KeyOption, Server, UrlOption, answered, ask_all, show
from planner.cli.output import Format, OutputOption, Table, note
from planner.cli.pool import login, said

if TYPE_CHECKING:
    from collections.abc import Sequence

# Named here for `--help`, which must not load the policies; a test compares. Servers know best what they have.
NAMES = "auto, lru, s3fifo, s3fifo-25, s3fifo-t2, s3fifo-paper-free, arc, off"


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("policy")(policy)


def policy(
    name: Annotated[str, typer.Argument(metavar="POLICY", help=f"{NAMES}.")],
    url: UrlOption,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; shown by status, and in the history of switches.")],
    actor: Annotated[str | None, typer.Option(help="Who does so.  [the login name]")] = None,
    api_key: KeyOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Hold an eviction policy, or choose again (auto).

    Every engine of every server is ordered; requests in flight go on. `off` gives the queue back to vLLM for good: only
    a restart attaches again. Orders are forgotten at a restart.
    """
    order = {"policy": name, "reason": said(reason), "actor": actor or login()}
    servers, answers, code = ask_all(url, "policy", api_key, order)
    obeyed = [_obeyed(server, answer.unknown) for server, answer in zip(servers, answers, strict=True)]
    columns = ("server", "engine", "obeyed", "from", "to", "mode", "error")
    rows: list[tuple[object, ...]] = []
    for server, one in zip(servers, obeyed, strict=True):
        where = server["url"]
        for engine in server["engines"]:
            what = (engine.get(column) for column in columns[3:])
            rows.append((where, engine.get("engine"), answered(engine, engine.get("ok")), *what))
        if not server["engines"] and len(servers) > 1:
            rows.append((where, None, "unknown" if one is None else "no", None, None, None, server["error"]))
    document = {"servers": [{**server, "obeyed": one} for server, one in zip(servers, obeyed, strict=True)]}
    show(document, output, *([Table(columns, rows)] if rows else []))
    if code:
        if len(rows) > 1:
            _sum_up([str(row[2]) for row in rows], servers, obeyed)
        raise typer.Exit(code)


def _obeyed(server: Server, unknown: bool) -> bool | None:
    """Return whether all engines of a server obeyed; None where that is not known of one, and none refused."""
    engines: list[dict[str, Any]] = server["engines"]
    if not engines:
        return None if unknown else False
    if all(engine.get("ok") for engine in engines):
        return True
    refused = any(not engine.get("ok") and not engine.get("silent") for engine in engines)
    return False if refused else None


def _sum_up(words: "Sequence[str]", servers: "Sequence[Server]", obeyed: "Sequence[bool | None]") -> None:
    left = " ".join(f"--url {server['url']}" for server, one in zip(servers, obeyed, strict=True) if one is not True)
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("yes", "no", "unknown") if word in words)
    maybe = "; unknown: it may have been obeyed, or be yet, see `engine status`" if "unknown" in words else ""
    note(f"obeyed: {counts}{maybe}. Those that obeyed stay so; once mended, give the same order again with {left}")
