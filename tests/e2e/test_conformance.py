"""What the 14 tests of the Gateway API Inference Extension's conformance suite ask for, replayed on a real Envoy.

The suite itself (conformance/ of kubernetes-sigs/gateway-api-inference-extension, profile Gateway) needs a cluster and
tests a gateway with an endpoint picker in it. Here Envoy is the gateway, configured by hand as a controller would, and
the picker is `cacheroute serve` with `CACHEROUTE_CONFORMANCE=true`, one process a pool. Conditions in the status of
Kubernetes objects are a controller's matter; each test says what of the original is left out for that reason.

All of it twice: in the mode that we recommend, without bodies, and in full duplex, as the suite's gateways have it.

Pods are loopback addresses, since the suite selects them by IP alone.
"""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from replay.processes import free_ports
from service.telemetry import DESTINATION, TEST_SELECTION, TEST_SERVED
from tests.e2e.attach import Attachment, until
from tests.e2e.backend import addresses
from tests.e2e.bootstrap import FULL_DUPLEX, check_health, conform, override, processor, route, send_all

Json = dict[str, Any]

PRIMARY_PODS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SECONDARY_PODS = ("127.0.0.5", "127.0.0.6", "127.0.0.7")
DP_PODS = ("127.0.0.8", "127.0.0.9", "127.0.0.10")
BODY = {"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"}


@dataclass(frozen=True, slots=True)
class Answer:
    """status; who served by its own word (empty: no backend); how; who the picker learnt it was; the list it gave."""

    status: int
    backend: str
    protocol: str
    told: str
    listed: tuple[str, ...]

    @property
    def pod(self) -> str:
        return self.backend.partition(":")[0]


