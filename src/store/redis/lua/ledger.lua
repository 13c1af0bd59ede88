
-- ── all limits of the key, taken all or nothing (src/limit/mod.rs) ───────────────────────────────────────────────────

local MOST_LIMITS, MOST_ROUNDS = 32, 1000
local makers, rules = { window_rule, bucket_rule, fixed_rule }, {}

local function rule_of(kind)
  local rule = rules[kind]
  if not rule then
    rule = makers[kind]()
    rules[kind] = rule
  end
  return rule
end

local function largest_cost(a)
  return a.kind == BUCKET and a.capacity or a.count
end

-- What others use of a limit (src/limit/external.rs): the units reserved for them at a moment, and when that changes next
-- if no response comes.
local function reserved_from(a, at)
  local t, known, quarter = a.strangers, 0, math.floor(a.count / 4)
  local confirmed = at < t.confirmed_until
  if at < t.ends then
    known = t.before
    if not confirmed and known > quarter then known = quarter end
    if confirmed and t.seen > known then known = t.seen end
  elseif t.whole == 1 then
    known = t.seen > t.before and t.seen or t.before
    if not confirmed and known > quarter then known = quarter end
  end
  if at < t.short_until and t.short > known then known = t.short end
  local till = NEVER
  if t.short_until > at and t.short_until < till then till = t.short_until end
  if t.confirmed_until > at and t.confirmed_until < till then till = t.confirmed_until end
  if t.ends > at and t.ends < till then till = t.ends end
  return known, till
end

local function reserved(a, at)
  local units = reserved_from(a, at)
  return units
end

local function forgotten_from(a)
  local t = a.strangers
  local from, said = t.ends, t.least < 4294967295 or t.seen > 0
  if said and reserved(a, t.ends) > 0 then from = t.ends + a.window end
  if t.short > 0 and t.short_until > from then from = t.short_until end
  return from
end

local function less_reserved(units, a, at)
  if a.strangers then units = units - reserved(a, at) end
  return units > 0 and units or 0
end

-- The first moment at which one limit allows `cost` besides what is reserved then.
local function first_slot_beside(a, from, cost, life)
  while true do
    local units, till = reserved_from(a, from)
    local slot = a.rule.first_slot(a, from, cost, life, units)
    if slot < till or till == NEVER then return slot end
    from = till
  end
end

local function insert(slot, stamp, units)
  S.changed = true
  for i = 1, #S do
    S[i].rule.insert(S[i], slot, stamp, units)
  end
end

-- The first moment at which every limit allows `cost`, and the limit that was the last to.
local function first_slot(cost, life)
  local slot, limit, count = S.from, nil, #S
  for _ = 1, MOST_ROUNDS do
    local before = slot
    for i = 1, count do
      local a = S[i]
      local first = a.strangers and first_slot_beside(a, slot, cost, life)
        or a.rule.first_slot(a, slot, cost, life, 0)
      if first > slot then
        slot, limit = first, a
      end
    end
    if slot == before or count == 1 then
      return slot, limit
    end
  end
  return NEVER, nil
end

-- The first slot that came back (src/limit/returned.rs) with `units` left and half of `life` at least.
local function find_pooled(units, life)
  local list, half = pool(), math.floor(life / 2)
  for i = 1, #list do
    local entry = list[i]
    if entry.slot >= S.from and entry.units >= units and entry.slot + half + S.slack <= entry.stamp then
      return entry, i
    end
  end
end

-- The format of the state as it is now.
local function format_of_state()
  for i = 1, #S do
    if S[i].kind == FIXED and S[i].phase > 0 then return LATEST end
  end
  return PLAIN
end

