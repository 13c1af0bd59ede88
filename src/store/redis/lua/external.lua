
-- ── external usage: what other clients use of a limit ────────────────────────────────────────────
--
-- Twin: src/limit/external.rs and limit_state.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` (state.lua)

-- Returns the units of a limit that are reserved for other clients at a moment, and when that
-- changes next if no response arrives.
local function reserved_from(limit, at)
  local external, units, quarter = limit.external, 0, math.floor(limit.count / 4)
  local is_confirmed = at < external.confirmed_until
  if at < external.ends then
    units = external.before
    if not is_confirmed and units > quarter then units = quarter end
    if is_confirmed and external.seen > units then units = external.seen end
  elseif external.whole == 1 then
    units = external.seen > external.before and external.seen or external.before
    if not is_confirmed and units > quarter then units = quarter end
  end
  if at < external.short_until and external.short > units then units = external.short end
  local till = NEVER
  if external.short_until > at and external.short_until < till then till = external.short_until end
  if external.confirmed_until > at and external.confirmed_until < till then till = external.confirmed_until end
  if external.ends > at and external.ends < till then till = external.ends end
  return units, till
end

-- Returns the units of a limit that are reserved for other clients at a moment.
local function reserved(limit, at)
  local units = reserved_from(limit, at)
  return units
end

-- Returns the moment from which nothing is reserved any more.
local function forgotten_from(limit)
  local external = limit.external
  local from, is_stated = external.ends, external.least < LARGEST_I4 or external.seen > 0
  if is_stated and reserved(limit, external.ends) > 0 then from = external.ends + limit.window end
  if external.short > 0 and external.short_until > from then from = external.short_until end
  return from
end

-- Returns how many of `units` are left besides those that are reserved at a moment.
local function less_reserved(units, limit, at)
  if limit.external then units = units - reserved(limit, at) end
  return units > 0 and units or 0
end

-- Returns the first moment at which one limit allows `cost` besides what is reserved then.
local function first_slot_beside(limit, from, cost, life)
  while true do
    local units, till = reserved_from(limit, from)
    local slot = limit.rule.first_slot(limit, from, cost, life, units)
    if slot < till or till == NEVER then return slot end
    from = till
  end
end

-- Makes the functions that few calls need.
local function cold_external()
  -- The longest life of a permit is this, or a twentieth of the window if that is longer.
  local LONGEST_LIFE = 50000
  -- The greatest age of a response that bounds the units that may be sent until the next one. A
  -- twentieth of the window applies if that is longer.
  local OLDEST_RESPONSE = 250000

  local function new_external(ends, before, whole)
    return {
      ends = ends, seen = 0, before = before, refused = 0, least = LARGEST_I4, ours = 0, whole = whole, said = 0,
      said_till = 0, confirmed_until = 0, short = 0, short_until = 0, counted_until = 0,
    }
  end

  -- Begins a new count. The last one has ended.
  local function roll(limit)
    local last, before = limit.external, 0
    local ends = last.ends + limit.window
    if last.whole == 1 and state.now < ends then
      before = limit.count - last.least
      before = before > last.ours and before - last.ours or 0
      if last.before < before then before = last.before end
      if last.seen > before then before = last.seen end
    end
    if before > 0 then
      local external = new_external(ends, before, 1)
      external.said, external.said_till = last.said, last.said_till
      -- The units that remained at the end show what other clients may have used.
      local shown = last.least < LARGEST_I4 and last.said_till or 0
      external.confirmed_until = shown > last.confirmed_until and shown or last.confirmed_until
      limit.external = external
    else
      limit.external, state.relaid = nil, true
    end
  end

  -- Takes in what the upstream states remains of one limit. Returns whether less is allowed than
  -- before.
  local function see_at(limit, units, reset_in, steady, urgent, ago, refused, valid_for)
    if limit.kind == BUCKET then return limit.rule.more().see(limit, ago, units) end
    local least, most
    local longest_life = math.floor(limit.window / 20)
    if longest_life < LONGEST_LIFE then longest_life = LONGEST_LIFE end
    local sent = state.now + longest_life + state.slack
    if limit.kind == WINDOW then
      least, most = limit.rule.more().used_until(limit, sent)
    else
      least = limit.rule.used(limit)
      most = least
    end
    -- Units may have left the log since an older response.
    local oldest = math.floor(limit.window / 20)
    if oldest < OLDEST_RESPONSE then oldest = OLDEST_RESPONSE end
    if steady == 0 and ago > oldest then reset_in = 0 end
    local gone, external = limit.count > units and limit.count - units or 0, limit.external
    local resets = reset_in > 0 and state.now + reset_in or nil
    if not external and not (resets and gone > most) and refused == 0 and not urgent then return false end
    local is_steady = steady == 1 and resets
    local ends = is_steady and resets or state.now + limit.window
    local whole = state.made_at + limit.window - math.floor(limit.window / 10) <= (is_steady and ends or state.now)
    if not external then
      external = new_external(ends, 0, whole and 1 or 0)
      limit.external, state.relaid = external, true
    elseif (is_steady or refused > 0) and external.seen == 0 and external.before == 0 and external.refused == 0 then
      local known = new_external(ends, 0, whole and 1 or 0)
      known.said, known.said_till = external.said, external.said_till
      known.short, known.short_until, known.counted_until = external.short, external.short_until, external.counted_until
      limit.external, external = known, known
    end
    local was_reserved = reserved(limit, state.now)

    external.refused = external.refused + refused
    if external.refused > LARGEST_I4 then external.refused = LARGEST_I4 end
    if external.refused > 0 then
      local by_refusals, bound = external.before + external.refused, limit.count - math.floor(limit.count / 8)
      if by_refusals > bound then by_refusals = bound end
      if by_refusals > external.seen then external.seen = by_refusals end
    end

    local said = state.now > ago and state.now - ago or 0
    local is_newest = said >= external.said
    if is_newest then external.said, external.said_till = said, state.now + valid_for end
    local counted = most > external.refused and most - external.refused or 0
    local of_others = gone > counted and gone - counted or 0
    if said + limit.window >= external.ends then
      if least > LARGEST_I4 then least = LARGEST_I4 end
      if units < external.least or (units == external.least and least < external.ours) then
        external.least, external.ours = units, least
      end
      if is_steady then
        if is_newest and gone < external.seen then external.seen = gone end
        if of_others > external.seen then external.seen = of_others end
      end
    end
    if (refused > 0 or (is_steady and of_others > 0)) and state.now + valid_for > external.confirmed_until then
      external.confirmed_until = state.now + valid_for
    end

    if is_newest then
      external.short, external.short_until, external.counted_until = 0, 0, 0
      if resets and resets > state.now then
        external.short, external.counted_until = gone - most, sent
        external.short_until = resets < state.now + valid_for and resets or state.now + valid_for
      end
    end
    state.changed = true
    return reserved(limit, state.now) > was_reserved
  end

  -- Forgets what is reserved for other clients.
  local function forget_others(limit)
    if limit.external then
      limit.external, state.relaid, state.changed = nil, true, true
    end
  end

  -- Takes in what the upstream states remains of a limit. Returns whether less is allowed than
  -- before, and whether other processes must be notified of it at once.
  local function see(kind, count, window, capacity, units, reset_in, flags, ago, refused, valid_for, forget)
    local steady, urgent = flags % 2, flags >= 2
    for i = 1, #state do
      local limit = state[i]
      if limit.count == count and limit.window == window and limit.kind == kind and limit.capacity == capacity then
        if forget == 1 then
          forget_others(limit)
          return false, false
        end
        return see_at(limit, units, reset_in, steady, urgent, ago, refused, valid_for), urgent
      end
    end
    return false, false
  end

  -- Reads a record and attaches it to its limit.
  local function read(bytes, from)
    local _, count, window, capacity, of_kind, ends, seen, before, refused, least, ours, whole, said, said_till,
      confirmed_until, short, short_until, counted_until = struct.unpack(EXTERNAL_RECORD, bytes, from)
    local external = {
      ends = ends, seen = seen, before = before, refused = refused, least = least, ours = ours, whole = whole, said = said,
      said_till = said_till, confirmed_until = confirmed_until, short = short, short_until = short_until,
      counted_until = counted_until,
    }
    for i = 1, #state do
      local limit = state[i]
      if limit.count == count and limit.window == window and limit.kind == of_kind and limit.capacity == capacity then
        limit.external = external
      end
    end
  end

  -- Packs the records of all limits that other clients use. Returns them, and how many they are.
  local function records()
    local bytes, n = '', 0
    for i = 1, #state do
      local limit, external = state[i], state[i].external
      if external then
        local record = struct.pack(EXTERNAL_RECORD, EXTERNAL, limit.count, limit.window, limit.capacity, limit.kind,
          external.ends, external.seen, external.before, external.refused, external.least, external.ours, external.whole,
          external.said, external.said_till, external.confirmed_until, external.short, external.short_until,
          external.counted_until)
        bytes, n = bytes .. record .. string.rep('\0', RECORD_SIZE - #record), n + 1
      end
    end
    return bytes, n
  end

  state.cold_external = { roll = roll, see = see, forget_others = forget_others, read = read, records = records }
  return state.cold_external
end
