-- Layout: the bytes of everything that the scripts read and write, and every number that Rust and
-- Lua share.
--
-- needs: nothing
--
-- Formats are those of struct.pack: `<` little-endian without padding, `B` one byte, `I2`, `I4` and
-- `I7` unsigned numbers of two, four and seven bytes, `d` a double of eight bytes. The comment
-- above each format lists its fields in order. Times and spans are whole microseconds. A time is a
-- logical time (time.lua) unless the comment says "server's clock". The *server* is the Redis
-- server; the *upstream* receives the requests.
--
-- Rust reads the numbers of this file when it is compiled (src/store/redis/layout.rs). Such a
-- number stands on a line of its own, `local NAME = 1`. src/guide/redis_format.md has the same
-- tables for clients in other languages; change both.

-- ── versions: each once, here ────────────────────────────────────────────────────────────────────

-- Calls and replies about rates and about calls in flight. A client sends its own script, so a
-- script knows one version only.
local CALL_VERSION = 2
-- States of rates. A state has the second or third format only if a release that knows only the
-- formats before it would misread it.
local STATE_FORMAT = 1
local STATE_FORMAT_WITH_PHASE = 2
local STATE_FORMAT_WITH_ADVANCE = 3
-- States of calls in flight.
local IN_FLIGHT_FORMAT = 1
-- Calls, replies and states of registers.
local REGISTER_VERSION = 1

-- Messages have no version. Their first byte names their kind. A process ignores a kind that it
-- does not know. Kind 1 has one meaning on the channel of all stores, and another one on the
-- channel of one store.
--
-- A hold or a release, to all stores. The second kind is a hold that the caller cut. B kind; I7
-- hold; I4 releases. The token of the key follows.
local HOLD_MESSAGE = 1
local CUT_HOLD_MESSAGE = 4
local HOLD_MESSAGE_FIELDS = '<BI7I4'
-- Less of a limit remains than the state knew, to all stores. B kind; I7 writes. The token of the
-- key follows.
local REMAINING_MESSAGE = 5
local REMAINING_MESSAGE_FIELDS = '<BI7'
-- A register was changed, to one store or all. B kind; I7 version of the register. Its name and its
-- value follow.
local REGISTER_MESSAGE = 2
local REGISTER_MESSAGE_FIELDS = '<BI7'
-- A holder of calls in flight has new slots, or others wait, to one store. B kind; I7 incarnation;
-- I7 changes; I7 holder; I7 number; I7 granted; B others wait.
local IN_FLIGHT_MESSAGE = 1
local IN_FLIGHT_MESSAGE_FIELDS = '<BI7I7I7I7I7B'

-- ── numbers in calls and replies ─────────────────────────────────────────────────────────────────

-- Operations of a call about rates; a call about calls in flight is a claim or a peek. LEASE_LATER
-- is a lease whose demands state from when on their permits are of use. The last demand of a peek is
-- the request that it asks about; the others are booked before it, and nothing is written.
local LEASE = 1
local PEEK = 2
local RETURN = 3
local HOLD = 4
local RELEASE = 5
local LEASE_LATER = 6
local CLAIM = 1

-- Statuses. Added to the status of a lease: SHARED if other clients use a limit too, CUT if the
-- hold was cut, LAST if the lease is one of a joint request and its key allows the request last.
local GRANTED = 0
local REFUSED = 1
local RECOVERING = 2
local UNSURE = 3
local SHARED = 4
local CUT = 8
local LAST = 16
-- The status of a claim if PUBLISH failed. The holders that should have been notified must poll.
local NOT_PUBLISHED = 2

-- Kinds of limits, and EXTERNAL and ADVANCE, which are kinds of records only. A new kind of limit
-- needs a number that none of them has. `read_records` (main.lua) refuses kinds that are larger than
-- ADVANCE.
local WINDOW = 1
local BUCKET = 2
local FIXED = 3
local EXTERNAL = 4
local ADVANCE = 5

-- Numbers of Lua are exact up to here, 2^53. As a wait it means never.
local NEVER = 9007199254740992
-- The largest I4. As the fewest units left in a record of external usage: no statement was made.
local LARGEST_I4 = 4294967295

-- The most permits of one call: more would keep other clients waiting for the server.
local MOST_PERMITS = 2000
-- How far the server's clock may be from what the caller expects, in microseconds. A thousandth of
-- the age of the reply that the caller remembers is added.
local CLOCK_TOLERANCE = 250000

-- ── a call about rates, and its reply ────────────────────────────────────────────────────────────

-- B version; B operation; I7 random number; I7 I7 I7 incarnation, writes and time of the last
-- reply; I7 its age; I7 on way; I7 I7 server's clock in an UNSURE reply, and the age of that reply;
-- I7 units granted before; I7 transit slack; I7 boundary guard; I7 latest wait; I7 life; I4 most
-- units to prefetch; I7 their life; I7 hold; I4 releases; B hold is cut; B limits; I2 demands; I2
-- returns; B charges; B remaining.
local CALL = '<BBI7I7I7I7I7I7I7I7I7I7I7I7I7I4I7I7I4BBI2I2BB'
local CALL_SIZE = 123
-- Where some of these fields begin, from 1: the operation, the most units to prefetch, limits and
-- demands.
local CALL_OPERATION_AT = 2
local CALL_PREFETCH_AT = 94
local CALL_LIMITS_AT = 117
local CALL_DEMANDS_AT = 118
-- B kind; I4 count; I7 window; I4 capacity, 0 unless it is a bucket.
local CALL_LIMIT = '<BI4I7I4'
local CALL_LIMIT_SIZE = 16
-- I4 cost; I4 permits.
local CALL_DEMAND = '<I4I4'
local CALL_DEMAND_SIZE = 8
-- Of LEASE_LATER: I4 cost; I4 permits; I7 how long after now a permit is of use at the earliest.
local CALL_LATER_DEMAND = '<I4I4I7'
local CALL_LATER_DEMAND_SIZE = 15
-- I7 slot; I7 stamp; I7 units.
local CALL_RETURN = '<I7I7I7'
-- I7 age; I7 units.
local CALL_CHARGE = '<I7I7'
-- B I4 I7 I4 the limit; I7 units; I7 until the reset; B flags (1 steady, 2 urgent); I7 age; I4
-- refused; I7 valid for; B forget.
local CALL_REMAINING = '<BI4I7I4I7I7BI7I4I7B'

-- B version; B status; I7 incarnation; I7 writes; I7 now; I7 remember; I7 wait; I7 free; I7 hold;
-- I4 releases; B I4 I7 I4 the limit that refused; B I4 I7 I4 a limit that the call does not have;
-- I4 units prefetched; I7 their span; I2 segments.
local REPLY = '<BBI7I7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2'
local REPLY_SIZE = 100
-- Where the status begins, from 1.
local REPLY_STATUS_AT = 2
-- I4 cost; I4 permits; I7 wait until the slot; I7 span from slot to stamp.
local SEGMENT = '<I4I4I7I7'
-- A reply and its only segment.
local REPLY_WITH_SEGMENT = '<BBI7I7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2I4I4I7I7'
-- The reply to a joint request: B version; B status. Then for each key: I2 the size of its reply,
-- and the reply.
local JOINT_REPLY = '<BB'
local JOINT_PART = '<I2'
-- B version; B status; I7 free; I7 wait; I7 hold; I4 releases; B hold is cut; I7 recovering for; B
-- limits.
local PEEK_REPLY = '<BBI7I7I7I4BI7B'
-- B kind; I4 count; I7 window; I4 capacity; I7 used; I7 free; I7 reserved for other clients; I7 wait.
local PEEK_LIMIT = '<BI4I7I4I7I7I7I7'

-- ── the state of rates: head, records, a region of entries for each limit, advance bookings,
--    returned slots ──────────────────────────────────────────────────────────────────────────────

-- B format; B records; B returned slots; B room for returned slots; I7 incarnation; I7 writes; I7
-- made at, server's clock or logical time; I7 recovering until, even, plus 1 if the hold was cut; d
-- offset of the logical time from the server's clock; I7 time of the last write; I7 expiry,
-- server's clock; I7 held until; I4 releases.
local HEAD = '<BBBBI7I7I7I7dI7I7I7I4'
local HEAD_SIZE = 65

-- A record for each limit, for each external usage, and for the advance bookings. Shorter ones are
-- filled with zeros.
local RECORD_SIZE = 90

-- All records of limits begin so: B kind; I4 count; I7 window; I4 capacity, 0 unless it is a
-- bucket; I7 boundary guard of the caller that added it, which no rule reads; I7 when a call last
-- stated it; I2 entries; I2 room for entries.
--
-- A sliding window, then: I7 units; I7 units in fine chunks; I2 coarse chunks; I2 place of the
-- oldest chunk in the ring; I7 floor (the newest stamp that left the log early, 0 for none); I2
-- index of the search cursor; I7 units before it; I7 I4 the oldest chunk; I7 I4 the newest chunk.
-- window.lua explains the fields.
local WINDOW_RECORD = '<BI4I7I4I7I7I2I2I7I7I2I2I7I2I7I7I4I7I4'
-- An entry is a chunk: I7 stamp; I4 units. The ring is read in blocks of eight.
local CHUNK = '<I7I4'
local CHUNK_SIZE = 11
local CHUNK_BLOCK = '<I7I4I7I4I7I4I7I4I7I4I7I4I7I4I7I4'
local CHUNK_BLOCK_SIZE = 88

-- A bucket, then: I7 I4 full at; I7 I4 base; I7 I4 refundable, NEVER for no bound; I7 queued from,
-- NEVER for none; I7 I7 I2 zeros. A moment of a bucket is I7, whole microseconds, and I4, a
-- remainder in microseconds divided by the count. src/limit/bucket.rs explains the fields.
local BUCKET_RECORD = '<BI4I7I4I7I7I2I2I7I4I7I4I7I4I7I7I7I2'
-- An entry is a delayed permit: it has a later slot than the bucket requires, because another limit
-- delayed it. I7 slot; I4 units; I7 I4 full at, before the permit; I7 I4 full at, after it; I7
-- queued from.
local DELAYED = '<I7I4I7I4I7I4I7'
local DELAYED_SIZE = 40

-- A fixed window, then: I7 number of the first window that is open; I7 phase; six I7 zeros.
-- fixed.lua explains the fields.
local FIXED_RECORD = '<BI4I7I4I7I7I2I2I7I7I7I7I7I7I7I7'
-- An entry is the use of one window: I7 number of the window; I7 units.
local WINDOW_USE = '<I7I7'
local WINDOW_USE_SIZE = 14

-- External usage of a limit: B kind; I4 count; I7 window; I4 capacity; B kind of the limit; I7
-- ends; I4 seen; I4 expected; I4 refused; I4 fewest left; I4 granted then; B log is complete; I7
-- stated at; I7 valid until; I7 confirmed until; d shortfall, may be negative; I7 shortfall until;
-- I7 counted until. src/limit/external.rs explains the fields.
local EXTERNAL_RECORD = '<BI4I7I4BI7I4I4I4I4I4BI7I7I7dI7I7'

-- The advance bookings, in the last record: B kind; I2 bookings; I7 the latest stamp, 0 if it is not
-- stated; I7 the longest time from slot to stamp, or a longer one.
local ADVANCE_RECORD = '<BI2I7I7'
-- An advance booking: I7 first slot; I7 last slot; I7 stamp; I7 units. src/limit/advance.rs explains
-- the fields.
local ADVANCE_BOOKING = '<I7I7I7I7'
local ADVANCE_BOOKING_SIZE = 28

-- A returned slot: I7 slot; I7 stamp; I7 units.
local RETURNED = '<I7I7I7'
local RETURNED_SIZE = 21

-- ── calls in flight ──────────────────────────────────────────────────────────────────────────────

-- B version; B operation; I7 random number; I7 I7 I7 incarnation, changes and time of the last
-- reply; I7 its age; I7 on way; I7 I7 server's clock in an UNSURE reply, and the age of that reply;
-- I7 store (its random number, which names its channel); I7 holder; I7 number of the claim; I4
-- limit; I4 slots in use; I4 slots wanted in addition; I7 granted seen; I7 time to live.
local CLAIM_CALL = '<BBI7I7I7I7I7I7I7I7I7I7I7I4I4I4I7I7'
-- B version; B status; I7 incarnation; I7 changes; I7 now; I7 number; I7 granted; B others wait; I7
-- until the first other claim expires, 0 for never; I7 recovering for.
local CLAIM_REPLY = '<BBI7I7I7I7I7BI7I7'
-- B version; B status; I4 in use; I4 free.
local CLAIM_PEEK_REPLY = '<BBI4I4'

-- The state. B format; I2 holders; I2 batches; I7 incarnation; I7 changes; I7 made at; d offset of
-- the logical time from the server's clock; I7 time of the last write; I7 recovering until.
local IN_FLIGHT_HEAD = '<BI2I2I7I7I7dI7I7'
local IN_FLIGHT_HEAD_SIZE = 48
-- I7 store; I7 holder; I7 number of its last claim; I4 limit; I4 slots taken; I7 slots ever
-- granted; B it knows that others wait; I7 claim expires.
local HOLDER = '<I7I7I7I4I4I7BI7'
local HOLDER_SIZE = 44
-- I2 index of the holder, from 1; I4 waiters.
local BATCH = '<I2I4'
local BATCH_SIZE = 6

-- ── registers ────────────────────────────────────────────────────────────────────────────────────

-- B version; B whether to change it; I7 version of the register that the caller saw; I7 time to
-- live.
local REGISTER_CALL = '<BBI7I7'
-- B version; B whether it was changed; I7 version of the register; I7 its age. The value follows
-- unless it was changed.
local REGISTER_REPLY = '<BBI7I7'
-- The state. B version; I7 version of the register; I7 changed at, server's clock. The value
-- follows.
local REGISTER_HEAD = '<BI7I7'
local REGISTER_HEAD_SIZE = 15

-- Reads the server's clock, in microseconds since the Unix epoch. This clock may be set, so
-- time.lua makes the logical time from it.
--
-- needs: nothing

local server_time = redis.call('TIME')
server_time = server_time[1] * 1000000 + server_time[2]

-- Decides about the permits of one key. This file reads the call. Then short.lua decides, or else
-- main.lua does.
--
-- Twin: src/limit/ledger.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua)
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the call, packed; the reply is packed too (layout.lua, src/guide/redis_format.md)
-- ARGV[2]  for a hold, a release or an urgent statement of the upstream: the channel of all stores
-- ARGV[3]  with ARGV[2]: the token that names the key to them
--
-- For each call, Redis makes every function of the script anew. That takes 50 ns for each function,
-- and more for each variable that it shares with others. The files follow from this:
--
-- - short.lua, which decides most calls, has no functions.
-- - Functions that few calls need are *cold*: `cold` and `cold_external` make them when a call
--   needs them.
-- - The variables that functions share are fields of one table, `state` (state.lua).

-- How much longer than necessary the time to live of a key is, in microseconds, so that few grants
-- have to extend it.
local SPARE_LIFE = 2000000
local NO_LIMIT = { kind = 0, count = 0, window = 0, capacity = 0 }

-- The head of the call (layout.lua, CALL). `seen` is the time in the last reply, and `since` is how
-- long ago that reply arrived. `server_seen` and `server_since` are the same for an UNSURE reply.
-- `slack`, `guard`, `latest` (the longest wait for a slot), `life` and `hold_left` are spans. The
-- limits of the call begin at `pos`.
local call = ARGV[1]
local version, operation, random, known_incarnation, known_writes, seen, since, on_way, server_seen, server_since,
  granted_before, slack, guard, latest, life, prefetch_most, prefetch_life, hold_left, hold_releases, hold_is_cut, limit_count,
  demand_count, return_count, charge_count, remaining_count, pos = struct.unpack(CALL, call)
