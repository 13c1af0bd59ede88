//! The claims of a process about the calls in flight of one key, the store's answers, and until when the granted slots
//! count.

use std::collections::BTreeMap;
use std::mem;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::key::Key;
use crate::limiter::queue::next_number;
use crate::store::Claim;
use crate::wait_queue::Number;
use crate::wakers::Wakers;

/// What each claim of a limiter states besides its counts.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct ClaimTerms {
    /// The limit: calls in flight at the same time, for each key.
    pub(super) limit: u32,
    /// The class of the requests, and its share of the limit: see [`Claim::share`].
    pub(super) class: u32,
    pub(super) share: u8,
    /// How long a claim counts that is not repeated.
    pub(super) ttl: Duration,
}

/// The calls and waiters of a process at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ClaimCounts {
    /// Calls in flight.
    pub(super) in_use: u32,
    /// Requests that wait for a slot.
    pub(super) queued: u32,
}

/// The state of the exchange with the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exchange {
    /// The last claim was answered.
    Idle,
    /// The last claim was sent and not answered. No other claim is sent until then.
    Asking,
    /// The last claim failed. The store repeats it.
    Failed,
}

/// The claims of a process and their answers.
#[derive(Debug)]
pub(super) struct KeyClaims {
    /// Identifies this process and key to the store.
    pub(super) holder: u64,
    /// The number of the last claim.
    pub(super) number: u64,
    exchange: Exchange,
    /// What the last claim stated.
    claimed: ClaimCounts,
    /// What the store counts for this process: what the last claim stated, with the slots granted
    /// since.
    pub(super) known: ClaimCounts,
    /// Slots that the store has granted since the beginning, by the answers that have arrived.
    granted: u64,
    /// The version of the last answer to the last claim. An answer with a smaller version is older,
    /// and is ignored.
    version: u64,
    /// Whether requests of other processes wait for a slot, or fewer slots are allowed than are taken.
    pub(super) others_wait: bool,
}

impl KeyClaims {
    pub(super) fn new() -> Self {
        KeyClaims {
            holder: next_number(),
            number: 0,
            exchange: Exchange::Idle,
            claimed: ClaimCounts::default(),
            known: ClaimCounts::default(),
            granted: 0,
            version: 0,
            others_wait: false,
        }
    }

    /// Returns whether the store has answered the last claim. Then `known` is what it counts.
    pub(super) fn is_answered(&self) -> bool {
        self.exchange == Exchange::Idle
    }

    /// Returns whether a claim is to be sent now that the process has `counts`.
    ///
    /// `wants_answer` states whether a request waits for the answer to a new claim. `has_left`
    /// states whether the process has neither calls nor waiters left, and its last waiter got no
    /// slot.
    pub(super) fn is_due(&self, counts: ClaimCounts, wants_answer: bool, has_left: bool) -> bool {
        match self.exchange {
            Exchange::Asking => false,
            // The store repeats the last claim anyway.
            Exchange::Failed => self.claimed != counts,
            Exchange::Idle => {
                let fewer_wait =
                    counts.queued < self.known.queued && (self.others_wait || has_left);
                counts.in_use < self.known.in_use
                    || counts.queued > self.known.queued
                    || fewer_wait
                    || wants_answer
            }
        }
    }

    /// Makes the next claim, which states `counts` under `terms`.
    pub(super) fn make(&mut self, key: Key, terms: ClaimTerms, counts: ClaimCounts) -> Claim {
        self.number += 1;
        // The store may have forgotten this process, and begin a new sequence of versions.
        self.version = 0;
        self.exchange = Exchange::Asking;
        self.claimed = counts;
        self.known = counts;
        Claim {
            key,
            holder: self.holder,
            number: self.number,
            limit: terms.limit,
            class: terms.class,
            share: terms.share,
            in_use: counts.in_use,
            wanted: counts.queued,
            granted_seen: self.granted,
            ttl: terms.ttl,
        }
    }

    /// Takes in an answer to the claim `number`: the slots that were granted since the beginning,
    /// and whether other processes wait. Returns how many of the slots are new, or `None` if the
    /// answer is older than another one.
    pub(super) fn answered(
        &mut self,
        number: u64,
        granted: u64,
        others_wait: bool,
        version: u64,
    ) -> Option<u32> {
        if number != self.number || version < self.version {
            return None;
        }
        self.version = version;
        self.others_wait = others_wait;
        self.exchange = Exchange::Idle;
        let more = granted.saturating_sub(self.granted);
        self.granted += more;
        let more = u32::try_from(more).unwrap_or(u32::MAX);
        self.known.in_use = self.known.in_use.saturating_add(more);
        self.known.queued = self.known.queued.saturating_sub(more);
        Some(more)
    }

    /// Notes that the last claim failed.
    pub(super) fn failed(&mut self) {
        self.exchange = Exchange::Failed;
    }
}

/// Until when the slots of a process count, and which of them are lost.
///
/// A claim that is not repeated expires at the store, which then grants its slots to other
/// processes.
#[derive(Debug, Default)]
pub(super) struct Validity {
    /// When the last confirmed claim expires. `None` if the store sets no end.
    pub(super) until: Option<Instant>,
    /// Slots with a smaller number are lost: their claim has expired.
    lost_before: Number,
    /// The tasks to wake when their slot is lost.
    calls: BTreeMap<Number, Waker>,
}

impl Validity {
    /// Returns whether the slots surely belong to this process.
    pub(super) fn is_valid(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now < until)
    }

    /// Returns whether `slot` may belong to another process.
    pub(super) fn is_lost(&self, slot: Number, now: Instant) -> bool {
        slot < self.lost_before || !self.is_valid(now)
    }

    /// Ready if `slot` is lost. Else the task is woken when it is.
    pub(super) fn poll_lost(&mut self, slot: Number, cx: &Context<'_>) -> Poll<()> {
        if slot < self.lost_before {
            return Poll::Ready(());
        }
        self.calls.insert(slot, cx.waker().clone());
        Poll::Pending
    }

    /// Forgets the task of a call that has ended.
    pub(super) fn end(&mut self, slot: Number) {
        self.calls.remove(&slot);
    }

    /// Notes that all slots that the process has now are lost.
    pub(super) fn lose_all(&mut self, wakers: &mut Wakers) {
        self.lost_before = next_number();
        wakers.add(mem::take(&mut self.calls).into_values());
    }
}
