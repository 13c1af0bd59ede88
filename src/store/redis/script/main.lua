
-- ── the call ─────────────────────────────────────────────────────────────────────────────────────────────────────────

local LEASE, PEEK = 1, 2
local GRANTED, REFUSED, LEARNING = 0, 1, 2
local LONGEST_LEARNING = 60000000
-- How far the clock of the server may be from where the caller expects it, besides a thousandth of the time between.
local CLOCK_TOLERANCE = 250000

local version, operation, dice, known, seen, since, granted_before, newest, slack, guard, latest, life, ahead, ahead_life,
  limit_count, need_count, return_count, at = unpack('<BBI7I7I7I7I7I7I7I7I7I7I4I7BI2I2', ARG)
if version ~= VERSION then
  return redis.error_reply('TOLLGATE format ' .. version .. ' of calls is unknown, this script understands ' .. VERSION)
end
transit_slack = slack

local complaint
there, complaint = read_state(limit_count)
if complaint then
  return redis.error_reply(complaint)
end

-- Logical time: the server's and an offset. It never goes back; a caller who knows better says where it must be.
if there then
  local last = now
  now = raw + offset
  if known == incarnation and seen > 0 then
    local expected, tolerance = seen + since, CLOCK_TOLERANCE + floor(since / 1000)
    if now > expected + tolerance or now < expected - tolerance then now = expected end
  end
  if now < last then now = last end
  if now - raw ~= offset then
    offset, changed = now - raw, true
  end
else
  incarnation, born, learning, offset, now, expires = dice, raw, 0, 0, raw, 0
  account_count, pool_count, pool_room, pool = 0, 0, 0, {}
  relaid = true
end

at = advance(limit_count, at, guard)

if known ~= 0 and known ~= incarnation and seen > 0 then
  -- The state of which the caller had permits is lost: charge them, and grant nothing until the others can have told.
  local longest = 0
  for i = 1, account_count do
    local a = accounts[i]
    if a.ours and a.window > longest then longest = a.window end
  end
  local until_then = born + (longest < LONGEST_LEARNING and longest or LONGEST_LEARNING)
  if until_then > learning then
    learning, changed = until_then, true
  end
  local left = newest - (seen + since)
  local stamp = now + slack + (left > 0 and left or 0)
  for i = 1, account_count do
    local a = accounts[i]
    local largest = largest_cost(a)
    local units = granted_before < largest and granted_before or largest
    if units > 0 then
      changed = true
      rule_insert(a, now, stamp, units)
      if a.kind == FIXED then
        local closed = floor(stamp / a.window)
        if closed > floor(now / a.window) and closed + 1 > a.open_from then a.open_from = closed + 1 end
      end
    end
  end
end

if operation == PEEK then
  local next_slot = first_slot(1, 0)
  local _, entry = pool_find(1, 0)
  if entry and entry.slot < next_slot then next_slot = entry.slot end
  if learning > next_slot then next_slot = learning end
  local parts = { pack('<BI7I7B', VERSION, learning > now and 0 or free(), next_slot - now, account_count) }
  for i = 1, account_count do
    local a = accounts[i]
    parts[i + 1] = describe(a) .. pack('<I7I7', rule_used(a), rule_free(a))
  end
  return table.concat(parts)
end

local needs_at = at
at = at + need_count * 8
for i = 1, return_count do
  local slot, stamp, units
  slot, stamp, units, at = unpack('<I7I7I7', ARG, at)
  if known == incarnation then
    take_back(slot, stamp, units)
  end
end

local segments, segment_count = '', 0
local function granted(cost, count, slot, stamp)
  segment_count = segment_count + 1
  local segment = pack('<I4I4I7I7', cost, count, slot - now, stamp - slot)
  if segment_count == 1 then
    segments = segment
  elseif segment_count == 2 then
    segments = { segments, segment }
  else
    segments[segment_count] = segment
  end
end

local status, wait, limit = GRANTED, 0, nil
if learning > now and need_count > 0 then
  status, wait = LEARNING, learning - now
elseif learning <= now then
  at = needs_at
  for _ = 1, need_count do
    local cost, count
    cost, count, at = unpack('<I4I4', ARG, at)
    local slot
    slot, limit = book(now + latest, cost, count, life, granted)
    if slot then
      status, wait = REFUSED, slot < NEVER and slot - now or NEVER
      break
    end
  end
end
local ahead_count, ahead_span = 0, 0
if status == GRANTED and ahead > 0 and learning <= now then
  ahead_count, ahead_span = prefetch(ahead, ahead_life)
end

local fresh = fresh_from()
if changed then
  write_state(fresh)
end

local foreign
if account_count > limit_count then
  for i = account_count, 1, -1 do
    if not accounts[i].ours then foreign = accounts[i] end
  end
end
if segment_count > 1 then segments = table.concat(segments) end
return pack('<BBI7I7I7I7', VERSION, status, incarnation, now, fresh > now and fresh - now or 0, wait)
  .. describe(limit) .. describe(foreign) .. pack('<I4I7I2', ahead_count, ahead_span, segment_count) .. segments
