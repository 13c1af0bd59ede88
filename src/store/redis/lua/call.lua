-- Decides about the permits of one key. This file reads the call. Then short.lua decides, or else
-- main.lua does.
--
-- Twin: src/limit/ledger.rs
-- After a change: cargo test --all-features --lib differential
-- needs: layout.lua, server_time (server_time.lua), one_key.lua
--
-- For each call, Redis makes every function of the script anew. That takes 50 ns for each function,
-- and more for each variable that it shares with others. The files follow from this:
--
-- - short.lua, which decides most calls, has no functions.
-- - Functions that few calls need are *cold*: `cold` and `cold_external` make them when a call
--   needs them.
-- - The variables that functions share are fields of one table, `state` (state.lua).
-- - Constant arguments of commands are strings: Redis 7.0 takes 0.5 us to format a number.
--
-- A decision returns its reply, and for joint.lua its status and how long until the slot of the permit.
-- Redis ignores what follows the reply.

-- How much longer than necessary the time to live of a key is, in microseconds, so that few grants
-- have to extend it.
local SPARE_LIFE = 2000000

-- The head of the call (layout.lua, CALL). `seen` is the time in the last reply, and `since` is how
-- long ago that reply arrived. `server_seen` and `server_since` are the same for an UNSURE reply.
-- `slack`, `guard`, `latest` (the longest wait for a slot), `life` and `hold_left` are spans. The
-- limits of the call begin at `pos`.
local format, operation, random, known_incarnation, known_writes, seen, since, on_way, server_seen, server_since,
  granted_before, slack, guard, latest, life, prefetch_most, prefetch_life, hold_left, hold_releases, hold_is_cut, limit_count,
  demand_count, return_count, charge_count, has_remaining, quota_version, quota_life, quota_in_flight, lends, pos =
  struct.unpack(CALL, call)
if format ~= FORMAT then
  return redis.error_reply('TOLLGATE format ' .. format .. ' of calls is unknown, this script understands ' .. FORMAT)
end
-- What stands for no limit in a reply.
local NO_LIMIT = '\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0'
-- Nil unless the key is the part of a class.
if lends == NO_PART then lends = nil end
-- How many bytes the head of the state has, with a record for each limit of the call, and one more if the
-- call has a quota version.
local head_size = HEAD_SIZE + RECORD_SIZE * (quota_version == 0 and limit_count or limit_count + 1)
-- The head of the state, with two records or more; empty if there is no state. Few states have more. What
-- follows the records is not used.
local head = redis.call('GETRANGE', key, '0', head_size > 241 and head_size - 1 or '240')
