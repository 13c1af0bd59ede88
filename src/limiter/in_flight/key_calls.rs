//! The calls in flight of one key from this process, and the requests that wait for a slot.

use std::task::{Context, Poll};
use std::time::Instant;

use super::claims::{ClaimCounts, ClaimTerms, KeyClaims, Validity};
use crate::clock;
use crate::key::Key;
use crate::key_map::Evict;
use crate::limiter::queue::next_number;
use crate::limiter::reservation::NoSlot;
use crate::store::{Claim, StoreEvent};
use crate::tuning::ANSWER;
use crate::wait_queue::{Left, Number, WaitQueue};
use crate::wakers::Wakers;

/// The calls in flight of one key from this process, and the requests that wait for a slot.
pub(in crate::limiter) struct KeyCalls {
    /// Calls in flight.
    in_use: u32,
    /// Slots that were granted and are not in use.
    free: u32,
    /// The requests that wait for a slot, and their slots.
    waiters: WaitQueue<Patience, Result<Number, NoSlot>>,
    /// The claim whose answer ends the wait of the last impatient request. Zero if none has entered since that answer.
    until_answer: u64,
    /// The slots that were not collected at the last look.
    overdue: Vec<Number>,
    /// Whether a patient request has left since the last claim.
    gave_up: bool,
    claims: KeyClaims,
    validity: Validity,
    /// The limit of the key, if it is not the configured one.
    own_limit: Option<u32>,
    /// Whether the last claim states another limit.
    has_new_limit: bool,
    /// Until when a task looks for slots that were granted and not collected. After that, it counts as lost.
    looks_until: Option<Instant>,
    /// When this last changed.
    used_at: Instant,
}

/// How long a request waits for a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    /// Until it gets a slot, or leaves.
    Patient,
    /// Until the store answers the claim with this number. The request cannot wait for longer.
    Impatient { until_answer: u64 },
}

impl Evict for KeyCalls {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        let is_empty = self.in_use == 0 && self.waiters.is_empty();
        // The store may still grant slots to requests that have left, and these slots have to be
        // returned.
        (is_empty && self.claims.known == ClaimCounts::default()).then_some(self.used_at)
    }
}

impl KeyCalls {
    pub(in crate::limiter) fn new(own_limit: Option<u32>, now: Instant) -> Self {
        KeyCalls {
            in_use: 0,
            free: 0,
            waiters: WaitQueue::default(),
            until_answer: 0,
            overdue: Vec::new(),
            gave_up: false,
            claims: KeyClaims::new(),
            validity: Validity::default(),
            own_limit,
            has_new_limit: false,
            looks_until: None,
            used_at: now,
        }
    }

    /// Returns the number by which the store knows this process and key.
    pub(in crate::limiter) fn holder(&self) -> u64 {
        self.claims.holder
    }

    /// Returns the limit of the key, if it is not the configured one.
    pub(in crate::limiter) fn own_limit(&self) -> Option<u32> {
        self.own_limit
    }

    pub(in crate::limiter) fn set_own_limit(&mut self, limit: Option<u32>) {
        self.has_new_limit |= self.own_limit != limit;
        self.own_limit = limit;
    }

    /// Returns how many calls are in flight.
    pub(in crate::limiter) fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Returns whether a slot is free that was granted to this process.
    pub(super) fn has_free(&self) -> bool {
        self.free > 0
    }

    /// Returns how many requests wait.
    pub(in crate::limiter) fn waiting(&self) -> usize {
        self.waiters.waiting()
    }

    /// Enters a request. Even if its wait ends at once, only [`collect`](KeyCalls::collect) returns
    /// the result. An `impatient` request waits for the answer to one claim at most.
    pub(in crate::limiter) fn enter(&mut self, number: Number, impatient: bool, now: Instant) {
        // If requests wait although the store has answered the last claim, it has no free slot.
        let is_wanted = self.waiting() > 0 || self.claims.known.queued > 0;
        let none_left = is_wanted && !self.has_new_limit;
        if impatient && none_left && self.free == 0 && self.claims.is_answered() {
            self.waiters.enter_settled(number, Err(NoSlot::NEVER));
            return;
        }
        let wait = if impatient {
            self.until_answer = self.claims.number + 1;
            Patience::Impatient {
                until_answer: self.until_answer,
            }
        } else {
            Patience::Patient
        };
        // No task waits yet. The first poll sets when it wakes.
        self.waiters.enter(number, wait, now);
        self.grant_free(now, &mut Wakers::default());
    }

