"""What the engine tells its shadow: requests admitted and freed, resets, the live policy; packed and bounded.

1. A block hash travels as its first 8 bytes (uint64). Two of a million different blocks share them with probability
   3e-8.
2. The freed event carries the hashes that the admitted event of the same request did not have, and how many there
   are in all; of a request that was never admitted here (its lookup was skipped), all of them.
3. Events wait in a buffer of `max_bytes`. When it is full, the whole buffer is thrown away and counted, and the next
   batch says that there is a gap, and which policy is live: the shadow no longer equals the pool and warms up again.
4. No call blocks or raises. A call that cannot make sense of its arguments counts as a drop too.

Cost: about 2 µs a request and 15 ns a block, of which half is joining the digests.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

ADMITTED, FREED, RESET, POLICY = 1, 2, 3, 4
UNCOUNTED = 1
UNKNOWN = 0xFFFFFFFF
MAX_IN_FLIGHT = 65_536
MAGIC = 0x314D4B57  # "WKM1", little-endian

# kind, flags, hashes that follow, time in s, request number, then per kind:
#   admitted: prompt tokens, hit tokens, free blocks; freed: hashes and blocks in all, free blocks; policy: text bytes
_EVENT = struct.Struct("<BBxxIdQIII4x")
# magic, bytes that follow, events, dropped so far, gap before it, time of sending (s, CLOCK_MONOTONIC), last time in s
_FRAME = struct.Struct("<IIIIQdd")
FRAME_BYTES = _FRAME.size

_U64 = np.dtype("<u8")
NO_HASHES: Hashes = np.empty(0, dtype=np.uint64)


def pack(hashes: Sequence[bytes]) -> Hashes:
    """Return the first 8 bytes of each digest; all digests have one length of at least 8 bytes. 15 ns a block."""
    if not hashes:
        return NO_HASHES
    size = len(hashes[0])
    joined = b"".join(hashes)
    if size % 8:
        table = np.frombuffer(joined, dtype=np.uint8).reshape(len(hashes), size)
        return np.ascontiguousarray(table[:, :8]).view("<u8").ravel()
    return np.frombuffer(joined, dtype=_U64)[:: size // 8]


@dataclass(frozen=True, slots=True)
class Event:
    """One event as the shadow reads it; what a kind does not have is 0, empty or None."""

    kind: int
    t: float
    request: int
    hashes: Hashes
    num_prompt_tokens: int = 0
    hit_tokens: int | None = None
    free_blocks: int | None = None
    counted: bool = True
    num_hashes: int = 0
    num_blocks: int = 0
    name: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """The events of one frame; `gap`: events were lost before it; `sent` and `t`: when, by the two clocks."""

    events: int
    dropped: int
    gap: bool
    sent: float
    t: float
    payload: memoryview


class Recorder:
    """Collects the events of one engine until the link takes them; used by the engine's own thread only."""

    __slots__ = (
        "_events",
        "_first_t",
        "_gap",
        "_next",
        "_open",
        "_parts",
        "_retell",
        "_size",
        "_t",
        "dropped",
        "live",
        "max_bytes",
    )

    def __init__(self, max_bytes: int = 8 << 20) -> None:
        self.max_bytes = max_bytes
        self.dropped = 0
        """Events that were lost."""
        self.live: str | None = None
        """The policy that was last said to be live."""
        self._parts: list[bytes] = []
        self._size = 0
        self._events = 0
        self._gap = True  # whatever reads the first batch has seen nothing before it
        self._retell = False  # the policy may be among what was lost: it is said anew
        self._next = 1
        self._t = self._first_t = 0.0
        self._open: dict[str, tuple[int, int]] = {}

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the buffer."""
        return self._size

    def admitted(
        self,
        t: float,
        request_id: str,
        hashes: Sequence[bytes],
        num_prompt_tokens: int,
        hit_tokens: int | None,
        block_size: int = 0,
        *,
        free_blocks: int | None = None,
        counted: bool = True,
    ) -> None:
        """A request got its blocks, after `hit_tokens` of its prompt were found (None: not known).

        `hashes` are those of the prompt's full blocks; `free_blocks` the pool's free blocks just then; `counted`:
        False where the engine's own statistics leave the lookup out (admitted again after a preemption, or skipped).
        """
        try:
            packed = pack(hashes).tobytes()
            number = self._next
            self._next = number + 1
            if len(self._open) >= MAX_IN_FLIGHT:
                self._open.clear()
            count = len(packed) >> 3
            self._open[request_id] = (number, count)
            head = _EVENT.pack(
                ADMITTED,
                0 if counted else UNCOUNTED,
                count,
                t,
                number,
                num_prompt_tokens,
                UNKNOWN if hit_tokens is None else hit_tokens,
                UNKNOWN if free_blocks is None else free_blocks,
            )
            self._add(t, head, packed)
        except Exception:
            self._lose()

    def freed(
        self, t: float, request_id: str, hashes: Sequence[bytes], num_blocks: int, *, free_blocks: int | None = None
    ) -> None:
        """A request gives back its `num_blocks` blocks; `hashes` are those of its full blocks, the output's included.

        `free_blocks` are the pool's free blocks before that.
        """
        try:
            number, sent = self._open.pop(request_id, (0, 0))
            packed = pack(hashes[sent:] if sent else hashes).tobytes() if len(hashes) > sent else b""
            free = UNKNOWN if free_blocks is None else free_blocks
            head = _EVENT.pack(FREED, 0, len(packed) >> 3, t, number, len(hashes), num_blocks, free)
            self._add(t, head, packed)
        except Exception:
            self._lose()

    def reset(self, t: float) -> None:
        """The engine forgot all that it had cached."""
        try:
            self._add(t, _EVENT.pack(RESET, 0, 0, t, 0, 0, 0, 0), b"")
        except Exception:
            self._lose()

    def policy(self, t: float, name: str, why: str) -> None:
        """`name` is the live policy from now on."""
        try:
            self.live = name
            self._add(t, *_policy(t, name, why))
        except Exception:
            self._lose()

    def take(self, sent: float) -> bytes | None:
        """Return all that waits as one frame, or None; `sent`: now, by CLOCK_MONOTONIC."""
        if not self._events:
            return None
        size, count, parts = self._size, self._events, self._parts
        if self._retell and self.live is not None:
            parts = [b"".join(_policy(self._first_t, self.live, "said again after a gap")), *parts]
            size, count = size + len(parts[0]), count + 1
        frame = b"".join((_FRAME.pack(MAGIC, size, count, self.dropped & UNKNOWN, self._gap, sent, self._t), *parts))
        self._parts = []
        self._size = self._events = 0
        self._gap = self._retell = False
        return frame

    def gap(self) -> None:
        """Throw away what waits; the next frame says that something is missing."""
        self.dropped += self._events
        self._parts = []
        self._size = self._events = 0
        self._gap = self._retell = True

    def _add(self, t: float, head: bytes, body: bytes) -> None:
        size = self._size + len(head) + len(body)
        if size > self.max_bytes:
            self.gap()
            size = len(head) + len(body)
            if size > self.max_bytes:
                self.dropped += 1
                return
        if not self._events:
            self._first_t = t
        self._parts.append(head)
        if body:
            self._parts.append(body)
        self._size = size
        self._events += 1
        self._t = t

    def _lose(self) -> None:
        self.dropped += 1
        self._gap = self._retell = True


def _policy(t: float, name: str, why: str) -> tuple[bytes, bytes]:
    """Return head and body of the event that says which policy is live."""
    text = f"{name}\n{why}".encode()[:4096]
    return _EVENT.pack(POLICY, 0, 0, t, 0, len(text), 0, 0), text


def frame_size(head: bytes) -> int:
    """Return how many bytes follow this frame head; ValueError when it is none."""
    magic, size = struct.unpack_from("<II", head)
    if magic != MAGIC:
        raise ValueError("not a frame of events")
    return int(size)


def batch(head: bytes, payload: bytes) -> Batch:
    """Return the frame of this head and payload."""
    _, _, events, dropped, gap, sent, t = _FRAME.unpack(head)
    return Batch(events, dropped, bool(gap), sent, t, memoryview(payload))


def events(frame: Batch) -> Iterator[Event]:
    """Yield the events of a frame in the order recorded; ValueError when it is cut short or of an unknown kind."""
    data, at = frame.payload, 0
    for _ in range(frame.events):
        if at + _EVENT.size > len(data):
            raise ValueError("a frame of events is cut short")
        kind, flags, count, t, number, a, b, c = _EVENT.unpack_from(data, at)
        at += _EVENT.size
        size = a if kind == POLICY else 8 * count
        body = data[at : at + size]
        at += size
        if len(body) != size:
            raise ValueError("a frame of events is cut short")
        if kind == ADMITTED:
            hit, free = (None if b == UNKNOWN else b), (None if c == UNKNOWN else c)
            yield Event(kind, t, number, np.frombuffer(body, dtype="<u8"), a, hit, free, not flags & UNCOUNTED)
        elif kind == FREED:
            free, hashes = (None if c == UNKNOWN else c), np.frombuffer(body, dtype="<u8")
            yield Event(kind, t, number, hashes, free_blocks=free, num_hashes=a, num_blocks=b)
        elif kind == RESET:
            yield Event(kind, t, 0, NO_HASHES)
        elif kind == POLICY:
            name, _, why = bytes(body).decode(errors="replace").partition("\n")
            yield Event(kind, t, 0, NO_HASHES, name=name, why=why)
        else:
            raise ValueError(f"an event of kind {kind} is not known")