class Gateways:
    """The attached parts, the endpoints of each pool, and a client."""

    def __init__(self, workdir: Path, full_duplex: bool) -> None:
        self.full_duplex = full_duplex
        # One port for all pods of a pool, as they would have in a cluster.
        http, h2c, *ranks = free_ports(5)
        self.primary = addresses([http], PRIMARY_PODS)
        self.h2c = addresses([h2c], PRIMARY_PODS)
        self.secondary = addresses([http], SECONDARY_PODS)
        self.dp = addresses(ranks, DP_PODS)
        self.ranks = ranks
        self.routes = {name: workdir / f"{name}-routes.json" for name in ("first", "second")}
        self.attached = Attachment(workdir, [*self.primary, *self.h2c, *self.secondary, *self.dp])
        for name in ("primary", "secondary", "dp", "h2c"):
            endpoints = getattr(self, name)
            self._check(self.attached.service(name, endpoints, conformance="true"))
            self.attached.pool(f"{name}-pool", endpoints, h2=name == "h2c")
        self._check(self.attached.service_cluster("no-such-service", "127.0.0.1:1"))
        self._configure()

    def _check(self, cluster: Json) -> None:
        if self.full_duplex:
            check_health(cluster)

    def _configure(self) -> None:
        primary = self._gateway("primary-gateway")
        self._rule_template = copy.deepcopy(route(primary)["route"])
        weighted = self.rule("/weighted-two-pools-test", "primary-pool", "primary")
        del weighted["route"]["cluster"], weighted["typed_per_filter_config"]
        weighted["route"]["weighted_clusters"] = {
            "clusters": [
                {"name": f"{name}-pool", "weight": weight, "typed_per_filter_config": override(name)}
                for name, weight in (("primary", 70), ("secondary", 30))
            ]
        }
        no_picker = self.rule("/missing-epp-ref-test", "primary-pool", "primary")
        no_picker["typed_per_filter_config"]["envoy.filters.http.ext_proc"] = {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "disabled": True,
        }
        closed, opened = {"failure_mode_allow": False}, {"failure_mode_allow": True}
        self._set_rules(
            primary,
            weighted,
            no_picker,
            self.rule("/primary-gateway-test", "primary-pool", "primary"),
            self.rule("/destination-endpoint-served-test", "primary-pool", "primary"),
            self.rule("/primary-gateway-dp-test", "dp-pool", "dp"),
            self.rule("/inferencepool-app-protocol-h2c", "h2c-pool", "h2c"),
            self.rule("/inferencepool-app-protocol-http", "secondary-pool", "secondary"),
            self.rule("/inferencepool-app-protocol-default", "primary-pool", "primary"),
            self.rule("/invalid-epp-test/fail-close", "primary-pool", "no-such-service", **closed),
            self.rule("/invalid-epp-test/fail-open", "primary-pool", "no-such-service", **opened),
            self.rule("/test-port", "primary-pool", "primary"),
            self.rule("/non-existent-pool-test", "non-existent-pool", "primary"),
            self.rule("/test-primary-gateway", "primary-pool", "primary"),
            self.rule("/primary", "primary-pool", "primary"),
            self.rule("/secondary", "secondary-pool", "secondary"),
        )
        secondary = self._gateway("secondary-gateway")
        self._set_rules(
            secondary,
            self.rule("/failopen-pool-test", "secondary-pool", "secondary"),
            self.rule("/failclose-pool-test", "secondary-pool", "secondary", **closed),
            self.rule("/test-secondary-gateway", "secondary-pool", "secondary"),
        )
        for name in self.routes:
            # Routes that come from a file, which Envoy follows: what a controller's push is.
            manager = self._gateway(f"{name}-gateway")
            del manager["route_config"]
            manager["rds"] = {
                "route_config_name": name,
                "config_source": {"path_config_source": {"path": str(self.routes[name])}, "resource_api_version": "V3"},
            }
            self.push(name, [self.rule(f"/{name}-gateway-test", "primary-pool", "primary")])

    def _gateway(self, name: str) -> Json:
        manager = self.attached.gateway(name, service="primary", pool="primary-pool")
        if self.full_duplex:
            send_all(manager)
            processor(manager)["processing_mode"] = FULL_DUPLEX
        else:
            conform(manager)
        return manager

    def _set_rules(self, manager: Json, *rules: Json) -> None:
        manager["route_config"]["validate_clusters"] = False
        manager["route_config"]["virtual_hosts"][0]["routes"] = [*rules]

    def rule(self, path: str, pool: str, service: str, **overrides: Any) -> Json:
        """Return a route of a path prefix to a pool and its picker."""
        action = {**self._rule_template, "cluster": pool}
        return {"match": {"prefix": path}, "route": action, "typed_per_filter_config": override(service, **overrides)}

    def push(self, name: str, rules: Sequence[Json]) -> None:
        """Make these the routes of a gateway that follows a file."""
        url = "type.googleapis.com/envoy.config.route.v3.RouteConfiguration"
        host = {"name": name, "domains": ["*"], "routes": [*rules]}
        document = {"resources": [{"@type": url, "name": name, "virtual_hosts": [host]}]}
        part = self.routes[name].with_suffix(".part")
        part.write_text(json.dumps(document))
        part.rename(self.routes[name])


