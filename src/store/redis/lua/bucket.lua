
-- ── a token bucket (src/limit/bucket.rs) ─────────────────────────────────────────────────────────────────────────────
--
-- A moment m and a remainder r stand for m + r / count: what Rust keeps as one wide integer, microseconds times count.

local function bucket_rule()
  local RECORD, MOST_MARKS = '<BI4I7I4I7I7I2I2I7I4I7I4I7I4I7I7I7I2', 32
  local rule = { size = 40 }
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

  -- a * b / by and its remainder, exactly, for a, b and by up to 2^30 or so.
  local function product(a, b, by)
    if a * b < NEVER then
      return divide(a * b, by)
    end
    local high = math.floor(a / 32768)
    local q1, r1 = divide(high * b, by)
    local q0, r0 = divide(r1 * 32768 + (a - high * 32768) * b, by)
    return q1 * 32768 + q0, r0
  end

  -- How long `units` take to come back.
  local function refill(b, units)
    local whole, rest = divide(b.window, b.count)
    local q, r = product(units, rest, b.count)
    return units * whole + q, r
  end

  local function less(q, r, other, other_r)
    return q < other or (q == other and r < other_r)
  end

  local function minus(b, q, r, other, other_r)
    q, r = q - other, r - other_r
    if r < 0 then
      q, r = q - 1, r + b.count
    end
    return q, r
  end

  local function plus(b, q, r, other, other_r)
    q, r = q + other, r + other_r
    if r >= b.count then
      q, r = q + 1, r - b.count
    end
    return q, r
  end

  -- When the bucket holds `units`.
  local function room_for(b, units)
    local missing = b.capacity - units
    local q, r = b.full, b.full_r
    if missing > 0 then
      local ahead, ahead_r = refill(b, missing)
      q, r = minus(b, q, r, ahead, ahead_r)
    end
    if q < 0 then return 0 end
    return r > 0 and q + 1 or q
  end

  function rule.first_slot(b, from, cost)
    local slot = room_for(b, cost)
    return slot > from and slot or from
  end

  function rule.room(b, slot)
    local q, r = b.full - slot, b.full_r
    if q < 0 then return b.capacity end
    local missing = math.floor((q * b.count + r) / b.window)
    if missing > b.capacity + 1 then return 0 end
    local span, span_r = refill(b, missing)
    while less(span, span_r, q, r) do
      missing = missing + 1
      span, span_r = refill(b, missing)
    end
    while missing > 0 do
      span, span_r = refill(b, missing - 1)
      if less(span, span_r, q, r) then break end
      missing = missing - 1
    end
    local room = b.capacity - missing
    return room > 0 and room or 0
  end

  local function forget_queue(b)
    b.queued_from = NEVER
    if b.n > 0 then
      b.list, b.n, b.dirty = {}, 0, true
    end
  end

  function rule.insert(b, slot, stamp, units)
    local before, before_r = b.full, b.full_r
    local earlier = less(stamp, 0, before, before_r)
    local queued = earlier and room_for(b, units) == slot
    if earlier then
      local slack, slack_r = minus(b, before, before_r, stamp, 0)
      if less(slack, slack_r, b.slack, b.slack_r) then
        b.slack, b.slack_r = slack, slack_r
      end
    else
      b.full, b.full_r, b.base_at, b.base_r, b.slack, b.slack_r = stamp, 0, stamp, 0, NEVER, 0
    end
    local span, span_r = refill(b, units)
    b.full, b.full_r = plus(b, b.full, b.full_r, span, span_r)
    if slot <= S.now then
      forget_queue(b)
    elseif queued then
      if slot < b.queued_from then b.queued_from = slot end
    else
      local list = entries(b)
      list[#list + 1] = {
        slot = slot, units = units, before = before, before_r = before_r,
        after = b.full, after_r = b.full_r, queued_from = b.queued_from,
      }
      if #list > MOST_MARKS then table.remove(list, 1) end
      b.queued_from, b.n, b.dirty = NEVER, #list, true
      if b.n > b.room then S.relaid = true end
    end
  end

  -- Counts units that were used without a permit. They leave the bucket empty now at most: an upstream that let them pass
  -- had them. Where that cuts them, permits of before can no longer be taken back.
  function rule.charge(b, _, stamp, units)
    local empty, empty_r = refill(b, b.capacity)
    empty = S.now + empty
    if less(empty, empty_r, b.full, b.full_r) then empty, empty_r = b.full, b.full_r end
    rule.insert(b, S.now, stamp, units < b.capacity and units or b.capacity)
    if less(empty, empty_r, b.full, b.full_r) then
      b.full, b.full_r, b.base_at, b.base_r, b.slack, b.slack_r = empty, empty_r, empty, empty_r, NEVER, 0
    end
  end

  function rule.subtract(b, slot, stamp, units)
    local span, span_r = refill(b, units)
    if slot >= b.queued_from and room_for(b, 0) == slot then
      b.full, b.full_r = minus(b, b.full, b.full_r, span, span_r)
      return
    end
    if b.n > 0 then
      local list = entries(b)
      local mark = list[#list]
      if mark.slot == slot and mark.after == b.full and mark.after_r == b.full_r and units <= mark.units then
        mark.units = mark.units - units
        mark.after, mark.after_r = minus(b, mark.after, mark.after_r, span, span_r)
        b.full, b.full_r, b.dirty = mark.after, mark.after_r, true
        if mark.units == 0 then
          b.full, b.full_r, b.queued_from = mark.before, mark.before_r, mark.queued_from
          list[#list] = nil
          b.n = #list
        end
        return
      end
    end
    if less(stamp, 0, b.base_at, b.base_r) then return end
    local back, back_r = minus(b, b.full, b.full_r, b.base_at, b.base_r)
    if back < 0 then back, back_r = 0, 0 end
    if less(span, span_r, back, back_r) then back, back_r = span, span_r end
    if less(b.slack, b.slack_r, back, back_r) then back, back_r = b.slack, b.slack_r end
    b.full, b.full_r = minus(b, b.full, b.full_r, back, back_r)
    if b.slack < NEVER then
      b.slack, b.slack_r = minus(b, b.slack, b.slack_r, back, back_r)
    end
    forget_queue(b)
  end

  -- The upstream said, `ago`, that `left` units are left.
  function rule.see(b, ago, left)
    local back, rest = divide((ago < 5000000 and ago or 5000000) * b.count, b.window)
    local gone = rule.room(b, S.now) - (left + back + (rest > 0 and 2 or 1))
    if gone > 0 then
      S.changed = true
      rule.insert(b, S.now, S.now, gone)
    end
    return gone > 0
  end

  function rule.fresh_from(b)
    return b.full_r > 0 and b.full + 1 or b.full
  end

  function rule.advance() end

  function rule.free(b)
    return rule.room(b, S.now)
  end

  function rule.used(b)
    return b.capacity - rule.room(b, S.now)
  end

  function rule.new(b)
    b.full, b.full_r, b.base_at, b.base_r, b.slack, b.slack_r, b.queued_from = 0, 0, 0, 0, 0, 0, NEVER
    b.list = {}
  end

  function rule.read(s, from)
    local b = {}
    b.kind, b.count, b.window, b.capacity, b.guard, b.asserted, b.n, b.room, b.full, b.full_r, b.base_at, b.base_r, b.slack,
      b.slack_r, b.queued_from = struct.unpack(RECORD, s, from)
    return b
  end

  function rule.record(b)
    return struct.pack(RECORD, BUCKET, b.count, b.window, b.capacity, b.guard, b.asserted, b.n, b.room, b.full, b.full_r,
      b.base_at, b.base_r, b.slack, b.slack_r, b.queued_from, 0, 0, 0)
  end

  function rule.more()
    return rule
  end

  return rule
end
