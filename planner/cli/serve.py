"""`cacheroute serve`: the external processor."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    listen: Annotated[str | None, typer.Option(help="gRPC address that Envoy dials.  [0.0.0.0:9002]")] = None,
    http: Annotated[str | None, typer.Option(help="Address of metrics and state.  [127.0.0.1:9090]")] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option(metavar="NAME=IP:PORT", help="One vLLM server, as Envoy's cluster lists it.")
    ] = None,
    discover: Annotated[
        str | None,
        typer.Option(help="Find the servers instead: dns:HOST:PORT, srv:NAME or k8s:NAMESPACE/SERVICE[:PORT-NAME]."),
    ] = None,
    key_header: Annotated[
        list[str] | None, typer.Option(help="Header that holds the key; the first present wins.  [x-tenant-id]")
    ] = None,
    redis: Annotated[str | None, typer.Option(envvar="CACHEROUTE_REDIS_URL", help="Where plans come from.")] = None,
    pool: Annotated[str | None, typer.Option(envvar="CACHEROUTE_POOL", help="Which pool this is.  [default]")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that share the gRPC port.  [1]")] = None,
) -> None:
    """Answer an Envoy's external processing requests with endpoints.

    Every setting can also come from the environment as CACHEROUTE_<NAME>; the command line wins. Without Redis, or
    without a plan, requests are balanced by power of two choices.
    """
    import os

    from service.ending import end_when_told

    end_when_told()
    from service.__main__ import run
    from service.settings import load_settings
    from service.telemetry import configure_logging

    settings = load_settings(
        os.environ,
        listen=listen,
        http=http,
        endpoint=tuple(endpoint) if endpoint else None,
        key_header=tuple(key_header) if key_header else None,
        redis_url=redis,
        pool=pool,
        discover=discover,
        workers=workers,
    )
    configure_logging(settings.log_level)
    run(settings)
