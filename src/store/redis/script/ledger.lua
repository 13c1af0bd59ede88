
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
      local first = a.rule.first_slot(a, slot, cost, life)
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

  function made.take_back(slot, stamp, units)
    if units == 0 or stamp < slot then return end
    if slot <= S.now then
      subtract(slot, stamp, units)
    else
      put(slot, stamp, units)
    end
  end

  -- Slots of the pool that have passed leave the logs.
  function made.drain()
    local list = pool()
    while list[1] and list[1].slot < S.now do
      local passed = table.remove(list, 1)
      S.pooled = #list
      subtract(passed.slot, passed.stamp, passed.units)
    end
  end

  function made.free()
    if S.from > S.now then return 0 end
    local least = NEVER
    for i = 1, #S do
      local free = S[i].rule.more().free(S[i])
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
    local pooled = pool()
    regions[#S + 1], S.pool_room = padded((S.lists or lists()).pack(pooled, 'pool'), S.pooled, S.pool_room, 21)
    local head = struct.pack(HEAD, VERSION, #S, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning, offset,
      S.now, expires, held, releases)
    redis.call('SET', KEYS[1], head .. table.concat(records) .. table.concat(regions), 'PX', ttl)
  end

  S.seldom = made
  return made
end
