//! Units that were used without a permit, until the store has counted them.

use std::time::{Duration, Instant};

use crate::limit::{Charge, UnusedPermits};
use crate::limiter::queue::Returns;

/// How long the units wait for a call that carries them. After that, they get a call of their own.
const DELAY: Duration = Duration::from_millis(100);

/// How long the units wait for another call after the store failed.
const RETRY: Duration = Duration::from_millis(1000);

/// Units of one key that were used without a permit and that the store may not have counted, and the
/// permits whose units they replace.
///
/// A call whose outcome is unknown may have counted the units. They are then sent again: units that
/// count twice keep the limit, and forgotten units do not. For the same reason, a permit is given back
/// once, by the call that carries the units that replace its own.
#[derive(Debug, Default)]
pub(super) struct PendingCharges {
    /// Units that no call has carried.
    waiting: u64,
    /// Units that the last call has carried, until its answer.
    sent: u64,
    /// Units in calls that a flush has sent, until their answers.
    flushing: u64,
    /// When the last of the units was sent.
    sent_at: Option<Instant>,
    /// The permits whose units are replaced by units that wait.
    permits: Vec<UnusedPermits>,
    /// Whether a task is about to send the units.
    has_task: bool,
}

impl PendingCharges {
    /// Adds units that were sent at `sent_at`. They replace those of a `permit`, if there is one.
    pub(super) fn add(&mut self, units: u64, sent_at: Instant, permit: Option<UnusedPermits>) {
        self.waiting = self.waiting.saturating_add(units);
        self.sent_at = self.sent_at.max(Some(sent_at));
        self.permits.extend(permit);
    }

    /// Returns the charge that a call carries now, and adds the permits that it gives back to
    /// `returns`. Units that were sent more than `memory` ago count no more and are dropped.
    pub(super) fn take(
        &mut self,
        memory: Duration,
        now: Instant,
        returns: &mut Returns,
    ) -> Option<Charge> {
        returns.extend(self.permits.drain(..));
        let age = now.saturating_duration_since(self.sent_at?);
        let units = self.sent.saturating_add(self.waiting);
        (self.waiting, self.sent) = (0, if age <= memory { units } else { 0 });
        (self.sent > 0).then(|| Charge::new(age, self.sent))
    }

    /// Returns the charge of a call that a flush sends now, and its units. Adds the permits that it gives
    /// back to `returns`. Units in another call are left to that call, if it `is_under_way`.
    pub(super) fn flush(
        &mut self,
        is_under_way: bool,
        memory: Duration,
        now: Instant,
        returns: &mut Returns,
    ) -> (Option<Charge>, u64) {
        let elsewhere = if is_under_way { self.sent } else { 0 };
        self.sent -= elsewhere;
        let charge = self.take(memory, now, returns);
        let units = std::mem::replace(&mut self.sent, elsewhere);
        self.flushing += units;
        (charge, units)
    }

    /// Takes in whether a call of a flush with `units` has reached the store.
    pub(super) fn flushed(&mut self, units: u64, has_arrived: bool) {
        self.flushing -= units;
        if !has_arrived {
            self.waiting = self.waiting.saturating_add(units);
        }
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
        if (self.waiting == 0 && self.permits.is_empty()) || self.has_task {
            return None;
        }
        self.has_task = true;
        Some(if failed { RETRY } else { DELAY })
    }

    /// Notes that the task has run. Returns whether units wait for a call.
    pub(super) fn end_task(&mut self) -> bool {
        self.has_task = false;
        self.waiting > 0 || !self.permits.is_empty()
    }

    /// Returns whether the store has counted all units.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0 && self.sent == 0 && self.flushing == 0 && self.permits.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    const MEMORY: Duration = Duration::from_secs(60);

    /// Returns the age and the units of the charge that a call carries at `now`, and how many permits
    /// it gives back.
    fn take(charges: &mut PendingCharges, now: Instant) -> (Option<Charge>, usize) {
        let mut returns = Returns::new();
        let charge = charges.take(MEMORY, now, &mut returns);
        (charge, returns.len())
    }

