
-- ── fixed windows, aligned to the epoch (src/limit/fixed.rs) ─────────────────────────────────────────────────────────

local function fixed_rule()
  local RECORD, MOST_SPELLS = '<BI4I7I4I7I7I2I2I7I7I7I7I7I7I7I7', 64
  local rule = { size = 14 }
  function rule.advance(f)
    if f.n > 0 then
      local list, current = entries(f), math.floor(S.now / f.window)
      while list[1] and list[1].window < current do
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

  function rule.first_slot(f, from, cost, life, reserved)
    local most = f.count - reserved > cost and f.count - reserved or cost
    local list, window, open = entries(f), math.floor(from / f.window), f.window - 2 * f.guard
    if window < f.open_from then window = f.open_from end
    if open < 0 then open = 0 end
    open = open > life and open - life or 0
    local i = find_spell(f, window)
    while true do
      local start, spell = window * f.window + f.guard, list[i]
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
    local window = math.floor(slot / f.window)
    if window < f.open_from then return 0 end
    local room = f.count - units_in(f, window)
    return room > 0 and room or 0
  end

  function rule.insert(f, slot, _, units)
    local window = math.floor(slot / f.window)
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

  function rule.subtract(f, slot, _, units)
    local _, spell = find_spell(f, math.floor(slot / f.window))
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
    return last * f.window
  end

  function rule.free(f)
    return rule.room(f, S.now)
  end

  function rule.used(f)
    return units_in(f, math.floor(S.now / f.window))
  end

  function rule.new(f)
    f.open_from, f.list = 0, {}
  end

  function rule.read(s, from)
    local f = {}
    f.kind, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from = struct.unpack(RECORD, s, from)
    return f
  end

  function rule.record(f)
    return struct.pack(RECORD, FIXED, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from,
      0, 0, 0, 0, 0, 0, 0)
  end

  function rule.more()
    return rule
  end

  return rule
end