-- What is seldom needed.
local function seldom()
  local made, MOST_POOLED = {}, 32

  local function subtract(slot, stamp, units)
    S.changed = true
    for i = 1, #S do
      S[i].rule.more().subtract(S[i], slot, stamp, units)
      -- Units that were counted as used when the newest response was read were others'.
      local t = S[i].strangers
      if t and S.now < t.short_until and stamp <= t.counted_until then t.short = t.short + units end
    end
  end

  -- Takes a slot into the pool. Where there is no room, the last one leaves the logs.
  local function put(slot, stamp, units)
    local list, i = pool(), 1
    while list[i] and (list[i].slot < slot or (list[i].slot == slot and list[i].stamp < stamp)) do
      i = i + 1
    end
    local other, last = list[i], nil
    if other and other.slot == slot and other.stamp == stamp then
      other.units = other.units + units
    else
      table.insert(list, i, { slot = slot, stamp = stamp, units = units })
    end
    if #list > MOST_POOLED then
      last = table.remove(list)
    end
    S.pooled, S.changed = #list, true
    if S.pooled > S.pool_room then S.relaid = true end
    if last then subtract(last.slot, last.stamp, last.units) end
  end

  function made.strangers(ends, before, whole)
    return {
      ends = ends, seen = 0, before = before, refused = 0, least = 4294967295, ours = 0, whole = whole, said = 0,
      said_till = 0, confirmed_until = 0, short = 0, short_until = 0,
      counted_until = 0,
    }
  end

  -- A new count of others begins where the last has ended.
  function made.roll(a)
    local strangers, before = a.strangers, 0
    local ends = strangers.ends + a.window
    if strangers.whole == 1 and S.now < ends then
      before = a.count - strangers.least
      before = before > strangers.ours and before - strangers.ours or 0
      if strangers.before < before then before = strangers.before end
      if strangers.seen > before then before = strangers.seen end
    end
    if before > 0 then
      a.strangers = made.strangers(ends, before, 1)
      a.strangers.said, a.strangers.said_till = strangers.said, strangers.said_till
      -- What was left in the end shows that they may have used it.
      local shown = strangers.least < 4294967295 and strangers.said_till or 0
      a.strangers.confirmed_until = shown > strangers.confirmed_until and shown or strangers.confirmed_until
    else
      a.strangers, S.relaid = nil, true
    end
  end

  -- Takes in what the upstream says is left of a limit. Answers whether that allows less than before.
  local function see_at(a, units, reset_in, steady, urgent, ago, refused, valid_for)
    if a.kind == BUCKET then return a.rule.see(a, ago, units) end
    local least, most
    local longest_life = math.floor(a.window / 20)
    if longest_life < 50000 then longest_life = 50000 end
    local sent = S.now + longest_life + S.slack
    if a.kind == WINDOW then
      least, most = a.rule.more().used_until(a, sent)
    else
      least = a.rule.used(a)
      most = least
    end
    -- Units may have left the log since an older response.
    local oldest = math.floor(a.window / 20)
    if oldest < 250000 then oldest = 250000 end
    if steady == 0 and ago > oldest then reset_in = 0 end
    local gone, t = a.count > units and a.count - units or 0, a.strangers
    local resets = reset_in > 0 and S.now + reset_in or nil
    if not t and not (resets and gone > most) and refused == 0 and not urgent then return false end
    local is_steady = steady == 1 and resets
    local ends = is_steady and resets or S.now + a.window
    local whole = S.born + a.window - math.floor(a.window / 10) <= (is_steady and ends or S.now)
    if not t then
      t = made.strangers(ends, 0, whole and 1 or 0)
      a.strangers, S.relaid = t, true
    elseif (is_steady or refused > 0) and t.seen == 0 and t.before == 0 and t.refused == 0 then
      local known = made.strangers(ends, 0, whole and 1 or 0)
      known.said, known.said_till = t.said, t.said_till
      known.short, known.short_until, known.counted_until = t.short, t.short_until, t.counted_until
      a.strangers, t = known, known
    end
    local was = reserved(a, S.now)
    t.refused = t.refused + refused
    if t.refused > 4294967295 then t.refused = 4294967295 end
    if t.refused > 0 then
      local by_refusals, bound = t.before + t.refused, a.count - math.floor(a.count / 8)
      if by_refusals > bound then by_refusals = bound end
      if by_refusals > t.seen then t.seen = by_refusals end
    end
    local said = S.now > ago and S.now - ago or 0
    local newest = said >= t.said
    if newest then t.said, t.said_till = said, S.now + valid_for end
    local counted = most > t.refused and most - t.refused or 0
    local of_others = gone > counted and gone - counted or 0
    if said + a.window >= t.ends then
      if least > 4294967295 then least = 4294967295 end
      if units < t.least or (units == t.least and least < t.ours) then
        t.least, t.ours = units, least
      end
      if is_steady then
        if newest and gone < t.seen then t.seen = gone end
        if of_others > t.seen then t.seen = of_others end
      end
    end
    if (refused > 0 or (is_steady and of_others > 0)) and S.now + valid_for > t.confirmed_until then
      t.confirmed_until = S.now + valid_for
    end
    if newest then
      t.short, t.short_until, t.counted_until = 0, 0, 0
      if resets and resets > S.now then
        t.short, t.counted_until = gone - most, sent
        t.short_until = resets < S.now + valid_for and resets or S.now + valid_for
      end
    end
    S.changed = true
    return reserved(a, S.now) > was
  end

  -- Answers whether less is left than was known, and other processes are to be told at once.
  function made.see(kind, count, window, capacity, units, reset_in, said, ago, refused, valid_for, forget)
    local steady, urgent = said % 2, said >= 2
    for i = 1, #S do
      local a = S[i]
      if a.count == count and a.window == window and a.kind == kind and a.capacity == capacity then
        if forget == 1 then
          made.forget_others(a)
        elseif see_at(a, units, reset_in, steady, urgent, ago, refused, valid_for) then
          local list = pool()
          while #list > 0 do
            local last = table.remove(list)
            S.pooled = #list
            subtract(last.slot, last.stamp, last.units)
          end
          return urgent
        end
        return false
      end
    end
  end

  -- Forgets what was reserved for others.
  function made.forget_others(a)
    if a.strangers then
      a.strangers, S.relaid, S.changed = nil, true, true
    end
  end

  -- Counts units that were used without a permit, `age` ago at the latest, in every limit.
  function made.charge(age, units)
    if units == 0 then return end
    S.changed = true
    local used_at = S.now > age and S.now - age or 0
    for i = 1, #S do
      S[i].rule.charge(S[i], used_at, used_at + S.slack, units)
    end
  end

  function made.read_strangers(s, from)
    local t, kind, count, window, capacity, of = {}, nil, nil, nil, nil, nil
    kind, count, window, capacity, of, t.ends, t.seen, t.before, t.refused, t.least, t.ours, t.whole, t.said,
      t.said_till, t.confirmed_until, t.short, t.short_until, t.counted_until = struct.unpack(STRANGERS_RECORD, s, from)
    for i = 1, #S do
      local a = S[i]
      if a.count == count and a.window == window and a.kind == of and a.capacity == capacity then a.strangers = t end
    end
  end

  function made.strangers_records()
    local records, n = '', 0
    for i = 1, #S do
      local a, t = S[i], S[i].strangers
      if t then
        local record = struct.pack(STRANGERS_RECORD, STRANGERS, a.count, a.window, a.capacity, a.kind, t.ends, t.seen,
          t.before, t.refused, t.least, t.ours, t.whole, t.said, t.said_till, t.confirmed_until, t.short, t.short_until,
          t.counted_until)
        records, n = records .. record .. string.rep('\0', RECORD_SIZE - #record), n + 1
      end
    end
    return records, n
  end

  function made.take_back(slot, stamp, units)
    if units == 0 or stamp < slot then return end
    local shared = false
    for i = 1, #S do
      if S[i].strangers and reserved(S[i], slot) > 0 then shared = true end
    end
    if slot <= S.now or slot < S.from or shared then
      subtract(slot, stamp, units)
    else
      put(slot, stamp, units)
    end
  end

  -- Slots of the pool that nobody can use any more leave the logs.
  function made.drain()
    local list = pool()
    while list[1] and list[1].slot < S.from do
      local passed = table.remove(list, 1)
      S.pooled = #list
      subtract(passed.slot, passed.stamp, passed.units)
    end
  end

  function made.free()
    if S.from > S.now then return 0 end
    local least = NEVER
    for i = 1, #S do
      local free = less_reserved(S[i].rule.free(S[i]), S[i], S.now)
      if free < least then least = free end
    end
    return least
  end

  function made.prefetch(most, life)
    local count = math.floor(made.free() / 4)
    if count > most then count = most end
    if count == 0 or first_slot(count, life) > S.now then return 0, 0 end
    insert(S.now, S.now + life + S.slack, count)
    return count, life + S.slack
  end

  -- Adds a limit that is new to this key: it starts with what the others remember.
  function made.add(kind, count, window, capacity, guard)
    local rule = rule_of(kind)
    local a = {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, asserted = S.now, n = 0, room = 0,
      base = 0, rule = rule,
    }
    local longest, most = nil, 0
    for i = 1, #S do
      local other = S[i]
      if other.kind == WINDOW and (not longest or other.window >= longest.window) then longest = other end
      local used = other.rule.more().used(other)
      if used > most then most = used end
    end
    rule.more().new(a)
    if longest then
      local now = S.now
      longest.rule.more().for_each(longest, function(stamp, units)
        S.now = stamp
        rule.insert(a, stamp, stamp, units)
      end)
      S.now = now
    elseif most > 0 then
      local largest = largest_cost(a)
      rule.insert(a, S.now, S.now + S.slack, most < largest and most or largest)
    end
    rule.advance(a)
    S[#S + 1] = a
    S.relaid, S.changed = true, S.changed or S.there
    return a
  end

  -- A limit holds until it was not asserted for two windows and a second; half a window may be unrecorded.
  local function holds_until(a)
    return a.asserted + math.floor(a.window * 5 / 2) + 1000000
  end

  -- Forgets the limits that hold no longer. If there are too many, those that this call does not assert go first, the one
  -- that would be forgotten next before the others: whoever asserts it adds it again.
  function made.retain()
    local kept = 0
    for i = 1, #S do
      local a = S[i]
      S[i] = nil
      if holds_until(a) >= S.now then
        kept = kept + 1
        S[kept] = a
      else
        S.relaid, S.changed = true, true
      end
    end
    while #S > MOST_LIMITS do
      local first = nil
      for i = 1, #S do
        if not S[i].ours and (not first or holds_until(S[i]) < holds_until(S[first])) then first = i end
      end
      if not first then return end
      table.remove(S, first)
      S.relaid, S.changed = true, true
    end
  end

  -- Grants nothing until permits of a state that is lost are a window old: who holds any uses none without having heard
  -- from here within SHORTEST_TRUST or a quarter of the window. Limits that remember for more than a minute are charged
  -- what the caller was granted, and learn for a minute what others were.
  function made.learn(granted)
    local LONGEST_LEARNING, SHORTEST_TRUST = 60000000, 1500000
    local longest = 0
    for i = 1, #S do
      local a = S[i]
      local remembers = a.window
      if a.kind == BUCKET and a.capacity > a.count then
        remembers = math.ceil(a.window / a.count * a.capacity)
      end
      if a.ours and remembers > longest then longest = remembers end
      if granted > 0 and remembers > LONGEST_LEARNING then
        a.rule.charge(a, S.now, S.now + S.slack, granted)
      end
    end
    if longest > LONGEST_LEARNING then longest = LONGEST_LEARNING end
    local trust = math.floor(longest / 4)
    local learned = S.born + longest + (trust > SHORTEST_TRUST and trust or SHORTEST_TRUST)
    learned = learned - learned % 2
    if learned > S.learning then S.learning = learned end
    S.changed = true
  end

  -- Everything anew, in one string of its exact size: what is written into it later needs no more memory.
  function made.rewrite(incarnation, writes, offset, expires, held, releases, ttl)
    local records, regions = {}, {}
    local function padded(s, n, room, size)
      while room < n do
        room = room == 0 and 8 or room * 2
      end
      return s .. string.rep('\0', room * size - #s), room
    end
    for i = 1, #S do
      local a = S[i]
      local s
      if a.kind == WINDOW then
        s = a.rule.more().region(a)
      else
        s = (S.lists or lists()).pack(entries(a), a.kind)
      end
      regions[i], a.room = padded(s, a.n, a.room, a.rule.size)
      records[i] = a.rule.record(a)
    end
    local strangers, shared = made.strangers_records()
    records[#S + 1] = strangers
    local pooled = pool()
    regions[#S + 1], S.pool_room = padded((S.lists or lists()).pack(pooled, 'pool'), S.pooled, S.pool_room, 21)
    local head = struct.pack(HEAD, format_of_state(), #S + shared, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning + S.cut,
      offset, S.now, expires, held, releases)
    redis.call('SET', KEYS[1], head .. table.concat(records) .. table.concat(regions), 'PX', ttl)
  end

  S.seldom = made
  return made
end
