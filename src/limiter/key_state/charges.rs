//! Units that were used without a permit, until the store has counted them.

use std::mem;
use std::time::{Duration, Instant};

use crate::clock;
use crate::limit::{Charge, UnusedPermits};
use crate::limiter::queue::{Returns, next_number};
use crate::tuning::ANSWER;

/// How long the units wait for a call that carries them. After that, they get a call of their own.
pub(super) const DELAY: Duration = Duration::from_millis(100);

/// How long the units wait for another call after the store failed.
pub(super) const RETRY: Duration = Duration::from_millis(1000);

/// Identifies the units that one call carries.
/// A smaller number is that of an earlier call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::limiter) struct ChargeNumber(u64);

impl ChargeNumber {
    pub(in crate::limiter) fn next() -> Self {
        ChargeNumber(next_number())
    }
}

/// Units in a call that has no answer yet.
#[derive(Debug)]
struct UnderWay {
    number: ChargeNumber,
    /// The first call that carried any of them.
    first: ChargeNumber,
    units: u64,
    since: Instant,
}

impl UnderWay {
    fn is_lost(&self, now: Instant) -> bool {
        clock::after(self.since, ANSWER) <= now
    }
}

/// Units of one key that were used without a permit and that the store may not have counted, and the
/// permits whose units they replace. Any call to the store carries those that wait.
///
/// A call whose outcome is unknown may have counted the units. They are then sent again: units that
/// count twice keep the limit, and forgotten units do not. For the same reason, a permit is given back
/// once, by the call that carries the units that replace its own.
#[derive(Debug, Default)]
pub(super) struct PendingCharges {
    /// Units that no call carries.
    waiting: u64,
    /// The first call that carried any of the units that wait, if one has.
    waiting_since: Option<ChargeNumber>,
    under_way: Vec<UnderWay>,
    /// When the last of the units was sent.
    sent_at: Option<Instant>,
    /// The permits whose units are replaced by units that wait.
    permits: Vec<UnusedPermits>,
}

impl PendingCharges {
    /// Adds units that were sent at `sent_at`. They replace those of a `permit`, if there is one.
    pub(super) fn add(&mut self, units: u64, sent_at: Instant, permit: Option<UnusedPermits>) {
        self.waiting = self.waiting.saturating_add(units);
        self.sent_at = self.sent_at.max(Some(sent_at));
        self.permits.extend(permit);
    }

    /// Returns the charge that a call carries now and its number, and adds the permits that the call gives back to
    /// `returns`. Units that were sent more than `memory` ago count no more and are dropped.
    pub(super) fn take(
        &mut self,
        memory: Duration,
        now: Instant,
        returns: &mut Returns,
    ) -> Option<(Charge, ChargeNumber)> {
        self.give_up(now);
        returns.extend(self.permits.drain(..));
        let age = now.saturating_duration_since(self.sent_at?);
        let units = mem::take(&mut self.waiting);
        if age > memory || units == 0 {
            return None;
        }
        let number = ChargeNumber::next();
        self.under_way.push(UnderWay {
            number,
            first: self.waiting_since.take().unwrap_or(number),
            units,
            since: now,
        });
        Some((Charge::new(age, units), number))
    }

    /// Gives up calls without an answer for so long that they count as lost: their units wait again.
    pub(super) fn give_up(&mut self, now: Instant) {
        while let Some(index) = self.under_way.iter().position(|call| call.is_lost(now)) {
            let lost = self.under_way.swap_remove(index);
            self.wait_again(lost);
        }
    }

    fn wait_again(&mut self, call: UnderWay) {
        self.waiting = self.waiting.saturating_add(call.units);
        let before = self.waiting_since.unwrap_or(call.first);
        self.waiting_since = Some(before.min(call.first));
    }

    /// Takes in whether the call with these units has reached the store.
    pub(super) fn answered(&mut self, number: ChargeNumber, has_arrived: bool) {
        let mut calls = self.under_way.iter();
        let Some(index) = calls.position(|call| call.number == number) else {
            return;
        };
        let call = self.under_way.swap_remove(index);
        if !has_arrived {
            self.wait_again(call);
        }
    }

