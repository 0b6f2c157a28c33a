"""Reads the metrics pages of all engines at once, within bounds: a cycle that asks is never kept waiting for long.

1. An engine has `ANSWER_S` to answer and all of them together `ALL_S`. `AT_ONCE` are asked at a time.
2. Of a page only what planner.latency reads is kept, of at most `PAGE_MAX_BYTES`.
3. An engine that does not answer, answers something else, or is asked too late, is silent: it is left out and counted.
   Nothing is ever raised. A redirect is no answer.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence

import aiohttp

from planner.latency import EnginePage, read_page
from service.published import Ack
from service.settings import split_address

ANSWER_S, ALL_S = 1.0, 2.0
AT_ONCE = 64
PAGE_MAX_BYTES = 4_000_000


def addresses_of(acks: Iterable[Ack], endpoints: Collection[str]) -> tuple[str, ...]:
    """Return where services reach these endpoints, as the newest says of each; an address that is none is left out."""
    found: dict[str, str] = {}
    for ack in sorted(acks, key=lambda ack: ack.at):
        found |= {view.name: view.address for view in ack.fleet if view.name in endpoints}
    return tuple(sorted(address for address in set(found.values()) if _is_address(address)))


async def scrape(addresses: Sequence[str]) -> dict[str, EnginePage]:
    """Return the page of each engine that answers, by address (`ip:port`); the others are silent."""
    bodies: dict[str, bytes] = {}
    at_once = asyncio.Semaphore(AT_ONCE)

    async def ask(client: aiohttp.ClientSession, address: str) -> None:
        async with at_once:
            try:
                async with client.get(f"http://{address}/metrics", allow_redirects=False) as response:
                    if response.status == 200 and (body := await _within_bounds(response)) is not None:
                        bodies[address] = body
            except Exception:  # whatever it answers, others are asked
                return

    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with asyncio.timeout(ALL_S), aiohttp.ClientSession(timeout=timeout) as client:
            await asyncio.gather(*(ask(client, address) for address in addresses))
    except TimeoutError:
        pass
    return await asyncio.to_thread(_read, bodies)


async def _within_bounds(response: aiohttp.ClientResponse) -> bytes | None:
    body = bytearray()
    async for chunk in response.content.iter_chunked(65_536):
        body += chunk
        if len(body) > PAGE_MAX_BYTES:
            return None
    return bytes(body)


def _read(bodies: dict[str, bytes]) -> dict[str, EnginePage]:
    pages = {}
    for address, body in sorted(bodies.items()):
        # The parser answers nonsense with errors of many kinds.
        with contextlib.suppress(Exception):
            pages[address] = read_page(body.decode(errors="replace"))
    return pages


def _is_address(address: str) -> bool:
    try:
        split_address(address)
    except ValueError:
        return False
    return True
