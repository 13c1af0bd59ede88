-- Decides about the permits of one key: tollgate's rules (src/limit), in Redis.
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the call, packed; the answer is packed too. The formats are in src/store/redis/format.md.
--
-- Times are whole microseconds; spans too. All numbers stay below 2^53.

local VERSION = 1
local NEVER = 9007199254740992
local KEY, ARG = KEYS[1], ARGV[1]
local call, pack, unpack, floor = redis.call, struct.pack, struct.unpack, math.floor

local WINDOW, BUCKET, FIXED = 1, 2, 3

-- ── the state: a head, a record for each limit, a region of entries for each, the pool ───────────────────────────────

local HEAD, HEAD_SIZE = '<BBBBI7I7I7dI7I7', 47
local RECORD, RECORD_SIZE = '<BI4I7I4I7I7I2I2', 90
local OF_WINDOW = '<I7I7I2I2I7I2I7I7I4I7I4'
local OF_BUCKET, BUCKET_PAD = '<I7I4I7I4I7I4I7', string.rep('\0', 16)
local OF_FIXED, FIXED_PAD = '<I7', string.rep('\0', 49)
local CHUNKS = '<I7I4I7I4I7I4I7I4I7I4I7I4I7I4I7I4'
local ENTRY_SIZE = { 11, 40, 14 }
local POOLED_SIZE = 21

-- What this call knows of the state. `there` says whether there was one, `changed` that it must be written, `relaid`
-- that all of it must.
local accounts, account_count = {}, 0
local incarnation, born, learning, offset, now, expires
local pool, pool_count, pool_room, pool_base
local there, changed, relaid = false, false, false

local raw = call('TIME')
raw = raw[1] * 1000000 + raw[2]

local function read_record(s, at)
  local a = { dirty = false }
  local pos
  a.kind, a.count, a.window, a.capacity, a.guard, a.asserted, a.n, a.room, pos = unpack(RECORD, s, at)
  if a.kind == WINDOW then
    local oldest, oldest_count, newest, newest_count
    a.total, a.fine, a.coarse, a.first, a.floor, a.index, a.before, oldest, oldest_count, newest, newest_count =
      unpack(OF_WINDOW, s, pos)
    local first, last = a.first, a.first + a.n - 1
    a.first0, a.end0 = first, last + 1
    a.stamps, a.counts, a.moved, a.low, a.high = { [first] = oldest }, { [first] = oldest_count }, {}, NEVER, -NEVER
    a.stamps[last], a.counts[last] = newest, newest_count
  elseif a.kind == BUCKET then
    a.full, a.full_r, a.base_at, a.base_r, a.slack, a.slack_r, a.queued_from = unpack(OF_BUCKET, s, pos)
  else
    a.open_from = unpack(OF_FIXED, s, pos)
  end
  return a
end

-- ── entries of windows: chunks in a ring, read in blocks of eight when they are first asked for ──────────────────────

local function fetch(w, at)
  local block = at % w.room
  block = block - block % 8
  local from = w.base + block * 11
  local values = { unpack(CHUNKS, call('GETRANGE', KEY, from, from + 87)) }
  local stamps, counts, first, beyond = w.stamps, w.counts, w.first0, w.end0
  for i = 0, 7 do
    local at = first + (block + i - first) % w.room
    if at < beyond and not stamps[at] then
      stamps[at], counts[at] = values[2 * i + 1], values[2 * i + 2]
    end
  end
end

local function stamp_of(w, i)
  local at = w.first + i
  local stamp = w.stamps[at]
  if not stamp then
    fetch(w, at)
    stamp = w.stamps[at]
  end
  return stamp
end

local function count_of(w, i)
  local at = w.first + i
  local count = w.counts[at]
  if not count then
    fetch(w, at)
    count = w.counts[at]
  end
  return count
end

local function put(w, i, stamp, count)
  local at = w.first + i
  w.stamps[at], w.counts[at], w.moved[at] = stamp, count, true
  if at < w.low then w.low = at end
  if at > w.high then w.high = at end
