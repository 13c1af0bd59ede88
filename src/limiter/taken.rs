//! What a request has that may leave: a slot and an in-flight slot of each of its keys, and the probes that it
//! leaves as.
//!
//! [`Taken`] is made where a request gets all of it, and has two ends:
//!
//! - The request leaves. [`Taken::sent`] makes it a [`Sent`], which keeps the in-flight slots and the probes
//!   until the response.
//! - The request does not leave. The owner drops the record, and everything goes back: the slots to the next waiters
//!   or to the store, the in-flight slots to the next calls, and the next request can be the probe. So no way out of
//!   the limiter has to know what a request has.
//!
//! A request that goes back to its old place in the queue calls [`Taken::put_back`]. A [`Permit`] is
//! a `Taken` in the hands of a user. The request may have left if the user drops it, so its slots count as used then.
//!
//! The state of a key has the parts bare, as a [`Reservation`] with the number of its probe: dropping a `Taken`
//! visits that state, so it must not happen inside of it.

use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{iter, mem};

use smallvec::SmallVec;

use super::admitted::Admitted;
use super::around;
use super::engine::Core;
use super::holds::Probe;
use super::in_flight_slot::InFlightSlot;
use super::part::{Entry, Part, PerPart};
use super::reservation::Reservation;
use super::sent::{PastWait, RareParts, Sent, SentPart};
use crate::clock::{self, Moment};
use crate::error::{Limited, Reason};
use crate::events;
use crate::key::Key;
use crate::refused::RefusedRequest;
use crate::stats::{Engine, Outcome};
use crate::store::Refusal;

/// What a request has that may leave. Dropping it gives everything back.
#[must_use = "what a request has goes back when this is dropped"]
pub(crate) struct Taken {
    first: OfKey,
    rest: Option<Box<Rest>>,
    /// Whether the slots count as used if this is dropped, because the request may have left.
    may_have_left: bool,
}

/// What it has of one of its keys.
pub(super) struct OfKey {
    core: Arc<Core>,
    key: Key,
    /// The key of the host, if the host matters to the key: see [`Entry::host`].
    host: Option<Key>,
    /// `None` if the request costs nothing, if rates are not limited, or if it passes uncounted.
    slot: Option<Reservation>,
    /// `None` if calls in flight are not limited, or could not be counted.
    in_flight_slot: Option<InFlightSlot>,
    /// Whether the units of the slot are counted in the stats.
    is_counted: bool,
}

/// What only few requests have.
#[derive(Default)]
struct Rest {
    /// The other keys of a joint request.
    others: Vec<OfKey>,
    /// The probes that the request leaves as, of all its keys and their hosts.
    probes: Vec<Probe>,
    /// `None` if the request did not wait.
    wait: Option<Box<PastWait>>,
    /// Its kind, if a key of it is under suspicion.
    kind: Option<Key>,
}

impl OfKey {
    pub(super) fn new(
        part: &Part,
        slot: Option<Reservation>,
        in_flight_slot: Option<InFlightSlot>,
    ) -> Self {
        OfKey {
            core: part.core.clone(),
            key: part.key,
            host: part.host,
            slot,
            in_flight_slot,
            is_counted: false,
        }
    }

    /// What a request has of a key that got its permit at hand, whose units are counted. It is no probe: a key on
    /// probation has no permits at hand.
    #[inline]
    pub(super) fn at_hand(core: Arc<Core>, entry: &Entry, slot: Option<Reservation>) -> Self {
        OfKey {
            core,
            key: entry.key,
            host: entry.host,
            slot,
            in_flight_slot: None,
            is_counted: true,
        }
    }

    /// Takes the number of the probe out of the slot.
    fn probe(&mut self) -> Option<Probe> {
        let number = self.slot.as_mut()?.probe.take()?;
        Some(Probe::new(self.core.id, self.key, number))
    }

    fn count_units(&mut self) {
        if !mem::replace(&mut self.is_counted, true)
            && let Some(slot) = &self.slot
        {
            self.core.add_units(self.key, slot.cost.into());
        }
    }

    /// Takes the slot for the state of the key. Its units are no longer counted, and its probe goes back with it.
    fn bare_slot(&mut self, probes: &mut Vec<Probe>) -> Option<Reservation> {
        let mut slot = self.slot.take()?;
        if self.is_counted {
            self.core.give_back_units(self.key, slot.cost.into());
        }
        // A slot that was lent goes back to the state of the lender, and the probe to that of the key.
        if slot.lender.is_none()
            && let Some(index) = probes
                .iter()
                .position(|probe| probe.is_of(self.core.id, self.key))
        {
            slot.probe = Some(probes.swap_remove(index).into_number());
        }
        Some(slot)
    }

