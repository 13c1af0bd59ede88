//! A request that was sent and not yet answered.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::StatusCode;
use smallvec::SmallVec;

use super::admitted::{Admitted, SignalKey, split};
use super::around::InnerCall;
use super::engine::CoreId;
use super::holds::Probe;
use super::in_flight_slot::InFlightSlot;
#[cfg(doc)]
use super::part::Entry;
use super::part::labelled;
use super::reservation::Reservation;
use super::responses::AnsweredCall;
use super::settlement::{Settlement, Unsettled};
use super::waited::Waited;
use crate::clock;
use crate::cost::Cost;
use crate::error::{LimitName, Limited, StoreError};
use crate::events;
use crate::guarded::{self, Watch};
use crate::key::{Key, Label};
use crate::refused::RefusedRequest;
use crate::signal::Signal;

/// A request that was sent and has no response yet. [`Permit::begin`](crate::Permit::begin) returns it.
///
/// It ends with [`answered`](Sent::answered). If it is dropped, the request counts as sent, and nothing is learned
/// from its response. If calls in flight are limited ([`Quota::in_flight`](crate::Quota::in_flight)), the call is in
/// flight until then.
// The fast path of the layers makes it without a `Taken`. Each response future holds one, so it has to be small. It
// holds a `CoreId` instead of an `Arc<Core>`. What only few requests need is in a box.
#[must_use = "a request has a response"]
pub struct Sent {
    pub(super) admitted: Admitted,
    pub(super) more: Option<Box<RareParts>>,
}

/// What only few requests have on their way.
#[derive(Default)]
pub(super) struct RareParts {
    /// Its in-flight slots, of all its keys.
    pub(super) in_flight_slot: Option<InFlightSlot>,
    pub(super) wait: Option<Box<PastWait>>,
    /// The other keys of a joint request.
    joint: Vec<SentPart>,
    /// The slot, if the true cost of the request may be stated later.
    slot: Option<Reservation>,
    /// The first of its limiters with rates, if that is not the first of all.
    rated: Option<CoreId>,
    /// The probes that the request is, of all its keys.
    pub(super) probes: Vec<Probe>,
    /// Its kind, if a key of it was under suspicion when it left.
    pub(super) kind: Option<Key>,
    /// Set once the true cost of the request was stated.
    settlement: Option<Settlement>,
}

/// A request that was sent, under one of its keys.
pub(super) struct SentPart {
    pub(super) admitted: Admitted,
    /// The slot, if the true cost of the request may be stated later.
    pub(super) slot: Option<Reservation>,
}

/// How many empty boxes a thread keeps.
const MOST_SPARE: usize = 32;

thread_local! {
    /// Boxes that are empty, with the capacity of their vectors. So joint requests with permits at hand
    /// need no allocation.
    static SPARE: RefCell<VecDeque<Box<RareParts>>> = const { RefCell::new(VecDeque::new()) };
}

impl RareParts {
    /// Returns a box with the defaults.
    pub(super) fn empty() -> Box<Self> {
        let spare = SPARE.try_with(|spare| spare.borrow_mut().pop_back());
        // A thread that ends has none.
        spare.ok().flatten().unwrap_or_default()
    }

    /// Takes out the in-flight slots. The thread keeps the empty box.
    fn end(mut self: Box<Self>) -> Option<InFlightSlot> {
        let in_flight_slot = self.in_flight_slot.take();
        self.joint.clear();
        *self = RareParts {
            joint: mem::take(&mut self.joint),
            ..RareParts::default()
        };
        // A thread that ends keeps none.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MOST_SPARE {
                spare.push_back(self);
            }
        });
        in_flight_slot
    }
}

/// The wait of a request that did not get its permit at once, for errors.
#[derive(Debug)]
pub(super) struct PastWait {
    /// The name of the key.
    pub(super) label: Label,
    pub(super) waited: Duration,
    /// How often the request got a slot.
    pub(super) turns: u32,
    /// Whether the request leaves uncounted, because a store failed.
    pub(super) is_uncounted: bool,
    /// How it waited, for its response. `None` if it waited for nothing but the store's answer.
    pub(super) seen: Option<Waited>,
}

