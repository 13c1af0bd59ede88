
-- ── the short way: permits of sliding windows and buckets, now or not at all ─────────────────────
--
-- Twin: src/limit/window.rs and src/limit/bucket.rs; window.lua and bucket.lua with main.lua
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), all of call.lua
--
-- Most calls need permits of sliding windows and buckets now. This file grants them as main.lua
-- would, or refuses them because of a window. If anything is unusual, it writes nothing, and
-- main.lua decides the call. Unusual are, for example, returned permits, fixed windows, external
-- usage, a set quota that the caller does not know, a hold, coarse chunks, slots booked ahead, and permits that are of use later.
--
-- This file repeats the arithmetic of window.lua, bucket.lua and time.lua without functions,
-- because a function costs 50 ns in each call. Those files explain the arithmetic.

if operation == LEASE and not moment and demand_count == 1 and return_count + charge_count + has_remaining == 0 and prefetch_most == 0
  and hold_left == 0 and #head >= head_size and (not lends or lends == OWNS) then
  local state_format, record_count, returned_count, returned_space, incarnation, writes, made_at, recovering_until, offset, last_write,
    expires, held_until, releases = struct.unpack(HEAD, head)
  local now = server_time + offset
  -- How far the logical time is ahead of what the caller expects. main.lua also allows a thousandth
  -- of `since`.
  local deviation = now - seen - since
  local cost, permits, earliest = struct.unpack(CALL_DEMAND, call, pos + LIMIT_SIZE * limit_count)
  -- Whether the limits of the call count as stated. Those of a set quota need not: they apply anyway.
  local states_limits, is_known = true, state_format == FORMAT and record_count == limit_count
  if quota_version > 0 then
    local kind, version, ends, its_life, _, limiting = struct.unpack(QUOTA_RECORD, head, head_size - RECORD_SIZE + 1)
    is_known = state_format == FORMAT and record_count == limit_count + 1 and kind == QUOTA and now < ends
      and version == quota_version and limiting == limit_count
    -- main.lua renews the quota of an operator.
    if version % 4 == 1 and 2 * (ends - now) < its_life then is_known = false end
    states_limits = version % 2 == 0
  end
  if is_known and earliest == 0 and returned_count == 0 and permits <= MOST_PERMITS and cost > 0
    and now >= last_write and now >= recovering_until and now >= held_until and hold_releases <= releases
    and (known_incarnation == 0 or seen == 0 or (known_incarnation == incarnation and known_writes <= writes
      and deviation <= CLOCK_TOLERANCE + on_way and deviation >= -CLOCK_TOLERANCE)) then
    -- `region` is where the entries of the limit of the loop begin.
    local units, stamp, region = cost * permits, now + life + slack, head_size
    -- If a limit refuses, `wait` is the time until it would grant. `remember_until` is the moment
    -- from which a new state would grant the same, if this call is refused. `is_restated` is set if
    -- a record is so old that it has to note that the call stated its limit.
    local wait, refusing, remember_until, is_restated, is_unusual = 0, nil, now, false, false
    -- If all limits grant: `fresh_from` is the moment from which a new state would grant the same.
    -- `records` are the new records. `chunks` is a linked list of those to write, each with a place
    -- in the string and its bytes. `free_after` are the units that are free after the grant.
    local fresh_from, records, chunks, free_after = now, '', nil, NEVER
    -- Of a part: until when its limits apply.
    local in_force_until = now

    for i = 1, limit_count do
      local record = HEAD_SIZE + RECORD_SIZE * (i - 1) + 1
      local asked = string.sub(call, pos + LIMIT_SIZE * (i - 1), pos + LIMIT_SIZE * i - 1)
      local kind, count, window, capacity = struct.unpack(LIMIT, asked)
      if kind == BUCKET then
        -- The pace of a part counts permits of its owner, and does not limit them.
        local is_pace = lends and i == limit_count
        local limit, last_stated, n, space, full_at, early, newest, young_from, _, unit, ticks, old_from, young =
          struct.unpack(BUCKET_RECORD, head, record)
        -- How far the bucket is from full, in ticks. It is full `early` ticks before `full_at`.
        local missing = full_at > now and (full_at - now) * ticks - early or 0
        if limit ~= asked or n > 0 or not is_pace and (cost > capacity or capacity - math.ceil(missing / unit) < units) then
          is_unusual = true
          break
        end
        if states_limits and now - last_stated > window / 2 then
          last_stated, is_restated = lends and now + STATED_AHEAD or now, true
        end
        if lends then in_force_until = math.max(in_force_until, last_stated + math.floor(window * 5 / 2) + 1000000) end
        if full_at > remember_until then remember_until = full_at end

        if wait == 0 then
          if stamp >= full_at then full_at, early = stamp, 0 end
          local whole = math.ceil((units * unit - early) / ticks)
          full_at, early = full_at + whole, early + whole * ticks - units * unit
          local latest = stamp > newest and stamp or newest
          if (full_at - latest) * ticks - early >= (young + units) * unit then
            young = young + units
          else
            old_from, young_from, young = young_from, newest >= young_from and newest + 1 or young_from, units
          end
          local free = capacity - math.ceil(((full_at - now) * ticks - early) / unit)
          if free < 0 then free = 0 end
          if free < free_after and not is_pace then free_after = free end
          if full_at > fresh_from then fresh_from = full_at end
          records = records .. struct.pack(BUCKET_RECORD, limit, last_stated, 0, space, full_at, early, latest, young_from,
            NEVER, unit, ticks, old_from, young)
        end
        region = region + space * DELAYED_SIZE
      else
        local limit, last_stated, n, space, total, fine_units, coarse_count, first, cursor_index, _, oldest, oldest_units,
          newest, newest_units = struct.unpack(WINDOW_RECORD, head, record)
        if limit ~= asked or kind ~= WINDOW or coarse_count > 0 or cursor_index > 0 or cost > count or n == 0
          or stamp < newest then
          is_unusual = true
          break
        end
        if newest + window > remember_until then remember_until = newest + window end

        -- Chunks that are older than the window leave the log.
        while n > 0 and oldest + window <= now do
          n, total, fine_units, first = n - 1, total - oldest_units, fine_units - oldest_units, first + 1
          if n == 1 then
            oldest, oldest_units = newest, newest_units
          elseif n > 1 then
            local from = region + first % space * CHUNK_SIZE
            oldest, oldest_units = struct.unpack(CHUNK, redis.call('GETRANGE', key, from, from + CHUNK_SIZE - 1))
          end
        end
        if states_limits and now - last_stated > window / 2 then
          last_stated, is_restated = lends and now + STATED_AHEAD or now, true
        end
        if lends then in_force_until = math.max(in_force_until, last_stated + math.floor(window * 5 / 2) + 1000000) end

        local free = count - total
        if free < cost then
          -- The call is refused until the oldest chunk leaves the window. If that frees too few
          -- units, or if the caller can wait that long, main.lua looks for the slot.
          local left = oldest + window - now
          if cost - free > oldest_units or left <= latest then
            is_unusual = true
            break
          end
          if left > wait then
            wait, refusing = left, limit
          end
        elseif wait == 0 then
          if free < units or n == space then
            -- A part of the permits has a later slot, or the ring has to grow.
            is_unusual = true
            break
          end
          if n > 0 and (newest == stamp or newest_units < math.floor((count + 99) / 100)
            and (n < 2 or stamp - newest <= window / 4)) then
            newest_units = newest_units + units
          else
            -- Until now, the newest chunk was in the record only.
            if n > 0 then
              chunks = {
                at = region + (first + n - 1) % space * CHUNK_SIZE, bytes = struct.pack(CHUNK, newest, newest_units), next = chunks,
              }
            end
            n, newest_units = n + 1, units
          end
          if n == 1 then
            oldest, oldest_units = stamp, newest_units
          end
          if free - units < free_after then free_after = free - units end
          records = records .. struct.pack(WINDOW_RECORD, limit, last_stated, n, space, total + units, fine_units + units, 0,
            first % space, 0, 0, oldest, oldest_units, stamp, newest_units)
          if stamp + window > fresh_from then fresh_from = stamp + window end
        end
        region = region + space * CHUNK_SIZE
      end
    end

    if in_force_until > fresh_from then fresh_from = in_force_until end
    if in_force_until > remember_until then remember_until = in_force_until end
    if is_unusual then
      -- main.lua decides.
    elseif wait == 0 then
      while chunks do
        redis_write('SETRANGE', key, chunks.at, chunks.bytes)
        chunks = chunks.next
      end
      -- The clocks of server and callers may run at speeds that differ by a thousandth.
      local left = fresh_from - now
      local needed = server_time + left + math.floor(left / 1000) + 1000000
      if needed > expires then
        expires = needed + SPARE_LIFE
        redis_write('PEXPIRE', key, math.floor((expires - server_time) / 1000) + 1)
      end
      redis_write('SETRANGE', key, '0', struct.pack(HEAD, FORMAT, record_count, 0, returned_space, incarnation, writes + 1,
        made_at, recovering_until, offset, now, expires, held_until, releases) .. records)
      return struct.pack(REPLY_WITH_SEGMENT, FORMAT, GRANTED, incarnation, writes + 1, now, left, 0, free_after, 0, releases,
        NO_LIMIT, NO_LIMIT, 0, 0, 0, 1, cost, permits, 0, life, stamp - now), GRANTED, 0
    elseif not is_restated then
      -- A refusal writes nothing. If it has to record that the call stated a limit, main.lua
      -- decides.
      return struct.pack(REPLY, FORMAT, REFUSED, incarnation, writes, now, remember_until - now, wait, 0, 0, releases,
        refusing, NO_LIMIT, 0, 0, 0, 0), REFUSED
    end
  end
end
