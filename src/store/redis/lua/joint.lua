
-- ── a joint request: one permit of each of several keys, at one moment ───────────────────────────
--
-- This script is the script about rates as a function, `decide`, with this file behind it. So each
-- key decides as it does alone.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, decide(KEYS, ARGV, redis), which runs the script about rates once
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
-- While it looks, nothing is written: `decide` writes into a list. The last list of each key is
-- written at the end. So no slot is booked and given back, and a key that refuses leaves no trace
-- with the others.

-- Where some fields of a call begin (layout.lua, CALL), from 1: the operation, the most units to prefetch,
-- limits and demands.
local CALL_OPERATION_AT = 2
local CALL_PREFETCH_AT = 94
local CALL_LIMITS_AT = 117
local CALL_DEMANDS_AT = 118

-- After so many decisions, the slots stay as they are. The caller goes on from there.
local MOST_DECISIONS = 32

-- The server's clock, and what `decide` writes. Time stands still while a script runs.
local time, writes = redis.call('TIME'), nil

-- What `decide` uses instead of `redis`.
local recorder = { error_reply = redis.error_reply }

function recorder.call(command, ...)
  if command == 'GETRANGE' then return redis.call(command, ...) end
  if command == 'TIME' then return time end
  writes[#writes + 1] = { command, ... }
end

-- Of each key: its reply, what it writes, and the wait until its slot.
local replies, all_writes, waits = {}, {}, {}

-- Decides a call for key i. Returns its status. An error is a reply that begins with a minus sign.
local function run(i, call)
  writes = {}
  local reply = decide({ KEYS[i] }, { call }, recorder)
  if type(reply) == 'table' then reply = '-' .. reply.err end
  replies[i], all_writes[i] = reply, writes
  if string.byte(reply) ~= CALL_VERSION then return REFUSED end
  return string.byte(reply, REPLY_STATUS_AT) % SHARED
end

-- Returns where the demand of a call begins, where it ends, and from when on its permit is of use.
local function demand_of(call)
  local from = CALL_SIZE + CALL_LIMIT_SIZE * string.byte(call, CALL_LIMITS_AT) + 1
  if string.byte(call, CALL_OPERATION_AT) == LEASE then return from, from + CALL_DEMAND_SIZE - 1, 0 end
  local _, _, earliest = struct.unpack(CALL_LATER_DEMAND, call, from)
  return from, from + CALL_LATER_DEMAND_SIZE - 1, earliest
end

-- Returns a call with another operation and demand, or with none, and without prefetch.
local function with_demand(call, operation, count, demand)
  local from, to = demand_of(call)
  return table.concat({
    string.sub(call, 1, CALL_OPERATION_AT - 1), string.char(operation),
    string.sub(call, CALL_OPERATION_AT + 1, CALL_PREFETCH_AT - 1), struct.pack('<I4', 0),
    string.sub(call, CALL_PREFETCH_AT + 4, CALL_DEMANDS_AT - 1), struct.pack('<I2', count),
    string.sub(call, CALL_DEMANDS_AT + 2, from - 1), demand, string.sub(call, to + 1),
  })
end

-- Decides the call of key i, whose permit is of use from `moment` on.
local function ask(i, moment)
  local call = ARGV[i]
  if moment > 0 then
    local cost, count = struct.unpack(CALL_DEMAND, call, (demand_of(call)))
    call = with_demand(call, LEASE_LATER, 1, struct.pack(CALL_LATER_DEMAND, cost, count, moment))
  end
  local status = run(i, call)
  if status == GRANTED then
    local _, _, wait = struct.unpack(SEGMENT, replies[i], REPLY_SIZE + 1)
    waits[i] = wait
  end
  return status
end

-- Adds a number to the status of a reply.
local function add_to_status(i, number)
  local reply = replies[i]
  replies[i] = string.sub(reply, 1, REPLY_STATUS_AT - 1) .. string.char(string.byte(reply, REPLY_STATUS_AT) + number)
    .. string.sub(reply, REPLY_STATUS_AT + 1)
end

-- Decides the calls. Returns the key whose slot moved the moment last, or nil; and the key that
-- refused, recovers, failed or is unsure of the time, or nil.
local function decide_all()
  local moment, last, decisions = 0, nil, 0
  for i = 1, #KEYS do
    local _, _, earliest = demand_of(ARGV[i])
    if earliest > moment then moment = earliest end
    waits[i] = -1
  end
  local agreed, i = 0, 0
  while agreed < #KEYS and decisions < MOST_DECISIONS do
    i = i % #KEYS + 1
    if waits[i] ~= moment then
      decisions = decisions + 1
      if ask(i, moment) ~= GRANTED then return last, i end
      if waits[i] > moment then
        moment, last, agreed = waits[i], i, 0
      end
    end
    agreed = agreed + 1
  end
  return last, nil
end

local last, failed = decide_all()
if failed then
  -- The other keys decide about everything but the demand. Their reply is that of a key that
  -- recovers and may be asked again at once.
  for i = 1, #KEYS do
    if i ~= failed then
      local operation = string.byte(ARGV[i], CALL_OPERATION_AT)
      local status = run(i, with_demand(ARGV[i], operation, 0, ''))
      if status == GRANTED then add_to_status(i, RECOVERING) end
    end
  end
elseif last then
  add_to_status(last, LAST)
end

local parts = { struct.pack(JOINT_REPLY, CALL_VERSION, GRANTED) }
for i = 1, #KEYS do
  -- The server's clock may have been set. Nothing is written, and the calls are sent again.
  if string.byte(replies[i]) == CALL_VERSION and string.byte(replies[i], REPLY_STATUS_AT) == UNSURE then return replies[i] end
  parts[i + 1] = struct.pack(JOINT_PART, #replies[i]) .. replies[i]
end
for i = 1, #KEYS do
  for _, write in ipairs(all_writes[i]) do
    redis.call(unpack(write))
  end
end
return table.concat(parts)
