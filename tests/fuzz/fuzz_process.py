"""Sends mutated messages to the external processor and checks that nothing breaks, leaks or hangs.

`python -m tests.fuzz.fuzz_process [--messages 1000000] [--seed 0] [--wire-share 0.02]`; exit code 1 when a rule broke.

Most streams run on a scheduler of their own, hundreds open at a time, stepped in random order, cancelled at random,
while endpoints fail, drain, leave and come back; a share goes through a real gRPC server and channel. Rules:
1. No stream ends with an exception or an error, save that it was cancelled, and no fault of ours is counted.
2. Each reply is a ProcessingResponse of the kind that was asked for; a copy (observability mode) is never answered.
3. Every stream ends after its last message, in a bounded number of steps; on the wire, within DEADLINE_S.
4. When all have ended nothing is in flight, nowhere; what is kept by key, list or label stays within its bounds, and
   the process does not grow.
"""

import argparse
import asyncio
import gc
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Generator
from random import Random
from types import SimpleNamespace
from typing import Any

import grpc
import psutil

from service.answers import LISTS_KEPT
from service.fairness import Fairness
from service.fleet import Found
from service.keys import KeyReader
from service.pb import ext_proc_pb2 as pb
from service.telemetry import configure_logging
from tests.contract.extproc_rig import METHOD, Rig, served
from tests.fuzz.mutations import ADDRESSES, Mutations

OPEN_MAX = 300
MESSAGES_A_RIG = 25_000
WIRE_STREAMS_AT_ONCE = 32
DEADLINE_S = 60.0
RSS_GROWTH_MAX_MB = 48
OBJECTS_GROWTH_MAX = 20_000
FOUND = [Found(name, address) for name, address in zip("abc", ADDRESSES, strict=False)]


class Broken(AssertionError):
    """A rule broke; the message says which one, and with what."""


def check(holds: bool, rule: str, *details: object) -> None:
    """Raise Broken where a rule does not hold."""
    if not holds:
        raise Broken(": ".join([rule, *map(repr, details)]))


class FakeContext:
    """What `process` uses of a gRPC context; each read and write is one step of the scheduler."""

    def __init__(self, messages: list[bytes], fails: bool) -> None:
        """fails: the peer is gone when the first reply is written."""
        self._messages, self._fails = iter(messages), fails
        self._kind: str | None = None
        self._shadow = False
        self.replies: Counter[str] = Counter()

    async def read(self) -> Any:
        """Return the next message."""
        await _Step()
        raw = next(self._messages, None)
        if raw is None:
            return grpc.aio.EOF
        try:
            message = pb.ProcessingRequest.FromString(raw)
            self._kind, self._shadow = message.WhichOneof("request"), message.observability_mode
        except Exception:  # What is no message is the processor's to find out.
            self._kind = None
        return raw

    async def write(self, reply: bytes) -> None:
        """Check a reply."""
        await _Step()
        if self._fails:
            raise grpc.aio.UsageError("RPC already finished.")
        self.replies[check_reply(reply, self._kind, self._shadow)] += 1


class _Step:
    def __await__(self) -> Generator[None, None, None]:
        yield


def check_reply(raw: bytes, kind: str | None, shadow: bool) -> str:
    """Return what a reply is, after checking it against the kind of the message that it answers."""
    reply = pb.ProcessingResponse.FromString(raw)
    found = reply.WhichOneof("response")
    check(not shadow, "a copy was answered", reply)
    if found == "immediate_response":
        check(kind == "request_headers", "only request headers are refused", kind)
        return str(reply.immediate_response.status.code)
    check(found == kind, "a reply of another kind", found, kind)
    check(len(raw) < 64 * 1024 or kind in ("request_body", "response_body"), "a reply too long", kind, len(raw))
    return "list" if reply.dynamic_metadata.fields else str(found)


def new_options(rng: Random) -> dict[str, Any]:
    """Draw a configuration."""
    limits = {"key_inflight_max": rng.choice((0, 0, 20)), "fleet_inflight_max": rng.choice((0, 0, 150))}
    names = {"fair_weight": (), "key_salt": "", "instance": "i", "workers": 1}
    return {
        "fairness": Fairness(SimpleNamespace(**limits, **names)),  # type: ignore[arg-type]
        "conformance": rng.random() < 0.5,
        "body_echo": rng.choice(("auto", "always", "never")),
        "streams_max": rng.choice((50, 20_000, 20_000, 20_000)),
        "key_reader": KeyReader(rng.choice((("x-tenant-id", "x-user"), (":path/2", ":authority", "x-user"))), 64),
    }


