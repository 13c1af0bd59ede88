-- Logical time: the server's clock plus an offset that is kept in the state. If the server's clock
-- is set, the offset changes, so that logical time runs on evenly.
--
-- Twin: differential/model/logical_clock.rs
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

