-- Decides about the permits of one key: tollgate's rules (src/limit), in Redis.
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the call, packed; the answer is packed too. The formats are in src/guide/redis_format.md.
-- ARGV[2]  where the key is held or released: the channel on which all are told
-- ARGV[3]  and the name of the key, as they will know it
--
-- Times are whole microseconds; spans too. All numbers stay below 2^53.
--
-- A script is a function that is made anew for each call, with every function in it: 50 ns for one, and more for each
-- variable it shares. So what is seldom needed is made when it is needed, and what all need is in one table, S.

-- The format of calls, and those of states: 2 if it holds what a release that knows 1 alone would misread.
local VERSION, PLAIN, LATEST = 2, 1, 2
local NEVER = 9007199254740992
local WINDOW, BUCKET, FIXED, STRANGERS = 1, 2, 3, 4

-- ── the state: a head, a record for each limit, a region of entries for each, the pool ───────────────────────────────

local HEAD, HEAD_SIZE, RECORD_SIZE = '<BBBBI7I7I7I7dI7I7I7I4', 65, 90

local STRANGERS_RECORD = '<BI4I7I4BI7I4I4I4I4I4BI7I7I7dI7I7'
local WINDOW_RECORD = '<BI4I7I4I7I7I2I2I7I7I2I2I7I2I7I7I4I7I4'

-- ── the call ─────────────────────────────────────────────────────────────────────────────────────────────────────────

local LEASE, PEEK, RETURN, HOLD, RELEASE = 1, 2, 3, 4, 5
local GRANTED, REFUSED, LEARNING, UNSURE = 0, 1, 2, 3
-- Besides: others use a limit too; the hold was cut, as the upstream said that it lasts longer.
local SHARED, CUT = 4, 8
-- What a message of a hold begins with, and of one that was cut.
local HOLD_MESSAGE, CUT_MESSAGE, LESS_MESSAGE = 1, 4, 5
-- More permits in one call would keep the server from others for too long.
local MOST_PERMITS = 2000
-- How far the clock of the server may be from where the caller expects it, besides a thousandth of the time between, and
-- ahead of it besides the time that call and answer may have been on their way.
local CLOCK_TOLERANCE = 250000
local REPLY, REPLY_WITH_ONE = '<BBI7I7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2', '<BBI7I7I7I7I7I7I7I4BI4I7I4BI4I7I4I4I7I2I4I4I7I7'
-- How much longer a key lives than it must, so that not every grant has to move its end.
local LIVES_ON = 2000000
local NONE = { kind = 0, count = 0, window = 0, capacity = 0 }

local raw = redis.call('TIME')
raw = raw[1] * 1000000 + raw[2]

local ARG = ARGV[1]
local version, operation, dice, known, known_writes, seen, since, on_way, server_seen, server_since, granted_before, slack,
  guard, latest, life, ahead, ahead_life, hold_left, hold_releases, hold_cut, limit_count, need_count, return_count, charge_count,
  left_count, at = struct.unpack('<BBI7I7I7I7I7I7I7I7I7I7I7I7I7I4I7I7I4BBI2I2BB', ARG)
if version ~= VERSION then
  return redis.error_reply('TOLLGATE format ' .. version .. ' of calls is unknown, this script understands ' .. VERSION)
end
local s = redis.call('GETRANGE', KEYS[1], 0, HEAD_SIZE + RECORD_SIZE * limit_count - 1)
