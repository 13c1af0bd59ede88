
-- ── set quotas: what an operator set, or the upstream stated, in place of what callers state ─────────────────────────────
--
-- Twin: src/limit/set_quota.rs, and `set`, `begin` and `unset` in limit_set.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), all of call.lua, state.lua, `cold` (ledger.lua)
--
-- src/limit/set_quota.rs has the rules, and explains quota versions, paused limits and which permits
-- are taken back. Few keys have a set quota, so all functions of this file are cold.

-- The most limits of a set quota.
local MOST_SET_LIMITS = 9

-- Returns the functions that few calls need. Makes them first.
local function cold_set_quota()
  if state.cold_set_quota then return state.cold_set_quota end
  local set_quota = {}
  state.cold_set_quota = set_quota

  -- How much longer than its life the end of a set quota is remembered, in microseconds.
  local END_MARGIN = 60000000
  -- A new version is larger than four times the number of steps since the epoch, in microseconds of the
  -- server's clock. So it is larger than the versions of a state that was lost.
  local EPOCH = 1700000000000000
  local STEP = 8000000

  -- The fields of the record.
  local FIELDS = { 'kind', 'version', 'ends', 'life', 'in_flight', 'limiting', 'booked_until', 'lost_until' }

  -- Returns whether a version is of a quota that is set, and not of its end.
  local function is_set(version)
    return version % 2 == 1
  end

  -- Returns whether a version is of a quota that the upstream has stated.
  local function is_learned(version)
    return version % 4 == 3
  end

  -- Adds a limit that begins to apply to this key, and notes until when permits are booked that it may
  -- not know.
  function set_quota.begin(bytes)
    local quota = state.quota
    quota.booked_until = math.max(quota.booked_until, cold().log_end(), state.now)
    local limit, knows_all = cold().add(bytes)
    if not knows_all then quota.lost_until = quota.booked_until end
    return limit
  end

  -- Returns whether a limit may not count a permit that comes back, because the limits have changed
  -- since. src/limit/set_quota.rs explains this.
  function set_quota.may_miss(slot, stamp)
    local quota = state.quota
    return slot <= quota.booked_until and (stamp <= state.now or slot <= quota.lost_until)
  end

  -- Makes `stated`, the limits of the call, those of the set quota. The others are paused.
  local function set(stated)
    local limits, is_chosen = {}, {}
    for i = 1, #stated do
      local limit = find_limit(#state, stated[i])
      if not limit then
        limit = set_quota.begin(stated[i])
        -- What is booked ahead comes back, because another quota allowed it.
        if limit.kind == BUCKET then limit.rule.cold().leave_empty_at_most(limit, state.now) end
      end
      limit.last_stated = state.now
      if not is_chosen[limit] then limits[#limits + 1], is_chosen[limit] = limit, true end
    end
    state.limiting = #limits
    for i = 1, #state do
      if not is_chosen[state[i]] then limits[#limits + 1] = state[i] end
    end
    for i = 1, #state do
      state[i] = limits[i]
    end
  end

  -- Ends the set quota. Its limits count as if callers stated them last at `moment`, and no limit is
  -- paused any more. If the quota was learned, its limits apply no longer, unless callers state them.
  local function unset(moment, was_learned)
    for i = 1, state.limiting do
      state[i].last_stated = moment
      if was_learned then state[i].last_stated = 2 * moment - in_force_until(state[i]) - 1 end
    end
    for i = state.limiting + 1, #state do
      if state[i].kind == BUCKET then state[i].rule.cold().resume(state[i], moment) end
    end
    state.limiting = #state
  end

  -- Ends the set quota if its time is over. Forgets its end after some time.
  local function finish()
    local quota = state.quota
    if not quota or state.now < quota.ends then return end
    if is_set(quota.version) then
      local moment = quota.ends
      cold().drop_returned()
      quota.booked_until = math.max(quota.booked_until, cold().log_end(), moment)
      unset(moment, is_learned(quota.version))
      quota.version, quota.ends, quota.in_flight = quota.version + 1, moment + END_MARGIN, 0
    end
    state.changed, state.must_rewrite = true, true
    if state.now >= quota.ends then state.quota = false end
  end

  -- Takes in a version that is newer than the state's.
  local function change(version)
    local before, now = state.quota or { version = 0, life = 0, booked_until = 0, lost_until = 0 }, state.now
    local life, in_flight, margin = quota_life, quota_in_flight, 0
    cold().drop_returned()
    local booked_until = cold().log_end()
    if is_set(before.version) then unset(now, is_learned(before.version)) end
    if not is_set(version) then
      life, in_flight, margin = math.max(life, before.life), 0, END_MARGIN
    end
    state.quota = {
      kind = QUOTA, version = version, ends = now + life + margin, life = life, in_flight = in_flight,
      booked_until = math.max(before.booked_until, booked_until, now), lost_until = before.lost_until,
    }
    state.changed, state.must_rewrite, state.has_new_version = true, true, true
  end

  -- Returns whether the set quota stays as it is if `stated`, the limits of the call, are learned. The
  -- same quota applies for its life again.
  local function learns_nothing_new(stated)
    local quota, is_stated = state.quota, {}
    if not quota or not is_set(quota.version) then return false end
    if not is_learned(quota.version) then return true end
    for i = 1, #stated do
      if not find_limit(state.limiting, stated[i]) then return false end
      is_stated[stated[i]] = true
    end
    for i = 1, state.limiting do
      if not is_stated[state[i].bytes] then return false end
    end
    if quota.in_flight ~= quota_in_flight then return false end
    quota.ends, quota.life, state.changed = state.now + quota_life, quota_life, true
    return true
  end

  -- Returns whether the call only ends a learned quota, with the version `ends`, and the version `newest`
  -- has ended it before.
  local function has_ended_learned(ends, newest)
    return is_learned(ends) and newest > ends and not is_learned(newest)
  end

  -- Returns the next version above `newest` after the change that the call makes.
  local function next_version(newest)
    local next = newest + 1
    if operation == SET_QUOTA then return next + (1 - next) % 4 end
    if operation == LEARN_QUOTA then return next + (3 - next) % 4 end
    return next + next % 2
  end

  -- Takes in the quota version of the call, which states these limits. Returns whether the limits count
  -- as stated, and whether they may be those of a set quota if they are.
  function set_quota.take_in(stated)
    finish()
    local known, version = state.quota and state.quota.version or 0, quota_version
    state.call_version = version
    if operation >= SET_QUOTA then
      -- The reply states the quota in any case.
      state.call_version = 0
      if (operation == LEARN_QUOTA and learns_nothing_new(stated))
        or (operation == UNSET_QUOTA and has_ended_learned(version, known)) then
        version = known
      else
        version = next_version(math.max(math.floor((server_time - EPOCH) / STEP) * 4, known, version))
      end
    end
    local has_limits = #stated > 0 and #stated <= MOST_SET_LIMITS
    if is_set(version) and operation ~= UNSET_QUOTA and not has_limits then return false, false end
    if version > known then
      change(version)
      if is_set(version) then set(stated) end
    end
    if not state.quota then return true, true end
    if not is_set(state.quota.version) then
      state.limiting, state.is_outdated = #state, is_set(version)
      return not state.is_outdated, true
    end
    for i = 1, state.limiting do
      state[i].ours = true
    end
    if #state > state.limiting then cold().retain(state.limiting + 1) end
    return false, true
  end

  -- Notes a use. A quota of an operator applies for its whole life again if half of it has passed.
  function set_quota.renew()
    local quota = state.quota
    if is_set(quota.version) and not is_learned(quota.version) and 2 * (quota.ends - state.now) < quota.life then
      quota.ends, state.changed = state.now + quota.life, true
    end
  end

  -- Packs the set quota for a reply or a message.
  function set_quota.part()
    local quota, count = state.quota, 0
    if is_set(quota.version) then count = state.limiting end
    local parts = { struct.pack(QUOTA_PART, quota.version, quota.ends - state.now, quota.life, quota.in_flight, count) }
    for i = 1, count do
      parts[i + 1] = state[i].bytes
    end
    return table.concat(parts)
  end

  -- Reads the record.
  function set_quota.read(bytes, from)
    state.quota = unpack_list(bytes, from, 1, QUOTA_RECORD, RECORD_SIZE, FIELDS)[1]
    state.limiting = state.quota.limiting
  end

  -- Packs the record.
  function set_quota.record()
    state.quota.limiting = state.limiting
    return pack_list({ state.quota }, QUOTA_RECORD, FIELDS)
  end

  return set_quota
end
