
-- ── the short way ────────────────────────────────────────────────────────────────────────────────────────────────────
--
-- Most calls want permits of sliding windows at once, and get them or are refused. It decides as the long way does, which
-- follows and decides everything: whatever is unusual leaves for it (break), before anything is written.

repeat
  if operation ~= LEASE or need_count ~= 1 or return_count + charge_count + left_count > 0 or ahead > 0 or hold_left > 0
    or #s ~= HEAD_SIZE + RECORD_SIZE * limit_count then break end
  local format, account_count, pooled, pool_room, incarnation, writes, born, learning, offset, last, expires, held,
    releases = struct.unpack(HEAD, s)
  local now = raw + offset
  if format ~= PLAIN or account_count ~= limit_count or pooled > 0 or now < last or now < learning or now < held
    or hold_releases > releases then break end
  local off = now - seen - since
  if known ~= 0 and seen > 0 and (known ~= incarnation or known_writes > writes or off > CLOCK_TOLERANCE + on_way
    or off < -CLOCK_TOLERANCE) then break end

  local cost, permits = struct.unpack('<I4I4', ARG, at + 16 * limit_count)
  if permits > MOST_PERMITS then break end
  local units, stamp, base, unusual = cost * permits, now + life + slack, #s, cost == 0
  local wait, limit, fresh, kept, records, pushed, asserts, left_over = 0, NONE, now, now, '', nil, false, NEVER
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
      if free - units < left_over then left_over = free - units end
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
    return struct.pack(REPLY, VERSION, REFUSED, incarnation, writes, now, kept - now, wait, 0, 0, releases, limit.kind,
      limit.count, limit.window, limit.capacity, 0, 0, 0, 0, 0, 0, 0)
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
  redis.call('SETRANGE', KEYS[1], 0, struct.pack(HEAD, PLAIN, limit_count, 0, pool_room, incarnation, writes + 1, born,
    learning, offset, now, expires, held, releases) .. records)
  return struct.pack(REPLY_WITH_ONE, VERSION, GRANTED, incarnation, writes + 1, now, left, 0, left_over, 0, releases,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, cost, permits, 0, stamp - now)
until true
