-- Decides about the calls of one key that are in flight.
--
-- Twin: src/limit/in_flight.rs, which has the protocol
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), logical_time (time.lua)
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the claim, packed; the reply is packed too (layout_in_flight.lua)
-- ARGV[2]  how the channels of stores begin; the number of a store follows. If the claim grants
--          slots to another holder, the script notifies that holder there.

-- The most batches. Further waiters join the last batch of their holder.
local MOST_BATCHES = 250
-- A holder sends a claim every third of its time to live. The claim arrives at most this much
-- later, in microseconds.
local LONGEST_CLAIM_DELAY = 1000000

-- The claim (layout.lua, CLAIM_CALL). `store` and `id` name the holder. `number` is the number of
-- the claim. `seen` is the time in the last reply, and `since` is how long ago that reply arrived.
local format, operation, random, known_incarnation, known_changes, seen, since, on_way, server_seen, server_since, store, id,
  number, limit, in_use, wanted, granted_seen, ttl, class_pos = struct.unpack(CLAIM_CALL, ARGV[1])
if format ~= FORMAT then
  return redis.error_reply('TOLLGATE format ' .. format .. ' of claims is unknown, this script understands ' .. FORMAT)
end

-- The class of the claim, and its share. Both are 0 if the limit is not divided. `is_divided` is set
-- if a claim has stated a share.
local class, share = 0, 0
if class_pos <= #ARGV[1] then class, share = struct.unpack(CLASS, ARGV[1], class_pos) end
local is_divided = share > 0

-- Makes a holder without slots, whose claim expires at `expires`.
local function new_holder(expires)
  return {
    store = 0, id = 0, number = 0, limit = 0,
    taken = 0, -- slots that it uses, or was granted since its last claim
    granted = 0, -- slots ever granted
    class = 0, share = 0, knows_others_wait = 0, expires = expires,
    has_new_slots = false, waits = false, index = 0,
  }
end

