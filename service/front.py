"""The HTTP port of several workers: asks each on its own socket, and answers as one process would.

A worker that is starting, gone or slow is left out of an answer; `cacheroute_worker_up` and /healthz show it.
"""

import asyncio
import json
from collections.abc import Callable, Container, Sequence
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from service.aggregate import LABEL, together_fleet, together_metrics, together_table
from service.http import reply_json
from service.telemetry import WORKER_RESTARTS, WORKER_UP

ANSWER_S = 2.0
NO_WORKER = {"error": "no worker answers; they are starting or ending"}


class WorkerPort:
    """The HTTP port of one worker, on a Unix socket."""

    def __init__(self, number: int, path: str) -> None:
        """Needs a running loop; nothing listens at `path` yet."""
        self.number, self.path = number, path
        self.served = False  # Whether it was ever seen to take requests; who starts another process resets it.
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path), timeout=timeout)

    async def close(self) -> None:
        """Close what connections there are."""
        await self._session.close()

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, bytes] | None:
        """Return status and body of an answer, None when there was none in time."""
        try:
            async with self._session.request(method, f"http://worker{path}", **options) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    async def read(self, path: str) -> Any:
        """Return the document at a path, None when it did not answer with one."""
        answer = await self.ask("GET", path)
        return json.loads(answer[1]) if answer is not None and answer[0] == 200 else None

    async def serves(self) -> bool:
        """Return whether the worker takes requests."""
        serves = await self.read("/healthz") is not None
        self.served = self.served or serves
        return serves


def build_front(
    workers: Sequence[WorkerPort],
    *,
    draining: Callable[[], bool],
    restarts: Callable[[], Sequence[int]],
    others_known: bool,
) -> web.Application:
    """Return the application; restarts: of each worker.  others_known: see `together_fleet`."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)

    async def read(path: str) -> dict[int, Any]:
        found = await asyncio.gather(*(w.read(path) for w in workers))
        return {w.number: document for w, document in zip(workers, found, strict=True) if document is not None}

    async def metrics(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        encode, content_type = choose_encoder(accept)
        found = await asyncio.gather(*(w.ask("GET", "/metrics", headers={"Accept": accept}) for w in workers))
        answered = {
            w.number: answer[1]
            for w, answer in zip(workers, found, strict=True)
            if answer is not None and answer[0] == 200
        }

        def together() -> bytes:
            own = encode(_Own(answered, restarts()))
            texts = [("supervisor", encode(registry)), *((str(n), text) for n, text in sorted(answered.items()))]
            return together_metrics(own, texts)

        # In a thread: with many workers and endpoints it takes a tenth of a second.
        return web.Response(body=await asyncio.to_thread(together), headers={"Content-Type": content_type})

    async def healthz(_: web.Request) -> web.Response:
        serving = sum(await asyncio.gather(*(w.serves() for w in workers)))
        ok = serving == len(workers) and not draining()
        status = "ok" if ok else "draining" if draining() else "starting"
        counts = {"workers": len(workers), "serving": serving}
        return reply_json({"status": status, **counts}, 200 if ok else 503)

    async def fleet(_: web.Request) -> web.Response:
        answers = (await read("/fleet")).values()
        together = together_fleet(answers, others_known=others_known)
        return reply_json(together) if answers else reply_json(NO_WORKER, 503)

    async def table(_: web.Request) -> web.Response:
        answers = await read("/table")
        return reply_json(together_table(answers)) if answers else reply_json(NO_WORKER, 503)

    async def explain(request: web.Request) -> web.Response:
        for worker in workers:
            if (answer := await worker.ask("GET", request.path_qs)) is not None:
                return web.Response(body=answer[1], status=answer[0], content_type="application/json")
        return reply_json(NO_WORKER, 503)

    app = web.Application()
    for route, answer in (
        ("/metrics", metrics),
        ("/healthz", healthz),
        ("/fleet", fleet),
        ("/table", table),
        ("/explain", explain),
    ):
        app.router.add_get(route, answer)
    return app


class _Own(Collector):
    """What we know of workers whether they answer or not."""

    def __init__(self, answered: Container[int], restarts: Sequence[int]) -> None:
        self._answered, self._restarts = answered, restarts

    def collect(self) -> list[Metric]:
        up = GaugeMetricFamily(WORKER_UP, "1 when the worker answered.", labels=[LABEL])
        again = CounterMetricFamily(WORKER_RESTARTS, "Times that the worker ended unasked.", labels=[LABEL])
        for number, count in enumerate(self._restarts):
            up.add_metric([str(number)], float(number in self._answered))
            again.add_metric([str(number)], count)
        return [up, again]
