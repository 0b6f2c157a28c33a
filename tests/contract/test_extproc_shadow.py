"""Observability mode: everything is decided and counted, nothing is answered, and what serves is what is charged."""

from collections.abc import AsyncIterator

import grpc
import pytest

from service.pb import ext_proc_pb2 as pb
from tests.contract.extproc_rig import A, B, Rig, body, hint, other, request, response, served


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with served() as rig:
        yield rig


def copies(*, served_by: str = A, key: str = "solo") -> list[pb.ProcessingRequest]:
    """What Envoy copies of one request with bodies and trailers."""
    return [
        request(shadow=True, x_tenant_id=key),
        body("request_body", b"{}", end=True, shadow=True),
        response(served=served_by, shadow=True),
        body("response_body", b"x" * 70_000, shadow=True),
        other("response_trailers", shadow=True),
    ]


@pytest.mark.parametrize(("served_by", "agrees"), [(A, "yes"), (B, "no")])
async def test_nothing_is_answered_and_all_is_counted(rig: Rig, served_by: str, agrees: str) -> None:
    """Not one message comes back; the pick, the key's rate, the response and whether Envoy agreed are counted."""
    assert await rig.exchange(*copies(served_by=served_by)) == []
    assert rig.telemetry.picks["planned"] == 1
    batch = rig.rates.next_batch(1012.5)
    assert batch is not None
    assert list(batch.counts.values()) == [1]
    assert dict(rig.telemetry.served) == {(rig.fleet.by_address[served_by].name, "2xx"): 1}
    assert rig.metric("shadow_total", agrees=agrees) == 1
    assert rig.metric("shadow_total", agrees="no" if agrees == "yes" else "yes") == 0
    assert (rig.dead, rig.suspects) == ([], [])
    assert rig.metric("served_elsewhere_total", endpoint="b") == 0
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("ending", ["response_trailers", "response_body", "half_close", "cancel"])
async def test_who_served_is_charged_until_the_response_ends(rig: Rig, ending: str) -> None:
    """Nothing is charged at the pick; from the response on its endpoint is, until the response or the stream ends."""
    call = rig.stream()
    await call.write(request(shadow=True, x_tenant_id="solo", content_length="1000"))
    await rig.until(lambda: sum(rig.telemetry.picks.values()) == 1)
    assert rig.inflight() == {"a": 0, "b": 0, "c": 0}
    await call.write(response(served=B, shadow=True))
    await rig.until(lambda: rig.inflight() == {"a": 0, "b": 1, "c": 0})
    assert rig.fleet.by_name["b"].work == 4096 + 1000
    match ending:
        case "response_trailers":
            await call.write(other("response_trailers", shadow=True))
        case "response_body":
            await call.write(body("response_body", b"", end=True, shadow=True))
        case "half_close":
            await call.done_writing()
        case "cancel":
            call.cancel()
    await rig.until(lambda: rig.inflight() == {"a": 0, "b": 0, "c": 0})
    if ending.startswith("response"):
        assert rig.telemetry.streams == 1
        await call.done_writing()
        assert await call.read() == grpc.aio.EOF
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}
    assert rig.fleet.by_name["b"].work == 0


async def test_a_response_without_a_body_charges_nobody(rig: Rig) -> None:
    """A response that ends with its headers is over when we hear of it."""
    call = rig.stream()
    await call.write(request(shadow=True, x_tenant_id="solo"))
    await call.write(response(served=A, end=True, shadow=True))
    await rig.until(lambda: sum(rig.telemetry.served.values()) == 1)
    assert rig.inflight()["a"] == 0
    await call.done_writing()
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}


async def test_nobody_is_refused(rig: Rig) -> None:
    """Without an endpoint to pick the request is followed all the same: it is Envoy's to serve or not."""
    assert await rig.exchange(hint(request(shadow=True), []), response(served=A, shadow=True)) == []
    assert rig.metric("refused_total", cause="subset") == 0
    assert dict(rig.telemetry.served) == {("a", "2xx"): 1}
    assert rig.metric("shadow_total", agrees="no") == 0
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}
