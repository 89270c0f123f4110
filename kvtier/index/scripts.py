"""What runs inside the server: each script is atomic, bounded, and takes what it finds there as hostile.

Time is always the server's own (``TIME``), so that a node's wrong clock changes nothing. Scripts touch
only keys that they are given, all of one hash slot. They are sent with each call (a kilobyte), which
needs no second way for a server that restarted and forgot them.

A value of a block is a list of entries of 20 bytes, see `codec`. Whatever has another length, or another
type, is garbage: it is replaced by the next publication and removed by the next withdrawal.
"""

from __future__ import annotations

from typing import Final

MAX_LOCATIONS: Final = 8
"""Entries in one value; beyond it the one that was renewed longest ago goes."""
MAX_INCARNATION: Final = 2**48
"""Incarnations are smaller (a number in a script is exact up to 2^53); larger ones are garbage, so that who
tampers with the index cannot use them up."""
MAX_TTL_S: Final = 90_000
"""An entry that claims to live longer is garbage (`Config` allows a day)."""
MAX_NODES: Final = 1024
"""Nodes in one list; beyond it those whose heartbeat is oldest are left out."""
FORGET_NODES_S: Final = 3600
"""A node that has been silent so long is no longer among those that are looked for."""
MAX_OWNER_BYTES: Final = 128
FORGET_OWNERS_S: Final = 30 * 86_400
"""An identity that nobody has used for so long is forgotten. A node's own disk knows its incarnation too."""

_ENTRIES: Final = """
local function number(at, value) local low, high = struct.unpack('<I4I3', value, at)
  return high * 4294967296 + low end
local now = tonumber(redis.call('TIME')[1])
local tag, mine = string.sub(ARGV[1], 1, 8), number(9, ARGV[1])
-- Entries that may stay: unexpired, of others or of a younger incarnation of this node; the latest of their
-- expiries; whether there is a younger incarnation's. Nil where the value is garbage.
local function others(value)
  local size = #value
  if size % 20 ~= 0 or size > MAX_LOCATIONS * 20 then return nil end
  local kept, last, younger = {}, 0, false
  for at = 1, size, 20 do
    local expiry = struct.unpack('<I4', value, at + 16)
    if expiry > now and expiry <= now + MAX_TTL_S then
      local is_younger = false
      local own = string.sub(value, at, at + 7) == tag
      if own then
        local its = number(at + 8, value)
        is_younger = its > mine and its < MAX_INCARNATION
      end
      if is_younger then younger = true end
      if is_younger or not own then
        kept[#kept + 1] = string.sub(value, at, at + 19)
        if expiry > last then last = expiry end
      end
    end
  end
  return kept, last, younger
end
-- One byte more than a value may have, so that a huge one is seen as such and never copied.
local function read(key)
  local value = redis.pcall('GETRANGE', key, 0, MAX_LOCATIONS * 20)
  if type(value) == 'string' then return value end
  return 'x'
end
"""

PUBLISH: Final = (
    _ENTRIES
    + """
local call, ttl = redis.call, ARGV[2]
local expiry = now + tonumber(ttl)
local entry = string.sub(ARGV[1], 1, 16) .. struct.pack('<I4', expiry)
for _, key in ipairs(KEYS) do
  local value = read(key)
  local kept, last, younger
  if value ~= '' and value ~= entry then kept, last, younger = others(value) end
  if not kept or #kept == 0 then
    call('SETEX', key, ttl, entry)
  elseif not younger then
    while #kept >= MAX_LOCATIONS do table.remove(kept, 1) end
    kept[#kept + 1] = entry
    if last < expiry then last = expiry end
    call('SETEX', key, last - now, table.concat(kept))
  end
end
return #KEYS
"""
)
"""KEYS: blocks. ARGV: the entry without its expiry (16 bytes), its TTL in seconds."""

WITHDRAW: Final = (
    _ENTRIES
    + """
for _, key in ipairs(KEYS) do
  local value = read(key)
  if value ~= '' then
    local kept, last = others(value)
    if not kept or #kept == 0 then
      redis.call('DEL', key)
    elseif #kept * 20 < #value then
      redis.call('SETEX', key, last - now, table.concat(kept))
    end
  end
end
return #KEYS
"""
)
"""KEYS: blocks. ARGV: as for `PUBLISH`, without the TTL."""