if version ~= CALL_VERSION then
  return redis.error_reply('TOLLGATE format ' .. version .. ' of calls is unknown, this script understands ' .. CALL_VERSION)
end
-- The head of the state and a record for each limit of the call; empty if there is no state.
local head = redis.call('GETRANGE', KEYS[1], 0, HEAD_SIZE + RECORD_SIZE * limit_count - 1)

-- ── the short way: permits of sliding windows and buckets, now or not at all ─────────────────────
--
-- Twin: src/limit/window.rs and src/limit/bucket.rs; window.lua and bucket.lua with main.lua
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), all of call.lua
--
-- Most calls need permits of sliding windows and buckets now. This file grants them as main.lua
-- would, or refuses them because of a window. If anything is unusual, it writes nothing, and
-- main.lua decides the call. Unusual are, for example, returned permits, fixed windows, external
-- usage, a hold, coarse chunks, slots booked ahead, and permits that are of use later.
--
-- This file repeats the arithmetic of window.lua, bucket.lua and time.lua without functions,
-- because a function costs 50 ns in each call. Those files explain the arithmetic.

if operation == LEASE and demand_count == 1 and return_count + charge_count + remaining_count == 0 and prefetch_most == 0
  and hold_left == 0 and #head == HEAD_SIZE + RECORD_SIZE * limit_count then
  local format, record_count, returned_count, returned_room, incarnation, writes, made_at, recovering_until, offset, last_write,
    expires, held_until, releases = struct.unpack(HEAD, head)
  local now = server_time + offset
  -- How far the logical time is ahead of what the caller expects. main.lua also allows a thousandth
  -- of `since`.
  local deviation = now - seen - since
  local cost, permits = struct.unpack(CALL_DEMAND, call, pos + CALL_LIMIT_SIZE * limit_count)
  if format == STATE_FORMAT and record_count == limit_count and returned_count == 0 and permits <= MOST_PERMITS and cost > 0
    and now >= last_write and now >= recovering_until and now >= held_until and hold_releases <= releases
    and (known_incarnation == 0 or seen == 0 or (known_incarnation == incarnation and known_writes <= writes
      and deviation <= CLOCK_TOLERANCE + on_way and deviation >= -CLOCK_TOLERANCE)) then
    -- `region` is where the entries of the limit of the loop begin.
    local units, stamp, region = cost * permits, now + life + slack, #head
    -- If a limit refuses, `wait` is the time until it would grant. `remember_until` is the moment
    -- from which a new state would grant the same, if this call is refused. `is_restated` is set if
    -- a record is so old that it has to note that the call stated its limit.
    local wait, refusing, remember_until, is_restated, is_unusual = 0, NO_LIMIT, now, false, false
    -- If all limits grant: `fresh_from` is the moment from which a new state would grant the same.
    -- `records` are the new records. `chunks` are those to write, each a place in the string and
    -- its bytes. `free_after` are the units that are free after the grant.
    local fresh_from, records, chunks, free_after = now, '', nil, NEVER

    for i = 1, limit_count do
      local record = HEAD_SIZE + RECORD_SIZE * (i - 1) + 1
      local asked_kind, asked_count, asked_window, asked_capacity =
        struct.unpack(CALL_LIMIT, call, pos + CALL_LIMIT_SIZE * (i - 1))
      if asked_kind == BUCKET then
        local kind, count, window, capacity, record_guard, last_stated, n, room, full_at, full_r, base_at, base_r, refundable,
          refundable_r = struct.unpack(BUCKET_RECORD, head, record)
        -- How far the bucket is from full, in microseconds / count. A moment is `full_at` and
        -- `full_r` / count microseconds. The checks below make sure that all products are exact.
        local missing = full_at > now and (full_at - now) * count + full_r or 0
        if kind ~= BUCKET or asked_count ~= count or asked_window ~= window or asked_capacity ~= capacity or n > 0
          or cost > capacity or (capacity + 1) * window + (life + slack) * count >= NEVER or missing >= NEVER
          or capacity - math.ceil(missing / window) < units then
          is_unusual = true
          break
        end
        if now - last_stated > window / 2 then
          last_stated, is_restated = now, true
        end
        -- The first whole microsecond at which the bucket is full.
        local fresh = full_r > 0 and full_at + 1 or full_at
        if fresh > remember_until then remember_until = fresh end

        if wait == 0 then
          if stamp > full_at or (stamp == full_at and full_r == 0) then
            full_at, full_r, base_at, base_r, refundable, refundable_r = stamp, 0, stamp, 0, NEVER, 0
          elseif full_at - stamp < refundable or (full_at - stamp == refundable and full_r < refundable_r) then
            refundable, refundable_r = full_at - stamp, full_r
          end
          local whole = math.floor(units * window / count)
          full_at, full_r = full_at + whole, full_r + units * window - whole * count
          if full_r >= count then
            full_at, full_r = full_at + 1, full_r - count
          end
          local free = capacity - math.ceil(((full_at - now) * count + full_r) / window)
          if free < 0 then free = 0 end
          if free < free_after then free_after = free end
          fresh = full_r > 0 and full_at + 1 or full_at
          if fresh > fresh_from then fresh_from = fresh end
          records = records .. struct.pack(BUCKET_RECORD, BUCKET, count, window, capacity, record_guard, last_stated, 0,
            room, full_at, full_r, base_at, base_r, refundable, refundable_r, NEVER, 0, 0, 0)
        end
        region = region + room * DELAYED_SIZE
      else
        local kind, count, window, capacity, record_guard, last_stated, n, room, total, fine_units, coarse_count, first,
          floor, cursor_index, _, oldest, oldest_units, newest, newest_units = struct.unpack(WINDOW_RECORD, head, record)
        if kind ~= WINDOW or asked_kind ~= WINDOW or asked_count ~= count or asked_window ~= window
          or coarse_count > 0 or floor > 0 or cursor_index > 0 or cost > count or n == 0 or stamp < newest then
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
            local from = region + first % room * CHUNK_SIZE
            oldest, oldest_units = struct.unpack(CHUNK, redis.call('GETRANGE', KEYS[1], from, from + CHUNK_SIZE - 1))
          end
        end
        if now - last_stated > window / 2 then
          last_stated, is_restated = now, true
        end

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
            wait, refusing = left, { kind = kind, count = count, window = window, capacity = capacity }
          end
        elseif wait == 0 then
          if free < units or n == room then
            -- A part of the permits has a later slot, or the ring has to grow.
            is_unusual = true
            break
          end
          if n > 0 and (newest == stamp or newest_units < math.floor((count + 99) / 100)) then
            newest_units = newest_units + units
          else
            -- Until now, the newest chunk was in the record only.
            if n > 0 then
              chunks = chunks or {}
              chunks[#chunks + 1] = region + (first + n - 1) % room * CHUNK_SIZE
              chunks[#chunks + 1] = struct.pack(CHUNK, newest, newest_units)
            end
            n, newest_units = n + 1, units
          end
          if n == 1 then
            oldest, oldest_units = stamp, newest_units
          end
          if free - units < free_after then free_after = free - units end
          records = records .. struct.pack(WINDOW_RECORD, WINDOW, count, window, 0, record_guard, last_stated, n, room,
            total + units, fine_units + units, 0, first % room, 0, 0, 0, oldest, oldest_units, stamp, newest_units)
          if stamp + window > fresh_from then fresh_from = stamp + window end
        end
        region = region + room * CHUNK_SIZE
      end
    end

    if is_unusual then
      -- main.lua decides.
    elseif wait == 0 then
      if chunks then
        for i = 1, #chunks, 2 do
          redis.call('SETRANGE', KEYS[1], chunks[i], chunks[i + 1])
        end
      end
      -- The clocks of server and callers may run at speeds that differ by a thousandth.
      local left = fresh_from - now
      local needed = server_time + left + math.floor(left / 1000) + 1000000
      if needed > expires then
        expires = needed + SPARE_LIFE
        redis.call('PEXPIRE', KEYS[1], math.floor((expires - server_time) / 1000) + 1)
      end
      redis.call('SETRANGE', KEYS[1], 0, struct.pack(HEAD, STATE_FORMAT, limit_count, 0, returned_room, incarnation, writes + 1,
        made_at, recovering_until, offset, now, expires, held_until, releases) .. records)
      return struct.pack(REPLY_WITH_SEGMENT, CALL_VERSION, GRANTED, incarnation, writes + 1, now, left, 0, free_after, 0, releases,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, cost, permits, 0, stamp - now)
    elseif not is_restated then
      -- A refusal writes nothing. If it has to record that the call stated a limit, main.lua
      -- decides.
      return struct.pack(REPLY, CALL_VERSION, REFUSED, incarnation, writes, now, remember_until - now, wait, 0, 0, releases,
        refusing.kind, refusing.count, refusing.window, refusing.capacity, 0, 0, 0, 0, 0, 0, 0)
    end
  end
end
-- Logical time: the server's clock plus an offset that is kept in the state. If the server's clock
-- is set, the offset changes, so that logical time runs on evenly.
--
-- Twin: src/limit/logical_clock.rs
-- After a change: cargo test --all-features --lib differential
-- needs: CLOCK_TOLERANCE (layout.lua)
--
-- Logical time never goes back. A caller that remembers a reply states the time that it expects:
--
-- - If logical time is earlier than that, the server's clock was set back. The call sets the time
--   to what the caller expects.
-- - If logical time is later than that, either the server's clock was set forward, or the call is
--   late: it is executed late, or its process was suspended. One call alone cannot tell, so it gets
--   the server's clock in an UNSURE reply, and is sent again with it. If the server's clock has
--   advanced since that reply as the caller's clock has, the call is not late. Then the server's
--   clock was set forward before, and the call sets the time to what the caller expects.

-- Returns the logical time of a call, or nil if the call must be sent again with the server's
-- clock. All arguments are in microseconds.
--
-- server_time      the server's clock
-- clock            the server's clock plus the offset of the state
-- last_write       the logical time of the last write
-- expected         the logical time that the caller expects; nil if it remembers no reply
-- age              the age of the reply that the caller remembers
-- on_way           how long that reply and this call may have been on the network
-- server_expected  the server's clock that the caller expects after an UNSURE reply, or nil
local function logical_time(server_time, clock, last_write, expected, age, on_way, server_expected)
  local now = clock
  if expected then
    local tolerance = CLOCK_TOLERANCE + math.floor(age / 1000)
    if now < expected - tolerance then
      now = expected
    -- A state that was written at a later time than the caller expects is newer than what the
    -- caller knows.
    elseif now > expected + tolerance + on_way and expected + tolerance >= last_write then
      local jump = server_expected and server_time - server_expected
      if not jump or jump > tolerance + on_way or jump < -tolerance then return nil end
      now = expected
    end
  end
  return now < last_write and last_write or now
end


-- ── the long way: the state in parts ─────────────────────────────────────────────────────────────
--
-- needs: layout.lua, `slack` (call.lua)

-- state[1] ... state[#state] are the limits, with what was used of them. Each is a table with the
-- fields of its record, and with these:
--   n         how many entries it has
--   room      for how many entries its region has space; the function `room` of a rule is another
--             thing: how many units may leave
--   rule      the functions of its kind (ledger.lua lists them)
--   base      where its region begins in the string
--   ours      whether this call states it
--   list      its entries, once they are read (bucket, fixed window)
--   dirty     whether its entries have changed
--   external  its external usage, if any
--
-- A table grows when it gets a new field. So fields that are set later begin as 0 or false, and
-- `state` begins with places for two limits.
local state = {
  false, false,
  now = 0, -- the logical time
  earliest = 0, -- the first moment at which no hold forbids a permit
  slack = slack, -- the transit slack of the caller, in microseconds
  existed = false, -- whether there was a state
  changed = false, -- whether it must be written
  must_rewrite = false, -- whether all of it must be written, because a region grows or moves
  made_at = 0, recovering_until = 0, hold_is_cut = 0, -- as in the head; `hold_is_cut` is 0 or 1
  returned_count = 0, returned_room = 0, -- as in the head
  returned_base = 0, -- where the returned slots begin in the string
  returned = false, -- the list of returned slots, once it is read
  cold = false, -- the functions that `cold` (ledger.lua) has made, if a call needed them
  cold_external = false, -- those that `cold_external` (external.lua) has made
  cold_advance = false, -- those that `cold_advance` (advance.lua) has made
}
state[1], state[2] = nil, nil

-- The delayed permits of buckets, the uses of fixed windows, the advance bookings and the returned
-- slots are short lists. They are read and written whole. An entry of a list has `size` bytes of a format. It is read into
-- a table with the given `fields`.

-- Reads a list of n entries, which begins at `base`.
local function read_list(base, n, format, size, fields)
  local list = {}
  if n > 0 then
    local bytes = redis.call('GETRANGE', KEYS[1], base, base + n * size - 1)
    for i = 1, n do
      local values, entry = { struct.unpack(format, bytes, (i - 1) * size + 1) }, {}
      for k = 1, #fields do
        entry[fields[k]] = values[k]
      end
      list[i] = entry
    end
  end
  return list
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

-- Returns the returned slots, sorted by slot (src/limit/returned.rs).
local function returned()
  if not state.returned then
    state.returned = read_list(state.returned_base, state.returned_count, RETURNED, RETURNED_SIZE,
      { 'slot', 'stamp', 'units' })
  end
  return state.returned
end

-- Packs the returned slots.
local function pack_returned()
  return pack_list(returned(), RETURNED, { 'slot', 'stamp', 'units' })
end

-- ── a sliding window: a log of stamps ────────────────────────────────────────────────────────────
--
-- Twin: src/limit/window.rs and src/limit/long_log.rs
-- After a change: cargo test --all-features --lib differential
-- short.lua repeats the common case of first_slot, insert and advance.
-- needs: layout.lua, `state` (state.lua)
--
-- The log is a list of chunks, sorted by stamp. A chunk is a stamp, and the units that count with
-- it. src/limit/window.rs explains coarse chunks, fine chunks and the floor.
--
-- In the string, the chunks lie in a ring of `room` places. Here a *place* may be beyond the ring,
-- or negative; place modulo `room` is the place in the ring. Chunk i (from 0, the oldest) has the
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
--   floor                         the newest stamp that left the log early, 0 for none
--   cursor_index, cursor_before   the chunk at which the last search for a slot ended, and the
--                                 units in the chunks before it
--   first_read, end_read          the places of the chunks when the state was read: from
--                                 `first_read` to before `end_read`
--   dirty, dirty_from, dirty_to   the places that have changed since, as keys of a table; the first
--                                 and the last of them

-- Returns the functions of this kind of limit.
local function window_rule()
  -- The most coarse chunks, and the most fine chunks.
  local MOST_COARSE = 48
  local MOST_FINE = 204

  -- Reads the block of a place into limit.ring. Chunks that are there already stay: they may have
  -- changed.
  local function fetch(limit, place)
    local block = place % limit.room
    block = block - block % 8
    local from = limit.base + block * CHUNK_SIZE
    local s = redis.call('GETRANGE', KEYS[1], from, from + CHUNK_BLOCK_SIZE - 1)
    local values = { struct.unpack(CHUNK_BLOCK, s) }
    local ring, first = limit.ring, limit.first_read
    for i = 0, 7 do
      local place = first + (block + i - first) % limit.room
      if place < limit.end_read and not ring[2 * place] then
        ring[2 * place], ring[2 * place + 1] = values[2 * i + 1], values[2 * i + 2]
      end
    end
  end

  -- Returns the stamp of chunk i.
  local function stamp_of(limit, i)
    local place = 2 * (limit.first + i)
    local stamp = limit.ring[place]
    if not stamp then
      fetch(limit, place / 2)
      stamp = limit.ring[place]
    end
    return stamp
  end

  -- Returns the units of chunk i.
  local function units_of(limit, i)
    local place = 2 * (limit.first + i)
    if not limit.ring[place] then fetch(limit, place / 2) end
    return limit.ring[place + 1]
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

  -- Removes the oldest chunk. Returns its stamp.
  local function pop_oldest(limit)
    local stamp, units = stamp_of(limit, 0), units_of(limit, 0)
    limit.first, limit.n, limit.total = limit.first + 1, limit.n - 1, limit.total - units
    if limit.coarse_count > 0 then
      limit.coarse_count = limit.coarse_count - 1
    else
      limit.fine_units = limit.fine_units - units
    end
    if limit.cursor_index > 0 then
      limit.cursor_index, limit.cursor_before = limit.cursor_index - 1, limit.cursor_before - units
    end
    return stamp
  end

  -- Returns the functions that only long queues and returned permits need. Makes them first.
  local cold_functions
  local function cold()
    if cold_functions then return cold_functions end
    cold_functions = {}

    -- Reads the whole ring.
    local function load_all(limit)
      for i = 0, limit.n - 1 do
        stamp_of(limit, i)
      end
    end

    -- Inserts a chunk before chunk i; moves the shorter side of the ring.
    function cold_functions.insert_chunk(limit, i, stamp, units)
      if limit.n + 1 > limit.room then
        load_all(limit)
        state.must_rewrite = true
      end
      if limit.n - i <= i then
        for k = limit.n, i + 1, -1 do
          put(limit, k, stamp_of(limit, k - 1), units_of(limit, k - 1))
        end
      else
        limit.first = limit.first - 1
        for k = 0, i - 1 do
          put(limit, k, stamp_of(limit, k + 1), units_of(limit, k + 1))
        end
      end
      limit.n = limit.n + 1
      put(limit, i, stamp, units)
    end

    -- Removes chunk i; moves the shorter side of the ring.
    local function remove_chunk(limit, i)
      if i < limit.n / 2 then
        for k = i, 1, -1 do
          put(limit, k, stamp_of(limit, k - 1), units_of(limit, k - 1))
        end
        limit.first = limit.first + 1
      else
        for k = i, limit.n - 2 do
          put(limit, k, stamp_of(limit, k + 1), units_of(limit, k + 1))
        end
      end
      limit.n = limit.n - 1
    end

    -- Bounds the log. Merges the oldest fine chunks into coarse ones until two conditions are met:
    -- the fine chunks would have less than twice the count without their oldest, and are at most
    -- MOST_FINE. If there are then more than MOST_COARSE coarse chunks, the oldest leave the log.
    function cold_functions.coarsen(limit)
      local twice = 2 * limit.count
      while limit.coarse_count < limit.n do
        local coarse = limit.coarse_count
        local units = units_of(limit, coarse)
        if limit.fine_units - units < twice and limit.n - coarse <= MOST_FINE then break end
        limit.fine_units = limit.fine_units - units
        local last = coarse > 0 and units_of(limit, coarse - 1)
        if last and last + units <= limit.count then
          put(limit, coarse, stamp_of(limit, coarse), units + last)
          remove_chunk(limit, coarse - 1)
          if limit.cursor_index > coarse then
            limit.cursor_index = limit.cursor_index - 1
          else
            limit.cursor_index, limit.cursor_before = 0, 0
          end
        else
          limit.coarse_count = coarse + 1
        end
      end
      while limit.coarse_count > MOST_COARSE do
        local oldest = pop_oldest(limit)
        if oldest > limit.floor then limit.floor = oldest end
      end
    end

    -- Joins a chunk that has become small with the next, or removes an empty one. Returns the index
    -- of the next chunk.
    local function join_next(limit, i)
      local units = units_of(limit, i)
      if units > 0 then
        local is_last = i + 1 >= limit.n or i + 1 == limit.coarse_count
        if is_last or units + units_of(limit, i + 1) > math.floor((limit.count + 99) / 100) then
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
    function cold_functions.charge(limit, _, stamp, units)
      if stamp + limit.window > state.now then
        limit.rule.insert(limit, stamp, stamp, units < limit.count and units or limit.count)
      end
    end

    -- Takes back units of a stamp that were not used. They are in chunks with that stamp or a later
    -- one, and leave the first of these chunks.
    function cold_functions.subtract(limit, _, stamp, units)
      if stamp + limit.window <= state.now or (limit.floor > 0 and stamp <= limit.floor) then return end
      -- Finds the first chunk whose stamp is not earlier.
      local i, beyond = 0, limit.n
      while i < beyond do
        local middle = math.floor((i + beyond) / 2)
        if stamp_of(limit, middle) < stamp then i = middle + 1 else beyond = middle end
      end
      limit.cursor_index, limit.cursor_before = 0, 0
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
    function cold_functions.used(limit)
      return limit.total
    end

    -- Returns a lower and an upper bound of the units whose stamps are not later than `stamp`. The
    -- first chunk with a later stamp may have some of them.
    function cold_functions.used_until(limit, stamp)
      local least, most = limit.total, limit.total
      for i = limit.n - 1, 0, -1 do
        if stamp_of(limit, i) <= stamp then break end
        most = least
        least = least - units_of(limit, i)
      end
      return least, most
    end

    -- Makes a log without chunks.
    function cold_functions.new(limit)
      limit.total, limit.fine_units, limit.coarse_count, limit.first, limit.floor = 0, 0, 0, 0, 0
      limit.cursor_index, limit.cursor_before = 0, 0
      limit.first_read, limit.end_read, limit.ring, limit.room = 0, 0, {}, 8
    end

    -- Calls `with` with the stamp and the units of each chunk, the oldest first.
    function cold_functions.for_each(limit, with)
      for i = 0, limit.n - 1 do
        with(stamp_of(limit, i), units_of(limit, i))
      end
    end

    -- Returns all chunks as bytes, from place 0 on, and makes the ring large enough for them.
    function cold_functions.region(limit)
      load_all(limit)
      local parts, ring = {}, {}
      for i = 0, limit.n - 1 do
        ring[2 * i], ring[2 * i + 1] = stamp_of(limit, i), units_of(limit, i)
        parts[i + 1] = struct.pack(CHUNK, ring[2 * i], ring[2 * i + 1])
      end
      limit.first, limit.ring = 0, ring
      while limit.room < limit.n do
        limit.room = limit.room * 2
      end
      return table.concat(parts)
    end

    return cold_functions
  end

  -- Reads a record.
  local function read(s, from)
    local kind, count, window, capacity, guard, last_stated, n, room, total, fine_units, coarse_count, first, floor,
      cursor_index, cursor_before, oldest, oldest_units, newest, newest_units = struct.unpack(WINDOW_RECORD, s, from)
    local last = first + n - 1
    return {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, last_stated = last_stated, n = n,
      room = room, total = total, fine_units = fine_units, coarse_count = coarse_count, first = first, floor = floor,
      cursor_index = cursor_index, cursor_before = cursor_before, first_read = first, end_read = last + 1, dirty = false,
      dirty_from = 0, dirty_to = 0, base = 0, rule = 0, ours = false,
      ring = {
        [2 * last] = newest, [2 * last + 1] = newest_units, [2 * first] = oldest, [2 * first + 1] = oldest_units,
      },
    }
  end

  -- Packs the record.
  local function record(limit)
    local oldest, oldest_units, newest, newest_units = 0, 0, 0, 0
    local last = limit.n - 1
    if last >= 0 then
      oldest, oldest_units = stamp_of(limit, 0), units_of(limit, 0)
      newest, newest_units = stamp_of(limit, last), units_of(limit, last)
    end
    return struct.pack(WINDOW_RECORD, WINDOW, limit.count, limit.window, limit.capacity, limit.guard, limit.last_stated,
      limit.n, limit.room, limit.total, limit.fine_units, limit.coarse_count, limit.first % limit.room, limit.floor,
      limit.cursor_index, limit.cursor_before, oldest, oldest_units, newest, newest_units)
  end

  -- Writes the chunks that changed, except the newest, which is in the record.
  local function write(limit)
    if not limit.dirty then return end
    local from, parts, next_place, room = nil, '', nil, limit.room
    local last = limit.first + limit.n - 2
    local dirty_from = limit.dirty_from > limit.first and limit.dirty_from or limit.first
    local dirty_to = limit.dirty_to < last and limit.dirty_to or last
    for place = dirty_from, dirty_to do
      if limit.dirty[place] then
        if from and (place % room == 0 or place ~= next_place) then
          redis.call('SETRANGE', KEYS[1], limit.base + from * CHUNK_SIZE, parts)
          from, parts = nil, ''
        end
        from = from or place % room
        parts = parts .. struct.pack(CHUNK, limit.ring[2 * place], limit.ring[2 * place + 1])
        next_place = place + 1
      end
    end
    if from then
      redis.call('SETRANGE', KEYS[1], limit.base + from * CHUNK_SIZE, parts)
    end
  end

  -- Forgets chunks that are older than the window.
  local function advance(limit)
    local gone = state.now - limit.window
    while limit.n > 0 and stamp_of(limit, 0) <= gone do
      pop_oldest(limit)
    end
    if limit.floor <= gone then limit.floor = 0 end
  end

  -- Returns the first moment, not before `from`, at which `cost` units may leave, and `reserved`
  -- units stay free for other clients. For this, `leaving` units have to leave the log. `last` is
  -- the stamp of the last of them.
  local function first_slot(limit, from, cost, _, reserved)
    cost = cost + reserved
    local leaving, last = limit.total - (limit.count > cost and limit.count - cost or 0), limit.floor
    if leaving >= 1 then
      -- Finds the stamp of the unit that is number `leaving` from the oldest. The search goes on
      -- from the last one.
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
      last = stamp_of(limit, index)
    elseif last == 0 then
      return from
    end
    last = last + limit.window
    return last > from and last or from
  end

  -- Returns how many units may leave at `slot`, which is not before the first slot of one unit.
  local function room_at(limit, slot)
    local index, before, gone = limit.cursor_index, limit.cursor_before, slot - limit.window
    while index > 0 and stamp_of(limit, index - 1) > gone do
      index = index - 1
      before = before - units_of(limit, index)
    end
    while index < limit.n and stamp_of(limit, index) <= gone do
      before = before + units_of(limit, index)
      index = index + 1
    end
    local room = limit.count - (limit.total - before)
    return room > 0 and room or 0
  end

  -- Returns how many units may leave now. `advance` has removed what is older than the window.
  local function free(limit)
    if limit.floor > 0 and limit.floor + limit.window > state.now then return 0 end
    return limit.count > limit.total and limit.count - limit.total or 0
  end

  -- Adds units of a stamp to the log. They join a chunk with the same stamp, or else a neighbour
  -- that is not full, or else they become a chunk.
  local function insert(limit, _, stamp, units)
    local chunk_size, n = math.floor((limit.count + 99) / 100), limit.n
    local i = n
    while i > 0 and stamp_of(limit, i - 1) > stamp do
      i = i - 1
    end
    if i > 0 and stamp_of(limit, i - 1) == stamp then
      i = i - 1
      put(limit, i, stamp, units_of(limit, i) + units)
    elseif i < n and units_of(limit, i) < chunk_size then
      put(limit, i, stamp_of(limit, i), units_of(limit, i) + units)
    elseif i > 0 and units_of(limit, i - 1) < chunk_size then
      i = i - 1
      put(limit, i, stamp, units_of(limit, i) + units)
    elseif i == n and n < limit.room then
      -- Until now, the newest chunk was in the record only.
      if n > 0 then put(limit, n - 1, stamp_of(limit, n - 1), units_of(limit, n - 1)) end
      limit.n = n + 1
      put(limit, n, stamp, units)
    else
      cold().insert_chunk(limit, i, stamp, units)
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
      cold().coarsen(limit)
    end
  end

  -- Returns the first moment at which the log is empty.
  local function fresh_from(limit)
    local newest = limit.n > 0 and stamp_of(limit, limit.n - 1) or 0
    if limit.floor > newest then newest = limit.floor end
    return newest > 0 and newest + limit.window or 0
  end

  return {
    size = CHUNK_SIZE, cold = cold, read = read, record = record, write = write, advance = advance, first_slot = first_slot,
    room = room_at, insert = insert, free = free, fresh_from = fresh_from,
  }
end

-- ── a token bucket ───────────────────────────────────────────────────────────────────────────────
--
-- Twin: src/limit/bucket.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `entries` (state.lua)
--
-- The bucket keeps the moment at which it will be full again, `full_at`. src/limit/bucket.rs
-- explains this and the other fields.
--
-- Moments and spans are exact: two numbers m and r, with r < count, stand for m + r / count
-- microseconds. Names such as `full_at` and `full_r`, or q and r, are such a pair. Rust keeps both
-- as one wide integer, microseconds times count.

-- Returns the functions of this kind of limit.
local function bucket_rule()
  local MOST_DELAYED = 32
  -- The greatest age that is assumed of a statement of the upstream, in microseconds.
  local LONGEST_AGO = 5000000

  -- Divides and returns quotient and remainder, exactly, although p / by may be rounded.
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

  -- Returns a * b / by and its remainder, exactly, for a, b and by up to about 2^30.
  local function product(a, b, by)
    if a * b < NEVER then
      return divide(a * b, by)
    end
    local high = math.floor(a / 32768)
    local q1, r1 = divide(high * b, by)
    local q0, r0 = divide(r1 * 32768 + (a - high * 32768) * b, by)
    return q1 * 32768 + q0, r0
  end

  -- Returns how long `units` take to be refilled.
  local function refill(limit, units)
    local whole, rest = divide(limit.window, limit.count)
    local q, r = product(units, rest, limit.count)
    return units * whole + q, r
  end

  -- Returns whether a moment is before another one.
  local function less(q, r, other, other_r)
    return q < other or (q == other and r < other_r)
  end

  -- Returns a moment or span minus another one.
  local function minus(limit, q, r, other, other_r)
    q, r = q - other, r - other_r
    if r < 0 then
      q, r = q - 1, r + limit.count
    end
    return q, r
  end

  -- Returns a moment or span plus another one.
  local function plus(limit, q, r, other, other_r)
    q, r = q + other, r + other_r
    if r >= limit.count then
      q, r = q + 1, r - limit.count
    end
    return q, r
  end

  -- Returns the first moment, in whole microseconds, at which the bucket holds `units`.
  local function room_for(limit, units)
    local missing = limit.capacity - units
    local q, r = limit.full_at, limit.full_r
    if missing > 0 then
      local ahead, ahead_r = refill(limit, missing)
      q, r = minus(limit, q, r, ahead, ahead_r)
    end
    if q < 0 then return 0 end
    return r > 0 and q + 1 or q
  end

  -- Returns the first moment, not before `from`, at which `cost` units may leave.
  local function first_slot(limit, from, cost)
    local slot = room_for(limit, cost)
    return slot > from and slot or from
  end

  -- Returns how many units may leave at `slot`. The quotient that begins the search for `missing`
  -- may be rounded; the two loops correct it.
  local function room(limit, slot)
    local q, r = limit.full_at - slot, limit.full_r
    if q < 0 then return limit.capacity end
    local missing = math.floor((q * limit.count + r) / limit.window)
    if missing > limit.capacity + 1 then return 0 end
    local span, span_r = refill(limit, missing)
    while less(span, span_r, q, r) do
      missing = missing + 1
      span, span_r = refill(limit, missing)
    end
    while missing > 0 do
      span, span_r = refill(limit, missing - 1)
      if less(span, span_r, q, r) then break end
      missing = missing - 1
    end
    local room = limit.capacity - missing
    return room > 0 and room or 0
  end

  -- Forgets the order of the permits that are booked ahead. From now on none of them is taken back
  -- exactly.
  local function forget_queue(limit)
    limit.queued_from = NEVER
    if limit.n > 0 then
      limit.list, limit.n, limit.dirty = {}, 0, true
    end
  end

  -- Takes the units of a permit out of the bucket. If its slot is later than the bucket requires,
  -- because another limit delayed it, the permit becomes an entry.
  local function insert(limit, slot, stamp, units)
    local before, before_r = limit.full_at, limit.full_r
    local earlier = less(stamp, 0, before, before_r)
    local queued = earlier and room_for(limit, units) == slot
    if earlier then
      local refundable, refundable_r = minus(limit, before, before_r, stamp, 0)
      if less(refundable, refundable_r, limit.refundable, limit.refundable_r) then
        limit.refundable, limit.refundable_r = refundable, refundable_r
      end
    else
      limit.full_at, limit.full_r = stamp, 0
      limit.base_at, limit.base_r = stamp, 0
      limit.refundable, limit.refundable_r = NEVER, 0
    end
    local span, span_r = refill(limit, units)
    limit.full_at, limit.full_r = plus(limit, limit.full_at, limit.full_r, span, span_r)
    if slot <= state.now then
      forget_queue(limit)
    elseif queued then
      if slot < limit.queued_from then limit.queued_from = slot end
    else
      local list = entries(limit)
      list[#list + 1] = {
        slot = slot, units = units, before = before, before_r = before_r,
        after = limit.full_at, after_r = limit.full_r, queued_from = limit.queued_from,
      }
      if #list > MOST_DELAYED then table.remove(list, 1) end
      limit.queued_from, limit.n, limit.dirty = NEVER, #list, true
      if limit.n > limit.room then state.must_rewrite = true end
    end
  end

  -- Returns the first moment at which the bucket is full.
  local function fresh_from(limit)
    return limit.full_r > 0 and limit.full_at + 1 or limit.full_at
  end

  local function advance() end

  -- Returns how many units may leave now.
  local function free(limit)
    return room(limit, state.now)
  end

  -- Reads a record.
  local function read(s, from)
    local kind, count, window, capacity, guard, last_stated, n, room, full_at, full_r, base_at, base_r, refundable,
      refundable_r, queued_from = struct.unpack(BUCKET_RECORD, s, from)
    return {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, last_stated = last_stated, n = n,
      room = room, full_at = full_at, full_r = full_r, base_at = base_at, base_r = base_r, refundable = refundable,
      refundable_r = refundable_r, queued_from = queued_from, base = 0, rule = 0, ours = false, dirty = false, list = false,
    }
  end

  -- Packs the record.
  local function record(limit)
    return struct.pack(BUCKET_RECORD, BUCKET, limit.count, limit.window, limit.capacity, limit.guard, limit.last_stated,
      limit.n, limit.room, limit.full_at, limit.full_r, limit.base_at, limit.base_r, limit.refundable, limit.refundable_r,
      limit.queued_from, 0, 0, 0)
  end

  local rule = {
    entry = DELAYED, size = DELAYED_SIZE,
    fields = { 'slot', 'units', 'before', 'before_r', 'after', 'after_r', 'queued_from' },
    first_slot = first_slot, room = room, insert = insert, fresh_from = fresh_from, advance = advance,
    free = free, read = read, record = record,
  }

  -- Returns the rule with the functions that few calls need.
  function rule.cold()
    if rule.subtract then return rule end

    -- Counts units that were used without a permit. The upstream accepted them, so its bucket had
    -- these units. So they leave the bucket empty at most. If fewer units count for this reason,
    -- earlier permits can no longer be taken back.
    function rule.charge(limit, _, stamp, units)
      local empty, empty_r = refill(limit, limit.capacity)
      empty = state.now + empty
      if less(empty, empty_r, limit.full_at, limit.full_r) then empty, empty_r = limit.full_at, limit.full_r end
      insert(limit, state.now, stamp, units < limit.capacity and units or limit.capacity)
      if less(empty, empty_r, limit.full_at, limit.full_r) then
        limit.full_at, limit.full_r = empty, empty_r
        limit.base_at, limit.base_r = empty, empty_r
        limit.refundable, limit.refundable_r = NEVER, 0
      end
    end

    -- Takes back units that were not used. In full if they are of the last permit that was booked
    -- in order, or of the last delayed one. Any other permit is taken back as far as `refundable`
    -- allows.
    function rule.subtract(limit, slot, stamp, units)
      local span, span_r = refill(limit, units)
      if slot >= limit.queued_from and room_for(limit, 0) == slot then
        limit.full_at, limit.full_r = minus(limit, limit.full_at, limit.full_r, span, span_r)
        return
      end
      if limit.n > 0 then
        local list = entries(limit)
        local delayed = list[#list]
        if delayed.slot == slot and delayed.after == limit.full_at and delayed.after_r == limit.full_r
          and units <= delayed.units then
          delayed.units = delayed.units - units
          delayed.after, delayed.after_r = minus(limit, delayed.after, delayed.after_r, span, span_r)
          limit.full_at, limit.full_r, limit.dirty = delayed.after, delayed.after_r, true
          if delayed.units == 0 then
            limit.full_at, limit.full_r, limit.queued_from = delayed.before, delayed.before_r, delayed.queued_from
            list[#list] = nil
            limit.n = #list
          end
          return
        end
      end
      if less(stamp, 0, limit.base_at, limit.base_r) then return end
      local back, back_r = minus(limit, limit.full_at, limit.full_r, limit.base_at, limit.base_r)
      if back < 0 then back, back_r = 0, 0 end
      if less(span, span_r, back, back_r) then back, back_r = span, span_r end
      if less(limit.refundable, limit.refundable_r, back, back_r) then
        back, back_r = limit.refundable, limit.refundable_r
      end
      limit.full_at, limit.full_r = minus(limit, limit.full_at, limit.full_r, back, back_r)
      if limit.refundable < NEVER then
        limit.refundable, limit.refundable_r = minus(limit, limit.refundable, limit.refundable_r, back, back_r)
      end
      forget_queue(limit)
    end

    -- Takes in a statement of the upstream that was made `ago` microseconds ago: `left` units were
    -- left. From now on the bucket holds at most these and the units refilled since. Returns
    -- whether it held more.
    function rule.see(limit, ago, left)
      local back, rest = divide((ago < LONGEST_AGO and ago or LONGEST_AGO) * limit.count, limit.window)
      local gone = room(limit, state.now) - (left + back + (rest > 0 and 2 or 1))
      if gone > 0 then
        state.changed = true
        insert(limit, state.now, state.now, gone)
      end
      return gone > 0
    end

    -- Returns when a bucket is full again after a permit. Before the permit, it is full at q and r.
    function rule.after(limit, q, r, stamp, units)
      if less(q, r, stamp, 0) then q, r = stamp, 0 end
      local span, span_r = refill(limit, units)
      return plus(limit, q, r, span, span_r)
    end

    -- Returns whether a bucket that is full again at q and r lacks some of `units` at `slot`. They
    -- are at most the capacity.
    function rule.is_short(limit, slot, units, q, r)
      local span, span_r = refill(limit, limit.capacity - units)
      return less(slot + span, span_r, q, r)
    end

    -- Returns how many units are missing now, without the advance bookings.
    function rule.used(limit)
      return limit.capacity - room(limit, state.now)
    end

    -- Makes a full bucket.
    function rule.new(limit)
      limit.full_at, limit.full_r = 0, 0
      limit.base_at, limit.base_r = 0, 0
      limit.refundable, limit.refundable_r = 0, 0
      limit.queued_from = NEVER
      limit.list = {}
    end

    return rule
  end

  return rule
end

-- ── fixed windows, aligned to the epoch ──────────────────────────────────────────────────────────
--
-- Twin: src/limit/fixed.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), `guard` (call.lua), `state` and `entries`
-- (state.lua)
--
-- Windows are numbered: number n begins at n * window - phase in logical time. Logical time ignores
-- a step of the server's clock, but the boundaries follow that clock. So `phase` changes when the
-- clock is set. An entry is a *use*: the number of a window, and the units used in it. Windows
-- before `open_from` take no more units.

-- Returns the functions of this kind of limit.
local function fixed_rule()
  -- The most uses that are kept. If more windows are booked ahead, the earliest of them closes.
  local MOST_WINDOWS = 64
  -- A smaller move of the boundaries is a drift of the clocks, not a step. In microseconds.
  local SMALLEST_STEP = 20000

  -- Returns the number of the window of a moment.
  local function number_of(limit, at)
    return math.floor((at + limit.phase) / limit.window)
  end

  -- Forgets windows that are over.
  local function advance(limit)
    if limit.n > 0 then
      local list, current = entries(limit), number_of(limit, state.now)
      -- The window before the current one is kept, because the current one may begin earlier when
      -- the clock is set.
      while list[1] and list[1].number + 1 < current do
        table.remove(list, 1)
        limit.n, limit.dirty = #list, true
      end
    end
  end

  -- Returns the place of the use of window `number` in the list, and the use. The use is nil if the
  -- window has none.
  local function find_use(limit, number)
    local list = entries(limit)
    for i = 1, #list do
      if list[i].number >= number then
        return i, list[i].number == number and list[i] or nil
      end
    end
    return #list + 1, nil
  end

  -- Returns the units used in window `number`.
  local function units_in(limit, number)
    local _, use = find_use(limit, number)
    return use and use.units or 0
  end

  -- Adds units to a window.
  local function add(limit, number, units)
    local list, i, use = entries(limit), find_use(limit, number)
    if use then
      use.units = use.units + units
    else
      table.insert(list, i, { number = number, units = units })
    end
    while #list > MOST_WINDOWS do
      local closed = table.remove(list, 1).number + 1
      if closed > limit.open_from then limit.open_from = closed end
    end
    limit.n, limit.dirty = #list, true
    if limit.n > limit.room then state.must_rewrite = true end
  end

  -- Moves the boundaries to where the server's clock puts them. A small move is a drift of the
  -- clocks: the units of a window stay in that window. A larger move is a step of the clock: the
  -- units count in each new window that overlaps the old one.
  local function align(limit)
    local phase = (server_time - state.now) % limit.window
    if phase == limit.phase then return end
    -- What is over by the old boundaries is forgotten first, as it may still be in the record of a
    -- state that no call has written since.
    advance(limit)
    local moved, before = math.abs(phase - limit.phase), limit.phase
    if limit.window - moved < moved then moved = limit.window - moved end
    local list, open_from = entries(limit), limit.open_from
    limit.phase, limit.list, limit.n, limit.open_from, limit.dirty = phase, {}, 0, 0, true
    local function overlapped(number)
      local start = number * limit.window - before
      if moved < SMALLEST_STEP then
        local same = number_of(limit, start + math.floor(limit.window / 2))
        return same, same
      end
      return number_of(limit, start), number_of(limit, start + limit.window - 1)
    end
    if open_from > 0 then
      local _, last = overlapped(open_from - 1)
      limit.open_from = last + 1
    end
    for i = 1, #list do
      local first, last = overlapped(list[i].number)
      for number = first, last do
        add(limit, number, list[i].units)
      end
    end
    state.changed = true
  end

  -- Returns the first slot, not before `from`, for `cost` units. The whole life of the permit lies
  -- in one window, and outside the guard of its boundaries. That window has room besides `reserved`
  -- units of other clients, or has no units.
  local function first_slot(limit, from, cost, life, reserved)
    local most = limit.count - reserved > cost and limit.count - reserved or cost
    local list, number, open = entries(limit), number_of(limit, from), limit.window - 2 * guard
    if number < limit.open_from then number = limit.open_from end
    if open < 0 then open = 0 end
    open = open > life and open - life or 0
    local i = find_use(limit, number)
    while true do
      local start, use = number * limit.window - limit.phase + guard, list[i]
      local slot, units = from > start and from or start, 0
      if use and use.number == number then
        units, i = use.units, i + 1
      end
      if limit.rule.booked_in then units = units + limit.rule.booked_in(limit, number) end
      if slot <= start + open and units + cost <= most then
        return slot
      end
      if start >= NEVER then return NEVER end
      number = number + 1
    end
  end

  -- Returns how many units may leave at `slot`.
  local function room(limit, slot)
    local number = number_of(limit, slot)
    if number < limit.open_from then return 0 end
    local room = limit.count - units_in(limit, number)
    return room > 0 and room or 0
  end

  -- Counts units at `slot`.
  local function insert(limit, slot, _, units)
    add(limit, number_of(limit, slot), units)
  end

  -- Counts units that were used without a permit. If they are more than the limit, as many as the
  -- limit count. Units that were used in an earlier window than the current one do not count.
  local function charge(limit, used_at, _, units)
    if number_of(limit, used_at) >= number_of(limit, state.now) then
      add(limit, number_of(limit, used_at), units < limit.count and units or limit.count)
    end
  end

  -- Takes back units that were not used.
  local function subtract(limit, slot, _, units)
    local _, use = find_use(limit, number_of(limit, slot))
    if use then
      use.units = use.units > units and use.units - units or 0
      limit.dirty = true
    end
  end

  -- Returns the end of the last window that has units or is closed.
  local function fresh_from(limit)
    local list, last = entries(limit), limit.open_from
    for i = #list, 1, -1 do
      if list[i].units > 0 then
        if list[i].number + 1 > last then last = list[i].number + 1 end
        break
      end
    end
    return last > 0 and last * limit.window - limit.phase or 0
  end

  -- Returns how many units may leave now.
  local function free(limit)
    return room(limit, state.now)
  end

  -- Returns the units used in the current window.
  local function used(limit)
    return units_in(limit, number_of(limit, state.now))
  end

  -- Makes windows without units.
  local function new(limit)
    limit.open_from, limit.phase, limit.list = 0, (server_time - state.now) % limit.window, {}
  end

  -- Reads a record.
  local function read(s, from)
    local kind, count, window, capacity, record_guard, last_stated, n, room, open_from, phase =
      struct.unpack(FIXED_RECORD, s, from)
    return {
      kind = kind, count = count, window = window, capacity = capacity, guard = record_guard,
      last_stated = last_stated, n = n, room = room, open_from = open_from, phase = phase, base = 0, rule = 0,
      ours = false, dirty = false, list = false,
    }
  end

  -- Packs the record.
  local function record(limit)
    return struct.pack(FIXED_RECORD, FIXED, limit.count, limit.window, limit.capacity, limit.guard, limit.last_stated,
      limit.n, limit.room, limit.open_from, limit.phase, 0, 0, 0, 0, 0, 0)
  end

  local rule = {
    entry = WINDOW_USE, size = WINDOW_USE_SIZE, fields = { 'number', 'units' },
    advance = advance, align = align, first_slot = first_slot, room = room, insert = insert, charge
    = charge, subtract = subtract, number_of = number_of, add = add, booked_in = false, fresh_from = fresh_from, free = free, used = used, new = new, read = read, record =
    record, cold = 0,
  }
  function rule.cold() return rule end
  return rule
end

-- ── external usage: what other clients use of a limit ────────────────────────────────────────────
--
-- Twin: src/limit/external.rs and limit_state.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` (state.lua)
--
-- If the upstream states that more units are gone than this state granted, other clients use the
-- limit, too. The state then reserves units for them. src/limit/external.rs explains how many, and
-- the fields of `limit.external`.

-- Returns the units of a limit that are reserved for other clients at a moment, and when that
-- changes next if no response arrives.
local function reserved_from(limit, at)
  local external, units, quarter = limit.external, 0, math.floor(limit.count / 4)
  local is_confirmed = at < external.confirmed_until
  if at < external.ends then
    units = external.expected
    if not is_confirmed and units > quarter then units = quarter end
    if is_confirmed and external.seen > units then units = external.seen end
  elseif external.log_is_complete == 1 then
    units = external.seen > external.expected and external.seen or external.expected
    if not is_confirmed and units > quarter then units = quarter end
  end
  if at < external.shortfall_until and external.shortfall > units then units = external.shortfall end
  local next_change = NEVER
  if external.shortfall_until > at then next_change = external.shortfall_until end
  if external.confirmed_until > at and external.confirmed_until < next_change then
    next_change = external.confirmed_until
  end
  if external.ends > at and external.ends < next_change then next_change = external.ends end
  return units, next_change
end

-- Returns the units of a limit that are reserved for other clients at a moment.
local function reserved(limit, at)
  local units = reserved_from(limit, at)
  return units
end

-- Returns the moment from which nothing is reserved, if no response arrives.
local function forgotten_from(limit)
  local external = limit.external
  local from, is_stated = external.ends, external.fewest_left < LARGEST_I4 or external.seen > 0
  if is_stated and reserved(limit, external.ends) > 0 then from = external.ends + limit.window end
  if external.shortfall > 0 and external.shortfall_until > from then from = external.shortfall_until end
  return from
end

-- Returns how many of `units` are not reserved for other clients at a moment.
local function unreserved(units, limit, at)
  if limit.external then units = units - reserved(limit, at) end
  return units > 0 and units or 0
end

-- Returns the first moment, not before `from`, at which a limit allows `cost` and the units that
-- are reserved then.
local function first_slot_unreserved(limit, from, cost, life)
  while true do
    local units, next_change = reserved_from(limit, from)
    local slot = limit.rule.first_slot(limit, from, cost, life, units)
    if slot < next_change or next_change == NEVER then return slot end
    from = next_change
  end
end

-- Makes the functions that few calls need.
local function cold_external()
  -- The longest life of a permit, in microseconds. A twentieth of the window applies if that is
  -- longer.
  local LONGEST_LIFE = 50000
  -- The greatest age of a response whose reset counts, in microseconds. A twentieth of the window
  -- applies if that is longer.
  local OLDEST_RESPONSE = 250000

  -- Makes the external usage of a window of which no response is known.
  local function new_external(ends, expected, log_is_complete)
    return {
      ends = ends, seen = 0, expected = expected, refused = 0, fewest_left = LARGEST_I4, granted_then = 0,
      log_is_complete = log_is_complete, stated_at = 0, valid_until = 0, confirmed_until = 0,
      shortfall = 0, shortfall_until = 0, counted_until = 0,
    }
  end

  -- Begins the next window of the upstream, because the last one has ended. Forgets the external
  -- usage if no use is expected.
  local function roll(limit)
    local last, expected = limit.external, 0
    local ends = last.ends + limit.window
    if last.log_is_complete == 1 and state.now < ends then
      expected = limit.count - last.fewest_left
      expected = expected > last.granted_then and expected - last.granted_then or 0
      if last.expected < expected then expected = last.expected end
      if last.seen > expected then expected = last.seen end
    end
    if expected > 0 then
      local external = new_external(ends, expected, 1)
      external.stated_at, external.valid_until = last.stated_at, last.valid_until
      -- The units that were left at the end show what other clients may have used.
      local shown = last.fewest_left < LARGEST_I4 and last.valid_until or 0
      external.confirmed_until = shown > last.confirmed_until and shown or last.confirmed_until
      limit.external = external
    else
      limit.external, state.must_rewrite = nil, true
    end
  end

  -- Takes in a statement of the upstream about a limit of this state: `left` units were left, `ago`
  -- microseconds ago. Returns whether less is allowed than before.
  --
  -- This state has granted `least` to `most` of the units that the upstream may have counted. Their
  -- stamps are not later than `sent`.
  local function see_limit(limit, left, reset_in, steady, urgent, ago, refused, valid_for)
    if limit.kind == BUCKET then return limit.rule.cold().see(limit, ago, left) end
    local least, most
    local longest_life = math.floor(limit.window / 20)
    if longest_life < LONGEST_LIFE then longest_life = LONGEST_LIFE end
    local sent = state.now + longest_life + state.slack
    if limit.kind == WINDOW then
      least, most = limit.rule.cold().used_until(limit, sent)
    else
      least = limit.rule.used(limit)
      most = least
    end
    if state.cold_advance then
      local booked = state.cold_advance.booked_until(limit, sent)
      least, most = least + booked, most + booked
    end
    -- A reset that an older response states does not count, because units may have left the log
    -- since.
    local oldest = math.floor(limit.window / 20)
    if oldest < OLDEST_RESPONSE then oldest = OLDEST_RESPONSE end
    if steady == 0 and ago > oldest then reset_in = 0 end
    local gone, external = limit.count > left and limit.count - left or 0, limit.external
    local resets = reset_in > 0 and state.now + reset_in or nil
    if not external and not (resets and gone > most) and refused == 0 and not urgent then return false end
    local is_steady = steady == 1 and resets
    local ends = is_steady and resets or state.now + limit.window
    -- The log is complete if the state was made before the upstream's window began. A tenth of the
    -- window may be missing. If the statement is not steady, the window that ends now has to be
    -- complete.
    local complete_from = state.made_at + limit.window - math.floor(limit.window / 10)
    local log_is_complete = complete_from <= (is_steady and ends or state.now)
    if not external then
      external = new_external(ends, 0, log_is_complete and 1 or 0)
      limit.external, state.must_rewrite = external, true
    elseif (is_steady or refused > 0) and external.seen == 0 and external.expected == 0 and external.refused == 0 then
      local renewed = new_external(ends, 0, log_is_complete and 1 or 0)
      renewed.stated_at, renewed.valid_until = external.stated_at, external.valid_until
      renewed.shortfall, renewed.shortfall_until = external.shortfall, external.shortfall_until
      renewed.counted_until = external.counted_until
      limit.external, external = renewed, renewed
    end
    local was_reserved = reserved(limit, state.now)

    external.refused = external.refused + refused
    if external.refused > LARGEST_I4 then external.refused = LARGEST_I4 end
    if external.refused > 0 then
      local by_refusals, bound = external.expected + external.refused, limit.count - math.floor(limit.count / 8)
      if by_refusals > bound then by_refusals = bound end
      if by_refusals > external.seen then external.seen = by_refusals end
    end

    local stated_at = state.now > ago and state.now - ago or 0
    local is_newest = stated_at >= external.stated_at
    if is_newest then external.stated_at, external.valid_until = stated_at, state.now + valid_for end
    local counted = most > external.refused and most - external.refused or 0
    local of_others = gone > counted and gone - counted or 0
    if stated_at + limit.window >= external.ends then
      if least > LARGEST_I4 then least = LARGEST_I4 end
      if left < external.fewest_left or (left == external.fewest_left and least < external.granted_then) then
        external.fewest_left, external.granted_then = left, least
      end
      if is_steady then
        if is_newest and gone < external.seen then external.seen = gone end
        if of_others > external.seen then external.seen = of_others end
      end
    end
    if (refused > 0 or (is_steady and of_others > 0)) and state.now + valid_for > external.confirmed_until then
      external.confirmed_until = state.now + valid_for
    end

    if is_newest then
      external.shortfall, external.shortfall_until, external.counted_until = 0, 0, 0
      if resets and resets > state.now then
        external.shortfall, external.counted_until = gone - most, sent
        external.shortfall_until = resets < state.now + valid_for and resets or state.now + valid_for
      end
    end
    state.changed = true
    return reserved(limit, state.now) > was_reserved
  end

  -- Forgets what is reserved for other clients.
  local function forget_others(limit)
    if limit.external then
      limit.external, state.must_rewrite, state.changed = nil, true, true
    end
  end

  -- Takes in a statement of the upstream. Returns whether less is allowed than before, and whether
  -- the statement is urgent: then other processes are notified at once.
  local function see(kind, count, window, capacity, left, reset_in, flags, ago, refused, valid_for, forget)
    local steady, urgent = flags % 2, flags >= 2
    for i = 1, #state do
      local limit = state[i]
      if limit.count == count and limit.window == window and limit.kind == kind and limit.capacity == capacity then
        if forget == 1 then
          forget_others(limit)
          return false, false
        end
        return see_limit(limit, left, reset_in, steady, urgent, ago, refused, valid_for), urgent
      end
    end
    return false, false
  end

  -- Reads a record and attaches it to its limit.
  local function read(bytes, from)
    local _, count, window, capacity, of_kind, ends, seen, expected, refused, fewest_left, granted_then, log_is_complete,
      stated_at, valid_until, confirmed_until, shortfall, shortfall_until, counted_until =
      struct.unpack(EXTERNAL_RECORD, bytes, from)
    local external = {
      ends = ends, seen = seen, expected = expected, refused = refused, fewest_left = fewest_left,
      granted_then = granted_then, log_is_complete = log_is_complete, stated_at = stated_at, valid_until = valid_until,
      confirmed_until = confirmed_until, shortfall = shortfall, shortfall_until = shortfall_until,
      counted_until = counted_until,
    }
    for i = 1, #state do
      local limit = state[i]
      if limit.count == count and limit.window == window and limit.kind == of_kind and limit.capacity == capacity then
        limit.external = external
      end
    end
  end

  -- Packs the external usage of all limits. Returns the records, and their number.
  local function records()
    local bytes, n = '', 0
    for i = 1, #state do
      local limit, external = state[i], state[i].external
      if external then
        local record = struct.pack(EXTERNAL_RECORD, EXTERNAL, limit.count, limit.window, limit.capacity, limit.kind,
          external.ends, external.seen, external.expected, external.refused, external.fewest_left, external.granted_then,
          external.log_is_complete, external.stated_at, external.valid_until, external.confirmed_until, external.shortfall,
          external.shortfall_until, external.counted_until)
        bytes, n = bytes .. record .. string.rep('\0', RECORD_SIZE - #record), n + 1
      end
    end
    return bytes, n
  end

  state.cold_external = { roll = roll, see = see, forget_others = forget_others, read = read, records = records }
  return state.cold_external
end

-- ── all limits of the key, taken all or nothing ──────────────────────────────────────────────────
--
-- Twin: src/limit/limit_set.rs and ledger.rs; of returned slots src/limit/returned.rs; of `recover`
-- src/limit/recovery.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, state.lua, window_rule, bucket_rule, fixed_rule, external.lua

-- The most limits of one key.
local MOST_LIMITS = 32
-- The most rounds of the search for a slot. Some limits have no slot in common, for example fixed
-- windows with different guards.
local MOST_ROUNDS = 1000
-- By the number of a kind of limit: the function that makes its rule, and its rule once it is made.
--
-- A rule is a table of functions. `limit` is their first argument. Every rule has these:
--   read(s, from), record        unpack and pack the record
--   size                         the bytes of an entry
--   advance                      forgets what is older than the window
--   first_slot(from, cost, life, reserved), room(slot, life)
--                                the first slot of a permit; how many units may leave at a slot
--   insert(slot, stamp, units)   counts the units of a permit
--   free, fresh_from             the units that may leave now; when all use is forgotten
--   cold()                       returns a table with the functions that few calls need:
--     charge, subtract             units that were used without a permit; units that were not used
--     used, new                    the units in use; an empty limit
--
-- Some kinds have more, and the other files ask for the kind to call it:
--   entry, fields                bucket, fixed window: an entry, for `entries` and `pack_list`
--   write, region, for_each, used_until
--                                sliding window: its ring, and its log
--   see                          bucket: a statement of the upstream
--   align                        fixed window: its boundaries
--   number_of, add, booked_in    fixed window: the number of a window, and its units
--   after, is_short              bucket: permits that are replayed
-- If there are advance bookings, `cold_advance` replaces first_slot, room, free and fresh_from.
local makers, rules = { window_rule, bucket_rule, fixed_rule }, {}

-- Returns the functions of a kind of limit.
local function rule_of(kind)
  local rule = rules[kind]
  if not rule then
    rule = makers[kind]()
    rules[kind] = rule
    if state.cold_advance then state.cold_advance.extend(kind, rule) end
  end
  return rule
end

-- Returns the most units that one permit may cost.
local function largest_cost(limit)
  return limit.kind == BUCKET and limit.capacity or limit.count
end

-- Counts units of a permit in every limit.
local function insert(slot, stamp, units)
  state.changed = true
  for i = 1, #state do
    state[i].rule.insert(state[i], slot, stamp, units)
  end
end

-- Returns the first moment, not before `from`, at which every limit allows `cost`, and the limit
-- that was the last to allow it.
local function first_slot(cost, life, from)
  -- `agreed` is how many limits have allowed `slot` since it moved last.
  local slot, last_limit, count, agreed = from, nil, #state, 0
  for _ = 1, MOST_ROUNDS do
    for i = 1, count do
      local limit = state[i]
      local first = limit.external and first_slot_unreserved(limit, slot, cost, life)
        or limit.rule.first_slot(limit, slot, cost, life, 0)
      if first > slot then
        slot, last_limit, agreed = first, limit, 0
      end
      agreed = agreed + 1
      if agreed == count then break end
    end
    if agreed >= count then
      return slot, last_limit
    end
  end
  return NEVER, nil
end

-- Returns the first returned slot, not before `from`, that has `units` left and at least half of
-- `life`, and its index. src/limit/returned.rs says why half.
local function find_returned(units, life, from)
  local list, half = returned(), math.floor(life / 2)
  for i = 1, #list do
    local entry = list[i]
    if entry.slot >= from and entry.units >= units and entry.slot + half + state.slack <= entry.stamp then
      return entry, i
    end
  end
end

-- Packs the head. The lowest bit of `recovering until` says whether the hold was cut.
local function packed_head(record_count, incarnation, writes, offset, expires, held_until, releases)
  local format = STATE_FORMAT
  for i = 1, #state do
    if state[i].kind == FIXED and state[i].phase > 0 then format = STATE_FORMAT_WITH_PHASE end
  end
  if state.cold_advance and state.cold_advance.list[1] then format = STATE_FORMAT_WITH_ADVANCE end
  return struct.pack(HEAD, format, record_count, state.returned_count, state.returned_room, incarnation, writes,
    state.made_at, state.recovering_until + state.hold_is_cut, offset, state.now, expires, held_until, releases)
end

-- Returns how many units may leave now: the fewest of all limits.
local function free_now()
  if state.earliest > state.now then return 0 end
  local least = NEVER
  for i = 1, #state do
    local limit = state[i]
    local free = unreserved(limit.rule.free(limit), limit, state.now)
    if free < least then least = free end
  end
  return least
end

-- Makes the functions that few calls need.
local function cold()
  -- The most returned slots that are kept apart.
  local MOST_RETURNED = 32

  -- Notes that units of a limit were not used. If the newest response was compared with them as
  -- used, other clients used as many.
  local function note_unused(limit, stamp, units)
    local usage = limit.external
    if usage and state.now < usage.shortfall_until and stamp <= usage.counted_until then
      usage.shortfall = usage.shortfall + units
    end
  end

  -- Takes the units of a permit out of every limit, or out of the advance bookings. If joined
  -- bookings may contain the permit, the units stay: the limits may not have them.
  local function subtract(slot, stamp, units)
    if state.cold_advance then
      units = units - state.cold_advance.erase(slot, stamp, units)
      if units == 0 or state.cold_advance.may_contain(slot, stamp) then return end
    end
    state.changed = true
    for i = 1, #state do
      local limit = state[i]
      limit.rule.cold().subtract(limit, slot, stamp, units)
      note_unused(limit, stamp, units)
    end
  end

  -- Keeps a returned slot for the next caller. Its units stay in the limits. If there are too many
  -- returned slots, the last of them is removed, and its units leave the limits.
  local function keep(slot, stamp, units)
    local list, i = returned(), 1
    while list[i] and (list[i].slot < slot or (list[i].slot == slot and list[i].stamp < stamp)) do
      i = i + 1
    end
    local other, last = list[i], nil
    if other and other.slot == slot and other.stamp == stamp then
      other.units = other.units + units
    else
      table.insert(list, i, { slot = slot, stamp = stamp, units = units })
    end
    if #list > MOST_RETURNED then
      last = table.remove(list)
    end
    state.returned_count, state.changed = #list, true
    if state.returned_count > state.returned_room then state.must_rewrite = true end
    if last then subtract(last.slot, last.stamp, last.units) end
  end

  -- Takes back a permit that was not used. An advance booking is erased. If the slot of another
  -- permit lies ahead and nothing is reserved for other clients then, the slot is kept for the next
  -- caller. Otherwise its units leave the limits.
  local function take_back(slot, stamp, units)
    if units == 0 or stamp < slot then return end
    if state.cold_advance then
      units = units - state.cold_advance.erase(slot, stamp, units)
      if units == 0 then return end
    end
    local is_shared = false
    for i = 1, #state do
      if state[i].external and reserved(state[i], slot) > 0 then is_shared = true end
    end
    if slot <= state.now or slot < state.earliest or is_shared then
      subtract(slot, stamp, units)
    else
      keep(slot, stamp, units)
    end
  end

  -- Removes the returned slots that no request can use any more. Their units leave the limits.
  local function drain()
    local list = returned()
    while list[1] and list[1].slot < state.earliest do
      local passed = table.remove(list, 1)
      state.returned_count = #list
      subtract(passed.slot, passed.stamp, passed.units)
    end
  end

  -- Removes all returned slots, because they were granted when more seemed to be left. Their units
  -- leave the limits.
  local function drop_returned()
    local list = returned()
    while #list > 0 do
      local last = table.remove(list)
      state.returned_count = #list
      subtract(last.slot, last.stamp, last.units)
    end
  end

  -- Counts units in every limit that were used without a permit, at least `age` microseconds ago.
  local function charge(age, units)
    if units == 0 then return end
    state.changed = true
    local used_at = state.now > age and state.now - age or 0
    for i = 1, #state do
      state[i].rule.cold().charge(state[i], used_at, used_at + state.slack, units)
    end
  end

  -- Books up to `most` of the units that are free now, but at most a quarter of the free units.
  -- Returns how many, and their span.
  local function prefetch(most, life)
    local count = math.floor(free_now() / 4)
    if count > most then count = most end
    if count == 0 or first_slot(count, life, state.earliest) > state.now then return 0, 0 end
    insert(state.now, state.now + life + state.slack, count)
    return count, life + state.slack
  end

  -- Adds a limit that is new to this key. It starts with the use that the other limits remember:
  -- with the log of the longest sliding window, or else with the largest number of units in use.
  local function add(kind, count, window, capacity, guard)
    local rule = rule_of(kind)
    local limit = {
      kind = kind, count = count, window = window, capacity = capacity, guard = guard, last_stated = state.now, n = 0,
      room = 0, base = 0, rule = rule,
    }
    local longest, most_used = nil, 0
    for i = 1, #state do
      local other = state[i]
      if other.kind == WINDOW and (not longest or other.window >= longest.window) then longest = other end
      local used = other.rule.cold().used(other)
      if used > most_used then most_used = used end
    end
    rule.cold().new(limit)
    if longest then
      local now = state.now
      -- Each chunk is inserted as if its stamp were now.
      longest.rule.cold().for_each(longest, function(stamp, units)
        state.now = stamp
        rule.insert(limit, stamp, stamp, units)
      end)
      state.now = now
    elseif most_used > 0 then
      local largest = largest_cost(limit)
      rule.insert(limit, state.now, state.now + state.slack, most_used < largest and most_used or largest)
    end
    rule.advance(limit)
    state[#state + 1] = limit
    -- A state that is new is written only if the call uses something of it.
    state.must_rewrite, state.changed = true, state.changed or state.existed
    return limit
  end

  -- Returns until when a limit applies: two windows and a second after a call last stated it. The
  -- record may be half a window behind.
  local function in_force_until(limit)
    return limit.last_stated + math.floor(limit.window * 5 / 2) + 1000000
  end

  -- Forgets the limits that no longer apply. If too many are left, forgets limits that this call
  -- does not state, beginning with the one that would end first. The next caller that states such a
  -- limit adds it again.
  local function retain()
    local kept = 0
    for i = 1, #state do
      local limit = state[i]
      state[i] = nil
      if in_force_until(limit) >= state.now then
        kept = kept + 1
        state[kept] = limit
      else
        state.must_rewrite, state.changed = true, true
      end
    end
    while #state > MOST_LIMITS do
      local first = nil
      for i = 1, #state do
        if not state[i].ours and (not first or in_force_until(state[i]) < in_force_until(state[first])) then first = i end
      end
      if not first then return end
      table.remove(state, first)
      state.must_rewrite, state.changed = true, true
    end
  end

  -- Begins the recovery of a lost state: nothing is granted until the permits of the lost state are
  -- a window old. `granted` is how many units the caller was granted of the lost state.
  --
  -- Twin: src/limit/recovery.rs
  --
  -- A process uses permits of the lost state only for a time after its last reply, its *trust*: a
  -- quarter of the longest window, at least SHORTEST_TRUST. So the recovery lasts the longest
  -- window and the trust, but no longer than LONGEST_RECOVERY and the trust. A limit that remembers
  -- permits for longer than that is charged with `granted`.
  local function recover(granted)
    -- Both in microseconds.
    local LONGEST_RECOVERY = 60000000
    local SHORTEST_TRUST = 1500000
    local longest = 0
    for i = 1, #state do
      local limit = state[i]
      local memory = limit.window
      if limit.kind == BUCKET and limit.capacity > limit.count then
        memory = math.ceil(limit.window / limit.count * limit.capacity)
      end
      if limit.ours and memory > longest then longest = memory end
      if granted > 0 and memory > LONGEST_RECOVERY then
        limit.rule.cold().charge(limit, state.now, state.now + state.slack, granted)
      end
    end
    if longest > LONGEST_RECOVERY then longest = LONGEST_RECOVERY end
    local trust = math.ceil(longest / 4)
    local recovered_at = state.made_at + longest + (trust > SHORTEST_TRUST and trust or SHORTEST_TRUST)
    recovered_at = recovered_at + recovered_at % 2
    if recovered_at > state.recovering_until then state.recovering_until = recovered_at end
    state.changed = true
  end

  -- Writes the whole state in one string of its exact size, so that later writes into it need no
  -- more memory.
  local function rewrite(incarnation, writes, offset, expires, held_until, releases, time_to_live)
    local records, regions = {}, {}
    local function padded(bytes, n, room, size)
      while room < n do
        room = room == 0 and 8 or room * 2
      end
      return bytes .. string.rep('\0', room * size - #bytes), room
    end
    for i = 1, #state do
      local limit, bytes = state[i], nil
      if limit.kind == WINDOW then
        bytes = limit.rule.cold().region(limit)
      else
        bytes = pack_list(entries(limit), limit.rule.entry, limit.rule.fields)
      end
      regions[i], limit.room = padded(bytes, limit.n, limit.room, limit.rule.size)
      records[i] = limit.rule.record(limit)
    end
    local records_of_external, shared = '', 0
    if state.cold_external then records_of_external, shared = state.cold_external.records() end
    local record_of_advance, advance_count, advance = '', 0, ''
    if state.cold_advance then
      record_of_advance, advance_count = state.cold_advance.record()
      advance = state.cold_advance.region()
    end
    records[#state + 1] = records_of_external .. record_of_advance
    regions[#state + 1] = advance
    regions[#state + 2], state.returned_room = padded(pack_returned(), state.returned_count, state.returned_room, RETURNED_SIZE)
    redis.call('SET', KEYS[1], packed_head(#state + shared + advance_count, incarnation, writes, offset, expires, held_until, releases)
      .. table.concat(records) .. table.concat(regions), 'PX', time_to_live)
  end

  state.cold = {
    note_unused = note_unused, take_back = take_back, drain = drain, drop_returned = drop_returned, charge = charge, prefetch = prefetch, add = add,
    retain = retain, recover = recover, rewrite = rewrite,
  }
  return state.cold
end

-- ── advance bookings: permits that are of use later ──────────────────────────────────────────────
--
-- Twin: src/limit/advance.rs and window_sweep.rs; of buckets and fixed windows src/limit/bucket.rs
-- and fixed.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, `state` and `pack_list` (state.lua), rules (ledger.lua)
--
-- A permit whose slot is later than the first free slot is kept in a list beside the use of the
-- limits. src/limit/advance.rs has the rule and its proof. Few keys have such permits, so
-- all functions of this file are cold: `cold_advance` makes them when a call needs them. It then
-- replaces the functions of the rules that have to count the bookings.

-- Makes the functions that few calls need.
local function cold_advance()
  -- A slot that is at most this much later than the first free slot goes into the logs, in
  -- microseconds. A fiftieth of the shortest window applies if that is longer.
  local TOLERANCE = 10000
  -- The most advance bookings of a key.
  local MOST_ADVANCE = 256
  -- The most fixed windows between the slots of bookings that join.
  local MOST_JOINED_WINDOWS = 8
  -- The bookings, sorted by slot. Most calls need few of them, so a booking is read from `bytes`
  -- when it is needed: until then, `list` has its place there. A booking that has changed has no
  -- place.
  local list, bytes, is_all_read = {}, '', true
  -- The latest stamp. The longest time from slot to stamp, or a longer one.
  local latest_stamp, longest = 0, 0
  -- What neighbours would cost if they joined, by the number of the first one. Only calls that find
  -- the list full know it.
  local costs = nil

  -- Returns booking number i, or nil.
  local function booking_at(i)
    local booking = list[i]
    if type(booking) == 'number' then
      local place = booking
      local slot, last_slot, stamp, units = struct.unpack(ADVANCE_BOOKING, bytes, place)
      booking = { slot = slot, last_slot = last_slot, stamp = stamp, units = units, place = place }
      list[i] = booking
    end
    return booking
  end

  -- Reads all bookings.
  local function read_all()
    if is_all_read then return end
    latest_stamp, longest, is_all_read = 0, 0, true
    for i = 1, #list do
      local booking = booking_at(i)
      if booking.stamp > latest_stamp then latest_stamp = booking.stamp end
      if booking.stamp - booking.slot > longest then longest = booking.stamp - booking.slot end
    end
  end

  -- Returns the number of the first booking whose slot is not before `slot`.
  local function first_from(slot)
    local i, beyond = 1, #list + 1
    while i < beyond do
      local middle = math.floor((i + beyond) / 2)
      if booking_at(middle).slot < slot then i = middle + 1 else beyond = middle end
    end
    return i
  end

  -- Returns whether a booking may count in a window of a limit that a permit with this slot
  -- touches. The stamp of the permit is `length` later.
  local function is_in_reach(limit, slot, length)
    local first = booking_at(1)
    return first and first.slot < slot + limit.window + length
  end

  -- Moves the window (at, at + span] of a limit from where it ends at `slot`, as
  -- src/limit/window_sweep.rs does. With `most`, returns the end of the first window from which on
  -- at most so many units count, until the beginning has moved by the span and `length`. Without
  -- it, returns the most units that count until then.
  local function sweep(limit, slot, length, most)
    local span, at, units = limit.window, slot - limit.window, 0
    local chunk_count, stamps, counts = 0, {}, {}
    limit.rule.cold().for_each(limit, function(stamp, count)
      if stamp > at then
        chunk_count = chunk_count + 1
        stamps[chunk_count], counts[chunk_count] = stamp, count
        units = units + count
      end
    end)
    -- `leaving` has the bookings that the window has reached, sorted by stamp. The booking `coming`,
    -- number `ahead`, and those behind it are not reached yet.
    local ahead, leaving, leaves = first_from(at - longest), {}, 1
    local coming = booking_at(ahead)
    local function enter()
      local i = #leaving + 1
      while i > leaves and leaving[i - 1].stamp > coming.stamp do
        leaving[i] = leaving[i - 1]
        i = i - 1
      end
      leaving[i] = coming
      units = units + coming.units
    end
    while coming and coming.slot <= slot do
      if coming.stamp > at then enter() end
      ahead = ahead + 1
      coming = booking_at(ahead)
    end
    local chunk, largest = 1, units
    local clear_from = most and units <= most and at or nil
    while true do
      local change = chunk <= chunk_count and stamps[chunk] or NEVER
      if leaving[leaves] and leaving[leaves].stamp < change then change = leaving[leaves].stamp end
      if coming and coming.slot - span < change then change = coming.slot - span end
      if change == NEVER then break end
      if most then
        if clear_from and change >= clear_from + span + length then break end
      elseif change >= slot + length then
        break
      end
      while coming and coming.slot - span <= change do
        enter()
        ahead = ahead + 1
        coming = booking_at(ahead)
      end
      while leaving[leaves] and leaving[leaves].stamp <= change do
        units, leaves = units - leaving[leaves].units, leaves + 1
      end
      while chunk <= chunk_count and stamps[chunk] <= change do
        units, chunk = units - counts[chunk], chunk + 1
      end
      if most then
        clear_from = units <= most and (clear_from or change) or nil
      elseif units > largest then
        largest = units
      end
    end
    if not most then return largest end
    local first_end = (clear_from or slot - span) + span
    return first_end > slot and first_end or slot
  end

  -- Returns whether at most `most` units are booked of which a part may count in a window from
  -- (from, ...] on that ends before `to`.
  local function are_few(from, to, most)
    local i = first_from(from - longest)
    local booking = booking_at(i)
    while booking and booking.slot < to and most >= 0 do
      most, i = most - booking.units, i + 1
      booking = booking_at(i)
    end
    return most >= 0
  end

  -- Makes the rule of sliding windows count the bookings.
  local function extend_window(rule, plain)
    function rule.first_slot(limit, from, cost, life, reserved)
      local slot, length = plain.first_slot(limit, from, cost, life, reserved), life + state.slack
      if not is_in_reach(limit, slot, length) then return slot end
      cost = cost + reserved
      if are_few(slot - limit.window, slot + limit.window + length, limit.count - cost - limit.total) then return slot end
      return sweep(limit, slot, length, limit.count > cost and limit.count - cost or 0)
    end

    local function room(limit, slot, length)
      if not is_in_reach(limit, slot, length) then return plain.room(limit, slot) end
      local room = limit.count - sweep(limit, slot, length)
      return room > 0 and room or 0
    end

    function rule.room(limit, slot, life)
      return room(limit, slot, life + state.slack)
    end

    function rule.free(limit)
      local free = plain.free(limit)
      local least = #list > 0 and room(limit, state.now, 0) or free
      return least < free and least or free
    end

    function rule.fresh_from(limit)
      local from = plain.fresh_from(limit)
      if list[1] and latest_stamp + limit.window > from then from = latest_stamp + limit.window end
      return from
    end
  end

  -- Makes the rule of buckets count the bookings.
  local function extend_bucket(rule, plain)
    local cold = rule.cold()

    -- Returns when the bucket is full again before booking number i. `limit.replayed` keeps these
    -- moments: q[i] and r[i], up to i = `to`.
    local function replayed(limit, i)
      local moments = limit.replayed
      if not moments or moments.q[1] ~= limit.full_at or moments.r[1] ~= limit.full_r then
        moments = { q = { limit.full_at }, r = { limit.full_r }, to = 1 }
        limit.replayed = moments
      end
      while moments.to < i do
        local k = moments.to
        moments.q[k + 1], moments.r[k + 1] = cold.after(limit, moments.q[k], moments.r[k], list[k].stamp, list[k].units)
        moments.to = k + 1
      end
      return moments.q[i], moments.r[i]
    end

    -- Returns what a function of the plain rule returns for a bucket that is full again at q and r.
    local function with_moment(limit, q, r, plain_function, ...)
      local full_at, full_r = limit.full_at, limit.full_r
      limit.full_at, limit.full_r = q, r
      local result = plain_function(limit, ...)
      limit.full_at, limit.full_r = full_at, full_r
      return result
    end

    -- Returns whether each booking from number i on finds its units behind a permit with these
    -- units. Bookings on which the permit has no effect are not asked.
    local function has_room_for(limit, i, q, r, stamp, units)
      q, r = cold.after(limit, q, r, stamp, units)
      for k = i, #list do
        local booking = list[k]
        if q < booking.slot or (q == booking.slot and r == 0) then return true end
        if booking.units > limit.capacity or cold.is_short(limit, booking.slot, booking.units, q, r) then return false end
        q, r = cold.after(limit, q, r, booking.stamp, booking.units)
      end
      return true
    end

    function rule.first_slot(limit, from, cost, life)
      read_all()
      local i, q, r, slot = 1, nil, nil, nil
      while list[i] and list[i].slot <= from do
        i = i + 1
      end
      while list[i] do
        q, r = replayed(limit, i)
        slot = with_moment(limit, q, r, plain.first_slot, from, cost)
        if slot < list[i].slot and has_room_for(limit, i, q, r, slot + life + state.slack, cost) then return slot end
        from = list[i].slot
        i = i + 1
      end
      q, r = replayed(limit, i)
      return with_moment(limit, q, r, plain.first_slot, from, cost)
    end

    -- Returns how many units may leave at `slot`, with stamps that are `length` later.
    local function room(limit, slot, length)
      read_all()
      local i = 1
      while list[i] and list[i].slot <= slot do
        i = i + 1
      end
      local q, r = replayed(limit, i)
      local most, least = with_moment(limit, q, r, plain.room, slot), 0
      if not list[i] or has_room_for(limit, i, q, r, slot + length, most) then return most end
      while most - least > 1 do
        local middle = least + math.floor((most - least) / 2)
        if has_room_for(limit, i, q, r, slot + length, middle) then least = middle else most = middle end
      end
      return least
    end

    function rule.room(limit, slot, life)
      return room(limit, slot, life + state.slack)
    end

    function rule.free(limit)
      return room(limit, state.now, 0)
    end

    function rule.fresh_from(limit)
      read_all()
      local q, r = replayed(limit, #list + 1)
      return with_moment(limit, q, r, plain.fresh_from)
    end
  end

  -- Returns the numbers of the first and of the last fixed window in which a booking counts.
  local function windows_of(limit, booking)
    local first, last = limit.rule.number_of(limit, booking.slot), limit.rule.number_of(limit, booking.last_slot)
    return first, last < first + MOST_JOINED_WINDOWS and last or first + MOST_JOINED_WINDOWS
  end

  -- Returns the units booked in a fixed window.
  local function booked_in(limit, number)
    local units = 0
    read_all()
    for i = 1, #list do
      local first, last = windows_of(limit, list[i])
      if first <= number and number <= last then units = units + list[i].units end
    end
    return units
  end

  -- Makes the rule of fixed windows count the bookings.
  local function extend_fixed(rule, plain)
    function rule.booked_in(limit, number)
      return booked_in(limit, number)
    end

    function rule.room(limit, slot)
      local room = plain.room(limit, slot) - booked_in(limit, rule.number_of(limit, slot))
      return room > 0 and room or 0
    end

    function rule.free(limit)
      return rule.room(limit, state.now)
    end

    function rule.fresh_from(limit)
      local from = plain.fresh_from(limit)
      read_all()
      for i = 1, #list do
        local _, last = windows_of(limit, list[i])
        local over = (last + 1) * limit.window - limit.phase
        if over > from then from = over end
      end
      return from
    end
  end

  local extensions = { extend_window, extend_bucket, extend_fixed }

  -- Makes a rule count the bookings. Its functions without them stay in `rule.plain`.
  local function extend(kind, rule)
    rule.plain = {
      first_slot = rule.first_slot, room = rule.room, free = rule.free, fresh_from = rule.fresh_from,
    }
    extensions[kind](rule, rule.plain)
  end

  -- Returns the units booked that count as used now.
  local function booked(limit)
    if limit.kind == FIXED then return booked_in(limit, limit.rule.number_of(limit, state.now)) end
    local units = 0
    read_all()
    for i = 1, #list do
      units = units + list[i].units
    end
    return units
  end

  -- Returns the units booked that the upstream may have counted, if stamps up to `sent` may have
  -- reached it.
  local function booked_until(limit, sent)
    if limit.kind == FIXED then return booked(limit) end
    local units = 0
    read_all()
    for i = 1, #list do
      if list[i].stamp <= sent then units = units + list[i].units end
    end
    return units
  end

  -- Notes that the list has changed from booking number i on.
  local function changed(i)
    state.changed, state.must_rewrite = true, true
    for k = 1, #state do
      local moments = state[k].replayed
      if moments and moments.to > i then moments.to = i end
    end
  end

  -- Removes booking number i.
  local function remove(i)
    local booking = booking_at(i)
    table.remove(list, i)
    costs = nil
    changed(i)
    if booking.stamp == latest_stamp then
      is_all_read = false
      read_all()
    end
    return booking
  end

  -- Notes the stamp of a booking that is new or has a later stamp.
  local function note_stamp(booking)
    if booking.stamp > latest_stamp then latest_stamp = booking.stamp end
    if booking.stamp - booking.slot > longest then longest = booking.stamp - booking.slot end
  end

  -- Moves the bookings whose slot has come into the limits.
  local function insert_due()
    while list[1] and booking_at(1).slot <= state.now do
      local booking = remove(1)
      for i = 1, #state do
        local limit = state[i]
        if limit.kind == FIXED then
          local first, last = windows_of(limit, booking)
          for number = first, last do
            limit.rule.add(limit, number, booking.units)
          end
        else
          limit.rule.insert(limit, booking.slot, booking.stamp, booking.units)
        end
        -- The stamp may have left the window as well.
        limit.rule.advance(limit)
      end
    end
  end

  -- Returns whether a permit with this slot becomes an advance booking. It is of use from `from`
  -- on.
  local function is_in_advance(slot, from, cost, life)
    local free, tolerance, has_bucket = slot, NEVER, false
    if from > state.earliest then free = first_slot(cost, life, state.earliest) end
    for i = 1, #state do
      local fiftieth = math.floor(state[i].window / 50)
      if fiftieth < tolerance then tolerance = fiftieth end
      if state[i].kind == BUCKET then has_bucket = true end
    end
    if tolerance < TOLERANCE then tolerance = TOLERANCE end
    return slot > free + tolerance or (has_bucket and list[1] and booking_at(1).slot <= slot)
  end

  -- Returns the number of the booking with exactly this slot and stamp.
  local function exact(slot, stamp)
    local i = first_from(slot)
    local booking = booking_at(i)
    while booking and booking.slot == slot do
      if booking.last_slot == slot and booking.stamp == stamp then return i end
      i = i + 1
      booking = booking_at(i)
    end
  end

  -- Notes what booking number i and the next one would cost if they joined: for how much longer
  -- units would count, times the units. Infinite if their slots are too many fixed windows apart.
  local function note_cost(i)
    local one, other = booking_at(i), booking_at(i + 1)
    if not one or not other then return end
    local last_slot = one.last_slot > other.last_slot and one.last_slot or other.last_slot
    local stamp = one.stamp > other.stamp and one.stamp or other.stamp
    costs[i] = last_slot - one.slot > costs.longest and math.huge
      or (stamp - one.slot) * (one.units + other.units) - (one.stamp - one.slot) * one.units
        - (other.stamp - other.slot) * other.units
  end

  -- Notes the costs of joins with booking number i, which is new or has changed.
  local function note_costs(i)
    if i > 1 then note_cost(i - 1) end
    note_cost(i)
  end

  -- Returns the number of the first of the two neighbours whose joint units would count the least
  -- longer. Their slots are few fixed windows apart.
  local function cheapest_join()
    if not costs then
      costs = { longest = NEVER }
      for i = 1, #state do
        local limit = state[i]
        if limit.kind == FIXED and limit.window * MOST_JOINED_WINDOWS < costs.longest then
          costs.longest = limit.window * MOST_JOINED_WINDOWS
        end
      end
      read_all()
      for i = 1, #list - 1 do
        note_cost(i)
      end
    end
    local cheapest, least = nil, math.huge
    for i = 1, #list - 1 do
      if costs[i] < least then cheapest, least = i, costs[i] end
    end
    return cheapest
  end

  -- Returns how one more booking has room in the list, for `add`. Returns nil if it has none.
  local function place_for(slot, stamp)
    local same = exact(slot, stamp)
    if same then return { same = same } end
    local join = #list >= MOST_ADVANCE and cheapest_join()
    if join or #list < MOST_ADVANCE then return { join = join } end
  end

  -- Adds units of permits. If there are too many bookings, two neighbours join.
  local function add(place, slot, stamp, units)
    if place.same then
      local booking = booking_at(place.same)
      booking.units, booking.place = booking.units + units, nil
      if costs then note_costs(place.same) end
      changed(place.same)
      return
    end
    if place.join then
      local one, later = booking_at(place.join), booking_at(place.join + 1)
      table.remove(list, place.join + 1)
      table.remove(costs, place.join + 1)
      if later.last_slot > one.last_slot then one.last_slot = later.last_slot end
      if later.stamp > one.stamp then one.stamp = later.stamp end
      one.units, one.place = one.units + later.units, nil
      note_stamp(one)
      note_costs(place.join)
      changed(place.join)
    end
    local booking = { slot = slot, last_slot = slot, stamp = stamp, units = units }
    local i = first_from(slot + 1)
    table.insert(list, i, booking)
    note_stamp(booking)
    if costs then
      table.insert(costs, i, math.huge)
      note_costs(i)
    end
    changed(i)
  end

  -- Returns the number of the only joined booking that may contain a permit, and how many may.
  local function joined_with(slot, stamp)
    local first, count = nil, 0
    read_all()
    for i = 1, #list do
      local booking = list[i]
      if booking.slot < booking.last_slot and booking.slot <= slot and slot <= booking.last_slot
        and stamp <= booking.stamp then
        first, count = first or i, count + 1
      end
    end
    return first, count
  end

  -- Returns whether joined bookings may contain a permit.
  local function may_contain(slot, stamp)
    local _, count = joined_with(slot, stamp)
    return count > 0
  end

  -- Takes units of unused permits out of the bookings, if they are certainly there. Returns how
  -- many units it took.
  local function erase(slot, stamp, units)
    local found = exact(slot, stamp)
    if not found then
      -- The permit may also be in the logs, unless all slots there are earlier.
      for i = 1, #state do
        local limit = state[i]
        local log_end = limit.rule.plain.fresh_from(limit)
        if limit.kind == WINDOW and log_end > 0 then log_end = log_end - limit.window end
        if log_end > slot then return 0 end
      end
      local joined, count = joined_with(slot, stamp)
      if count ~= 1 then return 0 end
      found = joined
    end
    local booking = booking_at(found)
    if booking.units < units then units = booking.units end
    booking.units, booking.place, costs = booking.units - units, nil, nil
    if booking.units == 0 then remove(found) else changed(found) end
    for i = 1, #state do
      (state.cold or cold()).note_unused(state[i], stamp, units)
    end
    return units
  end

  -- Reads the record of the bookings. Returns where they end.
  local function read(head, from, base)
    local _, count, latest, longest_span = struct.unpack(ADVANCE_RECORD, head, from)
    local after = base + count * ADVANCE_BOOKING_SIZE
    bytes = redis.call('GETRANGE', KEYS[1], base, after - 1)
    for i = 1, count do
      list[i] = (i - 1) * ADVANCE_BOOKING_SIZE + 1
    end
    latest_stamp, longest, is_all_read = latest, longest_span, false
    if latest == 0 then read_all() end
    return after
  end

  -- Packs the record of the bookings, if there are any. Returns it, and the number of records.
  local function record()
    if #list == 0 then return '', 0 end
    local record = struct.pack(ADVANCE_RECORD, ADVANCE, #list, latest_stamp, longest)
    return record .. string.rep('\0', RECORD_SIZE - #record), 1
  end

  -- Packs the bookings. Those that follow each other in `bytes` are copied at once.
  local function region()
    local parts, from, to = {}, 1, 1
    for i = 1, #list do
      local booking = list[i]
      local place = type(booking) == 'number' and booking or booking.place
      if place ~= to then
        if to > from then parts[#parts + 1] = string.sub(bytes, from, to - 1) end
        from, to = place or 1, place or 1
      end
      if place then
        to = to + ADVANCE_BOOKING_SIZE
      else
        parts[#parts + 1] = struct.pack(ADVANCE_BOOKING, booking.slot, booking.last_slot, booking.stamp, booking.units)
      end
    end
    if to > from then parts[#parts + 1] = string.sub(bytes, from, to - 1) end
    return table.concat(parts)
  end

  for kind, rule in pairs(rules) do
    extend(kind, rule)
  end
  state.cold_advance = {
    list = list, extend = extend, booked = booked, booked_until = booked_until, insert_due = insert_due,
    is_in_advance = is_in_advance, place_for = place_for, add = add, may_contain = may_contain, erase = erase, read = read,
    record = record, region = region,
  }
  return state.cold_advance
end

-- ── the long way: the steps of a call ────────────────────────────────────────────────────────────
--
-- Twin: src/limit/ledger.rs, `update` in limit_set.rs, and `book` in src/store/memory/booking.rs.
-- Of step 4: src/limit/recovery.rs.
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), all of call.lua, logical_time (time.lua),
-- state.lua, external.lua, ledger.lua, advance.lua

-- Reads the records of the limits into `state`. `head` has as many of them as the call has limits.
-- Returns an error if there is a record of an unknown kind.
local function read_records(head, record_count, limit_count)
  if record_count > limit_count then
    head = redis.call('GETRANGE', KEYS[1], 0, HEAD_SIZE + RECORD_SIZE * record_count - 1)
  end
  local base = HEAD_SIZE + RECORD_SIZE * record_count
  for i = 1, record_count do
    local from = HEAD_SIZE + RECORD_SIZE * (i - 1) + 1
    local kind = string.byte(head, from)
    if kind == EXTERNAL then
      (state.cold_external or cold_external()).read(head, from)
    elseif kind == ADVANCE then
      base = cold_advance().read(head, from, base)
    elseif kind > ADVANCE then
      return redis.error_reply('TOLLGATE the state of this key has a record of kind ' .. kind
        .. ', this release understands kinds up to ' .. ADVANCE)
    else
      local rule = rule_of(kind)
      local limit = rule.read(head, from)
      limit.rule, limit.base = rule, base
      base = base + limit.room * rule.size
      state[i] = limit
    end
  end
  state.existed, state.returned_base = true, base
end

-- Advances the limits of the state to now. Adds the limits of the call, which begin at `pos`, or
-- records that a call stated them. Returns where they end.
local function update_limits(operation, call, pos, limit_count, guard)
  for i = 1, #state do
    local limit = state[i]
    if limit.kind == FIXED and operation ~= RETURN then limit.rule.align(limit) end
    limit.rule.advance(limit)
    if limit.external and state.now >= limit.external.ends then state.cold_external.roll(limit) end
  end
  for _ = 1, limit_count do
    local kind, count, window, capacity, stated
    kind, count, window, capacity, pos = struct.unpack(CALL_LIMIT, call, pos)
    for i = 1, #state do
      local limit = state[i]
      if limit.count == count and limit.window == window and limit.kind == kind and limit.capacity == capacity then
        stated = limit
      end
    end
    if not stated then
      stated = (state.cold or cold()).add(kind, count, window, capacity, guard)
    elseif state.now - stated.last_stated > stated.window / 2 then
      stated.last_stated, state.changed = state.now, true
    end
    stated.ours = true
  end
  if #state > limit_count then (state.cold or cold()).retain() end
  return pos
end

-- Books `count` permits of `cost` units each, which are of use from `from` on. One segment has as
-- many of them as its slot allows. Returns nothing if all are booked. Otherwise returns the first
-- slot that is later than `last`, and the limit that refused. Nothing is booked for that permit and
-- those after it. The same if the key has too many advance bookings for one more.
local function book(cost, count, life, from, last, segments)
  local advance = state.cold_advance
  if from > state.earliest then advance = advance or cold_advance() end
  while count > 0 do
    local slot, refusing = first_slot(cost, life, from)
    local stamp, fits, entry, index
    if state.returned_count > 0 then
      entry, index = find_returned(cost, life, from)
    end
    if entry and entry.slot <= slot and entry.slot <= last then
      slot, stamp, fits = entry.slot, entry.stamp, math.floor(entry.units / cost)
      if fits > count then fits = count end
      entry.units = entry.units - fits * cost
      if entry.units == 0 then table.remove(state.returned, index) end
      state.returned_count, state.changed = #state.returned, true
    elseif slot > last then
      return entry and entry.slot < slot and entry.slot or slot, refusing
    else
      stamp = slot + life + state.slack
      local is_in_advance, place = advance and advance.is_in_advance(slot, from, cost, life), nil
      if is_in_advance then
        place = advance.place_for(slot, stamp)
        if not place then return slot, refusing end
      end
      fits = 1
      if count > 1 then
        local least = NEVER
        for i = 1, #state do
          local room = unreserved(state[i].rule.room(state[i], slot, life), state[i], slot)
          if room < least then least = room end
        end
        fits = math.floor(least / cost)
        if fits > count then fits = count end
        if fits < 1 then fits = 1 end
      end
      if is_in_advance then
        advance.add(place, slot, stamp, cost * fits)
      else
        insert(slot, stamp, cost * fits)
      end
    end
    count = count - fits
    segments[#segments + 1] = struct.pack(SEGMENT, cost, fits, slot - state.now, stamp - slot)
  end
end

-- Returns the first moment at which a new state would grant the same. Until then the key must live.
local function remembered_until()
  local until_then = state.recovering_until > state.earliest and state.recovering_until or state.earliest
  for i = 1, #state do
    local limit = state[i]
    local from = limit.rule.fresh_from(limit)
    if limit.external and forgotten_from(limit) > from then from = forgotten_from(limit) end
    if from > until_then then until_then = from end
  end
  if state.returned_count > 0 and returned()[state.returned_count].slot >= until_then then
    until_then = returned()[state.returned_count].slot + 1
  end
  return until_then
end

-- Writes the head, the records and the entries that changed into the string, whose size stays.
local function write(incarnation, writes, offset, expires, held_until, releases)
  local external, shared = '', 0
  if state.cold_external then external, shared = state.cold_external.records() end
  local record_of_advance, advance_count = '', 0
  if state.cold_advance then record_of_advance, advance_count = state.cold_advance.record() end
  local records = packed_head(#state + shared + advance_count, incarnation, writes, offset, expires, held_until, releases)
  for i = 1, #state do
    local limit = state[i]
    records = records .. limit.rule.record(limit)
    if limit.kind == WINDOW then
      limit.rule.write(limit)
    elseif limit.dirty and limit.n > 0 then
      redis.call('SETRANGE', KEYS[1], limit.base, pack_list(limit.list, limit.rule.entry, limit.rule.fields))
    end
  end
  redis.call('SETRANGE', KEYS[1], 0, records .. external .. record_of_advance)
  if state.returned_count > 0 then
    redis.call('SETRANGE', KEYS[1], state.returned_base, pack_returned())
  end
end

-- 1. The state, and its time.
local incarnation, writes, offset, expires, held_until, releases = random, 0, 0, 0, 0, 0
if head == '' then
  state.now, state.made_at, state.returned, state.must_rewrite = server_time, server_time, {}, true
else
  local format, record_count, last_write = string.byte(head), nil, nil
  if format < STATE_FORMAT or format > STATE_FORMAT_WITH_ADVANCE or #head < HEAD_SIZE then
    return redis.error_reply('TOLLGATE the state of this key has format ' .. format .. ', this release understands '
      .. STATE_FORMAT .. ' to ' .. STATE_FORMAT_WITH_ADVANCE)
  end
  format, record_count, state.returned_count, state.returned_room, incarnation, writes, state.made_at, state.recovering_until,
    offset, last_write, expires, held_until, releases = struct.unpack(HEAD, head)
  local failure = read_records(head, record_count, limit_count)
  if failure then return failure end

  local knows_time = known_incarnation == incarnation and seen > 0
  if operation == RETURN and not knows_time then
    -- The caller only returns permits, and remembers no reply. So it cannot tell whether the clock
    -- was set. For this call, the time is that of the last write.
    state.now = last_write
  else
    local now = logical_time(server_time, server_time + offset, last_write, knows_time and seen + since, since, on_way,
      server_seen > 0 and server_seen + server_since)
    if not now then
      return struct.pack(REPLY, CALL_VERSION, UNSURE, incarnation, writes, server_time, 0, 0, 0, 0, releases, 0, 0, 0, 0,
        0, 0, 0, 0, 0, 0, 0)
    end
    state.now = now
  end
  if operation ~= RETURN and state.now - server_time ~= offset then
    offset, state.changed = state.now - server_time, true
  end
end
local now = state.now

-- 2. The hold. Its end moves only later, unless it is released. In the head, `recovering until` is
--    even, plus 1 if the hold was cut.
state.hold_is_cut = state.recovering_until % 2
state.recovering_until = state.recovering_until - state.hold_is_cut
-- A hold that begins now counts, even if the caller does not know of the last releases.
if operation == HOLD and hold_releases < releases then hold_releases = releases end
if operation == RELEASE then
  held_until = 0
  releases = releases + 1
  state.hold_is_cut = 0
  state.changed = true
elseif hold_releases > releases then
  -- The caller knows of a release that this state does not know.
  held_until = hold_left > 0 and now + hold_left or 0
  releases = hold_releases
  state.hold_is_cut = hold_is_cut
  state.changed = true
elseif hold_releases == releases and hold_left > 0 and now + hold_left > held_until then
  held_until = now + hold_left
  state.hold_is_cut = hold_is_cut
  state.changed = true
end
state.earliest = held_until > now and held_until or now
local is_cut = held_until > now and state.hold_is_cut or 0

-- 3. The limits.
pos = update_limits(operation, call, pos, limit_count, guard)
if #state > MOST_LIMITS then
  return redis.error_reply('TOLLGATE a call states at most ' .. MOST_LIMITS .. ' limits')
end
if state.cold_advance then state.cold_advance.insert_due() end
if state.returned_count > 0 then (state.cold or cold()).drain() end

-- Twin: `usage` in src/store/memory/booking.rs. Nothing is written.
if operation == PEEK then
  local used, free, held_for, recovering = {}, {}, state.earliest - now, state.recovering_until - now
  for i = 1, #state do
    local limit = state[i]
    used[i] = limit.rule.cold().used(limit)
    if state.cold_advance then used[i] = used[i] + state.cold_advance.booked(limit) end
    free[i] = unreserved(limit.rule.free(limit), limit, now)
  end
  local all_free = free_now()
  if recovering > 0 then
    all_free = 0
    if recovering > held_for then state.earliest = state.recovering_until end
  end
  -- The demands before the last one are booked as if it were a lease.
  local cost, is_allowed = 1, true
  for n = 1, demand_count do
    local count
    cost, count, pos = struct.unpack(CALL_DEMAND, call, pos)
    is_allowed = cost > 0
    for i = 1, #state do
      if cost > largest_cost(state[i]) then is_allowed = false end
    end
    if n < demand_count and is_allowed then
      book(cost, count, life, state.earliest, NEVER - 1, {})
    end
  end
  local next_slot = NEVER
  if is_allowed then
    local entry = find_returned(cost, life, state.earliest)
    next_slot = first_slot(cost, life, state.earliest)
    if entry and entry.slot < next_slot then next_slot = entry.slot end
  end
  local parts = {
    struct.pack(PEEK_REPLY, CALL_VERSION, GRANTED, all_free, next_slot < NEVER and next_slot - now or NEVER, held_for, releases,
      is_cut, recovering > 0 and recovering or 0, #state),
  }
  for i = 1, #state do
    local limit, slot = state[i], NEVER
    if cost <= largest_cost(limit) then
      slot = limit.external and first_slot_unreserved(limit, now, cost, life)
        or limit.rule.first_slot(limit, now, cost, life, 0)
    end
    parts[i + 1] = struct.pack(PEEK_LIMIT, limit.kind, limit.count, limit.window, limit.capacity, used[i], free[i],
      limit.external and reserved(limit, now) or 0, slot < NEVER and slot - now or NEVER)
  end
  return table.concat(parts)
end

-- 4. Recovery. If the caller knows another incarnation, or more writes than this state has, a state
--    was lost. This state does not know all permits of the caller.
if known_incarnation ~= 0 and seen > 0 and (known_incarnation ~= incarnation or known_writes > writes) then
  if known_incarnation == incarnation then
    incarnation, state.made_at = random, now
  end
  (state.cold or cold()).recover(granted_before)
end

-- 5. Permits that come back, units that were used without a permit, and what the upstream states
--    remains.
local demands_pos, must_notify = pos, false
pos = pos + demand_count * (operation == LEASE_LATER and CALL_LATER_DEMAND_SIZE or CALL_DEMAND_SIZE)
for _ = 1, return_count do
  local slot, stamp, units
  slot, stamp, units, pos = struct.unpack(CALL_RETURN, call, pos)
  if known_incarnation == incarnation then
    (state.cold or cold()).take_back(slot, stamp, units)
  end
end
for _ = 1, charge_count do
  local age, units
  age, units, pos = struct.unpack(CALL_CHARGE, call, pos);
  (state.cold or cold()).charge(age, units)
end
if remaining_count > 0 then
  local is_less, is_urgent = (state.cold_external or cold_external()).see(struct.unpack(CALL_REMAINING, call, pos))
  if is_less and state.returned_count > 0 then (state.cold or cold()).drop_returned() end
  must_notify = is_less and is_urgent
end
if operation == RELEASE then
  for i = 1, #state do
    (state.cold_external or cold_external()).forget_others(state[i])
  end
end

-- 6. Permits.
local status, wait, refusing, segments = GRANTED, 0, nil, {}
local prefetched, prefetched_span = 0, 0
if state.recovering_until > now then
  if demand_count > 0 then status, wait = RECOVERING, state.recovering_until - now end
else
  local permits = 0
  pos = demands_pos
  for _ = 1, demand_count do
    local cost, count, from
    if operation == LEASE_LATER then
      cost, count, from, pos = struct.unpack(CALL_LATER_DEMAND, call, pos)
      from = now + from
      if from < state.earliest then from = state.earliest end
    else
      cost, count, pos = struct.unpack(CALL_DEMAND, call, pos)
      from = state.earliest
    end
    permits = permits + count
    if permits > MOST_PERMITS then
      return redis.error_reply('TOLLGATE a call asks for at most ' .. MOST_PERMITS .. ' permits')
    end
    local slot
    for i = 1, #state do
      if cost == 0 or cost > largest_cost(state[i]) then slot = NEVER end
    end
    if not slot then
      slot, refusing = book(cost, count, life, from, now + latest, segments)
    end
    if slot then
      status, wait = REFUSED, slot < NEVER and slot - now or NEVER
      break
    end
  end
  if status == GRANTED and prefetch_most > 0 then
    prefetched, prefetched_span = (state.cold or cold()).prefetch(prefetch_most, prefetch_life)
  end
end
local free = status == GRANTED and free_now() or 0

-- 7. The new state. It expires a second after the last moment at which it matters. A thousandth of
--    that time is added, because the clocks of server and callers may run at different speeds.
local remember = remembered_until() - now
if state.changed then
  writes = writes + 1
  local needed = server_time + remember + math.floor(remember / 1000) + 1000000
  local is_extended = needed > expires
  if is_extended then
    expires = needed + SPARE_LIFE
  end
  local time_to_live = math.floor((expires - server_time) / 1000) + 1
  if state.must_rewrite then
    (state.cold or cold()).rewrite(incarnation, writes, offset, expires, held_until, releases, time_to_live)
  else
    write(incarnation, writes, offset, expires, held_until, releases)
    if is_extended then
      redis.call('PEXPIRE', KEYS[1], time_to_live)
    end
  end
end

-- 8. Messages. If PUBLISH fails, the other processes learn of the change with their next call.
if operation == HOLD or operation == RELEASE then
  local kind = is_cut == 1 and CUT_HOLD_MESSAGE or HOLD_MESSAGE
  redis.pcall('PUBLISH', ARGV[2], struct.pack(HOLD_MESSAGE_FIELDS, kind, state.earliest - now, releases) .. ARGV[3])
elseif must_notify and #ARGV == 3 then
  redis.pcall('PUBLISH', ARGV[2], struct.pack(REMAINING_MESSAGE_FIELDS, REMAINING_MESSAGE, writes) .. ARGV[3])
end

-- 9. The reply.
local foreign, shared = nil, 0
for i = #state, 1, -1 do
  if #state > limit_count and not state[i].ours then foreign = state[i] end
  if state[i].external then shared = SHARED end
end
refusing, foreign = status == REFUSED and refusing or NO_LIMIT, foreign or NO_LIMIT
return struct.pack(REPLY, CALL_VERSION, status + shared + is_cut * CUT, incarnation, writes, now, remember, wait, free,
  state.earliest - now, releases, refusing.kind, refusing.count, refusing.window, refusing.capacity, foreign.kind, foreign.count,
  foreign.window, foreign.capacity, prefetched, prefetched_span, #segments) .. table.concat(segments)