    /// Returns whether units, or permits that they replace, wait for a call.
    pub(super) fn are_waiting(&self) -> bool {
        self.waiting > 0 || !self.permits.is_empty()
    }

    /// Returns whether units of a call before the call `last` are on their way, maybe again. `None` stands for all calls.
    pub(super) fn are_under_way(&self, last: Option<ChargeNumber>) -> bool {
        let mut calls = self.under_way.iter();
        calls.any(|call| last.is_none_or(|last| call.first < last))
    }

    /// Returns whether the store has counted all units.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0 && self.under_way.is_empty() && self.permits.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Duration = Duration::from_secs(60);

    /// Returns the charge that a call carries at `now`, its number, and how many permits it gives back.
    fn take(
        charges: &mut PendingCharges,
        now: Instant,
    ) -> (Option<Charge>, Option<ChargeNumber>, usize) {
        let mut returns = Returns::new();
        let (charge, number) = charges.take(MEMORY, now, &mut returns).unzip();
        (charge, number, returns.len())
    }

    fn charge(age: u64, units: u64) -> Option<Charge> {
        Some(Charge::new(Duration::from_secs(age), units))
    }

    #[test]
    fn units_of_unknown_outcome_are_sent_again() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        let (sent, first, _) = take(&mut charges, now);
        assert_eq!(sent, charge(0, 5));
        charges.add(2, now, None);
        // The first call is under way.
        let (sent, second, _) = take(&mut charges, now);
        assert_eq!(sent, charge(0, 2));
        charges.answered(first.unwrap(), false);
        charges.answered(second.unwrap(), true);
        let later = now + Duration::from_secs(3);
        let (sent, third, _) = take(&mut charges, later);
        assert_eq!(sent, charge(3, 5));
        // It has no answer for so long that it counts as lost. What it says then is late.
        let much_later = later + ANSWER;
        let (sent, fourth, _) = take(&mut charges, much_later);
        assert_eq!(sent.map(|charge| charge.units), Some(5));
        charges.answered(third.unwrap(), true);
        assert!(!charges.is_empty());
        charges.answered(fourth.unwrap(), true);
        assert!(charges.is_empty());
        assert_eq!(take(&mut charges, much_later), (None, None, 0));
    }

    #[test]
    fn units_that_are_sent_again_are_those_of_their_first_call() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        let (_, first, _) = take(&mut charges, now);
        let last = ChargeNumber::next();
        charges.answered(first.unwrap(), false);
        charges.add(2, now, None);
        let (_, second, _) = take(&mut charges, now);
        assert!(charges.are_under_way(Some(last)));
        charges.answered(second.unwrap(), true);
        charges.add(1, now, None);
        take(&mut charges, now);
        assert!(!charges.are_under_way(Some(last)));
        assert!(charges.are_under_way(None));
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
        let (sent, number, returned) = take(&mut charges, now);
        assert_eq!((sent, returned), (charge(0, 4), 1));
        charges.answered(number.unwrap(), false);
        let (sent, number, returned) = take(&mut charges, now);
        assert_eq!((sent, returned), (charge(0, 4), 0));
        charges.answered(number.unwrap(), true);
        // A request that cost nothing gives its permit back, too.
        charges.add(0, now, Some(permit));
        assert!(!charges.is_empty());
        assert!(charges.are_waiting());
        assert_eq!(take(&mut charges, now), (None, None, 1));
        assert!(charges.is_empty());
    }

    #[test]
    fn units_count_from_when_the_last_of_them_was_sent() {
        let start = clock::now();
        let now = start + Duration::from_secs(30);
        let mut charges = PendingCharges::default();
        charges.add(4, start + Duration::from_secs(10), None);
        charges.add(4, start, None);
        assert_eq!(take(&mut charges, now).0, charge(20, 8));
    }

    #[test]
    fn units_older_than_a_window_are_dropped() {
        let now = clock::now();
        let mut charges = PendingCharges::default();
        charges.add(5, now, None);
        let (_, number, _) = take(&mut charges, now);
        charges.answered(number.unwrap(), false);
        assert_eq!(take(&mut charges, now + MEMORY * 2), (None, None, 0));
        assert!(charges.is_empty());
    }
}
