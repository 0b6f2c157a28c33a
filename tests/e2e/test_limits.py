"""What a real Envoy's clients get when not every endpoint may be picked: hints of the gateway, and fairness."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from replay.processes import free_ports
from service.telemetry import DESTINATION, DROPPED_REASON, SUBSET, SUBSET_NAMESPACE
from tests.e2e.attach import Attachment, until
from tests.e2e.backend import addresses
from tests.e2e.bootstrap import FULL_DUPLEX, processor, put_first, send_all

SUBSET_HEADER = "x-subset"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The endpoints, what is attached, and the gateways' hints that are fixed."""

    attached: Attachment
    all: tuple[str, ...]
    lists: Mapping[str, Sequence[str]]


def _gateway(attached: Attachment, name: str, service: str) -> Any:
    return attached.gateway(name, service=service, pool="pool")


def _hinting(attached: Attachment, name: str) -> Any:
    return _gateway(attached, name, "picker")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Four endpoints behind gateways that give hints, and one whose service limits keys."""
    everyone = addresses(free_ports(4))
    attached = Attachment(tmp_path_factory.mktemp("limits"), everyone)
    attached.pool("pool", everyone)
    attached.service("picker", everyone)
    attached.service("limiting", everyone, key_inflight_max="1")
    lists = {
        "two": [everyone[0], everyone[2]],
        "one and a stranger": ["192.0.2.1:8000", everyone[3]],
        "none": [],
        "strangers": ["192.0.2.1:8000"],
    }
    for name, subset in lists.items():
        hint = {"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET: subset}}
        put_first(
            _hinting(attached, name), "envoy.filters.http.set_metadata", "set_metadata.v3.Config", {"metadata": [hint]}
        )
    on_header = {"metadata_namespace": SUBSET_NAMESPACE, "key": SUBSET, "type": "STRING"}
    rule = {"header": SUBSET_HEADER, "on_header_present": on_header, "remove": True}
    put_first(
        _hinting(attached, "by header"),
        "envoy.filters.http.header_to_metadata",
        "header_to_metadata.v3.Config",
        {"request_rules": [rule]},
    )
    _gateway(attached, "limiting", "limiting")
    manager = _gateway(attached, "limiting in full duplex", "limiting")
    send_all(manager)
    processor(manager)["processing_mode"] = FULL_DUPLEX
    with attached:
        yield Hosts(attached, everyone, lists)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    reason: str
    retry_after: str
    text: str
    backend: str = ""
    listed: frozenset[str] = frozenset()


class Client:
    def __init__(self, attached: Attachment, session: aiohttp.ClientSession) -> None:
        self._attached, self.session = attached, session

    async def ask(self, gateway: str, headers: dict[str, str] | None = None, body: bytes = b"body") -> Answer:
        """Send one request."""
        async with self.session.post(self._attached.urls[gateway] + "/x", data=body, headers=headers) as response:
            text, of = await response.text(), response.headers
            answer = Answer(response.status, of.get(DROPPED_REASON, ""), of.get("retry-after", ""), text)
            if response.status != 200:
                return answer
            seen = json.loads(text)
            return Answer(200, "", "", "", seen["backend"], frozenset(seen["headers"][DESTINATION].split(",")))


@pytest.fixture
async def client(hosts: Hosts) -> AsyncIterator[Client]:
    """A client; after the test nothing is in flight."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield Client(hosts.attached, session)
    await hosts.attached.drained()


def assert_inside(answers: Sequence[Answer], subset: set[str]) -> None:
    """All are served from lists of these endpoints, each of which served."""
    assert {a.status for a in answers} == {200}
    assert frozenset.union(*(a.listed for a in answers)) <= subset
    assert {a.backend for a in answers} == subset


@pytest.mark.parametrize("gateway", ["two", "one and a stranger"])
async def test_hint_as_a_list(hosts: Hosts, client: Client, gateway: str) -> None:
    """Picks, spares included, stay inside the list that the gateway gives; addresses that nobody knows are ignored."""
    answers = [await client.ask(gateway) for _ in range(40)]
    assert_inside(answers, set(hosts.lists[gateway]) & set(hosts.all))


@pytest.mark.parametrize("separator", [",", ", "])
async def test_hint_as_a_string(hosts: Hosts, client: Client, separator: str) -> None:
    """A hint in one string, which is all that a filter can make of a header, counts like a list."""
    subset = hosts.all[1:3]
    answers = [await client.ask("by header", {SUBSET_HEADER: separator.join(subset)}) for _ in range(40)]
    assert_inside(answers, set(subset))


async def test_no_hint(hosts: Hosts, client: Client) -> None:
    """Without a hint the whole fleet is picked from, also where the gateway could give one."""
    assert_inside([await client.ask("by header") for _ in range(80)], set(hosts.all))


@pytest.mark.parametrize("gateway", ["none", "strangers"])
async def test_hint_that_leaves_nobody(hosts: Hosts, client: Client, gateway: str) -> None:
    """An empty list, and one that names no endpoint of ours, is answered 503 with the reason, by the service."""
    before = hosts.attached.metric("picker", "cacheroute_refused_total")
    answer = await client.ask(gateway)
    assert (answer.status, answer.reason, answer.backend) == (503, "subset", "")
    assert answer.text.startswith("cacheroute: ")
    assert hosts.attached.metric("picker", "cacheroute_refused_total") == before + 1


@pytest.mark.parametrize("gateway", ["limiting", "limiting in full duplex"])
async def test_key_above_its_limit(hosts: Hosts, client: Client, gateway: str) -> None:
    """A key that has all it may have in flight is answered 429 with reason and time to wait; others are served."""
    attached, body = hosts.attached, bytes(200_000)
    refused = attached.metric("limiting", "cacheroute_refused_total", cause="key_concurrency")
    async with client.session.post(attached.urls[gateway] + "/hold", headers={"x-tenant-id": "busy"}) as held:
        assert held.status == 200
        for _ in range(3):
            answer = await client.ask(gateway, {"x-tenant-id": "busy"}, body)
            assert (answer.status, answer.reason, answer.retry_after) == (429, "key-concurrency", "1")
            assert answer.text.startswith("cacheroute: ")
            assert (await client.ask(gateway, {"x-tenant-id": "quiet"}, body)).status == 200
        assert attached.metric("limiting", "cacheroute_refused_total", cause="key_concurrency") == refused + 3
        held.close()
    await until(lambda: attached.inflight("limiting") == 0, "the held one ended")
    assert (await client.ask(gateway, {"x-tenant-id": "busy"}, body)).status == 200
