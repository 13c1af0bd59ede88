
-- ── a joint request: one permit of each of several keys, at one moment ───────────────────────────
--
-- This script is the script about rates as a function, `decide`, with this file behind it. So each
-- key decides as it does alone.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), decide(key, call, server_time, redis_write, moment), which
-- runs the script about rates for one key
--
-- KEYS[i]  the state of key i
-- ARGV[i]  the call for key i, packed: a lease with one demand, for one permit
--
-- A *moment* is counted from now, so that the keys can be compared: each has a logical time of its
-- own. The script looks for the first moment at which all keys grant a permit:
--
-- 1. Each key grants the first slot that is not before the moment. If its slot is later, the moment
--    moves there.
-- 2. Keys with earlier slots decide again for the new moment, until all slots are at the moment.
--
-- While it looks, nothing is written: `redis_write` puts the commands into a list. The last list of each
-- key is run at the end. So no slot is booked and given back, and a key that refuses leaves no trace
-- with the others.

-- Where the number of limits begins in a call (layout.lua, CALL), from 1.
local CALL_LIMITS_AT = 117

-- After so many decisions, the slots stay as they are. The caller goes on from there.
local MOST_DECISIONS = 32

-- The commands that the last decision would run, as a linked list. Their order does not matter.
local commands
local function note_command(...)
  commands = { next = commands, ... }
end

-- What was decided for each key. If a call fails, its reply is the error, and has no status. `added` is what
-- the request adds to its status.
local decided = {}

-- Decides the call for key i. Its permit is of use from `moment` on, or as the call states if that is nil.
-- With NEVER, the key decides about everything but the permit. Returns the status.
local function decide_key(i, moment)
  commands = nil
  local reply, status, wait = decide(KEYS[i], ARGV[i], server_time, note_command, moment)
  decided[i] = { reply = reply, status = status, wait = wait, commands = commands, added = 0 }
  return status
end

-- The moment; the key whose slot moved it last, or nil; and the key that refused, recovers, failed or
-- is unsure of the time, or nil.
local moment, last, failed = 0, nil, nil
for i = 1, #KEYS do
  local demand_at = CALL_SIZE + LIMIT_SIZE * string.byte(ARGV[i], CALL_LIMITS_AT) + 1
  local _, _, earliest = struct.unpack(CALL_DEMAND, ARGV[i], demand_at)
  if earliest > moment then moment = earliest end
end

-- The keys decide in turn, until all agree.
local i, agreed, decisions = 0, 0, 0
while agreed < #KEYS and decisions < MOST_DECISIONS do
  i = i % #KEYS + 1
  if not decided[i] or decided[i].wait ~= moment then
    decisions = decisions + 1
    if decide_key(i, moment > 0 and moment or nil) ~= GRANTED then
      failed = i
      break
    end
    if decided[i].wait > moment then
      moment, last, agreed = decided[i].wait, i, 0
    end
  end
  agreed = agreed + 1
end

if failed then
  -- The other keys decide about everything but the permit. Their reply is that of a key that
  -- recovers and may be asked again at once.
  for i = 1, #KEYS do
    if i ~= failed and decide_key(i, NEVER) == GRANTED then decided[i].added = RECOVERING end
  end
elseif last then
  decided[last].added = LAST
end

local parts = { struct.pack(JOINT_REPLY, FORMAT, GRANTED) }
for i = 1, #KEYS do
  local reply, status = decided[i].reply, decided[i].status
  -- The server's clock may have been set. Nothing is written, and the calls are sent again.
  if status == UNSURE then return reply end
  if not status then reply = '-' .. reply.err end
  parts[2 * i], parts[2 * i + 1] = struct.pack(JOINT_PART, decided[i].added, #reply), reply
end
for i = 1, #KEYS do
  local command = decided[i].commands
  while command do
    redis.call(unpack(command))
    command = command.next
  end
end
return table.concat(parts)
