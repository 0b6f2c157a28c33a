"""One pool's place in Redis: its name, how its keys are called, and the client."""

import re

from service.connect import Link
from service.errors import InvalidInput

POOL_NAME = re.compile(r"[A-Za-z0-9._-]+")
# Lua counts in doubles.
COUNTER_MAX = 2**53


def counter_of(text: str | bytes) -> int:
    """Return a count as we write it; raise ValueError for what Lua could not count on, or no number at all."""
    value = int(text)
    if not 0 <= value < COUNTER_MAX:
        raise ValueError(f"{value} is not a count of 0 to 2^53")
    return value


class Pool:
    """What all calls share. Every call raises StoreUnavailable within seconds when Redis does not answer."""

    def __init__(self, url: str, pool: str) -> None:
        """Connect lazily; raise InvalidInput for a URL that is none, see `service.connect`."""
        if not POOL_NAME.fullmatch(pool):
            raise InvalidInput(f"pool name {pool!r} is not one", "use letters, digits, dots, dashes and underscores")
        self.pool = pool
        self._prefix = f"{{cacheroute:{pool}}}:"
        self._link = Link(url)
        self._redis = self._link.client

    async def close(self) -> None:
        """Close all connections."""
        await self._link.close()

    def _key(self, *parts: object) -> str:
        return self._prefix + ":".join(map(str, parts))
