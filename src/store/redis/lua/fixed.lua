
-- ── fixed windows, aligned to the epoch ──────────────────────────────────────────────────────────
--
-- Twin: src/limit/fixed.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), `guard` (call.lua), `state` and `entries`
-- (state.lua)
--
-- Windows are numbered: number n begins at n * window - phase in logical time. Logical time ignores
-- a step of the server's clock, but the boundaries follow that clock. So `phase` changes when the
-- clock is set. An entry is a *use*: the number of a window, and the units used in it. Windows
-- before `open_from` take no more units.

-- Returns the functions of this kind of limit.
local function fixed_rule()
  -- The most uses that are kept. If more windows are booked ahead, the earliest of them closes.
  local MOST_WINDOWS = 64
  -- The most windows between the slots of bookings that join.
  local MOST_JOINED_WINDOWS = 8
  -- A smaller move of the boundaries is a drift of the clocks, not a step. In microseconds.
  local SMALLEST_STEP = 20000

  -- Returns the number of the window of a moment.
  local function number_of(limit, at)
    return math.floor((at + limit.phase) / limit.window)
  end

  -- Forgets windows that are over.
  local function advance(limit)
    if limit.n > 0 then
      local list, current = entries(limit), number_of(limit, state.now)
      -- The window before the current one is kept, because the current one may begin earlier when
      -- the clock is set.
      while list[1] and list[1].number + 1 < current do
        table.remove(list, 1)
        limit.n, limit.dirty = #list, true
      end
    end
  end

  -- Returns the place of the use of window `number` in the list, and the use. The use is nil if the
  -- window has none.
  local function find_use(limit, number)
    local list = entries(limit)
    for i = 1, #list do
      if list[i].number >= number then
        return i, list[i].number == number and list[i] or nil
      end
    end
    return #list + 1, nil
  end

  -- Returns the units used in window `number`.
  local function units_in(limit, number)
    local _, use = find_use(limit, number)
    return use and use.units or 0
  end

  -- The same, with those that are booked there in advance.
  local function units_with(limit, number)
    local booked = state.cold_advance and state.cold_advance.booked_in(limit, number) or 0
    return units_in(limit, number) + booked
  end

  -- Adds units to a window.
  local function add(limit, number, units)
    local list, i, use = entries(limit), find_use(limit, number)
    if use then
      use.units = use.units + units
    else
      table.insert(list, i, { number = number, units = units })
    end
    while #list > MOST_WINDOWS do
      local closed = table.remove(list, 1).number + 1
      if closed > limit.open_from then limit.open_from = closed end
    end
    limit.n, limit.dirty = #list, true
    if limit.n > limit.space then state.must_rewrite = true end
  end

  -- Moves the boundaries to where the server's clock puts them. A small move is a drift of the
  -- clocks: the units of a window stay in that window. A larger move is a step of the clock: the
  -- units count in each new window that overlaps the old one, up to that of the last stamp.
  local function align(limit)
    local phase = (server_time - state.now) % limit.window
    if phase == limit.phase then return end
    -- What is over by the old boundaries is forgotten first, as it may still be in the record of a
    -- state that no call has written since.
    advance(limit)
    local moved, before = math.abs(phase - limit.phase), limit.phase
    if limit.window - moved < moved then moved = limit.window - moved end
    local list, open_from = entries(limit), limit.open_from
    limit.phase, limit.list, limit.n, limit.open_from, limit.dirty = phase, {}, 0, 0, true
    local function overlapped(number)
      local start = number * limit.window - before
      if moved < SMALLEST_STEP then
        local same = number_of(limit, start + math.floor(limit.window / 2))
        return same, same
      end
      local last = start + limit.window - 1
      if limit.last_stamp < last then last = limit.last_stamp > start and limit.last_stamp or start end
      return number_of(limit, start), number_of(limit, last)
    end
    if open_from > 0 then
      local _, last = overlapped(open_from - 1)
      limit.open_from = last + 1
    end
    for i = 1, #list do
      local first, last = overlapped(list[i].number)
      for number = first, last do
        add(limit, number, list[i].units)
      end
    end
    state.changed = true
  end

  -- Returns the guard that applies. That of a caller that does not know this limit may be longer than a window.
  local function bounded_guard(limit)
    return math.min(guard, math.floor(limit.window / 4))
  end

  -- Returns how long a permit may be valid at a slot, so that it is used in the window of that slot.
  local function longest_life(limit, slot)
    local stop = (number_of(limit, slot) + 1) * limit.window - limit.phase - bounded_guard(limit)
    return stop > slot and stop - slot or 0
  end

  -- Returns the first slot, not before `from`, for `cost` units. The whole life of the permit lies
  -- in one window, and outside the guard of its boundaries. That window has room besides `reserved`
  -- units of other clients, or has no units.
  local function first_slot(limit, from, cost, life, reserved)
    local most = limit.count - reserved > cost and limit.count - reserved or cost
    local guard = bounded_guard(limit)
    local number, open = math.max(number_of(limit, from), limit.open_from), limit.window - 2 * guard
    open = open > life and open - life or 0
    while true do
      local start = number * limit.window - limit.phase + guard
      local slot = from > start and from or start
      if slot <= start + open and units_with(limit, number) + cost <= most then return slot end
      if start >= NEVER then return NEVER end
      number = number + 1
    end
  end

  -- Returns how many units may leave at `slot`.
  local function room(limit, slot)
    local number = number_of(limit, slot)
    if number < limit.open_from then return 0 end
    local room = limit.count - units_with(limit, number)
    return room > 0 and room or 0
  end

  -- Returns the numbers of the first and of the last window in which joined bookings count.
  local function windows_of(limit, slot, last_slot)
    local first, last = number_of(limit, slot), number_of(limit, last_slot)
    return first, last < first + MOST_JOINED_WINDOWS and last or first + MOST_JOINED_WINDOWS
  end

  -- Counts units at `slot`, or those of joined bookings with slots up to `last_slot`.
  local function insert(limit, slot, stamp, units, last_slot)
    if stamp > limit.last_stamp then limit.last_stamp = stamp end
    local first, last = windows_of(limit, slot, last_slot or slot)
    for number = first, last do
      add(limit, number, units)
    end
  end

  -- Returns how far the slots of joined bookings may be apart.
  local function longest_join(limit)
    return limit.window * MOST_JOINED_WINDOWS
  end

  -- Counts units that were used without a permit. If they are more than the limit, as many as the
  -- limit count. Units that were used in an earlier window than the current one do not count.
  local function charge(limit, used_at, _, units)
    if number_of(limit, used_at) >= number_of(limit, state.now) then
      insert(limit, used_at, used_at, units < limit.count and units or limit.count)
    end
  end

  -- Takes back units that were not used.
  local function subtract(limit, slot, _, units)
    local _, use = find_use(limit, number_of(limit, slot))
    if use then
      use.units = use.units > units and use.units - units or 0
      limit.dirty = true
    end
  end

  -- Returns the end of the last window that has units or is closed.
  local function fresh_from(limit)
    local list, last = entries(limit), limit.open_from
    for i = #list, 1, -1 do
      if list[i].units > 0 then
        if list[i].number + 1 > last then last = list[i].number + 1 end
        break
      end
    end
    return last > 0 and last * limit.window - limit.phase or 0
  end

  -- Returns the units used in the current window.
  local function used(limit)
    return units_in(limit, number_of(limit, state.now))
  end

  -- Makes windows without units.
  local function new(limit)
    limit.open_from, limit.phase, limit.last_stamp, limit.list = 0, (server_time - state.now) % limit.window, 0, {}
  end

  -- Reads the record.
  local function read(limit, s, from)
    local _
    _, limit.last_stated, limit.n, limit.space, limit.open_from, limit.phase, limit.last_stamp =
      struct.unpack(FIXED_RECORD, s, from)
  end

  -- Packs the record.
  local function record(limit)
    return struct.pack(FIXED_RECORD, limit.bytes, limit.last_stated, limit.n, limit.space, limit.open_from, limit.phase,
      limit.last_stamp)
  end

  local rule = {
    entry = WINDOW_USE, size = WINDOW_USE_SIZE, fields = { 'number', 'units' },
    read = read, record = record, advance = advance, first_slot = first_slot, room = room, insert = insert,
    fresh_from = fresh_from, charge = charge, subtract = subtract, used = used, new = new, align = align,
    number_of = number_of, longest_life = longest_life, windows_of = windows_of,
    longest_join = longest_join, cold = 0,
  }

  -- Returns the rule, which has all functions.
  function rule.cold()
    return rule
  end

  return rule
end
