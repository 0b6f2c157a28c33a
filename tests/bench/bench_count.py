"""What counting one request costs on the request path: a key that is there, a new one, one beyond keys_max."""

import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stats import machine, spread

from service.rates import Rates

REQUESTS, REPEATS = 200_000, 7


def cost_ns(rates: Rates, keys: list[int]) -> float:
    """Return the CPU time of one count."""
    began = time.process_time()
    for key in keys:
        rates.count(key, 1000.0)
    return (time.process_time() - began) / len(keys) * 1e9


def main() -> None:
    """Print min / median / max over repeats."""
    rng = Random(0)
    there = [rng.getrandbits(64) for _ in range(20_000)]
    requests = [there[int(rng.random() ** 3 * len(there))] for _ in range(REQUESTS)]
    new = [rng.getrandbits(64) for _ in range(REQUESTS)]
    rows: dict[str, list[float]] = {"a key that is there": [], "a new key": [], "a key beyond keys_max": []}
    for _ in range(REPEATS):
        rates = Rates(30, 7200)
        for key in there:
            rates.count(key, 1000.0)
        rows["a key that is there"].append(cost_ns(rates, requests))
        rows["a new key"].append(cost_ns(rates, new))
        full = Rates(30, 7200, keys_max=200_000)
        for key in new:
            full.count(key, 1000.0)
        rows["a key beyond keys_max"].append(cost_ns(full, [key ^ 1 for key in new]))
    print(f"counting a request, CPU ns, min / median / max of {REPEATS} ({machine()})")
    for name, values in rows.items():
        print(f"  {name:24} {spread(values, 0)}")


if __name__ == "__main__":
    main()
