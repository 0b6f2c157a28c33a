"""What clients notice when a part dies: nothing, except those whose response an engine was giving."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

KEYS = [f"tenant-{i}" for i in range(12)]


@asynccontextmanager
async def traffic(client: Any, keys: list[str]) -> AsyncIterator[list[Any]]:
    """Ask for one key after the other, four at a time, until the block ends; all answers are in the list."""
    answers: list[Any] = []
    stop = asyncio.Event()

    async def ask(first: int) -> None:
        turn = first
        while not stop.is_set():
            answers.append(await client.ask(keys[turn % len(keys)]))
            turn += 1

    tasks = [asyncio.create_task(ask(i * 3)) for i in range(4)]
    try:
        yield answers
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def more(client: Any, answers: list[Any], count: int = 40) -> None:
    """Wait until so many further answers have come."""
    goal = len(answers) + count

    async def come() -> bool:
        return len(answers) >= goal

    await client.until(come, f"{count} further answers")


async def engines_of(client: Any, rounds: int = 4) -> dict[str, set[str]]:
    """Return who serves each key over some rounds of requests; every request must succeed."""
    served = defaultdict(set)
    for key in KEYS * rounds:
        answer = await client.ask(key)
        assert answer.status == 200
        served[key].add(answer.served)
    return served


async def test_dead_first_target_is_served_by_the_second(client: Any) -> None:
    """When one of a key's two targets dies, each further request succeeds at once, at the other target."""
    await client.publish({"wide": ["engine-0", "engine-1"]})
    await client.ask_all(["wide"] * 10)
    client.lab.kill("engine-0")
    assert {(a.status, a.served) for a in await client.ask_all(["wide"] * 10)} == {(200, "engine-1")}


async def test_dead_target_fails_no_request_of_a_burst(client: Any) -> None:
    """However many requests name a dead target at the same moment, all succeed elsewhere."""
    await client.publish({"wide": ["engine-0", "engine-1"]})
    client.lab.kill("engine-0")
    answers = await asyncio.gather(*(client.ask("wide") for _ in range(40)))
    assert {a.status for a in answers} == {200}
    assert "engine-0" not in {a.served for a in answers}


async def test_dead_only_target_is_served_by_the_spare(client: Any) -> None:
    """When a key's only target dies, its requests succeed elsewhere, and return when the target does."""
    await client.publish({"narrow": ["engine-2"]})
    client.lab.kill("engine-2")
    answers = await asyncio.gather(*(client.ask("narrow") for _ in range(30)))
    assert {a.status for a in answers} == {200}
    assert "engine-2" not in {a.served for a in answers}
    client.lab.start("engine-2")
    await client.until(client.whole, "the engine ready again")
    assert (await client.ask("narrow")).served == "engine-2"


async def test_service_killed_under_traffic(client: Any) -> None:
    """Killing the service fails no request; tenants stay with one engine each by Maglev; a new one picks again."""
    await client.publish({key: ["engine-3"] for key in KEYS})
    async with traffic(client, KEYS) as answers:
        await more(client, answers)
        assert {a.served for a in answers} == {"engine-3"}
        client.lab.kill("service")
        await more(client, answers)
    assert {a.status for a in answers} == {200}

    sticky = await engines_of(client)
    assert all(len(engines) == 1 for engines in sticky.values())
    assert len(set.union(*sticky.values())) > 1

    client.lab.start("service")

    async def planned() -> bool:
        return {a.served for a in await client.ask_all(KEYS)} == {"engine-3"}

    await client.until(planned, "all keys at their planned engine again")


async def test_service_killed_in_mid_stream(client: Any) -> None:
    """Killing the service cuts off no response: those that are streaming arrive whole."""
    begun = [asyncio.Event() for _ in range(8)]
    streams = [
        asyncio.create_task(client.stream(key, max_tokens=2500, begun=event))
        for key, event in zip(KEYS, begun, strict=False)
    ]
    await asyncio.gather(*(event.wait() for event in begun))
    client.lab.kill("service")
    assert not any(stream.done() for stream in streams)
    assert {(a.status, a.tokens) for a in await asyncio.gather(*streams)} == {(200, 2500)}


async def test_service_stopped_under_traffic(client: Any) -> None:
    """Stopping the service in the orderly way fails no request either."""
    async with traffic(client, KEYS) as answers:
        await more(client, answers)
        await asyncio.to_thread(client.lab.stop, "service")
        await more(client, answers)
    assert {a.status for a in answers} == {200}


async def test_service_that_hangs(client: Any) -> None:
    """A service that answers nothing delays requests by its message timeout and fails none."""
    await client.ask("tenant")
    pid = client.lab.pid("service")
    assert pid is not None
    client.lab.send_signal("service", signal.SIGSTOP)
    try:
        assert {a.status for a in await client.ask_all(KEYS[:3])} == {200}
    finally:
        client.lab.send_signal("service", signal.SIGCONT)


async def test_service_and_an_engine_dead(client: Any) -> None:
    """With the service down, the tenants of an engine that dies as well are served by others."""
    client.lab.kill("service")
    before = await engines_of(client, rounds=1)
    client.lab.kill(next(iter(before[KEYS[0]])))
    after = await engines_of(client, rounds=2)
    assert not set.union(*after.values()) & before[KEYS[0]]


async def test_service_and_two_engines_dead(client: Any) -> None:
    """With the service down and half of the engines dead, no request of many tenants fails."""
    client.lab.kill("service")
    client.lab.kill("engine-0")
    client.lab.kill("engine-1")
    keys = [f"tenant-{i}" for i in range(150)]
    answers = await asyncio.gather(*(client.ask(key) for key in keys[:30]))
    answers += await client.ask_all(keys[30:])
    assert {a.status for a in answers} == {200}
    assert {a.served for a in answers} == {"engine-2", "engine-3"}


async def test_valkey_killed(client: Any) -> None:
    """Without Valkey routing goes on by the last table; a new Valkey that lost everything takes the next plan."""
    await client.publish({key: ["engine-1"] for key in KEYS})
    async with traffic(client, KEYS) as answers:
        await more(client, answers)
        client.lab.kill("valkey")
        await more(client, answers, 80)
    assert {(a.status, a.served) for a in answers} == {(200, "engine-1")}

    client.lab.start("valkey")
    await client.publish({key: ["engine-2"] for key in KEYS})
    assert {a.served for a in await client.ask_all(KEYS)} == {"engine-2"}