end

local function load_all(w)
  for i = 0, w.n - 1 do
    stamp_of(w, i)
  end
end

-- ── entries of the others: short lists, read and written whole ───────────────────────────────────────────────────────

local function read_list(base, n, size, format, fields)
  local list = {}
  if n > 0 then
    local s = call('GETRANGE', KEY, base, base + n * size - 1)
    for i = 1, n do
      local values, entry = { unpack(format, s, (i - 1) * size + 1) }, {}
      for k = 1, #fields do
        entry[fields[k]] = values[k]
      end
      list[i] = entry
    end
  end
  return list
end

local function write_list(list, format, fields)
  local parts = {}
  for i = 1, #list do
    local values = {}
    for k = 1, #fields do
      values[k] = list[i][fields[k]]
    end
    parts[i] = pack(format, values[1], values[2], values[3], values[4], values[5], values[6], values[7])
  end
  return table.concat(parts)
end

local MARK, MARK_FIELDS = '<I7I4I7I4I7I4I7', { 'slot', 'units', 'before', 'before_r', 'after', 'after_r', 'queued_from' }
local SPELL, SPELL_FIELDS = '<I7I7', { 'window', 'units' }
local POOLED, POOLED_FIELDS = '<I7I7I7', { 'slot', 'stamp', 'units' }

local function entries(a)
  if not a.list then
    if a.kind == BUCKET then
      a.list = read_list(a.base, a.n, 40, MARK, MARK_FIELDS)
    else
      a.list = read_list(a.base, a.n, 14, SPELL, SPELL_FIELDS)
    end
  end
  return a.list
end

local function pooled()
  if not pool then
    pool = read_list(pool_base, pool_count, POOLED_SIZE, POOLED, POOLED_FIELDS)
  end
  return pool
end

-- ── reading and writing it ───────────────────────────────────────────────────────────────────────────────────────────

local function read_state(limit_count)
  local s = call('GETRANGE', KEY, 0, HEAD_SIZE + RECORD_SIZE * limit_count - 1)
  if s == '' then
    return false
  end
  local version = string.byte(s)
  if #s < HEAD_SIZE or version ~= VERSION then
    return nil, 'TOLLGATE the state of this key has format ' .. version .. ', this release understands ' .. VERSION
  end
  local _
  _, account_count, pool_count, pool_room, incarnation, born, learning, offset, now, expires = unpack(HEAD, s)
  if account_count > limit_count then
    s = call('GETRANGE', KEY, 0, HEAD_SIZE + RECORD_SIZE * account_count - 1)
  end
  local base = HEAD_SIZE + RECORD_SIZE * account_count
  for i = 1, account_count do
    local a = read_record(s, HEAD_SIZE + RECORD_SIZE * (i - 1) + 1)
    a.base = base
    base = base + a.room * ENTRY_SIZE[a.kind]
    accounts[i] = a
  end
  pool_base = base
  return true
end

local function record(a)
  local kind, special = a.kind
  if kind == WINDOW then
    local oldest, oldest_count, newest, newest_count = 0, 0, 0, 0
    local last = a.n - 1
    if last >= 0 then
      oldest, oldest_count, newest, newest_count = stamp_of(a, 0), count_of(a, 0), stamp_of(a, last), count_of(a, last)
    end
    special = pack(OF_WINDOW, a.total, a.fine, a.coarse, a.first % a.room, a.floor, a.index, a.before,
      oldest, oldest_count, newest, newest_count)
  elseif kind == BUCKET then
    special = pack(OF_BUCKET, a.full, a.full_r, a.base_at, a.base_r, a.slack, a.slack_r, a.queued_from) .. BUCKET_PAD
  else
    special = pack(OF_FIXED, a.open_from) .. FIXED_PAD
  end
  return pack(RECORD, kind, a.count, a.window, a.capacity, a.guard, a.asserted, a.n, a.room) .. special
end

