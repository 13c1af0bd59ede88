
-- ── what the call is about ────────────────────────────────────────────────────────────────────────────────────────────

-- The state.
S.slack = slack
local incarnation, writes, offset, expires, now
local held, releases = 0, 0
if s == '' then
  incarnation, writes, S.born, S.learning, offset, expires, now = dice, 0, raw, 0, 0, 0, raw
  S.pool, S.relaid = {}, true
else
  local format, account_count, last = string.byte(s), nil, nil
  if (format ~= PLAIN and format ~= LATEST) or #s < HEAD_SIZE then
    return redis.error_reply('TOLLGATE the state of this key has format ' .. format .. ', this release understands '
      .. PLAIN .. ' to ' .. LATEST)
  end
  format, account_count, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning, offset, last, expires, held,
    releases = struct.unpack(HEAD, s)
  if account_count > limit_count then
    s = redis.call('GETRANGE', KEYS[1], 0, HEAD_SIZE + RECORD_SIZE * account_count - 1)
  end
  local base = HEAD_SIZE + RECORD_SIZE * account_count
  for i = 1, account_count do
    local from = HEAD_SIZE + RECORD_SIZE * (i - 1) + 1
    local kind = string.byte(s, from)
    if kind == STRANGERS then
      (S.seldom or seldom()).read_strangers(s, from)
    elseif kind > STRANGERS then
      return redis.error_reply('TOLLGATE the state of this key has a record of kind ' .. kind
        .. ', this release understands kinds up to ' .. STRANGERS)
    else
      local rule = rule_of(kind)
      local a = rule.read(s, from)
      a.rule, a.base = rule, base
      base = base + a.room * rule.size
      S[i] = a
    end
  end
  S.there, S.pool_base = true, base

  -- Logical time: the server's and an offset. It never goes back; a caller that remembers it says where it must be.
  -- One call alone never turns it back: a call that is executed late, or of a process that stood still, expects too little
  -- as well. The caller is told the server's time, and asks again with that: if the server's clock has gone on since as
  -- the caller's has, then this call is not late and the clock is steady, so it has been set forward before.
  now = raw + offset
  if known == incarnation and seen > 0 then
    local expected, tolerance = seen + since, CLOCK_TOLERANCE + math.floor(since / 1000)
    if now < expected - tolerance then
      now = expected
    -- A state that was written at a later time than the caller expects knows better than the caller.
    elseif now > expected + tolerance + on_way and expected + tolerance >= last then
      local steady = raw - server_seen - server_since
      if server_seen == 0 or steady > tolerance + on_way or steady < -tolerance then
        return struct.pack(REPLY, VERSION, UNSURE, incarnation, writes, raw, 0, 0, 0, 0, releases, 0, 0, 0, 0, 0, 0, 0, 0,
          0, 0, 0)
      end
      now = expected
    end
  elseif operation == RETURN then
    -- Who only gives back cannot tell whether the clock stepped, and need not: for it, it is as late as at the last write,
    -- and the offset stays.
    now = last
  end
  if now < last then now = last end
  if operation ~= RETURN and now - raw ~= offset then
    offset, S.changed = now - raw, true
  end
end
S.now = now

-- The hold: it only ever ends later, unless it is released. Whether it was cut is kept in the last bit of `learning`.
S.cut = S.learning % 2
S.learning = S.learning - S.cut
-- One that begins now does, whatever was released before and not heard of by who holds.
if operation == HOLD and hold_releases < releases then hold_releases = releases end
if operation == RELEASE then
  held, releases, S.cut, S.changed = 0, releases + 1, 0, true
elseif hold_releases > releases then
  held, releases, S.cut, S.changed = hold_left > 0 and now + hold_left or 0, hold_releases, hold_cut, true
elseif hold_releases == releases and hold_left > 0 and now + hold_left > held then
  held, S.cut, S.changed = now + hold_left, hold_cut, true
end
S.from = held > now and held or now
local cut = held > now and S.cut or 0

-- The limits: those of the call are asserted.
for i = 1, #S do
  local a = S[i]
  if a.kind == FIXED and operation ~= RETURN then a.rule.align(a) end
  a.rule.advance(a)
  if a.strangers and now >= a.strangers.ends then S.seldom.roll(a) end
