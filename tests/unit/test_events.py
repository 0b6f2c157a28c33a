"""Events cross the pipe unchanged, and the recorder stays bounded and silent whatever it is given."""

import hashlib

import numpy as np
import pytest

from engine_patch import events
from engine_patch.events import (
    ADMITTED,
    FRAME_BYTES,
    MAX_IN_FLIGHT,
    POLICY,
    Batch,
    Event,
    Recorder,
    batch,
    frame_size,
    pack,
)


def digests(count: int, salt: str = "") -> list[bytes]:
    """Return sha256 digests, as vLLM's block hashes."""
    return [hashlib.sha256(f"{salt}{at}".encode()).digest() for at in range(count)]


def taken(recorder: Recorder) -> Batch:
    """Return what the recorder holds, as the other side reads it."""
    frame = recorder.take(123.0)
    assert frame is not None
    head = frame[:FRAME_BYTES]
    assert frame_size(head) == len(frame) - FRAME_BYTES
    return batch(head, frame[FRAME_BYTES:])


def read(recorder: Recorder) -> list[Event]:
    """Return the events that the recorder holds."""
    return list(events.events(taken(recorder)))


@pytest.mark.parametrize("size", [8, 16, 20, 32])
def test_pack_keeps_the_first_eight_bytes(size: int) -> None:
    """A hash is the first 8 bytes of its digest, little-endian, whatever length the digests have."""
    hashes = [digest[:size] for digest in digests(50)]
    assert pack(hashes).tolist() == [int.from_bytes(one[:8], "little") for one in hashes]
    assert len(pack([])) == 0


def test_every_field_comes_back() -> None:
    """What was recorded is what is read: kinds, times, counts, hashes, the live policy and why."""
    recorder, hashes = Recorder(), digests(5)
    recorder.admitted(1.5, "a", hashes[:3], 50, 32, 16, free_blocks=77)
    recorder.admitted(1.6, "b", [], 7, None, 16, counted=False)
    recorder.policy(2.0, "arc", "operator: a test")
    recorder.freed(3.0, "a", hashes, 6, free_blocks=55)
    recorder.freed(3.5, "b", [], 1)
    recorder.reset(4.0)
    frame = taken(recorder)
    assert (frame.events, frame.dropped, frame.sent, frame.t) == (6, 0, 123.0, 4.0)
    first, second, policy, freed, empty, reset = events.events(frame)
    assert (first.t, first.num_prompt_tokens, first.hit_tokens, first.free_blocks) == (1.5, 50, 32, 77)
    assert first.counted
    assert first.hashes.tolist() == pack(hashes[:3]).tolist()
    assert (second.hit_tokens, second.free_blocks, second.counted) == (None, None, False)
    assert (policy.name, policy.why) == ("arc", "operator: a test")
    assert (freed.request, freed.num_hashes, freed.num_blocks, freed.free_blocks) == (first.request, 5, 6, 55)
    assert (empty.request, empty.num_hashes, empty.num_blocks, empty.free_blocks) == (second.request, 0, 1, None)
    assert (reset.kind, reset.t) == (events.RESET, 4.0)


def test_freed_carries_only_what_admitted_had_not() -> None:
    """Hashes that were sent at admission are not sent again; of a request never admitted, all are."""
    recorder, hashes = Recorder(), digests(8)
    recorder.admitted(1.0, "a", hashes[:6], 100, 0)
    recorder.freed(2.0, "a", hashes, 9)
    recorder.freed(3.0, "stranger", hashes, 9)
    recorder.admitted(4.0, "cut", hashes[:6], 100, 0)
    recorder.freed(5.0, "cut", hashes[:2], 3)
    _, known, unknown, _, cut = read(recorder)
    assert known.hashes.tolist() == pack(hashes[6:]).tolist()
    assert unknown.request == 0
    assert unknown.hashes.tolist() == pack(hashes).tolist()
    assert (len(cut.hashes), cut.num_hashes) == (0, 2)


def test_a_full_buffer_starts_over_with_a_gap() -> None:
    """The buffer never exceeds its bound; what is thrown away is counted, and the next frame says so once."""
    recorder = Recorder(max_bytes=4096)
    assert taken_after(recorder, 1).gap  # the first reader has seen nothing before
    for at in range(100):
        recorder.admitted(float(at), f"r{at}", digests(30), 500, 0)
        assert recorder.waiting_bytes <= 4096
    assert recorder.dropped >= 80
    frame = taken(recorder)
    assert frame.gap
    assert frame.dropped == recorder.dropped
    assert frame.events + frame.dropped == 100
    assert not taken_after(recorder, 1).gap


