"""`cacheroute engine`: the engine patch in vLLM servers, seen and steered, and policies judged for it."""

from importlib import import_module

import typer

COMMANDS = ("engine_status", "engine_policy", "engine_history", "engine_shadow", "engine_evaluate")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(no_args_is_help=True, help="The engine patch: see it, steer it, judge policies for it.")
    for name in COMMANDS:
        import_module(f"planner.cli.{name}").register(group)
    app.add_typer(group, name="engine")
