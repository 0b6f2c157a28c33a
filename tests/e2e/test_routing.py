"""Where requests go when everything works: planned keys, cold keys, new plans, and clients that would choose."""

import json
import time
from typing import Any

DESTINATION = "x-gateway-destination-endpoint"


async def test_planned_key_goes_to_its_target(client: Any) -> None:
    """Every request of a planned key is served by its target."""
    plan = {f"tenant-{i}": [client.engines[i % 4]] for i in range(8)}
    await client.publish(plan)
    for key, targets in plan.items():
        answers = await client.ask_all([key] * 3)
        assert [(a.status, a.served) for a in answers] == [(200, targets[0])] * 3


async def test_copies_share_a_key(client: Any) -> None:
    """A key with two targets is served by both, and by nobody else."""
    await client.publish({"wide": ["engine-1", "engine-2"]})
    assert {a.served for a in await client.ask_all(["wide"] * 40)} == {"engine-1", "engine-2"}


async def test_cold_key_spreads(client: Any) -> None:
    """A key that the plan does not admit, and a request without a key, use the whole fleet."""
    await client.publish({"planned": ["engine-0"]})
    for key in ("cold", None):
        answers = await client.ask_all([key] * 60)
        assert {a.status for a in answers} == {200}
        assert len({a.served for a in answers}) == 4


async def test_destination_of_a_client_is_never_obeyed(client: Any) -> None:
    """A client that names an endpoint itself goes where the plan says, whether its endpoint exists or not."""
    await client.publish({"tenant": ["engine-0"]})
    other = client.lab.engines[3].address
    for forged in (other, "127.0.0.1:1", f"{other},127.0.0.1:1"):
        answer = await client.ask("tenant", headers={DESTINATION: forged})
        assert (answer.status, answer.served) == (200, "engine-0")


async def test_destination_of_a_client_is_not_obeyed_without_the_service(client: Any) -> None:
    """While the service is down, a client still cannot choose: each of four endpoints gives the same engine."""
    client.lab.kill("service")
    served = {(await client.ask("tenant", headers={DESTINATION: e.address})).served for e in client.lab.engines}
    assert len(served) == 1


async def test_new_plan_is_in_force_within_a_second(client: Any) -> None:
    """A published plan routes traffic in less than a second (the middle of five publications)."""
    took_s = []
    for i in range(5):
        target = client.engines[i % 4]
        began = time.monotonic()
        await client.publish({"tenant": [target]})
        took_s.append(time.monotonic() - began)
        assert (await client.ask("tenant")).served == target
    assert sorted(took_s)[2] < 1.0


async def test_access_log_tells_the_decision(client: Any) -> None:
    """Envoy's access log has, for each request, why the service chose, by which plan, and who served; never the key."""
    version = await client.publish({"secret-tenant": ["engine-2"]})
    await client.ask("secret-tenant", headers={"x-request-id": "not-logged"})
    lines: list[dict[str, Any]] = []

    async def logged() -> bool:
        lines[:] = [json.loads(line) for line in client.lab.access_log.read_text().splitlines()]
        return bool(lines) and (lines[-1]["cacheroute"] or {}).get("plan_version") == version

    await client.until(logged, "the request's line in the access log")
    last = lines[-1]
    assert last["cacheroute"]["reason"] == "planned"
    assert last["upstream"] == client.lab.engines[2].address
    assert last["destination"].split(",")[0] == client.lab.engines[2].address
    assert (last["status"], last["attempts"], last["flags"]) == (200, 1, "-")
    assert "secret-tenant" not in client.lab.access_log.read_text()


async def test_envoy_and_the_service_have_nothing_to_complain_of(client: Any) -> None:
    """Envoy rejects no header, metadata or message of the service, and none of its streams fails."""
    prefix = "http.gateway.ext_proc"
    names = ("streams_failed", "spurious_msgs_received", "rejected_header_mutations", "message_timeouts")
    before = [await client.envoy_stat(f"{prefix}.{name}") for name in names]
    opened = await client.envoy_stat(f"{prefix}.streams_started")
    await client.ask_all(["a", "b", None] * 5)
    assert await client.envoy_stat(f"{prefix}.streams_started") == opened + 15
    assert [await client.envoy_stat(f"{prefix}.{name}") for name in names] == before
