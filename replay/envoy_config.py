"""Builds the lab's Envoy bootstrap from Envoy's own types; pure, so what it says is tested without starting an Envoy.

Import this module late: the types behind it take 0.5 to 1.5 s to load.

What the configuration does to a request:
1. A destination header sent by a client is removed before any filter runs: nobody outside chooses an endpoint.
2. The external processor sees the key header and the response's status, never a body. `response_trailer_mode: SEND`
   keeps its stream open to the true end of the response, which is how the service knows what is in flight. It fails
   open.
3. `override_host` obeys the endpoint list in dynamic metadata, and only hosts of the cluster. A connection that cannot
   be made moves on to the next of the list; a request that an engine may have begun is never sent twice.
4. Without a list (the service is down) Maglev over the key header, with bounded loads, keeps tenants sticky, on the
   engines that answer health checks and connections.
5. The response says who served it, and one JSON line in the access log says why.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from betterproto2 import Casing
from envoy_data_plane.envoy.config.accesslog.v3 import AccessLog
from envoy_data_plane.envoy.config.bootstrap.v3 import Admin, Bootstrap, BootstrapStaticResources
from envoy_data_plane.envoy.config.cluster.v3 import (
    CircuitBreakers,
    CircuitBreakersThresholds,
    Cluster,
    ClusterCommonLbConfig,
    ClusterDiscoveryType,
    LoadBalancingPolicy,
    LoadBalancingPolicyPolicy,
    OutlierDetection,
)
from envoy_data_plane.envoy.config.common.mutation_rules.v3 import HeaderMutation, HeaderMutationRules
from envoy_data_plane.envoy.config.core.v3 import (
    Address,
    GrpcService,
    GrpcServiceEnvoyGrpc,
    HeaderValue,
    HeaderValueOption,
    HeaderValueOptionHeaderAppendAction,
    HealthCheck,
    HealthCheckHttpHealthCheck,
    Http1ProtocolOptions,
    Http2ProtocolOptions,
    HttpProtocolOptions,
    SocketAddress,
    SubstitutionFormatString,
    TypedExtensionConfig,
)
from envoy_data_plane.envoy.config.endpoint.v3 import (
    ClusterLoadAssignment,
    Endpoint,
    LbEndpoint,
    LocalityLbEndpoints,
)
from envoy_data_plane.envoy.config.listener.v3 import Filter, FilterChain, Listener
from envoy_data_plane.envoy.config.route.v3 import (
    RetryPolicy,
    RetryPolicyRetryBackOff,
    RetryPolicyRetryHostPredicate,
    Route,
    RouteAction,
    RouteActionHashPolicy,
    RouteActionHashPolicyHeader,
    RouteConfiguration,
    RouteMatch,
    VirtualHost,
)
from envoy_data_plane.envoy.extensions.access_loggers.file.v3 import FileAccessLog
from envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 import (
    ExternalProcessor,
    HeaderForwardingRules,
    MetadataOptions,
    MetadataOptionsMetadataNamespaces,
    ProcessingMode,
    ProcessingModeBodySendMode,
    ProcessingModeHeaderSendMode,
)
from envoy_data_plane.envoy.extensions.filters.http.router.v3 import Router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import (
    HttpConnectionManager,
    HttpConnectionManagerCodecType,
    HttpFilter,
)
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation.v3 import (
    HeaderMutation as EarlyHeaderMutation,
)
from envoy_data_plane.envoy.extensions.load_balancing_policies.common.v3 import ConsistentHashingLbConfig
from envoy_data_plane.envoy.extensions.load_balancing_policies.maglev.v3 import Maglev
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host.v3 import (
    OverrideHost,
    OverrideHostOverrideHostSource,
)
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts.v3 import PreviousHostsPredicate
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptions as UpstreamProtocolOptions,
)
from envoy_data_plane.envoy.extensions.upstreams.http.v3 import (
    HttpProtocolOptionsExplicitHttpConfig,
)
from envoy_data_plane.envoy.type.matcher.v3 import ListStringMatcher, RegexMatcher, StringMatcher
from envoy_data_plane.envoy.type.metadata.v3 import MetadataKey, MetadataKeyPathSegment
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as AnyMessage
from envoy_data_plane.google.protobuf import Struct

from service.settings import split_address
from service.telemetry import (
    ATTRIBUTE_ATTEMPTS,
    ATTRIBUTE_UPSTREAM,
    DESTINATION,
    DROPPED_REASON,
    LB_NAMESPACE,
    NAMESPACE,
    SERVED,
    SUBSET_NAMESPACE,
)

SERVED_BY_HEADER = "x-cacheroute-served"
POOL_CLUSTER = "pool"
SERVICE_CLUSTER = "extproc"
# One stream to the service lasts as long as its response, and Envoy's default of 1024 bypasses the service silently.
CONCURRENT_MAX = 65535
# Prime, as Maglev needs it, and a hundred times the hosts of any pool that one machine bears.
MAGLEV_TABLE_SIZE = 65537
# A host may carry a quarter more than its share before Maglev moves on (consistent hashing with bounded loads).
HASH_BALANCE_PERCENT = 125
# All three mean that no engine has seen the request; `reset` alone would send a half-served one a second time.
RETRY_ON = "connect-failure,refused-stream,reset-before-request"
RETRIES_MAX = 5
HEALTH_PATH = "/health"
EJECTION_S = 3
# On the service's own 429 and 503: Envoy applies the rules for mutations to those too.
REFUSAL_HEADERS = (DROPPED_REASON, "retry-after")
# Most of a small pool may be down; if nearly all seems to be, the fault is rather ours, and all are tried.
EJECTED_MAX_PERCENT = 80
PANIC_PERCENT = 20
# What metadata says then, the response attribute says to every version; metadata is the protocol's own way.
SELECTED_HOST_SINCE = (1, 38)
# vLLM's server closes a connection that idles for 5 s; being first, we never send a request into one that closes.
UPSTREAM_IDLE_S = 4.0

ACCESS_LOG_FIELDS = {
    "start": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "status": "%RESPONSE_CODE%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "flags": "%RESPONSE_FLAGS%",
    "upstream": "%UPSTREAM_HOST%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "duration_ms": "%DURATION%",
    "bytes_sent": "%BYTES_SENT%",
    "destination": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{DESTINATION})%",
    NAMESPACE: f"%DYNAMIC_METADATA({NAMESPACE})%",
    "ext_proc": "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
}


@dataclass(frozen=True, slots=True)
class EnvoySettings:
    """What a bootstrap is built from. Addresses are `ip:port`; `engines` are the pool's hosts, at least one.

    envoy_version: (major, minor) of the Envoy that shall read it, 1.36 or later: it refuses a document with a field
    that it does not know, so newer fields are left out for an older one.  key_headers: where the service reads the key,
    as in its own setting; the fallback hashes the first of them that is a header.  streams_per_connection: Envoy
    opens another connection to the service for each so many requests in flight. At most the service's own setting:
    what Envoy sends into a new connection before it has heard of a bound is refused beyond it. For a service of
    several workers 8, since the kernel deals out connections, not requests.
    """

    listen: str
    admin: str
    service: str
    engines: tuple[str, ...]
    access_log: str
    key_headers: tuple[str, ...] = ("x-tenant-id",)
    message_timeout_s: float = 0.2
    connect_timeout_s: float = 0.25
    envoy_version: tuple[int, int] = (1, 40)
    streams_per_connection: int = 256


def build_bootstrap(settings: EnvoySettings) -> dict[str, Any]:
    """return the bootstrap as the JSON document that `envoy -c` reads; about 1 s the first time (validators are built).

    Source of the choices: measured on Envoy 1.36 to 1.40.
    """
    assert settings.engines, "a pool has at least one host"
    assert isinstance(settings.key_headers, tuple), "names of headers, not the letters of one"
    bootstrap = Bootstrap(
        admin=Admin(address=_address(settings.admin)),
        static_resources=BootstrapStaticResources(
            listeners=[_listener(settings)],
            clusters=[_service_cluster(settings), _pool_cluster(settings)],
        ),
    )
    # Names as Envoy's documentation writes them, for whoever reads the file.
    document: dict[str, Any] = bootstrap.to_dict(casing=Casing.SNAKE)
    return document


def _listener(settings: EnvoySettings) -> Listener:
    connections = HttpConnectionManager(
        codec_type=HttpConnectionManagerCodecType.AUTO,
        stat_prefix="gateway",
        early_header_mutation_extensions=[
            _extension(
                "envoy.http.early_header_mutation.header_mutation",
                EarlyHeaderMutation(mutations=[HeaderMutation(remove=DESTINATION)]),
            )
        ],
        access_log=[
            AccessLog(
                name="envoy.access_loggers.file",
                typed_config=AnyMessage.pack(
                    FileAccessLog(
                        path=settings.access_log,
                        log_format=SubstitutionFormatString(json_format=Struct.from_dict(ACCESS_LOG_FIELDS)),
                    )
                ),
            )
        ],
        route_config=_routes(settings),
        http_filters=[
            HttpFilter(name="envoy.filters.http.ext_proc", typed_config=AnyMessage.pack(_processor(settings))),
            HttpFilter(name="envoy.filters.http.router", typed_config=AnyMessage.pack(Router())),
        ],
    )
    http = Filter(name="envoy.filters.network.http_connection_manager", typed_config=AnyMessage.pack(connections))
    return Listener(
        name="gateway",
        address=_address(settings.listen),
        filter_chains=[FilterChain(filters=[http])],
        enable_reuse_port=False,  # With it a second Envoy shares a taken port, and takes half of its connections.
    )


def _routes(settings: EnvoySettings) -> RouteConfiguration:
    retry = RetryPolicy(
        retry_on=RETRY_ON,
        num_retries=RETRIES_MAX,
        # Long enough for a dead host's ejection to reach the worker, short enough not to be noticed.
        retry_back_off=RetryPolicyRetryBackOff(
            base_interval=timedelta(milliseconds=10), max_interval=timedelta(milliseconds=50)
        ),
        # For the fallback only: Maglev would name the same dead host each time. It helps against one, not several.
        retry_host_predicate=[
            RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=AnyMessage.pack(PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=5,
    )
    action = RouteAction(
        cluster=POOL_CLUSTER,
        timeout=timedelta(0),  # An answer streams for as long as it takes.
        hash_policy=[
            RouteActionHashPolicy(
                header=RouteActionHashPolicyHeader(header_name=name.partition("/")[0]),
                terminal=True,  # Once one of them has given a hash, the others add nothing.
            )
            for name in settings.key_headers
        ],
        retry_policy=retry,
    )
    served_by = HeaderValueOption(
        header=HeaderValue(key=SERVED_BY_HEADER, value="%UPSTREAM_HOST%"),
        append_action=HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD,
    )
    host = VirtualHost(
        name=POOL_CLUSTER,
        domains=["*"],
        routes=[Route(match=RouteMatch(prefix="/"), route=action)],
        response_headers_to_add=[served_by],
    )
    return RouteConfiguration(name=POOL_CLUSTER, virtual_hosts=[host])


def _processor(settings: EnvoySettings) -> ExternalProcessor:
    send, skip = ProcessingModeHeaderSendMode.SEND, ProcessingModeHeaderSendMode.SKIP
    none = ProcessingModeBodySendMode.NONE
    return ExternalProcessor(
        grpc_service=GrpcService(envoy_grpc=GrpcServiceEnvoyGrpc(cluster_name=SERVICE_CLUSTER)),
        failure_mode_allow=True,
        message_timeout=timedelta(seconds=settings.message_timeout_s),
        processing_mode=ProcessingMode(
            request_header_mode=send,
            request_body_mode=none,
            request_trailer_mode=skip,
            response_header_mode=send,
            response_body_mode=none,
            response_trailer_mode=send,
        ),
        response_attributes=[ATTRIBUTE_UPSTREAM, ATTRIBUTE_ATTEMPTS],
        # Less to parse, and no credential of a client ever reaches the service.
        forward_rules=HeaderForwardingRules(
            allowed_headers=ListStringMatcher(
                patterns=[StringMatcher(exact=name) for name in _forwarded(settings.key_headers)]
            )
        ),
        mutation_rules=HeaderMutationRules(
            disallow_all=True, allow_expression=RegexMatcher(regex="|".join((DESTINATION, *REFUSAL_HEADERS)))
        ),
        metadata_options=MetadataOptions(
            # Metadata of a namespace that is not named here is dropped without a word.
            receiving_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, NAMESPACE]),
            forwarding_namespaces=MetadataOptionsMetadataNamespaces(untyped=[LB_NAMESPACE, SUBSET_NAMESPACE]),
        ),
    )


def _forwarded(key_headers: tuple[str, ...]) -> tuple[str, ...]:
    return (*dict.fromkeys(name.partition("/")[0] for name in key_headers), "content-length", ":status")


def _service_cluster(settings: EnvoySettings) -> Cluster:
    return Cluster(
        name=SERVICE_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=settings.connect_timeout_s),
        circuit_breakers=_circuit_breakers(),
        typed_extension_protocol_options=_protocol(
            UpstreamProtocolOptions(
                explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                    http2_protocol_options=Http2ProtocolOptions(max_concurrent_streams=settings.streams_per_connection)
                )
            )
        ),
        load_assignment=_hosts(SERVICE_CLUSTER, (settings.service,)),
    )


def _pool_cluster(settings: EnvoySettings) -> Cluster:
    override = OverrideHost(
        override_host_sources=[OverrideHostOverrideHostSource(metadata=_lb_metadata(DESTINATION))],
        selected_host_key=_lb_metadata(SERVED) if settings.envoy_version >= SELECTED_HOST_SINCE else None,
        fallback_policy=_policy(
            "envoy.load_balancing_policies.maglev",
            Maglev(
                table_size=MAGLEV_TABLE_SIZE,
                consistent_hashing_lb_config=ConsistentHashingLbConfig(hash_balance_factor=HASH_BALANCE_PERCENT),
            ),
        ),
    )
    return Cluster(
        name=POOL_CLUSTER,
        type=ClusterDiscoveryType.STATIC,
        connect_timeout=timedelta(seconds=settings.connect_timeout_s),
        circuit_breakers=_circuit_breakers(),
        health_checks=[_health_check()],
        outlier_detection=_ejection(),
        common_lb_config=ClusterCommonLbConfig(
            healthy_panic_threshold=Percent(value=PANIC_PERCENT),
            # Envoy holds the second change of health within a second back by default; retries would be over by then.
            update_merge_window=timedelta(0),
        ),
        typed_extension_protocol_options=_protocol(
            UpstreamProtocolOptions(
                common_http_protocol_options=HttpProtocolOptions(idle_timeout=timedelta(seconds=UPSTREAM_IDLE_S)),
                explicit_http_config=HttpProtocolOptionsExplicitHttpConfig(
                    http_protocol_options=Http1ProtocolOptions()
                ),
            )
        ),
        load_balancing_policy=_policy("envoy.load_balancing_policies.override_host", override),
        load_assignment=_hosts(POOL_CLUSTER, settings.engines),
    )


def _health_check() -> HealthCheck:
    # override_host obeys the service whatever this says; it keeps the fallback away from engines that are down.
    return HealthCheck(
        timeout=timedelta(seconds=1),
        interval=timedelta(seconds=1),
        no_traffic_interval=timedelta(seconds=1),
        unhealthy_threshold=2,
        healthy_threshold=1,
        http_health_check=HealthCheckHttpHealthCheck(path=HEALTH_PATH),
    )


def _ejection() -> OutlierDetection:
    # The same at once, from the first refused connection on, until the health check knows.
    return OutlierDetection(
        split_external_local_origin_errors=True,
        consecutive_local_origin_failure=1,
        interval=timedelta(seconds=1),
        base_ejection_time=timedelta(seconds=EJECTION_S),
        max_ejection_time=timedelta(seconds=EJECTION_S),
        max_ejection_percent=EJECTED_MAX_PERCENT,
    )


def _circuit_breakers() -> CircuitBreakers:
    # Retries too: Envoy allows 3 at a time, and a dead engine that many requests name needs more.
    threshold = CircuitBreakersThresholds(
        max_connections=CONCURRENT_MAX,
        max_pending_requests=CONCURRENT_MAX,
        max_requests=CONCURRENT_MAX,
        max_retries=CONCURRENT_MAX,
    )
    return CircuitBreakers(thresholds=[threshold])


def _hosts(cluster: str, addresses: tuple[str, ...]) -> ClusterLoadAssignment:
    hosts = [LbEndpoint(endpoint=Endpoint(address=_address(a))) for a in addresses]
    return ClusterLoadAssignment(cluster_name=cluster, endpoints=[LocalityLbEndpoints(lb_endpoints=hosts)])


def _protocol(options: UpstreamProtocolOptions) -> dict[str, AnyMessage]:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": AnyMessage.pack(options)}


def _policy(name: str, message: Any) -> LoadBalancingPolicy:
    return LoadBalancingPolicy(policies=[LoadBalancingPolicyPolicy(typed_extension_config=_extension(name, message))])


def _extension(name: str, message: Any) -> TypedExtensionConfig:
    return TypedExtensionConfig(name=name, typed_config=AnyMessage.pack(message))


def _lb_metadata(key: str) -> MetadataKey:
    return MetadataKey(key=LB_NAMESPACE, path=[MetadataKeyPathSegment(key=key)])


def _address(address: str) -> Address:
    host, port = split_address(address)
    return Address(socket_address=SocketAddress(address=host, port_value=port))
