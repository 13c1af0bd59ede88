-- Decides about the calls of one key in flight: tollgate's seats (src/limit/in_flight.rs), in Redis.
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the claim, packed; the answer is packed too. The formats are in src/guide/redis_format.md.
-- ARGV[2]  what the names of channels begin with; the instance follows. Who is given seats by another's claim is told there.
--
-- Times are whole microseconds; spans too. All numbers stay below 2^53.

-- The formats of calls, states and messages.
local VERSION, STATE, MESSAGE = 2, 1, 1
local CLAIM, PEEK = 1, 2
local UNSURE = 3
local HEAD, HEAD_SIZE = '<BI2I2I7I7I7dI7I7', 48
local HOLDER, HOLDER_SIZE = '<I7I7I7I4I4I7BI7', 44
local BATCH, BATCH_SIZE, MOST_BATCHES = '<I2I4', 6, 250
-- How far the clock of the server may be from where the caller expects it, besides a thousandth of the time between, and
-- ahead of it besides the time that call and answer may have been on their way.
local CLOCK_TOLERANCE = 250000
-- Those who hold seats say so every third of a life; so much later, all have.
local LATE = 1000000

local raw = redis.call('TIME')
raw = raw[1] * 1000000 + raw[2]

local version, operation, dice, known, known_changes, seen, since, on_way, server_seen, server_since, instance, id, number,
  most, sits, wants, heard, life = struct.unpack('<BBI7I7I7I7I7I7I7I7I7I7I7I4I4I4I7I7', ARGV[1])
if version ~= VERSION then
  return redis.error_reply('TOLLGATE format ' .. version .. ' of claims is unknown, this script understands ' .. VERSION)
end

-- ── the state ────────────────────────────────────────────────────────────────────────────────────────────────────────

local s = redis.call('GET', KEYS[1])
local holders, queue = {}, {}
local incarnation, changes, made, offset, last, learning = dice, 0, raw, 0, raw, 0
if s then
  local format, holder_count, batch_count = string.byte(s), nil, nil
  if format ~= STATE or #s < HEAD_SIZE then
    return redis.error_reply('TOLLGATE the seats of this key have format ' .. format .. ', this release understands '
      .. STATE)
  end
  format, holder_count, batch_count, incarnation, changes, made, offset, last, learning = struct.unpack(HEAD, s)
  local at = HEAD_SIZE + 1
  for i = 1, holder_count do
    local h = {}
    h.instance, h.id, h.number, h.most, h.taken, h.given, h.told, h.till, at = struct.unpack(HOLDER, s, at)
    holders[i] = h
  end
  for i = 1, batch_count do
    local index, count
    index, count, at = struct.unpack(BATCH, s, at)
    queue[i] = { holder = holders[index], count = count }
  end
end

-- Logical time: the server's and an offset. It never goes back, and one call alone never turns it back: see main.lua.
local now = raw + offset
if known == incarnation and seen > 0 then
  local expected, tolerance = seen + since, CLOCK_TOLERANCE + math.floor(since / 1000)
  if now < expected - tolerance then
    now = expected
  elseif now > expected + tolerance + on_way and expected + tolerance >= last then
    local steady = raw - server_seen - server_since
    if server_seen == 0 or steady > tolerance + on_way or steady < -tolerance then
      return struct.pack('<BBI7I7I7I7I7BI7I7', VERSION, UNSURE, incarnation, changes, raw, 0, 0, 0, 0, 0)
    end
    now = expected
  end
end
if now < last then now = last end
offset = now - raw

