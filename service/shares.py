"""Divides a number of slots: over keys by weight, and one key's over the processes that serve it.

Over keys (`shares`), weighted max-min fair:
1. No key gets more than it wants.
2. While slots are left they go to the keys that want more, in proportion to their weights.
3. Whole slots: each key gets its part rounded down, the rest go to the largest remainders. Equal remainders are ordered
   by key and `turn`, so that with fewer slots than keys each key has its turn.

A key's limit (`limits`) is that, or its part by weight if it wants less than that just now: whoever wants more all at
once is not refused for others who had taken the room.

Over processes (`part`): max-min fair by what each has and turns away of the key; what nobody wants is spread evenly, so
that a process where the key turns up next has room for it at once.
"""

from collections.abc import Mapping
from itertools import accumulate

from service.keys import normalise

# Any odd number with many bits set: multiplying by it orders equal keys anew for each turn.
MIX = 0x9E3779B97F4A7C15
# A product that rounding has brought to the next whole number must not give one slot too many.
ROUNDING = 1 - 1e-12


def shares(slots: int, wanted: Mapping[int, tuple[int, float]], *, turn: int = 0) -> dict[int, int]:
    """Return key -> slots, together at most `slots` and all of them while any key wants more.

    wanted: key -> (slots it can use, weight above 0).  About 1.5 µs a key.
    """
    if sum(want for want, _ in wanted.values()) <= slots:
        return {key: want for key, (want, _) in wanted.items()}
    given: dict[int, int] = {}
    # Those that want least for their weight are the first to be satisfied.
    order = sorted(wanted, key=lambda key: wanted[key][0] / wanted[key][1])
    # Summed from the end: taking weights off a sum would leave rounding errors where they differ much.
    weights_left = list(accumulate(wanted[key][1] for key in reversed(order)))[::-1]
    for key, weight_left in zip(order, weights_left, strict=True):
        want, weight = wanted[key]
        if want * weight_left > slots * weight:
            break
        given[key] = want
        slots -= want
    rest = order[len(given) :]
    exact = {key: slots * (wanted[key][1] / weights_left[len(given)]) for key in rest}
    for key in rest:
        given[key] = min(int(exact[key] * ROUNDING), wanted[key][0])
        slots -= given[key]
    # Rounding may leave more than one for a key, or one for a key that wants no more: hence more than one round.
    while slots > 0:
        for key in sorted(rest, key=lambda key: (given[key] - exact[key], (key + 1) * (2 * turn + 1) * MIX % 2**64)):
            if slots > 0 and given[key] < wanted[key][0]:
                given[key] += 1
                slots -= 1
    return given


def limits(slots: int, wanted: Mapping[int, int], weights: Mapping[int, float], *, turn: int = 0) -> dict[int, int]:
    """Return how many slots each key may fill, over all processes."""
    given = shares(slots, {key: (want, weights[key]) for key, want in wanted.items()}, turn=turn)
    total = sum(weights[key] for key, want in wanted.items() if want)
    # A key that wants nothing now has the part that it would have if it did.
    return {
        key: max(n, int(slots * (weights[key] / (total if wanted[key] else total + weights[key]))))
        for key, n in given.items()
    }


def part(slots: int, wanted: Mapping[int, int], place: int, count: int) -> int:
    """Return one process's part of a key's slots; the parts of all sum to `slots`.

    place: of this process, 0 to count - 1 and the same everywhere.  wanted: place -> slots it can use, if it can any.
    """
    mine, spare = wanted.get(place, 0), slots - sum(wanted.values())
    if spare >= 0:
        each, more = divmod(spare, count)
        return mine + each + (place < more)
    unsatisfied = len(wanted)
    for want in sorted(wanted.values()):
        if want * unsatisfied > slots:
            break
        slots -= want
        unsatisfied -= 1
    level, more = divmod(slots, unsatisfied)
    if mine <= level:
        return mine
    return level + (sum(want > level for other, want in wanted.items() if other < place) < more)


def parse_weights(values: tuple[str, ...]) -> dict[bytes, float]:
    """Return normalised key -> weight of each `KEY=WEIGHT`; raise ValueError that tells its place for a bad one."""
    weights: dict[bytes, float] = {}
    for place, value in enumerate(values, start=1):
        name, sep, number = value.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        key = normalise(name.encode())
        if not sep or not key or not 0 < weight <= 1e6:
            raise ValueError(f"number {place} is not KEY=WEIGHT with a weight above 0 and up to 1000000")
        if key in weights:
            raise ValueError(f"the key of number {place} has two weights")
        weights[key] = weight
    return weights