    fn charge(age: u64, units: u64) -> Option<Charge> {
        Some(Charge::new(Duration::from_secs(age), units))
    }

    #[test]
    fn units_of_unknown_outcome_are_sent_again() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        assert_eq!(take(&mut charges, now), (charge(0, 5), 0));
        charges.add(2, now, None);
        // The call is lost: the next one carries all units.
        assert_eq!(take(&mut charges, now), (charge(0, 7), 0));
        charges.answered(false);
        let later = now + Duration::from_secs(3);
        assert_eq!(take(&mut charges, later), (charge(3, 7), 0));
        charges.add(1, later, None);
        charges.answered(true);
        assert_eq!(take(&mut charges, later), (charge(0, 1), 0));
        charges.answered(true);
        assert!(charges.is_empty());
        assert_eq!(take(&mut charges, later), (None, 0));
    }

    #[test]
    fn a_flush_leaves_units_to_the_call_under_way() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        assert_eq!(take(&mut charges, now), (charge(0, 5), 0));
        charges.add(2, now, None);
        let flush = |charges: &mut PendingCharges, is_under_way| {
            charges.flush(is_under_way, MEMORY, now, &mut Returns::new())
        };
        assert_eq!(flush(&mut charges, true), (charge(0, 2), 2));
        charges.answered(true);
        assert!(!charges.is_empty());
        charges.flushed(2, true);
        assert!(charges.is_empty());
        // Units of lost calls are sent again.
        charges.add(4, now, None);
        take(&mut charges, now);
        assert_eq!(flush(&mut charges, false), (charge(0, 4), 4));
        charges.flushed(4, false);
        assert_eq!(flush(&mut charges, false), (charge(0, 4), 4));
        charges.flushed(4, true);
        assert!(charges.is_empty());
    }

    #[test]
    fn permits_are_given_back_once_with_the_units_that_replace_theirs() {
        let now = clock::now();
        let permit = UnusedPermits {
            slot: 1,
            stamp: 2,
            units: 9,
            incarnation: 3,
        };
        let mut charges = PendingCharges::default();
        charges.add(4, now, Some(permit));
        assert_eq!(take(&mut charges, now), (charge(0, 4), 1));
        charges.answered(false);
        assert_eq!(take(&mut charges, now), (charge(0, 4), 0));
        charges.answered(true);
        // A request that cost nothing gives its permit back, too.
        charges.add(0, now, Some(permit));
        assert!(!charges.is_empty());
        assert_eq!(charges.start_task(false), Some(DELAY));
        assert!(charges.end_task());
        assert_eq!(take(&mut charges, now), (None, 1));
        charges.answered(true);
        assert!(charges.is_empty());
    }

    #[test]
    fn units_count_from_when_the_last_of_them_was_sent() {
        let start = clock::now();
        let now = start + Duration::from_secs(30);
        let mut charges = PendingCharges::default();
        charges.add(4, start + Duration::from_secs(10), None);
        charges.add(4, start, None);
        assert_eq!(take(&mut charges, now), (charge(20, 8), 0));
    }

    #[test]
    fn units_older_than_a_window_are_dropped() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        take(&mut charges, now);
        charges.answered(false);
        assert_eq!(take(&mut charges, now + MEMORY * 2), (None, 0));
        assert!(charges.is_empty());
    }

    #[test]
    fn one_task_at_a_time_sends_the_units() {
        let mut charges = PendingCharges::default();
        assert_eq!(charges.start_task(false), None);
        charges.add(1, clock::now(), None);
        assert_eq!(charges.start_task(false), Some(DELAY));
        assert_eq!(charges.start_task(false), None);
        assert!(charges.end_task());
        assert_eq!(charges.start_task(true), Some(RETRY));
    }
}
