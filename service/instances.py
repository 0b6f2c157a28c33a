"""What each living service process says of itself, in Redis; `service.store` has the layout.

1. A sign of life is a time of Redis's clock: the clocks of hosts differ, and one that is wrong must make nobody else
   look dead.
2. Who gave none for `ALIVE_S`, or has one of the future, an older version's or one from before a failover, is left out;
   if it lives it comes back with its next.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping

from service.lease_rows import LEASE, Answer, Report, pack, unpack
from service.pool import Pool, counter_of
from service.published import Ack, EndpointView, decode_fleet, encode_fleet
from service.scripts import SIGN

ALIVE_S = 60


class Instances(Pool):
    """The calls that write and read them."""

    async def write_ack(
        self,
        instance: str,
        *,
        version: int,
        epoch: int,
        error: str,
        created_at: float = 0.0,
        source: str = "",
        fleet: Iterable[EndpointView] = (),
        ttl_s: int = 15,
    ) -> None:
        """Say which table this instance serves, why not a newer one, and how it sees its fleet; see `Ack`."""
        ack: dict[str, str | int] = {
            "version": version,
            "epoch": epoch,
            "error": error,
            "at": repr(time.time()),
            "created_at": repr(created_at),
            "source": source,
            "fleet": encode_fleet(fleet),
        }
        await self._sign("ack", instance, ack, ttl_ms=ttl_s * 1000)

    async def read_acks(self, *, fleets: bool = False) -> list[Ack]:
        """Return what each living instance serves, by instance name; rows that no instance wrote are left out.

        fleets: with how each sees its fleet, which is most of the bytes.
        """
        fields = ["version", "epoch", "error", "at", "created_at", "source", *(["fleet"] if fleets else [])]
        async with self._link.asking():
            # Whoever is gone left no ack, and all of them are few.
            names = sorted(await self._redis.zrangebyscore(self._key("instances"), "-inf", "+inf"))
            async with self._redis.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hmget(self._key("ack", name.decode(errors="replace")), fields)
                rows = await pipe.execute(raise_on_error=False) if names else []
        acks = []
        for name, row in zip(names, rows, strict=True):
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # gone, or what no instance wrote
                version, epoch, error, at, created_at, source, *fleet = row
                acks.append(
                    Ack(
                        name.decode(),
                        int(version),
                        int(epoch),
                        error.decode(),
                        float(at),
                        float(created_at or 0),
                        (source or b"").decode(),
                        decode_fleet(fleet[0] or b"[]") if fleet else (),
                    )
                )
        return acks

    async def exchange_load(
        self, instance: str, inflight: Mapping[str, tuple[int, int]], *, ttl_ms: int = 1000
    ) -> dict[str, tuple[int, int]]:
        """Publish what this process has in flight; return the sum of all other processes'.

        Both map an address to (requests, work); work in bytes, see `service.fleet`.
        """
        load = {address: f"{n}:{work}" for address, (n, work) in inflight.items()}
        names = await self._sign("load", instance, load, ttl_ms=ttl_ms)
        others = [name for name in names if name != instance]
        if not others:
            return {}
        async with self._link.asking(), self._redis.pipeline(transaction=False) as pipe:
            for name in others:
                pipe.hgetall(self._key("load", name))
            rows = await pipe.execute()
        elsewhere: dict[str, tuple[int, int]] = {}
        for row in rows:
            for address, value in row.items():
                with contextlib.suppress(ValueError):  # what no instance wrote
                    n, work = map(counter_of, value.split(b":"))
                    before = elsewhere.get(address.decode(), (0, 0))
                    elsewhere[address.decode()] = (before[0] + n, before[1] + work)
        return elsewhere

    async def lease(self, instance: str, report: Report, *, cap: int, ttl_ms: int) -> Answer:
        """Tell the others of this process's keys, be granted slots of them: `service.lease_rows`; cap: of each key."""
        totals, rows = pack(report)
        keys, args = [self._key("leases")], [instance, ttl_ms, cap, totals, rows]
        async with self._link.asking():
            return unpack(await self._link.run(LEASE, keys=keys, args=args))

    async def forget_instance(self, instance: str) -> None:
        """Take a process that ends out of the pool at once instead of by expiry."""
        async with self._link.asking():
            await self._redis.delete(self._key("load", instance), self._key("ack", instance))
            await self._redis.zrem(self._key("instances"), instance)
            await self._redis.hdel(self._key("leases"), instance)

    async def _sign(self, kind: str, instance: str, says: Mapping[str, str | int], *, ttl_ms: int) -> list[str]:
        """Say something in place of what was said before, and that this instance lives; return who does."""
        keys = [self._key(kind, instance), self._key("instances")]
        args = [instance, ttl_ms, ALIVE_S, *(word for pair in says.items() for word in pair)]
        async with self._link.asking():
            return [name.decode(errors="replace") for name in await self._link.run(SIGN, keys=keys, args=args)]