    /// Returns the claim to send to the store, if one is due.
    pub(in crate::limiter) fn claim(&mut self, key: Key, terms: ClaimTerms) -> Option<Claim> {
        let queued = u32::try_from(self.waiting()).unwrap_or(u32::MAX);
        let counts = ClaimCounts {
            in_use: self.in_use,
            queued,
        };
        // The answer ends the wait of requests that cannot wait, even if it grants nothing. The last of
        // them may have left, while others wait.
        let wants_answer = queued > 0 && self.until_answer > self.claims.number;
        // If the last waiter has left, a claim gives up the place of the process in the store's
        // queue. After an impatient request, no such claim is sent, because its caller retries.
        // While the store counts the place, it has no free slot, and retries are refused without a
        // claim.
        let has_left = self.gave_up && counts == ClaimCounts::default();
        let has_new_limit = self.has_new_limit && counts != ClaimCounts::default();
        if !self
            .claims
            .is_due(counts, wants_answer || has_new_limit, has_left)
        {
            return None;
        }
        self.has_new_limit = false;
        self.gave_up = false;
        // The claim states only slots in use. So the store takes the free ones back.
        self.free = 0;
        let limit = self.own_limit.unwrap_or(terms.limit);
        Some(self.claims.make(key, ClaimTerms { limit, ..terms }, counts))
    }

    /// Returns how the wait of `number` ended, if it did. If the slot it got may belong to another
    /// process by now, the request waits on, in its old place.
    pub(in crate::limiter) fn collect(
        &mut self,
        number: Number,
        now: Instant,
    ) -> Option<Result<Number, NoSlot>> {
        let settled = self.waiters.collect(number)?;
        if let Ok(slot) = settled
            && self.is_lost(slot, now)
        {
            self.in_use -= 1;
            self.waiters.enter(number, Patience::Patient, now);
            return None;
        }
        Some(settled)
    }

    /// Returns whether `slot` may belong to another process.
    pub(in crate::limiter) fn is_lost(&self, slot: Number, now: Instant) -> bool {
        self.validity.is_lost(slot, now)
    }

    /// Polls the wait of `number`, which ends at `until` at the latest. If it has not ended, the
    /// task is woken when it does.
    pub(in crate::limiter) fn poll(
        &mut self,
        number: Number,
        until: Instant,
        now: Instant,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> Poll<Result<Number, NoSlot>> {
        if let Some(settled) = self.collect(number, now) {
            return Poll::Ready(settled);
        }
        if now < until {
            if self.waiters.get(number).is_none() {
                // It was not polled for so long that its slot went to the next request.
                self.enter(number, false, now);
                if let Some(settled) = self.collect(number, now) {
                    return Poll::Ready(settled);
                }
            }
            if let Some(waiter) = self.waiters.get_mut(number) {
                waiter.wake_at(until);
                waiter.register(cx);
                return Poll::Pending;
            }
        }
        self.leave(number, now, wakers);
        Poll::Ready(Err(NoSlot::NEVER))
    }

    /// Ready if `slot` is lost. Else the task is woken when it is.
    pub(in crate::limiter) fn poll_lost(&mut self, slot: Number, cx: &Context<'_>) -> Poll<()> {
        self.validity.poll_lost(slot, cx)
    }

    /// Ends the wait of `number`. A slot that it got goes to the next request.
    pub(in crate::limiter) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        match self.waiters.leave(number) {
            Some(Left::Waiting(wait)) => {
                self.gave_up |= wait == Patience::Patient;
                self.used_at = now;
            }
            Some(Left::Settled(Ok(slot))) => self.end(slot, now, wakers),
            Some(Left::Settled(_)) | None => {}
        }
    }