-- Those who were silent for a life have left.
local kept = {}
for i = 1, #holders do
  if holders[i].till > now then kept[#kept + 1] = holders[i] else holders[i].gone = true end
end
holders = kept
kept = {}
for i = 1, #queue do
  if not queue[i].holder.gone then kept[#kept + 1] = queue[i] end
end
queue = kept

local function usage(most)
  local taken = 0
  for i = 1, #holders do
    taken = taken + holders[i].taken
    if holders[i].most < most then most = holders[i].most end
  end
  return taken, most > taken and most - taken or 0
end

if operation == PEEK then
  local taken, free = usage(most)
  return struct.pack('<BBI4I4', VERSION, 0, taken, learning > now and 0 or free)
end

-- ── the claim ────────────────────────────────────────────────────────────────────────────────────────────────────────

if known ~= 0 and (known ~= incarnation or known_changes > changes) then
  -- The caller knows of a state that is lost, or of a later one than this. Those who hold seats say so, and until all
  -- have, nothing is given.
  if known == incarnation then
    incarnation, made = dice, now
  end
  local learned = made + math.floor(life / 3) + LATE
  if learned > learning then learning = learned end
end

local me
for i = 1, #holders do
  if holders[i].id == id and holders[i].instance == instance then me = holders[i] end
end
if not me then
  me = { instance = instance, id = id, number = 0, most = most, taken = 0, given = heard, told = 0, till = now }
  holders[#holders + 1] = me
end

changes = changes + 1
if me.number < number then
  -- What it was given and had not heard of when it spoke is for those it says are waiting, as far as they are so many.
  -- What it will hear of the rest is older than its claim: it passes that over.
  local unheard = me.given - heard
  if unheard < 0 then unheard = 0 end
  if unheard > me.taken then unheard = me.taken end
  if unheard > wants then unheard = wants end
  me.number, me.given, me.most, me.taken, me.till = number, heard + unheard, most, sits + unheard, now + life
  wants = wants - unheard

  -- Its waiters. Who comes is last; who leaves was its last.
  local waiting = 0
  for i = 1, #queue do
    if queue[i].holder == me then waiting = waiting + queue[i].count end
  end
  local leaving, coming = waiting - wants, wants - waiting
  for i = #queue, 1, -1 do
    if leaving > 0 and queue[i].holder == me then
      local left = queue[i].count < leaving and queue[i].count or leaving
      queue[i].count, leaving = queue[i].count - left, leaving - left
      if queue[i].count == 0 then table.remove(queue, i) end
    end
  end
  if coming > 0 then
    local newest = queue[#queue]
    if #queue >= MOST_BATCHES then
      newest = nil
      for i = 1, #queue do
        if queue[i].holder == me then newest = queue[i] end
      end
    elseif newest and newest.holder ~= me then
      newest = nil
    end
    if newest then
      newest.count = newest.count + coming
    else
      queue[#queue + 1] = { holder = me, count = coming }
    end
  end
end

-- Those who came first get what is free.
if now >= learning then
  local _, free = usage(4294967295)
  while free > 0 and queue[1] do
    local first = queue[1]
    local holder, count = first.holder, first.count < free and first.count or free
    first.count, free = first.count - count, free - count
    holder.taken, holder.given, holder.news = holder.taken + count, holder.given + count, true
    if first.count == 0 then table.remove(queue, 1) end
  end
end

-- ── who has to know ──────────────────────────────────────────────────────────────────────────────────────────────────

local first, mixed = queue[1] and queue[1].holder, false
for i = 2, #queue do
  if queue[i].holder ~= first then mixed = true end
end
for i = 1, #queue do
  queue[i].holder.waits = true
end
local others_wait, first_end, pushed = 0, 0, 0
local records, batches, count = {}, {}, 0
for i = 1, #holders do
  local h = holders[i]
  local others = (mixed or (first and first ~= h)) and 1 or 0
  if h == me then
    others_wait, h.told = others, others
  elseif h.news or (others == 1 and h.told == 0 and h.taken > 0) then
    h.told = others
    local told = redis.pcall('PUBLISH', ARGV[2] .. string.format('%.0f', h.instance), struct.pack('<BI7I7I7I7I7B', MESSAGE,
      incarnation, changes, h.id, h.number, h.given, others))
    -- Where that is forbidden, they ask.
    pushed = type(told) == 'table' and 2 or pushed
  end
  if h ~= me and (first_end == 0 or h.till - now < first_end) then first_end = h.till - now end
  if h.taken > 0 or h.waits then
    count = count + 1
    h.index = count
    records[count] = struct.pack(HOLDER, h.instance, h.id, h.number, h.most, h.taken, h.given, h.told, h.till)
  end
end
for i = 1, #queue do
  batches[i] = struct.pack(BATCH, queue[i].holder.index, queue[i].count)
end

-- It lives as long as any claim can; clocks may differ by a thousandth.
local left = learning > now + life and learning - now or life
for i = 1, #holders do
  if holders[i].till - now > left then left = holders[i].till - now end
end
redis.call('SET', KEYS[1], struct.pack(HEAD, STATE, count, #queue, incarnation, changes, made, offset, now, learning)
  .. table.concat(records) .. table.concat(batches), 'PX', math.floor((left + left / 1000) / 1000) + 1000)

return struct.pack('<BBI7I7I7I7I7BI7I7', VERSION, pushed, incarnation, changes, now, me.number, me.given, others_wait,
  first_end, learning > now and learning - now or 0)
