
-- ── a sliding window: a log of stamps ────────────────────────────────────────────────────────────
--
-- Twin: src/limit/window.rs and src/limit/long_log.rs
-- After a change: cargo test --all-features --lib differential
-- short.lua repeats the common case of first_slot, insert and advance.
-- needs: layout.lua, `state` (state.lua)
--
-- The log is a list of chunks, sorted by stamp. A chunk is a stamp, and the units that count with
-- it. src/limit/long_log.rs explains coarse chunks and fine chunks.
--
-- In the string, the chunks lie in a ring of `space` places. Here a *place* may be beyond the ring,
-- or negative; place modulo `space` is the place in the ring. Chunk i (from 0, the oldest) has the
-- place `first` + i. Its stamp is limit.ring[2 * place], and its units are limit.ring[2 * place +
-- 1].
--
-- Chunks are read in blocks of eight when they are first needed. The record has a copy of the
-- oldest and of the newest chunk, so most calls read no block.
--
-- Fields of a limit of this kind:
--   total                         units in all chunks
--   coarse_count                  how many of the oldest chunks are coarse
--   fine_units                    units in the other chunks
--   cursor_index, cursor_before   the chunk at which the last search for a slot ended, and the
--                                 units in the chunks before it
--   first_read, end_read          the places of the chunks when the state was read: from
--                                 `first_read` to before `end_read`
--   dirty, dirty_from, dirty_to   the places that have changed since, as keys of a table; the first
--                                 and the last of them

