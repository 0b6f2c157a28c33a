"""Turns a routing key into the 64-bit number that every other part works with.

A key (a tenant id, say) leaves the process only as this hash: in Redis, in plans, in metrics and in spans. Whoever
reads those can try out names against them, unless there is a salt that he cannot guess: 16 random bytes or more. The
hash is quick, not cryptographic; it keeps names out of sight and is no substitute for access control. It is xxh3-64
with a fixed seed, so that every process and every version agrees; `hash_key(KEY_CHECK, salt)` stands in each plan, so
that a reader with another salt is noticed.
"""

import xxhash

SEED = 0x63616368  # Any number would do; fixed for good, since plans outlive processes.
KEY_CHECK = b"cacheroute"


def hash_key(key: bytes, salt: bytes = b"") -> int:
    """Return the 64-bit hash of `key`; about 0.2 µs."""
    return xxhash.xxh3_64_intdigest(salt + key, SEED)


def format_hash(key_hash: int) -> str:
    """Return the hash as people and metrics see it: 16 lower-case hex digits."""
    return f"{key_hash:016x}"
