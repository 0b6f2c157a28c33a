"""`cacheroute lab`: a whole fleet on this machine, kept up for trying by hand."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from replay.lab import Lab

LOOK_S = 0.5
LAST_LINES = 5


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lab")(lab)


def lab(
    engines: Annotated[int, typer.Option(help="Simulated vLLM servers.")] = 6,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Envoy's port; 0 takes a free one.")] = 0,
    speed: Annotated[float, typer.Option(help="How much faster than real time the engines run.")] = 1.0,
    preset: Annotated[
        str, typer.Option(help="Engine and model: 70b-fp8-tp2, 8b-bf16-tp1 or 70b-bf16-tp2.")
    ] = "70b-fp8-tp2",
    kv_blocks: Annotated[int | None, typer.Option(help="KV-cache blocks of an engine.  [the preset's]")] = None,
    eviction: Annotated[
        str, typer.Option(help="Which KV block goes first: lru, s3fifo, arc, …; auto: each engine decides by itself.")
    ] = "lru",
    slots: Annotated[int, typer.Option(help="Keys that one engine keeps warm, on average.")] = 64,
    replica_cap: Annotated[float, typer.Option(help="Requests/s of one key that one engine bears.")] = 4.0,
    plan_interval_s: Annotated[float, typer.Option(help="Seconds between two plans.")] = 30.0,
    planner: Annotated[bool, typer.Option(help="Run the planner.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the engines' answers.")] = 0,
    workdir: Annotated[Path | None, typer.Option(help="Keep logs and configuration here.  [temporary]")] = None,
) -> None:
    """Start Valkey, Envoy, engines, the service and the planner on 127.0.0.1, and keep them up until Ctrl-C."""
    from replay.lab import Lab, LabSettings

    settings = LabSettings(
        engines=engines,
        gateway_port=port,
        speed=speed,
        preset=preset,
        kv_blocks=kv_blocks,
        eviction_policy=eviction,
        slots_per_endpoint=slots,
        replica_cap_rps=replica_cap,
        plan_interval_s=plan_interval_s,
        planner=planner,
        seed=seed,
        workdir=workdir,
    )
    typer.echo(f"starting {engines} engines, Valkey, the service and Envoy …", err=True)
    try:
        with Lab(settings) as running:
            typer.echo(describe(running))
            _watch(running)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing is left running", err=True)


def describe(running: "Lab") -> str:
    """Return the addresses of a running lab and commands to paste."""
    rows = [
        ("gateway (Envoy)", running.gateway_url),
        ("service", running.service_url),
        ("Envoy admin", running.envoy_admin_url),
        ("Valkey", f"{running.redis_url}   pool {running.pool}"),
        *((e.name, e.url) for e in running.engines),
        ("logs", str(running.workdir)),
    ]
    width = max(len(name) for name, _ in rows)
    body = f'{{"model": "{running.model}", "prompt": "the cat sat on the mat", "max_tokens": 32}}'
    stream = body.replace("}", ', "stream": true}')
    url, json_type = f"{running.gateway_url}/v1/completions", "-H 'content-type: application/json'"
    lines = [
        *(f"{name:<{width}}  {where}" for name, where in rows),
        "",
        "# a request of tenant acme; the response header x-cacheroute-served names the engine",
        f"curl -si {url} {json_type} -H 'x-tenant-id: acme' -d '{body}'",
        f"curl -sN {url} {json_type} -H 'x-tenant-id: acme' -d '{stream}'",
        "# where acme goes and why, what is in flight, which plan is served",
        f"curl -s '{running.service_url}/explain?key=acme'",
        f"curl -s {running.service_url}/fleet",
        f"curl -s {running.service_url}/table",
        "# plan now, from the rates so far",
        _once(running),
        "# by which policy an engine evicts KV blocks and why; let it decide by itself",
        f"{_ourselves()} engine status --url {running.engines[0].url}",
        f"{_ourselves()} engine policy auto --url {running.engines[0].url} --reason 'trying it'",
        "",
        "Ctrl-C ends it all.",
    ]
    return "\n".join(lines)


def _once(running: "Lab") -> str:
    endpoints = " ".join(f"--endpoint {e.name}={e.address}" for e in running.engines)
    settings = running.settings
    return (
        f"{_ourselves()} planner once --force --redis {running.redis_url} --pool {running.pool} {endpoints}"
        f" --slots {settings.slots_per_endpoint} --replica-cap {settings.replica_cap_rps:g}"
    )


def _watch(running: "Lab") -> None:
    """Wait for Ctrl-C; say once when a part ends by itself."""
    import time

    gone: set[str] = set()
    while True:
        time.sleep(LOOK_S)
        for part in running.parts:
            if part not in gone and running.pid(part) is None:
                gone.add(part)
                last = running.log_tail(part, LAST_LINES)
                typer.echo(f"{part} ended by itself; its last lines:\n{last}", err=True)


def _ourselves() -> str:
    """Return how this command line is called from any shell, also when its environment is not active."""
    import shlex
    import shutil
    import sys

    return "cacheroute" if shutil.which("cacheroute") else shlex.join([sys.executable, "-m", "planner.cli"])