impl PastWait {
    /// Of a request that did not wait.
    fn none(label: Label) -> Self {
        PastWait {
            label,
            waited: Duration::ZERO,
            turns: 0,
            is_uncounted: false,
            seen: None,
        }
    }
}

impl Sent {
    /// Takes in what the response states about limits, and ends the call.
    ///
    /// A refusal puts the key on [hold](crate::RateLimitBuilder::max_hold). Returns
    /// [`Limited::Upstream`] if the response is a refusal, for callers that want an error; else
    /// `None`.
    pub fn answered(self, signal: &Signal) -> Option<Limited> {
        self.end(signal, None).1
    }

    /// States what the request cost, if that is not the cost of the permit: a number of requests, or a
    /// [`Cost`] with other units.
    ///
    /// [`Settlement::settle`] describes what happens to the difference. Build the layer with
    /// [`settle_by_hand`](crate::RateLimitBuilder::settle_by_hand): otherwise little of what comes
    /// back is used, because requests that wait have booked their slots already.
    ///
    /// ```
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer = RateLimitLayer::builder(Quota::per_minute(80_000)).settle_by_hand().build()?;
    /// let limiter = layer.limiter();
    /// let mut sent = limiter.acquire(Key::ALL).cost(4000).await?.begin()?;
    /// // ... send the request, and read from the response what it cost ...
    /// sent.settle(300);
    /// drop(sent);
    /// assert_eq!(limiter.peek(Key::ALL).await?.limits[0].used, 300);
    /// # Ok(())
    /// # }
    /// ```
    pub fn settle(&mut self, actual: impl Into<Cost>) {
        let more = self.more.as_ref();
        let known = more.and_then(|more| more.settlement.clone());
        let settlement = known.unwrap_or_else(|| self.settlement());
        settlement.settle(actual);
        self.more.get_or_insert_with(RareParts::empty).settlement = Some(settlement);
    }

    /// Waits until this call must be cancelled, and returns the reason.
    ///
    /// A call must be cancelled if this process has lost contact with the store for longer than
    /// [`in_flight_ttl`](crate::RateLimitBuilder::in_flight_ttl). The store may then have granted
    /// the call's in-flight slot to another process.
    ///
    /// The future is never ready if calls in flight are not limited, if they are counted in memory,
    /// or with [`OnStoreError::FailOpen`](crate::OnStoreError::FailOpen).
    ///
    /// # Cancel safety
    ///
    /// The future may be dropped at any time.
    pub async fn revoked(&self) -> StoreError {
        poll_fn(|cx| match self.in_flight_slot() {
            Some(slot) => slot.poll_lost(cx),
            None => Poll::Pending,
        })
        .await
    }

    fn in_flight_slot(&self) -> Option<&InFlightSlot> {
        self.more.as_ref()?.in_flight_slot.as_ref()
    }

    /// Makes the value for a request that got its permit at once.
    #[inline]
    pub(crate) fn at_once(admitted: Admitted) -> Self {
        let more = None;
        Sent { admitted, more }
    }

    /// Makes the value for a request of all these keys.
    pub(super) fn of_all(first: SentPart, others: impl ExactSizeIterator<Item = SentPart>) -> Self {
        let mut sent = Sent::at_once(first.admitted);
        if first.slot.is_some() {
            sent.more.get_or_insert_with(RareParts::empty).slot = first.slot;
        }
        if others.len() > 0 {
            sent.join(others);
        }
        sent
    }

    fn join(&mut self, others: impl Iterator<Item = SentPart>) {
        let more = self.more.get_or_insert_with(RareParts::empty);
        more.joint.extend(others);
        if self.admitted.cost == 0 {
            let rated = more.joint.iter().find(|part| part.admitted.cost > 0);
            more.rated = rated.map(|part| part.admitted.core);
        }
    }

