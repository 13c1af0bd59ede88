
-- ── the long way: the state in parts ─────────────────────────────────────────────────────────────
--
-- needs: layout.lua, `slack` (call.lua)

-- state[1] ... state[#state] are the limits, with what was used of them. The last of them may be
-- paused (set_quota.lua): they count and refuse nothing. Each is a table with the fields of its record,
-- and with these (`new_limit`, ledger.lua):
--   bytes     what states it: kind, count, window and capacity (layout.lua, LIMIT)
--   n         how many entries it has
--   space     for how many entries its region has space
--   rule      the functions of its kind (ledger.lua lists them)
--   base      where its region begins in the string
--   ours      whether this call states it
--   list      its entries, once they are read (bucket, fixed window)
--   dirty     whether its entries have changed
--   external  its external usage, if any
--
-- A table grows when it gets a new field. So fields that are set later begin as 0 or false, and
-- `state` begins with places for two limits. With more than 16 fields it would be twice as large. So
-- these begin as nil, and few calls set them:
--   cold_advance     the functions that `cold_advance` (advance.lua) has made
--   cold_set_quota   those that `cold_set_quota` (set_quota.lua) has made
--   quota            the set quota, or its end (set_quota.lua)
--   call_version     the quota version of the call
--   is_outdated      whether the limits of the call are those of a set quota that has ended
--   pace             the pace of the part (src/limit/lending.rs), if the key is the part of a class
--   borrows          the percentage of each limit that the caller may borrow, if it borrows
--   has_new_version  whether this call changes the quota version of the state
local state = {
  false, false,
  limiting = 0, -- how many limits are not paused
  now = 0, -- the logical time
  earliest = 0, -- the first moment at which no hold forbids a permit
  slack = slack, -- the transit slack of the caller, in microseconds
  existed = false, -- whether there was a state
  changed = false, -- whether it must be written
  must_rewrite = false, -- whether all of it must be written, because a region grows or moves
  made_at = 0, recovering_until = 0, hold_is_cut = 0, -- as in the head; `hold_is_cut` is 0 or 1
  returned = false, -- the list of returned slots, sorted by slot (src/limit/returned.rs)
  returned_space = 0, -- as in the head
  returned_base = 0, -- where the returned slots begin in the string
  cold = false, -- the functions that `cold` (ledger.lua) has made, if a call needed them
  cold_external = false, -- those that `cold_external` (external.lua) has made
}
state[1], state[2] = nil, nil

-- Returns the limit with these bytes among the first `to` limits, if there is one.
local function find_limit(to, bytes)
  for i = 1, to do
    if state[i].bytes == bytes then return state[i] end
  end
end

-- Returns until when a limit applies: two windows and a second after a call last stated it. The record
-- may be half a window behind. The same is in short.lua, for parts.
local function in_force_until(limit)
  return limit.last_stated + math.floor(limit.window * 5 / 2) + 1000000
end

-- The delayed permits of buckets, the uses of fixed windows and the returned slots are short lists. They
-- are read and written whole. An entry of a list has `size` bytes of a format. It is read into a table
-- with the given `fields`. A record that few keys have is read and packed as a list of one entry.

-- Returns the list of the n entries that begin at `at`.
local function unpack_list(bytes, at, n, format, size, fields)
  local list = {}
  for i = 1, n do
    local values, entry = { struct.unpack(format, bytes, at + (i - 1) * size) }, {}
    for k = 1, #fields do
      entry[fields[k]] = values[k]
    end
    list[i] = entry
  end
  return list
end

-- Reads the list of the n entries that begin at `base` in the string.
local function read_list(base, n, format, size, fields)
  local bytes = n > 0 and redis.call('GETRANGE', key, base, base + n * size - 1)
  return unpack_list(bytes, 1, n, format, size, fields)
end

-- Packs a list.
local function pack_list(list, format, fields)
  local parts = {}
  for i = 1, #list do
    local values = {}
    for k = 1, #fields do
      values[k] = list[i][fields[k]]
    end
    parts[i] = struct.pack(format, unpack(values))
  end
  return table.concat(parts)
end

-- Returns the delayed permits of a bucket, or the uses of a fixed window.
local function entries(limit)
  if not limit.list then
    limit.list = read_list(limit.base, limit.n, limit.rule.entry, limit.rule.size, limit.rule.fields)
  end
  return limit.list
end

-- Packs the returned slots.
local function pack_returned()
  return pack_list(state.returned, RETURNED, { 'slot', 'stamp', 'units' })
end
