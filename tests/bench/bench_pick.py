"""Time of one `dispatch.pick`, by kind of key; goal: at most 5 µs."""

import timeit
from random import Random

from stats import machine, spread

from service.dispatch import pick
from service.fleet import Fleet
from service.table import Table

CALLS = 20_000


def main() -> None:
    """Print min/median/max over 9 rounds of 20,000 picks, R = 30 endpoints, a table of 128,824 keys."""
    rng, keys = Random(0), Random(1)
    fleet = Fleet(tuple((f"e{i}", f"10.0.0.{i}:8000") for i in range(30)))
    for endpoint in fleet.endpoints:
        endpoint.inflight = rng.randrange(20)
    hashes = [keys.getrandbits(64) for _ in range(128_824)]
    copies = {h: 1 + i % 3 for i, h in enumerate(hashes)}
    table = Table(1, 1, 0.0, {h: tuple(f"e{(h + j) % 30}" for j in range(k)) for h, k in copies.items()})
    print(f"pick, µs, min / median / max of 9 rounds ({machine()})")
    for name, wanted in (("planned, 1 copy", 1), ("planned, 2 copies", 2), ("planned, 3 copies", 3), ("cold", 0)):
        chosen = [h for h, k in copies.items() if k == wanted][:CALLS] if wanted else list(range(CALLS))

        def round_(chosen: list[int] = chosen) -> None:
            for key_hash in chosen:
                pick(table, fleet, key_hash, rng)

        times = [t / len(chosen) * 1e6 for t in timeit.repeat(round_, number=1, repeat=9)]
        print(f"  {name:<18} {spread(times)}")


if __name__ == "__main__":
    main()
