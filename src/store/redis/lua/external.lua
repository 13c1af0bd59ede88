
-- ── external usage: what other clients use of a limit ────────────────────────────────────────────
--
-- Twin: src/limit/external.rs and limit_state.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, state.lua
--
-- If the upstream states that more units are gone than this state granted, other clients use the
-- limit, too. The state then reserves units for them. src/limit/external.rs explains how many, and
-- the fields of `limit.external`.

-- Returns the units of a shared limit that are reserved for other clients at a moment, and when that
-- changes next if no response arrives.
local function reserved_from(limit, at)
  local external, units, next_change = limit.external, 0, NEVER
  local is_confirmed = at < external.confirmed_until
  local most_expected = is_confirmed and NEVER or math.floor(limit.count / 4)
  if at < external.ends then
    units = math.max(is_confirmed and external.seen or 0, math.min(external.expected, most_expected))
  elseif external.log_is_complete == 1 then
    units = math.min(math.max(external.seen, external.expected), most_expected)
  end
  if at < external.shortfall_until then
    units, next_change = math.max(units, external.shortfall), external.shortfall_until
  end
  if is_confirmed then next_change = math.min(next_change, external.confirmed_until) end
  if at < external.ends then next_change = math.min(next_change, external.ends) end
  return units, next_change
end

-- Returns the units of a limit that are reserved for other clients at a moment.
local function reserved(limit, at)
  return limit.external and reserved_from(limit, at) or 0
end

-- Returns the moment from which nothing of a shared limit is reserved, if no response arrives.
local function forgotten_from(limit)
  local external = limit.external
  local from, is_stated = external.ends, external.fewest_left < LARGEST_I4 or external.seen > 0
  if is_stated and reserved(limit, external.ends) > 0 then from = external.ends + limit.window end
  return external.shortfall > 0 and math.max(from, external.shortfall_until) or from
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
      local most = math.max(limit.count - last.fewest_left - last.granted_then, 0)
      expected = math.max(last.seen, math.min(last.expected, most))
    end
    if expected > 0 then
      local external = new_external(limit, ends, expected, 1)
      external.stated_at, external.valid_until = last.stated_at, last.valid_until
      -- The units that were left at the end show what other clients may have used.
      local shown_until = last.fewest_left < LARGEST_I4 and last.valid_until or 0
      external.confirmed_until = math.max(last.confirmed_until, shown_until)
      limit.external = external
    else
      limit.external, state.must_rewrite = nil, true
    end
  end

  -- Forgets what is reserved for other clients.
  function usage.forget_others(limit)
    if limit.external then
      limit.external, state.must_rewrite, state.changed = nil, true, true
    end
  end

  -- Takes in a statement of the upstream about a limit: `left` units were left, `ago` microseconds ago.
  -- Returns whether less is allowed than before, and whether the statement is urgent: then other
  -- processes are notified at once.
  --
  -- This state has granted `least` to `most` of the units that the upstream may have counted. Their
  -- stamps are not later than `sent`.
  function usage.see(stated, left, reset_in, flags, ago, refused, valid_for, forget)
    local limit, is_steady, is_urgent = find_limit(state.limiting, stated), flags % 2 == 1, flags >= 2
    if not limit then return false end
    if forget == 1 then
      usage.forget_others(limit)
      return false
    end
    if limit.kind == BUCKET then return limit.rule.cold().see(limit, ago, left), is_urgent end
    local part_of_window, least, most = math.floor(limit.window / 20), nil, nil
    local sent = state.now + math.max(part_of_window, LONGEST_LIFE) + state.slack
    if limit.kind == WINDOW then
      least, most = limit.rule.cold().used_until(limit, sent)
    else
      least = limit.rule.used(limit)
      most = least
    end
    local booked = state.cold_advance and state.cold_advance.booked_until(limit, sent) or 0
    least, most = least + booked, most + booked
    -- A reset that an older response states does not count, because units may have left the log
    -- since.
    if not is_steady and ago > math.max(part_of_window, OLDEST_RESPONSE) then reset_in = 0 end
    local gone, external = math.max(limit.count - left, 0), limit.external
    local resets = reset_in > 0 and state.now + reset_in or nil
    if not external and not (resets and gone > most) and refused == 0 and not is_urgent then return false end
    is_steady = is_steady and resets
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

    external.refused = math.min(external.refused + refused, LARGEST_I4)
    if external.refused > 0 then
      local bound = limit.count - math.floor(limit.count / 8)
      external.seen = math.max(external.seen, math.min(external.expected + external.refused, bound))
    end

    local stated_at, valid_until = math.max(state.now - ago, 0), state.now + valid_for
    local is_newest = stated_at >= external.stated_at
    if is_newest then external.stated_at, external.valid_until = stated_at, valid_until end
    local of_others = math.max(gone - math.max(most - external.refused, 0), 0)
    if stated_at + limit.window >= external.ends then
      least = math.min(least, LARGEST_I4)
      if left < external.fewest_left or (left == external.fewest_left and least < external.granted_then) then
        external.fewest_left, external.granted_then = left, least
      end
      if is_steady then
        if is_newest then external.seen = math.min(external.seen, gone) end
        external.seen = math.max(external.seen, of_others)
      end
    end
    if refused > 0 or (is_steady and of_others > 0) then
      external.confirmed_until = math.max(external.confirmed_until, valid_until)
    end

    if is_newest then
      external.shortfall, external.shortfall_until, external.counted_until = 0, 0, 0
      if resets and resets > state.now then
        external.shortfall, external.counted_until = gone - most, sent
        external.shortfall_until = math.min(resets, valid_until)
      end
    end
    state.changed = true
    return reserved(limit, state.now) > was_reserved, is_urgent
  end

  -- Reads a record and attaches it to its limit.
  function usage.read(bytes, from)
    local external = unpack_list(bytes, from, 1, EXTERNAL_RECORD, RECORD_SIZE, FIELDS)[1]
    find_limit(#state, external.limit).external = external
  end

  -- Packs the record.
  function usage.record(external)
    return pack_list({ external }, EXTERNAL_RECORD, FIELDS)
  end

  return usage
end
