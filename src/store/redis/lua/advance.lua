
-- ── advance bookings: permits that are of use later ──────────────────────────────────────────────
--
-- Twin: src/limit/advance.rs and window_sweep.rs; of buckets and fixed windows src/limit/bucket.rs
-- and fixed.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` (state.lua), ledger.lua
--
-- A permit whose slot is later than the first free slot is kept in a list beside the use of the
-- limits. src/limit/advance.rs has the rule and its proof. Few keys have such permits, so
-- all functions of this file are cold: `cold_advance` makes them when a call needs them. It then
-- replaces the functions of the rules that have to count the bookings.

-- Returns the functions that few calls need. Makes them first.
local function cold_advance()
  if state.cold_advance then return state.cold_advance end
  local advance = {}
  state.cold_advance = advance

  -- A slot that is at most this much later than the first free slot goes into the logs, in
  -- microseconds. A fiftieth of the shortest window applies if that is longer.
  local TOLERANCE = 10000
  -- The most advance bookings of a key.
  local MOST_ADVANCE = 256
  -- The bookings, sorted by slot: a list of each of their numbers, as they are packed.
  local slots, last_slots, stamps, units = {}, {}, {}, {}

  -- Returns the number of the first booking whose slot is not before `slot`.
  local function first_from(slot)
    local i, beyond = 1, #slots + 1
    while i < beyond do
      local middle = math.floor((i + beyond) / 2)
      if slots[middle] < slot then i = middle + 1 else beyond = middle end
    end
    return i
  end

  -- Returns whether a booking may count in a window of a limit that a permit with this slot
  -- touches. The stamp of the permit is `length` later.
  local function is_in_reach(limit, slot, length)
    return slots[1] and slots[1] < slot + limit.window + length
  end

  -- Moves a window of a limit from where it ends at `slot`, as src/limit/window_sweep.rs does. Returns the
  -- end of the first window from which on at most `most` units count in each window, until its end
  -- has moved by the span and `length`. Also returns the most units that counted.
  local function sweep(limit, slot, length, most)
    local span, counting = limit.window, limit.total
    -- The chunk and the booking that leave next, and the booking that enters next, with the ends at
    -- which they do. `leaving` has the numbers of the bookings that have entered, sorted by stamp.
    local chunk, chunk_stamp, chunk_units = 0, limit.rule.chunk(limit, 0)
    local leaving, leaves, leaves_at = {}, 1, NEVER
    local enters, enters_at = 1, slots[1] or NEVER
    local function move_to(last)
      while enters_at <= last do
        local i, stamp = #leaving + 1, stamps[enters]
        while i > leaves and stamps[leaving[i - 1]] > stamp do
          leaving[i] = leaving[i - 1]
          i = i - 1
        end
        leaving[i] = enters
        if i == leaves then leaves_at = stamp + span end
        counting, enters = counting + units[enters], enters + 1
        enters_at = slots[enters] or NEVER
      end
      while leaves_at <= last do
        counting, leaves = counting - units[leaving[leaves]], leaves + 1
        leaves_at = leaving[leaves] and stamps[leaving[leaves]] + span or NEVER
      end
      while chunk_stamp + span <= last do
        counting, chunk = counting - chunk_units, chunk + 1
        chunk_stamp, chunk_units = limit.rule.chunk(limit, chunk)
      end
    end
    move_to(slot)
    local first_end, largest = counting <= most and slot or nil, counting
    while true do
      local change = chunk_stamp + span
      if leaves_at < change then change = leaves_at end
      if enters_at < change then change = enters_at end
      -- After the last change no unit counts.
      if change >= NEVER or (first_end and change >= first_end + span + length) then return first_end, largest end
      move_to(change)
      first_end = counting <= most and (first_end or change) or nil
      if counting > largest then largest = counting end
    end
  end

  -- Returns whether at most `most` units are booked of which a part may count in a window from
  -- (from, ...] on that ends before `to`.
  local function are_few(from, to, most)
    local i = 1
    while slots[i] and slots[i] < to and most >= 0 do
      if stamps[i] > from then most = most - units[i] end
      i = i + 1
    end
    return most >= 0
  end

  -- Makes the rule of sliding windows count the bookings.
  local function extend_window(rule)
    local plain_slot, plain_room = rule.first_slot, rule.room

    function rule.first_slot(limit, from, cost, life, reserved)
      local slot, length = plain_slot(limit, from, cost, life, reserved), life + state.slack
      if not is_in_reach(limit, slot, length) then return slot end
      cost = cost + reserved
      if are_few(slot - limit.window, slot + limit.window + length, limit.count - cost - limit.total) then return slot end
      slot = sweep(limit, slot, length, limit.count > cost and limit.count - cost or 0)
      return slot
    end

    function rule.room(limit, slot, length)
      if not is_in_reach(limit, slot, length) then return plain_room(limit, slot) end
      local _, most = sweep(limit, slot, length, NEVER)
      return limit.count > most and limit.count - most or 0
    end
  end

  -- Returns when a bucket is full again before booking number i. `limit.replayed` keeps these moments:
  -- at[i] and early[i], up to i = `to`.
  local function replayed(limit, i)
    local moments = limit.replayed
    if not moments or moments.at[1] ~= limit.full_at or moments.early[1] ~= limit.early then
      moments = { at = { limit.full_at }, early = { limit.early }, to = 1 }
      limit.replayed = moments
    end
    while moments.to < i do
      local k = moments.to
      moments.at[k + 1], moments.early[k + 1] =
        limit.rule.after(limit, moments.at[k], moments.early[k], stamps[k], units[k])
      moments.to = k + 1
    end
    return moments.at[i], moments.early[i]
  end

  -- Returns the latest moment at which a bucket may be full again before booking number i, so that it
  -- and those behind it find their units. `limit.latest_full` keeps these moments by the number of
  -- bookings from there on, up to `to`: a new booking then changes none of those behind it.
  local function latest_full(limit, i)
    local latest, from_here = limit.latest_full, #slots - i + 1
    if not latest then
      latest = { [0] = NEVER, to = 0 }
      limit.latest_full = latest
    end
    while latest.to < from_here do
      local n = latest.to
      local k = #slots - n
      latest[n + 1] = limit.rule.latest_full_before(limit, slots[k], stamps[k], units[k], latest[n])
      latest.to = n + 1
    end
    return latest[from_here]
  end

  -- Makes the rule of buckets count the bookings.
  local function extend_bucket(rule)
    rule.cold()

    function rule.first_slot(limit, from, cost, life)
      local i = first_from(from + 1)
      while true do
        -- The permit would be replayed before booking number i.
        local at, early = replayed(limit, i)
        local slot = rule.first_with(limit, at, early, from, cost)
        if not slots[i] then return slot end
        local full_then = rule.after(limit, at, early, slot + life + state.slack, cost)
        if slot < slots[i] and full_then <= latest_full(limit, i) then return slot end
        from, i = slots[i], i + 1
      end
    end

    function rule.room(limit, slot, length)
      local i = first_from(slot + 1)
      local at, early = replayed(limit, i)
      local most = rule.held(limit, at, early, slot)
      at, early = rule.after(limit, at, early, slot + length, 0)
      return rule.most_between(limit, most, at, early, latest_full(limit, i))
    end
  end

  -- Returns the units booked in a fixed window. `limit.booked` keeps them by the number of the window.
  function advance.booked_in(limit, number)
    local booked = limit.booked
    if not booked then
      booked = {}
      for i = 1, #slots do
        local first, last = limit.rule.windows_of(limit, slots[i], last_slots[i])
        for n = first, last do
          booked[n] = (booked[n] or 0) + units[i]
        end
      end
      limit.booked = booked
    end
    return booked[number] or 0
  end

  -- Makes a rule count the bookings. fixed.lua asks for their units itself.
  function advance.extend(kind, rule)
    if kind == WINDOW then extend_window(rule) end
    if kind == BUCKET then extend_bucket(rule) end
  end

  -- Returns the first moment at which no booking counts in a limit any more.
  function advance.fresh_from(limit)
    local from = 0
    if slots[1] and limit.kind == WINDOW then return limit.window + math.max(unpack(stamps)) end
    if limit.kind == BUCKET then from = replayed(limit, #slots + 1) end
    for i = 1, limit.kind == FIXED and #slots or 0 do
      local _, last = limit.rule.windows_of(limit, slots[i], last_slots[i])
      from = math.max(from, (last + 1) * limit.window - limit.phase)
    end
    return from
  end

  -- Returns the units booked with stamps up to `stamp`; of fixed windows, those of the current window.
  function advance.booked_until(limit, stamp)
    if limit.kind == FIXED then return advance.booked_in(limit, limit.rule.number_of(limit, state.now)) end
    local booked = 0
    for i = 1, #slots do
      if stamps[i] <= stamp then booked = booked + units[i] end
    end
    return booked
  end

  -- Notes that booking number i has changed, is new, or is to be removed.
  local function changed(i)
    state.changed, state.must_rewrite = true, true
    for k = 1, #state do
      local moments, latest, behind = state[k].replayed, state[k].latest_full, #slots - i
      state[k].booked = nil
      if moments and moments.to > i then moments.to = i end
      if latest and latest.to > behind then latest.to = behind end
    end
  end

  -- Removes booking number i. Returns its numbers.
  local function remove(i)
    changed(i)
    return table.remove(slots, i), table.remove(last_slots, i), table.remove(stamps, i), table.remove(units, i)
  end

  -- Moves the bookings whose slot has come into the limits.
  function advance.insert_due()
    while slots[1] and slots[1] <= state.now do
      local slot, last_slot, stamp, count = remove(1)
      for i = 1, #state do
        local limit = state[i]
        limit.rule.insert(limit, slot, stamp, count, last_slot)
        -- The stamp may have left the window as well.
        limit.rule.advance(limit)
      end
    end
  end

  -- Returns whether a permit with this slot becomes an advance booking. It is of use from `from`
  -- on.
  function advance.is_in_advance(slot, from, cost, life)
    local free, tolerance, is_behind = slot, NEVER, slots[1] and slots[1] <= slot
    for i = 1, #state do
      tolerance = math.min(tolerance, math.floor(state[i].window / 50))
      if is_behind and state[i].kind == BUCKET then return true end
    end
    if from > state.earliest then free = first_slot(cost, life, state.earliest) end
    return slot > free + math.max(tolerance, TOLERANCE)
  end

  -- Returns the number of the booking with exactly this slot and stamp.
  local function exact(slot, stamp)
    local i = first_from(slot)
    while slots[i] == slot do
      if last_slots[i] == slot and stamps[i] == stamp then return i end
      i = i + 1
    end
  end

  -- Joins the two neighbours whose joint units then count the least longer: from the first slot to the
  -- latest stamp. Their slots are few fixed windows apart. Returns false if there are none.
  local function join_two()
    local longest, cheapest, least = NEVER, nil, math.huge
    for i = 1, #state do
      local limit = state[i]
      if limit.kind == FIXED then longest = math.min(longest, limit.rule.longest_join(limit)) end
    end
    local slot, stamp, count = slots[1], stamps[1], units[1]
    for i = 1, #slots - 1 do
      local later_slot, later_stamp, later_count = slots[i + 1], stamps[i + 1], units[i + 1]
      local latest = stamp > later_stamp and stamp or later_stamp
      local cost = (latest - stamp) * count + (latest - slot - later_stamp + later_slot) * later_count
      if cost < least and math.max(last_slots[i], last_slots[i + 1]) - slot <= longest then
        cheapest, least = i, cost
      end
      slot, stamp, count = later_slot, later_stamp, later_count
    end
    if not cheapest then return false end
    local _, last_slot, later_stamp, later_units = remove(cheapest + 1)
    last_slots[cheapest] = math.max(last_slots[cheapest], last_slot)
    stamps[cheapest], units[cheapest] = math.max(stamps[cheapest], later_stamp), units[cheapest] + later_units
    changed(cheapest)
    return true
  end

  -- Adds units of permits. If there are too many bookings, two neighbours join. Returns false, and adds
  -- nothing, if none may join.
  function advance.add(slot, stamp, count)
    local i = exact(slot, stamp)
    if not i then
      if #slots >= MOST_ADVANCE and not join_two() then return false end
      i = first_from(slot + 1)
      table.insert(slots, i, slot)
      table.insert(last_slots, i, slot)
      table.insert(stamps, i, stamp)
      table.insert(units, i, 0)
    end
    units[i] = units[i] + count
    changed(i)
    return true
  end

  -- Returns the number of the first joined booking that may contain a permit, and how many may. Returns
  -- nil if none may.
  function advance.joined_with(slot, stamp)
    local first, count = nil, 0
    for i = 1, #slots do
      if slots[i] < last_slots[i] and slots[i] <= slot and slot <= last_slots[i] and stamp <= stamps[i] then
        first, count = first or i, count + 1
      end
    end
    return first, count
  end

  -- Takes units of unused permits out of the bookings, if they are certainly there. Returns how
  -- many units it took.
  function advance.erase(slot, stamp, count)
    local i = exact(slot, stamp)
    if not i then
      -- The permit may also be in the logs, unless all slots there are earlier.
      if cold().log_end() > slot then return 0 end
      local joined, containing = advance.joined_with(slot, stamp)
      if containing ~= 1 then return 0 end
      i = joined
    end
    count = math.min(count, units[i])
    units[i] = units[i] - count
    changed(i)
    if units[i] == 0 then remove(i) end
    for k = 1, #state do
      cold().note_unused(state[k], stamp, count)
    end
    return count
  end

  -- Reads the record of the bookings, and the bookings. Returns where they end.
  function advance.read(head, from, base)
    local _, count = struct.unpack(ADVANCE_RECORD, head, from)
    local after, format, pos = base + count * ADVANCE_BOOKING_SIZE, '<' .. string.rep('d', count), 1
    local bytes = redis.call('GETRANGE', key, base, after - 1)
    local function numbers()
      local list = { struct.unpack(format, bytes, pos) }
      pos = table.remove(list)
      return list
    end
    slots, last_slots, stamps, units = numbers(), numbers(), numbers(), numbers()
    return after
  end

  -- Packs the record of the bookings. Returns nil if there are none.
  function advance.record()
    return slots[1] and struct.pack(ADVANCE_RECORD, ADVANCE, #slots) or nil
  end

  -- Packs the bookings.
  function advance.region()
    local format = '<' .. string.rep('d', #slots)
    return struct.pack(format, unpack(slots)) .. struct.pack(format, unpack(last_slots))
      .. struct.pack(format, unpack(stamps)) .. struct.pack(format, unpack(units))
  end

  for kind, rule in pairs(rules) do
    advance.extend(kind, rule)
  end
  return advance
end
