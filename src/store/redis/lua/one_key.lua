
-- What the files after this one decide about: one key, and one call for it. In the script about joint
-- requests, these are the parameters of a function, which joint.lua calls for each key.
--
-- needs: nothing
--
-- KEYS[1]  the state of the key: one packed string, which only this script reads and writes
-- ARGV[1]  the call, packed; the reply is packed too (layout.lua)
-- ARGV[2]  for a hold, a release, a change of the set quota, or an urgent statement of the upstream: the
--          channel of all stores. Also for a call with a quota version, which may be new to the state
-- ARGV[3]  with ARGV[2]: the token that names the key to them
local key, call, channel, token = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- Runs a command that writes. Commands that read are run by `redis.call`.
local redis_write = redis.call
-- From when on the permits are of use, counted from now. Nil: as the call states. NEVER: no permits are asked
-- for. Only joint.lua sets it, and nothing is prefetched then.
local moment = nil
