-- Decides about the permits of one key: tollgate's rules (src/limit), in Redis.
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the call, packed; the answer is packed too. The formats are in src/guide/redis_format.md.
-- ARGV[2]  where the key is held or released: the channel on which all are told
-- ARGV[3]  and the name of the key, as they will know it
--
-- Times are whole microseconds; spans too. All numbers stay below 2^53.
--
-- A script is a function that is made anew for each call, with every function in it: 50 ns for one, and more for each
-- variable it shares. So what is seldom needed is made when it is needed, and what all need is in one table, S.

local VERSION = 1
local NEVER = 9007199254740992
local WINDOW, BUCKET, FIXED, STRANGERS = 1, 2, 3, 4

-- ── the state: a head, a record for each limit, a region of entries for each, the pool ───────────────────────────────

local HEAD, HEAD_SIZE, RECORD_SIZE = '<BBBBI7I7I7I7dI7I7I7I4', 65, 90

local STRANGERS_RECORD = '<BI4I7I4BI7I4I4I4I4I4B'
local WINDOW_RECORD = '<BI4I7I4I7I7I2I2I7I7I2I2I7I2I7I7I4I7I4'

-- ── the call ─────────────────────────────────────────────────────────────────────────────────────────────────────────

local LEASE, PEEK, RETURN, HOLD, RELEASE = 1, 2, 3, 4, 5
local GRANTED, REFUSED, LEARNING = 0, 1, 2
-- Besides: others use a limit too.
local SHARED = 4
-- How far the clock of the server may be from where the caller expects it, besides a thousandth of the time between, and
-- ahead of it besides the time that call and answer may have been on their way.
local CLOCK_TOLERANCE = 250000
local REPLY, REPLY_WITH_ONE = '<BBI7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2', '<BBI7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2I4I4I7I7'
-- How much longer a key lives than it must, so that not every grant has to move its end.
local LIVES_ON = 2000000
local NONE = { kind = 0, count = 0, window = 0, capacity = 0 }

local raw = redis.call('TIME')
raw = raw[1] * 1000000 + raw[2]

local ARG = ARGV[1]
local version, operation, dice, known, known_writes, seen, since, on_way, granted_before, slack, guard, latest, life,
  ahead, ahead_life, hold_left, hold_releases, limit_count, need_count, return_count, left_count,
  at = struct.unpack('<BBI7I7I7I7I7I7I7I7I7I7I7I4I7I7I4BI2I2B', ARG)
if version ~= VERSION then
  return redis.error_reply('TOLLGATE format ' .. version .. ' of calls is unknown, this script understands ' .. VERSION)
end
local s = redis.call('GETRANGE', KEYS[1], 0, HEAD_SIZE + RECORD_SIZE * limit_count - 1)

-- ── the short way ────────────────────────────────────────────────────────────────────────────────────────────────────
--
-- Most calls want permits of sliding windows at once, and get them or are refused. It decides as the long way does, which
-- follows and decides everything: whatever is unusual leaves for it (break), before anything is written.

