"""The options of one simulated engine, and what is refused of them."""

from dataclasses import dataclass

from engine_patch.settings import AUTO, PRESETS, known_policies
from service.errors import InvalidInput
from service.settings import split_address


@dataclass(frozen=True, slots=True)
class SimEngineSettings:
    """What one simulated engine runs with.

    kv_blocks, max_model_len and eviction_interval_s: None for the preset's.
    """

    listen: str = "127.0.0.1:8000"
    name: str = "sim-engine"
    model: str = "sim-model"
    preset: str = "70b-fp8-tp2"
    kv_blocks: int | None = None
    block_size: int = 16
    max_batched_tokens: int = 8192
    max_seqs: int = 1024
    max_model_len: int | None = None
    speed: float = 1.0
    stream_interval_s: float = 0.02
    drain_s: float = 5.0
    kv_cache_metrics: bool = False
    kv_cache_metrics_sample: float = 0.01
    eviction_policy: str = "lru"
    eviction_interval_s: float | None = None
    eviction_preset: str = "default"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InvalidInput that lists every fault."""
        faults = []
        try:
            split_address(self.listen)
        except ValueError as exc:
            faults.append(f"--listen {exc}")
        if not 0 < self.speed < float("inf"):
            faults.append(f"--speed {self.speed:g} is not a finite number above 0")
        if not 0.001 <= self.stream_interval_s < float("inf"):
            faults.append(f"--stream-interval-s {self.stream_interval_s:g} is not a time of at least 0.001 s")
        if not 0 <= self.drain_s < float("inf"):
            faults.append(f"--drain-s {self.drain_s:g} is not a time of at least 0 s")
        if not 0 < self.kv_cache_metrics_sample <= 1:
            faults.append(f"--kv-cache-metrics-sample {self.kv_cache_metrics_sample:g} is not above 0 and at most 1")
        if self.eviction_policy not in (AUTO, *known_policies()):
            known = ", ".join((AUTO, *known_policies()))
            faults.append(f"--eviction-policy {self.eviction_policy!r} is none of {known}")
        if self.eviction_interval_s is not None and not 0 < self.eviction_interval_s < float("inf"):
            faults.append(f"--eviction-interval-s {self.eviction_interval_s:g} is not a time above 0 s")
        if self.eviction_preset not in PRESETS:
            faults.append(f"--eviction-preset {self.eviction_preset!r} is none of {', '.join(PRESETS)}")
        for option, value in (
            ("--kv-blocks", self.kv_blocks),
            ("--block-size", self.block_size),
            ("--max-model-len", self.max_model_len),
        ):
            if value is not None and value < 1:
                faults.append(f"{option} {value} is below 1")
        if faults:
            raise InvalidInput("; ".join(faults), "correct the options")
