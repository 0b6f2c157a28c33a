"""Every metric and metadata name of the service, once, the registry that holds the values, and how we log.

No label has unbounded values: endpoints are those of the configuration, causes and reasons come from short lists. A key
never appears; the decision metadata that Envoy logs carries its hash.
"""

import json
import logging
import math
import sys
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from structlog.tracebacks import ExceptionDictTransformer

from service.dispatch import REASONS, Reason
from service.fairness import Fairness
from service.fleet import Fleet
from service.table import Current

# Headers and metadata of the Endpoint Picker Protocol v1.
DESTINATION = "x-gateway-destination-endpoint"
LB_NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
# What the gateway conformance suite sends and expects; only with the `conformance` setting.
TEST_SELECTION = "test-epp-endpoint-selection"
TEST_SERVED = "x-conformance-test-served-endpoint"
# On a 429 or 503 of ours: why, for clients and access logs.
DROPPED_REASON = "x-cacheroute-dropped-reason"
EXT_PROC_ATTRIBUTES = "envoy.filters.http.ext_proc"
ATTRIBUTE_UPSTREAM = "upstream.address"
ATTRIBUTE_ATTEMPTS = "upstream.request_attempt_count"

# Metadata of ours, for Envoy's access log and trace tags.
NAMESPACE = "cacheroute"
REASON = "reason"
PLAN_VERSION = "plan_version"
PLAN_AGE_S = "plan_age_s"
KEY_HASH = "key_hash"

# Of the process that supervises workers.
WORKER_UP = "cacheroute_worker_up"
WORKER_RESTARTS = "cacheroute_worker_restarts"

PICK_BUCKETS_S = (5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 2.5e-2, 0.1)


