
-- ── advance bookings: permits that are of use later ──────────────────────────────────────────────
--
-- Twin: src/limit/advance.rs and window_sweep.rs; of buckets and fixed windows src/limit/bucket.rs
-- and fixed.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `pack_list` (state.lua), rules (ledger.lua)
--
-- A permit whose slot is later than the first free slot is kept in a list beside the use of the
-- limits. src/limit/advance.rs has the rule and its proof. Few keys have such permits, so
-- all functions of this file are cold: `cold_advance` makes them when a call needs them. It then
-- replaces the functions of the rules that have to count the bookings.

-- Returns the functions that few calls need. Makes them first.
local function cold_advance()
  if state.cold_advance then return state.cold_advance end

  -- A slot that is at most this much later than the first free slot goes into the logs, in
  -- microseconds. A fiftieth of the shortest window applies if that is longer.
  local TOLERANCE = 10000
  -- The most advance bookings of a key.
  local MOST_ADVANCE = 256
  -- The most fixed windows between the slots of bookings that join.
  local MOST_JOINED_WINDOWS = 8
  -- The fields of a booking: a list, as ADVANCE_BOOKING is unpacked. Tables with names would take longer.
  local SLOT = 1
  local LAST_SLOT = 2
  local STAMP = 3
  local UNITS = 4
  -- The bookings, sorted by slot. Most calls need few of them, so a booking is read from `bytes` when
  -- it is needed: until then, it is nil or false in `list`.
  local list, booking_count, bytes, is_all_read = {}, 0, '', true
  -- Where each booking begins in `bytes`. False for a booking that has changed or is new. Nil until one
  -- has: then they lie there one behind the other.
  local places = nil
  -- The latest stamp. The longest time from slot to stamp, or a longer one.
  local latest_stamp, longest = 0, 0
  -- What neighbours would cost if they joined, by the number of the first one. Only calls that find
  -- the list full know it.
  local costs = nil

  -- Returns booking number i, or nil.
  local function booking_at(i)
    local booking = list[i]
    if not booking and i <= booking_count then
      local place = places and places[i] or (i - 1) * ADVANCE_BOOKING_SIZE + 1
      booking = { struct.unpack(ADVANCE_BOOKING, bytes, place) }
      list[i] = booking
    end
    return booking
  end

  -- Makes `places`, before a booking changes. `list` gets all its places, too.
  local function note_places()
    if places then return end
    local all = {}
    for i = 1, booking_count do
      all[i], list[i] = (i - 1) * ADVANCE_BOOKING_SIZE + 1, list[i] or false
    end
    places = all
  end

  -- Reads all bookings.
  local function read_all()
    if is_all_read then return end
    latest_stamp, longest, is_all_read = 0, 0, true
    for i = 1, booking_count do
      local booking = booking_at(i)
      if booking[STAMP] > latest_stamp then latest_stamp = booking[STAMP] end
      if booking[STAMP] - booking[SLOT] > longest then longest = booking[STAMP] - booking[SLOT] end
    end
  end

  -- Returns the number of the first booking whose slot is not before `slot`.
  local function first_from(slot)
    local i, beyond = 1, booking_count + 1
    if beyond == 1 or booking_at(1)[SLOT] >= slot then return 1 end
    while i < beyond do
      local middle = math.floor((i + beyond) / 2)
      if booking_at(middle)[SLOT] < slot then i = middle + 1 else beyond = middle end
    end
    return i
  end

  -- Returns whether a booking may count in a window of a limit that a permit with this slot
  -- touches. The stamp of the permit is `length` later.
  local function is_in_reach(limit, slot, length)
    local first = booking_at(1)
    return first and first[SLOT] < slot + limit.window + length
  end

  -- Moves the window (at, at + span] of a limit from where it ends at `slot`, as
  -- src/limit/window_sweep.rs does. With `most`, returns the end of the first window from which on
  -- at most so many units count, until the beginning has moved by the span and `length`. Without
  -- it, returns the most units that count until then.
  local function sweep(limit, slot, length, most)
    local span, at, units = limit.window, slot - limit.window, 0
    local chunk_count, stamps, counts = 0, {}, {}
    for i = 0, limit.n - 1 do
      local stamp, count = limit.rule.chunk(limit, i)
      if stamp > at then
        chunk_count = chunk_count + 1
        stamps[chunk_count], counts[chunk_count] = stamp, count
        units = units + count
      end
    end
    -- `leaving` has the bookings that the window has reached, sorted by stamp. The booking `coming`,
    -- number `ahead`, and those behind it are not reached yet.
    local ahead, leaving, leaves = first_from(at - longest), {}, 1
    local coming = booking_at(ahead)
    local function enter()
      local i = #leaving + 1
      while i > leaves and leaving[i - 1][STAMP] > coming[STAMP] do
        leaving[i] = leaving[i - 1]
        i = i - 1
      end
      leaving[i] = coming
      units = units + coming[UNITS]
    end
    while coming and coming[SLOT] <= slot do
      if coming[STAMP] > at then enter() end
      ahead = ahead + 1
      coming = booking_at(ahead)
    end
    local chunk, largest = 1, units
    local clear_from = most and units <= most and at or nil
    while true do
      local change = chunk <= chunk_count and stamps[chunk] or NEVER
      if leaving[leaves] and leaving[leaves][STAMP] < change then change = leaving[leaves][STAMP] end
      if coming and coming[SLOT] - span < change then change = coming[SLOT] - span end
      if change == NEVER then break end
      if most then
        if clear_from and change >= clear_from + span + length then break end
      elseif change >= slot + length then
        break
      end
      while coming and coming[SLOT] - span <= change do
        enter()
        ahead = ahead + 1
        coming = booking_at(ahead)
      end
      while leaving[leaves] and leaving[leaves][STAMP] <= change do
        units, leaves = units - leaving[leaves][UNITS], leaves + 1
      end
      while chunk <= chunk_count and stamps[chunk] <= change do
        units, chunk = units - counts[chunk], chunk + 1
      end
      if most then
        clear_from = units <= most and (clear_from or change) or nil
      elseif units > largest then
        largest = units
      end
    end
    if not most then return largest end
    local first_end = (clear_from or slot - span) + span
    return first_end > slot and first_end or slot
  end

  -- Returns the most units that count in a window of a limit that ends from now on and begins before
  -- now, as `most_now` in src/limit/window.rs does. Bookings lie ahead, so they only enter such a
  -- window, and only chunks leave it.
  local function most_now(limit)
    local now, span, units, most = state.now, limit.window, limit.total, limit.total
    local i, booking = 1, booking_at(1)
    for k = 0, limit.n do
      if not booking or booking[SLOT] >= now + span then break end
      -- Chunk k leaves at its stamp. Until then, the bookings enter that are earlier than this end.
      local stamp, count = now, 0
      if k < limit.n then stamp, count = limit.rule.chunk(limit, k) end
      local to = (stamp < now and stamp or now) + span
      while booking and booking[SLOT] < to do
        i, units = i + 1, units + booking[UNITS]
        booking = list[i] or booking_at(i)
      end
      if units > most then most = units end
      units = units - count
    end
    return most
  end

  -- Returns whether at most `most` units are booked of which a part may count in a window from
  -- (from, ...] on that ends before `to`.
  local function are_few(from, to, most)
    local i = first_from(from - longest)
    local booking = booking_at(i)
    while booking and booking[SLOT] < to and most >= 0 do
      most, i = most - booking[UNITS], i + 1
      booking = booking_at(i)
    end
    return most >= 0
  end

  -- Makes the rule of sliding windows count the bookings.
  local function extend_window(rule, plain)
    function rule.first_slot(limit, from, cost, life, reserved)
      local slot, length = plain.first_slot(limit, from, cost, life, reserved), life + state.slack
      if not is_in_reach(limit, slot, length) then return slot end
      cost = cost + reserved
      if are_few(slot - limit.window, slot + limit.window + length, limit.count - cost - limit.total) then return slot end
      return sweep(limit, slot, length, limit.count > cost and limit.count - cost or 0)
    end

    function rule.room(limit, slot, life)
      local length = life + state.slack
      if not is_in_reach(limit, slot, length) then return plain.room(limit, slot) end
      local room = limit.count - sweep(limit, slot, length)
      return room > 0 and room or 0
    end

    function rule.free(limit)
      local free, least = plain.free(limit), limit.count - most_now(limit)
      if least < free then free = least end
      return free > 0 and free or 0
    end

    function rule.fresh_from(limit)
      local from = plain.fresh_from(limit)
      if booking_count > 0 and latest_stamp + limit.window > from then from = latest_stamp + limit.window end
      return from
    end
  end

  -- Makes the rule of buckets count the bookings.
  local function extend_bucket(rule, plain)
    local cold = rule.cold()

    -- Returns when the bucket is full again before booking number i. `limit.replayed` keeps these
    -- moments: at[i] and early[i], up to i = `to`.
    local function replayed(limit, i)
      local moments = limit.replayed
      if not moments or moments.at[1] ~= limit.full_at or moments.early[1] ~= limit.early then
        moments = { at = { limit.full_at }, early = { limit.early }, to = 1 }
        limit.replayed = moments
      end
      while moments.to < i do
        local k = moments.to
        moments.at[k + 1], moments.early[k + 1] = cold.after(limit, moments.at[k], moments.early[k], list[k][STAMP], list[k][UNITS])
        moments.to = k + 1
      end
      return moments.at[i], moments.early[i]
    end

    -- Returns the latest moment at which the bucket may be full again before booking number i, so that
    -- it and those behind it find their units. `limit.latest_full` keeps these moments by the number of
    -- bookings from there on, up to `to`: a new booking then changes none of those behind it.
    local function latest_full(limit, i)
      local latest, from_here = limit.latest_full, booking_count - i + 1
      if not latest then
        latest = { [0] = NEVER, to = 0 }
        limit.latest_full = latest
      end
      while latest.to < from_here do
        local n = latest.to
        local booking = list[booking_count - n]
        latest[n + 1] = cold.latest_full_before(limit, booking[SLOT], booking[STAMP], booking[UNITS], latest[n])
        latest.to = n + 1
      end
      return latest[from_here]
    end

    -- Returns what a function of the plain rule returns for a bucket that is full again at `at`, `early`.
    local function with_moment(limit, at, early, plain_function, ...)
      local full_at, full_early = limit.full_at, limit.early
      limit.full_at, limit.early = at, early
      local result = plain_function(limit, ...)
      limit.full_at, limit.early = full_at, full_early
      return result
    end

    function rule.first_slot(limit, from, cost, life)
      read_all()
      local i, least = first_from(from + 1), math.floor(cost * limit.unit / limit.ticks)
      while list[i] do
        local at, early = replayed(limit, i)
        local latest = latest_full(limit, i)
        if at + least <= latest then
          local slot = with_moment(limit, at, early, plain.first_slot, from, cost)
          at = cold.after(limit, at, early, slot + life + state.slack, cost)
          if slot < list[i][SLOT] and at <= latest then return slot end
        end
        from = list[i][SLOT]
        i = i + 1
      end
      local at, early = replayed(limit, i)
      return with_moment(limit, at, early, plain.first_slot, from, cost)
    end

    -- Returns how many units may leave at `slot`, with stamps that are `length` later.
    local function room(limit, slot, length)
      read_all()
      local i = first_from(slot + 1)
      local at, early = replayed(limit, i)
      local most = with_moment(limit, at, early, plain.room, slot)
      if not list[i] then return most end
      at, early = cold.after(limit, at, early, slot + length, 0)
      return cold.most_between(limit, most, at, early, latest_full(limit, i))
    end

    function rule.room(limit, slot, life)
      return room(limit, slot, life + state.slack)
    end

    function rule.free(limit)
      return room(limit, state.now, 0)
    end

    function rule.fresh_from(limit)
      read_all()
      local at = replayed(limit, booking_count + 1)
      return at
    end
  end

  -- Returns the numbers of the first and of the last fixed window in which a booking counts.
  local function windows_of(limit, booking)
    local first, last = limit.rule.number_of(limit, booking[SLOT]), limit.rule.number_of(limit, booking[LAST_SLOT])
    return first, last < first + MOST_JOINED_WINDOWS and last or first + MOST_JOINED_WINDOWS
  end

  -- Returns the units booked in a fixed window. `limit.booked` keeps them by the number of the window.
  local function booked_in(limit, number)
    local booked = limit.booked
    if not booked then
      booked = {}
      read_all()
      for i = 1, booking_count do
        local first, last = windows_of(limit, list[i])
        for n = first, last do
          booked[n] = (booked[n] or 0) + list[i][UNITS]
        end
      end
      limit.booked = booked
    end
    return booked[number] or 0
  end

  -- Makes the rule of fixed windows count the bookings.
  local function extend_fixed(rule, plain)
    function rule.booked_in(limit, number)
      return booked_in(limit, number)
    end

    function rule.room(limit, slot)
      local room = plain.room(limit, slot) - booked_in(limit, rule.number_of(limit, slot))
      return room > 0 and room or 0
    end

    function rule.free(limit)
      return rule.room(limit, state.now)
    end

    function rule.fresh_from(limit)
      local from = plain.fresh_from(limit)
      read_all()
      for i = 1, booking_count do
        local _, last = windows_of(limit, list[i])
        local over = (last + 1) * limit.window - limit.phase
        if over > from then from = over end
      end
      return from
    end
  end

  local extensions = { extend_window, extend_bucket, extend_fixed }

  -- Makes a rule count the bookings. Its functions without them stay in `rule.plain`.
  local function extend(kind, rule)
    rule.plain = {
      first_slot = rule.first_slot, room = rule.room, free = rule.free, fresh_from = rule.fresh_from,
    }
    extensions[kind](rule, rule.plain)
  end

  -- Returns the units booked with stamps up to `stamp`; of fixed windows, those of the current window.
  local function booked_until(limit, stamp)
    if limit.kind == FIXED then return booked_in(limit, limit.rule.number_of(limit, state.now)) end
    local units = 0
    read_all()
    for i = 1, booking_count do
      if list[i][STAMP] <= stamp then units = units + list[i][UNITS] end
    end
    return units
  end

  -- Notes that booking number i has changed, is new, or is to be removed.
  local function changed(i)
    state.changed, state.must_rewrite = true, true
    for k = 1, #state do
      local moments, latest, behind = state[k].replayed, state[k].latest_full, booking_count - i
      state[k].booked = nil
      if moments and moments.to > i then moments.to = i end
      if latest and latest.to > behind then latest.to = behind end
    end
  end

  -- Removes booking number i.
  local function remove(i)
    local booking = booking_at(i)
    note_places()
    changed(i)
    table.remove(list, i)
    table.remove(places, i)
    booking_count, costs = booking_count - 1, nil
    if booking[STAMP] == latest_stamp then
      is_all_read = false
      read_all()
    end
    return booking
  end

  -- Notes the stamp of a booking that is new or has a later stamp.
  local function note_stamp(booking)
    if booking[STAMP] > latest_stamp then latest_stamp = booking[STAMP] end
    if booking[STAMP] - booking[SLOT] > longest then longest = booking[STAMP] - booking[SLOT] end
  end

  -- Moves the bookings whose slot has come into the limits.
  local function insert_due()
    while booking_count > 0 and booking_at(1)[SLOT] <= state.now do
      local booking = remove(1)
      for i = 1, #state do
        local limit = state[i]
        if limit.kind == FIXED then
          if booking[STAMP] > limit.last_stamp then limit.last_stamp = booking[STAMP] end
          local first, last = windows_of(limit, booking)
          for number = first, last do
            limit.rule.add(limit, number, booking[UNITS])
          end
        else
          limit.rule.insert(limit, booking[SLOT], booking[STAMP], booking[UNITS])
        end
        -- The stamp may have left the window as well.
        limit.rule.advance(limit)
      end
    end
  end

  -- Returns whether a permit with this slot becomes an advance booking. It is of use from `from`
  -- on.
  local function is_in_advance(slot, from, cost, life)
    local free, tolerance, is_behind = slot, NEVER, booking_count > 0 and booking_at(1)[SLOT] <= slot
    for i = 1, #state do
      local fiftieth = math.floor(state[i].window / 50)
      if fiftieth < tolerance then tolerance = fiftieth end
      if is_behind and state[i].kind == BUCKET then return true end
    end
    if tolerance < TOLERANCE then tolerance = TOLERANCE end
    if from > state.earliest then free = first_slot(cost, life, state.earliest) end
    return slot > free + tolerance
  end

  -- Returns the number of the booking with exactly this slot and stamp.
  local function exact(slot, stamp)
    local i = first_from(slot)
    local booking = booking_at(i)
    while booking and booking[SLOT] == slot do
      if booking[LAST_SLOT] == slot and booking[STAMP] == stamp then return i end
      i = i + 1
      booking = booking_at(i)
    end
  end

  -- Notes what booking number i and the next one would cost if they joined: for how much longer
  -- units would count, times the units. Infinite if their slots are too many fixed windows apart.
  local function note_cost(i)
    local one, other = booking_at(i), booking_at(i + 1)
    if not one or not other then return end
    local last_slot = one[LAST_SLOT] > other[LAST_SLOT] and one[LAST_SLOT] or other[LAST_SLOT]
    local stamp = one[STAMP] > other[STAMP] and one[STAMP] or other[STAMP]
    costs[i] = last_slot - one[SLOT] > costs.longest and math.huge
      or (stamp - one[SLOT]) * (one[UNITS] + other[UNITS]) - (one[STAMP] - one[SLOT]) * one[UNITS]
        - (other[STAMP] - other[SLOT]) * other[UNITS]
  end

  -- Notes the costs of joins with booking number i, which is new or has changed.
  local function note_costs(i)
    if i > 1 then note_cost(i - 1) end
    note_cost(i)
  end

  -- Returns the number of the first of the two neighbours whose joint units would count the least
  -- longer. Their slots are few fixed windows apart.
  local function cheapest_join()
    if not costs then
      costs = { longest = NEVER }
      for i = 1, #state do
        local limit = state[i]
        if limit.kind == FIXED and limit.window * MOST_JOINED_WINDOWS < costs.longest then
          costs.longest = limit.window * MOST_JOINED_WINDOWS
        end
      end
      read_all()
      for i = 1, booking_count - 1 do
        note_cost(i)
      end
    end
    local cheapest, least = nil, math.huge
    for i = 1, booking_count - 1 do
      if costs[i] < least then cheapest, least = i, costs[i] end
    end
    return cheapest
  end

  -- Returns how one more booking has room in the list, for `add`. Returns nil if it has none.
  local function place_for(slot, stamp)
    local same = exact(slot, stamp)
    if same then return { same = same } end
    local join = booking_count >= MOST_ADVANCE and cheapest_join()
    if join or booking_count < MOST_ADVANCE then return { join = join } end
  end

  -- Adds units of permits. If there are too many bookings, two neighbours join.
  local function add(place, slot, stamp, units)
    note_places()
    if place.same then
      local booking = booking_at(place.same)
      booking[UNITS], places[place.same] = booking[UNITS] + units, false
      if costs then note_costs(place.same) end
      changed(place.same)
      return
    end
    if place.join then
      local one, later = booking_at(place.join), booking_at(place.join + 1)
      table.remove(list, place.join + 1)
      table.remove(places, place.join + 1)
      booking_count = booking_count - 1
      table.remove(costs, place.join + 1)
      if later[LAST_SLOT] > one[LAST_SLOT] then one[LAST_SLOT] = later[LAST_SLOT] end
      if later[STAMP] > one[STAMP] then one[STAMP] = later[STAMP] end
      one[UNITS], places[place.join] = one[UNITS] + later[UNITS], false
      note_stamp(one)
      note_costs(place.join)
      changed(place.join)
    end
    local booking = { slot, slot, stamp, units }
    local i = first_from(slot + 1)
    table.insert(list, i, booking)
    table.insert(places, i, false)
    booking_count = booking_count + 1
    note_stamp(booking)
    if costs then
      table.insert(costs, i, math.huge)
      note_costs(i)
    end
    changed(i)
  end

  -- Returns the number of the only joined booking that may contain a permit, and how many may.
  local function joined_with(slot, stamp)
    local first, count = nil, 0
    read_all()
    for i = 1, booking_count do
      local booking = list[i]
      if booking[SLOT] < booking[LAST_SLOT] and booking[SLOT] <= slot and slot <= booking[LAST_SLOT]
        and stamp <= booking[STAMP] then
        first, count = first or i, count + 1
      end
    end
    return first, count
  end

  -- Returns whether joined bookings may contain a permit.
  local function may_contain(slot, stamp)
    local _, count = joined_with(slot, stamp)
    return count > 0
  end

  -- Takes units of unused permits out of the bookings, if they are certainly there. Returns how
  -- many units it took.
  local function erase(slot, stamp, units)
    local found = exact(slot, stamp)
    if not found then
      -- The permit may also be in the logs, unless all slots there are earlier.
      if cold().log_end() > slot then return 0 end
      local joined, count = joined_with(slot, stamp)
      if count ~= 1 then return 0 end
      found = joined
    end
    note_places()
    local booking = booking_at(found)
    if booking[UNITS] < units then units = booking[UNITS] end
    booking[UNITS], places[found], costs = booking[UNITS] - units, false, nil
    if booking[UNITS] == 0 then remove(found) else changed(found) end
    for i = 1, #state do
      cold().note_unused(state[i], stamp, units)
    end
    return units
  end

  -- Reads the record of the bookings. Returns where they end.
  local function read(head, from, base)
    local _, latest, longest_span
    _, booking_count, latest, longest_span = struct.unpack(ADVANCE_RECORD, head, from)
    local after = base + booking_count * ADVANCE_BOOKING_SIZE
    bytes = redis.call('GETRANGE', key, base, after - 1)
    latest_stamp, longest, is_all_read = latest, longest_span, false
    return after
  end

  -- Packs the record of the bookings, if there are any. Returns it, and the number of records.
  local function record()
    if booking_count == 0 then return '', 0 end
    local record = struct.pack(ADVANCE_RECORD, ADVANCE, booking_count, latest_stamp, longest)
    return record .. string.rep('\0', RECORD_SIZE - #record), 1
  end

  -- Packs the bookings. Those that follow each other in `bytes` are copied at once.
  local function region()
    if not places then return bytes end
    local parts, from, to = {}, 1, 1
    for i = 1, booking_count do
      local booking, place = list[i], places[i]
      if place ~= to then
        if to > from then parts[#parts + 1] = string.sub(bytes, from, to - 1) end
        from, to = place or 1, place or 1
      end
      if place then
        to = to + ADVANCE_BOOKING_SIZE
      else
        parts[#parts + 1] = struct.pack(ADVANCE_BOOKING, booking[SLOT], booking[LAST_SLOT], booking[STAMP], booking[UNITS])
      end
    end
    if to > from then parts[#parts + 1] = string.sub(bytes, from, to - 1) end
    return table.concat(parts)
  end

  for kind, rule in pairs(rules) do
    extend(kind, rule)
  end
  state.cold_advance = {
    extend = extend, booked_until = booked_until, insert_due = insert_due,
    is_in_advance = is_in_advance, place_for = place_for, add = add, may_contain = may_contain, erase = erase, read = read,
    record = record, region = region,
  }
  return state.cold_advance
end