    /// Ends the call on `slot`. The slot goes to the next request, unless other processes wait.
    pub(in crate::limiter) fn end(&mut self, slot: Number, now: Instant, wakers: &mut Wakers) {
        self.validity.end(slot);
        self.in_use -= 1;
        if !self.is_lost(slot, now) && !self.claims.others_wait {
            self.free += 1;
            self.grant_free(now, wakers);
        }
        self.used_at = now;
    }

    /// Returns whether a task has to begin that calls [`look`](Self::look). It is needed if a request that may not be
    /// polled has not collected its slot, and another one waits, here or in another process.
    pub(in crate::limiter) fn begins_to_look(&mut self) -> bool {
        let is_any_waiting = self.waiting() > 0 || self.claims.others_wait;
        if !is_any_waiting || self.uncollected().next().is_none() {
            return false;
        }
        let now = clock::now();
        let begins = self.looks_until.is_none_or(|until| until < now);
        if begins {
            self.looks_until = Some(clock::after(now, ANSWER));
        }
        begins
    }

    /// Passes on the slots that were granted before the last look and are not collected yet.
    pub(in crate::limiter) fn look(&mut self, now: Instant, wakers: &mut Wakers) {
        self.looks_until = None;
        let (overdue, granted): (Vec<_>, Vec<_>) = self
            .uncollected()
            .partition(|(_, slot)| self.overdue.contains(slot));
        self.overdue = granted.into_iter().map(|(_, slot)| slot).collect();
        // All are out of the queue before the first slot goes to the next request.
        for (number, _) in &overdue {
            _ = self.waiters.collect(*number);
        }
        for (_, slot) in overdue {
            self.end(slot, now, wakers);
        }
    }

    /// Returns the requests that have not collected their slots, with these slots.
    fn uncollected(&self) -> impl Iterator<Item = (Number, Number)> {
        let settled = self.waiters.uncollected();
        settled.filter_map(|(number, outcome)| Some((number, *outcome.as_ref().ok()?)))
    }

    pub(in crate::limiter) fn on_event(
        &mut self,
        event: StoreEvent,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        match event {
            StoreEvent::InFlight {
                number,
                granted,
                others_wait,
                version,
            } => {
                if let Some(more) = self.claims.answered(number, granted, others_wait, version) {
                    self.free = self.free.saturating_add(more);
                    self.grant_free(now, wakers);
                    self.refuse_answered(number, wakers);
                }
            }
            StoreEvent::Failed(error) => {
                self.claims.failed();
                self.waiters
                    .settle_where(|_, _| Some(Err(NoSlot::Failed(error.clone()))), wakers);
                self.until_answer = 0;
            }
            StoreEvent::ClaimValidUntil(until) => {
                self.validity.until = Some(until);
                self.grant_free(now, wakers);
            }
            StoreEvent::ClaimExpired => {
                // The store may grant the free slots to other processes. The next claim does not state them.
                self.free = 0;
                self.validity.lose_all(wakers);
            }
            StoreEvent::Hold(_) | StoreEvent::RemainingFell { .. } | StoreEvent::Register(_) => {}
            StoreEvent::SetQuota(_) => {}
            StoreEvent::EventsMissed | StoreEvent::Reconnected | StoreEvent::Disconnected => {}
        }
        self.used_at = now;
    }

    /// Gives the free slots to the requests that came first.
    fn grant_free(&mut self, now: Instant, wakers: &mut Wakers) {
        while self.free > 0 && self.waiting() > 0 && self.validity.is_valid(now) {
            self.waiters.settle_first(Ok(next_number()), wakers);
            self.free -= 1;
            self.in_use += 1;
        }
    }

