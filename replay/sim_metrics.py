"""vLLM's metrics of a simulated engine, in the text format of Prometheus, under vLLM's names and labels.

Counters and gauges are read from the engine model when scraped. All durations are VIRTUAL seconds (what the simulated
accelerator would have taken), whatever the speed factor; `cacheroute_sim_*` tells virtual time and speed.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replay.block_watch import Evicted
from replay.engine_model import EngineModel
from replay.engine_request import RequestState

# vLLM's own buckets, so that recording rules and dashboards made for it fit.
TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
LATENCY_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
TPOT_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
BLOCK_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1200.0, 1800.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
LABELS = ("model_name", "engine")


class SimMetrics(Collector):
    """The metrics of one engine; `observe_*` are called once per request, the rest costs nothing until scraped."""

    def __init__(
        self, model: EngineModel, model_name: str, name: str, speed: float, *, kv_cache_metrics: bool = False
    ) -> None:
        self._model = model
        self._name = name
        self._speed = speed
        self._values = (model_name, "0")
        self.registry = CollectorRegistry()
        self._success = Counter(
            "vllm:request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._values, reason)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time to first token", TTFT_BUCKETS_S)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Time per output token", TPOT_BUCKETS_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "End to end latency", LATENCY_BUCKETS_S)
        self._queue = self._histogram("request_queue_time_seconds", "Time waiting", LATENCY_BUCKETS_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens", TOKEN_BUCKETS)
        self._output = self._histogram("request_generation_tokens", "Generated tokens", TOKEN_BUCKETS)
        if kv_cache_metrics:
            self._lifetime = self._histogram("kv_block_lifetime_seconds", "Allocation to eviction", BLOCK_BUCKETS_S)
            self._idle = self._histogram("kv_block_idle_before_evict_seconds", "Last use to eviction", BLOCK_BUCKETS_S)
            self._gaps = self._histogram("kv_block_reuse_gap_seconds", "Between two uses", BLOCK_BUCKETS_S)
        self.registry.register(self)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        text += " (virtual seconds)." if name.endswith("seconds") else " of a request."
        family = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._values)

    def observe_first_token(self, state: RequestState) -> None:
        """Count a request that has its first token."""
        assert state.first_token_s is not None
        self._ttft.observe(state.first_token_s - state.arrived_s)

    def observe_finish(self, state: RequestState) -> None:
        """Count a request that ended by itself."""
        assert state.finished_s is not None
        assert state.first_token_s is not None
        assert state.admitted_s is not None
        self._success.labels(*self._values, "length").inc()
        self._e2e.observe(state.finished_s - state.arrived_s)
        self._queue.observe(state.admitted_s - state.arrived_s)
        self._prompt.observe(state.request.prompt_tokens)
        self._output.observe(state.generated)
        if state.generated > 1:
            self._tpot.observe((state.finished_s - state.first_token_s) / (state.generated - 1))

    def observe_abort(self) -> None:
        """Count a request whose client went away."""
        self._success.labels(*self._values, "abort").inc()

    def observe_eviction(self, block: Evicted) -> None:
        """Count a sampled KV block that lost its content; only with `kv_cache_metrics`."""
        self._lifetime.observe(block.lifetime_s)
        self._idle.observe(block.idle_s)
        for gap_s in block.reuse_gaps_s:
            self._gaps.observe(gap_s)

    def render(self) -> bytes:
        """Return the text that /metrics answers with."""
        return generate_latest(self.registry)

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: `collect` needs no dry run."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Read the engine model."""
        model = self._model
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", model.num_running),
            ("vllm:num_requests_waiting", "Requests waiting for admission.", model.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", model.kv_usage),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, text, count in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", model.queried_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", model.hit_tokens),
            ("vllm:prompt_tokens", "Prompt tokens of requests with a first token.", model.prompt_tokens),
            ("vllm:generation_tokens", "Generated tokens.", model.generation_tokens),
            ("vllm:num_preemptions", "Preemptions.", model.preemptions),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._values, count)
            yield counter
        for name, text, value in (
            ("cacheroute_sim_steps", "Steps of the simulated engine.", float(model.steps)),
            ("cacheroute_sim_busy_seconds", "Virtual seconds spent in steps.", model.busy_s),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield self._info(
            "vllm:cache_config_info",
            "The KV cache.",
            {
                "model_name": self._values[0],
                "engine": "0",
                "block_size": str(model.cache.block_size),
                "num_gpu_blocks": str(model.cache.num_blocks),
                "enable_prefix_caching": "True",
            },
        )
        yield self._info(
            "cacheroute_sim_info",
            "The simulated engine; times under vllm: are virtual seconds, wall seconds times speed.",
            {"name": self._name, "preset": model.preset.name, "speed": f"{self._speed:g}"},
        )

    @staticmethod
    def _info(name: str, text: str, labels: dict[str, str]) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=tuple(labels))
        gauge.add_metric(tuple(labels.values()), 1.0)
        return gauge
