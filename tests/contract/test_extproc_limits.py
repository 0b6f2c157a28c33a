"""Who may be picked: the gateway's subset hint, the conformance suite's header; and who is turned away with a 429."""

from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from service.fairness import Fairness
from service.pb import ext_proc_pb2 as pb
from tests.contract.extproc_rig import A, B, C, Rig, hint, picked, request, response, served, set_headers


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with served() as rig:
        yield rig


def refused(rig: Rig, reply: pb.ProcessingResponse, code: int, cause: str) -> str:
    """The body of a refusal, after checking that status, header, details and counter say the same."""
    answer = reply.immediate_response
    assert answer.status.code == code
    assert set_headers(answer.headers.set_headers)["x-cacheroute-dropped-reason"] == cause.replace("_", "-")
    assert answer.details == f"cacheroute_{cause}"
    assert rig.metric("refused_total", cause=cause) == 1
    return answer.body.decode()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([B, C], {B, C}),
        (f"{B},{C}", {B, C}),
        (f" {B} , 10.9.9.9:1,, {C}", {B, C}),
        ([C, "10.9.9.9:1", "", 5, None, {"x": 1}, [B]], {C}),
        (["10.0.0.2"], {B}),
        ([A], {A}),
    ],
)
async def test_only_the_subset_is_picked(rig: Rig, value: object, expected: set[str]) -> None:
    """The list holds endpoints of the hint only, however the hint is written; unknown addresses in it are ignored."""
    (reply,) = await rig.exchange(hint(request(x_tenant_id="acme"), value))
    assert set(picked(reply)) == expected


async def test_a_planned_key_keeps_to_the_subset(rig: Rig) -> None:
    """A key whose targets are outside the hint falls back inside of it; one with a target inside gets that first."""
    (reply,) = await rig.exchange(hint(request(x_tenant_id="solo"), [B, C]))
    assert set(picked(reply)) == {B, C}
    assert reply.dynamic_metadata.fields["cacheroute"].struct_value.fields["reason"].string_value == "fallback"
    (reply,) = await rig.exchange(hint(request(x_tenant_id="acme"), [A, C]))
    assert picked(reply) == [C, A]


@pytest.mark.parametrize("value", [[], "", ["10.9.9.9:1"], "10.9.9.9:1", [1, None], ["not an address"], ","])
async def test_a_subset_without_endpoints_of_ours_is_a_503(rig: Rig, value: object) -> None:
    """An empty hint, or one that names none of ours, is obeyed: nobody may serve the request."""
    (reply,) = await rig.exchange(hint(request(x_tenant_id="acme"), value))
    assert "subset hint" in refused(rig, reply, 503, "subset")
    assert sum((await rig.settled()).values()) == 0


async def test_a_subset_that_is_not_ready_is_a_503(rig: Rig) -> None:
    """The hint is never left, not even when others are ready."""
    rig.fleet.connect_failed(rig.fleet.by_name["a"])
    (reply,) = await rig.exchange(hint(request(x_tenant_id="acme"), [A]))
    refused(rig, reply, 503, "subset")


@pytest.mark.parametrize("value", [None, 7, True, {"addresses": [A]}])
async def test_a_hint_that_is_neither_list_nor_text_is_none(rig: Rig, value: object) -> None:
    """As in the reference picker, a hint of another type says nothing."""
    (reply,) = await rig.exchange(hint(request(x_tenant_id="solo"), value))
    assert picked(reply)[0] == A


async def test_clients_choose_nothing_outside_conformance_runs(rig: Rig) -> None:
    """The suite's request header is a header like any other, and its response header is not set."""
    replies = await rig.exchange(
        request(x_tenant_id="solo", test_epp_endpoint_selection=B), response(served=A, metadata=A)
    )
    assert picked(replies[0])[0] == A
    assert not replies[1].response_headers.HasField("response")


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (f"{C},{A}", [C, A]),
        (f" {C} ,10.9.9.9:1,, {A},{C}", [C, A]),
        ("10.0.0.3,10.0.0.1:80", [C, A]),
        ("10.0.0.2", [B]),
    ],
)
async def test_conformance_selection_is_the_list(selection: str, expected: list[str]) -> None:
    """In a conformance run the named endpoints are the list, in their order; without a port an IP means all of its."""
    async with served(conformance=True) as rig:
        (reply,) = await rig.exchange(request(x_tenant_id="solo", test_epp_endpoint_selection=selection))
        assert picked(reply) == expected