repeat
  if operation ~= LEASE or need_count ~= 1 or return_count + left_count > 0 or ahead > 0 or hold_left > 0
    or #s ~= HEAD_SIZE + RECORD_SIZE * limit_count then break end
  local format, account_count, pooled, pool_room, incarnation, writes, born, learning, offset, last, expires, held,
    releases = struct.unpack(HEAD, s)
  local now = raw + offset
  if format ~= VERSION or account_count ~= limit_count or pooled > 0 or now < last or now < learning or now < held
    or hold_releases > releases then break end
  local off = now - seen - since
  if known ~= 0 and seen > 0 and (known ~= incarnation or known_writes > writes or off > CLOCK_TOLERANCE + on_way
    or off < -CLOCK_TOLERANCE) then break end

  local cost, permits = struct.unpack('<I4I4', ARG, at + 16 * limit_count)
  local units, stamp, base, unusual = cost * permits, now + life + slack, #s, cost == 0
  local wait, limit, fresh, kept, records, pushed, asserts = 0, NONE, now, now, '', nil, false
  for i = 1, limit_count do
    local kind, count, window, capacity, guard, asserted, n, room, total, fine, coarse, first, floor, index, _, oldest,
      oldest_count, newest, newest_count = struct.unpack(WINDOW_RECORD, s, HEAD_SIZE + RECORD_SIZE * (i - 1) + 1)
    local asked_kind, asked_count, asked_window = struct.unpack('<BI4I7', ARG, at + 16 * (i - 1))
    if kind ~= WINDOW or asked_kind ~= WINDOW or asked_count ~= count or asked_window ~= window
      or coarse > 0 or floor > 0 or index > 0 or cost > count or n == 0 or stamp < newest then
      unusual = true
      break
    end
    -- What is older than the window leaves.
    while n > 0 and oldest + window <= now do
      n, total, fine, first = n - 1, total - oldest_count, fine - oldest_count, first + 1
      if n == 1 then
        oldest, oldest_count = newest, newest_count
      elseif n > 1 then
        local from = base + first % room * 11
        oldest, oldest_count = struct.unpack('<I7I4', redis.call('GETRANGE', KEYS[1], from, from + 10))
      end
    end
    if now - asserted > window / 2 then
      asserted, asserts = now, true
    end
    local free, last_stamp = count - total, newest
    if free < cost then
      -- The first slot is when enough of the oldest have left; beyond the oldest chunk the long way looks.
      local left = oldest + window - now
      if cost - free > oldest_count or left <= latest then
        unusual = true
        break
      end
      if left > wait then
        wait, limit = left, { kind = kind, count = count, window = window, capacity = capacity }
      end
    elseif wait == 0 then
      if free < units or n == room then
        -- Some now, some later; or the ring has to grow.
        unusual = true
        break
      end
      if n > 0 and (newest == stamp or newest_count < math.floor((count + 99) / 100)) then
        newest_count = newest_count + units
      else
        -- The newest so far was in the record only.
        if n > 0 then
          pushed = pushed or {}
          pushed[#pushed + 1] = base + (first + n - 1) % room * 11
          pushed[#pushed + 1] = struct.pack('<I7I4', newest, newest_count)
        end
        n, newest_count = n + 1, units
      end
      if n == 1 then
        oldest, oldest_count = stamp, newest_count
      end
      records = records .. struct.pack(WINDOW_RECORD, WINDOW, count, window, 0, guard, asserted, n, room, total + units,
        fine + units, 0, first % room, 0, 0, 0, oldest, oldest_count, stamp, newest_count)
      if stamp + window > fresh then fresh = stamp + window end
    end
    base = base + room * 11
    if last_stamp + window > kept then kept = last_stamp + window end
  end
  -- That a limit is still asserted has to be written.
  if unusual or (wait > 0 and asserts) then break end

  if wait > 0 then
    -- A refusal leaves no trace.
    return struct.pack(REPLY, VERSION, REFUSED, incarnation, writes, now, kept - now, wait, 0, releases, limit.kind, limit.count,
      limit.window, limit.capacity, 0, 0, 0, 0, 0, 0, 0)
  end
  local left = fresh - now
  if pushed then
    for i = 1, #pushed, 2 do
      redis.call('SETRANGE', KEYS[1], pushed[i], pushed[i + 1])
    end
  end
  local needed = raw + left + math.floor(left / 1000) + 1000000
  if needed > expires then
    expires = needed + LIVES_ON
    redis.call('PEXPIRE', KEYS[1], math.floor((expires - raw) / 1000) + 1)
  end
  redis.call('SETRANGE', KEYS[1], 0, struct.pack(HEAD, VERSION, limit_count, 0, pool_room, incarnation, writes + 1, born,
    learning, offset, now, expires, held, releases) .. records)
  return struct.pack(REPLY_WITH_ONE, VERSION, GRANTED, incarnation, writes + 1, now, left, 0, 0, releases, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1,
    cost, permits, 0, stamp - now)
until true

-- ── the long way: everything else ─────────────────────────────────────────────────────────────────────────────────────

-- What this call knows: the limits with what was used of them (S[1] ...), and whether there was a state, whether it must
-- be written (changed), and all of it (relaid).
local S = {
  false, false,
  now = 0, from = 0, slack = 0, there = false, changed = false, relaid = false, born = 0, learning = 0,
  pooled = 0, pool_room = 0, pool_base = 0, pool = false, lists = false, seldom = false,
}
S[1], S[2] = nil, nil

-- Short lists are read and written whole: marks of buckets, spells of fixed windows, the pool.
local function lists()
  local made = {}
  local formats = {
    [BUCKET] = { '<I7I4I7I4I7I4I7', 40, { 'slot', 'units', 'before', 'before_r', 'after', 'after_r', 'queued_from' } },
    [FIXED] = { '<I7I7', 14, { 'window', 'units' } },
    pool = { '<I7I7I7', 21, { 'slot', 'stamp', 'units' } },
  }
  function made.read(base, n, what)
    local format, size, fields, list = formats[what][1], formats[what][2], formats[what][3], {}
    if n > 0 then
      local s = redis.call('GETRANGE', KEYS[1], base, base + n * size - 1)
      for i = 1, n do
        local values, entry = { struct.unpack(format, s, (i - 1) * size + 1) }, {}
        for k = 1, #fields do
          entry[fields[k]] = values[k]
        end
        list[i] = entry
      end
    end
    return list
  end
  function made.pack(list, what)
    local format, fields, parts = formats[what][1], formats[what][3], {}
    for i = 1, #list do
      local v = {}
      for k = 1, #fields do
        v[k] = list[i][fields[k]]
      end
      parts[i] = struct.pack(format, v[1], v[2], v[3], v[4], v[5], v[6], v[7])
    end
    return table.concat(parts)
  end
  S.lists = made
  return made
end

local function entries(a)
  if not a.list then
    a.list = (S.lists or lists()).read(a.base, a.n, a.kind)
  end
  return a.list
end

local function pool()
  if not S.pool then
    S.pool = (S.lists or lists()).read(S.pool_base, S.pooled, 'pool')
  end
  return S.pool
end

-- ── a sliding window: a log of stamps (src/limit/window.rs) ──────────────────────────────────────────────────────────
--
-- Its chunks lie in a ring of `room` places, read in blocks of eight when they are first asked for. Chunk i (from 0) is
-- at[2 * (first + i)] and the number after it. The oldest and the newest are in the record besides, so that most calls
-- read no block.

local function window_rule()

  local function fetch(w, place)
    local block = place % w.room
    block = block - block % 8
    local from = w.base + block * 11
    local s = redis.call('GETRANGE', KEYS[1], from, from + 87)
    local values = { struct.unpack('<I7I4I7I4I7I4I7I4I7I4I7I4I7I4I7I4', s) }
    local at, first = w.at, w.first0
    for i = 0, 7 do
      local place = first + (block + i - first) % w.room
      if place < w.end0 and not at[2 * place] then
        at[2 * place], at[2 * place + 1] = values[2 * i + 1], values[2 * i + 2]
      end
    end
  end

  local function stamp_of(w, i)
    local place = 2 * (w.first + i)
    local stamp = w.at[place]
    if not stamp then
      fetch(w, place / 2)
      stamp = w.at[place]
    end
    return stamp
  end

  local function count_of(w, i)
    local place = 2 * (w.first + i)
    if not w.at[place] then fetch(w, place / 2) end
    return w.at[place + 1]
  end

  local function put(w, i, stamp, count)
    local place = w.first + i
    w.at[2 * place], w.at[2 * place + 1] = stamp, count
    if not w.moved then w.moved, w.low, w.high = {}, place, place end
    w.moved[place] = true
    if place < w.low then w.low = place end
    if place > w.high then w.high = place end
  end

  local function pop_oldest(w)
    local stamp, count = stamp_of(w, 0), count_of(w, 0)
    w.first, w.n, w.total = w.first + 1, w.n - 1, w.total - count
    if w.coarse > 0 then
      w.coarse = w.coarse - 1
    else
      w.fine = w.fine - count
    end
    if w.index > 0 then
      w.index, w.before = w.index - 1, w.before - count
    end
    return stamp
  end

  -- What only long lines and give-backs need.
  local more
  local function seldom()
    if more then return more end
    more = {}

    local function load_all(w)
      for i = 0, w.n - 1 do
        stamp_of(w, i)
      end
    end

    -- Both move the shorter side.
    function more.insert_chunk(w, i, stamp, count)
      if w.n + 1 > w.room then
        load_all(w)
        S.relaid = true
      end
      if w.n - i <= i then
        for k = w.n, i + 1, -1 do
          put(w, k, stamp_of(w, k - 1), count_of(w, k - 1))
        end
      else
        w.first = w.first - 1
        for k = 0, i - 1 do
          put(w, k, stamp_of(w, k + 1), count_of(w, k + 1))
        end
      end
      w.n = w.n + 1
      put(w, i, stamp, count)
    end

    local function remove_chunk(w, i)
      if i < w.n / 2 then
        for k = i, 1, -1 do
          put(w, k, stamp_of(w, k - 1), count_of(w, k - 1))
        end
        w.first = w.first + 1
      else
        for k = i, w.n - 2 do
          put(w, k, stamp_of(w, k + 1), count_of(w, k + 1))
        end
      end
      w.n = w.n - 1
    end

    function more.coarsen(w)
      local MOST_COARSE, MOST_FINE = 48, 204
      local twice = 2 * w.count
      while w.coarse < w.n do
        local coarse = w.coarse
        local count = count_of(w, coarse)
        if w.fine - count < twice and w.n - coarse <= MOST_FINE then break end
        w.fine = w.fine - count
        local last = coarse > 0 and count_of(w, coarse - 1)
        if last and last + count <= w.count then
          put(w, coarse, stamp_of(w, coarse), count + last)
          remove_chunk(w, coarse - 1)
          if w.index > coarse then
            w.index = w.index - 1
          else
            w.index, w.before = 0, 0
          end
        else
          w.coarse = coarse + 1
        end
      end
      while w.coarse > MOST_COARSE do
        local oldest = pop_oldest(w)
        if oldest > w.floor then w.floor = oldest end
      end
    end

    -- Joins a chunk that has become small with the next. Answers where to go on.
    local function join_next(w, i)
      local count = count_of(w, i)
      if count > 0 then
        if i + 1 >= w.n or i + 1 == w.coarse or count + count_of(w, i + 1) > math.floor((w.count + 99) / 100) then
          return i + 1
        end
        put(w, i + 1, stamp_of(w, i + 1), count_of(w, i + 1) + count)
      end
      remove_chunk(w, i)
      if i < w.coarse then
        w.coarse = w.coarse - 1
      end
      return i
    end

    function more.subtract(w, _, stamp, units)
      if stamp + w.window <= S.now or (w.floor > 0 and stamp <= w.floor) then return end
      -- The first chunk whose stamp is not earlier.
      local i, beyond = 0, w.n
      while i < beyond do
        local middle = math.floor((i + beyond) / 2)
        if stamp_of(w, middle) < stamp then i = middle + 1 else beyond = middle end
      end
      w.index, w.before = 0, 0
      while units > 0 and i < w.n do
        local count = count_of(w, i)
        local taken = units < count and units or count
        units = units - taken
        w.total = w.total - taken
        if i >= w.coarse then
          w.fine = w.fine - taken
        end
        put(w, i, stamp_of(w, i), count - taken)
        i = join_next(w, i)
      end
    end

    function more.free(w)
      if w.floor > 0 and w.floor + w.window > S.now then return 0 end
      return w.count > w.total and w.count - w.total or 0
    end

    function more.used(w)
      return w.total
    end

    -- The units whose stamps are no later, and with those of the first chunk that is later: it may hold some.
    function more.used_until(w, stamp)
      local least, most = w.total, w.total
      for i = w.n - 1, 0, -1 do
        if stamp_of(w, i) <= stamp then break end
        most = least
        least = least - count_of(w, i)
      end
      return least, most
    end

    -- Makes one without chunks.
    function more.new(w)
      w.total, w.fine, w.coarse, w.first, w.floor, w.index, w.before = 0, 0, 0, 0, 0, 0, 0
      w.first0, w.end0, w.at, w.room = 0, 0, {}, 8
    end

    -- Calls `with` with the stamp and the units of each chunk.
    function more.for_each(w, with)
      for i = 0, w.n - 1 do
        with(stamp_of(w, i), count_of(w, i))
      end
    end

    -- All chunks from the first place on, in a ring that has room for them.
    function more.region(w)
      load_all(w)
      local parts, at = {}, {}
      for i = 0, w.n - 1 do
        at[2 * i], at[2 * i + 1] = stamp_of(w, i), count_of(w, i)
        parts[i + 1] = struct.pack('<I7I4', at[2 * i], at[2 * i + 1])
      end
      w.first, w.at = 0, at
      while w.room < w.n do
        w.room = w.room * 2
      end
      return table.concat(parts)
    end

    return more
  end

  local function read(s, from)
    local kind, count, window, capacity, guard, asserted, n, room, total, fine, coarse, first, floor, index, before, oldest,
      oldest_count, newest, newest_count = struct.unpack(WINDOW_RECORD, s, from)
    local last = first + n - 1
    return {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, asserted = asserted, n = n,
      room = room, total = total, fine = fine, coarse = coarse, first = first, floor = floor, index = index,
      before = before, first0 = first, end0 = last + 1, moved = false, low = 0, high = 0, base = 0, rule = 0, ours = false,
      at = {
        [2 * last] = newest, [2 * last + 1] = newest_count, [2 * first] = oldest, [2 * first + 1] = oldest_count,
      },
    }
  end

  local function record(w)
    local oldest, oldest_count, newest, newest_count = 0, 0, 0, 0
    local last = w.n - 1
    if last >= 0 then
      oldest, oldest_count, newest, newest_count = stamp_of(w, 0), count_of(w, 0), stamp_of(w, last), count_of(w, last)
    end
    return struct.pack(WINDOW_RECORD, WINDOW, w.count, w.window, w.capacity, w.guard, w.asserted, w.n, w.room, w.total, w.fine,
      w.coarse, w.first % w.room, w.floor, w.index, w.before, oldest, oldest_count, newest, newest_count)
  end

  -- Writes the chunks that moved, but for the newest, which is in the record.
  local function write(w)
    if not w.moved then return end
    local from, parts, next_place, room = nil, '', nil, w.room
    local last = w.first + w.n - 2
    for place = w.low > w.first and w.low or w.first, w.high < last and w.high or last do
      if w.moved[place] then
        if from and (place % room == 0 or place ~= next_place) then
          redis.call('SETRANGE', KEYS[1], w.base + from * 11, parts)
          from, parts = nil, ''
        end
        from = from or place % room
        parts = parts .. struct.pack('<I7I4', w.at[2 * place], w.at[2 * place + 1])
        next_place = place + 1
      end
    end
    if from then
      redis.call('SETRANGE', KEYS[1], w.base + from * 11, parts)
    end
  end

  local function advance(w)
    local gone = S.now - w.window
    while w.n > 0 and stamp_of(w, 0) <= gone do
      pop_oldest(w)
    end
    if w.floor <= gone then w.floor = 0 end
  end

  local function first_slot(w, from, cost, _, reserved)
    cost = cost + reserved
    local leaving, last = w.total - (w.count > cost and w.count - cost or 0), w.floor
    if leaving >= 1 then
      -- The stamp of the unit that is number `leaving` of the oldest.
      local index, before = w.index, w.before
      while before >= leaving do
        index = index - 1
        before = before - count_of(w, index)
      end
      local count = count_of(w, index)
      while before + count < leaving do
        index, before = index + 1, before + count
        count = count_of(w, index)
      end
      w.index, w.before = index, before
      last = stamp_of(w, index)
    elseif last == 0 then
      return from
    end
    last = last + w.window
    return last > from and last or from
  end

  local function room_at(w, slot)
    local index, before, gone = w.index, w.before, slot - w.window
    while index > 0 and stamp_of(w, index - 1) > gone do
      index = index - 1
      before = before - count_of(w, index)
    end
    while index < w.n and stamp_of(w, index) <= gone do
      before = before + count_of(w, index)
      index = index + 1
    end
    local room = w.count - (w.total - before)
    return room > 0 and room or 0
  end

  local function insert(w, _, stamp, units)
    local size, n = math.floor((w.count + 99) / 100), w.n
    local i = n
    while i > 0 and stamp_of(w, i - 1) > stamp do
      i = i - 1
    end
    if i > 0 and stamp_of(w, i - 1) == stamp then
      i = i - 1
      put(w, i, stamp, count_of(w, i) + units)
    elseif i < n and count_of(w, i) < size then
      put(w, i, stamp_of(w, i), count_of(w, i) + units)
    elseif i > 0 and count_of(w, i - 1) < size then
      i = i - 1
      put(w, i, stamp, count_of(w, i) + units)
    elseif i == n and n < w.room then
      -- The newest so far was in the record only.
      if n > 0 then put(w, n - 1, stamp_of(w, n - 1), count_of(w, n - 1)) end
      w.n = n + 1
      put(w, n, stamp, units)
    else
      seldom().insert_chunk(w, i, stamp, units)
    end
    w.total = w.total + units
    if i < w.coarse then
      w.coarse = w.coarse + w.n - n
    else
      w.fine = w.fine + units
    end
    if i < w.index then
      w.index, w.before = 0, 0
    end
    if w.fine > 2 * w.count or w.n > 204 or w.coarse > 48 then
      seldom().coarsen(w)
    end
  end

  local function fresh_from(w)
    local newest = w.n > 0 and stamp_of(w, w.n - 1) or 0
    if w.floor > newest then newest = w.floor end
    return newest > 0 and newest + w.window or 0
  end

  return {
    size = 11, more = seldom, read = read, record = record, write = write, advance = advance, first_slot = first_slot,
    room = room_at, insert = insert, fresh_from = fresh_from,
  }
end

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

-- ── fixed windows, aligned to the epoch (src/limit/fixed.rs) ─────────────────────────────────────────────────────────

local function fixed_rule()
  local RECORD, MOST_SPELLS = '<BI4I7I4I7I7I2I2I7I7I7I7I7I7I7I7', 64
  local rule = { size = 14 }
  function rule.advance(f)
    if f.n > 0 then
      local list, current = entries(f), math.floor(S.now / f.window)
      while list[1] and list[1].window < current do
        table.remove(list, 1)
        f.n, f.dirty = #list, true
      end
    end
  end

  -- Where the units of `window` are, or would have to be.
  local function find_spell(f, window)
    local list = entries(f)
    for i = 1, #list do
      if list[i].window >= window then
        return i, list[i].window == window and list[i] or nil
      end
    end
    return #list + 1, nil
  end

  local function units_in(f, window)
    local _, spell = find_spell(f, window)
    return spell and spell.units or 0
  end

  function rule.first_slot(f, from, cost, life, reserved)
    local most = f.count - reserved > cost and f.count - reserved or cost
    local list, window, open = entries(f), math.floor(from / f.window), f.window - 2 * f.guard
    if window < f.open_from then window = f.open_from end
    if open < 0 then open = 0 end
    open = open > life and open - life or 0
    local i = find_spell(f, window)
    while true do
      local start, spell = window * f.window + f.guard, list[i]
      local slot, units = from > start and from or start, 0
      if spell and spell.window == window then
        units, i = spell.units, i + 1
      end
      if slot <= start + open and units + cost <= most then
        return slot
      end
      if start >= NEVER then return NEVER end
      window = window + 1
    end
  end

  function rule.room(f, slot)
    local window = math.floor(slot / f.window)
    if window < f.open_from then return 0 end
    local room = f.count - units_in(f, window)
    return room > 0 and room or 0
  end

  function rule.insert(f, slot, _, units)
    local window = math.floor(slot / f.window)
    local list, i, spell = entries(f), find_spell(f, window)
    if spell then
      spell.units = spell.units + units
    else
      table.insert(list, i, { window = window, units = units })
    end
    while #list > MOST_SPELLS do
      local closed = table.remove(list, 1).window + 1
      if closed > f.open_from then f.open_from = closed end
    end
    f.n, f.dirty = #list, true
    if f.n > f.room then S.relaid = true end
  end

  function rule.subtract(f, slot, _, units)
    local _, spell = find_spell(f, math.floor(slot / f.window))
    if spell then
      spell.units = spell.units > units and spell.units - units or 0
      f.dirty = true
    end
  end

  function rule.fresh_from(f)
    local list, last = entries(f), f.open_from
    for i = #list, 1, -1 do
      if list[i].units > 0 then
        if list[i].window + 1 > last then last = list[i].window + 1 end
        break
      end
    end
    return last * f.window
  end

  function rule.free(f)
    return rule.room(f, S.now)
  end

  function rule.used(f)
    return units_in(f, math.floor(S.now / f.window))
  end

  function rule.new(f)
    f.open_from, f.list = 0, {}
  end

  function rule.read(s, from)
    local f = {}
    f.kind, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from = struct.unpack(RECORD, s, from)
    return f
  end

  function rule.record(f)
    return struct.pack(RECORD, FIXED, f.count, f.window, f.capacity, f.guard, f.asserted, f.n, f.room, f.open_from,
      0, 0, 0, 0, 0, 0, 0)
  end

  function rule.more()
    return rule
  end

  return rule
end

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
  if format ~= VERSION or #s < HEAD_SIZE then
    return redis.error_reply('TOLLGATE the state of this key has format ' .. format .. ', this release understands '
      .. VERSION)
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
    else
      local rule = rule_of(kind)
      local a = rule.read(s, from)
      a.rule, a.base = rule, base
      base = base + a.room * rule.size
      S[i] = a
    end
  end
  S.there, S.pool_base = true, base

  -- Logical time: the server's and an offset. It never goes back; a caller who knows better says where it must be.
  now = raw + offset
  if known == incarnation and seen > 0 then
    local expected, tolerance = seen + since, CLOCK_TOLERANCE + math.floor(since / 1000)
    if now > expected + tolerance + on_way or now < expected - tolerance then now = expected end
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

-- The hold: it only ever ends later, unless it is released.
-- One that begins now does, whatever was released before and not heard of by who holds.
if operation == HOLD and hold_releases < releases then hold_releases = releases end
if operation == RELEASE then
  held, releases, S.changed = 0, releases + 1, true
elseif hold_releases > releases then
  held, releases, S.changed = hold_left > 0 and now + hold_left or 0, hold_releases, true
elseif hold_releases == releases and hold_left > 0 and now + hold_left > held then
  held, S.changed = now + hold_left, true
end
S.from = held > now and held or now

-- The limits: those of the call are asserted.
for i = 1, #S do
  local a = S[i]
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
  return redis.error_reply('TOLLGATE more than ' .. MOST_LIMITS .. ' different limits are asserted for this key')
end
if S.pooled > 0 then (S.seldom or seldom()).drain() end

if operation == PEEK then
  local next_slot, free = first_slot(1, 0), (S.seldom or seldom()).free()
  local pooled = find_pooled(1, 0)
  if pooled and pooled.slot < next_slot then next_slot = pooled.slot end
  if S.learning > now then
    free, next_slot = 0, S.learning > next_slot and S.learning or next_slot
  end
  local parts = { struct.pack('<BI7I7I7I4B', VERSION, free, next_slot - now, S.from - now, releases, #S) }
  for i = 1, #S do
    local more = S[i].rule.more()
    local a = S[i]
    parts[i + 1] = struct.pack('<BI4I7I4I7I7I7', a.kind, a.count, a.window, a.capacity, more.used(a),
      less_reserved(more.free(a), a, now), a.strangers and reserved(a, now) or 0)
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

-- What comes back.
local needs_at = at
at = at + need_count * 8
if left_count > 0 then
  (S.seldom or seldom()).see(struct.unpack('<BI4I7I4I7I7I7I4', ARG, at + return_count * 21))
end
for _ = 1, return_count do
  local slot, stamp, units
  slot, stamp, units, at = struct.unpack('<I7I7I7', ARG, at)
  if known == incarnation then
    (S.seldom or seldom()).take_back(slot, stamp, units)
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
local last = now + latest
at = needs_at
while need_count > 0 do
  need_count = need_count - 1
  local cost, count
  cost, count, at = struct.unpack('<I4I4', ARG, at)
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
    s = struct.pack(HEAD, VERSION, #S + shared, S.pooled, S.pool_room, incarnation, writes, S.born, S.learning, offset, now,
      expires, held, releases)
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
  redis.pcall('PUBLISH', ARGV[2], struct.pack('<BI7I4', VERSION, S.from - now, releases) .. ARGV[3])
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
s = struct.pack(REPLY, VERSION, status + shared, incarnation, writes, now, fresh - now, wait,
  S.from - now, releases, l.kind, l.count, l.window, l.capacity, f.kind, f.count, f.window, f.capacity, ahead_count, ahead_span, segment_count)
if segment_count > 0 then s = s .. (segment_count == 1 and segments or table.concat(segments)) end
return s