def disturb(rig: Rig, rng: Random) -> None:
    """Let something happen to the fleet, as probes and discovery do."""
    endpoint = rng.choice(rig.fleet.endpoints)
    match rng.randrange(5):
        case 0:
            rig.fleet.connect_failed(endpoint)
        case 1 | 2:
            for each in rig.fleet.endpoints:
                rig.fleet.probe_succeeded(each)
        case 3:
            rig.fleet.set_draining(endpoint, rng.random() < 0.3)
        case 4:
            rig.fleet.update(FOUND if rng.random() < 0.7 else rng.sample(FOUND, 2))
    if rig.fairness is not None and rng.random() < 0.1:
        rig.fairness.report(time.monotonic())


def check_empty(rig: Rig) -> None:
    """Rule 4 for one processor, once all its streams have ended."""
    fleet, telemetry = rig.fleet, rig.telemetry
    fleet.update(FOUND)
    for endpoint in fleet.endpoints:
        check((endpoint.inflight, endpoint.work) == (0, 0), "a charge was not taken back", endpoint)
        fleet.probe_succeeded(endpoint)
    check(telemetry.streams == 0, "streams are counted open", telemetry.streams)
    check(rig.fairness is None or rig.fairness.inflight == 0, "fairness was not told the end")
    check(abs(fleet.usable_load) < 1.0, "load is left", fleet.usable_load)
    check(rig.metric("faults_total") == 0, "a fault of ours", rig.metric("faults_total"))
    check(len(rig.answers._lists) <= LISTS_KEPT, "too many lists are kept")
    labels = {status for _, status in telemetry.served} - {"1xx", "2xx", "3xx", "4xx", "5xx", "unknown"}
    check(not labels and len(telemetry.served) <= 3 * 6, "labels have too many values", dict(telemetry.served))
    check(len(rig.answers._seldom._next) <= 4, "too many causes of log lines")


