"""`cacheroute sim-engine`: one simulated vLLM."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("sim-engine")
    def sim_engine(
        listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:8000",
        name: Annotated[str, typer.Option(help="Name of this engine in request ids and metrics.")] = "sim-engine",
        model: Annotated[str, typer.Option(help="Name of the model that it serves.")] = "sim-model",
        preset: Annotated[
            str, typer.Option(help="Whose step times: 70b-fp8-tp2, 8b-bf16-tp1 or 70b-bf16-tp2.")
        ] = "70b-fp8-tp2",
        kv_blocks: Annotated[int | None, typer.Option(help="KV blocks; the preset's when left out.")] = None,
        block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
        max_model_len: Annotated[
            int | None, typer.Option(help="Longest prompt and answer together, in tokens; the preset's when left out.")
        ] = None,
        speed: Annotated[float, typer.Option(help="Virtual seconds a wall second.")] = 1.0,
        stream_interval_s: Annotated[float, typer.Option(help="Wall seconds between two events of a stream.")] = 0.02,
        drain_s: Annotated[float, typer.Option(help="Wall seconds for requests in flight after SIGTERM.")] = 5.0,
        kv_cache_metrics: Annotated[
            bool, typer.Option("--kv-cache-metrics", help="Export how long KV blocks live and lie idle, as vLLM does.")
        ] = False,
        kv_cache_metrics_sample: Annotated[
            float, typer.Option(metavar="SHARE", help="Which share of the blocks is watched for that.")
        ] = 0.01,
        eviction_policy: Annotated[
            str, typer.Option(help="Which KV block goes first: lru, s3fifo, arc, …; auto: the engine patch decides.")
        ] = "lru",
        eviction_interval_s: Annotated[
            float | None,
            typer.Option(
                help="Virtual seconds between two decisions, and that a policy stays at least.  [60; paper: 900]"
            ),
        ] = None,
        eviction_preset: Annotated[str, typer.Option(help="How auto decides: default or paper.")] = "default",
        seed: Annotated[int, typer.Option(help="Decides the text of answers; same for all engines of a fleet.")] = 0,
    ) -> None:
        """Run one simulated vLLM: OpenAI's API, vLLM's metrics, a real prefix cache, modelled step times."""
        from replay.sim_engine import run
        from replay.sim_engine_settings import SimEngineSettings

        run(
            SimEngineSettings(
                listen=listen,
                name=name,
                model=model,
                preset=preset,
                kv_blocks=kv_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                speed=speed,
                stream_interval_s=stream_interval_s,
                drain_s=drain_s,
                kv_cache_metrics=kv_cache_metrics,
                kv_cache_metrics_sample=kv_cache_metrics_sample,
                eviction_policy=eviction_policy,
                eviction_interval_s=eviction_interval_s,
                eviction_preset=eviction_preset,
                seed=seed,
            )
        )
