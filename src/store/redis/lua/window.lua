
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

  local function free(w)
    if w.floor > 0 and w.floor + w.window > S.now then return 0 end
    return w.count > w.total and w.count - w.total or 0
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

  -- Counts units that were used without a permit. More than the limit count as the limit.
  local function charge(w, _, stamp, units)
    if stamp + w.window > S.now then
      insert(w, stamp, stamp, units < w.count and units or w.count)
    end
  end

  local function fresh_from(w)
    local newest = w.n > 0 and stamp_of(w, w.n - 1) or 0
    if w.floor > newest then newest = w.floor end
    return newest > 0 and newest + w.window or 0
  end

  return {
    size = 11, more = seldom, read = read, record = record, write = write, advance = advance, first_slot = first_slot,
    room = room_at, insert = insert, charge = charge, free = free, fresh_from = fresh_from,
  }
end
