"""What is in flight at each engine: as the service counts it, as Envoy does, and whether both are exactly right."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families


async def counted(client: Any) -> dict[str, int]:
    """Return what the service counts as in flight, by engine."""
    return {e["name"]: e["inflight"] for e in (await client.get("/fleet"))["endpoints"]}


async def active(client: Any) -> dict[str, int]:
    """Return the requests that Envoy has at each engine."""
    names = {e.address: e.name for e in client.lab.engines}
    async with client.session.get(f"{client.lab.envoy_admin_url}/clusters") as response:
        lines = [line.split("::") for line in (await response.text()).splitlines()]
    return {names[host]: int(value[0]) for pool, host, what, *value in lines if pool == "pool" and what == "rq_active"}


def fullest(names: Sequence[str]) -> str:
    """Return the engine that is named most often."""
    [(name, _)] = Counter(names).most_common(1)
    return name


def tally(client: Any, names: Sequence[str]) -> dict[str, int]:
    """Return how often each engine is named, those that are not named included."""
    return dict.fromkeys(client.engines, 0) | Counter(names)


async def exactly(client: Any, names: Sequence[str]) -> None:
    """The service and Envoy both have these engines' requests in flight, at this moment, and no others."""
    expected = tally(client, names)
    assert (await counted(client), await active(client)) == (expected, expected)


async def metrics(client: Any) -> Counter[tuple[str, str]]:
    """Return the service's metrics by name and by the endpoint they are of (empty: none), status classes together."""
    async with client.session.get(f"{client.lab.service_url}/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        values: Counter[tuple[str, str]] = Counter()
        for family in families:
            for sample in family.samples:
                values[sample.name, sample.labels.get("endpoint", "")] += sample.value
        return values


async def drained(client: Any) -> None:
    """Wait until no stream is open in the service; then every count of every endpoint is exactly 0."""

    async def closed() -> bool:
        return (await metrics(client))["cacheroute_streams", ""] == 0 and not any((await active(client)).values())

    async def forgotten() -> bool:
        return not any(e["inflight_elsewhere"] for e in (await client.get("/fleet"))["endpoints"])

    await client.until(closed, "no open stream")
    await client.until(forgotten, "a dead process's requests forgotten")
    values = await metrics(client)
    for name in ("cacheroute_endpoint_inflight", "cacheroute_endpoint_work_bytes"):
        assert {engine: values[name, engine] for engine in client.engines} == dict.fromkeys(client.engines, 0)
    await exactly(client, [])