@pytest.fixture(scope="module", params=["recommended", "full duplex"])
def gateways(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    """Four pools with a picker each, and four gateways, for all tests of this module."""
    gateways = Gateways(tmp_path_factory.mktemp("conformance"), request.param == "full duplex")
    with gateways.attached:
        yield gateways


class Client:
    def __init__(self, gateways: Gateways, session: aiohttp.ClientSession) -> None:
        self._gateways, self._session = gateways, session

    async def ask(self, gateway: str, path: str, select: str | None = None, **headers: str) -> Answer:
        """Send one request; select: which pods the picker shall choose from."""
        sent = headers if select is None else {TEST_SELECTION: select, **headers}
        url = self._gateways.attached.urls[gateway] + path
        async with self._session.post(url, json=BODY, headers=sent) as response:
            body, of = await response.read(), response.headers
            listed = json.loads(body)["headers"].get(DESTINATION, "").split(",") if "x-backend" in of else ()
            backend, protocol, told = (of.get(name, "") for name in ("x-backend", "x-protocol", TEST_SERVED))
            return Answer(response.status, backend, protocol, told, tuple(listed))

    async def ask_many(self, count: int, at_a_time: int, gateway: str, path: str, select: str) -> list[Answer]:
        """Send the same request many times."""
        slots = asyncio.Semaphore(at_a_time)

        async def one() -> Answer:
            async with slots:
                return await self.ask(gateway, path, select)

        return await asyncio.gather(*(one() for _ in range(count)))


@pytest.fixture
async def client(gateways: Gateways) -> AsyncIterator[Client]:
    """A client; after the test nothing is in flight at any picker."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield Client(gateways, session)
    await gateways.attached.drained()


async def test_epp_unavailable_fail_open(gateways: Gateways, client: Client) -> None:
    """EppUnAvailableFailOpen: with its picker dead, a fail-open pool still serves, and a fail-close one answers 5xx.

    The original does not look at fail-close; its FailOpen comes from the pool's failureMode through a controller.
    """
    target = SECONDARY_PODS[0]
    for path in ("/failopen-pool-test", "/failclose-pool-test"):
        answer = await client.ask("secondary-gateway", path, target)
        assert (answer.status, answer.pod) == (200, target)
    gateways.attached.services["secondary"].kill()
    try:
        if gateways.full_duplex:
            async with asyncio.timeout(15):
                while (await client.ask("secondary-gateway", "/failopen-pool-test", target)).status != 200:
                    await asyncio.sleep(0.02)
        for _ in range(5):
            answer = await client.ask("secondary-gateway", "/failopen-pool-test", target)
            assert answer.status == 200
            assert answer.backend in gateways.secondary
            assert answer.told == ""
            assert (await client.ask("secondary-gateway", "/failclose-pool-test", target)).status in range(500, 600)
    finally:
        gateways.attached.restart("secondary")
    if gateways.full_duplex:
        await until(lambda: gateways.attached.healthy("secondary"), "the picker known to be alive")
        async with asyncio.timeout(15):
            while (await client.ask("secondary-gateway", "/failclose-pool-test", target)).status != 200:
                await asyncio.sleep(0.02)
    answer = await client.ask("secondary-gateway", "/failclose-pool-test", target)
    assert (answer.status, answer.pod) == (200, target)


async def test_gateway_destination_endpoint_served(gateways: Gateways, client: Client) -> None:
    """GatewayDestinationEndpointServed: the gateway tells the picker who served, and it is the selected endpoint."""
    for pod, address in zip(PRIMARY_PODS, gateways.primary, strict=True):
        answer = await client.ask("primary-gateway", "/destination-endpoint-served-test", pod)
        assert answer == Answer(200, address, "h1", address, (address,))


def assert_within(answers: Sequence[Answer], wanted: set[str]) -> None:
    """Each request was served from the list of these endpoints, and the picker knows by which."""
    assert {a.status for a in answers} == {200}
    assert {frozenset(a.listed) for a in answers} == {frozenset(wanted)}
    assert {a.backend for a in answers} <= wanted
    assert all(a.told == a.backend for a in answers)


@pytest.mark.parametrize("chosen", [[2], [0, 1], [0, 1, 2]])
async def test_gateway_following_epp_routing(gateways: Gateways, client: Client, chosen: list[int]) -> None:
    """GatewayFollowingEPPRouting: the picker lists the pods that the test asks for, and all requests go to those."""
    pods = [PRIMARY_PODS[i] for i in chosen]
    answers = await client.ask_many(100, 10, "primary-gateway", "/primary-gateway-test", ",".join(pods))
    wanted = {gateways.primary[i] for i in chosen}
    assert_within(answers, wanted)


@pytest.mark.parametrize(
    "allowed",
    [{1: ()}, {0: (), 2: (1,)}, {0: (), 1: (0, 2), 2: ()}],
    ids=["one pod, any rank", "two pods, one of a fixed rank", "all pods, one of two ranks"],
)
async def test_gateway_following_epp_routing_with_data_parallelism(
    gateways: Gateways, client: Client, allowed: Mapping[int, Sequence[int]]
) -> None:
    """GatewayFollowingEPPRoutingWithDataParallelism: a pod's ports are endpoints, asked for by IP or IP and port."""
    wanted = {
        f"{DP_PODS[pod]}:{port}"
        for pod, ranks in allowed.items()
        for port in ([gateways.ranks[r] for r in ranks] or gateways.ranks)
    }
    select = ",".join(
        f"{DP_PODS[pod]}:{gateways.ranks[rank]}" if rank is not None else DP_PODS[pod]
        for pod, ranks in allowed.items()
        for rank in (ranks or (None,))
    )
    answers = await client.ask_many(100, 10, "primary-gateway", "/primary-gateway-dp-test", select)
    assert_within(answers, wanted)


async def test_gateway_weighted_across_two_inference_pools(gateways: Gateways, client: Client) -> None:
    """GatewayWeightedAcrossTwoInferencePools: 70 of 100 requests reach the first pool, each decided by its own picker.

    More requests than the original's 200, so that its tolerance of 10 points is five standard deviations.
    """
    count, attached = 600, gateways.attached
    before = {name: attached.metric(name, "cacheroute_picks_total") for name in ("primary", "secondary")}
    select = ",".join((*PRIMARY_PODS, *SECONDARY_PODS))
    answers = await client.ask_many(count, 10, "primary-gateway", "/weighted-two-pools-test", select)
    assert {a.status for a in answers} == {200}
    assert all(a.told == a.backend for a in answers)
    assert {a.backend for a in answers} <= {*gateways.primary, *gateways.secondary}
    served = Counter("primary" if a.pod in PRIMARY_PODS else "secondary" for a in answers)
    assert abs(served["primary"] / count - 0.7) <= 0.1
    picked = {name: attached.metric(name, "cacheroute_picks_total") - n for name, n in before.items()}
    assert picked == served


@pytest.mark.parametrize(
    ("path", "pool", "protocol"),
    [("h2c", "h2c", "h2"), ("http", "secondary", "h1"), ("default", "primary", "h1")],
)
async def test_inference_pool_app_protocol(
    gateways: Gateways, client: Client, path: str, pool: str, protocol: str
) -> None:
    """InferencePoolAppProtocol: a pool's servers are spoken to in its protocol, and picks hold in each."""
    for address in getattr(gateways, pool):
        answer = await client.ask("primary-gateway", f"/inferencepool-app-protocol-{path}", address)
        assert answer == Answer(200, address, protocol, address, (address,))


async def test_inference_pool_accepted(gateways: Gateways, client: Client) -> None:
    """InferencePoolAccepted: a minimal pool is usable: its picker sees every endpoint ready and its route answers.

    The original checks the condition Accepted of the pool alone, which a controller sets.
    """
    assert {e["address"]: e["ready"] for e in gateways.attached.fleet("primary")} == dict.fromkeys(
        gateways.primary, True
    )
    answer = await client.ask("primary-gateway", "/primary-gateway-test")
    assert answer.status == 200
    assert answer.backend in gateways.primary


async def test_inference_pool_resolved_refs_condition(gateways: Gateways, client: Client) -> None:
    """InferencePoolResolvedRefsCondition: a pool serves through every gateway with a route to it, and 404 without one.

    The original also checks the pool's status for each parent, which a controller sets; its deletions of routes are
    pushes of routes here.
    """
    paths = {name: f"/{name}-gateway-test" for name in gateways.routes}

    async def status(name: str) -> int:
        return (await client.ask(f"{name}-gateway", paths[name], PRIMARY_PODS[0])).status

    assert [await status(name) for name in paths] == [200, 200]
    for i, name in enumerate(paths):
        gateways.push(name, [])
        for _ in range(500):
            if await status(name) == 404:
                break
            await asyncio.sleep(0.02)
        assert [await status(other) for other in paths] == [404] * (i + 1) + [200] * (1 - i)


async def test_inference_pool_invalid_epp_service(gateways: Gateways, client: Client) -> None:
    """InferencePoolInvalidEPPService: a picker out of reach gives 5xx, or the fallback where the pool fails open.

    The original's conditions (ResolvedRefs False) are a controller's; it looks at the default, FailClose, only.
    """
    for _ in range(3):
        answer = await client.ask("primary-gateway", "/invalid-epp-test/fail-close")
        assert (answer.status in range(500, 600), answer.backend) == (True, "")
        answer = await client.ask("primary-gateway", "/invalid-epp-test/fail-open")
        assert (answer.status, answer.backend in gateways.primary) == (200, True)


async def test_inference_pool_missing_epp_ref(gateways: Gateways, client: Client) -> None:
    """InferencePoolMissingEPPRef: a pool without a picker is served by the gateway's own balancing, nobody being asked.

    The original accepts either condition of the pool, both a controller's, and sends no request.
    """
    before = gateways.attached.metric("primary", "cacheroute_picks_total")
    for _ in range(5):
        answer = await client.ask("primary-gateway", "/missing-epp-ref-test")
        assert (answer.status, answer.backend in gateways.primary, answer.told) == (200, True, "")
    assert gateways.attached.metric("primary", "cacheroute_picks_total") == before


@pytest.mark.parametrize("port", ["", ":3000", ":8888"], ids=["unspecified", "matching", "non-matching"])
async def test_inference_pool_http_route_port_validation(gateways: Gateways, client: Client, port: str) -> None:
    """InferencePoolHTTPRoutePortValidation: no port but the picked endpoint's own decides where a request goes.

    The original's port stands in a route's reference to a pool, where it is ignored; a controller reads it and nothing
    of it reaches Envoy. The port that a client names is what is left to be ignored.
    """
    answer = await client.ask("primary-gateway", "/test-port", PRIMARY_PODS[1], host=f"port.example.com{port}")
    assert answer == Answer(200, gateways.primary[1], "h1", gateways.primary[1], (gateways.primary[1],))


async def test_http_route_invalid_inference_pool_ref(gateways: Gateways, client: Client) -> None:
    """HTTPRouteInvalidInferencePoolRef: a route to a pool that does not exist answers 5xx, and other routes go on.

    The original checks the route's conditions alone, which a controller sets.
    """
    answer = await client.ask("primary-gateway", "/non-existent-pool-test")
    assert (answer.status in range(500, 600), answer.backend) == (True, "")
    assert (await client.ask("primary-gateway", "/primary-gateway-test")).status == 200


async def test_http_route_multiple_gateways_different_pools(gateways: Gateways, client: Client) -> None:
    """HTTPRouteMultipleGatewaysDifferentPools: two gateways with a pool each serve from their own pool alone."""
    primary = await client.ask_many(20, 5, "primary-gateway", "/test-primary-gateway", ",".join(PRIMARY_PODS))
    secondary = await client.ask_many(20, 5, "secondary-gateway", "/test-secondary-gateway", ",".join(SECONDARY_PODS))
    assert {(a.status, a.backend in gateways.primary) for a in primary} == {(200, True)}
    assert {(a.status, a.backend in gateways.secondary) for a in secondary} == {(200, True)}


async def test_http_route_multiple_rules_different_pools(gateways: Gateways, client: Client) -> None:
    """HTTPRouteMultipleRulesDifferentPools: two rules of one gateway send to two pools, by two pickers."""
    for name in ("primary", "secondary"):
        before = gateways.attached.metric(name, "cacheroute_picks_total")
        for _ in range(10):
            answer = await client.ask("primary-gateway", f"/{name}")
            assert (answer.status, answer.backend in getattr(gateways, name)) == (200, True)
        assert gateways.attached.metric(name, "cacheroute_picks_total") == before + 10
