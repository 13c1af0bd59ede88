
-- ── all limits of the key, taken all or nothing ──────────────────────────────────────────────────
--
-- Twin: src/limit/limit_set.rs and ledger.rs; of returned slots src/limit/returned.rs; of `recover`
-- differential/model/recovery.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `lends` (call.lua), state.lua, window_rule, bucket_rule, fixed_rule, external.lua

-- The most limits of one key.
local MOST_LIMITS = 32
-- The most rounds of the search for a slot. Some limits have no slot in common, for example fixed
-- windows with different guards.
local MOST_ROUNDS = 1000
-- By the number of a kind of limit: the function that makes its rule, and its rule once it is made.
--
-- A rule is a table of functions. `limit` is their first argument. Every rule has these:
--   read(s, from), record        read and pack the record
--   size                         the bytes of an entry
--   advance                      forgets what is older than the window
--   first_slot(from, cost, life, reserved), room(slot, length)
--                                the first slot of a permit; how many units may leave at a slot, with
--                                stamps that are `length` later
--   insert(slot, stamp, units, last_slot)
--                                counts the units of a permit, or of joined bookings
--   fresh_from                   when all use is forgotten, besides advance bookings
--   cold()                       returns a table with the functions that few calls need:
--     charge, subtract             units that were used without a permit; units that were not used
--     used, new                    the units in use; an empty limit
--
-- Some kinds have more, and the other files ask for the kind to call it:
--   entry, fields                bucket, fixed window: an entry, for `entries` and `pack_list`
--   write, region, chunk, used_until
--                                sliding window: its ring, and its log
--   see                          bucket: a statement of the upstream
--   leave_empty_at_most, resume  bucket: more may count than it held
--   would_give_again             bucket: whether it would give a returned slot again
--   align                        fixed window: its boundaries
--   number_of                    fixed window: the number of a window
--   longest_life                 fixed window: of a permit at a slot
--   windows_of, longest_join     fixed window: joined bookings
--   after, first_with, held, latest_full_before, most_between
--                                bucket: permits that are replayed
-- If there are advance bookings, `cold_advance` replaces first_slot and room of windows and buckets.
local makers, rules = { window_rule, bucket_rule, fixed_rule }, {}

-- Returns the functions of a kind of limit.
local function rule_of(kind)
  local rule = rules[kind]
  if not rule then
    rule = makers[kind]()
    rules[kind] = rule
    if state.cold_advance then state.cold_advance.extend(kind, rule) end
  end
  return rule
end

-- Makes the limit that `bytes` state, without what its kind keeps of it. Its entries begin at `base`.
local function new_limit(bytes, base)
  local kind, count, window, capacity = struct.unpack(LIMIT, bytes)
  return {
    bytes = bytes, kind = kind, count = count, window = window, capacity = capacity, rule = rule_of(kind), base = base,
    last_stated = 0, n = 0, space = 0, ours = false, list = false, dirty = false, external = false,
    replayed = false, latest_full = false, booked = false, -- of advance.lua
  }
end

-- Returns the most units that one permit may cost.
local function largest_cost(limit)
  return limit.kind == BUCKET and limit.capacity or limit.count
end

-- Returns whether every limit allows permits of this cost.
local function allows(cost)
  for i = 1, state.limiting do
    if state[i] ~= state.pace and cost > largest_cost(state[i]) then return false end
  end
  return cost > 0
end

-- Counts units of a permit in every limit.
local function insert(slot, stamp, units)
  state.changed = true
  for i = 1, #state do
    state[i].rule.insert(state[i], slot, stamp, units)
  end
end

-- Returns the first moment, not before `from`, at which every limit allows `cost`, and the limit
-- that was the last to allow it. The pace of a part limits only borrowers, by one unit. Of the other
-- limits, some units stay free for the owner.
local function first_slot(cost, life, from)
  local pace, borrows = state.pace, state.borrows
  -- `agreed` is how many limits have allowed `slot` since it moved last.
  local slot, last_limit, count, agreed = from, nil, state.limiting, 0
  for _ = 1, MOST_ROUNDS do
    for i = 1, count do
      local limit, units, first = state[i], cost, nil
      if limit == pace then
        first = borrows and limit.rule.first_slot(limit, slot, 1, life, 0) or slot
      else
        if borrows then
          local most = largest_cost(limit)
          units = cost + most - math.floor(most * borrows / 100)
          if units > most then return NEVER, limit end
        end
        first = first_slot_unreserved(limit, slot, units, life)
      end
      if first > slot then
        slot, last_limit, agreed = first, limit ~= pace and limit or nil, 0
      end
      agreed = agreed + 1
      if agreed == count then break end
    end
    if agreed >= count then
      return slot, last_limit
    end
  end
  return NEVER, nil
