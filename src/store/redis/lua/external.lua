
-- ── external usage: what other clients use of a limit ────────────────────────────────────────────
--
-- Twin: src/limit/external.rs and limit_state.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `find_limit` (state.lua)
--
-- If the upstream states that more units are gone than this state granted, other clients use the
-- limit, too. The state then reserves units for them. src/limit/external.rs explains how many, and
-- the fields of `limit.external`.

-- Returns the units of a limit that are reserved for other clients at a moment, and when that
-- changes next if no response arrives.
local function reserved_from(limit, at)
  local external, units, quarter = limit.external, 0, math.floor(limit.count / 4)
  local is_confirmed = at < external.confirmed_until
  if at < external.ends then
    units = external.expected
    if not is_confirmed and units > quarter then units = quarter end
    if is_confirmed and external.seen > units then units = external.seen end
  elseif external.log_is_complete == 1 then
    units = external.seen > external.expected and external.seen or external.expected
    if not is_confirmed and units > quarter then units = quarter end
  end
  if at < external.shortfall_until and external.shortfall > units then units = external.shortfall end
  local next_change = NEVER
  if external.shortfall_until > at then next_change = external.shortfall_until end
  if external.confirmed_until > at and external.confirmed_until < next_change then
    next_change = external.confirmed_until
  end
  if external.ends > at and external.ends < next_change then next_change = external.ends end
  return units, next_change
end

-- Returns the units of a limit that are reserved for other clients at a moment.
local function reserved(limit, at)
  local units = reserved_from(limit, at)
  return units
end

-- Returns the moment from which nothing is reserved, if no response arrives.
local function forgotten_from(limit)
  local external = limit.external
  local from, is_stated = external.ends, external.fewest_left < LARGEST_I4 or external.seen > 0
  if is_stated and reserved(limit, external.ends) > 0 then from = external.ends + limit.window end
  if external.shortfall > 0 and external.shortfall_until > from then from = external.shortfall_until end
  return from
end

-- Returns the first moment, not before `from`, at which a limit allows `cost` and the units that
-- are reserved then.
local function first_slot_unreserved(limit, from, cost, life)
  if not limit.external then return limit.rule.first_slot(limit, from, cost, life, 0) end
  while true do
    local units, next_change = reserved_from(limit, from)
    local slot = limit.rule.first_slot(limit, from, cost, life, units)
    if slot < next_change or next_change == NEVER then return slot end
    from = next_change
  end
end

