-- Reads the server's clock, in microseconds since the Unix epoch. This clock may be set, so
-- time.lua makes the logical time from it.
--
-- needs: nothing

local server_time = redis.call('TIME')
server_time = server_time[1] * 1000000 + server_time[2]

