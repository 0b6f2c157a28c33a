"""What no gateway should send, more than fits, and faults of our own: Envoy goes on, and nothing is left behind."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from service.keys import hash_key
from tests.contract.extproc_rig import Rig, other, request, response, served


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with served() as rig:
        yield rig


async def test_a_second_headers_message_is_not_charged_twice(rig: Rig) -> None:
    """A misbehaving client that sends headers twice on one stream still holds one charge."""
    call = rig.stream()
    for _ in range(2):
        await call.write(request(x_tenant_id="solo"))
        await call.read()
    assert sum(rig.inflight().values()) == 1
    call.cancel()
    assert sum((await rig.settled()).values()) == 0


async def test_every_other_message_is_told_to_continue(rig: Rig) -> None:
    """Trailers, and headers out of turn, get the reply of their own kind; a stream may start with any of them."""
    call = rig.stream()
    for kind in ("response_headers", "request_trailers", "response_trailers"):
        await call.write(other(kind))
        reply = await call.read()
        assert reply.WhichOneof("response") == kind
        assert getattr(reply, kind).ByteSize() == 0
    call.cancel()
    assert sum((await rig.settled()).values()) == 0


async def test_a_repeated_message_counts_once(rig: Rig) -> None:
    """Headers sent twice on one stream neither pick, count nor credit twice."""
    replies = await rig.exchange(
        request(x_tenant_id="solo"),
        request(x_tenant_id="acme"),
        response(served="10.0.0.1:80"),
        response(served="10.0.0.2:80"),
    )
    assert [r.WhichOneof("response") for r in replies] == ["request_headers"] * 2 + ["response_headers"] * 2
    assert not replies[1].request_headers.HasField("response")
    assert sum(rig.telemetry.picks.values()) == 1
    assert dict(rig.telemetry.served) == {("a", "2xx"): 1}
    batch = rig.rates.next_batch(1012.5)
    assert batch is not None
    assert batch.counts == {hash_key(b"solo"): 1}


async def test_a_response_before_its_request_is_no_credit(rig: Rig) -> None:
    """A response whose request was never seen charges nobody and counts nowhere."""
    await rig.exchange(response(served="10.0.0.1:80"), request(x_tenant_id="acme"))
    assert dict(rig.telemetry.served) == {}
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize(
    ("status", "label"), [("200", "2xx"), ("503", "5xx"), ("", "unknown"), ("ä", "unknown"), ("9999", "unknown"),
                          ("099", "unknown"), ("600", "unknown"), ("2x0", "unknown")]
)  # fmt: skip
async def test_a_status_has_one_of_six_labels(rig: Rig, status: str, label: str) -> None:
    """What is no status of 100 to 599 counts as unknown, so that no label has unbounded values."""
    await rig.exchange(request(x_tenant_id="solo"), response(status, served="10.0.0.1:80"))
    assert dict(rig.telemetry.served) == {("a", label): 1}


async def test_streams_beyond_the_limit_are_closed_unanswered() -> None:
    """Further streams end without an error and without a word, which lets Envoy go on by itself; then there is room."""
    async with served(streams_max=1) as rig:
        first = rig.stream()
        await first.write(request(x_tenant_id="solo"))
        await first.read()
        assert await rig.exchange() == []
        assert rig.metric("streams_refused_total") == 1
        await first.done_writing()
        assert await first.read() == grpc.aio.EOF
        await rig.settled()
        assert len(await rig.exchange(request(x_tenant_id="solo"))) == 1


async def test_a_fault_of_ours_closes_the_stream_without_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Envoy goes on at once when we are broken; the fault is counted, and its trace logged once without any key."""

    key = "".join(("se", "cret"))  # the trace shows this file's lines

    def broken(*_: Any) -> None:
        raise ValueError(key)

    monkeypatch.setattr("service.answers.read_limits", broken)
    for _ in range(3):
        assert await rig.exchange(request(x_tenant_id=key)) == []
    assert rig.metric("faults_total") == 3
    assert await rig.settled() == {"a": 0, "b": 0, "c": 0}
    (line,) = [x for x in "".join(capsys.readouterr()).splitlines() if "fault of ours" in x]
    assert "read_limits" in line
    assert "ValueError" in line
    assert key not in line


async def test_a_client_that_leaves_is_no_fault(rig: Rig) -> None:
    """Cancelled streams count as ended, in whatever phase."""
    for phase in range(3):
        call = rig.stream()
        await call.write(request(x_tenant_id="acme"))
        for _ in range(phase):
            await call.read()
            await call.write(response(served="10.0.0.2:80"))
        call.cancel()
    await rig.settled()
    assert rig.metric("faults_total") == 0


async def test_bytes_that_are_no_message_close_the_stream_without_an_error(rig: Rig) -> None:
    """Whoever dials this port with something else is counted, and is no fault of ours."""
    call = rig.channel.stream_stream("/envoy.service.ext_proc.v3.ExternalProcessor/Process")()
    await call.write(b"\xff\xff\xff")
    assert await call.read() == grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    assert (rig.metric("malformed_total"), rig.metric("faults_total")) == (1, 0)