def configure_logging(level: str) -> None:
    """Log JSON lines to standard error."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # Without local variables, which can hold keys and passwords.
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )


def _to_json(value: Any, **options: Any) -> str:
    """Return JSON that every reader takes: it has no infinity, which settings and figures may be; written as text."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class Seldom:
    """Lets one log line a cause through a minute, for faults that come with requests; the rest is in the counters."""

    def __init__(self, period_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Remember causes, so these must come from a short list."""
        self._period_s, self._clock = period_s, clock
        self._next: dict[str, float] = {}

    def may(self, cause: str) -> bool:
        """Return whether a line about this cause may be written now."""
        now = self._clock()
        if now < self._next.get(cause, 0.0):
            return False
        self._next[cause] = now + self._period_s
        return True


class Telemetry:
    """The service's Prometheus metrics; one registry a process, created where the process is assembled."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all metrics in `registry`."""
        self.registry = registry
        # Counted for each request, so as plain numbers: a Counter's lock and child cost ten times as much.
        self.picks: dict[Reason, int] = dict.fromkeys(REASONS, 0)
        self.served: Tally[tuple[str, str]] = Tally()
        self.streams = 0
        registry.register(_Requests(self))
        self.refused = Counter(
            "cacheroute_refused", "Requests answered at once instead of routed.", ["cause"], registry=registry
        )
        self.decide_seconds = Durations(
            "cacheroute_decide_seconds",
            "Time from a request's headers to the reply, inside this process.",
            PICK_BUCKETS_S,
        )
        registry.register(self.decide_seconds)
        self.elsewhere = Counter(
            "cacheroute_served_elsewhere",
            "Responses that another endpoint gave than the first of the pick.",
            ["endpoint"],
            registry=registry,
        )
        self.unknown_endpoint = Counter(
            "cacheroute_served_unknown", "Responses from an address that is no endpoint of ours.", registry=registry
        )
        self.keys_rejected = Counter(
            "cacheroute_keys_rejected",
            "Keys not used: longer than allowed (too_long), or no text (not_utf8).",
            ["cause"],
            registry=registry,
        )
        self.shadow = Counter(
            "cacheroute_shadow",
            "Requests decided in observability mode, by whether the endpoint that served was our pick.",
            ["agrees"],
            registry=registry,
        )
        self.streams_refused = Counter(
            "cacheroute_streams_refused", "Streams closed unanswered because too many are open.", registry=registry
        )
        self.left_to_envoy = Counter(
            "cacheroute_left_to_envoy", "Requests not answered since no endpoint has been found yet.", registry=registry
        )
        self.faults = Counter(
            "cacheroute_faults", "Faults of ours on the request path; the stream was closed.", registry=registry
        )
        self.malformed = Counter(
            "cacheroute_malformed", "Streams closed because a message was no ProcessingRequest.", registry=registry
        )
        self.discovery_failures = Counter(
            "cacheroute_discovery_failures",
            "Answers of the discovery that were not used; the last fleet stays.",
            ["cause"],
            registry=registry,
        )
        self.discovery_changes = Counter(
            "cacheroute_discovery_changes",
            "Endpoints that discovery added, removed or moved.",
            ["change"],
            registry=registry,
        )
        self.tls_reloads = Counter(
            "cacheroute_tls_reloads", "Certificates taken into service without a restart.", registry=registry
        )
        self.tls_failures = Counter(
            "cacheroute_tls_failures", "Certificates not taken; the last good one stays.", ["cause"], registry=registry
        )
        self.table_file_failures = Counter(
            "cacheroute_table_file_failures",
            "Times the copy of the table on disk could not be used or written.",
            ["cause"],
            registry=registry,
        )
        self.readiness_changes = Counter(
            "cacheroute_readiness_changes",
            "Endpoints that became ready or unready, and why.",
            ["endpoint", "to", "cause"],
            registry=registry,
        )
        self.plan_applied = Counter("cacheroute_plan_applied", "Plans taken into service.", registry=registry)
        self.plan_failures = Counter(
            "cacheroute_plan_apply_failures",
            "Plans not taken into service; the last good table stays.",
            ["cause"],
            registry=registry,
        )
        self.plan_unknown = Counter(
            "cacheroute_plan_endpoints_unknown",
            "Endpoints that a plan named when it came into service and the fleet lacked.",
            registry=registry,
        )
        self.store_failures = Counter(
            "cacheroute_store_failures", "Redis calls that failed, by what they were for.", ["call"], registry=registry
        )
        self.rates_dropped = Counter(
            "cacheroute_rates_dropped", "Requests whose count never reached Redis.", registry=registry
        )
        self.rates_sketched = Counter(
            "cacheroute_rates_sketched",
            "Requests of keys beyond rate_keys_max, counted by estimate.",
            registry=registry,
        )

    def forget_endpoint(self, name: str) -> None:
        """Drop the counters of an endpoint that left: names of pods have no end."""
        for key in [key for key in self.served if key[0] == name]:
            del self.served[key]
        self.elsewhere.remove_by_labels({"endpoint": name})
        self.readiness_changes.remove_by_labels({"endpoint": name})

    def watch(self, fleet: Fleet, current: Current, clock: Callable[[], float]) -> None:
        """Export the state of fleet and table, read when scraped instead of updated when changed."""
        self.registry.register(_State(fleet, current, clock))

    def watch_certificate(self, expires_s: Callable[[], float]) -> None:
        """Export when the certificate in service expires; expires_s: Unix time."""
        expiry = Gauge(
            "cacheroute_tls_certificate_expiry_timestamp_seconds",
            "When the certificate in service expires, Unix time.",
            registry=self.registry,
        )
        expiry.set_function(expires_s)

    def watch_limits(self, fairness: Fairness, age_s: Callable[[], float]) -> None:
        """Export how full the fleet is; age_s: how long ago leases were given."""
        self.registry.register(_Limits(fairness, age_s))


class Durations(Collector):
    """A histogram of plain numbers, as above: a Histogram's lock and buckets cost ten times as much."""

    def __init__(self, name: str, help_text: str, bounds_s: Sequence[float]) -> None:
        """bounds_s: upper ends of the buckets, rising."""
        self._name, self._help, self._bounds = name, help_text, bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> list[Metric]:
        """Return the one family."""
        family = HistogramMetricFamily(self._name, self._help)
        ends = [floatToGoString(bound) for bound in (*self._bounds, math.inf)]  # type: ignore[no-untyped-call]
        family.add_metric([], list(zip(ends, accumulate(self._counts), strict=True)), self._sum)
        return [family]


class _Requests(Collector):
    """What is counted for each request."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> list[Metric]:
        picks = CounterMetricFamily(
            "cacheroute_picks", "Requests answered with endpoints, by why the first was chosen.", labels=["reason"]
        )
        for reason, count in self._telemetry.picks.items():
            picks.add_metric([reason], count)
        served = CounterMetricFamily(
            "cacheroute_served",
            "Responses by the endpoint that gave them and their status class.",
            labels=["endpoint", "status"],
        )
        for (endpoint, status), count in list(self._telemetry.served.items()):
            served.add_metric([endpoint, status], count)
        streams = GaugeMetricFamily(
            "cacheroute_streams", "Open ext_proc streams: one a request in flight.", self._telemetry.streams
        )
        return [picks, served, streams]


class _State(Collector):
    def __init__(self, fleet: Fleet, current: Current, clock: Callable[[], float]) -> None:
        self._fleet, self._current, self._clock = fleet, current, clock

    def collect(self) -> list[Metric]:
        table = self._current.table
        metrics: list[Metric] = [
            GaugeMetricFamily("cacheroute_plan_version", "Version of the plan in service, 0: none.", table.version),
            GaugeMetricFamily("cacheroute_plan_age_seconds", "Time since its publication.", table.age_s(self._clock())),
            GaugeMetricFamily("cacheroute_plan_keys", "Keys it admits.", len(table.targets)),
            GaugeMetricFamily(
                "cacheroute_panic", "1 while hardly any endpoint is ready and others are used too.", self._fleet.panic
            ),
        ]
        for name, help_text, value in (
            ("cacheroute_endpoint_ready", "1 when the endpoint gets new requests.", lambda e: float(e.usable)),
            ("cacheroute_endpoint_inflight", "Requests in flight, this process.", lambda e: e.inflight),
            ("cacheroute_endpoint_work_bytes", "Load that picks compare, all processes.", lambda e: e.load),
            ("cacheroute_endpoint_inflight_elsewhere", "The same, other processes.", lambda e: e.inflight_elsewhere),
        ):
            family = GaugeMetricFamily(name, help_text, labels=["endpoint"])
            for endpoint in self._fleet.endpoints:
                family.add_metric([endpoint.name], value(endpoint))
            metrics.append(family)
        return metrics


class _Limits(Collector):
    def __init__(self, fairness: Fairness, age_s: Callable[[], float]) -> None:
        self._fairness, self._age_s = fairness, age_s

    def collect(self) -> list[Metric]:
        one = self._fairness
        return [
            GaugeMetricFamily(name, text, value)
            for name, text, value in (
                ("cacheroute_lease_age_seconds", "Time since leases were given, +Inf: never.", self._age_s()),
                ("cacheroute_fair_keys", "Keys that this process's limits know of.", one.keys),
                ("cacheroute_fair_processes", "Processes that share the limits, as last seen.", one.processes),
                ("cacheroute_fleet_demand", "Requests in flight or just refused, all processes.", one.demand),
                ("cacheroute_fleet_full", "1 while keys are held to their share.", float(one.full)),
            )
        ]