    /// Returns the settlement of the request, for a layer that settles.
    #[cold]
    pub(crate) fn settlement(&self) -> Settlement {
        let unsettled = |admitted: &Admitted, slot: &Option<Reservation>| {
            Unsettled::new(admitted.core, admitted.key, slot.as_ref())
        };
        let slot = self.more.as_ref().and_then(|more| more.slot);
        let first = std::iter::once(unsettled(&self.admitted, &slot));
        let others = self.joint().iter();
        Settlement::new(first.chain(others.map(|part| unsettled(&part.admitted, &part.slot))))
    }

    /// Returns the other keys of a joint request.
    fn joint(&self) -> &[SentPart] {
        self.more.as_ref().map_or(&[], |more| &more.joint)
    }

    /// Returns the request under each of its keys, the first one first.
    fn all(&self) -> impl DoubleEndedIterator<Item = &Admitted> {
        let others = self.joint().iter().map(|part| &part.admitted);
        std::iter::once(&self.admitted).chain(others)
    }

    /// Begins a call or poll of the inner service: see [`around`](super::around).
    #[inline]
    pub(crate) fn begin_inner(&self) -> Option<InnerCall> {
        let rated = self.more.as_ref().and_then(|more| more.rated);
        let Admitted { core, cost, at, .. } = self.admitted;
        let (core, has_permit) = rated.map_or((core, cost > 0), |core| (core, true));
        InnerCall::begin(core, has_permit.then_some(at))
    }

    /// Adds the name of the key, for the error of a refusal, if the caller wants one.
    #[cold]
    pub(crate) fn named(mut self, label: Label) -> Self {
        let wait = Box::new(PastWait::none(label));
        self.more.get_or_insert_with(RareParts::empty).wait = Some(wait);
        self
    }

    /// Adds the kind of the request, if a key of it is under suspicion.
    pub(crate) fn of_kind(mut self, kind: Option<Key>) -> Self {
        if kind.is_some() {
            self.more.get_or_insert_with(RareParts::empty).kind = kind;
        }
        self
    }

    pub(crate) fn key(&self) -> Key {
        self.admitted.key
    }

    /// Returns the key of its host, if the host matters: see [`Entry::host`].
    pub(crate) fn host(&self) -> Option<Key> {
        self.admitted.host
    }

    /// Returns how the request waited, for its response. `None` if it waited for nothing but the store's answer.
    #[inline]
    pub(crate) fn waited(&self) -> Option<&Waited> {
        self.more.as_ref()?.wait.as_ref()?.seen.as_ref()
    }

    /// Ends the request after a response that states nothing about limits. Its call is in flight
    /// until the in-flight slot is dropped.
    #[inline]
    pub(crate) fn into_in_flight_slot(self) -> Option<InFlightSlot> {
        self.more.and_then(RareParts::end)
    }

    /// Ends the request with what its response states. Returns the error of a response that is a
    /// refusal. The call is in flight until the in-flight slot is dropped.
    ///
    /// `status` is that of the response, if it has one.
    pub(crate) fn end(
        mut self,
        signal: &Signal,
        status: Option<StatusCode>,
    ) -> (Option<InFlightSlot>, Option<Limited>) {
        let is_bad = guarded::bad_status(status, signal)
            .is_some_and(|status| self.tell_guards(signal, status));
        let more = self.more.as_mut();
        let probes = more.map_or_else(Vec::new, |more| mem::take(&mut more.probes));
        let refused = if self.joint().is_empty() {
            self.answered_under(&self.admitted, is_bad, &probes)
                .observe(signal);
            None
        } else {
            self.observe_joint(signal, is_bad, &probes)
        };
        probes.into_iter().for_each(Probe::answered);
        let limited = signal
            .refusal()
            .map(|status| self.upstream_limited(status, signal, refused));
        (self.into_in_flight_slot(), limited)
    }