    /// Makes what is sent under the key. It has its slot if it `keeps` it, or if the layer settles.
    fn sent(&mut self, keeps: bool) -> SentPart {
        let slot = self.slot.take();
        let (cost, at) = slot.map_or_else(|| (0, clock::now()), |slot| (slot.cost, slot.at));
        let admitted = Admitted {
            core: self.core.id,
            cost,
            key: self.key,
            host: self.host,
            at: Moment::of(at),
        };
        SentPart {
            admitted,
            slot: slot.filter(|_| keeps || self.core.settings.settles),
        }
    }
}

impl Taken {
    /// Makes the record of a request of one key that got a permit at hand.
    #[inline]
    pub(super) fn at_hand(core: Arc<Core>, entry: &Entry, slot: Option<Reservation>) -> Self {
        Taken {
            first: OfKey::at_hand(core, entry, slot),
            rest: None,
            may_have_left: false,
        }
    }

    /// Makes the record of a request, which leaves as these probes besides those of its slots.
    pub(super) fn of_all(mut first: OfKey, mut others: Vec<OfKey>, mut probes: Vec<Probe>) -> Self {
        let all = iter::once(&mut first).chain(&mut others);
        probes.extend(all.filter_map(OfKey::probe));
        let is_plain = others.is_empty() && probes.is_empty();
        let rest = (!is_plain).then(|| {
            Box::new(Rest {
                others,
                probes,
                ..Rest::default()
            })
        });
        Taken {
            first,
            rest,
            may_have_left: false,
        }
    }

    /// States that the units of the first slot are counted already.
    pub(super) fn first_is_counted(&mut self) {
        self.first.is_counted = true;
    }

    pub(super) fn count_units(&mut self) {
        self.all_mut().for_each(OfKey::count_units);
    }

    fn all(&self) -> impl Iterator<Item = &OfKey> {
        let others = self.rest.iter().flat_map(|rest| &rest.others);
        iter::once(&self.first).chain(others)
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut OfKey> {
        let others = self.rest.iter_mut().flat_map(|rest| &mut rest.others);
        iter::once(&mut self.first).chain(others)
    }

    /// Returns the units of the first slot.
    pub(super) fn units(&self) -> u32 {
        self.first.slot.map_or(0, |slot| slot.cost)
    }

    /// Adds the kind of the request, if a key of it is under suspicion.
    pub(super) fn of_kind(mut self, kind: Option<Key>) -> Self {
        if kind.is_some() {
            self.rest.get_or_insert_default().kind = kind;
        }
        self
    }

    /// Adds how the request waited.
    pub(super) fn after(mut self, wait: PastWait) -> Self {
        self.rest.get_or_insert_default().wait = Some(Box::new(wait));
        self
    }

    /// Makes it a record whose slots count as used if it is dropped.
    #[inline]
    pub(super) fn may_have_left(mut self) -> Self {
        self.may_have_left = true;
        self
    }

    /// Notes that a program has this by hand, and had to ask the store for it.
    pub(super) fn is_by_hand(&self) {
        around::by_hand(self.first.core.id, self.first.key);
    }

    fn wait(&self) -> Option<&PastWait> {
        self.rest.as_ref()?.wait.as_deref()
    }

    /// Returns how a request counts that leaves with this.
    pub(super) fn outcome(&self) -> Outcome {
        match self.wait() {
            Some(wait) if wait.is_uncounted => Outcome::Uncounted,
            Some(wait) if wait.seen.is_some() => Outcome::Waited,
            _ => Outcome::Passed,
        }
    }

    /// Returns the moment by which the request must have left. `None` if it has no slot.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let slots = self.all().filter_map(|part| part.slot);
        slots.map(|slot| slot.until).min()
    }

    /// Returns whether the store may have granted an in-flight slot of the request to another call.
    pub(super) fn has_lost_slot(&self, now: Instant) -> bool {
        let mut slots = self.all().filter_map(|part| part.in_flight_slot.as_ref());
        slots.any(|slot| slot.is_lost(now))
    }

    /// Makes the call of the request, which leaves now.
    pub(crate) fn sent(self) -> Sent {
        self.leave(false)
    }

    /// Makes the call of the request. It `keeps` its slots, so that its true cost can be stated later. Otherwise it
    /// keeps them only if the layer settles.
    fn leave(mut self, keeps: bool) -> Sent {
        let in_flight_slots = self.all_mut().filter_map(|part| part.in_flight_slot.take());
        let in_flight_slot = in_flight_slots.reduce(InFlightSlot::and);
        let Rest {
            mut others,
            probes,
            wait,
            kind,
        } = self.rest.take().map_or_else(Rest::default, |rest| *rest);
        let joint = others.iter_mut().map(|part| part.sent(keeps));
        let mut sent = Sent::of_all(self.first.sent(keeps), joint);
        if wait.is_some() || !probes.is_empty() || in_flight_slot.is_some() {
            let more = sent.more.get_or_insert_with(RareParts::empty);
            more.in_flight_slot = in_flight_slot;
            more.probes = probes;
            more.wait = wait;
        }
        sent.of_kind(kind)
    }

