
-- ── slots that came back before they were due (src/limit/pool.rs) ────────────────────────────────────────────────────

local MOST_POOLED = 32
local transit_slack

-- Takes a slot in. Where there is no room, answers the last one, for which there is none then.
local function pool_put(slot, stamp, units)
  local list = pooled()
  local i = 1
  while list[i] and (list[i].slot < slot or (list[i].slot == slot and list[i].stamp < stamp)) do
    i = i + 1
  end
  local other, last = list[i], nil
  if other and other.slot == slot and other.stamp == stamp then
    other.units = other.units + units
  else
    table.insert(list, i, { slot = slot, stamp = stamp, units = units })
  end
  if #list > MOST_POOLED then
    last = table.remove(list)
  end
  pool_count = #list
  if pool_count > pool_room then relaid = true end
  return last
end

local function pool_find(units, life)
  if pool_count == 0 then return nil end
  local list, half = pooled(), floor(life / 2)
  for i = 1, #list do
    local entry = list[i]
    if entry.units >= units and entry.slot + half + transit_slack <= entry.stamp then
      return i, entry
    end
  end
end

-- ── all limits of the key, taken all or nothing (src/limit/mod.rs) ───────────────────────────────────────────────────

local function largest_cost(a)
  return a.kind == BUCKET and a.capacity or a.count
end

local function rule_first_slot(a, from, cost, life)
  if a.kind == WINDOW then return window_first_slot(a, from, cost) end
  if a.kind == BUCKET then return bucket_first_slot(a, from, cost) end
  return fixed_first_slot(a, from, cost, life)
end

local function rule_room(a, slot)
  if a.kind == WINDOW then return window_room(a, slot) end
  if a.kind == BUCKET then return bucket_room(a, slot) end
  return fixed_room(a, slot)
end

local function rule_free(a)
  if a.kind == WINDOW then return window_free(a) end
  return rule_room(a, now)
end

local function rule_used(a)
  if a.kind == WINDOW then return a.total end
  if a.kind == BUCKET then return a.capacity - bucket_room(a, now) end
  return units_in(a, floor(now / a.window))
end

local function rule_insert(a, slot, stamp, units)
  if a.kind == WINDOW then
    window_insert(a, stamp, units)
  elseif a.kind == BUCKET then
    bucket_insert(a, slot, stamp, units)
  else
    fixed_insert(a, slot, units)
  end
end

local function insert(slot, stamp, units)
  changed = true
  for i = 1, account_count do
    rule_insert(accounts[i], slot, stamp, units)
  end
end

local function subtract(slot, stamp, units)
  changed = true
  for i = 1, account_count do
    local a = accounts[i]
    if a.kind == WINDOW then
      window_subtract(a, stamp, units)
    elseif a.kind == BUCKET then
      bucket_subtract(a, slot, stamp, units)
    else
      fixed_subtract(a, slot, units)
    end
  end
end

-- The first moment at which every limit allows `cost`, and the limit that was the last to.
local function first_slot(cost, life)
  local slot, limit = now, nil
  while true do
    local before = slot
    for i = 1, account_count do
      local first = rule_first_slot(accounts[i], slot, cost, life)
      if first > slot then
        slot, limit = first, accounts[i]
      end
    end
    if slot == before or account_count == 1 then
      return slot, limit
    end
  end
end

local function free()
  local least = NEVER
  for i = 1, account_count do
    local a = rule_free(accounts[i])
    if a < least then least = a end
  end
  return least
end

-- Books `count` permits of `cost` units, none later than `latest`, and hands each grant to `granted`. Answers, where
-- one would be too late, its slot and the limit; that one and those after it leave no trace.
local function book(latest, cost, count, life, granted)
  for i = 1, account_count do
    if cost > largest_cost(accounts[i]) then return NEVER, nil end
  end
  if cost == 0 then return NEVER, nil end
  while count > 0 do
    local slot, limit = first_slot(cost, life)
    local i, entry = pool_find(cost, life)
    if entry and entry.slot <= slot and entry.slot <= latest then
      local taken = floor(entry.units / cost)
      if taken > count then taken = count end
      entry.units = entry.units - taken * cost
      if entry.units == 0 then
        table.remove(pool, i)
        pool_count = #pool
      end
      count, changed = count - taken, true
      granted(cost, taken, entry.slot, entry.stamp)
    else
      if slot > latest then
        if entry and entry.slot < slot then slot = entry.slot end
        return slot, limit
      end
      local fits = NEVER
      for k = 1, account_count do
        local room = rule_room(accounts[k], slot)
        if room < fits then fits = room end
      end
      fits = floor(fits / cost)
      if fits > count then fits = count end
      if fits < 1 then fits = 1 end
      local stamp = slot + life + transit_slack
      insert(slot, stamp, cost * fits)
      count = count - fits
      granted(cost, fits, slot, stamp)
    end
  end
