-- Layout: the bytes of everything that the scripts read and write, and every number that Rust and
-- Lua share. The records of calls in flight are in layout_in_flight.lua.
--
-- needs: nothing
--
-- Formats are those of struct.pack: `<` little-endian without padding, `B` one byte, `I2`, `I4` and
-- `I7` unsigned numbers of two, four and seven bytes, `d` a double of eight bytes, `c16` the sixteen
-- bytes of a limit (LIMIT), `x` a zero. The comment above each format lists its fields in order. Times and spans are whole microseconds. A time is a
-- logical time (time.lua) unless the comment says "server's clock". The *server* is the Redis
-- server; the *upstream* receives the requests.
--
-- Rust reads the numbers of this file when it is compiled (src/store/redis/layout.rs). Such a
-- number stands on a line of its own, `local NAME = 1`.

-- ── the format ───────────────────────────────────────────────────────────────────────────────────

-- The first byte of every call, reply and state. A script that reads another one there replies with an
-- error that names it.
local FORMAT = 1

-- Messages have no format byte. Their first byte names their kind. A process ignores a kind that it
-- does not know. Kind 1 has one meaning on the channel of all stores, and another one on the
-- channel of one store.
--
-- A hold or a release, to all stores. B kind; I7 hold; I4 releases; B hold is cut. The token of the
-- key follows.
local HOLD_MESSAGE = 1
local HOLD_MESSAGE_FIELDS = '<BI7I4B'
-- Less of a limit remains than the state knew, to all stores. B kind; I7 writes. The token of the
-- key follows.
local REMAINING_MESSAGE = 5
local REMAINING_MESSAGE_FIELDS = '<BI7'
-- A quota was set for a key, or has ended, to all stores. B kind; QUOTA_PART and its limits; the token
-- of the key.
local QUOTA_MESSAGE = 6
-- A register was changed, to one store or all. B kind; I7 version of the register. Its name and its
-- value follow.
local REGISTER_MESSAGE = 2
local REGISTER_MESSAGE_FIELDS = '<BI7'
-- A holder of calls in flight has new slots, or others wait, to one store. B kind; I7 holder; I7
-- incarnation; I7 changes; I7 number; I7 granted; B others wait.
local IN_FLIGHT_MESSAGE = 1
local IN_FLIGHT_MESSAGE_FIELDS = '<BI7I7I7I7I7B'

-- ── numbers in calls and replies ─────────────────────────────────────────────────────────────────

-- Operations of a call about rates; a call about calls in flight is a claim or a peek. SET_QUOTA makes the limits of
-- the call those of a set quota, LEARN_QUOTA those of a learned one, and UNSET_QUOTA ends it. With the version of a
-- learned quota, UNSET_QUOTA ends no quota that an operator has set. The last demand of a peek is the request that it
-- asks about; the others are booked before it, and nothing is written.
local LEASE = 1
local PEEK = 2
local RETURN = 3
local HOLD = 4
local RELEASE = 5
local SET_QUOTA = 6
local UNSET_QUOTA = 7
local LEARN_QUOTA = 8
local CLAIM = 1

-- Statuses. Added to the status of a lease: SHARED if other clients use a limit too, CUT if the
-- hold was cut, LAST if the lease is one of a joint request and its key allows the request last. Added
-- to the status of a lease or a peek: WITH_QUOTA if a set quota follows at the end of the reply.
local GRANTED = 0
local REFUSED = 1
local RECOVERING = 2
local UNSURE = 3
local SHARED = 4
local CUT = 8
local LAST = 16
local WITH_QUOTA = 32
-- The status of a claim if PUBLISH failed. The holders that should have been notified must poll.
local NOT_PUBLISHED = 2

-- Kinds of limits, and EXTERNAL, ADVANCE and QUOTA, which are kinds of records only. A new kind of limit
-- needs a number that none of them has. main.lua refuses kinds that are larger than
-- QUOTA.
local WINDOW = 1
local BUCKET = 2
local FIXED = 3
local EXTERNAL = 4
local ADVANCE = 5
local QUOTA = 6

-- Numbers of Lua are exact up to here, 2^53. As a wait it means never.
local NEVER = 9007199254740992
-- The largest I4. As the fewest units left in a record of external usage: no statement was made.
local LARGEST_I4 = 4294967295

