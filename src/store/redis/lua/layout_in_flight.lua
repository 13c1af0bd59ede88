-- Layout of calls in flight: the bytes that only in_flight.lua reads and writes. A function of Lua has
-- at most 200 local variables, and the script about rates needs them.
--
-- needs: layout.lua, which explains the formats

-- B format; B operation; I7 random number; I7 I7 I7 incarnation, changes and time of the last
-- reply; I7 its age; I7 on way; I7 I7 server's clock in an UNSURE reply, and the age of that reply;
-- I7 store (its random number, which names its channel); I7 holder; I7 number of the claim; I4
-- limit; I4 slots in use; I4 slots wanted in addition; I7 granted seen; I7 time to live. CLASS
-- follows if the limit is divided among classes.
local CLAIM_CALL = '<BBI7I7I7I7I7I7I7I7I7I7I7I4I4I4I7I7'
-- B format; B status; I7 now; I7 incarnation; I7 changes; I7 number; I7 granted; B others wait; I7
-- until the first other claim expires, 0 for never; I7 recovering for.
local CLAIM_REPLY = '<BBI7I7I7I7I7BI7I7'
-- B format; B status; I4 in use; I4 free.
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
-- I4 class of requests, 0 for those of no class with a share; B its share of the limit, in per cent.
-- If a holder has a share, one of each holder follows the batches, in the order of the holders.
local CLASS = '<I4B'
local CLASS_SIZE = 5