    /// Takes the record apart for a request that goes back to its old place: returns the slots and the in-flight slots,
    /// in the order of its keys, and the probes. If these are dropped after it is back, it can be the probe again.
    pub(super) fn put_back(
        mut self,
    ) -> (
        PerPart<Option<Reservation>>,
        PerPart<Option<InFlightSlot>>,
        Vec<Probe>,
    ) {
        let taken = self.all_mut().map(|part| {
            let slot = part.bare_slot(&mut Vec::new());
            (slot, part.in_flight_slot.take())
        });
        let (slots, in_flight) = taken.unzip();
        (slots, in_flight, self.take_probes())
    }

    fn take_probes(&mut self) -> Vec<Probe> {
        let rest = self.rest.as_mut();
        rest.map_or_else(Vec::new, |rest| mem::take(&mut rest.probes))
    }

    #[cold]
    fn go_back(&mut self) {
        let mut probes = self.take_probes();
        let parts = self.all_mut().map(|part| {
            let slot = part.bare_slot(&mut probes);
            (&part.core, part.key, slot)
        });
        let parts: SmallVec<[_; 1]> = parts.collect();
        // The hosts first, so that the next request can be their probe.
        drop(probes);
        for (core, key, slot) in parts {
            if let Some(slot) = slot {
                core.give_back(key, slot);
            }
        }
    }
}

impl Drop for Taken {
    #[inline]
    fn drop(&mut self) {
        let has_any = self.first.slot.is_some() || self.rest.is_some();
        if has_any && !self.may_have_left {
            self.go_back();
        }
    }
}

/// The right to send one request, from now until its [`deadline`](Permit::deadline).
///
/// [`Limiter::acquire`](crate::Limiter::acquire) returns it. A permit ends exactly once:
///
/// - [`begin`](Permit::begin) states that the request is sent now, and returns what takes in its response.
/// - [`give_back`](Permit::give_back) is for a request that was certainly not sent.
/// - If the permit is dropped, it counts as used, because the request may have left.
///
/// [`Acquire::send`](crate::limiter::Acquire::send) does all of this for a request.
#[must_use = "a permit that is dropped counts as used"]
pub struct Permit(Taken);

impl Permit {
    /// Makes the permit of a request that got this.
    #[inline]
    pub(super) fn new(taken: Taken) -> Self {
        Permit(taken.may_have_left())
    }

    /// Returns the moment by which the request must have left, 10 to 50 ms after its slot. That of a permit that was at
    /// hand, or of a slow store, may be up to a twentieth of the shortest window after it. `None` if the request costs
    /// nothing, or if rates are not limited.
    ///
    /// If the permit is used later, the upstream may see more requests than its limit allows. Give
    /// the permit back and acquire another one.
    pub fn deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }

    /// Returns whether the request may still be sent: whether the deadline has not passed.
    pub fn is_valid(&self) -> bool {
        self.deadline().is_none_or(|until| clock::now() < until)
    }

    /// Returns how long the request waited for this permit.
    pub fn waited(&self) -> Duration {
        self.0.wait().map_or(Duration::ZERO, |wait| wait.waited)
    }

    /// States that the request is sent now.
    ///
    /// Call it just before the request is sent: a permit is valid until its [`deadline`](Permit::deadline), and the
    /// upstream may see more requests than its limit allows if they leave later. A hold that began since does not stop it.
    ///
    /// # Errors
    ///
    /// [`Reason::Expired`] if the [`deadline`](Permit::deadline) has passed. The permit was given back then: acquire
    /// another one.
    pub fn begin(self) -> Result<Sent, Limited> {
        if self.is_valid() {
            return Ok(self.0.leave(true));
        }
        let now = clock::now();
        let OfKey { core, key, .. } = &self.0.first;
        let request = RefusedRequest {
            waited: self.waited(),
            turns: self.0.wait().map_or(0, |wait| wait.turns),
            ..core.refused_request(*key)
        };
        let limited = request.refuse(Reason::Expired, Refusal::NEVER, now);
        events::limited(&core.settings.tally, &limited);
        self.give_back();
        Err(limited)
    }

    /// Makes the call of a request that got the permit just now.
    pub(super) fn into_sent(self) -> Sent {
        self.0.sent()
    }

    /// Ends the permit of a request that was certainly not sent. Its slot goes to the next waiter,
    /// or else back to the store.
    pub fn give_back(mut self) {
        self.0.may_have_left = false;
    }
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit")
            .field("key", &self.0.first.key)
            .field("waited", &self.waited())
            .finish_non_exhaustive()
    }
}
