
-- ── the long way: everything else ─────────────────────────────────────────────────────────────────────────────────────

-- What this call knows: the limits with what was used of them (S[1] ...), and whether there was a state, whether it must
-- be written (changed), and all of it (relaid).
local S = {
  false, false,
  now = 0, from = 0, slack = 0, there = false, changed = false, relaid = false, born = 0, learning = 0, cut = 0,
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