-- The most permits of one call: more would keep other clients waiting for the server.
local MOST_PERMITS = 2000
-- How far the server's clock may be from what the caller expects, in microseconds. A thousandth of
-- the age of the reply that the caller remembers is added.
local CLOCK_TOLERANCE = 250000
-- How much longer the limits of a part of a quota apply than those of other keys, in microseconds.
local STATED_AHEAD = 4000000

-- ── a call about rates, and its reply ────────────────────────────────────────────────────────────

-- B format; B operation; I7 random number; I7 I7 I7 incarnation, writes and time of the last
-- reply; I7 its age; I7 on way; I7 I7 server's clock in an UNSURE reply, and the age of that reply;
-- I7 units granted before; I7 transit slack; I7 boundary guard; I7 latest wait; I7 life; I4 most
-- units to prefetch; I7 their life; I7 hold; I4 releases; B hold is cut; B limits; I2 demands; I2
-- returns; B charges; B whether CALL_REMAINING follows; I4 quota version of the limits, I7 its life and I4
-- its most calls in flight, 0 for any number; B the percentage of each limit that the caller may
-- borrow, OWNS or NO_PART. The last limit of the part of a class is its pace.
local CALL = '<BBI7I7I7I7I7I7I7I7I7I7I7I7I7I4I7I7I4BBI2I2BBI4I7I4B'
local CALL_SIZE = 139
local NO_PART = 254
local OWNS = 255
-- A limit. B kind; I4 count; I7 window; I4 capacity, 0 unless it is a bucket.
local LIMIT = '<BI4I7I4'
local LIMIT_SIZE = 16
-- I4 cost; I4 permits; I7 how long after now a permit is of use at the earliest.
local CALL_DEMAND = '<I4I4I7'
local CALL_DEMAND_SIZE = 15
-- I7 slot; I7 stamp; I7 units.
local CALL_RETURN = '<I7I7I7'
-- I7 age; I7 units.
local CALL_CHARGE = '<I7I7'
-- c16 the limit; I7 units; I7 until the reset; B flags (1 steady, 2 urgent); I7 age; I4 refused; I7
-- valid for; B forget.
local CALL_REMAINING = '<c16I7I7BI7I4I7B'

-- B format; B status; I7 incarnation; I7 writes; I7 now; I7 remember; I7 wait; I7 free; I7 hold;
-- I4 releases; c16 the limit that refused; c16 a limit that the call does not have; I4 units
-- prefetched; I7 their life; I7 their span from slot to stamp; I2 segments. Zeros stand for no limit.
local REPLY = '<BBI7I7I7I7I7I7I7I4c16c16I4I7I7I2'
local REPLY_SIZE = 107
-- The UNSURE reply to any call. B format; B status; I7 server's clock.
local UNSURE_REPLY = '<BBI7'
-- I4 cost; I4 permits; I7 wait until the slot; I7 life; I7 span from slot to stamp.
local SEGMENT = '<I4I4I7I7I7'
-- A reply and its only segment.
local REPLY_WITH_SEGMENT = '<BBI7I7I7I7I7I7I7I4c16c16I4I7I7I2I4I4I7I7I7'
-- The reply to a joint request: B format; B status. Then for each key: B what to add to the status of
-- its reply (0, RECOVERING or LAST); I2 the size of its reply; the reply.
local JOINT_REPLY = '<BB'
local JOINT_PART = '<BI2'
-- B format; B status; I7 free; I7 wait; I7 hold; I4 releases; B hold is cut; I7 recovering for; B
-- limits.
local PEEK_REPLY = '<BBI7I7I7I4BI7B'
-- c16 limit; I7 used; I7 free; I7 reserved for other clients; I7 wait.
local PEEK_LIMIT = '<c16I7I7I7I7'
-- The set quota, in a reply or a message: I4 quota version; I7 for how long it applies without use, or
-- its end is remembered; I7 life; I4 most calls in flight, 0 for any number; B limits, 0 if it has
-- ended. The limits follow, each as LIMIT.
local QUOTA_PART = '<I4I7I7I4B'

-- ── the state of rates: head, records, a region of entries for each limit, advance bookings,
--    returned slots ──────────────────────────────────────────────────────────────────────────────

-- B format; B records; B returned slots; B space for returned slots; I7 incarnation; I7 writes; I7
-- made at, server's clock or logical time; I7 recovering until, even, plus 1 if the hold was cut; d
-- offset of the logical time from the server's clock; I7 time of the last write; I7 expiry,
-- server's clock; I7 held until; I4 releases.
local HEAD = '<BBBBI7I7I7I7dI7I7I7I4'
local HEAD_SIZE = 65

