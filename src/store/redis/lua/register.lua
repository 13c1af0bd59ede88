-- Changes a small value that processes share, if nobody else has since it was seen; or reads it (src/store/register.rs).
--
-- KEYS[1]  the register: a packed head, and the value
-- ARGV[1]  the call, packed; the answer is packed too. The formats are in src/guide/redis_format.md.
-- ARGV[2]  the new value
-- ARGV[3]  the channel on which the change is told; empty for none
-- ARGV[4]  how the register is named there

local VERSION, REGISTER = 1, 2
local HEAD, HEAD_SIZE = '<BI7I7', 15
-- Beyond, numbers are no longer exact.
local EXACT = 2 ^ 53

local raw = redis.call('TIME')
raw = raw[1] * 1000000 + raw[2]

local format, writes, seen, life = struct.unpack('<BBI7I7', ARGV[1])
if format ~= VERSION then
  return redis.error_reply('TOLLGATE format ' .. format .. ' of calls is unknown, this script understands ' .. VERSION)
end

local s = redis.call('GET', KEYS[1])
local version, at = 0, raw
if s then
  format = string.byte(s) or 0
  if format ~= VERSION then
    return redis.error_reply('TOLLGATE this register has format ' .. format .. ', this release understands ' .. VERSION)
  end
  if #s >= HEAD_SIZE then
    format, version, at = struct.unpack(HEAD, s)
  end
  if #s < HEAD_SIZE or version >= EXACT then
    -- Nothing that was written here: the next is made anew.
    s, version, at = nil, 0, raw
  end
end

if writes == 1 and seen == version then
  -- A register that is lost begins with a version that it did not have.
  version = version + 1
  if version < raw then version = raw end
  redis.call('SET', KEYS[1], struct.pack(HEAD, VERSION, version, raw) .. ARGV[2], 'PX', math.floor(life / 1000) + 1)
  if ARGV[3] ~= '' then
    -- Where that is forbidden, they know when they ask.
    redis.pcall('PUBLISH', ARGV[3], struct.pack('<BI7', REGISTER, version) .. ARGV[4] .. ARGV[2])
  end
  return struct.pack('<BBI7I7', VERSION, 1, version, 0)
end
local age = raw > at and raw - at or 0
return struct.pack('<BBI7I7', VERSION, 0, version, age) .. (s and string.sub(s, HEAD_SIZE + 1) or '')