def run_fake(rig: Rig, source: Mutations, rng: Random, messages: int, seen: Counter[str]) -> int:
    """Run streams on the scheduler until so many messages were sent; return how many."""
    running: list[tuple[Coroutine[Any, Any, None], FakeContext, list[int]]] = []
    sent = 0
    while sent < messages or running:
        if sent < messages and len(running) < OPEN_MAX and (not running or rng.random() < 0.5):
            stream = source.stream()
            sent += len(stream)
            context = FakeContext(stream, fails=rng.random() < 0.03)
            # At most: each message read, and its pieces written.
            steps = 2 + len(stream) + sum(2 + len(m) // 62_000 for m in stream)
            running.append((rig.processor.process(None, context), context, [steps]))
        place = rng.randrange(len(running))
        coroutine, context, left = running[place]
        left[0] -= 1
        check(left[0] >= 0, "a stream does not end", context.replies)
        cancelled = rng.random() < 0.01
        try:
            if cancelled:
                coroutine.throw(asyncio.CancelledError())
            else:
                coroutine.send(None)
            continue
        except StopIteration:
            seen["ended"] += 1
        except asyncio.CancelledError:
            check(cancelled, "a stream cancelled itself")
            seen["cancelled"] += 1
        running[place] = running[-1]
        running.pop()
        seen.update({f"answered {kind}": n for kind, n in context.replies.items()})
        if rng.random() < 0.02:
            disturb(rig, rng)
    return sent


async def run_wire(options: dict[str, Any], source: Mutations, rng: Random, messages: int, seen: Counter[str]) -> int:
    """Run streams through a gRPC server and channel until so many messages were sent; return how many."""
    sent = 0

    async def client(rig: Rig) -> None:
        nonlocal sent
        method = rig.channel.stream_stream(METHOD)
        while sent < messages:
            stream, leaves = source.stream(), rng.random() < 0.1
            sent += len(stream)
            call = method()

            async def write(call: Any = call, stream: list[bytes] = stream) -> None:
                try:
                    for message in stream:
                        await call.write(message)
                    await call.done_writing()
                except (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError):
                    pass  # The processor has ended the stream before all was written.

            async with asyncio.timeout(DEADLINE_S):
                writing = asyncio.create_task(write())
                if leaves:
                    await asyncio.sleep(rng.random() * 0.01)
                    call.cancel()
                    writing.cancel()  # The client's own write may wait for ever on a call that was cancelled.
                    seen["wire: cancelled"] += 1
                    continue
                try:
                    async for _ in call:
                        seen["wire: replies"] += 1
                except grpc.aio.AioRpcError as exc:
                    # The client's own, when it writes into a stream that the processor has ended.
                    if exc.details() != "Internal error from Core":
                        raise Broken(f"a stream ended with an error: {exc}") from exc
                await writing
            seen["wire: ended"] += 1

    async with served(**options) as rig:
        async with asyncio.timeout(DEADLINE_S + messages / 100):
            await asyncio.gather(*(client(rig) for _ in range(WIRE_STREAMS_AT_ONCE)))
        await rig.settled()
        check_empty(rig)
        note(rig, seen)
    return sent


def note(rig: Rig, seen: Counter[str]) -> None:
    """Add a processor's own counts."""
    for name, labels in (
        ("malformed_total", {}), ("streams_refused_total", {}), ("served_unknown_total", {}),
        ("refused_total", {"cause": "subset"}), ("refused_total", {"cause": "no_ready_endpoint"}),
        ("refused_total", {"cause": "key_concurrency"}), ("refused_total", {"cause": "fair_share"}),
        ("keys_rejected_total", {"cause": "too_long"}), ("keys_rejected_total", {"cause": "not_utf8"}),
        ("shadow_total", {"agrees": "yes"}), ("shadow_total", {"agrees": "no"}),
    ):  # fmt: skip
        if value := rig.metric(name, **labels):
            seen[" ".join([name.removesuffix("_total"), *labels.values()])] += int(value)


def fuzz(messages: int, seed: int, wire_share: float) -> Counter[str]:
    """Send so many messages; return counts by outcome, raise Broken when a rule broke."""
    rng, seen = Random(seed), Counter[str]()
    # What goes over the wire is drawn from numbers of its own: its order depends on time.
    wire_rng = Random(seed + 1)
    source, wire_source, process = Mutations(rng), Mutations(wire_rng), psutil.Process()
    sent, wire_sent, base = 0, 0, None
    while sent < messages:
        part = min(MESSAGES_A_RIG, messages - sent)
        rig = Rig(**new_options(rng))
        on_wire = int(part * wire_share)
        sent += run_fake(rig, source, rng, part - on_wire, seen)
        check_empty(rig)
        note(rig, seen)
        del rig
        if on_wire:
            wire = asyncio.run(run_wire(new_options(rng), wire_source, wire_rng, on_wire, seen))
            sent, wire_sent = sent + wire, wire_sent + wire
        gc.collect()
        size = (process.memory_info().rss / 2**20, len(gc.get_objects()))
        # The first two warm caches up.
        if base is None and sent >= 2 * MESSAGES_A_RIG:
            base = size
        if base is not None:
            seen["MB grown"], seen["objects grown"] = round(size[0] - base[0]), size[1] - base[1]
            check(seen["MB grown"] < RSS_GROWTH_MAX_MB, "the process grows, MB", size, base)
            check(seen["objects grown"] < OBJECTS_GROWTH_MAX, "objects are left", size, base)
    seen["messages"], seen["wire: messages"] = sent, wire_sent
    return seen


def main() -> None:
    """Parse the command line, fuzz, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wire-share", type=float, default=0.02)
    arguments = parser.parse_args()
    configure_logging("error")
    started = time.monotonic()
    try:
        seen = fuzz(arguments.messages, arguments.seed, arguments.wire_share)
    except Broken as broken:
        sys.exit(f"broken with seed {arguments.seed}: {broken}")
    for name in sorted(seen):
        sys.stdout.write(f"{name:36} {seen[name]:>10}\n")
    sys.stdout.write(f"{'seconds':36} {time.monotonic() - started:>10.0f}\n")


if __name__ == "__main__":
    main()