    /// Ready with an error if the call has to end, because it may no longer be counted as in
    /// flight.
    #[inline]
    pub(crate) fn poll_lost(&self, cx: &Context<'_>) -> Poll<Limited> {
        match self.in_flight_slot() {
            Some(slot) => slot.poll_limited(cx),
            None => Poll::Pending,
        }
    }

    /// Tells the guards of all keys of a response that may be a bad answer. Returns whether it is one.
    #[cold]
    fn tell_guards(&self, signal: &Signal, status: StatusCode) -> bool {
        let mut counted: Vec<Arc<dyn Watch>> = Vec::new();
        let mut is_bad = false;
        // Of several keys with one guard, the last counts: it is the narrowest.
        for admitted in self.all().rev() {
            let Some(core) = admitted.core.find() else {
                continue;
            };
            let Some(guard) = core.settings.guard.clone() else {
                continue;
            };
            if counted.iter().any(|other| Arc::ptr_eq(other, &guard)) {
                continue;
            }
            counted.push(guard.clone());
            if guard.is_bad(status, signal) {
                is_bad = true;
                let key = core.whole(core.hold_key(admitted.key, admitted.host));
                guard.answered(core, key, admitted.at.instant());
            }
        }
        is_bad
    }

    /// Makes the answered call under one of its keys.
    fn answered_under<'a>(
        &self,
        admitted: &Admitted,
        is_bad: bool,
        probes: &'a [Probe],
    ) -> AnsweredCall<'a> {
        AnsweredCall {
            admitted: *admitted,
            is_bad,
            probes,
            kind: self.more.as_ref().and_then(|more| more.kind),
        }
    }

    /// Takes in what the response to a joint request states, each statement about the key that it
    /// is about. If the response is a refusal of a key besides the first, returns the label of that
    /// key and the name of its limit.
    #[cold]
    fn observe_joint(
        &self,
        signal: &Signal,
        is_bad: bool,
        probes: &[Probe],
    ) -> Option<(Label, LimitName)> {
        let all: SmallVec<[&Admitted; 4]> = self.all().collect();
        let keys = all.iter().map(|admitted| admitted.signal_key());
        let keys: SmallVec<[SignalKey; 4]> = keys.collect();
        let (signals, refused) = split(signal, &keys);
        for (admitted, signal) in all.iter().zip(&signals) {
            self.answered_under(admitted, is_bad, probes)
                .observe(signal);
        }
        let refused = labelled(refused?, |index| keys[index].is_further_unit);
        if refused == 0 {
            return None;
        }
        let &Admitted { core, key, .. } = all[refused];
        let limit = core.find().map(|core| core.limit_name(key));
        Some((core.label(key), limit.unwrap_or_default()))
    }

    #[cold]
    fn upstream_limited(
        &mut self,
        status: StatusCode,
        signal: &Signal,
        refused: Option<(Label, LimitName)>,
    ) -> Limited {
        let Admitted { core, key, .. } = self.admitted;
        let wait = match self.more.as_mut().and_then(|more| more.wait.take()) {
            Some(wait) => *wait,
            None => PastWait::none(core.label(key)),
        };
        let core = core.find();
        let (label, limit) = refused.unwrap_or_else(|| {
            let own = core.as_ref().map(|core| core.limit_name(key));
            (wait.label, own.unwrap_or_default())
        });
        let retry_after = signal.retry_after();
        let tally = core.as_ref().map(|core| &core.settings.tally);
        events::upstream_limited(tally, &label, status, retry_after);
        let now = clock::now();
        let request = RefusedRequest {
            label,
            // No limit of ours has refused it, so the error counts no unit of one.
            limit: LimitName {
                unit: None,
                ..limit
            },
            waited: wait.waited,
            turns: wait.turns,
        };
        request.refused_upstream(status, retry_after, now)
    }
}

impl std::fmt::Debug for Sent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sent")
            .field("key", &self.admitted.key)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each response future holds one.
    #[test]
    fn requests_on_their_way_are_small() {
        assert!(size_of::<Sent>() <= 64, "{} bytes", size_of::<Sent>());
    }
}
