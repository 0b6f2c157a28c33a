"""`cacheroute engine history`: the switches of each engine."""

from typing import Annotated

import typer

from planner.cli.engine_servers import KeyOption, UrlOption, ask_all, show, time_of
from planner.cli.output import Format, OutputOption, Table, note


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("history")(history)


def history(
    url: UrlOption,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most entries an engine, the newest.")] = 20,
    api_key: KeyOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show each engine's switches, newest first.

    From and to, who or what caused it, and why. An engine remembers the last 256 since its start.
    """
    servers, _, code = ask_all(url, "history", api_key)
    columns = ("at", "server", "engine", "from", "to", "cause", "actor", "why")
    rows: list[tuple[object, ...]] = []
    for server in servers:
        for engine in server["engines"]:
            engine["history"] = list(reversed(engine.get("history") or []))[:limit]
            if not engine["history"] and not engine.get("error"):
                note(f"{server['url']} engine {engine.get('engine', 0)}: no switch since its start")
            for entry in engine["history"]:
                what = (entry.get(column) for column in columns[3:])
                rows.append((time_of(entry.get("at")), server["url"], engine.get("engine"), *what))
    show({"servers": servers}, output, *([Table(columns, rows)] if rows else []))
    if code:
        raise typer.Exit(code)
