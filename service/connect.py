"""Makes the client for Redis in each of its modes, and bounds what it does: nothing else imports the library.

1. Clients wait `socket_timeout` for a connection and for each reply, and try once more; the library's own defaults of
   5 s and ten tries would make a caller look hung.
2. RESP2: the wire format that every server and proxy speaks, without messages that nobody asked for.
3. `Link.asking` bounds one exchange as a whole and turns all that can go wrong into StoreUnavailable.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import redis.asyncio as aioredis
import structlog
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff
from redis.exceptions import NoScriptError

from service.errors import CacheRouteError, StoreUnavailable
from service.redis_url import RedisTarget, parse_redis_url
from service.scripts import Script

PING_INTERVAL_S = 15
# An exchange may take this many of the client's timeouts.
DEADLINES = 5
# After this long without a message a subscription is asked whether it is still there; after twice that it is not.
QUIET_S = 5

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class Link:
    """One client and its bounds."""

    def __init__(self, url: str) -> None:
        """Connect lazily; raise InvalidInput for a URL that is none."""
        self.target = parse_redis_url(url)
        # A command that prints a document has no log, and an unconfigured one would go to standard output.
        if self.target.unverified and structlog.is_configured():
            log.warning(
                "the certificate of Redis is not verified, anybody on the way may pose as it",
                redis=self.target.shown(),
                remedy="name its authority with ssl_ca_certs in CACHEROUTE_REDIS_URL, without ssl_cert_reqs=none",
            )
        # Any: the library says `bytes | str` of every reply, ours are bytes, and callers state what they read.
        self.client: Any = _client(self.target)

    async def close(self) -> None:
        """Close all connections."""
        pool = getattr(self.client, "connection_pool", None)
        await self.client.aclose()
        if isinstance(pool, SentinelConnectionPool):
            await pool.sentinel_manager.aclose()

    @contextlib.asynccontextmanager
    async def asking(self, *, idle_s: float = 0.0) -> AsyncIterator[None]:
        """Bound one exchange; raise StoreUnavailable for what goes wrong in it.

        The client's own timeouts bound each read; a server that trickles, and Sentinels or nodes that are dead one
        after another, add up to more. What is no Redis, or a broken one, makes the client raise errors of any kind.

        idle_s: how much of the time is meant to pass without an answer.
        """
        try:
            async with asyncio.timeout(idle_s + DEADLINES * self.target.timeout_s):
                yield
        except CacheRouteError:
            raise
        except Exception as exc:
            said = self.target.scrub(str(exc)) or "no answer in time"
            raise StoreUnavailable(
                f"Redis at {self.target.shown()} cannot be used ({type(exc).__name__}: {said}); "
                "check that it runs, may be written to, and that CACHEROUTE_REDIS_URL / --redis names it"
            ) from exc

    async def run(self, script: Script, *, keys: list[str], args: list[Any]) -> Any:
        """Run a script where `keys` are; a server that does not know it yet is sent the text."""
        try:
            return await self.client.execute_command("EVALSHA", script.digest, len(keys), *keys, *args)
        except NoScriptError:
            # Not SCRIPT LOAD: that would go to every master of a Cluster, and fail with any of them.
            return await self.client.execute_command("EVAL", script.text, len(keys), *keys, *args)

    async def messages(self, channel: str) -> AsyncGenerator[bool, None]:
        """Yield True when subscribed and for each message after that, False about each second without one.

        On a Cluster one node is subscribed to, which hears of all; when it dies, StoreUnavailable tells so, and the
        next call finds another.
        """
        pubsub, quiet_s = self.client.pubsub(), 0
        try:
            async with self.asking():
                await self.client.initialize()  # a Cluster has to know its nodes before one can be chosen
                await pubsub.subscribe(channel)
            yield True
            while True:
                async with self.asking(idle_s=1.0):
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1.0)
                    quiet_s = 0 if message is not None else quiet_s + 1
                    # A server that vanished without a word looks like one where nothing happens.
                    if quiet_s == QUIET_S:
                        await pubsub.ping()
                    elif quiet_s == 2 * QUIET_S:
                        raise TimeoutError("the subscription is dead")
                yield message is not None and message["type"] == "message"
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self.target.timeout_s):
                    await pubsub.aclose()


def _client(target: RedisTarget) -> Any:
    common: dict[str, Any] = {
        "username": target.username,
        "password": target.password,
        "socket_timeout": target.timeout_s,
        "socket_connect_timeout": target.timeout_s,
        "health_check_interval": PING_INTERVAL_S,
        "protocol": 2,
    }
    if target.tls is not None:
        common |= {"ssl": True, **target.tls}
    retry = Retry(ConstantBackoff(0.05), 1)
    if target.mode == "cluster":
        nodes = [ClusterNode(host, port) for host, port in target.hosts]
        return aioredis.RedisCluster(startup_nodes=nodes, retry=retry, require_full_coverage=False, **common)
    common |= {"db": target.db, "retry": retry}
    if target.mode == "sentinel":
        asked = {
            **common,
            "username": target.sentinel_username,
            "password": target.sentinel_password,
            "db": 0,
            "retry": Retry(ConstantBackoff(0), 0),
        }
        # The library takes Sentinels as they come, and waits for each that is dead: hence `Link.asking`.
        watchers = Sentinel(list(target.hosts), sentinel_kwargs=asked, **common)  # type: ignore[no-untyped-call]
        return watchers.master_for(target.master)
    if target.socket:
        return aioredis.Redis(unix_socket_path=target.socket, **common)
    ((host, port),) = target.hosts
    return aioredis.Redis(host=host, port=port, **common)
