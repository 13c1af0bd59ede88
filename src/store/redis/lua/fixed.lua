
-- ── fixed windows, aligned to the epoch (src/limit/fixed.rs) ─────────────────────────────────────────────────────────
--
-- Logical time ignores a step of the server's clock, which the boundaries follow: `phase` is how far they are ahead of the
-- multiples of the window in logical time.

local function fixed_rule()
  local RECORD, MOST_SPELLS, SMALLEST_STEP = '<BI4I7I4I7I7I2I2I7I7I7I7I7I7I7I7', 64, 20000
  local rule = { size = 14 }

  -- The number of the window of a moment.
  local function number_of(f, at)
    return math.floor((at + f.phase) / f.window)
  end

  function rule.advance(f)
    if f.n > 0 then
      local list, current = entries(f), number_of(f, S.now)
      -- The window before the current one stays: the current one may begin earlier when the clock is set.
      while list[1] and list[1].window + 1 < current do
        table.remove(list, 1)
        f.n, f.dirty = #list, true
      end
    end
  end

  -- Where the units of `window` are, or would have to be.
  local function find_spell(f, window)
    local list = entries(f)
    for i = 1, #list do
      if list[i].window >= window then
        return i, list[i].window == window and list[i] or nil
      end
    end
    return #list + 1, nil
  end

  local function units_in(f, window)
    local _, spell = find_spell(f, window)
    return spell and spell.units or 0
  end

  -- Adds units to a window.
  local function add(f, window, units)
    local list, i, spell = entries(f), find_spell(f, window)
    if spell then
      spell.units = spell.units + units
    else
      table.insert(list, i, { window = window, units = units })
    end
    while #list > MOST_SPELLS do
      local closed = table.remove(list, 1).window + 1
      if closed > f.open_from then f.open_from = closed end
    end
    f.n, f.dirty = #list, true
    if f.n > f.room then S.relaid = true end
  end

  -- Moves the boundaries to where the server's clock puts them. After a step the units of a window count in each new one
  -- that overlaps it; after a drift they stay in theirs.
  function rule.align(f)
    local phase = (raw - S.now) % f.window
    if phase == f.phase then return end
    local moved, before = math.abs(phase - f.phase), f.phase
    if f.window - moved < moved then moved = f.window - moved end
    local list, open_from = entries(f), f.open_from
    f.phase, f.list, f.n, f.open_from, f.dirty = phase, {}, 0, 0, true
    local function overlapped(window)
      local start = window * f.window - before
      if moved < SMALLEST_STEP then
        local same = number_of(f, start + math.floor(f.window / 2))
        return same, same
      end
      return number_of(f, start), number_of(f, start + f.window - 1)
    end
    if open_from > 0 then
      local _, last = overlapped(open_from - 1)
      f.open_from = last + 1
    end
    for i = 1, #list do
      local first, last = overlapped(list[i].window)
      for window = first, last do
        add(f, window, list[i].units)
      end
    end
    S.changed = true
  end

  function rule.first_slot(f, from, cost, life, reserved)
    local most = f.count - reserved > cost and f.count - reserved or cost
    local list, window, open = entries(f), number_of(f, from), f.window - 2 * guard
    if window < f.open_from then window = f.open_from end
    if open < 0 then open = 0 end
    open = open > life and open - life or 0
    local i = find_spell(f, window)
    while true do
      local start, spell = window * f.window - f.phase + guard, list[i]
      local slot, units = from > start and from or start, 0
      if spell and spell.window == window then
        units, i = spell.units, i + 1
      end
      if slot <= start + open and units + cost <= most then
        return slot
      end
      if start >= NEVER then return NEVER end
      window = window + 1
    end
  end

  function rule.room(f, slot)
    local window = number_of(f, slot)
    if window < f.open_from then return 0 end
    local room = f.count - units_in(f, window)
    return room > 0 and room or 0
  end

  function rule.insert(f, slot, _, units)
    add(f, number_of(f, slot), units)
  end

  -- Counts units that were used without a permit. More than the limit count as the limit.
  function rule.charge(f, used_at, _, units)
    if number_of(f, used_at) >= number_of(f, S.now) then
      add(f, number_of(f, used_at), units < f.count and units or f.count)
    end
  end

  function rule.subtract(f, slot, _, units)
    local _, spell = find_spell(f, number_of(f, slot))
    if spell then
      spell.units = spell.units > units and spell.units - units or 0
      f.dirty = true
    end
  end

  function rule.fresh_from(f)
    local list, last = entries(f), f.open_from
    for i = #list, 1, -1 do
      if list[i].units > 0 then
        if list[i].window + 1 > last then last = list[i].window + 1 end
        break
      end
    end
    return last > 0 and last * f.window - f.phase or 0
  end

  function rule.free(f)
    return rule.room(f, S.now)
  end

  function rule.used(f)
    return units_in(f, number_of(f, S.now))
  end

  function rule.new(f)
    f.open_from, f.phase, f.list = 0, (raw - S.now) % f.window, {}
  end

  function rule.read(s, from)
    local f = {}
    f.kind, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from, f.phase =
      struct.unpack(RECORD, s, from)
    return f
  end

  function rule.record(f)
    return struct.pack(RECORD, FIXED, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from,
      f.phase, 0, 0, 0, 0, 0, 0)
  end

  function rule.more()
    return rule
  end

  return rule
end