end
for _ = 1, limit_count do
  local kind, count, window, capacity, a
  kind, count, window, capacity, at = struct.unpack('<BI4I7I4', ARG, at)
  for i = 1, #S do
    local other = S[i]
    if other.count == count and other.window == window and other.kind == kind and other.capacity == capacity then
      a = other
    end
  end
  if not a then
    a = (S.seldom or seldom()).add(kind, count, window, capacity, guard)
  elseif now - a.asserted > window / 2 then
    a.asserted, S.changed = now, true
  end
  a.ours = true
end
if #S > limit_count then (S.seldom or seldom()).retain() end
if #S > MOST_LIMITS then
  return redis.error_reply('TOLLGATE a call asserts at most ' .. MOST_LIMITS .. ' limits')
end
if S.pooled > 0 then (S.seldom or seldom()).drain() end

if operation == PEEK then
  local next_slot, free = first_slot(1, 0), (S.seldom or seldom()).free()
  local pooled = find_pooled(1, 0)
  if pooled and pooled.slot < next_slot then next_slot = pooled.slot end
  if S.learning > now then
    free, next_slot = 0, S.learning > next_slot and S.learning or next_slot
  end
  local parts = { struct.pack('<BBI7I7I7I4BB', VERSION, GRANTED, free, next_slot - now, S.from - now, releases, cut, #S) }
  for i = 1, #S do
    local more = S[i].rule.more()
    local a = S[i]
    parts[i + 1] = struct.pack('<BI4I7I4I7I7I7', a.kind, a.count, a.window, a.capacity, more.used(a),
      less_reserved(a.rule.free(a), a, now), a.strangers and reserved(a, now) or 0)
  end
  return table.concat(parts)
end

if known ~= 0 and seen > 0 and (known ~= incarnation or known_writes > writes) then
  -- The caller knows of a state that is lost, or of a later one than this: it had permits that are not in here.
  if known == incarnation then
    incarnation, S.born = dice, now
  end
  local made = S.seldom or seldom()
  made.learn(granted_before)
end

-- What comes back, what was used without a permit, and what the upstream says is left.
local needs_at = at
at = at + need_count * 8
for _ = 1, return_count do
  local slot, stamp, units
  slot, stamp, units, at = struct.unpack('<I7I7I7', ARG, at)
  if known == incarnation then
    (S.seldom or seldom()).take_back(slot, stamp, units)
  end
end
for _ = 1, charge_count do
  local age, units
  age, units, at = struct.unpack('<I7I7', ARG, at)
  local made = S.seldom or seldom()
  made.charge(age, units)
end
local less = false
if left_count > 0 then
  less = (S.seldom or seldom()).see(struct.unpack('<BI4I7I4I7I7BI7I4I7B', ARG, at))
end
if operation == RELEASE then
  for i = 1, #S do
    (S.seldom or seldom()).forget_others(S[i])
  end
end

-- What is needed: permits of `cost` units each, none later than `latest`. Where one would be, nothing is booked for it
-- and those after it.
local segments, segment_count = nil, 0
local status, wait, limit = GRANTED, 0, nil
if S.learning > now then
  if need_count > 0 then status, wait = LEARNING, S.learning - now end
  need_count, ahead = 0, 0
end
local last, permits = now + latest, 0
at = needs_at
while need_count > 0 do
  need_count = need_count - 1
  local cost, count
  cost, count, at = struct.unpack('<I4I4', ARG, at)
  permits = permits + count
  if permits > MOST_PERMITS then
    return redis.error_reply('TOLLGATE a call asks for at most ' .. MOST_PERMITS .. ' permits')
  end
  for i = 1, #S do
    if cost == 0 or cost > largest_cost(S[i]) then
      status, wait, limit, count, need_count = REFUSED, NEVER, nil, 0, 0
    end
  end
  while count > 0 do
    local slot, stamp, fits
    slot, limit = first_slot(cost, life)
    local entry, index
    if S.pooled > 0 then
      entry, index = find_pooled(cost, life)
    end
    if entry and entry.slot <= slot and entry.slot <= last then
      slot, stamp, fits = entry.slot, entry.stamp, math.floor(entry.units / cost)
      if fits > count then fits = count end
      entry.units = entry.units - fits * cost
      if entry.units == 0 then table.remove(S.pool, index) end
      S.pooled, S.changed = #S.pool, true
    elseif slot > last then
      if entry and entry.slot < slot then slot = entry.slot end
      status, wait, need_count = REFUSED, slot < NEVER and slot - now or NEVER, 0
      break
    else
      fits = NEVER
      for i = 1, #S do
        local room = less_reserved(S[i].rule.room(S[i], slot), S[i], slot)
        if room < fits then fits = room end
      end
      fits = math.floor(fits / cost)
      if fits > count then fits = count end
      if fits < 1 then fits = 1 end
      stamp = slot + life + slack
      insert(slot, stamp, cost * fits)
    end
    count = count - fits
    segment_count = segment_count + 1
    local segment = struct.pack('<I4I4I7I7', cost, fits, slot - now, stamp - slot)
    if segment_count == 1 then
      segments = segment
    elseif segment_count == 2 then
      segments = { segments, segment }
    else
      segments[segment_count] = segment
    end
  end
end
local ahead_count, ahead_span = 0, 0
if status == GRANTED and ahead > 0 then
  ahead_count, ahead_span = (S.seldom or seldom()).prefetch(ahead, ahead_life)
end

-- How many units could still go now.
local free = 0
if status == GRANTED and S.from <= now then
  free = NEVER
  for i = 1, #S do
    local units = less_reserved(S[i].rule.free(S[i]), S[i], now)
    if units < free then free = units end
  end
end

-- When everything will be forgotten.
local fresh = S.learning > S.from and S.learning or S.from
for i = 1, #S do
  local from = S[i].rule.fresh_from(S[i])
  if S[i].strangers and forgotten_from(S[i]) > from then from = forgotten_from(S[i]) end
  if from > fresh then fresh = from end
end
if S.pooled > 0 and pool()[S.pooled].slot >= fresh then
  fresh = pool()[S.pooled].slot + 1
end

if S.changed then
  writes = writes + 1
  -- It lives until then and a second; clocks may differ by a thousandth.
  local left = fresh - now
  local needed = raw + left + math.floor(left / 1000) + 1000000
  local extend = needed > expires
  if extend then
    expires = needed + LIVES_ON
  end
  local ttl = math.floor((expires - raw) / 1000) + 1
  if S.relaid then
    (S.seldom or seldom()).rewrite(incarnation, writes, offset, expires, held, releases, ttl)
  else
    local strangers, shared = '', 0
    if S.seldom then strangers, shared = S.seldom.strangers_records() end
    s = struct.pack(HEAD, format_of_state(), #S + shared, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning + S.cut,
      offset, now, expires, held, releases)
    for i = 1, #S do
      local a = S[i]
      s = s .. a.rule.record(a)
      if a.kind == WINDOW then
        a.rule.write(a)
      elseif a.dirty and a.n > 0 then
        redis.call('SETRANGE', KEYS[1], a.base, (S.lists or lists()).pack(a.list, a.kind))
      end
    end
    redis.call('SETRANGE', KEYS[1], 0, s .. strangers)
    if S.pooled > 0 then
      redis.call('SETRANGE', KEYS[1], S.pool_base, (S.lists or lists()).pack(S.pool, 'pool'))
    end
    if extend then
      redis.call('PEXPIRE', KEYS[1], ttl)
    end
  end
end

if operation == HOLD or operation == RELEASE then
  -- Where that is forbidden, they know when they ask.
  redis.pcall('PUBLISH', ARGV[2], struct.pack('<BI7I4', cut == 1 and CUT_MESSAGE or HOLD_MESSAGE, S.from - now,
    releases) .. ARGV[3])
elseif less and #ARGV == 3 then
  redis.pcall('PUBLISH', ARGV[2], struct.pack('<BI7', LESS_MESSAGE, writes) .. ARGV[3])
end

local foreign, shared = nil, 0
if #S > limit_count then
  for i = #S, 1, -1 do
    if not S[i].ours then foreign = S[i] end
  end
end
for i = 1, #S do
  if S[i].strangers then shared = SHARED end
end
local l, f = status == REFUSED and limit or NONE, foreign or NONE
s = struct.pack(REPLY, VERSION, status + shared + cut * CUT, incarnation, writes, now, fresh - now, wait, free,
  S.from - now, releases, l.kind, l.count, l.window, l.capacity, f.kind, f.count, f.window, f.capacity, ahead_count, ahead_span, segment_count)
if segment_count > 0 then s = s .. (segment_count == 1 and segments or table.concat(segments)) end
return s
