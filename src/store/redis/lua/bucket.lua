
-- ── a token bucket ───────────────────────────────────────────────────────────────────────────────
--
-- Twin: src/limit/bucket.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `entries` (state.lua)
--
-- The bucket keeps the moment at which it will be full again, `full_at`. src/limit/bucket.rs
-- explains this and the other fields.
--
-- Moments and spans are exact: two numbers m and r, with r < count, stand for m + r / count
-- microseconds. Names such as `full_at` and `full_r`, or q and r, are such a pair. Rust keeps both
-- as one wide integer, microseconds times count.

-- Returns the functions of this kind of limit.
local function bucket_rule()
  local MOST_DELAYED = 32
  -- The greatest age that is assumed of a statement of the upstream, in microseconds.
  local LONGEST_AGO = 5000000

  -- Divides and returns quotient and remainder, exactly, although p / by may be rounded.
  local function divide(p, by)
    local q = math.floor(p / by)
    local r = p - q * by
    if r < 0 then
      return q - 1, r + by
    elseif r >= by then
      return q + 1, r - by
    end
    return q, r
  end

  -- Returns a * b / by and its remainder, exactly, for a, b and by up to about 2^30.
  local function product(a, b, by)
    if a * b < NEVER then
      return divide(a * b, by)
    end
    local high = math.floor(a / 32768)
    local q1, r1 = divide(high * b, by)
    local q0, r0 = divide(r1 * 32768 + (a - high * 32768) * b, by)
    return q1 * 32768 + q0, r0
  end

  -- Returns how long `units` take to be refilled.
  local function refill(limit, units)
    local whole, rest = divide(limit.window, limit.count)
    local q, r = product(units, rest, limit.count)
    return units * whole + q, r
  end

  -- Returns whether a moment is before another one.
  local function less(q, r, other, other_r)
    return q < other or (q == other and r < other_r)
  end

  -- Returns a moment or span minus another one.
  local function minus(limit, q, r, other, other_r)
    q, r = q - other, r - other_r
    if r < 0 then
      q, r = q - 1, r + limit.count
    end
    return q, r
  end

  -- Returns a moment or span plus another one.
  local function plus(limit, q, r, other, other_r)
    q, r = q + other, r + other_r
    if r >= limit.count then
      q, r = q + 1, r - limit.count
    end
    return q, r
  end

  -- Returns the first moment, in whole microseconds, at which the bucket holds `units`.
  local function room_for(limit, units)
    local missing = limit.capacity - units
    local q, r = limit.full_at, limit.full_r
    if missing > 0 then
      local ahead, ahead_r = refill(limit, missing)
      q, r = minus(limit, q, r, ahead, ahead_r)
    end
    if q < 0 then return 0 end
    return r > 0 and q + 1 or q
  end

  -- Returns the first moment, not before `from`, at which `cost` units may leave.
  local function first_slot(limit, from, cost)
    local slot = room_for(limit, cost)
    return slot > from and slot or from
  end

  -- Returns how many units are refilled in a span of at most the time for the capacity, and how long
  -- they take. The quotient may be rounded; the two loops correct it.
  local function refilled(limit, q, r)
    local units = math.floor((q * limit.count + r) / limit.window)
    local span, span_r = refill(limit, units)
    while less(q, r, span, span_r) do
      units = units - 1
      span, span_r = refill(limit, units)
    end
    while true do
      local next_span, next_r = refill(limit, units + 1)
      if less(q, r, next_span, next_r) then return units, span, span_r end
      units, span, span_r = units + 1, next_span, next_r
    end
  end

  -- Returns how many units may leave at `slot`.
  local function room(limit, slot)
    local q, r = limit.full_at - slot, limit.full_r
    if q < 0 then return limit.capacity end
    local most, most_r = refill(limit, limit.capacity)
    if not less(q, r, most, most_r) then return 0 end
    local missing, span, span_r = refilled(limit, q, r)
    if less(span, span_r, q, r) then missing = missing + 1 end
    return limit.capacity - missing
  end

  -- Forgets the order of the permits that are booked ahead. From now on none of them is taken back
  -- exactly.
  local function forget_queue(limit)
    limit.queued_from = NEVER
    if limit.n > 0 then
      limit.list, limit.n, limit.dirty = {}, 0, true
    end
  end

  -- Takes the units of a permit out of the bucket. If its slot is later than the bucket requires,
  -- because another limit delayed it, the permit becomes an entry.
  local function insert(limit, slot, stamp, units)
    local before, before_r = limit.full_at, limit.full_r
    local earlier = less(stamp, 0, before, before_r)
    local queued = earlier and room_for(limit, units) == slot
    if earlier then
      local refundable, refundable_r = minus(limit, before, before_r, stamp, 0)
      if less(refundable, refundable_r, limit.refundable, limit.refundable_r) then
        limit.refundable, limit.refundable_r = refundable, refundable_r
      end
    else
      limit.full_at, limit.full_r = stamp, 0
      limit.base_at, limit.base_r = stamp, 0
      limit.refundable, limit.refundable_r = NEVER, 0
    end
    local span, span_r = refill(limit, units)
    limit.full_at, limit.full_r = plus(limit, limit.full_at, limit.full_r, span, span_r)
    if slot <= state.now then
      forget_queue(limit)
    elseif queued then
      if slot < limit.queued_from then limit.queued_from = slot end
    else
      local list = entries(limit)
      list[#list + 1] = {
        slot = slot, units = units, before = before, before_r = before_r,
        after = limit.full_at, after_r = limit.full_r, queued_from = limit.queued_from,
      }
      if #list > MOST_DELAYED then table.remove(list, 1) end
      limit.queued_from, limit.n, limit.dirty = NEVER, #list, true
      if limit.n > limit.room then state.must_rewrite = true end
    end
  end

  -- Returns the first moment at which the bucket is full.
  local function fresh_from(limit)
    return limit.full_r > 0 and limit.full_at + 1 or limit.full_at
  end

  local function advance() end

  -- Returns how many units may leave now.
  local function free(limit)
    return room(limit, state.now)
  end

  -- Reads a record.
  local function read(s, from)
    local kind, count, window, capacity, guard, last_stated, n, room, full_at, full_r, base_at, base_r, refundable,
      refundable_r, queued_from = struct.unpack(BUCKET_RECORD, s, from)
    return {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, last_stated = last_stated, n = n,
      room = room, full_at = full_at, full_r = full_r, base_at = base_at, base_r = base_r, refundable = refundable,
      refundable_r = refundable_r, queued_from = queued_from, base = 0, rule = 0, ours = false, dirty = false, list = false,
    }
  end

  -- Packs the record.
  local function record(limit)
    return struct.pack(BUCKET_RECORD, BUCKET, limit.count, limit.window, limit.capacity, limit.guard, limit.last_stated,
      limit.n, limit.room, limit.full_at, limit.full_r, limit.base_at, limit.base_r, limit.refundable, limit.refundable_r,
      limit.queued_from, 0, 0, 0)
  end

  local rule = {
    entry = DELAYED, size = DELAYED_SIZE,
    fields = { 'slot', 'units', 'before', 'before_r', 'after', 'after_r', 'queued_from' },
    first_slot = first_slot, room = room, insert = insert, fresh_from = fresh_from, advance = advance,
    free = free, read = read, record = record,
  }

  -- Returns the rule with the functions that few calls need.
  function rule.cold()
    if rule.subtract then return rule end
    rule.refill = refill

    -- Counts units that were used without a permit. The upstream accepted them, so its bucket had
    -- these units. So they leave the bucket empty at most. If fewer units count for this reason,
    -- earlier permits can no longer be taken back.
    function rule.charge(limit, _, stamp, units)
      local empty, empty_r = refill(limit, limit.capacity)
      empty = state.now + empty
      if less(empty, empty_r, limit.full_at, limit.full_r) then empty, empty_r = limit.full_at, limit.full_r end
      insert(limit, state.now, stamp, units < limit.capacity and units or limit.capacity)
      if less(empty, empty_r, limit.full_at, limit.full_r) then
        limit.full_at, limit.full_r = empty, empty_r
        limit.base_at, limit.base_r = empty, empty_r
        limit.refundable, limit.refundable_r = NEVER, 0
      end
    end

    -- Returns whether the last permit was booked in order and has this slot.
    local function is_last_queued(limit, slot)
      return slot >= limit.queued_from and room_for(limit, 0) == slot
    end

    -- Returns the last delayed permit if it has this slot and the bucket is full at q and r after it.
    local function delayed_to(limit, i, slot, q, r)
      local delayed = i > 0 and entries(limit)[i]
      return delayed and delayed.slot == slot and delayed.after == q and delayed.after_r == r and delayed
    end

    -- Returns whether these units are all of the last delayed permits that have this slot.
    local function are_last_delayed(limit, slot, units)
      local i, q, r = limit.n, limit.full_at, limit.full_r
      local delayed = delayed_to(limit, i, slot, q, r)
      while delayed and delayed.units < units do
        units, i, q, r = units - delayed.units, i - 1, delayed.before, delayed.before_r
        delayed = delayed_to(limit, i, slot, q, r)
      end
      return delayed and delayed.units == units
    end

    -- Returns whether the slot of units would be given again once they are taken back.
    function rule.would_give_again(limit, slot, units)
      return is_last_queued(limit, slot) or are_last_delayed(limit, slot, units) or room_for(limit, units) <= slot
    end

    -- Takes back units that were not used. In full if they are of the last permit that was booked
    -- in order, or of the last delayed ones. Any other permit is taken back as far as `refundable`
    -- allows.
    function rule.subtract(limit, slot, stamp, units)
      local span, span_r = refill(limit, units)
      if is_last_queued(limit, slot) then
        limit.full_at, limit.full_r = minus(limit, limit.full_at, limit.full_r, span, span_r)
        return
      end
      local delayed = delayed_to(limit, limit.n, slot, limit.full_at, limit.full_r)
      while delayed and units > 0 do
        local taken = units < delayed.units and units or delayed.units
        span, span_r = refill(limit, taken)
        units, delayed.units = units - taken, delayed.units - taken
        delayed.after, delayed.after_r = minus(limit, delayed.after, delayed.after_r, span, span_r)
        limit.full_at, limit.full_r, limit.dirty = delayed.after, delayed.after_r, true
        if delayed.units == 0 then
          limit.full_at, limit.full_r, limit.queued_from = delayed.before, delayed.before_r, delayed.queued_from
          limit.list[limit.n] = nil
          limit.n = #limit.list
        end
        delayed = delayed_to(limit, limit.n, slot, limit.full_at, limit.full_r)
      end
      if units == 0 then return end
      span, span_r = refill(limit, units)
      if less(stamp, 0, limit.base_at, limit.base_r) then return end
      local back, back_r = minus(limit, limit.full_at, limit.full_r, limit.base_at, limit.base_r)
      if back < 0 then back, back_r = 0, 0 end
      if less(span, span_r, back, back_r) then back, back_r = span, span_r end
      if less(limit.refundable, limit.refundable_r, back, back_r) then
        back, back_r = limit.refundable, limit.refundable_r
      end
      limit.full_at, limit.full_r = minus(limit, limit.full_at, limit.full_r, back, back_r)
      if limit.refundable < NEVER then
        limit.refundable, limit.refundable_r = minus(limit, limit.refundable, limit.refundable_r, back, back_r)
      end
      forget_queue(limit)
    end

    -- Takes in a statement of the upstream that was made `ago` microseconds ago: `left` units were
    -- left. From now on the bucket holds at most these and the units refilled since. Returns
    -- whether it held more.
    function rule.see(limit, ago, left)
      local back, rest = divide((ago < LONGEST_AGO and ago or LONGEST_AGO) * limit.count, limit.window)
      local gone = room(limit, state.now) - (left + back + (rest > 0 and 2 or 1))
      if gone > 0 then
        state.changed = true
        insert(limit, state.now, state.now, gone)
      end
      return gone > 0
    end

    -- Returns when a bucket is full again after a permit. Before the permit, it is full at q and r.
    function rule.after(limit, q, r, stamp, units)
      if less(q, r, stamp, 0) then q, r = stamp, 0 end
      local span, span_r = refill(limit, units)
      return plus(limit, q, r, span, span_r)
    end

    -- Returns the latest moment at which a bucket may be full again before a permit, so that the permit
    -- finds its units, and the bucket is full again at q and r at the latest. If there is no such moment,
    -- returns the slot: then earlier permits must leave the bucket full.
    function rule.latest_full_before(limit, slot, stamp, units, q, r)
      if units > limit.capacity then return slot, 0 end
      local span, span_r = refill(limit, units)
      q, r = minus(limit, q, r, span, span_r)
      if less(q, r, stamp, 0) then return slot, 0 end
      span, span_r = refill(limit, limit.capacity - units)
      span = slot + span
      if less(span, span_r, q, r) then return span, span_r end
      return q, r
    end

    -- Returns how many of `most` units may leave a bucket that is full again at q and r, so that it is full
    -- again at `latest` and `latest_r` at the latest.
    function rule.most_between(limit, most, q, r, latest, latest_r)
      if less(latest, latest_r, q, r) then return 0 end
      q, r = minus(limit, latest, latest_r, q, r)
      local span, span_r = refill(limit, most)
      if not less(q, r, span, span_r) then return most end
      return (refilled(limit, q, r))
    end

    -- Returns how many units are missing now, without the advance bookings.
    function rule.used(limit)
      return limit.capacity - room(limit, state.now)
    end

    -- Makes a full bucket.
    function rule.new(limit)
      limit.full_at, limit.full_r = 0, 0
      limit.base_at, limit.base_r = 0, 0
      limit.refundable, limit.refundable_r = 0, 0
      limit.queued_from = NEVER
      limit.list = {}
    end

    return rule
  end

  return rule
end
