"""The endpoint that is measured: its pages, and requests of one tenant for it.

1. All prompts begin with the same prefix, which depends on the seed alone. Behind it come words that no other request
   had, in this run or another one: an answer from the cache would make the endpoint look better than it is.
2. A page that does not answer is None and disturbs nothing; a server that is gone is ServerUnavailable.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from planner.capacity import Page, read_page
from replay.player import PlayedRequest, Progress, play
from replay.traces import BLOCK_TOKENS
from replay.workload import prompt_text
from service.errors import InvalidInput, ServerUnavailable

ANSWER_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 15.0
POLL_S = 0.5
KEY = "calibrate"


@dataclass(frozen=True, slots=True)
class Probe:
    """One request of the tenant; `own` are the blocks of the words that only it has."""

    at_s: float
    prefix: str
    own: tuple[int, ...]
    unique_tokens: int
    output_tokens: int
    key: str = KEY

    def prompt(self) -> str:
        """Return the text: a word is a token of the simulated engine and, within a few percent, of usual models."""
        return self.prefix + prompt_text(self.own, self.unique_tokens)


class Traffic:
    """Makes the requests of a run; arrivals depend on the seed alone, the unique words on the run as well."""

    def __init__(self, prefix_tokens: int, unique_tokens: int, output_tokens: int, seed: int) -> None:
        self.run_id = secrets.token_hex(8)
        self._unique_tokens = unique_tokens
        self._output_tokens = output_tokens
        self._rng = np.random.default_rng(seed)
        self._next = int(self.run_id, 16) << 64
        blocks = range(-(-prefix_tokens // BLOCK_TOKENS))
        self._prefix = prompt_text([(seed + 1) << 32 | block for block in blocks], prefix_tokens)

    def step(self, rate_rps: float, duration_s: float) -> list[Probe]:
        """Return Poisson arrivals over a step, one at least."""
        gaps_s = self._rng.exponential(1 / rate_rps, size=round(rate_rps * duration_s * 1.5) + 20)
        times_s = np.cumsum(gaps_s)
        return [self.request(float(at_s)) for at_s in times_s[times_s < duration_s]] or [self.request(0.0)]

    def request(self, at_s: float) -> Probe:
        """Return one request whose own words nobody had before."""
        count = -(-self._unique_tokens // BLOCK_TOKENS)
        own = tuple(range(self._next, self._next + count))
        self._next += count
        return Probe(at_s, self._prefix, own, self._unique_tokens, self._output_tokens)


@dataclass(slots=True)
class Target:
    """The endpoint; `speed`: how many of its seconds pass in one of ours.  timeout_s: its seconds for one request."""

    client: aiohttp.ClientSession
    url: str
    model: str = ""
    speed: float = 1.0
    timeout_s: float = 300.0

    async def page(self) -> Page | None:
        """Return what /metrics says, None when it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with self.client.get("/metrics") as response:
                if response.status == 200:
                    return read_page(await response.text())
        return None

    async def play(self, probes: Sequence[Probe], progress: Progress) -> None:
        """Send the requests at their times and wait for their ends; cancelled, it closes those in flight."""
        timeout_s = self.timeout_s / self.speed
        await play(probes, self.url, speed=self.speed, model=self.model, timeout_s=timeout_s, progress=progress)

    async def one(self, probe: Probe) -> PlayedRequest:
        """Send one request by itself; raise when it fails, since a whole run of such would say nothing."""
        progress = Progress()
        await self.play([probe], progress)
        [played] = progress.played
        if played.failure is None:
            return played
        if played.status is None or played.status >= 500:
            raise ServerUnavailable(f"{self.url} does not serve: {played.failure}")
        raise InvalidInput(f"{self.url} refuses a completion: {played.failure}", "correct the endpoint or the options")

    async def idle(self) -> None:
        """Wait until nothing runs there, for a while at most: others may use it."""
        for _ in range(round(IDLE_TIMEOUT_S / POLL_S)):
            page = await self.page()
            if page is None or not (page.running or page.waiting):
                return
            await asyncio.sleep(POLL_S / self.speed)

    async def served(self) -> tuple[str, int | None]:
        """Return the first model that is served, and how many tokens it takes; None: it does not say."""
        try:
            async with self.client.get("/v1/models") as response:
                status = response.status
                document = await response.json(content_type=None) if status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise ServerUnavailable(f"{self.url} cannot be reached: {exc or type(exc).__name__}") from exc
        except ValueError as exc:
            raise InvalidInput(f"{self.url}/v1/models is not JSON", "name an OpenAI-compatible server") from exc
        if status >= 500:
            raise ServerUnavailable(f"{self.url}/v1/models answers {status}")
        if status != 200:
            raise InvalidInput(
                f"{self.url}/v1/models answers {status}", "name an OpenAI-compatible server that asks for no key"
            )
        try:
            first = dict(document or {})["data"][0]
            longest = first.get("max_model_len")
            return str(first["id"]), int(longest) if longest else None
        except (LookupError, TypeError, AttributeError, ValueError) as exc:
            raise InvalidInput(f"{self.url}/v1/models names no model", "name an OpenAI-compatible server") from exc

    async def version(self) -> str | None:
        """Return the engine's version as /version says it."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            async with self.client.get("/version") as response:
                if response.status == 200:
                    return str((await response.json(content_type=None))["version"])
        return None