_OWNER: Final = """
-- Which incarnation and instance hold the identity; 0 where that is not known.
local function owner(key)
  local raw = redis.pcall('GETRANGE', key, 0, MAX_OWNER_BYTES)
  if type(raw) ~= 'string' then return 0, '' end
  local number, instance = string.match(raw, '^(%d+) (%w+)$')
  number = tonumber(number)
  if not number or number >= MAX_INCARNATION - 1 then return 0, '' end
  return number, instance
end
local known, instance = owner(KEYS[1])
local mine = tonumber(ARGV[1])
local function settle(incarnation, record, list)
  local number = string.format('%.0f', incarnation)
  redis.call('SET', KEYS[1], number .. ' ' .. ARGV[2], 'EX', FORGET_OWNERS_S)
  redis.call('SET', record, ARGV[1] .. ' ' .. ARGV[3], 'PX', ARGV[4])
  local now = tonumber(redis.call('TIME')[1])
  if type(redis.pcall('ZADD', list, now, ARGV[5])) ~= 'number' then
    redis.call('DEL', list)
    redis.call('ZADD', list, now, ARGV[5])
  end
  redis.call('ZREMRANGEBYSCORE', list, '-inf', now - FORGET_NODES_S)
  redis.call('ZREMRANGEBYSCORE', list, '(' .. (now + FORGET_NODES_S), '+inf')
end
"""

REGISTER: Final = (
    _OWNER
    + """
if known >= mine then
  mine = known + 1
  ARGV[1] = string.format('%.0f', mine)
end
settle(mine, KEYS[2], KEYS[3])
return ARGV[1]
"""
)
"""KEYS: owner, record, list of nodes. ARGV: incarnation, instance, record, milliseconds that it lives,
node. Returns the incarnation.
"""

HEARTBEAT: Final = (
    _OWNER
    + """
if known >= mine and instance ~= ARGV[2] then return {-1, string.format('%.0f', known)} end
local there = redis.call('EXISTS', KEYS[2])
settle(math.max(known, mine), KEYS[2], KEYS[3])
return {instance == ARGV[2] and there or 0, ARGV[1]}
"""
)
"""As `REGISTER`. Returns 1, or 0 where nothing was known, or -1 where another daemon holds the identity;
and the incarnation that holds it.

A daemon whose call to register was carried out but not answered goes on with the incarnation it has: the
instance tells that the younger one is its own.
"""

LEAVE: Final = (
    _OWNER
    + """
if known >= mine and instance ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[2])
redis.pcall('ZREM', KEYS[3], ARGV[5])
return 1
"""
)
"""As `REGISTER`. The owner stays known for `FORGET_OWNERS_S`, so that incarnations never go back."""

NODES: Final = """
local found = redis.pcall('ZREVRANGE', KEYS[1], 0, MAX_NODES - 1)
local ids = {}
if type(found) == 'table' and not found.err then
  for _, id in ipairs(found) do if #id == 32 then ids[#ids + 1] = id end end
end
return {redis.call('TIME')[1], ids}
"""
"""KEYS: list of nodes. Returns the server's seconds and ids, those heard of last first."""

_CONSTANTS: Final = {
    "MAX_LOCATIONS": MAX_LOCATIONS,
    "MAX_INCARNATION": MAX_INCARNATION,
    "MAX_TTL_S": MAX_TTL_S,
    "MAX_NODES": MAX_NODES,
    "FORGET_NODES_S": FORGET_NODES_S,
    "FORGET_OWNERS_S": FORGET_OWNERS_S,
    "MAX_OWNER_BYTES": MAX_OWNER_BYTES,
}


def compact(script: str) -> bytes:
    """A script as it is sent: constants filled in, comments and indentation left out."""
    for name, value in _CONSTANTS.items():
        script = script.replace(name, str(value))
    lines = (line.strip() for line in script.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("--")).encode()
