//! What needs the machine for itself: how much of a limit is used, and at what cost, shows only if nothing else runs.
//! `./tests/run` runs these after all others, one at a time.

mod busy;
mod nginx;
mod sharing;
mod sharing_by_turns;
mod strangers;

use super::*;
