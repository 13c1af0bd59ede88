-- Changes a register: a small value that processes share. The script changes it only if it still
-- has the version that the caller saw. A call may also only read the register.
--
-- Twin: `Registers` in src/store/register.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua)
--
-- KEYS[1]  the register: a packed head, and the value
-- ARGV[1]  the call, packed; the reply is packed too (layout.lua)
-- ARGV[2]  the new value; empty if the call only reads
-- ARGV[3]  the channel on which the change is published; empty for none
-- ARGV[4]  the name of the register in the message

local format, is_change, seen_version, ttl = struct.unpack(REGISTER_CALL, ARGV[1])
if format ~= FORMAT then
  return redis.error_reply('TOLLGATE format ' .. format .. ' of calls is unknown, this script understands ' .. FORMAT)
end

-- The register: its version, 0 for none, when it was changed, and its bytes.
local version, changed_at, bytes = 0, server_time, redis.call('GET', KEYS[1])
if bytes then
  format = string.byte(bytes) or 0
  if format ~= FORMAT then
    return redis.error_reply('TOLLGATE this register has format ' .. format .. ', this script understands ' .. FORMAT)
  end
  if #bytes >= REGISTER_HEAD_SIZE then
    format, version, changed_at = struct.unpack(REGISTER_HEAD, bytes)
  end
  if #bytes < REGISTER_HEAD_SIZE or version >= NEVER then
    -- No script wrote this. The register counts as lost.
    bytes, version, changed_at = nil, 0, server_time
  end
end

if is_change == 1 and seen_version == version then
  -- If the register was lost, its version begins with the server's clock, in microseconds. The lost
  -- register never had so large a version.
  version = version + 1
  if version < server_time then version = server_time end
  redis.call('SET', KEYS[1], struct.pack(REGISTER_HEAD, FORMAT, version, server_time) .. ARGV[2], 'PX',
    math.floor(ttl / 1000) + 1)
  if ARGV[3] ~= '' then
    -- If PUBLISH is forbidden, the other processes see the change with their next call.
    redis.pcall('PUBLISH', ARGV[3], struct.pack(REGISTER_MESSAGE_FIELDS, REGISTER_MESSAGE, version) .. ARGV[4] .. ARGV[2])
  end
  return struct.pack(REGISTER_REPLY, FORMAT, 1, version, 0)
end

local age = server_time > changed_at and server_time - changed_at or 0
return struct.pack(REGISTER_REPLY, FORMAT, 0, version, age)
  .. (bytes and string.sub(bytes, REGISTER_HEAD_SIZE + 1) or '')