-- Returns the functions that few calls need. Makes them first.
local function cold_external()
  if state.cold_external then return state.cold_external end
  local usage = {}
  state.cold_external = usage

  -- The longest life of a permit, in microseconds. A twentieth of the window applies if that is
  -- longer.
  local LONGEST_LIFE = 50000
  -- The greatest age of a response whose reset counts, in microseconds. A twentieth of the window
  -- applies if that is longer.
  local OLDEST_RESPONSE = 250000

  -- The fields of a record.
  local FIELDS = {
    'kind', 'limit', 'ends', 'seen', 'expected', 'refused', 'fewest_left', 'granted_then', 'log_is_complete', 'stated_at',
    'valid_until', 'confirmed_until', 'shortfall', 'shortfall_until', 'counted_until',
  }

  -- Makes the external usage of a window of which no response is known.
  local function new_external(limit, ends, expected, log_is_complete)
    return {
      kind = EXTERNAL, limit = limit.bytes, ends = ends, seen = 0, expected = expected, refused = 0, fewest_left = LARGEST_I4,
      granted_then = 0, log_is_complete = log_is_complete, stated_at = 0, valid_until = 0, confirmed_until = 0,
      shortfall = 0, shortfall_until = 0, counted_until = 0,
    }
  end

  -- Begins the next window of the upstream, because the last one has ended. Forgets the external
  -- usage if no use is expected.
  function usage.roll(limit)
    local last, expected = limit.external, 0
    local ends = last.ends + limit.window
    if last.log_is_complete == 1 and state.now < ends then
      expected = limit.count - last.fewest_left
      expected = expected > last.granted_then and expected - last.granted_then or 0
      if last.expected < expected then expected = last.expected end
      if last.seen > expected then expected = last.seen end
    end
    if expected > 0 then
      local external = new_external(limit, ends, expected, 1)
      external.stated_at, external.valid_until = last.stated_at, last.valid_until
      -- The units that were left at the end show what other clients may have used.
      local shown = last.fewest_left < LARGEST_I4 and last.valid_until or 0
      external.confirmed_until = shown > last.confirmed_until and shown or last.confirmed_until
      limit.external = external
    else
      limit.external, state.must_rewrite = nil, true
    end
  end

  -- Takes in a statement of the upstream about a limit of this state: `left` units were left, `ago`
  -- microseconds ago. Returns whether less is allowed than before.
  --
  -- This state has granted `least` to `most` of the units that the upstream may have counted. Their
  -- stamps are not later than `sent`.
  local function see_limit(limit, left, reset_in, steady, urgent, ago, refused, valid_for)
    if limit.kind == BUCKET then return limit.rule.cold().see(limit, ago, left) end
    local least, most
    local longest_life = math.floor(limit.window / 20)
    if longest_life < LONGEST_LIFE then longest_life = LONGEST_LIFE end
    local sent = state.now + longest_life + state.slack
    if limit.kind == WINDOW then
      least, most = limit.rule.cold().used_until(limit, sent)
    else
      least = limit.rule.used(limit)
      most = least
    end
    if state.cold_advance then
      local booked = state.cold_advance.booked_until(limit, sent)
      least, most = least + booked, most + booked
    end
    -- A reset that an older response states does not count, because units may have left the log
    -- since.
    local oldest = math.floor(limit.window / 20)
    if oldest < OLDEST_RESPONSE then oldest = OLDEST_RESPONSE end
    if steady == 0 and ago > oldest then reset_in = 0 end
    local gone, external = limit.count > left and limit.count - left or 0, limit.external
    local resets = reset_in > 0 and state.now + reset_in or nil
    if not external and not (resets and gone > most) and refused == 0 and not urgent then return false end
    local is_steady = steady == 1 and resets
    local ends = is_steady and resets or state.now + limit.window
    -- The log is complete if the state was made before the upstream's window began. A tenth of the
    -- window may be missing. If the statement is not steady, the window that ends now has to be
    -- complete.
    local complete_from = state.made_at + limit.window - math.floor(limit.window / 10)
    local log_is_complete = complete_from <= (is_steady and ends or state.now) and 1 or 0
    if not external then
      external = new_external(limit, ends, 0, log_is_complete)
      limit.external, state.must_rewrite = external, true
    elseif (is_steady or refused > 0) and external.seen == 0 and external.expected == 0 and external.refused == 0 then
      -- No use by other clients is known yet, so the window may begin anew.
      external.ends, external.log_is_complete, external.confirmed_until = ends, log_is_complete, 0
      external.fewest_left, external.granted_then = LARGEST_I4, 0
    end
    local was_reserved = reserved(limit, state.now)

    external.refused = external.refused + refused
    if external.refused > LARGEST_I4 then external.refused = LARGEST_I4 end
    if external.refused > 0 then
      local by_refusals, bound = external.expected + external.refused, limit.count - math.floor(limit.count / 8)
      if by_refusals > bound then by_refusals = bound end
      if by_refusals > external.seen then external.seen = by_refusals end
    end

    local stated_at = state.now > ago and state.now - ago or 0
    local is_newest = stated_at >= external.stated_at
    if is_newest then external.stated_at, external.valid_until = stated_at, state.now + valid_for end
    local counted = most > external.refused and most - external.refused or 0
    local of_others = gone > counted and gone - counted or 0
    if stated_at + limit.window >= external.ends then
      if least > LARGEST_I4 then least = LARGEST_I4 end
      if left < external.fewest_left or (left == external.fewest_left and least < external.granted_then) then
        external.fewest_left, external.granted_then = left, least
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
      external.shortfall, external.shortfall_until, external.counted_until = 0, 0, 0
      if resets and resets > state.now then
        external.shortfall, external.counted_until = gone - most, sent
        external.shortfall_until = resets < state.now + valid_for and resets or state.now + valid_for
      end
    end
    state.changed = true
    return reserved(limit, state.now) > was_reserved
  end

  -- Forgets what is reserved for other clients.
  function usage.forget_others(limit)
    if limit.external then
      limit.external, state.must_rewrite, state.changed = nil, true, true
    end
  end

  -- Takes in a statement of the upstream. Returns whether less is allowed than before, and whether
  -- the statement is urgent: then other processes are notified at once.
  function usage.see(stated, left, reset_in, flags, ago, refused, valid_for, forget)
    local limit, urgent = find_limit(state.limiting, stated), flags >= 2
    if limit and forget == 1 then
      usage.forget_others(limit)
    elseif limit then
      return see_limit(limit, left, reset_in, flags % 2, urgent, ago, refused, valid_for), urgent
    end
    return false, false
  end

  -- Reads a record and attaches it to its limit.
  function usage.read(bytes, from)
    local external = unpack_entry(bytes, from, EXTERNAL_RECORD, FIELDS)
    find_limit(#state, external.limit).external = external
  end

  -- Packs the record.
  function usage.record(external)
    return pack_entry(external, EXTERNAL_RECORD, FIELDS)
  end

  return usage
end
