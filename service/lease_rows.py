"""What processes tell each other about keys: the rows, their bytes, and the script that grants slots.

`{cacheroute:<pool>}:leases` is a HASH, one field an instance: a head (when it expires, ms of the server's clock, and
totals) and a row for each of its keys (what it has in flight, what it could use, weight, what it may fill). Bytes
instead of fields: they are read whole by each instance in each exchange.

The script, in one step that nothing can interleave:
1. Instances whose time is over are dropped, and their slots are free. What no instance wrote is dropped too.
2. The caller gets what it asks for of a key, but no more than the limit less what the others hold of it. An instance
   holds what it may fill, or what it has in flight if that is more: nothing that runs is taken away.
3. An instance without a row for a key may give it `allowance` slots without asking, so it counts as holding these.
4. The caller's rows are stored and everybody's are returned.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from service.scripts import Script

MAGIC = 0x63723031
_HEAD = struct.Struct(">IdIII")
_ROW = struct.Struct(">QIIdII")
_ASK = struct.Struct(">QIIdIII")
_GRANT = struct.Struct(">II")
U32_MAX = 2**32 - 1
WEIGHT_MAX = 1e9

# In place of hashes: requests without a key, and all keys of a process that have no row. A key of that hash is both.
NO_KEY, REST = 0, 2**64 - 1

# KEYS: leases.
# ARGV: instance, ms to live, slots of a key under the cap, totals and allowance (12 bytes), rows asked for.
LEASE = Script(f"""
local HEAD, ROW, ASK = {_HEAD.size}, {_ROW.size}, {_ASK.size}
local me, ttl, cap_limit, asked = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all = redis.call('HGETALL', KEYS[1])
local allowances, caps, shares, others = 0, {{}}, {{}}, {{}}
for i = 1, #all, 2 do
  local name, bytes = all[i], all[i + 1]
  if name ~= me then
    local living, allowance = false, 0
    if #bytes >= HEAD and (#bytes - HEAD) % ROW == 0 then
      local magic, expires, _, _, free = struct.unpack('>I4dI4I4I4', bytes)
      -- The bound on the other side is for a server whose clock was set back.
      living, allowance = magic == {MAGIC} and expires > now and expires <= now + 100 * ttl, free
    end
    if living then
      allowances = allowances + allowance
      for at = HEAD + 1, #bytes, ROW do
        local key, inflight, _, _, cap, share = struct.unpack('>c8I4I4dI4I4', bytes, at)
        caps[key] = (caps[key] or 0) + math.max(cap, inflight) - allowance
        shares[key] = (shares[key] or 0) + math.max(share, inflight)
      end
      others[#others + 1] = name
      others[#others + 1] = bytes
    else
      redis.call('HDEL', KEYS[1], name)
    end
  end
end
local inflight, refused, allowance = struct.unpack('>I4I4I4', ARGV[4])
-- It learns only now how many processes there are, and keeps to that as soon as it has the answer.
allowance = math.min(allowance, math.max(1, math.floor(cap_limit / (#others / 2 + 1))))
local stored = {{struct.pack('>I4dI4I4I4', {MAGIC}, now + ttl, inflight, refused, allowance)}}
local grants = {{}}
for at = 1, #asked, ASK do
  local key, inflight, demand, weight, cap, share, limit = struct.unpack('>c8I4I4dI4I4I4', asked, at)
  cap = math.max(0, math.min(cap, cap_limit - allowances - (caps[key] or 0)))
  share = math.max(0, math.min(share, limit - (shares[key] or 0)))
  grants[#grants + 1] = struct.pack('>I4I4', cap, share)
  stored[#stored + 1] = struct.pack('>c8I4I4dI4I4', key, inflight, demand, weight, cap, share)
end
redis.call('HSET', KEYS[1], me, table.concat(stored))
redis.call('PEXPIRE', KEYS[1], 10 * ttl)
return {{now, table.concat(grants), others}}
""")


class Row(NamedTuple):
    """One key in one process. demand: slots it could use; cap, share: slots it may fill under either rule."""

    key: int
    inflight: int
    demand: int
    weight: float
    cap: int
    share: int


class Ask(NamedTuple):
    """One key as its process reports it. cap, share: what it asks for; limit: the key's share in all processes."""

    key: int
    inflight: int
    demand: int
    weight: float
    cap: int
    share: int
    limit: int


@dataclass(frozen=True, slots=True)
class Report:
    """All of a process. refused: requests turned away for the fleet being full.  allowance: slots of any other key."""

    inflight: int
    refused: int
    allowance: int
    rows: Sequence[Row | Ask]


@dataclass(frozen=True, slots=True)
class Answer:
    """What an exchange brings. grants: (cap, share) of each row asked for.  others: the reports of other instances."""

    now_ms: int
    grants: Sequence[tuple[int, int]]
    others: Mapping[str, Report] = field(default_factory=dict)


def pack(report: Report) -> tuple[bytes, bytes]:
    """Return totals and rows of one's own report as the script takes them."""
    head = struct.pack(">III", *(min(n, U32_MAX) for n in (report.inflight, report.refused, report.allowance)))
    return head, b"".join(_ASK.pack(*row) for row in report.rows)


def unpack(reply: object) -> Answer:
    """Return the script's answer; raise ValueError for anything else."""
    try:
        now_ms: int
        grants: bytes
        others: list[bytes]
        now_ms, grants, others = reply  # type: ignore[misc]
        reports = {}
        for name, data in zip(others[::2], others[1::2], strict=True):
            _, _, inflight, refused, allowance = _HEAD.unpack_from(data)
            rows = tuple(map(Row._make, _ROW.iter_unpack(data[_HEAD.size :])))
            # One that is no number would spread to everybody's.
            if all(0 <= row.weight <= WEIGHT_MAX and (row.weight or row.key == REST) for row in rows):
                reports[name.decode(errors="replace")] = Report(inflight, refused, allowance, rows)
        return Answer(int(now_ms), tuple(_GRANT.iter_unpack(grants)), reports)
    except (struct.error, TypeError, AttributeError, ValueError) as exc:
        raise ValueError(f"not what the lease script answers: {exc}") from exc
