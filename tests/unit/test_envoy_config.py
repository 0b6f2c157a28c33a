"""The lab's Envoy bootstrap: each rule of the module by what the document says, and by Envoy's own judgement."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replay.envoy_config import EnvoySettings, build_bootstrap
from replay.programs import envoy_program
from service.errors import InvalidInput

TYPE = "type.googleapis.com/envoy.extensions."
SETTINGS = EnvoySettings(
    listen="127.0.0.1:18080",
    admin="127.0.0.1:18081",
    service="127.0.0.1:18082",
    engines=("127.0.0.1:18083", "127.0.0.1:18084"),
    access_log="/dev/null",
    key_headers=("x-key",),
)
LB_KEY = "x-gateway-destination-endpoint"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_bootstrap(SETTINGS)


@pytest.fixture
def listener(document: dict[str, Any]) -> dict[str, Any]:
    [one] = document["static_resources"]["listeners"]
    return one


@pytest.fixture
def connections(listener: dict[str, Any]) -> dict[str, Any]:
    [chain] = listener["filter_chains"]
    [http] = chain["filters"]
    return http["typed_config"]


@pytest.fixture
def processor(connections: dict[str, Any]) -> dict[str, Any]:
    return connections["http_filters"][0]["typed_config"]


@pytest.fixture
def clusters(document: dict[str, Any]) -> dict[str, Any]:
    return {c["name"]: c for c in document["static_resources"]["clusters"]}


@pytest.fixture
def route(connections: dict[str, Any]) -> dict[str, Any]:
    [host] = connections["route_config"]["virtual_hosts"]
    [route] = host["routes"]
    return route["route"]


def test_envoy_accepts_it(document: dict[str, Any], tmp_path: Path) -> None:
    """The real Envoy finds no fault in the document."""
    try:
        program = envoy_program()
    except InvalidInput as exc:
        pytest.skip(str(exc))
    file = tmp_path / "envoy.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [program, "--mode", "validate", "-c", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_same_settings_give_the_same_document(document: dict[str, Any]) -> None:
    """Nothing but the settings decides the document."""
    assert build_bootstrap(SETTINGS) == document


def test_only_loopback_is_listened_on(document: dict[str, Any], listener: dict[str, Any]) -> None:
    """The addresses are those of the settings, and a taken port is refused instead of shared."""
    assert listener["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 18080}
    assert document["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 18081}
    assert listener["enable_reuse_port"] is False


def test_destination_of_a_client_is_removed_first(connections: dict[str, Any]) -> None:
    """The destination header is removed before any filter sees the request."""
    [early] = connections["early_header_mutation_extensions"]
    assert early["typed_config"] == {
        "@type": f"{TYPE}http.early_header_mutation.header_mutation.v3.HeaderMutation",
        "mutations": [{"remove": LB_KEY}],
    }


def test_filters_are_the_processor_and_the_router(connections: dict[str, Any]) -> None:
    """The processor stands right before the router."""
    assert [f["typed_config"]["@type"].removeprefix(TYPE) for f in connections["http_filters"]] == [
        "filters.http.ext_proc.v3.ExternalProcessor",
        "filters.http.router.v3.Router",
    ]


def test_processor_sees_headers_only_and_stays_to_the_end(processor: dict[str, Any]) -> None:
    """No body mode is set (Envoy's default is NONE), and response trailers keep the stream open to the end."""
    assert processor["processing_mode"] == {
        "request_header_mode": "SEND",
        "request_trailer_mode": "SKIP",
        "response_header_mode": "SEND",
        "response_trailer_mode": "SEND",
    }


def test_processor_fails_open(processor: dict[str, Any]) -> None:
    """A service that is down or slow costs its pick, not the request."""
    assert processor["failure_mode_allow"] is True
    assert processor["message_timeout"] == "0.200s"
    assert processor["grpc_service"] == {"envoy_grpc": {"cluster_name": "extproc"}}


def test_processor_exchanges_only_what_it_needs(processor: dict[str, Any]) -> None:
    """The service gets key, prompt size, status, upstream and subset hint; it may set the pick, and why it refuses."""
    allowed = [pattern["exact"] for pattern in processor["forward_rules"]["allowed_headers"]["patterns"]]
    assert allowed == ["x-key", "content-length", ":status"]
    regex = f"{LB_KEY}|x-cacheroute-dropped-reason|retry-after"
    assert processor["mutation_rules"] == {"disallow_all": True, "allow_expression": {"regex": regex}}
    assert processor["response_attributes"] == ["upstream.address", "upstream.request_attempt_count"]
    assert processor["metadata_options"] == {
        "receiving_namespaces": {"untyped": ["envoy.lb", "cacheroute"]},
        "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
    }


def test_route_streams_without_end_and_hashes_the_key(route: dict[str, Any]) -> None:
    """A response may last as long as it takes; the fallback hashes the key header."""
    assert (route["cluster"], route["timeout"]) == ("pool", "0s")
    assert route["hash_policy"] == [{"header": {"header_name": "x-key"}, "terminal": True}]


def test_several_sources_of_keys_are_forwarded_and_hashed_in_order() -> None:
    """Envoy sends each header that a key may stand in, and the fallback takes the first of them that is there."""
    settings = replace(SETTINGS, key_headers=("x-a", ":authority", ":path/2"), streams_per_connection=8)
    document = json.dumps(build_bootstrap(settings))
    processor = json.loads(document)
    manager = processor["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    patterns = manager["http_filters"][0]["typed_config"]["forward_rules"]["allowed_headers"]["patterns"]
    assert [p["exact"] for p in patterns] == ["x-a", ":authority", ":path", "content-length", ":status"]
    hashes = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["hash_policy"]
    assert [h["header"]["header_name"] for h in hashes] == ["x-a", ":authority", ":path"]
    assert '"max_concurrent_streams": 8' in document


def test_only_unseen_requests_are_retried(route: dict[str, Any]) -> None:
    """Retries are for connections that failed: no request that an engine may have begun is sent again."""
    assert set(route["retry_policy"]["retry_on"].split(",")) == {
        "connect-failure",
        "refused-stream",
        "reset-before-request",
    }
    assert route["retry_policy"]["num_retries"] == 5


def test_response_says_who_served(connections: dict[str, Any]) -> None:
    """Every response carries the endpoint that served it, and one that the engine sent itself is overwritten."""
    [host] = connections["route_config"]["virtual_hosts"]
    assert host["response_headers_to_add"] == [
        {
            "header": {"key": "x-cacheroute-served", "value": "%UPSTREAM_HOST%"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ]


def test_access_log_has_the_decision(connections: dict[str, Any]) -> None:
    """One JSON line a request, with the decision of the service and what became of it; no key, no credential."""
    [log] = connections["access_log"]
    fields = log["typed_config"]["log_format"]["json_format"]
    assert fields["cacheroute"] == "%DYNAMIC_METADATA(cacheroute)%"
    assert {"upstream", "flags", "attempts", "status", "destination"} <= fields.keys()
    assert not [v for v in fields.values() if v.startswith("%REQ(") and v not in ("%REQ(:METHOD)%", "%REQ(:PATH)%")]


def test_pool_obeys_metadata_only_and_falls_back_to_maglev(clusters: dict[str, Any]) -> None:
    """The list in metadata decides, no header does; without it Maglev with bounded loads keeps keys sticky."""
    [policy] = clusters["pool"]["load_balancing_policy"]["policies"]
    override = policy["typed_extension_config"]["typed_config"]
    assert override["override_host_sources"] == [{"metadata": {"key": "envoy.lb", "path": [{"key": LB_KEY}]}}]
    assert override["selected_host_key"] == {"key": "envoy.lb", "path": [{"key": f"{LB_KEY}-served"}]}
    [fallback] = override["fallback_policy"]["policies"]
    assert fallback["typed_extension_config"]["typed_config"] == {
        "@type": f"{TYPE}load_balancing_policies.maglev.v3.Maglev",
        "table_size": 65537,
        "consistent_hashing_lb_config": {"hash_balance_factor": 125},
    }


@pytest.mark.parametrize(("version", "told"), [((1, 36), False), ((1, 37), False), ((1, 38), True), ((1, 40), True)])
def test_older_envoy_gets_no_field_that_it_does_not_know(version: tuple[int, int], told: bool) -> None:
    """The metadata that names who served is asked for from 1.38 on; nothing else differs."""
    document = build_bootstrap(replace(SETTINGS, envoy_version=version))
    [pool] = [c for c in document["static_resources"]["clusters"] if c["name"] == "pool"]
    [policy] = pool["load_balancing_policy"]["policies"]
    override = policy["typed_extension_config"]["typed_config"]
    assert ("selected_host_key" in override) is told
    override["selected_host_key"] = {"key": "envoy.lb", "path": [{"key": f"{LB_KEY}-served"}]}
    assert document == build_bootstrap(SETTINGS)


def test_no_circuit_breaker_bypasses_the_service(clusters: dict[str, Any]) -> None:
    """Both clusters bear as many requests, connections and retries at a time as we ever have."""
    for cluster in clusters.values():
        [threshold] = cluster["circuit_breakers"]["thresholds"]
        assert threshold == dict.fromkeys(
            ("max_connections", "max_pending_requests", "max_requests", "max_retries"), 65535
        )
        assert cluster["connect_timeout"] == "0.250s"


def test_protocols_of_the_clusters(clusters: dict[str, Any]) -> None:
    """The service speaks HTTP/2; connections to engines are closed before an engine closes them."""
    key = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    assert clusters["extproc"]["typed_extension_protocol_options"][key]["explicit_http_config"] == {
        "http2_protocol_options": {"max_concurrent_streams": 256}
    }
    pool = clusters["pool"]["typed_extension_protocol_options"][key]
    assert pool["explicit_http_config"] == {"http_protocol_options": {}}
    assert pool["common_http_protocol_options"] == {"idle_timeout": "4s"}


def test_hosts_are_those_of_the_settings(clusters: dict[str, Any]) -> None:
    """Each cluster lists its hosts by address, in order."""
    for name, ports in {"extproc": [18082], "pool": [18083, 18084]}.items():
        assignment = clusters[name]["load_assignment"]
        [locality] = assignment["endpoints"]
        hosts = [e["endpoint"]["address"]["socket_address"] for e in locality["lb_endpoints"]]
        assert hosts == [{"address": "127.0.0.1", "port_value": port} for port in ports]
        assert (assignment["cluster_name"], clusters[name]["type"]) == (name, "STATIC")
