//! How long a process rests after conflicts: attempts to write the register that failed, because
//! another process was faster.

use std::time::Duration;

use crate::rng::Dice;

/// After how many conflicts in a row a process rests. Each further rest is up to four times as
/// long, but after `MOST_RESTS` rests they no longer grow. So a thousand processes that begin
/// together soon have no more conflicts.
const CONFLICTS_PER_REST: u32 = 4;
const MOST_RESTS: u32 = 4;

/// The conflicts in a row.
#[derive(Debug, Default)]
pub(super) struct Conflicts {
    count: u32,
}

impl Conflicts {
    /// Ends the row, because the register was written.
    pub(super) fn reset(&mut self) {
        self.count = 0;
    }

    /// Counts a conflict. Returns how long the process rests, if it rests. `longest` bounds that
    /// time.
    ///
    /// If it does not rest, the next attempt follows at once: it has the best chance, because this
    /// process has just read the latest version.
    pub(super) fn add(
        &mut self,
        round_trip: Duration,
        longest: Duration,
        dice: &mut Dice,
    ) -> Option<Duration> {
        self.count += 1;
        if !self.count.is_multiple_of(CONFLICTS_PER_REST) {
            return None;
        }
        let times = 4_u32.pow((self.count / CONFLICTS_PER_REST).min(MOST_RESTS));
        let most = round_trip.saturating_mul(times).min(longest);
        Some(most.mul_f64(dice.roll()))
    }
}