-- The chunks that moved, but for the newest, which is in the record.
local function write_moved(w)
  local from, parts, next_at = nil, nil, nil
  local room, moved = w.room, w.moved
  local function flush()
    if from then
      call('SETRANGE', KEY, w.base + from * 11, table.concat(parts))
    end
  end
  local low, high = w.low, w.high
  if low < w.first then low = w.first end
  if high > w.first + w.n - 2 then high = w.first + w.n - 2 end
  for at = low, high do
    if moved[at] then
      local place = at % room
      if place ~= next_at or place == 0 then
        flush()
        from, parts = place, {}
      end
      parts[#parts + 1] = pack('<I7I4', w.stamps[at], w.counts[at])
      next_at = place + 1
    end
  end
  flush()
end

local function roomy(n, room)
  while room < n do
    room = room == 0 and 8 or room * 2
  end
  return room
end

local function padded(s, size)
  return s .. string.rep('\0', size - #s)
end

-- Everything anew, in one string of its exact size: what is written into it later needs no more memory.
local function rewrite(ttl)
  local regions = {}
  for i = 1, account_count do
    local a, s = accounts[i], nil
    local size = ENTRY_SIZE[a.kind]
    if a.kind == WINDOW then
      load_all(a)
      local parts = {}
      for k = 0, a.n - 1 do
        parts[k + 1] = pack('<I7I4', stamp_of(a, k), count_of(a, k))
      end
      s = table.concat(parts)
    elseif a.kind == BUCKET then
      s = write_list(entries(a), MARK, MARK_FIELDS)
    else
      s = write_list(entries(a), SPELL, SPELL_FIELDS)
    end
    a.room = roomy(a.n, a.kind == WINDOW and math.max(a.room, 8) or a.room)
    regions[i] = padded(s, a.room * size)
  end
  local in_pool = pooled()
  pool_room = roomy(pool_count, pool_room)
  regions[#regions + 1] = padded(write_list(in_pool, POOLED, POOLED_FIELDS), pool_room * POOLED_SIZE)
  local parts = {
    pack(HEAD, VERSION, account_count, pool_count, pool_room, incarnation, born, learning, offset, now, expires),
  }
  for i = 1, account_count do
    local a = accounts[i]
    if a.kind == WINDOW then
      -- The chunks now start at the first place of the ring.
      local stamps, counts = {}, {}
      for k = 0, a.n - 1 do
        stamps[k], counts[k] = stamp_of(a, k), count_of(a, k)
      end
      a.first, a.stamps, a.counts = 0, stamps, counts
    end
    parts[#parts + 1] = record(a)
  end
  call('SET', KEY, table.concat(parts) .. table.concat(regions), 'PX', ttl)
end

local function write_state(fresh_from)
  -- No earlier than everything is forgotten, and a second; clocks may differ by a thousandth.
  local left = fresh_from - now
  if left < 0 then left = 0 end
  local needed = raw + left + floor(left / 1000) + 1000000
  local extend = needed > expires
  if extend then
    -- Some more, so that not every grant has to move it.
    expires = needed + floor(left / 4)
  end
  local ttl = floor((expires - raw) / 1000) + 1
  if relaid then
    return rewrite(ttl)
  end
  local s = pack(HEAD, VERSION, account_count, pool_count, pool_room, incarnation, born, learning, offset, now, expires)
  for i = 1, account_count do
    local a = accounts[i]
    s = s .. record(a)
    if a.kind == WINDOW then
      if a.low <= a.high then write_moved(a) end
    elseif a.dirty then
      local list = entries(a)
      if a.n > 0 then
        call('SETRANGE', KEY, a.base,
          a.kind == BUCKET and write_list(list, MARK, MARK_FIELDS) or write_list(list, SPELL, SPELL_FIELDS))
      end
    end
  end
  call('SETRANGE', KEY, 0, s)
  if pool and pool_count > 0 then
    call('SETRANGE', KEY, pool_base, write_list(pool, POOLED, POOLED_FIELDS))
  end
  if extend then
    call('PEXPIRE', KEY, ttl)
  end
end
