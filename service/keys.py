"""Finds the routing key of a request and turns it into the 64-bit number that every other part works with.

Where a key comes from: the first of a list of sources that has one. A source is the name of a header (a JWT claim is
one, once Envoy's `jwt_authn` has turned it into a header), `:authority`, or `:path/N`, the N-th segment of the path.

How it is written, so that the same tenant has the same hash wherever its key is typed:
1. A header: the first value of that name, without white space at its ends. Case is kept: ids differ by it.
2. `:authority`: in lower case, without port and final dot, as names of hosts are compared.
3. `:path/N`: counted from 1 over segments that are not empty, without query and fragment, percent-decoded once.
4. An empty value is no key: the next source is asked.
5. A value that is longer than allowed, or not UTF-8, is not used: the request is balanced like one without a key, and
   no further source is asked, since one that a client controls must not decide where another one is looked for.

A key leaves the process only as its hash: in Redis, in plans, in metrics and in spans. Whoever reads those can try out
names against them, unless there is a salt that he cannot guess: 16 random bytes or more. The hash is quick, not
cryptographic; it keeps names out of sight and is no substitute for access control. It is xxh3-64 with a fixed seed, so
that every process and every version agrees; `hash_key(KEY_CHECK, salt)` stands in each plan, so that a reader with
another salt is noticed.
"""

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

import xxhash

SEED = 0x63616368  # Any number would do; fixed for good, since plans outlive processes.
KEY_CHECK = b"cacheroute"
AUTHORITY = ":authority"
PATH = ":path"
WHITE = b" \t\r\n"


def hash_key(key: bytes, salt: bytes = b"") -> int:
    """Return the 64-bit hash of `key`; about 0.2 µs."""
    return xxhash.xxh3_64_intdigest(salt + key, SEED)


def format_hash(key_hash: int) -> str:
    """Return the hash as people and metrics see it: 16 lower-case hex digits."""
    return f"{key_hash:016x}"


def normalise(value: bytes) -> bytes:
    """Return a header's value as it is hashed (rule 1)."""
    return value.strip(WHITE)


def check_source(name: str) -> str:
    """Return a source of keys as `KeyReader` takes it; raise ValueError for what is none."""
    name = name.lower()
    if name.startswith(":") and name != AUTHORITY:
        head, _, number = name.partition("/")
        if head != PATH or not number.isdigit() or not 1 <= int(number) <= 64:
            raise ValueError(f"{name!r} is neither a header, {AUTHORITY} nor {PATH}/N with N from 1 to 64")
    elif not name or any(c in name for c in " =/,"):
        raise ValueError(f"{name!r} is not the name of a header")
    return name


class KeyReader:
    """Reads the key of a request by the rules above; built once."""

    def __init__(self, sources: tuple[str, ...], max_bytes: int) -> None:
        """sources: as from `check_source`, in order.  max_bytes: of the key as it is hashed."""
        self._max_bytes = max_bytes
        self._sources: list[tuple[str, int]] = []
        for source in sources:
            name, _, number = source.partition("/")
            self._sources.append((name, int(number or 0)))
        # Which headers a caller must collect.
        self.headers = frozenset(name for name, _ in self._sources)

    def read(self, headers: Mapping[str, bytes]) -> tuple[bytes | None, str]:
        """Return (key, "") or, without a usable one, (None, why it was rejected); why is empty when there is none.

        headers: the first value of each of `self.headers` that the request has.
        """
        for name, segment in self._sources:
            value = headers.get(name)
            if not value:
                continue
            if segment:
                value = _segment(value, segment)
            elif name == AUTHORITY:
                value = _host(value)
            else:
                value = value.strip(WHITE)
            if value:
                return self._check(value)
        return None, ""

    def _check(self, key: bytes) -> tuple[bytes | None, str]:
        if len(key) > self._max_bytes:
            return None, "too_long"
        if not key.isascii():
            try:
                key.decode()
            except UnicodeDecodeError:
                return None, "not_utf8"
        return key, ""


def _segment(path: bytes, number: int) -> bytes:
    path = path.partition(b"?")[0].partition(b"#")[0]
    segments = [part for part in path.split(b"/") if part]
    return unquote_to_bytes(segments[number - 1]) if number <= len(segments) else b""


def _host(authority: bytes) -> bytes:
    if authority.startswith(b"["):
        return authority.partition(b"]")[0].removeprefix(b"[").lower()
    return authority.partition(b":")[0].removesuffix(b".").lower()
