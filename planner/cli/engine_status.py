"""`cacheroute engine status`: which policy each engine runs, what its shadow expects, and what is amiss."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.engine_servers import KeyOption, Server, UrlOption, answered, ask_all, show, time_of
from planner.cli.output import Format, OutputOption, Table, note

if TYPE_CHECKING:
    from collections.abc import Sequence

# An engine looks at its control file once a second.
FILE_HANGS_S = 60.0


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("status")(status)


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
    """Show each engine's policy, and what others would hit.

    Of each engine: the eviction policy that is live, since when and who chooses it, the hit rate that its shadow
    expects of each policy (share of prompt tokens), the last decision, and whose order holds a policy.
    """
    servers, _, code = ask_all(url, "status", api_key)
    show({"servers": servers}, output, *_tables(servers))
    amiss = False
    for server in servers:
        for engine in server["engines"]:
            for fault in faults_of(engine):
                amiss = True
                if fault != server["error"]:  # that was said
                    note(f"{server['url']} engine {engine.get('engine', 0)}: {fault}")
    if code:
        raise typer.Exit(code)
    if check and (amiss or not all(server["engines"] for server in servers)):
        raise typer.Exit(1)


def faults_of(engine: dict[str, Any]) -> "list[str]":
    """Return what is amiss with an engine, by its status, in words for an operator."""
    if engine.get("error"):
        return [str(engine["error"])]
    if not engine.get("attached"):
        return [f"not attached: {engine.get('reason') or 'it does not say why'}"]
    found = []
    shadow = engine.get("shadow") or {}
    if engine.get("mode") == "auto" and not shadow.get("up"):
        ended = " (given up: a restart of the engine tries again)" if shadow.get("gave_up") else ""
        found.append(f"the shadow process does not run, so nothing is decided{ended}{_because(shadow.get('error'))}")
    file = engine.get("control_file") or {}
    if file.get("state") == "ignored":
        found.append(f"the control file {file.get('path')} is ignored{_because(file.get('why'))}")
    looked_s = file.get("looked_s")
    if isinstance(looked_s, int | float) and looked_s > FILE_HANGS_S:
        found.append(
            f"the control file {file.get('path')} has not answered for {looked_s:.0f} s; its file system hangs"
        )
    return found


def _because(why: object) -> str:
    return f": {why}" if why else ""


def _tables(servers: "Sequence[Server]") -> list[Table]:
    engines = [
        (server["url"], engine)
        for server in servers
        for engine in (server["engines"] or ([{}] if len(servers) > 1 else []))
    ]
    if not any(engine for _, engine in engines):
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
            answered(engine, engine.get("attached")),
            engine.get("policy"),
            engine.get("mode"),
            time_of(engine.get("since")),
            engine.get("switches"),
            engine.get("residual") if _shadowed(engine) else None,
            *(rates[id(engine)].get(name) for name in policies),
        )
        for where, engine in engines
    ]
    tables = [Table(columns, rows)]
    said_rows = [(where, engine.get("engine"), text) for where, engine in engines if (text := _decision(engine))]
    if said_rows:
        tables.append(Table(("server", "engine", "last decision"), said_rows))
    held_rows = [(where, engine.get("engine"), *held) for where, engine in engines if (held := _held(engine))]
    if held_rows:
        tables.append(Table(("server", "engine", "held", "since", "by", "why"), held_rows))
    return tables


def _held(engine: dict[str, Any]) -> tuple[object, ...]:
    """Return which policy is held, since when, by whom and why; empty where the engine chooses, or is not attached."""
    mode = engine.get("mode")
    if not engine.get("attached") or mode == "auto":
        return ()
    order = engine.get("order") or {}
    if order.get("mode") != mode:
        return mode, time_of(engine.get("mode_since")), "WAKMAN_POLICY", None
    return mode, time_of(order.get("at")), order.get("actor"), order.get("why")


def _shadowed(engine: dict[str, Any]) -> bool:
    """Return whether a shadow runs; of one that has ended nothing is shown as if it were live."""
    return bool(engine.get("attached") and (engine.get("shadow") or {}).get("up"))


def _decision(engine: dict[str, Any]) -> str:
    """Return the last decision as a sentence; empty where there was none, or its shadow has ended."""
    decision = engine.get("last_decision") or {}
    text = str(decision.get("text") or "") if _shadowed(engine) else ""
    if text and decision.get("live") not in (None, engine.get("policy")) and not decision.get("switch"):
        return f"(before the last switch) {text}"
    return text


def _rates(engine: dict[str, Any]) -> dict[str, float]:
    """Return the hit rates in tokens that the shadow expects of each policy."""
    if not _shadowed(engine):
        return {}
    found = (engine.get("shadow") or {}).get("rates") or (engine.get("last_decision") or {}).get("rates") or {}
    return {str(name): rate for name, rate in found.items()}
