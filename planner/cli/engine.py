"""`cacheroute engine`: how vLLM servers with the engine patch choose their eviction policy, and orders to them.

Servers are asked at `/v1/wakman`, all at once. The worst exit code of all of them is the command's: 5 one cannot be
reached or does not answer, 3 one refused (no such route, a wrong key, an engine that is not attached).
"""

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from planner.cli.output import Format, OutputOption, Table, emit, note
from planner.cli.pool import login, said

if TYPE_CHECKING:
    from collections.abc import Sequence

UrlOption = Annotated[
    list[str], typer.Option("--url", metavar="URL", envvar="CACHEROUTE_ENGINE_URLS", help="A server; may be repeated.")
]
KeyOption = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar="CACHEROUTE_ENGINE_API_KEY", help="The servers' --api-key."),
]


class Server(TypedDict):
    """What one server said. error: empty, or why it said nothing.  engines: its data-parallel engines."""

    url: str
    error: str
    engines: list[dict[str, Any]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="The engine patch: see it, steer it, judge policies for it.")
    group.command("status")(status)
    group.command("policy")(policy)
    group.command("history")(history)
    for name in ("engine_shadow", "engine_evaluate"):
        _register(name, group)
    app.add_typer(group, name="engine")


def status(
    url: UrlOption,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Exit code 1 unless every engine is attached, its shadow runs and its control file is obeyed.",
        ),
    ] = False,
    api_key: KeyOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show which eviction policy is live in each engine, what the shadow expects of each, and the last decision."""
    servers, code = _ask(url, "status", api_key)
    _show(servers, output, *_status_tables(servers))
    engines = [(server["url"], engine) for server in servers for engine in server["engines"]]
    for where, engine in engines:
        for fault in faults_of(engine):
            note(f"{where} engine {engine.get('engine', 0)}: {fault}")
    if code:
        raise typer.Exit(code)
    if check and (not engines or any(faults_of(engine) for _, engine in engines)):
        raise typer.Exit(1)


def policy(
    name: Annotated[str, typer.Argument(metavar="POLICY", help="auto, lru, s3fifo, arc, …, or off.")],
    url: UrlOption,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; kept in the engines' history.")],
    actor: Annotated[str | None, typer.Option(help="Who does so.  [the login name]")] = None,
    api_key: KeyOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Hold an eviction policy in every engine, or let each choose again (auto). Requests in flight go on.

    `off` gives the queue back to vLLM for good: only a restart attaches again. Orders are forgotten at a restart.
    """
    order = {"policy": name, "reason": said(reason), "actor": actor or login()}
    servers, code = _ask(url, "policy", api_key, order)
    columns = ("server", "engine", "ok", "from", "to", "mode", "error")
    rows = [
        (server["url"], engine.get("engine"), _yes(engine.get("ok")), *(engine.get(column) for column in columns[3:]))
        for server in servers
        for engine in server["engines"]
    ]
    _show(servers, output, *([Table(columns, rows)] if rows else []))
    if code:
        raise typer.Exit(code)


def history(
    url: UrlOption,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Most entries an engine, the newest.")] = 20,
    api_key: KeyOption = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show the switches of each engine, newest first: from and to, who or what caused it, and why."""
    from datetime import UTC, datetime

    servers, code = _ask(url, "history", api_key)
    columns = ("at", "server", "engine", "from", "to", "cause", "actor", "why")
    rows = []
    for server in servers:
        for engine in server["engines"]:
            engine["history"] = list(reversed(engine.get("history") or []))[:limit]
            for entry in engine["history"]:
                at = datetime.fromtimestamp(float(entry.get("at") or 0), UTC).isoformat(" ", "seconds")
                what = (entry.get(column) for column in columns[3:])
                rows.append((at, server["url"], engine.get("engine"), *what))
    _show(servers, output, *([Table(columns, rows)] if rows else []))
    if code:
        raise typer.Exit(code)


def faults_of(engine: dict[str, Any]) -> "list[str]":
    """Return what is amiss with an engine, by its status, in words for an operator."""
    if engine.get("error"):
        return [str(engine["error"])]
    if not engine.get("attached"):
        return [f"not attached: {engine.get('reason') or 'it does not say why'}"]
    found = []
    shadow = engine.get("shadow") or {}
    if engine.get("mode") == "auto" and not shadow.get("up"):
        found.append("the shadow process does not run, so nothing is decided" + _because(shadow.get("error")))
    file = engine.get("control_file") or {}
    if file.get("state") == "ignored":
        found.append(f"the control file {file.get('path')} is ignored{_because(file.get('why'))}")
    return found


def _show(servers: "Sequence[Server]", output: Format, *tables: Table) -> None:
    """Print the document, or its tables; nothing, not even an empty line, where all that is to say are faults."""
    if tables or output is not Format.TABLE:
        emit({"servers": servers}, output, *tables)


def _because(why: object) -> str:
    return f": {why}" if why else ""


def _status_tables(servers: "Sequence[Server]") -> list[Table]:
    engines = [(server["url"], engine) for server in servers for engine in server["engines"]]
    if not engines:
        return []
    rates = {id(engine): _rates(engine) for _, engine in engines}
    policies = list(dict.fromkeys(name for found in rates.values() for name in found))
    columns = (
        "server",
        "engine",
        "attached",
        "policy",
        "mode",
        "since",
        "switches",
        "residual",
        *(f"hit {p}" for p in policies),
    )
    rows = [
        (
            where,
            engine.get("engine"),
            _yes(engine.get("attached")),
            engine.get("policy"),
            engine.get("mode"),
            _time(engine.get("since")),
            engine.get("switches"),
            engine.get("residual"),
            *(rates[id(engine)].get(name) for name in policies),
        )
        for where, engine in engines
    ]
    tables = [Table(columns, rows)]
    said_rows = [
        (where, engine.get("engine"), text)
        for where, engine in engines
        if (text := (engine.get("last_decision") or {}).get("text"))
    ]
    if said_rows:
        tables.append(Table(("server", "engine", "last decision"), said_rows))
    return tables


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _rates(engine: dict[str, Any]) -> dict[str, float]:
    """Return the hit rates in tokens that the shadow expects of each policy."""
    found = (engine.get("shadow") or {}).get("rates") or (engine.get("last_decision") or {}).get("rates") or {}
    return {str(name): rate for name, rate in found.items()}


def _time(since: object) -> str | None:
    from datetime import UTC, datetime

    if not isinstance(since, int | float) or not since:
        return None
    return datetime.fromtimestamp(since, UTC).isoformat(" ", "seconds")


def _ask(
    urls: "Sequence[str]", what: str, api_key: str | None, order: dict[str, str] | None = None
) -> tuple[list[Server], int]:
    """Return what all servers say, in order, and the worst exit code; their faults go to standard error."""
    from concurrent.futures import ThreadPoolExecutor

    from planner.wakman_client import ask, base_of

    bases = list(dict.fromkeys(base_of(url) for listed in urls for url in listed.split(",") if url.strip()))
    with ThreadPoolExecutor(min(32, max(1, len(bases)))) as threads:
        answers = list(threads.map(lambda base: ask(base, what, api_key, order), bases))
    servers, code = [], 0
    for base, answer in zip(bases, answers, strict=True):
        servers.append(Server(url=base, error=answer.error, engines=answer.engines))
        if answer.error:
            note(f"{base}: {answer.error}")
        code = max(code, answer.exit_code)
    return servers, code


def _register(name: str, group: typer.Typer) -> None:
    """Add another file's command to the group."""
    from importlib import import_module

    import_module(f"planner.cli.{name}").register(group)
