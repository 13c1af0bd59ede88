
-- ── a sliding window: a log of stamps (src/limit/window.rs) ──────────────────────────────────────────────────────────

local MOST_COARSE, MOST_FINE = 48, 204

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

local function window_advance(w)
  local gone = now - w.window
  while w.n > 0 and stamp_of(w, 0) <= gone do
    pop_oldest(w)
  end
  if w.floor <= gone then w.floor = 0 end
end

-- The stamp of the unit that is number `rank` of the oldest.
local function seek(w, rank)
  local index, before = w.index, w.before
  while before >= rank do
    index = index - 1
    before = before - count_of(w, index)
  end
  local count = count_of(w, index)
  while before + count < rank do
    index, before = index + 1, before + count
    count = count_of(w, index)
  end
  w.index, w.before = index, before
  return stamp_of(w, index)
end

local function window_first_slot(w, from, cost)
  local others = w.count - cost
  if others < 0 then others = 0 end
  local leaving, last = w.total - others, w.floor
  if leaving >= 1 then
    last = seek(w, leaving)
  elseif last == 0 then
    return from
  end
  last = last + w.window
  return last > from and last or from
end

local function window_room(w, slot)
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

local function window_free(w)
  if w.floor > 0 and w.floor + w.window > now then return 0 end
  local free = w.count - w.total
  return free > 0 and free or 0
end

-- Both move the shorter side.
local function insert_chunk(w, i, stamp, count)
  if w.n + 1 > w.room then
    load_all(w)
    relaid = true
  end
  if w.n - i <= i then
    for k = w.n, i + 1, -1 do
      put(w, k, stamp_of(w, k - 1), count_of(w, k - 1))
    end
    -- The newest so far was in the record only.
    if i == w.n and i > 0 then
      put(w, i - 1, stamp_of(w, i - 1), count_of(w, i - 1))
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

local function coarsen(w)
  local twice = 2 * w.count
  while w.coarse < w.n and (w.fine > twice or w.n - w.coarse > MOST_FINE) do
    local coarse = w.coarse
    local count = count_of(w, coarse)
    if not (w.fine - count >= twice or w.n - coarse > MOST_FINE) then break end
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

local function window_insert(w, stamp, units)
  local size, n = floor((w.count + 99) / 100), w.n
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
  else
    insert_chunk(w, i, stamp, units)
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
  coarsen(w)
end

-- Joins a chunk that has become small with the next. Answers where to go on.
local function join_next(w, i)
  local count = count_of(w, i)
  if count > 0 then
    if not (i + 1 < w.n and i + 1 ~= w.coarse and count + count_of(w, i + 1) <= floor((w.count + 99) / 100)) then
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

local function window_subtract(w, stamp, units)
  if stamp + w.window <= now or (w.floor > 0 and stamp <= w.floor) then return end
  -- The first chunk whose stamp is not earlier.
  local i, beyond = 0, w.n
  while i < beyond do
    local middle = floor((i + beyond) / 2)
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

local function window_fresh_from(w)
  local newest = w.n > 0 and stamp_of(w, w.n - 1) or 0
  if w.floor > newest then newest = w.floor end
  return newest > 0 and newest + w.window or 0
end
