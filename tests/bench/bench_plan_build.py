"""Time of admission and placement for 128,824 keys on 30 endpoints; goals: W = 128 in 5 ms, W = 512 in 20 ms.

The keys' rates are lognormal quantiles with σ = 1.6482, whose head is the paper's: 4 % of the keys hold 46.5 % of the
rate. Beside it, in the same run, LPT over all keys in plain Python, to compare with the paper's 345 ms.
"""

import heapq
import math
import time
from random import Random
from statistics import NormalDist

from stats import machine, spread

from planner.admission import Rules
from planner.build import Built, build
from planner.rates import KeyRates
from service.keys import KEY_CHECK, hash_key

KEYS, R, SIGMA, RUNS = 128_824, 30, 1.6482, 21
TOTAL_RPS = 1000.0
REPLICA_CAP_RPS = 2.5  # the few hottest keys get two copies
PAPER_MS = 345.0


def rates() -> KeyRates:
    """Return rates of the paper's shape under random hashes."""
    normal, rng = NormalDist(), Random(0)
    raw = [math.exp(SIGMA * normal.inv_cdf((i + 0.5) / KEYS)) for i in range(KEYS)]
    scale = TOTAL_RPS / math.fsum(raw)
    return KeyRates.of((rng.getrandbits(64) for _ in raw), (rate * scale for rate in raw))


def plain_python(keys: list[tuple[int, float]]) -> float:
    """Return the ms that sorting all keys and giving each to the least loaded endpoint takes, with a heap."""
    began = time.perf_counter()
    heap, assignment = [(0.0, i) for i in range(R)], {}
    for key_hash, rate in sorted(keys, key=lambda item: (-item[1], item[0])):
        load, endpoint = heap[0]
        assignment[key_hash] = endpoint
        heapq.heapreplace(heap, (load + rate, endpoint))
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    """Print min/median/max of 21 builds for each W, and of 15 runs of the plain one."""
    measured, names = rates(), tuple(f"endpoint-{i}" for i in range(R))
    print(f"plan build, {KEYS} keys, R = {R}, ms, min / median / max of {RUNS} ({machine()})")

    def once(slots_per_endpoint: int) -> Built:
        return build(
            measured,
            names,
            rules=Rules(slots_per_endpoint=slots_per_endpoint, replica_cap_rps=REPLICA_CAP_RPS),
            key_check=hash_key(KEY_CHECK),
        )

    totals = {}
    for w in (128, 512):
        once(w)
        builds = [once(w) for _ in range(RUNS)]
        totals[w] = [b.admit_ms + b.place_ms for b in builds]
        shape = builds[0].shape
        admit, place = [b.admit_ms for b in builds], [b.place_ms for b in builds]
        print(f"  W = {w:<4} {spread(totals[w])}   admit {spread(admit)}   place {spread(place)}")
        print(
            f"            {shape.admitted} keys, {shape.admitted_rate_share:.3f} of the rate, "
            f"at most {shape.max_copies} copies, max/mean {shape.max_over_mean:.4f}"
        )
    keys = list(zip(measured.key_hashes.tolist(), measured.rates_rps.tolist(), strict=True))
    plain = [plain_python(keys) for _ in range(15)]
    print(f"  plain Python, all keys  {spread(plain)}   (paper: {PAPER_MS:.0f} on its machine)")
    for w, total in totals.items():
        print(f"  W = {w:<4} is {min(plain) / min(total):.0f} times as fast as that (best of each)")


if __name__ == "__main__":
    main()
