//! Tests that need the machine for themselves: they measure how much of a limit is used, and at
//! what cost. `./tests/run` runs these tests after all others, one at a time.

mod busy;
mod joint;
mod limiters;
mod sharing;
mod sharing_by_turns;
mod strangers;

use super::*;
