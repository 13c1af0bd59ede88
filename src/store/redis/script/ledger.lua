
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

-- What others use of a limit (src/limit/strangers.rs): what is reserved for them at a moment.
local function reserved(a, at)
  local strangers = a.strangers
  if at >= strangers.ends and strangers.whole == 0 then return 0 end
  return strangers.seen > strangers.before and strangers.seen or strangers.before
end

local function forgotten_from(a)
  local ends, said = a.strangers.ends, a.strangers.least < 4294967295 or a.strangers.seen > 0
  return said and reserved(a, ends) > 0 and ends + a.window or ends
end

local function less_reserved(units, a, at)
  if a.strangers then units = units - reserved(a, at) end
  return units > 0 and units or 0
end

-- The first moment at which one limit allows `cost` besides what is reserved then.
local function first_slot_beside(a, from, cost, life)
  local ends = a.strangers.ends
  local slot = a.rule.first_slot(a, from, cost, life, reserved(a, 0))
  if slot < ends then return slot end
  return a.rule.first_slot(a, from > ends and from or ends, cost, life, reserved(a, ends))
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

-- The first slot that came back (src/limit/pool.rs) with `units` left and half of `life` at least.
local function find_pooled(units, life)
  local list, half = pool(), math.floor(life / 2)
  for i = 1, #list do
    local entry = list[i]
    if entry.slot >= S.from and entry.units >= units and entry.slot + half + S.slack <= entry.stamp then
      return entry, i
    end
  end
end

-- What is seldom needed.
local function seldom()
  local made, MOST_POOLED = {}, 32

  local function subtract(slot, stamp, units)
    S.changed = true
    for i = 1, #S do
      S[i].rule.more().subtract(S[i], slot, stamp, units)
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
    return { ends = ends, seen = 0, before = before, refused = 0, least = 4294967295, ours = 0, whole = whole }
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
    else
      a.strangers, S.relaid = nil, true
    end
  end

  -- The upstream has said what is left of a limit.
  local function see_at(a, units, reset_in, ago, refused)
    if a.kind == BUCKET then return a.rule.see(a, ago, units) end
    local least, most
    if a.kind == WINDOW then
      local longest_life = math.floor(a.window / 20)
      if longest_life < 50000 then longest_life = 50000 end
      least, most = a.rule.more().used_until(a, S.now + longest_life + S.slack)
    else
      least = a.rule.used(a)
      most = least
    end
    local gone, strangers = a.count > units and a.count - units or 0, a.strangers
    local told = reset_in > 0
    if not strangers and not (told and gone > most) and refused == 0 then return false end
    if not strangers then
      local ends = S.now + (told and reset_in or a.window)
      local whole = S.born + a.window - math.floor(a.window / 10) <= (told and ends or S.now)
      strangers = made.strangers(ends, 0, whole and 1 or 0)
      a.strangers, S.relaid = strangers, true
    end
    local was = strangers.seen > strangers.before and strangers.seen or strangers.before
    strangers.refused = strangers.refused + refused
    if strangers.refused > 4294967295 then strangers.refused = 4294967295 end
    if strangers.refused > 0 then
      local by_refusals, bound = strangers.before + strangers.refused, a.count - math.floor(a.count / 8)
      if by_refusals > bound then by_refusals = bound end
      if by_refusals > strangers.seen then strangers.seen = by_refusals end
    end
    if S.now - ago + a.window >= strangers.ends then
      if least > 4294967295 then least = 4294967295 end
      if units < strangers.least or (units == strangers.least and least < strangers.ours) then
        strangers.least, strangers.ours = units, least
      end
      if told then
        most = most > strangers.refused and most - strangers.refused or 0
        if gone - most > strangers.seen then strangers.seen = gone - most end
      end
    end
    S.changed = true
    return strangers.seen > was
  end

  function made.see(kind, count, window, capacity, units, reset_in, ago, refused)
    for i = 1, #S do
      local a = S[i]
      if a.count == count and a.window == window and a.kind == kind and a.capacity == capacity then
        if see_at(a, units, reset_in, ago, refused) then
          local list = pool()
          while #list > 0 do
            local last = table.remove(list)
            S.pooled = #list
            subtract(last.slot, last.stamp, last.units)
          end
        end
        return
      end
    end
  end

  function made.read_strangers(s, from)
    local t, kind, count, window, capacity, of = {}, nil, nil, nil, nil, nil
    kind, count, window, capacity, of, t.ends, t.seen, t.before, t.refused, t.least, t.ours, t.whole =
      struct.unpack(STRANGERS_RECORD, s, from)
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
          t.before, t.refused, t.least, t.ours, t.whole)
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
      local free = less_reserved(S[i].rule.more().free(S[i]), S[i], S.now)
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
  function made.retain()
    local kept = 0
    for i = 1, #S do
      local a = S[i]
      S[i] = nil
      if a.asserted + math.floor(a.window * 5 / 2) + 1000000 >= S.now then
        kept = kept + 1
        S[kept] = a
      else
        S.relaid, S.changed = true, true
      end
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
      local remembers, largest = a.window, largest_cost(a)
      if a.kind == BUCKET and a.capacity > a.count then
        remembers = math.ceil(a.window / a.count * a.capacity)
      end
      if a.ours and remembers > longest then longest = remembers end
      local units = granted < largest and granted or largest
      if units > 0 and remembers > LONGEST_LEARNING then
        a.rule.insert(a, S.now, S.now + S.slack, units)
      end
    end
    if longest > LONGEST_LEARNING then longest = LONGEST_LEARNING end
    local trust = math.floor(longest / 4)
    local learned = S.born + longest + (trust > SHORTEST_TRUST and trust or SHORTEST_TRUST)
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
    local head = struct.pack(HEAD, VERSION, #S + shared, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning, offset,
      S.now, expires, held, releases)
    redis.call('SET', KEYS[1], head .. table.concat(records) .. table.concat(regions), 'PX', ttl)
  end

  S.seldom = made
  return made
end
