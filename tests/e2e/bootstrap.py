"""Changes to the lab's Envoy bootstrap that tests make, on the JSON document that Envoy reads."""

from typing import Any

from service.telemetry import DESTINATION, TEST_SELECTION, TEST_SERVED

# Streamed both ways and never waited for, as Istio and the Envoy AI Gateway send everything to an endpoint picker.
FULL_DUPLEX = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
Json = dict[str, Any]


def processor(manager: Json) -> Json:
    """Return the ext_proc filter of a connection manager."""
    return filter_of(manager, "envoy.filters.http.ext_proc")


def filter_of(manager: Json, name: str) -> Json:
    """Return an HTTP filter's configuration by the filter's name."""
    config: Json = next(f["typed_config"] for f in manager["http_filters"] if f["name"] == name)
    return config


def put_first(manager: Json, name: str, kind: str, config: Json) -> None:
    """Put an HTTP filter before all others; kind: its message below envoy.extensions.filters.http."""
    url = f"type.googleapis.com/envoy.extensions.filters.http.{kind}"
    manager["http_filters"].insert(0, {"name": name, "typed_config": {"@type": url, **config}})


def route(manager: Json) -> Json:
    """Return the only route of a connection manager."""
    found: Json
    (found,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    return found


def send_all(manager: Json) -> None:
    """Send every header and accept every mutation, as gateways do that know no particular endpoint picker."""
    config = processor(manager)
    del config["forward_rules"], config["mutation_rules"]


def forward(manager: Json, *names: str) -> None:
    """Let the service see these headers too."""
    patterns = processor(manager)["forward_rules"]["allowed_headers"]["patterns"]
    patterns += [{"exact": name} for name in names]


def allow(manager: Json, *names: str) -> None:
    """Let the service set these headers, and no others: Envoy's bound on a regex leaves no room for all."""
    processor(manager)["mutation_rules"]["allow_expression"]["regex"] = "|".join(names)


def conform(manager: Json) -> None:
    """Pass through what the gateway conformance suite uses beyond the protocol."""
    forward(manager, TEST_SELECTION)
    allow(manager, DESTINATION, TEST_SERVED)


def check_health(cluster: Json) -> None:
    """Make Envoy pass by a service that says or seems to be down: in full duplex it fails open no other way."""
    check = {"timeout": "1s", "interval": "0.5s", "no_traffic_interval": "0.5s"}
    service = {"grpc_health_check": {"service_name": "readiness"}}
    cluster["health_checks"] = [{**check, "unhealthy_threshold": 1, "healthy_threshold": 1, **service}]
    # Envoy holds the second change of health within a second back by default.
    cluster["common_lb_config"] = {"healthy_panic_threshold": {"value": 0}, "update_merge_window": "0s"}


def override(service: str, **more: Any) -> Json:
    """Return a route's `typed_per_filter_config` that sends its requests to another external processor."""
    return {
        "envoy.filters.http.ext_proc": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": service}}, **more},
        }
    }