end

-- Returns for how long a permit is valid at a slot: for `life`, but no longer than the fixed windows that
-- have the slot, which may be those of another caller.
local function longest_life(slot, life)
  for i = 1, state.limiting do
    local limit = state[i]
    if limit.kind == FIXED then life = math.min(life, limit.rule.longest_life(limit, slot)) end
  end
  return life
end

-- Returns the first returned slot, not before `from`, that has `units` left and at least half of
-- `life`, its index, and for how long its permits are valid. src/limit/returned.rs explains this.
local function find_returned(units, life, from)
  local list, half = state.returned, math.floor(life / 2)
  for i = 1, #list do
    local entry = list[i]
    if entry.slot >= from and entry.units >= units then
      local its_life = longest_life(entry.slot, math.min(life, entry.stamp - state.slack - entry.slot))
      if its_life >= half then return entry, i, its_life end
    end
  end
end

-- Packs all records. Those that few keys have follow those of the limits.
local function packed_records()
  local records = {}
  for i = 1, #state do
    records[i] = state[i].rule.record(state[i])
  end
  for i = 1, #state do
    if state[i].external then records[#records + 1] = state.cold_external.record(state[i].external) end
  end
  if state.quota then records[#records + 1] = state.cold_set_quota.record() end
  if state.cold_advance then records[#records + 1] = state.cold_advance.record() end
  for i = 1, #records do
    if #records[i] < RECORD_SIZE then records[i] = records[i] .. string.rep('\0', RECORD_SIZE - #records[i]) end
  end
  return records
end

-- Returns how many units of a limit may leave at `slot`, with stamps that are `length` later.
local function room_of(limit, slot, length)
  local units = limit.rule.room(limit, slot, length) - reserved(limit, slot)
  return units > 0 and units or 0
end

-- Returns the same of all limits: the fewest units.
local function room(slot, length)
  local least = NEVER
  for i = 1, state.limiting do
    local units = state[i] ~= state.pace and room_of(state[i], slot, length) or NEVER
    if units < least then least = units end
  end
  return least
end

-- Returns how many units may leave now.
local function free_now()
  return state.earliest > state.now and 0 or room(state.now, 0)
end

-- Returns the functions that few calls need. Makes them first.
local function cold()
  if state.cold then return state.cold end
  local ledger = {}
  state.cold = ledger

  -- The most returned slots that are kept apart.
  local MOST_RETURNED = 32

  -- Notes that units of a limit were not used. If the newest response was compared with them as
  -- used, other clients used as many.
  function ledger.note_unused(limit, stamp, units)
    local usage = limit.external
    if usage and state.now < usage.shortfall_until and stamp <= usage.counted_until then
      usage.shortfall = usage.shortfall + units
    end
  end

  -- Returns a moment that is not before the slot of any permit in the logs.
  function ledger.log_end()
    local last = 0
    for i = 1, #state do
      local limit = state[i]
      local ends = limit.rule.fresh_from(limit)
      if limit.kind == WINDOW and ends > 0 then ends = ends - limit.window end
      if ends > last then last = ends end
    end
    return last
  end

  -- Takes the units of a permit out of every limit, or out of the advance bookings. If joined
  -- bookings may contain the permit, the units stay: the limits may not have them. They also stay if
  -- a limit may not know the permit.
  local function subtract(slot, stamp, units)
    if state.quota and state.cold_set_quota.may_miss(slot, stamp) then return end
    if state.cold_advance then
      units = units - state.cold_advance.erase(slot, stamp, units)
      if units == 0 or state.cold_advance.joined_with(slot, stamp) then return end
    end
    state.changed = true
    for i = 1, #state do
      local limit = state[i]
      limit.rule.cold().subtract(limit, slot, stamp, units)
      ledger.note_unused(limit, stamp, units)
    end
  end

  -- Removes a returned slot. Its units leave the limits.
  local function drop(index)
    local entry = table.remove(state.returned, index)
    subtract(entry.slot, entry.stamp, entry.units)
  end

  -- Keeps a returned slot for the next caller. Its units stay in the limits. If there are too many
  -- returned slots, the last of them is removed.
  local function keep(slot, stamp, units)
    local list, i = state.returned, 1
    while list[i] and (list[i].slot < slot or (list[i].slot == slot and list[i].stamp < stamp)) do
      i = i + 1
    end
    local other = list[i]
    if other and other.slot == slot and other.stamp == stamp then
      other.units = other.units + units
    else
      table.insert(list, i, { slot = slot, stamp = stamp, units = units })
    end
    state.changed = true
    if #list > MOST_RETURNED then drop(#list) end
    if #list > state.returned_space then state.must_rewrite = true end
  end

  -- Returns whether a limit would give a returned slot again without its units. src/limit/algorithm.rs
  -- explains this. With the life -slack, the time from slot to stamp is zero.
  local function would_give_again(limit, entry)
    if limit.kind == WINDOW then
      return limit.rule.first_slot(limit, entry.slot, 0, -state.slack, 0) == entry.slot
    end
    if limit.kind == FIXED then
      return limit.rule.number_of(limit, entry.slot) >= limit.open_from
    end
    return limit.rule.cold().would_give_again(limit, entry.slot, entry.units)
  end

  -- Removes the returned slots that the limits would give again, the last one first.
  local function free_spare()
    local list = state.returned
    while #list > 0 do
      local last = list[#list]
      if state.cold_advance and state.cold_advance.joined_with(last.slot, last.stamp) then return end
      for i = 1, state.limiting do
        if state[i] ~= state.pace and not would_give_again(state[i], last) then return end
      end
      drop(#list)
    end
  end

  -- Takes back a permit that was not used. An advance booking is erased. If the slot of another
  -- permit lies ahead, nothing is reserved for other clients then, and the set quota has not changed
  -- since, the slot is kept for the next caller as long as others are booked behind it. Otherwise its
  -- units leave the limits.
  function ledger.take_back(slot, stamp, units)
    if units == 0 or stamp < slot then return end
    if state.quota and state.cold_set_quota.may_miss(slot, stamp) then return end
    if state.cold_advance then
      units = units - state.cold_advance.erase(slot, stamp, units)
      if units == 0 then return end
    end
    local is_shared = false
    for i = 1, state.limiting do
      if reserved(state[i], slot) > 0 then is_shared = true end
    end
    local is_earlier = state.quota and slot <= state.quota.booked_until
    if slot <= state.now or slot < state.earliest or is_shared or is_earlier then
      subtract(slot, stamp, units)
    else
      keep(slot, stamp, units)
    end
    free_spare()
  end

  -- Removes the returned slots that no request can use any more.
  function ledger.drain()
    local list = state.returned
    while list[1] and list[1].slot < state.earliest do
      drop(1)
    end
  end

  -- Removes all returned slots, because they were granted when more seemed to be left.
  function ledger.drop_returned()
    for i = #state.returned, 1, -1 do
      drop(i)
    end
  end

  -- Counts units in every limit that were used without a permit, at least `age` microseconds ago.
  function ledger.charge(age, units)
    if units == 0 then return end
    state.changed = true
    local used_at = state.now > age and state.now - age or 0
    for i = 1, #state do
      state[i].rule.cold().charge(state[i], used_at, used_at + state.slack, units)
    end
  end

  -- Returns what a limit remembers of the time until now, as joined bookings, and the sum of the units.
  -- `earlier_use` in src/limit/algorithm.rs explains this.
  local function earlier_use(limit)
    local now, uses, sum = state.now, {}, 0
    local function note(slot, last_slot, stamp, units)
      if units > 0 then uses[#uses + 1] = { slot = slot, last_slot = last_slot, stamp = stamp, units = units } end
      sum = sum + units
    end
    if limit.kind == WINDOW then
      local before = now
      for i = 0, limit.n - 1 do
        local stamp, units = limit.rule.chunk(limit, i)
        note(math.min(before, stamp), stamp, stamp, units)
        before = math.max(before, stamp)
      end
    elseif limit.kind == FIXED then
      for _, use in ipairs(entries(limit)) do
        local start = use.number * limit.window - limit.phase
        local last = math.min(now, start + limit.window - 1)
        if start <= now then note(last, last, last + state.slack, use.units) end
      end
    else
      note(now, now, now + state.slack, limit.rule.cold().used(limit))
    end
    return uses, sum
  end

  -- Adds a limit that is new to this key. It starts with the use that the other limits remember. For a
  -- fixed window, that of another one of the same length; or else the log of the longest sliding window;
  -- or else that of the limit that remembers the most units. Returns the limit, and whether it counts each permit that
  -- comes back, because it begins with a log of all of them.
  function ledger.add(bytes)
    local limit = new_limit(bytes, 0)
    local kind, window, rule = limit.kind, limit.window, limit.rule
    limit.last_stated = lends and state.now + STATED_AHEAD or state.now
    local same, longest, uses, most = nil, nil, {}, 0
    for i = 1, #state do
      local other = state[i]
      if kind == FIXED and other.kind == FIXED and other.window == window then same = same or other end
      if other.kind == WINDOW and (not longest or other.window >= longest.window) then longest = other end
    end
    local knows_all = #state == 0 or same or (kind ~= FIXED and longest)
    rule.cold().new(limit)
    if same then
      limit.phase, limit.open_from, limit.last_stamp = same.phase, same.open_from, same.last_stamp
      for i, use in ipairs(entries(same)) do
        limit.list[i] = { number = use.number, units = use.units }
      end
      limit.n = #limit.list
    else
      for i = 1, #state do
        if not longest or state[i] == longest then
          local its_uses, sum = earlier_use(state[i])
          if sum >= most then uses, most = its_uses, sum end
        end
      end
      local now = state.now
      for _, used in ipairs(uses) do
        -- What was used before leaves a bucket empty at most, and not in debt for as long as the window remembers.
        local is_past = used.last_slot <= now
        state.now = used.last_slot
        if kind == BUCKET and is_past then
          rule.cold().charge(limit, used.last_slot, used.stamp, used.units)
        else
          rule.insert(limit, used.slot, used.stamp, used.units, used.last_slot)
        end
      end
      state.now = now
    end
    rule.advance(limit)
    state[#state + 1] = limit
    -- A state that is new is written only if the call uses something of it, or if it is that of a part.
    state.must_rewrite, state.changed = true, state.changed or state.existed or lends ~= nil
    return limit, knows_all
  end

  -- Forgets the limits that no longer apply, from number `from` on. If too many are left, forgets
  -- limits that this call does not state, beginning with the one that would end first. The next caller
  -- that states such a limit adds it again.
  function ledger.retain(from)
    for i = #state, from, -1 do
      if in_force_until(state[i]) < state.now then
        table.remove(state, i)
        state.must_rewrite, state.changed = true, true
      end
    end
    while #state > MOST_LIMITS do
      local first = nil
      for i = 1, #state do
        if not state[i].ours and (not first or in_force_until(state[i]) < in_force_until(state[first])) then first = i end
      end
      if not first then return end
      table.remove(state, first)
      state.must_rewrite, state.changed = true, true
    end
  end

  -- Begins the recovery of a lost state: nothing is granted until the permits of the lost state are
  -- a window old. `granted` is how many units the caller was granted of the lost state.
  --
  -- Twin: differential/model/recovery.rs
  --
  -- A process uses permits of the lost state only for a time after its last reply, its *trust*: a
  -- quarter of the longest window, at least SHORTEST_TRUST. So the recovery lasts the longest
  -- window and the trust, but no longer than LONGEST_RECOVERY and the trust. A limit that remembers
  -- permits for longer than that is charged with `granted`.
  function ledger.recover(granted)
    -- Both in microseconds.
    local LONGEST_RECOVERY = 60000000
    local SHORTEST_TRUST = 1500000
    local longest = 0
    for i = 1, #state do
      local limit = state[i]
      local memory = limit.window
      if limit.kind == BUCKET and limit.capacity > limit.count then
        memory = math.ceil(limit.window / limit.count * limit.capacity)
      end
      if limit.ours and memory > longest then longest = memory end
      if granted > 0 and memory > LONGEST_RECOVERY then
        limit.rule.cold().charge(limit, state.now, state.now + state.slack, granted)
      end
    end
    longest = math.min(longest, LONGEST_RECOVERY)
    local recovered_at = state.made_at + longest + math.max(math.ceil(longest / 4), SHORTEST_TRUST)
    state.recovering_until = math.max(state.recovering_until, recovered_at + recovered_at % 2)
    state.changed = true
  end

  -- Packs the entries of all limits, the advance bookings and the returned slots, each with the space
  -- that it needs from now on.
  function ledger.regions()
    local regions = {}
    local function add(bytes, n, space, size)
      while space < n do
        space = space == 0 and 8 or space * 2
      end
      regions[#regions + 1] = bytes .. string.rep('\0', space * size - #bytes)
      return space
    end
    for i = 1, #state do
      local limit, bytes = state[i], nil
      if limit.kind == WINDOW then
        bytes = limit.rule.cold().region(limit)
      else
        bytes = pack_list(entries(limit), limit.rule.entry, limit.rule.fields)
      end
      limit.space = add(bytes, limit.n, limit.space, limit.rule.size)
    end
    if state.cold_advance then regions[#regions + 1] = state.cold_advance.region() end
    state.returned_space = add(pack_returned(), #state.returned, state.returned_space, RETURNED_SIZE)
    return table.concat(regions)
  end

  return ledger
end
