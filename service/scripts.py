"""What runs inside Redis: each script is all or nothing, and touches only keys that its caller names.

A script is called by its digest; see `service.connect.Link.run`.
"""

import hashlib


class Script:
    """One script and its digest; `service.connect` runs it."""

    def __init__(self, text: str) -> None:
        """Nothing is sent."""
        self.text, self.digest = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


# KEYS: head, plan, log, plan that falls out of those kept, leader, freeze, cycles.
# ARGV: expected version, version, epoch, bytes, sha256, created_at, actor, reason, seconds that the plan falling out
# stays, length of the log, number of keys, channel, lease that the publisher holds ('': an operator), record of the
# cycle (''), length of the cycles.
# Returns {1, version}; {0, published version}: it is not the expected one; {2, who leads, or ''}; {3, freeze}.
PUBLISH = Script("""
local head, plan, log = KEYS[1], KEYS[2], KEYS[3]
local version, epoch = tonumber(ARGV[2]), tonumber(ARGV[3])
local current = tonumber(redis.call('HGET', head, 'version') or '0')
local current_epoch = tonumber(redis.call('HGET', head, 'epoch') or '0')
if current ~= tonumber(ARGV[1]) or epoch < current_epoch then return {0, current} end
if epoch == current_epoch and version <= current then return {0, current} end
if ARGV[13] ~= '' then
  local leader = redis.call('GET', KEYS[5]) or ''
  if leader ~= ARGV[13] then return {2, leader} end
  local frozen = redis.call('GET', KEYS[6])
  if frozen then return {3, frozen} end
end
-- First what can fail for a foreign type under the key: a script does not roll back.
if ARGV[14] ~= '' then
  redis.call('XADD', KEYS[7], 'MAXLEN', '~', ARGV[15], '*', 'event', 'cycle', 'record', ARGV[14])
end
redis.call('XADD', log, 'MAXLEN', '~', ARGV[10], '*', 'event', 'publish', 'version', ARGV[2], 'epoch', ARGV[3],
           'sha256', ARGV[5], 'actor', ARGV[7], 'reason', ARGV[8], 'keys', ARGV[11])
redis.call('SET', plan, ARGV[4])
redis.call('HSET', head, 'version', ARGV[2], 'epoch', ARGV[3], 'sha256', ARGV[5], 'created_at', ARGV[6],
           'actor', ARGV[7], 'reason', ARGV[8])
-- Expiry, and no deletion: somebody may be about to fetch it.
redis.call('EXPIRE', KEYS[4], ARGV[9])
redis.call('PUBLISH', ARGV[12], ARGV[3] .. ':' .. ARGV[2])
return {1, version}
""")

# KEYS: leader, terms.
# ARGV: who asks (no two processes alike), milliseconds that the lease lasts, 1 to take it from whoever has it.
# Returns whether the asker has it, the lease (`<term> <who>`), and milliseconds until it ends.
LEAD = Script("""
local lease = redis.call('GET', KEYS[1])
if lease and string.match(lease, '^%d+ (.*)$') == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, lease, tonumber(ARGV[2])}
end
if lease and ARGV[3] ~= '1' then return {0, lease, redis.call('PTTL', KEYS[1])} end
lease = redis.call('INCR', KEYS[2]) .. ' ' .. ARGV[1]
redis.call('SET', KEYS[1], lease, 'PX', ARGV[2])
return {1, lease, tonumber(ARGV[2])}
""")

# KEYS: leader.  ARGV: who gives the lead back.
RESIGN = Script("""
local lease = redis.call('GET', KEYS[1])
if not lease or string.match(lease, '^%d+ (.*)$') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
""")

# KEYS: cycles, leader.
# ARGV: lease, record, length of the cycles.
# Sent again after a lost answer it finds its record at the end.
RECORD = Script("""
local leader = redis.call('GET', KEYS[2]) or ''
if leader ~= ARGV[1] then return {2, leader} end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if last then
  for i = 1, #last[2], 2 do
    if last[2][i] == 'record' and last[2][i + 1] == ARGV[2] then return {1, ''} end
  end
end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'event', 'cycle', 'record', ARGV[2])
return {1, ''}
""")

# KEYS: freeze, log.
# ARGV: freeze ('': it ends), milliseconds that it lasts (0: until it is ended), actor, reason, length of the log.
FREEZE = Script("""
if ARGV[1] == '' then
  if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'event', 'unfreeze', 'actor', ARGV[3], 'reason', ARGV[4])
  return redis.call('DEL', KEYS[1])
end
if redis.call('GET', KEYS[1]) == ARGV[1] then return 1 end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'event', 'freeze', 'actor', ARGV[3], 'reason', ARGV[4],
           'ttl_ms', ARGV[2])
if ARGV[2] == '0' then redis.call('SET', KEYS[1], ARGV[1]) else redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return 1
""")

# KEYS: rates of a window.
# ARGV: field of the batch number, batch, seconds to live, field of the span or '', from, until, then field and count in
# turn.
ADD_RATES = Script("""
local seen = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '-1')
if tonumber(ARGV[2]) <= seen then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'revision', 1)
if ARGV[4] ~= '' then
  local from, till = ARGV[5], ARGV[6]
  local told = redis.call('HGET', KEYS[1], ARGV[4])
  if told then
    local first, last = string.match(told, '^([%d.]+) ([%d.]+)$')
    if (tonumber(first) or math.huge) < tonumber(from) then from = first end
    if (tonumber(last) or 0) > tonumber(till) then till = last end
  end
  redis.call('HSET', KEYS[1], ARGV[4], from .. ' ' .. till)
end
for i = 7, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 1
""")

# KEYS: what an instance says, instances.
# ARGV: instance, milliseconds that it holds, seconds after which an instance without a sign is dead, then field and
# value in turn.
# Returns the instances that live. By this server's clock alone: a host with a wrong one would take out all others.
SIGN = Script("""
local now = tonumber(redis.call('TIME')[1])
-- First what a server without memory refuses: after a deletion it would let all pass.
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[2], now + ARGV[3], '+inf')
redis.call('DEL', KEYS[1])
-- Lua's stack holds some thousands of values.
for i = 4, #ARGV, 1000 do redis.call('HSET', KEYS[1], unpack(ARGV, i, math.min(i + 999, #ARGV))) end
if #ARGV > 3 then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return redis.call('ZRANGE', KEYS[2], 0, -1)
""")
