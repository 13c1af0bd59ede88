
-- ── the long way: the steps of a call ────────────────────────────────────────────────────────────
--
-- Twin: src/limit/ledger.rs, `state` in limit_set.rs, and `book` in src/store/memory/booking.rs.
-- Of step 4: differential/model/recovery.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), all of call.lua, logical_time (time.lua),
-- state.lua, external.lua, ledger.lua, advance.lua, set_quota.lua

-- Books `count` permits of `cost` units each, which are of use from `from` on. One segment has as
-- many of them as its slot allows. Returns nothing if all are booked. Otherwise returns the first
-- slot that is later than `last`, and the limit that refused. Nothing is booked for that permit and
-- those after it. The same if the key has too many advance bookings for one more. If no slot ever
-- allows `cost`, returns NEVER.
local function book(cost, count, life, from, last, segments)
  if not allows(cost) then return NEVER end
  local advance = state.cold_advance
  if from > state.earliest then advance = cold_advance() end
  -- No permit has an earlier slot than the one before it, so each search goes on from there.
  local reached = from
  while count > 0 do
    local slot, refusing = first_slot(cost, life, reached)
    local entry, index, its_life = find_returned(cost, life, from)
    local stamp, fits
    if entry and entry.slot <= slot and entry.slot <= last then
      slot, stamp, fits = entry.slot, entry.stamp, math.min(count, math.floor(entry.units / cost))
      entry.units = entry.units - fits * cost
      if entry.units == 0 then table.remove(state.returned, index) end
      state.changed = true
    elseif slot > last then
      return entry and entry.slot < slot and entry.slot or slot, refusing
    else
      its_life, fits = longest_life(slot, life), 1
      stamp = slot + its_life + state.slack
      if count > 1 and not state.borrows then
        fits = math.max(1, math.min(count, math.floor(room(slot, life + state.slack) / cost)))
      end
      if advance and advance.is_in_advance(slot, from, cost, life) then
        if not advance.add(slot, stamp, cost * fits) then return slot, refusing end
      else
        insert(slot, stamp, cost * fits)
      end
      reached = slot
    end
    count = count - fits
    segments.wait = slot - state.now
    segments[#segments + 1] = struct.pack(SEGMENT, cost, fits, segments.wait, its_life, stamp - slot)
  end
end

-- Returns the first moment at which a new state would grant the same. Until then the key must live. The
-- state of a part must live as long as its limits apply, because callers that use only other parts
-- state them, too.
local function remembered_until()
  local until_then = state.recovering_until > state.earliest and state.recovering_until or state.earliest
  for i = 1, #state do
    local limit = state[i]
    local from = limit.rule.fresh_from(limit)
    if state.cold_advance then from = math.max(from, state.cold_advance.fresh_from(limit)) end
    if state.pace then from = math.max(from, in_force_until(limit)) end
    if limit.external then from = math.max(from, forgotten_from(limit)) end
    if from > until_then then until_then = from end
  end
  local last = state.returned[#state.returned]
  if last and last.slot >= until_then then until_then = last.slot + 1 end
  return until_then
end

-- 1. The state, and its time.
local incarnation, writes, offset, expires, held_until, releases = random, 0, 0, 0, 0, 0
if head == '' then
  state.now, state.made_at, state.returned, state.must_rewrite = server_time, server_time, {}, true
else
  format = string.byte(head)
  if format ~= FORMAT or #head < HEAD_SIZE then
    return redis.error_reply('TOLLGATE the state of this key has format ' .. format .. ', this script understands ' .. FORMAT)
  end
  local record_count, returned_count, last_write
  format, record_count, returned_count, state.returned_space, incarnation, writes, state.made_at, state.recovering_until,
    offset, last_write, expires, held_until, releases = struct.unpack(HEAD, head)
  -- The records of the limits. `head` may have too few of them.
  local base = HEAD_SIZE + RECORD_SIZE * record_count
  if #head < base then head = redis.call('GETRANGE', key, '0', base - 1) end
  for i = 1, record_count do
    local from = HEAD_SIZE + RECORD_SIZE * (i - 1) + 1
    local kind = string.byte(head, from)
    if kind == EXTERNAL then
      cold_external().read(head, from)
    elseif kind == ADVANCE then
      base = cold_advance().read(head, from, base)
    elseif kind == QUOTA then
      cold_set_quota().read(head, from)
    elseif kind > QUOTA then
      return redis.error_reply('TOLLGATE the state of this key has a record of kind ' .. kind
        .. ', this script understands kinds up to ' .. QUOTA)
    else
      local limit = new_limit(string.sub(head, from, from + LIMIT_SIZE - 1), base)
      limit.rule.read(limit, head, from)
      base = base + limit.space * limit.rule.size
      state[i] = limit
    end
  end
  state.existed, state.returned_base = true, base
  state.returned = read_list(base, returned_count, RETURNED, RETURNED_SIZE, { 'slot', 'stamp', 'units' })

  if operation == RETURN then
    -- The caller only returns permits, and states no time. So it cannot tell whether the clock
    -- was set. For this call, the time is that of the last write.
    state.now = last_write
  else
    local knows_time = known_incarnation == incarnation and seen > 0
    local now = logical_time(server_time, server_time + offset, last_write, knows_time and seen + since, since, on_way,
      server_seen > 0 and server_seen + server_since)
    if not now then
      return struct.pack(UNSURE_REPLY, FORMAT, UNSURE, server_time), UNSURE
    end
    state.now = now
    if now - server_time ~= offset then offset, state.changed = now - server_time, true end
  end
end
local now = state.now

-- 2. The hold. Its end moves only later, unless it is released. In the head, `recovering until` is
--    even, plus 1 if the hold was cut.
state.hold_is_cut = state.recovering_until % 2
state.recovering_until = state.recovering_until - state.hold_is_cut
-- A hold that begins now counts, even if the caller does not know of the latest releases.
if operation == HOLD and hold_releases < releases then hold_releases = releases end
-- A hold without time left ends the probation that follows the last one, and no hold in force.
local is_release = operation == RELEASE or (operation == HOLD and hold_left == 0 and held_until <= now)
if is_release then
  held_until = 0
  releases = releases + 1
  state.hold_is_cut = 0
  state.changed = true
elseif hold_releases >= releases then
  -- The caller may know of a release that this state does not know. If the caller knows this state, or holds the key
  -- anew, the hold of the state is over. If not, the release was of a state before this one, and a hold that was set
  -- since stays in force.
  local is_newer = hold_releases > releases
  local is_over = is_newer and (known_incarnation == incarnation or operation == HOLD or held_until <= now)
  local hold_until = hold_left > 0 and now + hold_left or 0
  if is_over or hold_until > held_until then
    held_until, state.hold_is_cut, state.changed = hold_until, hold_is_cut, true
  end
  if is_newer then
    releases, state.changed = hold_releases, true
  end
end
state.earliest = held_until > now and held_until or now
local is_cut = held_until > now and state.hold_is_cut or 0

-- 3. The limits, and the set quota.
for i = 1, #state do
  local limit = state[i]
  if limit.kind == FIXED and operation ~= RETURN then limit.rule.align(limit) end
  limit.rule.advance(limit)
  if limit.external and now >= limit.external.ends then state.cold_external.roll(limit) end
end
local limits = {}
for i = 1, limit_count do
  limits[i] = string.sub(call, pos, pos + LIMIT_SIZE - 1)
  pos = pos + LIMIT_SIZE
end
-- Whether the limits of the call count as stated. A set quota applies in their place.
local counts, is_valid = true, true
if state.quota or quota_version > 0 or operation >= SET_QUOTA then
  counts, is_valid = cold_set_quota().take_in(limits)
  if not is_valid then return redis.error_reply('TOLLGATE a set quota has 1 to ' .. MOST_SET_LIMITS .. ' limits') end
end
if counts then
  for i = 1, limit_count do
    local stated = find_limit(#state, limits[i])
    if not stated then
      local add = state.quota and state.cold_set_quota.begin or cold().add
      stated = add(limits[i])
    elseif now - stated.last_stated > stated.window / 2 then
      stated.last_stated, state.changed = lends and now + STATED_AHEAD or now, true
    end
    stated.ours = true
  end
  -- A call without limits says nothing about which apply.
  if limit_count > 0 and #state > limit_count then cold().retain(1) end
  state.limiting = #state
end
if state.quota and operation == LEASE then state.cold_set_quota.renew() end
if #state > MOST_LIMITS then
  return redis.error_reply('TOLLGATE a call states at most ' .. MOST_LIMITS .. ' limits')
end
if lends then
  state.pace = find_limit(state.limiting, limits[limit_count])
  if lends ~= OWNS then state.borrows = lends end
end
if state.cold_advance then state.cold_advance.insert_due() end
if #state.returned > 0 then cold().drain() end

-- Twin: `usage` in src/store/memory/booking.rs. Nothing is written.
if operation == PEEK then
  local used, free, held_for, recovering = {}, {}, state.earliest - now, state.recovering_until - now
  local owned = {}
  for i = 1, state.limiting do
    if state[i] ~= state.pace then owned[#owned + 1] = state[i] end
  end
  for i = 1, #owned do
    local limit = owned[i]
    used[i] = limit.rule.cold().used(limit)
    if state.cold_advance then used[i] = used[i] + state.cold_advance.booked_until(limit, NEVER) end
    free[i] = room_of(limit, now, 0)
  end
  local all_free = free_now()
  if recovering > 0 then
    all_free = 0
    if recovering > held_for then state.earliest = state.recovering_until end
  end
  -- The demands before the last one are booked as if it were a lease.
  local cost = 1
  for n = 1, demand_count do
    local count, _
    cost, count, _, pos = struct.unpack(CALL_DEMAND, call, pos)
    if n < demand_count then book(cost, count, life, state.earliest, NEVER - 1, {}) end
  end
  local next_slot = NEVER
  if allows(cost) then
    local entry = find_returned(cost, life, state.earliest)
    next_slot = first_slot(cost, life, state.earliest)
    if entry and entry.slot < next_slot then next_slot = entry.slot end
  end
  local parts = {
    struct.pack(PEEK_REPLY, FORMAT, state.quota and GRANTED + WITH_QUOTA or GRANTED, all_free,
      next_slot < NEVER and next_slot - now or NEVER, held_for, releases, is_cut, recovering > 0 and recovering or 0, #owned),
  }
  for i = 1, #owned do
    local limit, slot = owned[i], NEVER
    if cost <= largest_cost(limit) then slot = first_slot_unreserved(limit, now, cost, life) end
    parts[i + 1] = struct.pack(PEEK_LIMIT, limit.bytes, used[i], free[i], reserved(limit, now),
      slot < NEVER and slot - now or NEVER)
  end
  if state.quota then parts[#parts + 1] = state.cold_set_quota.part() end
  return table.concat(parts)
end

-- 4. Recovery. If the caller knows another incarnation, or more writes than this state has, a state
--    was lost. This state does not know all permits of the caller.
if known_incarnation ~= 0 and seen > 0 and (known_incarnation ~= incarnation or known_writes > writes) then
  if known_incarnation == incarnation then
    incarnation, state.made_at = random, now
  end
  cold().recover(granted_before)
end

-- 5. Permits that come back, units that were used without a permit, and what the upstream states
--    remains.
local demands_pos, must_notify = pos, false
pos = pos + demand_count * CALL_DEMAND_SIZE
if moment == NEVER then demand_count = 0 end
for _ = 1, return_count do
  local slot, stamp, units
  slot, stamp, units, pos = struct.unpack(CALL_RETURN, call, pos)
  if known_incarnation == incarnation then
    cold().take_back(slot, stamp, units)
  end
end
for _ = 1, charge_count do
  local age, units
  age, units, pos = struct.unpack(CALL_CHARGE, call, pos)
  cold().charge(age, units)
end
if has_remaining == 1 then
  local is_less, is_urgent = cold_external().see(struct.unpack(CALL_REMAINING, call, pos))
  if is_less then cold().drop_returned() end
  must_notify = is_less and is_urgent
end
if is_release then
  for i = 1, #state do
    cold_external().forget_others(state[i])
  end
end

-- 6. Permits.
local status, wait, refusing, segments = GRANTED, 0, nil, {}
local prefetched, prefetched_life, prefetched_span = 0, 0, 0
if state.recovering_until > now then
  if demand_count > 0 then status, wait = RECOVERING, state.recovering_until - now end
elseif state.is_outdated then
  -- The caller asks again at once with its own limits.
  if demand_count > 0 then status = RECOVERING end
else
  local permits = 0
  pos = demands_pos
  for _ = 1, demand_count do
    local cost, count, from
    cost, count, from, pos = struct.unpack(CALL_DEMAND, call, pos)
    from = now + (moment or from)
    if from < state.earliest then from = state.earliest end
    permits = permits + count
    if permits > MOST_PERMITS then
      return redis.error_reply('TOLLGATE a call asks for at most ' .. MOST_PERMITS .. ' permits')
    end
    local slot
    slot, refusing = book(cost, count, life, from, now + latest, segments)
    if slot then
      status, wait = REFUSED, slot < NEVER and slot - now or NEVER
      break
    end
  end
  if status == GRANTED and prefetch_most > 0 and not moment then
    -- At most a quarter of the units that are free now.
    local count = math.min(prefetch_most, math.floor(free_now() / 4))
    if count > 0 and first_slot(count, prefetch_life, state.earliest) <= now then
      prefetched, prefetched_life = count, longest_life(now, prefetch_life)
      prefetched_span = prefetched_life + state.slack
      insert(now, now + prefetched_span, count)
    end
  end
end
local free = status == GRANTED and not state.is_outdated and state.recovering_until <= now and free_now() or 0

-- 7. The new state. It expires a second after the last moment at which it matters. A thousandth of
--    that time is added, because the clocks of server and callers may run at different speeds.
local remember = remembered_until() - now
if state.changed then
  writes = writes + 1
  local kept = state.quota and state.quota.ends - now > remember and state.quota.ends - now or remember
  local needed = server_time + kept + math.floor(kept / 1000) + 1000000
  local is_extended = needed > expires
  if is_extended then
    expires = needed + SPARE_LIFE
  end
  local time_to_live = math.floor((expires - server_time) / 1000) + 1
  -- The regions are packed first: they may get more space, which their records state.
  local regions = state.must_rewrite and cold().regions()
  local records = packed_records()
  -- The lowest bit of `recovering until` says whether the hold was cut.
  local packed = struct.pack(HEAD, FORMAT, #records, #state.returned, state.returned_space, incarnation, writes, state.made_at,
    state.recovering_until + state.hold_is_cut, offset, now, expires, held_until, releases) .. table.concat(records)
  if regions then
    -- The whole state, in one string of its exact size, so that later writes into it need no more memory.
    redis_write('SET', key, packed .. regions, 'PX', time_to_live)
  else
    -- Only the head, the records and the entries that changed are written. The size of the string stays.
    for i = 1, #state do
      local limit = state[i]
      if limit.kind == WINDOW then
        limit.rule.write(limit)
      elseif limit.dirty and limit.n > 0 then
        redis_write('SETRANGE', key, limit.base, pack_list(limit.list, limit.rule.entry, limit.rule.fields))
      end
    end
    redis_write('SETRANGE', key, '0', packed)
    if #state.returned > 0 then
      redis_write('SETRANGE', key, state.returned_base, pack_returned())
    end
    if is_extended then
      redis_write('PEXPIRE', key, time_to_live)
    end
  end
end

-- 8. Messages. If PUBLISH fails, the other processes learn of the change with their next call.
if operation == HOLD or operation == RELEASE then
  local message = struct.pack(HOLD_MESSAGE_FIELDS, HOLD_MESSAGE, state.earliest - now, releases, is_cut)
  redis.pcall('PUBLISH', channel, message .. token)
elseif must_notify and token then
  redis.pcall('PUBLISH', channel, struct.pack(REMAINING_MESSAGE_FIELDS, REMAINING_MESSAGE, writes) .. token)
end

if state.has_new_version and token then
  redis.pcall('PUBLISH', channel, string.char(QUOTA_MESSAGE) .. state.cold_set_quota.part() .. token)
end

-- 9. The reply.
local foreign, shared, quota_part = nil, 0, ''
if state.quota and state.quota.version ~= state.call_version then
  quota_part, status = state.cold_set_quota.part(), status + WITH_QUOTA
end
for i = state.limiting, 1, -1 do
  if state.limiting > limit_count and not state[i].ours then foreign = state[i] end
  if state[i].external then shared = SHARED end
end
return struct.pack(REPLY, FORMAT, status + shared + is_cut * CUT, incarnation, writes, now, remember, wait, free,
  state.earliest - now, releases, refusing and refusing.bytes or NO_LIMIT, foreign and foreign.bytes or NO_LIMIT,
  prefetched, prefetched_life, prefetched_span, #segments) .. table.concat(segments) .. quota_part,
  status % SHARED, segments.wait