-- Returns the functions of this kind of limit.
local function window_rule()
  local rule
  -- The most coarse chunks, and the most fine chunks.
  local MOST_COARSE = 48
  -- How many coarse chunks stay as they are.
  local MOST_APART = 16
  local MOST_FINE = 204

  -- Reads the block of a place into limit.ring. Chunks that are there already stay: they may have
  -- changed. Returns the stamp of the chunk at the place.
  local function fetch(limit, missing)
    local block = missing % limit.space
    block = block - block % 8
    local from = limit.base + block * CHUNK_SIZE
    local s = redis.call('GETRANGE', key, from, from + CHUNK_BLOCK_SIZE - 1)
    local values = { struct.unpack(CHUNK_BLOCK, s) }
    local ring, first = limit.ring, limit.first_read
    for i = 0, 7 do
      local place = first + (block + i - first) % limit.space
      if place < limit.end_read and not ring[2 * place] then
        ring[2 * place], ring[2 * place + 1] = values[2 * i + 1], values[2 * i + 2]
      end
    end
    return ring[2 * missing]
  end

  -- Returns the stamp of chunk i.
  local function stamp_of(limit, i)
    local place = limit.first + i
    return limit.ring[2 * place] or fetch(limit, place)
  end

  -- Returns the units of chunk i.
  local function units_of(limit, i)
    local place = 2 * (limit.first + i)
    if not limit.ring[place] then fetch(limit, place / 2) end
    return limit.ring[place + 1]
  end

  -- Returns the stamp and the units of chunk i. Behind the newest chunk: NEVER, and no units.
  local function chunk(limit, i)
    if i == limit.n then return NEVER, 0 end
    return stamp_of(limit, i), units_of(limit, i)
  end

  -- Sets chunk i.
  local function put(limit, i, stamp, units)
    local place = limit.first + i
    limit.ring[2 * place], limit.ring[2 * place + 1] = stamp, units
    if not limit.dirty then limit.dirty, limit.dirty_from, limit.dirty_to = {}, place, place end
    limit.dirty[place] = true
    if place < limit.dirty_from then limit.dirty_from = place end
    if place > limit.dirty_to then limit.dirty_to = place end
  end

  -- Reads the record.
  local function read(limit, s, from)
    local _, oldest, oldest_units, newest, newest_units
    _, limit.last_stated, limit.n, limit.space, limit.total, limit.fine_units, limit.coarse_count, limit.first,
      limit.cursor_index, limit.cursor_before, oldest, oldest_units, newest, newest_units =
      struct.unpack(WINDOW_RECORD, s, from)
    local last = limit.first + limit.n - 1
    limit.first_read, limit.end_read = limit.first, last + 1
    limit.ring = {
      [2 * last] = newest, [2 * last + 1] = newest_units, [2 * limit.first] = oldest, [2 * limit.first + 1] = oldest_units,
    }
  end

  -- Packs the record.
  local function record(limit)
    local oldest, oldest_units = chunk(limit, 0)
    local newest, newest_units = chunk(limit, limit.n > 0 and limit.n - 1 or 0)
    return struct.pack(WINDOW_RECORD, limit.bytes, limit.last_stated, limit.n, limit.space, limit.total, limit.fine_units,
      limit.coarse_count, limit.first % limit.space, limit.cursor_index, limit.cursor_before, oldest, oldest_units, newest,
      newest_units)
  end

  -- Writes the chunks that changed, except the newest, which is in the record.
  local function write(limit)
    if not limit.dirty then return end
    local from, parts, next_place, space = nil, '', nil, limit.space
    local last = limit.first + limit.n - 2
    local dirty_from = limit.dirty_from > limit.first and limit.dirty_from or limit.first
    local dirty_to = limit.dirty_to < last and limit.dirty_to or last
    for place = dirty_from, dirty_to do
      if limit.dirty[place] then
        if from and (place % space == 0 or place ~= next_place) then
          redis_write('SETRANGE', key, limit.base + from * CHUNK_SIZE, parts)
          from, parts = nil, ''
        end
        from = from or place % space
        parts = parts .. struct.pack(CHUNK, limit.ring[2 * place], limit.ring[2 * place + 1])
        next_place = place + 1
      end
    end
    if from then
      redis_write('SETRANGE', key, limit.base + from * CHUNK_SIZE, parts)
    end
  end

  -- Forgets chunks that are older than the window.
  local function advance(limit)
    local gone = state.now - limit.window
    while limit.n > 0 and stamp_of(limit, 0) <= gone do
      local units = units_of(limit, 0)
      limit.first, limit.n, limit.total = limit.first + 1, limit.n - 1, limit.total - units
      if limit.coarse_count > 0 then
        limit.coarse_count = limit.coarse_count - 1
      else
        limit.fine_units = limit.fine_units - units
      end
      if limit.cursor_index > 0 then
        limit.cursor_index, limit.cursor_before = limit.cursor_index - 1, limit.cursor_before - units
      end
    end
  end

  -- Returns the first moment, not before `from`, at which `cost` units may leave, and `reserved`
  -- units stay free for other clients. For this, `leaving` units have to leave the log.
  local function first_slot(limit, from, cost, _, reserved)
    cost = cost + reserved
    local leaving = limit.total - (limit.count > cost and limit.count - cost or 0)
    if leaving < 1 then return from end
    -- Finds the stamp of the unit that is number `leaving` from the oldest. The search goes on from the
    -- last one.
    local index, before = limit.cursor_index, limit.cursor_before
    while before >= leaving do
      index = index - 1
      before = before - units_of(limit, index)
    end
    local units = units_of(limit, index)
    while before + units < leaving do
      index, before = index + 1, before + units
      units = units_of(limit, index)
    end
    limit.cursor_index, limit.cursor_before = index, before
    local last = stamp_of(limit, index) + limit.window
    return last > from and last or from
  end

  -- Returns how many units may leave at `slot`, which is now, or not before the first slot of one unit.
  local function room(limit, slot)
    local used, gone = limit.total, slot - limit.window
    -- Mostly no chunk has left.
    if limit.n > 0 and stamp_of(limit, 0) <= gone then
      local index, before = limit.cursor_index, limit.cursor_before
      while index > 0 and stamp_of(limit, index - 1) > gone do
        index = index - 1
        before = before - units_of(limit, index)
      end
      while index < limit.n and stamp_of(limit, index) <= gone do
        before = before + units_of(limit, index)
        index = index + 1
      end
      used = used - before
    end
    return limit.count > used and limit.count - used or 0
  end

  -- Adds units of a stamp to the log. They join a chunk with the same stamp, or else a neighbour
  -- that is near and not full, or else they become a chunk.
  local function insert(limit, _, stamp, units)
    local chunk_size, n = math.floor((limit.count + 99) / 100), limit.n
    local farthest = n < 2 and NEVER or limit.window / 4
    local i = n
    while i > 0 and stamp_of(limit, i - 1) > stamp do
      i = i - 1
    end
    if i > 0 and stamp_of(limit, i - 1) == stamp then
      i = i - 1
      put(limit, i, stamp, units_of(limit, i) + units)
    elseif i < n and units_of(limit, i) < chunk_size and stamp_of(limit, i) - stamp <= farthest then
      put(limit, i, stamp_of(limit, i), units_of(limit, i) + units)
    elseif i > 0 and units_of(limit, i - 1) < chunk_size and stamp - stamp_of(limit, i - 1) <= farthest then
      i = i - 1
      put(limit, i, stamp, units_of(limit, i) + units)
    elseif i == n and n < limit.space then
      -- Until now, the newest chunk was in the record only.
      if n > 0 then put(limit, n - 1, chunk(limit, n - 1)) end
      limit.n = n + 1
      put(limit, n, stamp, units)
    else
      rule.cold().insert_chunk(limit, i, stamp, units)
    end
    limit.total = limit.total + units
    if i < limit.coarse_count then
      limit.coarse_count = limit.coarse_count + limit.n - n
    else
      limit.fine_units = limit.fine_units + units
    end
    if i < limit.cursor_index then
      limit.cursor_index, limit.cursor_before = 0, 0
    end
    if limit.fine_units > 2 * limit.count or limit.n > MOST_FINE or limit.coarse_count > MOST_COARSE then
      rule.cold().coarsen(limit)
    end
  end

  -- Returns the first moment at which the log is empty.
  local function fresh_from(limit)
    return limit.n > 0 and stamp_of(limit, limit.n - 1) + limit.window or 0
  end

  rule = {
    size = CHUNK_SIZE, chunk = chunk, read = read, record = record, write = write, advance = advance,
    first_slot = first_slot, room = room, insert = insert, fresh_from = fresh_from,
  }

  -- Returns the rule with the functions that only long queues and returned permits need.
  function rule.cold()
    if rule.subtract then return rule end

    -- Inserts a chunk before chunk i; moves the shorter side of the ring.
    function rule.insert_chunk(limit, i, stamp, units)
      if limit.n + 1 > limit.space then state.must_rewrite = true end
      if limit.n - i <= i then
        for k = limit.n, i + 1, -1 do
          put(limit, k, chunk(limit, k - 1))
        end
      else
        limit.first = limit.first - 1
        for k = 0, i - 1 do
          put(limit, k, chunk(limit, k + 1))
        end
      end
      limit.n = limit.n + 1
      put(limit, i, stamp, units)
    end

    -- Removes chunk i; moves the shorter side of the ring.
    local function remove_chunk(limit, i)
      if i < limit.n / 2 then
        for k = i, 1, -1 do
          put(limit, k, chunk(limit, k - 1))
        end
        limit.first = limit.first + 1
      else
        for k = i, limit.n - 2 do
          put(limit, k, chunk(limit, k + 1))
        end
      end
      limit.n = limit.n - 1
    end

    -- Joins chunk i with the one before it.
    local function join_before(limit, i)
      put(limit, i, stamp_of(limit, i), units_of(limit, i - 1) + units_of(limit, i))
      remove_chunk(limit, i - 1)
      if limit.cursor_index > i then
        limit.cursor_index = limit.cursor_index - 1
      else
        limit.cursor_index, limit.cursor_before = 0, 0
      end
    end

    -- Bounds the log. Merges the oldest fine chunks into coarse ones until two conditions are met:
    -- the fine chunks would have less than twice the count without their oldest, and are at most
    -- MOST_FINE. If there are then more than MOST_COARSE coarse chunks, two of them join.
    function rule.coarsen(limit)
      local twice = 2 * limit.count
      while limit.coarse_count < limit.n do
        local coarse = limit.coarse_count
        local units = units_of(limit, coarse)
        if limit.fine_units - units < twice and limit.n - coarse <= MOST_FINE then break end
        limit.fine_units = limit.fine_units - units
        local last = coarse >= MOST_APART and units_of(limit, coarse - 1)
        if last and last + units <= limit.count
          and stamp_of(limit, coarse) - stamp_of(limit, coarse - 1) <= limit.window / 4 then
          join_before(limit, coarse)
        else
          limit.coarse_count = coarse + 1
        end
      end
      while limit.coarse_count > MOST_COARSE do
        join_before(limit, MOST_APART)
        limit.coarse_count = limit.coarse_count - 1
      end
    end

    -- Joins a chunk that has become small with the next, or removes an empty one. Returns the index
    -- of the next chunk.
    local function join_next(limit, i)
      local units = units_of(limit, i)
      if units > 0 then
        local is_last = i + 1 >= limit.n or i + 1 == limit.coarse_count
        if is_last or units + units_of(limit, i + 1) > math.floor((limit.count + 99) / 100)
          or stamp_of(limit, i + 1) - stamp_of(limit, i) > limit.window / 4 then
          return i + 1
        end
        put(limit, i + 1, stamp_of(limit, i + 1), units_of(limit, i + 1) + units)
      end
      remove_chunk(limit, i)
      if i < limit.coarse_count then
        limit.coarse_count = limit.coarse_count - 1
      end
      return i
    end

    -- Counts units that were used without a permit. If they are more than the limit, as many as the
    -- limit count.
    function rule.charge(limit, _, stamp, units)
      if stamp + limit.window > state.now then
        rule.insert(limit, stamp, stamp, units < limit.count and units or limit.count)
      end
    end

    -- Takes back units of a stamp that were not used. They are in chunks with that stamp or a later
    -- one, and leave the first of these chunks.
    function rule.subtract(limit, _, stamp, units)
      if stamp + limit.window <= state.now then return end
      -- Finds the first chunk whose stamp is not earlier.
      local i, beyond = 0, limit.n
      while i < beyond do
        local middle = math.floor((i + beyond) / 2)
        if stamp_of(limit, middle) < stamp then i = middle + 1 else beyond = middle end
      end
      if i < limit.cursor_index then
        limit.cursor_index, limit.cursor_before = 0, 0
      end
      while units > 0 and i < limit.n do
        local chunk_units = units_of(limit, i)
        local taken = units < chunk_units and units or chunk_units
        units = units - taken
        limit.total = limit.total - taken
        if i >= limit.coarse_count then
          limit.fine_units = limit.fine_units - taken
        end
        put(limit, i, stamp_of(limit, i), chunk_units - taken)
        i = join_next(limit, i)
      end
    end

    -- Returns the units in the log.
    function rule.used(limit)
      return limit.total
    end

    -- Returns a lower and an upper bound of the units whose stamps are not later than `stamp`. The
    -- first chunk with a later stamp may have some of them.
    function rule.used_until(limit, stamp)
      local least, most = limit.total, limit.total
      for i = limit.n - 1, 0, -1 do
        if stamp_of(limit, i) <= stamp then break end
        most = least
        least = least - units_of(limit, i)
      end
      return least, most
    end

    -- Makes a log without chunks.
    function rule.new(limit)
      limit.total, limit.fine_units, limit.coarse_count, limit.first = 0, 0, 0, 0
      limit.cursor_index, limit.cursor_before = 0, 0
      limit.first_read, limit.end_read, limit.ring, limit.space = 0, 0, {}, 8
    end

    -- Returns all chunks as bytes, from place 0 on.
    function rule.region(limit)
      local parts, ring = {}, {}
      for i = 0, limit.n - 1 do
        ring[2 * i], ring[2 * i + 1] = stamp_of(limit, i), units_of(limit, i)
        parts[i + 1] = struct.pack(CHUNK, ring[2 * i], ring[2 * i + 1])
      end
      limit.first, limit.ring = 0, ring
      return table.concat(parts)
    end

    return rule
  end

  return rule
end
