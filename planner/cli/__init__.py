"""The command line: one file a command group, each adding itself to the application.

Commands import what they need when they run, so that `cacheroute serve` never loads numpy and `--help` stays quick.
Exit codes: 0 ok, 1 ran and the answer is no, 2 usage or unreadable input, 3 invalid or refused, 4 conflict,
5 a server cannot be reached.
"""

import sys

GROUPS = ("serve", "sim_engine", "plan", "planner", "calibrate", "status", "engine", "lab", "demo")
ROOMS = ("service", "replay", "planner", "engine_patch")


def main() -> None:
    """Run the command line; one line on standard error and the exit code of the fault when there is one."""
    try:
        import typer
    except ModuleNotFoundError:
        sys.exit(
            "cacheroute: the command line is not installed; pip install 'cacheroute[planner]' (or [service], [demo])"
        )
    from importlib import import_module

    from service.errors import CacheRouteError

    app = typer.Typer(
        name="cacheroute",
        help="Cache-aware routing for fleets of vLLM servers behind Envoy.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for group in GROUPS:
        import_module(f"planner.cli.{group}").register(app)
    try:
        app()
    except CacheRouteError as exc:
        print(f"cacheroute: {exc}", file=sys.stderr)
        sys.exit(exc.exit_code)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] in ROOMS:
            raise
        print(
            f"cacheroute: this command needs the Python package {exc.name!r}; "
            "pip install 'cacheroute[planner]', or 'cacheroute[demo]' for demo and lab",
            file=sys.stderr,
        )
        sys.exit(2)


def _options() -> None:
    """Cache-aware routing for fleets of vLLM servers behind Envoy."""