-- Reads the holders whose claims have not expired at `now`, and their queue: batches of waiters, in order.
local function read_holders(bytes, holder_count, batch_count, now)
  local all, holders, queue, pos = {}, {}, {}, IN_FLIGHT_HEAD_SIZE + 1
  for i = 1, holder_count do
    local holder = new_holder(0)
    holder.store, holder.id, holder.number, holder.limit, holder.taken, holder.granted, holder.knows_others_wait,
      holder.expires, pos = struct.unpack(HOLDER, bytes, pos)
    if holder.expires > now then holders[#holders + 1] = holder end
    all[i] = holder
  end
  for _ = 1, batch_count do
    local index, count
    index, count, pos = struct.unpack(BATCH, bytes, pos)
    if all[index].expires > now then queue[#queue + 1] = { holder = all[index], count = count } end
  end
  if pos <= #bytes then
    is_divided = true
    for i = 1, holder_count do
      all[i].class, all[i].share, pos = struct.unpack(CLASS, bytes, pos)
    end
  end
  return holders, queue
end

-- Returns the slots in use, those that are free under `smallest` and the limits of all holders, and the
-- smallest of these limits.
local function usage(holders, smallest)
  local used = 0
  for i = 1, #holders do
    used = used + holders[i].taken
    if holders[i].limit < smallest then smallest = holders[i].limit end
  end
  return used, smallest > used and smallest - used or 0, smallest
end

-- Sets the number of waiters of a holder to `count`. New waiters join the end of the queue. If the
-- holder has fewer waiters than before, its last ones leave.
local function set_waiters(queue, holder, count)
  local before, last = 0, nil
  for i = 1, #queue do
    if queue[i].holder == holder then before, last = before + queue[i].count, queue[i] end
  end
  local leaving, coming = before - count, count - before
  for i = #queue, 1, -1 do
    if leaving > 0 and queue[i].holder == holder then
      local left = math.min(queue[i].count, leaving)
      queue[i].count, leaving = queue[i].count - left, leaving - left
      if queue[i].count == 0 then table.remove(queue, i) end
    end
  end
  if coming <= 0 then return end
  if last and (last == queue[#queue] or #queue >= MOST_BATCHES) then
    last.count = last.count + coming
  else
    queue[#queue + 1] = { holder = holder, count = coming }
  end
end

-- Returns the place of the first batch whose class has fewer slots taken than its share of `limit`, and
-- how many are missing. `taken` has the slots of each class. Returns the first batch, and no number, if
-- there is no such batch.
local function next_batch(queue, limit, taken)
  for i = 1, #queue do
    local holder = queue[i].holder
    if holder.share > 0 then
      local slots = math.floor(limit * holder.share / 100)
      local missing = (slots > 1 and slots or 1) - taken[holder.class]
      if missing > 0 then return i, missing end
    end
  end
  return 1
end

-- Grants free slots: to the first waiters of those whose class is below its share, and then to the
-- first of all.
local function grant(holders, queue)
  local _, free, limit = usage(holders, LARGEST_I4)
  local taken = {}
  for i = 1, is_divided and #holders or 0 do
    local of_class = holders[i].class
    taken[of_class] = (taken[of_class] or 0) + holders[i].taken
  end
  while free > 0 and queue[1] do
    local index, count = 1, nil
    if is_divided then index, count = next_batch(queue, limit, taken) end
    local batch = queue[index]
    local holder = batch.holder
    count = math.min(count or free, free, batch.count)
    batch.count, free = batch.count - count, free - count
    holder.taken, holder.granted, holder.has_new_slots = holder.taken + count, holder.granted + count, true
    if is_divided then taken[holder.class] = taken[holder.class] + count end
    if batch.count == 0 then table.remove(queue, index) end
  end
end

-- 1. The state, and its time.
local bytes = redis.call('GET', KEYS[1])
local incarnation, changes, made_at, now, recovering_until = random, 0, server_time, server_time, 0
local holders, queue = {}, {}
if bytes then
  format = string.byte(bytes)
  if format ~= FORMAT or #bytes < IN_FLIGHT_HEAD_SIZE then
    return redis.error_reply('TOLLGATE the in-flight slots of this key have format ' .. format .. ', this script understands '
      .. FORMAT)
  end
  local holder_count, batch_count, offset, last_write
  format, holder_count, batch_count, incarnation, changes, made_at, offset, last_write, recovering_until =
    struct.unpack(IN_FLIGHT_HEAD, bytes)
  local knows_time = known_incarnation == incarnation and seen > 0
  now = logical_time(server_time, server_time + offset, last_write, knows_time and seen + since, since, on_way,
    server_seen > 0 and server_seen + server_since)
  if not now then
    return struct.pack(UNSURE_REPLY, FORMAT, UNSURE, server_time)
  end
  holders, queue = read_holders(bytes, holder_count, batch_count, now)
end

if operation == PEEK then
  local used, free = usage(holders, limit)
  return struct.pack(CLAIM_PEEK_REPLY, FORMAT, GRANTED, used, recovering_until > now and 0 or free)
end

-- 2. Recovery. If the caller knows another incarnation, or more changes than this state has, a
--    state was lost. Nothing is granted until all holders of the lost state have sent a claim
--    (differential/model/recovery.rs).
if known_incarnation ~= 0 and (known_incarnation ~= incarnation or known_changes > changes) then
  if known_incarnation == incarnation then
    incarnation, made_at = random, now
  end
  recovering_until = math.max(recovering_until, made_at + math.floor(ttl / 3) + LONGEST_CLAIM_DELAY)
end

-- 3. The claim.
local claimant
for i = 1, #holders do
  if holders[i].id == id and holders[i].store == store then claimant = holders[i] end
end
if not claimant then
  claimant = new_holder(now)
  claimant.store, claimant.id, claimant.limit, claimant.granted = store, id, limit, granted_seen
  holders[#holders + 1] = claimant
end
changes = changes + 1
if claimant.number < number then
  -- The holder did not know of these slots when it sent the claim. They go to the waiters that the
  -- claim states. If there are more slots than waiters, the others are free again. The holder
  -- ignores the messages about them, which are older than the claim.
  local unseen = math.max(0, math.min(claimant.granted - granted_seen, claimant.taken, wanted))
  -- A holder that leaves, because it neither uses a slot nor waits, keeps no slot from others.
  claimant.limit = in_use + wanted > 0 and limit or LARGEST_I4
  claimant.number, claimant.granted = number, granted_seen + unseen
  claimant.taken, claimant.expires = in_use + unseen, now + ttl
  claimant.class, claimant.share = class, share
  set_waiters(queue, claimant, wanted - unseen)
end
if now >= recovering_until then
  grant(holders, queue)
end

-- 4. Messages, and the new state. A holder is notified if it has new slots, or if it has slots and
--    others begin to wait.
-- `first` is the holder of the first waiter. `is_mixed` is set if several holders wait.
local first, is_mixed = queue[1] and queue[1].holder, false
for i = 1, #queue do
  if queue[i].holder ~= first then is_mixed = true end
  queue[i].holder.waits = true
end
-- If more slots are taken than the limit has, which was lowered, all holders return those that become free.
local used, _, smallest = usage(holders, LARGEST_I4)
local is_over = used > smallest
local others_wait, first_expiry, status, longest_left = 0, 0, GRANTED, ttl
local records, count, classes, has_shares = {}, 0, {}, false
for i = 1, #holders do
  local holder = holders[i]
  local others = (is_over or is_mixed or (first and first ~= holder)) and 1 or 0
  if holder == claimant then
    others_wait, holder.knows_others_wait = others, others
  else
    if holder.has_new_slots or (others == 1 and holder.knows_others_wait == 0 and holder.taken > 0) then
      holder.knows_others_wait = others
      local published = redis.pcall('PUBLISH', ARGV[2] .. string.format('%.0f', holder.store),
        struct.pack(IN_FLIGHT_MESSAGE_FIELDS, IN_FLIGHT_MESSAGE, holder.id, incarnation, changes, holder.number, holder.granted,
          others))
      -- A table is an error. If PUBLISH fails, the holders must poll.
      if type(published) == 'table' then status = NOT_PUBLISHED end
    end
    if first_expiry == 0 or holder.expires - now < first_expiry then first_expiry = holder.expires - now end
  end
  if holder.taken > 0 or holder.waits then
    count = count + 1
    holder.index = count
    records[count] = struct.pack(HOLDER, holder.store, holder.id, holder.number, holder.limit, holder.taken, holder.granted,
      holder.knows_others_wait, holder.expires)
    if is_divided then
      classes[count] = struct.pack(CLASS, holder.class, holder.share)
      has_shares = has_shares or holder.share > 0
    end
  end
  if holder.expires - now > longest_left then longest_left = holder.expires - now end
end
for i = 1, #queue do
  records[count + i] = struct.pack(BATCH, queue[i].holder.index, queue[i].count)
end
if has_shares then records[#records + 1] = table.concat(classes) end

-- The state lives a second longer than any claim, and than its recovery. A thousandth is added,
-- because the clocks of server and callers may run at different speeds.
if recovering_until - now > longest_left then longest_left = recovering_until - now end
local time_to_live = math.floor((longest_left + longest_left / 1000) / 1000) + 1000
local head = struct.pack(IN_FLIGHT_HEAD, FORMAT, count, #queue, incarnation, changes, made_at, now - server_time,
  now, recovering_until)
redis.call('SET', KEYS[1], head .. table.concat(records), 'PX', time_to_live)

-- 5. The reply.
return struct.pack(CLAIM_REPLY, FORMAT, status, now, incarnation, changes, claimant.number, claimant.granted, others_wait,
  first_expiry, recovering_until > now and recovering_until - now or 0)
