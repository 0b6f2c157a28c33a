"""What services count, window by window, in Redis; `service.store` has the layout."""

import contextlib
import math
from collections.abc import Iterable, Mapping

from service.pool import Pool, counter_of
from service.rates import Counted
from service.scripts import ADD_RATES

HASH_DIGITS = 16
# A script's argument list is bounded, and 2,000 counts keep one call well under 10 ms of server time.
RATES_PER_CALL = 2000
# Fields that one step of reading a window asks for: see docs/performance.md.
RATES_PER_SCAN = 2000
WINDOWS_PER_CALL = 500


class Counts(Pool):
    """The calls that write and read counts."""

    async def add_rates(
        self,
        window_start_s: int,
        counts: Mapping[int, int],
        *,
        instance: str,
        batch: int,
        ttl_s: int,
        span: tuple[float, float] | None = None,
    ) -> None:
        """Add one instance's counts to a window, once however often the same `batch` is sent.

        counts: key hash -> requests; may be empty.  Batches of an instance rise; an instance that starts again takes
        another name or goes on above its last number.  Larger mappings go in several calls, numbered inside the batch,
        so a failure in the middle is repaired by sending the whole batch again.  span: unix s from when until when the
        instance counted.
        """
        items = list(counts.items())
        # A time with an exponent or a sign is none of a clock's.
        told = () if span is None else tuple(f"{max(0.0, at_s):.3f}" for at_s in span)
        for part, first in enumerate(range(0, max(1, len(items)), RATES_PER_CALL)):
            flat: list[int | str] = []
            for key_hash, count in items[first : first + RATES_PER_CALL]:
                flat += (f"{key_hash:016x}", count)
            spanned = (f"s:{instance}", *told) if told and not part else ("", "", "")
            async with self._link.asking():
                await self._link.run(
                    ADD_RATES,
                    keys=[self._key("rates", window_start_s)],
                    args=[f"i:{instance}:{part}", batch, ttl_s, *spanned, *flat],
                )

    async def read_revisions(self, window_starts_s: Iterable[int]) -> dict[int, int]:
        """Return window start -> a number that every batch raises, for those windows that somebody counted in."""
        found: dict[int, int] = {}
        starts = list(window_starts_s)
        for first in range(0, len(starts), WINDOWS_PER_CALL):
            some = starts[first : first + WINDOWS_PER_CALL]
            async with self._link.asking(), self._redis.pipeline(transaction=False) as pipe:
                for start in some:
                    pipe.hget(self._key("rates", start), "revision")
                values = await pipe.execute()
            for start, value in zip(some, values, strict=True):
                with contextlib.suppress(ValueError, TypeError):  # absent, or what no instance wrote
                    found[start] = counter_of(value)
        return found

    async def read_window(self, window_start_s: int) -> Counted:
        """Return what was counted in one window; nothing when it is not there.

        Not a snapshot: what is added meanwhile may be in it or not, each field once.
        """
        counts: dict[int, int] = {}
        spans: dict[str, tuple[float, float] | None] = {}
        cursor = 0
        while True:
            async with self._link.asking():
                # HSCAN in steps: HGETALL of a large window would hold the server for hundreds of milliseconds.
                cursor, chunk = await self._redis.hscan(
                    self._key("rates", window_start_s), cursor, count=RATES_PER_SCAN
                )
            for field, value in chunk.items():
                try:
                    if len(field) == HASH_DIGITS and field[1:2] != b":":
                        counts[int(field, 16)] = counter_of(value)
                    elif field[:2] == b"s:":
                        began, until = map(float, value.split(b" "))
                        if 0 <= began <= until < math.inf:
                            spans[field[2:].decode(errors="replace")] = began, until
                    elif field[:2] == b"i:":
                        spans.setdefault(field[2:].decode(errors="replace").rpartition(":")[0], None)
                except ValueError:  # what no instance wrote
                    continue
            if not cursor:
                return Counted(counts, tuple(spans.values()))

    async def read_rates(self, window_starts_s: Iterable[int]) -> dict[int, dict[int, int]]:
        """Return window start -> key hash -> requests, for those windows that hold any."""
        windows = {start: await self.read_window(start) for start in window_starts_s}
        return {start: window.counts for start, window in windows.items() if window.counts}
