"""Names the patch's Prometheus metrics once, makes them of the engines' statuses, and shows them on vLLM's `/metrics`.

1. `families` turns statuses into metrics, `text` writes them as Prometheus reads them (for `/v1/wakman/metrics`).
2. vLLM's `/metrics` shows what processes of its API server registered, and the engine is another process. So the
   endpoint plugin asks the engines every few seconds and gives what they say to `Exporter`, in the API server.
3. With several API servers `/metrics` adds up what all of them wrote, so exactly one exports, the first (`exports`).
4. A counter follows the engine's: it is advanced by what the engine counted since, so a restarted engine, which counts
   from 0 again, never takes it back.
5. Every series has the label `engine`, the number among the data-parallel engines, as vLLM's own have.
6. What a shadow expects is shown while it runs and its engine is attached; of a shadow that has ended nothing is known.
   An engine that does not answer keeps its last values, as old as its timestamp says.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine_patch.settings import AUTO, known_policies

GAUGE, COUNTER = "gauge", "counter"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Family:
    """One metric. kind: `gauge` or `counter`.  samples: values of the labels (in `labels`' order) and the number."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ("engine",)
    samples: list[tuple[tuple[str, ...], float]] = field(default_factory=list)

    def add(self, *labels: str, value: Any) -> None:
        """Add a sample; a value that is no number (not known yet) is left out."""
        if isinstance(value, bool | int | float) and math.isfinite(value):
            self.samples.append((labels, float(value)))


def _declared() -> tuple[Family, ...]:
    return (
        Family("wakman_attached", GAUGE, "1: the patch holds this engine's free-block queue; 0: vLLM is as it was."),
        Family("wakman_policy", GAUGE, "1 for the eviction policy that is live.", ("engine", "policy")),
        Family("wakman_automatic", GAUGE, "1: the engine picks its policy by itself; 0: an operator's is held."),
        Family("wakman_switches_total", COUNTER, "Changes of the live policy.", ("engine", "from", "to", "cause")),
        Family(
            "wakman_shadow_hit_rate",
            GAUGE,
            "Hit rate in tokens that each policy would have had of late, by the shadow.",
            ("engine", "policy"),
        ),
        Family("wakman_residual", GAUGE, "Shadow of the live policy less the engine's own hit rate, as a share."),
        Family("wakman_shadow_up", GAUGE, "1: the shadow process runs."),
        Family("wakman_events_dropped_total", COUNTER, "Events that the shadow never got: it was slow, or ended."),
        Family("wakman_decisions_total", COUNTER, "Decisions of the shadow by their outcome.", ("engine", "reason")),
        Family("wakman_control_file_ignored_total", COUNTER, "Contents of the control file that were not obeyed."),
        Family("wakman_status_timestamp_seconds", GAUGE, "When this engine was asked last and answered, unix seconds."),
    )


def families(statuses: Iterable[Mapping[str, Any]], now: float) -> list[Family]:
    """Return all metrics of these engines; now: unix s. A status with an `error` only lacks the engine's series."""
    found = _declared()
    by_name = {family.name: family for family in found}

    def add(name: str, *labels: Any, value: Any) -> None:
        by_name[name].add(*map(str, labels), value=value)

    for status in statuses:
        if status.get("error"):
            continue
        engine, attached = status.get("engine", 0), bool(status.get("attached"))
        add("wakman_attached", engine, value=attached)
        add("wakman_status_timestamp_seconds", engine, value=now)
        live = status.get("policy") if attached else None
        for policy in known_policies():
            add("wakman_policy", engine, policy, value=policy == live)
        add("wakman_automatic", engine, value=attached and status.get("mode") == AUTO)
        for row in status.get("switch_counts") or ():
            add("wakman_switches_total", engine, row["from"], row["to"], row["cause"], value=row["count"])
        shadow = status.get("shadow") or {}
        up = bool(attached and shadow.get("up"))
        add("wakman_shadow_up", engine, value=up)
        if up:
            rates = shadow.get("rates") or (status.get("last_decision") or {}).get("rates") or {}
            for policy, rate in rates.items():
                add("wakman_shadow_hit_rate", engine, policy, value=rate)
            add("wakman_residual", engine, value=status.get("residual"))
        add("wakman_events_dropped_total", engine, value=status.get("drops"))
        for reason, count in (status.get("decisions") or {}).items():
            add("wakman_decisions_total", engine, reason, value=count)
        file = status.get("control_file") or {}
        add("wakman_control_file_ignored_total", engine, value=file.get("ignored"))
    return list(found)


def text(found: Sequence[Family]) -> str:
    """Return the metrics in Prometheus' text format 0.0.4; a metric without a sample is left out."""
    lines = []
    for family in found:
        if not family.samples:
            continue
        lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
        for labels, value in family.samples:
            pairs = ",".join(f'{name}="{_escaped(label)}"' for name, label in zip(family.labels, labels, strict=True))
            lines.append(f"{family.name}{{{pairs}}} {value!r}")
    return "\n".join([*lines, ""])


def exports(client_index: int) -> bool:
    """Return whether this process of the API server is the one that exports."""
    return client_index == 0


class Exporter:
    """The metrics in `prometheus_client`'s registry of this process; one a process, since names register once."""

    def __init__(self) -> None:
        """Register all names; ModuleNotFoundError without prometheus_client, ValueError when they are there already."""
        from prometheus_client import Counter, Gauge

        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}
        self._shown: dict[str, set[tuple[str, ...]]] = {}
        self._metrics: dict[str, Any] = {}
        for family in _declared():
            if family.kind == COUNTER:
                self._metrics[family.name] = Counter(family.name, family.help, family.labels)
            else:
                # One process writes; the newest value is the one to show when vLLM joins the files of all processes.
                self._metrics[family.name] = Gauge(
                    family.name, family.help, family.labels, multiprocess_mode="mostrecent"
                )

    def show(self, found: Iterable[Family]) -> None:
        """Show these values from now on; a gauge that its engine does not tell any more becomes NaN."""
        found = list(found)
        told = {labels[0] for family in found for labels, _ in family.samples}
        for family in found:
            metric = self._metrics[family.name]
            for labels, value in family.samples:
                series = metric.labels(*labels)
                if family.kind == COUNTER:
                    counted = self._counted.get((family.name, labels), 0.0)
                    series.inc(value - counted if value >= counted else value)
                    self._counted[(family.name, labels)] = value
                else:
                    series.set(value)
            if family.kind == GAUGE:
                now = {labels for labels, _ in family.samples}
                before = self._shown.get(family.name, set())
                # A series cannot be removed from the files of several processes, but NaN ends it in Prometheus.
                for labels in before - now:
                    if labels[0] in told:
                        metric.labels(*labels).set(math.nan)
                self._shown[family.name] = now | {labels for labels in before if labels[0] not in told}


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