    /// Refuses the impatient requests that waited for the answer to the claim `number`, or to an
    /// earlier one.
    fn refuse_answered(&mut self, number: u64, wakers: &mut Wakers) {
        if self.until_answer == 0 {
            return;
        }
        self.waiters.settle_where(
            |_, wait| match *wait {
                Patience::Impatient { until_answer } if until_answer <= number => {
                    Some(Err(NoSlot::NEVER))
                }
                _ => None,
            },
            wakers,
        );
        if self.until_answer <= number {
            self.until_answer = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use std::time::Duration;

    use super::*;
    use crate::clock;
    use crate::error::StoreError;

    const TTL: Duration = Duration::from_secs(10);

    fn no_calls() -> KeyCalls {
        KeyCalls::new(None, clock::now())
    }

    fn claim(calls: &mut KeyCalls) -> Option<(u32, u32)> {
        let terms = ClaimTerms {
            limit: 8,
            class: 0,
            share: 0,
            ttl: TTL,
        };
        calls
            .claim(Key::ALL, terms)
            .map(|claim| (claim.in_use, claim.wanted))
    }

    fn on_event(calls: &mut KeyCalls, event: StoreEvent) {
        calls.on_event(event, clock::now(), &mut Wakers::default());
    }

    fn answer(calls: &mut KeyCalls, granted: u64) {
        let number = calls.claims.number;
        on_event(calls, StoreEvent::in_flight(number, granted, false, 1));
    }

    fn enter(calls: &mut KeyCalls, impatient: bool) -> Number {
        let number = next_number();
        calls.enter(number, impatient, clock::now());
        number
    }

    fn granted(calls: &mut KeyCalls, number: Number, now: Instant) -> Number {
        match calls.collect(number, now) {
            Some(Ok(slot)) => slot,
            settled => panic!("no slot: {settled:?}"),
        }
    }

    fn is_lost(calls: &mut KeyCalls, slot: Number) -> bool {
        calls
            .poll_lost(slot, &Context::from_waker(Waker::noop()))
            .is_ready()
    }

    /// The claim of a free slot expires, so others may have it.
    #[test]
    fn a_free_slot_is_lost_with_its_claim() {
        let mut calls = no_calls();
        let first = enter(&mut calls, false);
        assert_eq!(claim(&mut calls), Some((0, 1)));
        answer(&mut calls, 1);
        let slot = granted(&mut calls, first, clock::now());
        calls.end(slot, clock::now(), &mut Wakers::default());
        assert!(calls.has_free());
        on_event(&mut calls, StoreEvent::ClaimExpired);
        assert!(!calls.has_free());
        let next = enter(&mut calls, false);
        assert!(calls.collect(next, clock::now()).is_none());
        assert_eq!(claim(&mut calls), Some((0, 1)));
    }

    #[test]
    fn slots_granted_after_a_loss_are_not_lost() {
        let mut calls = no_calls();
        let (first, second) = (enter(&mut calls, false), enter(&mut calls, false));
        assert_eq!(claim(&mut calls), Some((0, 2)));
        answer(&mut calls, 1);
        let first = granted(&mut calls, first, clock::now());
        assert!(!is_lost(&mut calls, first));
        on_event(&mut calls, StoreEvent::ClaimExpired);
        answer(&mut calls, 2);
        let second = granted(&mut calls, second, clock::now());
        assert!(is_lost(&mut calls, first));
        assert!(!is_lost(&mut calls, second));
    }

    #[test]
    fn lost_slots_are_not_passed_on() {
        let mut calls = no_calls();
        let first = enter(&mut calls, false);
        assert_eq!(claim(&mut calls), Some((0, 1)));
        answer(&mut calls, 1);
        let first = granted(&mut calls, first, clock::now());
        let second = enter(&mut calls, false);
        assert_eq!(claim(&mut calls), Some((1, 1)));
        answer(&mut calls, 1);
        on_event(&mut calls, StoreEvent::ClaimExpired);
        calls.end(first, clock::now(), &mut Wakers::default());
        assert!(calls.collect(second, clock::now()).is_none());
        assert_eq!(claim(&mut calls), Some((0, 1)));
    }

    #[test]
    fn answers_with_an_older_version_are_ignored() {
        let mut calls = no_calls();
        let (first, second) = (enter(&mut calls, false), enter(&mut calls, false));
        assert_eq!(claim(&mut calls), Some((0, 2)));
        on_event(&mut calls, StoreEvent::in_flight(1, 1, true, 2));
        on_event(&mut calls, StoreEvent::in_flight(1, 0, false, 1));
        let first = granted(&mut calls, first, clock::now());
        calls.end(first, clock::now(), &mut Wakers::default());
        assert!(
            calls.collect(second, clock::now()).is_none(),
            "other processes wait"
        );
        assert_eq!(claim(&mut calls), Some((0, 1)));
    }

    #[test]
    fn impatient_requests_wait_for_the_next_answer_only() {
        let mut calls = no_calls();
        let first = enter(&mut calls, true);
        assert_eq!(claim(&mut calls), Some((0, 1)));
        let second = enter(&mut calls, true);
        assert_eq!(claim(&mut calls), None, "one claim at a time");
        answer(&mut calls, 0);
        assert!(matches!(
            calls.collect(first, clock::now()),
            Some(Err(NoSlot::TooLate(_)))
        ));
        assert_eq!(claim(&mut calls), Some((0, 1)));
        answer(&mut calls, 0);
        assert!(matches!(
            calls.collect(second, clock::now()),
            Some(Err(NoSlot::TooLate(_)))
        ));
        let third = enter(&mut calls, true);
        assert!(
            matches!(
                calls.collect(third, clock::now()),
                Some(Err(NoSlot::TooLate(_)))
            ),
            "no slot is free"
        );
        assert_eq!(claim(&mut calls), None);
    }

    #[test]
    fn state_is_kept_while_the_store_may_grant_slots() {
        let mut calls = no_calls();
        let number = enter(&mut calls, true);
        assert_eq!(claim(&mut calls), Some((0, 1)));
        answer(&mut calls, 0);
        assert!(matches!(
            calls.collect(number, clock::now()),
            Some(Err(NoSlot::TooLate(_)))
        ));
        assert_eq!((claim(&mut calls), calls.idle_from()), (None, None));
        answer(&mut calls, 1);
        assert_eq!(claim(&mut calls), Some((0, 0)));
        assert!(calls.idle_from().is_some());
    }

    #[test]
    fn the_last_request_that_leaves_is_claimed() {
        let mut calls = no_calls();
        let (first, second) = (enter(&mut calls, false), enter(&mut calls, false));
        assert_eq!(claim(&mut calls), Some((0, 2)));
        answer(&mut calls, 0);
        calls.leave(first, clock::now(), &mut Wakers::default());
        assert_eq!(claim(&mut calls), None);
        calls.leave(second, clock::now(), &mut Wakers::default());
        assert_eq!(claim(&mut calls), Some((0, 0)));
        assert!(calls.idle_from().is_some());
    }

    #[test]
    fn state_is_idle_once_a_failed_wait_is_collected() {
        let mut calls = no_calls();
        let number = enter(&mut calls, false);
        assert_eq!(claim(&mut calls), Some((0, 1)));
        on_event(&mut calls, StoreEvent::Failed(StoreError::Lost));
        assert_eq!(claim(&mut calls), Some((0, 0)));
        on_event(&mut calls, StoreEvent::Failed(StoreError::Lost));
        assert_eq!((claim(&mut calls), calls.idle_from()), (None, None));
        assert!(matches!(
            calls.collect(number, clock::now()),
            Some(Err(NoSlot::Failed(_)))
        ));
        assert!(calls.idle_from().is_some());
    }

    /// A process that was suspended until its claim expired passes no slot on, and uses none.
    #[test]
    fn slots_are_not_used_after_their_claim_expires() {
        let (mut calls, start) = (no_calls(), clock::now());
        let numbers: Vec<_> = (0..3).map(|_| enter(&mut calls, false)).collect();
        assert_eq!(claim(&mut calls), Some((0, 3)));
        on_event(&mut calls, StoreEvent::ClaimValidUntil(start + TTL));
        answer(&mut calls, 2);
        let first = granted(&mut calls, numbers[0], start);
        let late = start + TTL;
        assert!(
            calls.collect(numbers[1], late).is_none(),
            "its slot may belong to another process"
        );
        calls.end(first, late, &mut Wakers::default());
        assert!(
            calls.collect(numbers[2], late).is_none(),
            "the first slot is not passed on"
        );
        assert_eq!(claim(&mut calls), Some((0, 2)));
        on_event(&mut calls, StoreEvent::ClaimValidUntil(late + TTL));
        answer(&mut calls, 3);
        assert!(calls.collect(numbers[1], late).is_some(), "it comes first");
        assert!(calls.collect(numbers[2], late).is_none());
    }
}