@pytest.mark.parametrize("selection", ["10.9.9.9", "10.0.0.1:81", "256.256.256.256", b"\xff\xfe"])
async def test_conformance_selection_of_nobody_is_a_503(selection: str | bytes) -> None:
    """A selection that names none of ours is obeyed."""
    async with served(conformance=True) as rig:
        (reply,) = await rig.exchange(request(x_tenant_id="solo", test_epp_endpoint_selection=selection))
        refused(rig, reply, 503, "subset")


async def test_conformance_selection_stays_inside_the_hint_and_off_dead_endpoints() -> None:
    """Hint and readiness bind the suite too; without the header, or with an empty one, picks are as ever."""
    async with served(conformance=True) as rig:
        rig.fleet.connect_failed(rig.fleet.by_name["b"])
        (reply,) = await rig.exchange(hint(request(test_epp_endpoint_selection=f"{A},{B},{C}"), [B, C]))
        assert picked(reply) == [C]
        for headers in ({}, {"test_epp_endpoint_selection": ""}):
            (reply,) = await rig.exchange(request(x_tenant_id="solo", **headers))
            assert picked(reply)[0] == A


@pytest.mark.parametrize(
    ("metadata", "attribute", "shown"), [(B, A, B), ("", A, A), (B, "", B), ("", "10.9.9.9:1", None), ("", "", None)]
)
async def test_conformance_responses_name_who_served(metadata: str, attribute: str, shown: str | None) -> None:
    """The suite's response header carries the served metadata, or else the address that Envoy connected to."""
    async with served(conformance=True) as rig:
        replies = await rig.exchange(request(x_tenant_id="solo"), response(served=attribute, metadata=metadata))
    headers = set_headers(replies[1].response_headers.response.header_mutation.set_headers)
    assert headers.get("x-conformance-test-served-endpoint") == shown


def fairness(**settings: object) -> Fairness:
    """Fairness of one process."""
    defaults = {
        "key_inflight_max": 0,
        "fleet_inflight_max": 0,
        "fair_weight": (),
        "key_salt": "",
        "instance": "i",
        "workers": 1,
    }
    return Fairness(SimpleNamespace(**(defaults | settings)))  # type: ignore[arg-type]


async def test_a_key_beyond_its_limit_is_a_429_until_a_request_ends() -> None:
    """The refused request is told when to try again and holds nothing; another key, and a later request, pass."""
    async with served(fairness=fairness(key_inflight_max=1)) as rig:
        first = rig.stream()
        await first.write(request(x_tenant_id="acme"))
        picked(await first.read())
        (reply,) = await rig.exchange(request(x_tenant_id="acme"))
        assert "CACHEROUTE_KEY_INFLIGHT_MAX" in refused(rig, reply, 429, "key_concurrency")
        assert set_headers(reply.immediate_response.headers.set_headers)["retry-after"] == "1"
        assert sum(rig.inflight().values()) == 1
        (reply,) = await rig.exchange(request(x_tenant_id="solo"))
        picked(reply)
        await first.done_writing()
        await rig.settled()
        (reply,) = await rig.exchange(request(x_tenant_id="acme"))
        picked(reply)


@pytest.mark.parametrize("ending", ["half_close", "cancel", "no_endpoint", "repeated"])
async def test_fairness_is_told_the_end_exactly_once(ending: str) -> None:
    """However a request ends, its key has all its room back afterwards, and no more than that."""
    limited = fairness(key_inflight_max=2)
    async with served(fairness=limited) as rig:
        for _ in range(5):
            if ending == "no_endpoint":
                (reply,) = await rig.exchange(hint(request(x_tenant_id="acme"), []))
                assert reply.immediate_response.status.code == 503
            elif ending == "repeated":
                await rig.exchange(*[request(x_tenant_id="acme")] * 3)
            else:
                call = rig.stream()
                await call.write(request(x_tenant_id="acme"))
                picked(await call.read())
                await (call.done_writing() if ending == "half_close" else rig.until(call.cancel))
            await rig.settled()
        open_streams = []
        for expected in (True, True, False):
            call = rig.stream()
            await call.write(request(x_tenant_id="acme"))
            assert (await call.read()).HasField("request_headers") == expected
            open_streams.append(call)
        for call in open_streams:
            call.cancel()
        await rig.settled()


async def test_a_full_fleet_is_a_429_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key at its share of a full fleet is told so, in other words than one at its own limit."""
    limited = fairness(fleet_inflight_max=1)
    monkeypatch.setattr(limited, "admit", lambda _key_hash: "fair_share")
    async with served(fairness=limited) as rig:
        (reply,) = await rig.exchange(request(x_tenant_id="acme"))
        assert "CACHEROUTE_FLEET_INFLIGHT_MAX" in refused(rig, reply, 429, "fair_share")