-- A record for each limit, for each external usage, and for the advance bookings. Shorter ones are
-- filled with zeros.
local RECORD_SIZE = 88

-- All records of limits begin so: c16 limit; I7 when a call last stated it; I2 entries; I2 space for
-- entries.
--
-- A sliding window, then: I7 units; I7 units in fine chunks; I2 coarse chunks; I2 place of the
-- oldest chunk in the ring; I2 index of the search cursor; I7 units before it; I7 I7 the oldest chunk;
-- I7 I7 the newest chunk.
-- window.lua explains the fields.
local WINDOW_RECORD = '<c16I7I2I2I7I7I2I2I2I7I7I7I7I7xxxxxx'
-- An entry is a chunk: I7 stamp; I5 units, enough for a thousand windows of the largest limit. The ring
-- is read in blocks of eight.
local CHUNK = '<I7I5'
local CHUNK_SIZE = 12
local CHUNK_BLOCK = '<I7I5I7I5I7I5I7I5I7I5I7I5I7I5I7I5'
local CHUNK_BLOCK_SIZE = 96

-- A bucket, then: I7 I4 full at; I7 newest stamp; I7 young from; I7 queued from, NEVER for none; I7 ticks in
-- which a unit is refilled; I4 ticks in a microsecond; I7 old from; I5 units since the young group began.
-- `full at` is I7, whole microseconds, and I4, how many ticks earlier it is. src/limit/bucket.rs
-- explains the fields, and bucket.lua the ticks.
local BUCKET_RECORD = '<c16I7I2I2I7I4I7I7I7I7I4I7I5xxxxxx'
-- An entry is a delayed permit: it has a later slot than the bucket requires, because another limit
-- delayed it. I7 slot; I4 units; I7 I4 full at, before the permit; I7 I4 full at, after it; I7
-- queued from.
local DELAYED = '<I7I4I7I4I7I4I7'
local DELAYED_SIZE = 40

-- A fixed window, then: I7 number of the first window that is open; I7 phase; I7 last stamp.
-- fixed.lua explains the fields.
local FIXED_RECORD = '<c16I7I2I2I7I7I7xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'
-- An entry is the use of one window: I7 number of the window; I7 units.
local WINDOW_USE = '<I7I7'
local WINDOW_USE_SIZE = 14

-- External usage of a limit: B kind; c16 limit; I7 ends; I4 seen; I4 expected; I4 refused; I4 fewest
-- left; I4 granted then; B log is complete; I7 stated at; I7 valid until; I7 confirmed until; d
-- shortfall, may be negative; I7 shortfall until; I7 counted until. src/limit/external.rs explains
-- the fields.
local EXTERNAL_RECORD = '<Bc16I7I4I4I4I4I4BI7I7I7dI7I7'

-- The advance bookings, in the last record: B kind; I2 bookings.
local ADVANCE_RECORD = '<BI2'
-- The set quota or its end: B kind; I4 quota version; I7 until when it applies without use, or its end
-- is remembered; I7 life; I4 most calls in flight, 0 for any number; B limits that are not paused, the
-- first ones; I7 booked until; I7 lost until. src/limit/set_quota.rs explains the fields.
local QUOTA_RECORD = '<BI4I7I7I4BI7I7'
-- An advance booking: d first slot; d last slot; d stamp; d units. The region has the first slots of all
-- bookings, then their last slots, their stamps and their units. Doubles are read faster than I7.
-- src/limit/advance.rs explains these numbers.
local ADVANCE_BOOKING = '<dddd'
local ADVANCE_BOOKING_SIZE = 32

-- A returned slot: I7 slot; I7 stamp; I7 units.
local RETURNED = '<I7I7I7'
local RETURNED_SIZE = 21

-- ── registers ────────────────────────────────────────────────────────────────────────────────────

-- B format; B whether to change it; I7 version of the register that the caller saw; I7 time to
-- live.
local REGISTER_CALL = '<BBI7I7'
-- B format; B whether it was changed; I7 version of the register; I7 its age. The value follows
-- unless it was changed.
local REGISTER_REPLY = '<BBI7I7'
-- The state. B format; I7 version of the register; I7 changed at, server's clock. The value
-- follows.
local REGISTER_HEAD = '<BI7I7'
local REGISTER_HEAD_SIZE = 15

