
-- ── a token bucket ───────────────────────────────────────────────────────────────────────────────
--
-- Twin: src/limit/bucket.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `entries` (state.lua)
--
-- The bucket keeps the moment at which it will be full again. src/limit/bucket.rs explains this, the
-- other fields, and ticks: `ticks` of them are a microsecond, and a unit is refilled in `unit` of them.
--
-- That moment is `early` ticks before the microsecond `full_at`, and `early` is less than `ticks`. So
-- `full_at` is the first whole microsecond at which the bucket is full, and compares with slots and
-- stamps. Names such as `at` and `early` are such a pair. Rust keeps the moment as one wide integer,
-- in ticks.

-- Returns the functions of this kind of limit.
local function bucket_rule()
  local MOST_DELAYED = 32
  -- The greatest age that is assumed of a statement of the upstream, in microseconds.
  local LONGEST_AGO = 5000000
  -- The most ticks in which a whole bucket is refilled, if a unit takes exactly as long as the quota says.
  local MOST_TICKS = 4503599627370496
  -- The fewest ticks in which a unit of any other bucket is refilled.
  local UNIT_TICKS = 1048576

  -- Returns a moment moved back by `ticks`. Less than zero moves it later.
  local function moved_back(limit, at, early, ticks)
    early = early + ticks
    local whole = math.floor(early / limit.ticks)
    return at - whole, early - whole * limit.ticks
  end

  -- Returns when a bucket is full again after a permit. Before the permit, it is full at `at`, `early`.
  local function after(limit, at, early, stamp, units)
    if stamp >= at then at, early = stamp, 0 end
    return moved_back(limit, at, early, -units * limit.unit)
  end

  -- Returns the first whole microsecond, not before `from`, at which a bucket holds `units` that is full
  -- again at `at`, `early`.
  local function first_with(limit, at, early, from, units)
    local missing = limit.capacity > units and limit.capacity - units or 0
    at = moved_back(limit, at, early, missing * limit.unit)
    return at > from and at or from
  end

  -- Returns the first moment, not before `from`, at which `cost` units may leave.
  local function first_slot(limit, from, cost)
    return first_with(limit, limit.full_at, limit.early, from, cost)
  end

  -- Returns how many units a bucket holds at `slot` that is full again at `at`, `early`.
  local function held(limit, at, early, slot)
    local missing = math.ceil(((at - slot) * limit.ticks - early) / limit.unit)
    if missing < 0 then missing = 0 end
    return missing < limit.capacity and limit.capacity - missing or 0
  end

  -- Returns how many units may leave at `slot`.
  local function room(limit, slot)
    return held(limit, limit.full_at, limit.early, slot)
  end

  -- Forgets the order of the permits that are booked ahead. From now on none of them is taken back
  -- exactly.
  local function forget_queue(limit)
    limit.queued_from = NEVER
    if limit.n > 0 then
      limit.list, limit.n, limit.dirty = {}, 0, true
    end
  end

  -- Adds units that are part of `full_at` now to the young group, or begins the next one with them.
  local function add_to_group(limit, stamp, units)
    local newest = stamp > limit.newest and stamp or limit.newest
    if (limit.full_at - newest) * limit.ticks - limit.early >= (limit.young + units) * limit.unit then
      limit.young = limit.young + units
    else
      limit.old_from, limit.young_from, limit.young = limit.young_from, math.max(limit.young_from, limit.newest + 1), units
    end
    limit.newest = newest
  end

  -- Takes the units of a permit out of the bucket. If its slot is later than the bucket requires,
  -- because another limit delayed it, the permit becomes an entry.
  local function insert(limit, slot, stamp, units)
    local before, before_early = limit.full_at, limit.early
    local queued = stamp < before and first_slot(limit, 0, units) == slot
    limit.full_at, limit.early = after(limit, before, before_early, stamp, units)
    add_to_group(limit, stamp, units)
    if slot <= state.now then
      forget_queue(limit)
    elseif queued then
      if slot < limit.queued_from then limit.queued_from = slot end
    else
      local list = entries(limit)
      list[#list + 1] = {
        slot = slot, units = units, before = before, before_early = before_early,
        after = limit.full_at, after_early = limit.early, queued_from = limit.queued_from,
      }
      if #list > MOST_DELAYED then table.remove(list, 1) end
      limit.queued_from, limit.n, limit.dirty = NEVER, #list, true
      if limit.n > limit.space then state.must_rewrite = true end
    end
  end

  -- Returns the first moment at which the bucket is full.
  local function fresh_from(limit)
    return limit.full_at
  end

  local function advance() end

  -- Reads the record.
  local function read(limit, s, from)
    local _
    _, limit.last_stated, limit.n, limit.space, limit.full_at, limit.early, limit.newest, limit.young_from,
      limit.queued_from, limit.unit, limit.ticks, limit.old_from, limit.young = struct.unpack(BUCKET_RECORD, s, from)
  end

  -- Packs the record.
  local function record(limit)
    return struct.pack(BUCKET_RECORD, limit.bytes, limit.last_stated, limit.n, limit.space, limit.full_at, limit.early,
      limit.newest, limit.young_from, limit.queued_from, limit.unit, limit.ticks, limit.old_from, limit.young)
  end

  local rule = {
    entry = DELAYED, size = DELAYED_SIZE,
    fields = { 'slot', 'units', 'before', 'before_early', 'after', 'after_early', 'queued_from' },
    first_slot = first_slot, room = room, insert = insert, fresh_from = fresh_from, advance = advance,
    read = read, record = record,
  }

  -- Returns the rule with the functions that few calls need.
  function rule.cold()
    if rule.subtract then return rule end
    rule.after, rule.first_with, rule.held = after, first_with, held

    -- Returns whether a moment is after another one.
    local function is_later(at, early, other, other_early)
      return at > other or (at == other and early < other_early)
    end

    -- Moves `full_at` back to `at`, `early`. If it was later, fewer units than those of all permits count, so
    -- none of them can be taken back any more.
    local function cut(limit, at, early)
      if is_later(at, early, limit.full_at, limit.early) then return end
      limit.full_at, limit.early = at, early
      limit.young_from = math.max(limit.young_from, limit.newest + 1)
      limit.old_from, limit.young = limit.young_from, 0
      forget_queue(limit)
    end

    -- Takes in that the bucket is empty at most at a moment, whatever it counts.
    function rule.leave_empty_at_most(limit, moment)
      cut(limit, moved_back(limit, moment, 0, -limit.capacity * limit.unit))
    end

    -- Takes in that the bucket has limited nothing until `moment`, so that it may count more than it ever
    -- held: after the last of these permits it is empty at most.
    function rule.resume(limit, moment)
      rule.leave_empty_at_most(limit, math.max(moment, limit.newest))
    end

    -- Counts units that were used without a permit. The upstream accepted them, so its bucket had
    -- these units. So they leave the bucket empty at most.
    function rule.charge(limit, _, stamp, units)
      local empty, empty_early = moved_back(limit, state.now, 0, -limit.capacity * limit.unit)
      if is_later(limit.full_at, limit.early, empty, empty_early) then
        empty, empty_early = limit.full_at, limit.early
      end
      insert(limit, state.now, stamp, units < limit.capacity and units or limit.capacity)
      cut(limit, empty, empty_early)
    end

    -- Returns whether the last permit was booked in order and has this slot.
    local function is_last_queued(limit, slot)
      return slot >= limit.queued_from and first_slot(limit, 0, 0) == slot
    end

    -- Returns the last delayed permit if it has this slot and the bucket is full at `at`, `early` after it.
    local function delayed_to(limit, i, slot, at, early)
      local delayed = i > 0 and entries(limit)[i]
      return delayed and delayed.slot == slot and delayed.after == at and delayed.after_early == early and delayed
    end

    -- Returns whether these units are all of the last delayed permits that have this slot.
    local function are_last_delayed(limit, slot, units)
      local i, at, early = limit.n, limit.full_at, limit.early
      local delayed = delayed_to(limit, i, slot, at, early)
      while delayed and delayed.units < units do
        units, i, at, early = units - delayed.units, i - 1, delayed.before, delayed.before_early
        delayed = delayed_to(limit, i, slot, at, early)
      end
      return delayed and delayed.units == units
    end

    -- Returns whether the slot of units would be given again once they are taken back.
    function rule.would_give_again(limit, slot, units)
      return is_last_queued(limit, slot) or are_last_delayed(limit, slot, units) or first_slot(limit, 0, units) <= slot
    end

    -- Takes back units of the last permit. Without them, the bucket is full again at `at`, `early`.
    local function take_last(limit, at, early, units)
      limit.full_at, limit.early = at, early
      limit.young = limit.young > units and limit.young - units or 0
      if at < limit.newest then limit.newest = at end
    end

    -- Takes back units of permits that were not used: in full, if no later permit depends on them. Of others, only
    -- if their slot has come: those of the young group in full, and those of the old group as far as the young
    -- one allows.
    function rule.subtract(limit, slot, stamp, units)
      if is_last_queued(limit, slot) then
        local at, early = moved_back(limit, limit.full_at, limit.early, units * limit.unit)
        return take_last(limit, at, early, units)
      end
      local delayed = delayed_to(limit, limit.n, slot, limit.full_at, limit.early)
      while delayed and units > 0 do
        local taken = units < delayed.units and units or delayed.units
        units, delayed.units = units - taken, delayed.units - taken
        delayed.after, delayed.after_early = moved_back(limit, delayed.after, delayed.after_early, taken * limit.unit)
        local at, early = delayed.after, delayed.after_early
        if delayed.units == 0 then
          at, early, limit.queued_from = delayed.before, delayed.before_early, delayed.queued_from
          limit.list[limit.n] = nil
          limit.n = #limit.list
        end
        take_last(limit, at, early, taken)
        limit.dirty = true
        delayed = delayed_to(limit, limit.n, slot, limit.full_at, limit.early)
      end
      if units == 0 or slot > state.now or stamp < limit.old_from then return end
      local back
      if stamp >= limit.young_from then
        units = math.min(units, limit.young)
        limit.young, back = limit.young - units, units * limit.unit
      else
        local spare = (limit.full_at - limit.newest) * limit.ticks - limit.early - limit.young * limit.unit
        back = math.max(0, math.min(units * limit.unit, spare))
      end
      limit.full_at, limit.early = moved_back(limit, limit.full_at, limit.early, back)
      forget_queue(limit)
    end

    -- Takes in a statement of the upstream that was made `ago` microseconds ago: `left` units were
    -- left. From now on the bucket holds at most these and the units refilled since. Returns
    -- whether it held more.
    function rule.see(limit, ago, left)
      local back = math.ceil((ago < LONGEST_AGO and ago or LONGEST_AGO) * limit.ticks / limit.unit) + 1
      local gone = room(limit, state.now) - (left + back)
      if gone > 0 then
        state.changed = true
        insert(limit, state.now, state.now, gone)
      end
      return gone > 0
    end

    -- Returns the latest whole microsecond at which a bucket may be full again before a permit, so that
    -- the permit finds its units, and the bucket is full again at `latest` at the latest. If there is no
    -- such moment, returns the slot: then earlier permits must leave the bucket full.
    function rule.latest_full_before(limit, slot, stamp, units, latest)
      local before = latest - math.ceil(units * limit.unit / limit.ticks)
      if units > limit.capacity or before < stamp then return slot end
      return math.min(before, slot + math.floor((limit.capacity - units) * limit.unit / limit.ticks))
    end

    -- Returns how many of `most` units may leave a bucket that is full again at `at`, `early`, so that it
    -- is full again at `latest` at the latest.
    function rule.most_between(limit, most, at, early, latest)
      if latest < at then return 0 end
      return math.min(most, math.floor(((latest - at) * limit.ticks + early) / limit.unit))
    end

    -- Returns how many units are missing now, without the advance bookings.
    function rule.used(limit)
      return limit.capacity - room(limit, state.now)
    end

    -- Makes a full bucket. src/limit/bucket.rs says which ticks it has.
    function rule.new(limit)
      limit.unit, limit.ticks = limit.window, limit.count
      if limit.capacity * limit.window > MOST_TICKS then
        limit.ticks = math.ceil(limit.count * UNIT_TICKS / limit.window)
        limit.unit = math.ceil(limit.window * limit.ticks / limit.count)
      end
      limit.full_at, limit.early, limit.newest, limit.young_from, limit.old_from, limit.young = 0, 0, 0, 0, 0, 0
      limit.queued_from, limit.list = NEVER, {}
    end

    return rule
  end

  return rule
end
