//! Units that were used without a permit, until the store has counted them.

use std::time::{Duration, Instant};

use crate::limit::Charge;

/// How long the units wait for a call that carries them. After that, they get a call of their own.
const DELAY: Duration = Duration::from_millis(100);

/// How long the units wait for another call after the store failed.
const RETRY: Duration = Duration::from_millis(1000);

/// Units of one key that were used without a permit and that the store may not have counted.
///
/// A call whose outcome is unknown may have counted them. They are then sent again: units that
/// count twice keep the limit, and forgotten units do not.
#[derive(Debug, Default)]
pub(super) struct PendingCharges {
    /// Units that no call has carried.
    waiting: u64,
    /// Units that the last call has carried, until its answer.
    sent: u64,
    /// When the last of the units was used.
    used_at: Option<Instant>,
    /// Whether a task is about to send the units.
    has_task: bool,
}

impl PendingCharges {
    /// Adds units that were used now.
    pub(super) fn add(&mut self, units: u64, now: Instant) {
        self.waiting = self.waiting.saturating_add(units);
        self.used_at = Some(now);
    }

    /// Returns the charge that a call carries now. Units that were used more than `memory` ago count
    /// no more and are dropped.
    pub(super) fn take(&mut self, memory: Duration, now: Instant) -> Option<Charge> {
        let age = now.saturating_duration_since(self.used_at?);
        let units = self.sent.saturating_add(self.waiting);
        (self.waiting, self.sent) = (0, if age <= memory { units } else { 0 });
        (self.sent > 0).then(|| Charge::new(age, self.sent))
    }

    /// Takes in whether the last call has reached the store.
    pub(super) fn answered(&mut self, has_arrived: bool) {
        if !has_arrived {
            self.waiting = self.waiting.saturating_add(self.sent);
        }
        self.sent = 0;
    }

    /// Returns after which delay a task has to send the units. `None` if there are none, or if a
    /// task is about to send them. `failed` states whether the store failed.
    pub(super) fn start_task(&mut self, failed: bool) -> Option<Duration> {
        if self.waiting == 0 || self.has_task {
            return None;
        }
        self.has_task = true;
        Some(if failed { RETRY } else { DELAY })
    }

    /// Notes that the task has run. Returns whether units wait for a call.
    pub(super) fn end_task(&mut self) -> bool {
        self.has_task = false;
        self.waiting > 0
    }

    /// Returns whether the store has counted all units.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0 && self.sent == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const MEMORY: Duration = Duration::from_secs(60);

    #[test]
    fn units_of_unknown_outcome_are_sent_again() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now);
        assert_eq!(
            charges.take(MEMORY, now).map(|charge| charge.units),
            Some(5)
        );
        charges.add(2, now);
        // The call is lost: the next one carries all units.
        assert_eq!(
            charges.take(MEMORY, now).map(|charge| charge.units),
            Some(7)
        );
        charges.answered(false);
        let later = now + Duration::from_secs(3);
        assert_eq!(
            charges.take(MEMORY, later),
            Some(Charge::new(Duration::from_secs(3), 7))
        );
        charges.add(1, later);
        charges.answered(true);
        assert_eq!(
            charges.take(MEMORY, later).map(|charge| charge.units),
            Some(1)
        );
        charges.answered(true);
        assert!(charges.is_empty());
        assert_eq!(charges.take(MEMORY, later), None);
    }

    #[test]
    fn units_older_than_a_window_are_dropped() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now);
        charges.take(MEMORY, now);
        charges.answered(false);
        assert_eq!(charges.take(MEMORY, now + MEMORY * 2), None);
        assert!(charges.is_empty());
    }

    #[test]
    fn one_task_at_a_time_sends_the_units() {
        let mut charges = PendingCharges::default();
        assert_eq!(charges.start_task(false), None);
        charges.add(1, clock::now());
        assert_eq!(charges.start_task(false), Some(DELAY));
        assert_eq!(charges.start_task(false), None);
        assert!(charges.end_task());
        assert_eq!(charges.start_task(true), Some(RETRY));
    }
}
