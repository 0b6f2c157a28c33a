"""Bodies: sent back piece by piece where the gateway waits for that, told to continue everywhere else."""

import asyncio
from itertools import pairwise

import pytest

from service.pb import ext_proc_pb2 as pb
from tests.contract.extproc_rig import Rig, body, other, picked, request, response, served, with_modes

DUPLEX = "FULL_DUPLEX_STREAMED"
KINDS = ("request_body", "response_body")


def parts(replies: list[pb.ProcessingResponse], kind: str) -> list[pb.StreamedBodyResponse]:
    """What was sent back of a body."""
    found = [r for r in replies if r.WhichOneof("response") == kind]
    assert all(getattr(r, kind).response.body_mutation.HasField("streamed_response") for r in found)
    return [getattr(r, kind).response.body_mutation.streamed_response for r in found]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_body_comes_back_as_it_went(kind: str) -> None:
    """All bytes return in order, at most 62,000 at a time, and only the last piece ends the body."""
    sent = [bytes([n]) * size for n, size in enumerate((0, 1, 61_999, 62_000, 62_001, 200_000, 124_000))]
    async with served() as rig:
        first = with_modes(request(x_tenant_id="acme"), DUPLEX, DUPLEX)
        messages = [body(kind, data, end=n == len(sent) - 1) for n, data in enumerate(sent)]
        found = parts(await rig.exchange(first, *messages), kind)
    assert b"".join(part.body for part in found) == b"".join(sent)
    assert [len(part.body) for part in found] == [
        0, 1, 61_999, 62_000, 62_000, 1, 62_000, 62_000, 62_000, 14_000, 62_000, 62_000
    ]  # fmt: skip
    assert [part.end_of_stream for part in found] == [False] * 11 + [True]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_empty_end_is_sent_back(kind: str) -> None:
    """A body that ends with an empty chunk ends on the other side too: nothing ends it by itself."""
    async with served() as rig:
        first = with_modes(request(), DUPLEX, DUPLEX)
        found = parts(await rig.exchange(first, body(kind, b"abc"), body(kind, b"", end=True)), kind)
    assert [(part.body, part.end_of_stream) for part in found] == [(b"abc", False), (b"", True)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_end_is_not_sent_back(kind: str) -> None:
    """A gateway that repeats the last chunk gets it once; the other direction goes on."""
    [elsewhere] = [k for k in KINDS if k != kind]
    async with served() as rig:
        replies = await rig.exchange(
            with_modes(request(), DUPLEX, DUPLEX),
            body(kind, b"abc", end=True),
            body(kind, b"abc", end=True),
            body(elsewhere, b"xyz", end=True),
        )
    assert [part.body for part in parts(replies, kind)] == [b"abc"]
    assert [part.body for part in parts(replies, elsewhere)] == [b"xyz"]


async def test_trailers_are_answered_after_the_body() -> None:
    """With trailers no chunk ends the body; they are told to pass, after all of it."""
    async with served() as rig:
        replies = await rig.exchange(
            with_modes(request(), DUPLEX, DUPLEX), body("request_body", b"abc"), other("request_trailers"),
            response(), body("response_body", b"xyz"), other("response_trailers"),
        )  # fmt: skip
    kinds = [r.WhichOneof("response") for r in replies]
    assert kinds == [
        "request_headers", "request_body", "request_trailers", "response_headers", "response_body", "response_trailers"
    ]  # fmt: skip
    assert not any(part.end_of_stream for kind in KINDS for part in parts(replies, kind))


async def test_headers_are_answered_before_the_body_is_there() -> None:
    """In full duplex the pick goes out at once: the gateway connects while the body still arrives."""
    async with served() as rig:
        call = rig.stream()
        await call.write(with_modes(request(x_tenant_id="solo"), DUPLEX, DUPLEX))
        async with asyncio.timeout(20):
            assert picked(await call.read())[0] == "10.0.0.1:80"
        call.cancel()
        await rig.settled()


@pytest.mark.parametrize("mode", ["STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "NONE"])
async def test_other_modes_are_told_to_continue(mode: str) -> None:
    """A body that passes by itself is left alone: one reply a message, without a change."""
    async with served() as rig:
        replies = await rig.exchange(
            with_modes(request(), mode, mode), *(body(kind, b"x" * 70_000, end=True) for kind in KINDS)
        )
    assert [r.WhichOneof("response") for r in replies[1:]] == list(KINDS)
    assert all(getattr(r, kind).ByteSize() == 0 for r, kind in zip(replies[1:], KINDS, strict=True))


@pytest.mark.parametrize(("up", "down"), [(DUPLEX, "STREAMED"), ("NONE", DUPLEX)])
async def test_each_direction_has_its_own_mode(up: str, down: str) -> None:
    """Only what the gateway waits for is sent back."""
    async with served() as rig:
        replies = await rig.exchange(with_modes(request(), up, down), *(body(kind, b"x") for kind in KINDS))
    changed = [getattr(r, kind).HasField("response") for r, kind in zip(replies[1:], KINDS, strict=True)]
    assert changed == [up == DUPLEX, down == DUPLEX]


async def test_grpc_messages_stay_whole() -> None:
    """In mode GRPC a chunk is a message: it is not cut, and its flags travel with it."""
    message = body("response_body", b"x" * 200_000)
    message.response_body.grpc_message_compressed = True
    half_close = other("request_body")
    half_close.request_body.end_of_stream_without_message = True
    async with served() as rig:
        replies = await rig.exchange(with_modes(request(), "GRPC", "GRPC"), message, half_close)
    [down], [up] = parts(replies, "response_body"), parts(replies, "request_body")
    assert (len(down.body), down.grpc_message_compressed, down.end_of_stream) == (200_000, True, False)
    assert (up.body, up.end_of_stream_without_message) == (b"", True)


@pytest.mark.parametrize(
    ("setting", "modes", "sent_back"),
    [
        ("auto", None, True),
        ("always", ("BUFFERED", "BUFFERED"), True),
        ("never", (DUPLEX, DUPLEX), False),
        ("never", None, False),
    ],
)
async def test_the_setting_decides_where_the_gateway_does_not(
    setting: str, modes: tuple[str, str] | None, sent_back: bool
) -> None:
    """A gateway that does not tell its modes is taken to wait for its bodies; the setting overrules all of them."""
    async with served(body_echo=setting) as rig:
        first = with_modes(request(), *modes) if modes else request()
        replies = await rig.exchange(first, *(body(kind, b"x") for kind in KINDS))
    changed = [getattr(r, kind).HasField("response") for r, kind in zip(replies[1:], KINDS, strict=True)]
    assert changed == [sent_back, sent_back]


async def test_a_large_body_is_never_held_as_a_whole() -> None:
    """Pieces come back while the body is still being sent, in order, from several streams at once."""

    async def client(rig: Rig) -> int:
        call = rig.stream()
        await call.write(with_modes(request(x_tenant_id="acme"), DUPLEX, DUPLEX))
        await call.read()
        numbers = []
        for n in range(30):
            await call.write(body("request_body", n.to_bytes(4, "big") + bytes(100_000)))
            numbers += [
                (await call.read()).request_body.response.body_mutation.streamed_response.body for _ in range(2)
            ]
        await call.done_writing()
        assert all(a[:4] < b[:4] for a, b in pairwise(numbers[::2]))
        return sum(map(len, numbers))

    async with served() as rig:
        async with asyncio.timeout(60):
            sizes = await asyncio.gather(*(client(rig) for _ in range(4)))
        assert sizes == [30 * 100_004] * 4
        assert sum((await rig.settled()).values()) == 0