end

local function prefetch(most, life)
  local count = floor(free() / 4)
  if count > most then count = most end
  if count == 0 or first_slot(count, life) > now then return 0, 0 end
  local span = life + transit_slack
  insert(now, now + span, count)
  return count, span
end

local function take_back(slot, stamp, units)
  if units == 0 or stamp < slot then return end
  if slot <= now then
    subtract(slot, stamp, units)
  else
    changed = true
    local last = pool_put(slot, stamp, units)
    if last then subtract(last.slot, last.stamp, last.units) end
  end
end

-- An account for a limit that is new to this key: it starts with what the others remember.
local function account_for(kind, count, window, capacity, guard)
  local a = {
    kind = kind, count = count, window = window, capacity = capacity, guard = guard, asserted = now, n = 0, room = 0,
    base = 0, dirty = false,
  }
  local longest
  for i = 1, account_count do
    local other = accounts[i]
    if other.kind == WINDOW then window_advance(other) end
    if other.kind == WINDOW and (not longest or other.window >= longest.window) then longest = other end
  end
  local most = 0
  for i = 1, account_count do
    local used = rule_used(accounts[i])
    if used > most then most = used end
  end
  if kind == WINDOW then
    a.total, a.fine, a.coarse, a.first, a.floor, a.index, a.before = 0, 0, 0, 0, 0, 0, 0
    a.first0, a.end0, a.stamps, a.counts, a.moved, a.low, a.high, a.room = 0, 0, {}, {}, {}, NEVER, -NEVER, 8
  elseif kind == BUCKET then
    a.full, a.full_r, a.base_at, a.base_r, a.slack, a.slack_r, a.queued_from = 0, 0, 0, 0, 0, 0, NEVER
    a.list = {}
  else
    a.open_from, a.list = 0, {}
  end
  relaid, changed = true, there
  if longest then
    for i = 0, longest.n - 1 do
      local stamp, units = stamp_of(longest, i), count_of(longest, i)
      local at = now
      now = stamp
      rule_insert(a, stamp, stamp, units)
      now = at
    end
  elseif most > 0 then
    local largest = largest_cost(a)
    rule_insert(a, now, now + transit_slack, most < largest and most or largest)
  end
  return a
end

-- Brings everything to `now`, and under the limits of the call, from `at` in it on.
local function advance(limit_count, at, guard)
  for _ = 1, limit_count do
    local kind, count, window, capacity
    kind, count, window, capacity, at = unpack('<BI4I7I4', ARG, at)
    local known
    for i = 1, account_count do
      local a = accounts[i]
      if a.kind == kind and a.count == count and a.window == window and a.capacity == capacity then
        known = a
      end
    end
    if not known then
      known = account_for(kind, count, window, capacity, guard)
      account_count = account_count + 1
      accounts[account_count] = known
    elseif now - known.asserted > window / 2 then
      known.asserted, changed = now, true
    end
    known.ours = true
  end
  if account_count > limit_count then
    -- A limit holds until it was not asserted for two windows and a second; half a window may be unrecorded.
    local kept = {}
    for i = 1, account_count do
      local a = accounts[i]
      if a.asserted + floor(a.window * 5 / 2) + 1000000 >= now then
        kept[#kept + 1] = a
      else
        relaid, changed = true, true
      end
    end
    accounts, account_count = kept, #kept
  end
  for i = 1, account_count do
    local a = accounts[i]
    if a.kind == WINDOW then window_advance(a) elseif a.kind == FIXED then fixed_advance(a) end
  end
  while pool_count > 0 and pooled()[1].slot < now do
    local passed = table.remove(pool, 1)
    pool_count = #pool
    subtract(passed.slot, passed.stamp, passed.units)
  end
  return at
end

local function fresh_from()
  local latest = 0
  for i = 1, account_count do
    local a, from = accounts[i], nil
    if a.kind == WINDOW then
      from = window_fresh_from(a)
    elseif a.kind == BUCKET then
      from = bucket_fresh_from(a)
    else
      from = fixed_fresh_from(a)
    end
    if from > latest then latest = from end
  end
  if pool_count > 0 and pooled()[pool_count].slot + 1 > latest then
    latest = pool[pool_count].slot + 1
  end
  return latest
end

local function describe(a)
  if not a then return pack('<BI4I7I4', 0, 0, 0, 0) end
  return pack('<BI4I7I4', a.kind, a.count, a.window, a.capacity)
end
