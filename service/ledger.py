"""What planners and operators keep in Redis beside the plan: who leads, what each cycle did, and whether all is frozen.

1. One planner leads a pool, by a lease that ends by the server's clock. Each lease has a term, which only rises: what
   is written under a lease that ended meanwhile is refused, however late it comes.
2. A planner's record goes to the cycles, which nobody else writes: cycles that change nothing push no publication out
   of the log.
3. A freeze keeps planners from publishing, and no operator. It may end by itself.
"""

import contextlib
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from service.errors import NotLeading
from service.scripts import FREEZE, LEAD, RECORD, RESIGN
from service.store import LOG_LENGTH, Store


class Lease(NamedTuple):
    """The lead of a pool. value: what a publication is checked against, for the one who has it; who: its name.

    mine: whether the asker has it.  left_s: until it ends.
    """

    mine: bool
    value: str
    who: str
    left_s: float


@dataclass(frozen=True, slots=True)
class Freeze:
    """Who keeps planners away, and why. at, until: unix s of the one who froze; until 0: no end is set."""

    actor: str
    reason: str
    at: float
    until: float = 0.0


class Event(NamedTuple):
    """One entry of the log that is no publication: `freeze` or `unfreeze`; at: unix s by the store's clock."""

    event: str
    at: float
    actor: str
    reason: str
    ttl_s: float


class Ledger(Store):
    """A pool's data with what planners and operators write. Calls raise as those of the Store do."""

    async def lead(self, who: str, *, ttl_s: float, force: bool = False) -> Lease:
        """Take or renew the lead; return whose it is. who: of one process, no two alike. force: from anybody."""
        keys, args = [self._key("leader"), self._key("terms")], [who, max(1, int(ttl_s * 1000)), int(force)]
        async with self._link.asking():
            mine, value, left_ms = await self._link.run(LEAD, keys=keys, args=args)
            text, left_s = value.decode(errors="replace"), max(0.0, left_ms / 1000)
        return Lease(bool(mine), text, text.partition(" ")[2], left_s)

    async def resign(self, who: str) -> None:
        """Give the lead back; nothing happens when it is another's."""
        async with self._link.asking():
            await self._link.run(RESIGN, keys=[self._key("leader")], args=[who])

    async def record(self, lease: str, record: str) -> None:
        """Write what a cycle did that published nothing, once; raise NotLeading when the lease has ended."""
        keys = [self._key("cycles"), self._key("leader")]
        async with self._link.asking():
            outcome, leader = await self._link.run(RECORD, keys=keys, args=[lease, record, LOG_LENGTH])
        if outcome == 2:
            raise NotLeading(leader.decode(errors="replace").partition(" ")[2])

    async def read_cycles(self, limit: int = LOG_LENGTH) -> list[dict[str, Any]]:
        """Return the newest records, newest first; what no planner wrote is left out.

        recorded_at: unix s by the store's clock.
        """
        async with self._link.asking():
            entries = list(await self._redis.xrevrange(self._key("cycles"), count=limit))
        found = []
        for name, fields in entries:
            with contextlib.suppress(ValueError, KeyError):
                record, recorded_at = json.loads(fields[b"record"]), int(name.split(b"-")[0]) / 1000
                if isinstance(record, dict):
                    found.append({**record, "recorded_at": recorded_at})
        return found

    async def read_events(self, limit: int = LOG_LENGTH) -> list[Event]:
        """Return the newest freezes and ends of freezes, newest first."""
        async with self._link.asking():
            entries = list(await self._redis.xrevrange(self._key("log"), count=limit))
        found = []
        for name, fields in entries:
            with contextlib.suppress(ValueError):
                text = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in fields.items()}
                if text.get("event") in ("freeze", "unfreeze"):
                    at, ttl_s = int(name.split(b"-")[0]) / 1000, int(text.get("ttl_ms", "0")) / 1000
                    found.append(Event(text["event"], at, text.get("actor", ""), text.get("reason", ""), ttl_s))
        return found

    async def freeze(self, *, actor: str, reason: str, ttl_s: float = 0.0) -> Freeze:
        """Keep planners from publishing from now on, in place of an earlier freeze; ttl_s 0: until `unfreeze`."""
        now = time.time()
        frozen = Freeze(actor, reason, now, now + ttl_s if ttl_s else 0.0)
        await self._freeze(json.dumps(asdict(frozen)), int(ttl_s * 1000), actor, reason)
        return frozen

    async def unfreeze(self, *, actor: str, reason: str) -> bool:
        """Let planners publish again; return whether they were kept from it."""
        return await self._freeze("", 0, actor, reason)

    async def read_freeze(self) -> Freeze | None:
        """Return who keeps planners away, None: nobody. What stands there unreadably keeps them away too."""
        async with self._link.asking():
            raw: bytes | None = await self._redis.get(self._key("freeze"))
        if raw is None:
            return None
        try:
            value = json.loads(raw)
            return Freeze(str(value["actor"]), str(value["reason"]), float(value["at"]), float(value["until"]))
        except (ValueError, KeyError, TypeError):
            return Freeze("?", f"{self._key('freeze')} is not ours", 0.0)

    async def _freeze(self, value: str, ttl_ms: int, actor: str, reason: str) -> bool:
        keys, args = [self._key("freeze"), self._key("log")], [value, ttl_ms, actor, reason, LOG_LENGTH]
        async with self._link.asking():
            return bool(await self._link.run(FREEZE, keys=keys, args=args))