@pytest.mark.parametrize("how", ["full", "nonsense", "gap"])
def test_after_a_gap_the_live_policy_is_said_again(how: str) -> None:
    """A switch that was among the lost events is not lost: the shadow would follow the old policy for good."""
    recorder = Recorder(max_bytes=4096)
    recorder.policy(0.0, "lru", "start")
    taken(recorder)
    recorder.policy(1.0, "arc", "better")
    if how == "full":
        recorder.admitted(2.0, "a", digests(500), 8000, 0)
    elif how == "nonsense":
        recorder.admitted(2.0, "a", None, 8000, 0)  # type: ignore[arg-type]
    else:
        recorder.gap()
    recorder.admitted(3.0, "b", digests(2), 40, 0)
    first, *rest = read(recorder)
    assert (first.kind, first.name) == (POLICY, "arc")
    assert first.t <= min(event.t for event in rest)
    recorder.admitted(4.0, "c", digests(2), 40, 0)
    assert [event.kind for event in read(recorder)] == [ADMITTED]


def taken_after(recorder: Recorder, count: int) -> Batch:
    """Record `count` small events and take them."""
    for _ in range(count):
        recorder.reset(0.0)
    return taken(recorder)


def test_an_event_larger_than_the_buffer_is_dropped() -> None:
    """One event that can never fit is counted and forgotten; the recorder goes on."""
    recorder = Recorder(max_bytes=1024)
    recorder.admitted(0.0, "a", digests(1000), 16_000, 0)
    assert recorder.dropped == 1
    assert taken_after(recorder, 1).events == 1


@pytest.mark.parametrize("hashes", [None, [1, 2], [b""], ["text"], [b"1234"], 5, [b"12345678", b"1"]])
def test_nonsense_is_counted_and_never_raised(hashes: object) -> None:
    """Arguments of the wrong type or size cost a count and a gap, not an exception, and leave the stream readable."""
    recorder = Recorder()
    taken_after(recorder, 1)
    recorder.admitted(0.0, "a", hashes, 10, 0)  # type: ignore[arg-type]
    recorder.freed(0.0, "a", hashes, -5)  # type: ignore[arg-type]
    recorder.admitted(0.0, "b", digests(1), -3, 0)
    recorder.policy(0.0, None, None)  # type: ignore[arg-type]
    assert recorder.dropped >= 2
    frame = taken_after(recorder, 1)
    assert frame.gap
    list(events.events(frame))


def test_requests_in_flight_are_bounded() -> None:
    """Requests that never end cannot fill the engine's memory."""
    recorder = Recorder(max_bytes=1 << 14)
    for at in range(MAX_IN_FLIGHT + 10):
        recorder.admitted(0.0, str(at), [], 5, 0)
    assert len(recorder._open) <= MAX_IN_FLIGHT


def test_frames_cut_anywhere_are_refused() -> None:
    """A payload that ends early or has an unknown kind raises ValueError; it is never read as something else."""
    recorder = Recorder()
    recorder.admitted(0.0, "a", digests(3), 50, 0)
    recorder.policy(1.0, "lru", "because")
    frame = recorder.take(0.0)
    assert frame is not None
    head, payload = frame[:FRAME_BYTES], frame[FRAME_BYTES:]
    for cut in range(len(payload)):
        with pytest.raises(ValueError, match="cut short"):
            list(events.events(batch(head, payload[:cut])))
    with pytest.raises(ValueError, match="kind 9"):
        list(events.events(batch(head, b"\x09" + payload[1:])))
    with pytest.raises(ValueError, match="not a frame"):
        frame_size(b"garbage " * 8)


def test_hashes_need_no_copy_to_be_read() -> None:
    """The hashes of an event are uint64, usable by numpy as they lie in the frame."""
    recorder = Recorder()
    recorder.admitted(0.0, "a", digests(3), 50, 0)
    (event,) = read(recorder)
    assert event.hashes.dtype == np.uint64
    assert not event.hashes.flags.owndata
