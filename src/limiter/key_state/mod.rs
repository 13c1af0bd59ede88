//! The state of one key in this process: the permits at hand, the queue of waiters, the hold, and
//! what the upstream stated.
//!
//! One store call at a time books for all waiters. If no request waits, a key in heavy use
//! prefetches a few permits, so that the next requests need no store call. The faster they are
//! used, the more it prefetches.
//!
//! | file | what it has |
//! |---|---|
//! | `ticket` | a request: it enters, waits, and leaves |
//! | `mod` | [`KeyState`]: permits taken and returned, and changes of the hold or of what is left |
//! | `calls` | [`KeyState`]: the one way to the store: each call, and what each answer states besides its slots |
//! | `booking` | [`KeyState`]: when the store is called for the waiters, for what, and what its answer means |
//! | `near_booking` | when the slots of requests are booked that may give units back; functions |
//! | `joint_ask` | one call for one key of a joint request |
//! | `outlook` | [`KeyState`]: what it would do with a request that enters now |
//! | `loans` | [`KeyState`]: slots that the parts of other classes lend |
//! | `stated_parts` | [`KeyState`]: when the limits of the other parts were stated |
//! | `store_view` | what the process knows of its store, also its last refusal |
//! | `key_hold` | the hold of the key, and the tasks that are woken when it changes |
//! | `fleet_probe` | which process of a fleet sends the probe of the key, and a wait beyond `max_hold` that the upstream has stated; a value |
//! | `hold` | one hold: when it ends, and how this process knows; a value |
//! | `probation` | which requests may leave after a hold that was cut; a value |
//! | `upstream_refusals` | how long a refusal of the upstream holds the key; a value |
//! | `key_limits` | the limits of the key, if they are not the configured ones |
//! | `stated_limits` | the limits that the upstream stated, and the quota to learn from them; a value |
//! | `remaining` | what it stated is left of the limits; a value |
//! | `charges` | units that were used without a permit, until the store has counted them; a value |
//! | `quota_match` | which quota of a response is about a limit; functions |
//! | `timer` | [`KeyState`]: when it is visited next, and what is done then |
//! | `context` | what a visit to the state works with, and the work that it leaves |
//!
//! [`KeyState`] has seven parts: the prefetched permits, the queue, the hold, the views of store and
//! upstream, the pending charges, and the limits of the key. Each part has its own type, whose methods touch only that part. `KeyState` and
//! [`Ticket`] do what needs several parts.

mod booking;
mod calls;
mod charges;
mod context;
mod fleet_probe;
mod hold;
mod joint_ask;
mod key_hold;
mod key_limits;
mod loans;
pub(super) mod near_booking;
mod outlook;
mod probation;
#[cfg(test)]
mod properties;
mod quota_match;
mod remaining;
mod stated_limits;
mod stated_parts;
mod store_view;
mod ticket;
mod timer;
mod upstream_refusals;

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::prefetched::{Offer, Prefetched};
use super::queue::{Delay, Gathering, Queue, Returns};
use super::reservation::{CountedAs, ProbeNumber, Reservation};
use super::session::TimeBounds;
use super::unlocked::UnlockedPermits;
use crate::clock;
use crate::limit::{Charge, LimitSpec, UnusedPermits};
use crate::signal::Signal;
use crate::stats::{Cause, KeyCounts};
use crate::store::{HoldState, Lease, Register, SetQuota, StoreReply, UpstreamRemaining};
use crate::wakers::Wakers;

use calls::Ask;
use charges::{DELAY, PendingCharges, RETRY};

pub(super) use calls::SentCall;
pub(super) use charges::ChargeNumber;
pub(super) use context::{Effect, KeyContext, LeaseFuture, Work};
pub(super) use fleet_probe::{FLEET_PROBE, FleetCall};
pub(super) use hold::HoldSource;
pub(super) use joint_ask::{JointAnswer, JointAsk, ask_to_confirm, confirmed, ended};
pub(super) use key_hold::{KeyHold, NewHold};
pub(super) use key_limits::KeyLimits;
pub(super) use loans::Lent;
pub(super) use outlook::Outlook;
pub(super) use quota_match::{counts, is_of_use, names_unit, states_limit_of};
use remaining::{RemainingTracker, Sendable};
pub use stated_limits::{HeaderTrust, StatedLimit};
pub(super) use stated_parts::{JoinedRound, OWN_PART, WholeLimits, fresh_for};
use store_view::{Observed, StoreView, slot};
pub(super) use ticket::Ticket;
use upstream_refusals::SAME_END;

/// How long all processes take to give back their slots after a change of the quota.
const CHANGE_TAKES: Duration = Duration::from_millis(20);

/// The state of one key in this process.
pub(super) struct KeyState {
    /// The waiters, and the call to the store for them. Present only while requests wait, a call is
    /// under way or a result is to be collected.
    queue: Option<Box<Queue>>,
    /// What the requests of the key have done.
    pub(super) counts: KeyCounts,
    /// The permits at hand.
    prefetched: Prefetched,
    /// What this process knows of its store.
    pub(super) store: StoreView,
    /// Until when no request may leave.
    pub(super) hold: KeyHold,
    /// What is still to be done for the key. `None` for most keys.
    pending: Option<Box<Pending>>,
    /// The limits of the key, if they are not the configured ones.
    pub(super) limits: KeyLimits,
}

/// What is still to be done for a key, even if no request comes.
#[derive(Default)]
struct Pending {
    /// What the upstream stated is left of the limits. The store may not know it. Empty after the limits have
    /// changed, until responses state it anew.
    remaining: RemainingTracker,
    /// Units that were used without a permit. `None` unless a call cost more than its permit.
    charges: Option<Box<PendingCharges>>,
    /// When the store is sent charges and what the upstream stated, or is asked about a doubted hold, even if no request
    /// waits.
    passes_on_at: Option<Instant>,
    /// When tasks visit the key: see `timer`. Each of them was started because no other one is as early.
    visits: SmallVec<[Instant; 2]>,
}

impl KeyState {
    /// Returns the moment from which the state may be evicted if room is needed; `None` while it is in use.
    /// A key that never had permits at hand may be evicted from `created` on.
    pub(in crate::limiter) fn idle_from(&self, created: Instant) -> Option<Instant> {
        let until = self.prefetched.until().unwrap_or(created);
        let is_settled = !self.has_charges();
        // A joint request has no place in the queue, but watches the hold.
        let is_awaited = self.queue.is_some() || self.hold.waiting() > 0 || self.hold.joint() > 0;
        let is_idle = !is_awaited && is_settled;
        is_idle.then(|| self.hold.matters_until().unwrap_or(until).max(until))
    }

    /// Returns the moment from which the state is useless: then it is evicted in any case.
    pub(in crate::limiter) fn worthless_from(&self, created: Instant) -> Option<Instant> {
        let idle = self.idle_from(created)?.max(self.prefetched.soon());
        let session = self.store.session_until().unwrap_or(idle);
        let stated = self.limits.stated_until().unwrap_or(idle);
        let useful = self.hold.useful_until().unwrap_or(idle);
        Some(idle.max(session).max(stated).max(useful))
    }

    /// Makes the state of a key without waiters. `life` is how long its permits are valid at first.
    pub(super) fn new(life: Duration) -> Self {
        KeyState {
            prefetched: Prefetched::default(),
            queue: None,
            counts: KeyCounts::default(),
            store: StoreView::new(life),
            hold: KeyHold::default(),
            pending: None,
            limits: KeyLimits::default(),
        }
    }

    /// Takes in a quota that was set for the key, or its end.
    pub(super) fn take_in_set_quota(&mut self, ctx: &mut KeyContext<'_>, set: &SetQuota) {
        if self.limits.take_in_set_quota(set, ctx.spec, ctx.now) {
            ctx.work.set_quota = Some(Box::new(set.clone()));
        }
    }

    /// Goes on under a changed quota. Gives back permits at hand and booked slots, and asks for them
    /// anew when the other processes have given back theirs. Else the first that asks would get slots
    /// behind those of all others.
    pub(super) fn quota_changed(&mut self, ctx: &mut KeyContext<'_>) {
        self.store.quota_changed(ctx.spec);
        if let Some(pending) = &mut self.pending {
            pending.remaining = RemainingTracker::default();
        }
        let in_flight = ctx.spec.quota().most_in_flight();
        ctx.work.effects.push(Effect::LimitInFlight(in_flight));
        self.give_back_prefetched(ctx);
        let Some(queue) = &mut self.queue else {
            return;
        };
        queue.give_up_slots();
        let unused = std::mem::take(&mut queue.returns.own);
        // A call under way may bring slots of the old quota: they are given up when it is answered.
        self.store.tightens = queue.is_calling(ctx.now);
        if queue.waiting() > 0
            && !self.store.tightens
            && queue.gathering.put_off(CHANGE_TAKES, ctx.now) == Delay::Starts
        {
            ctx.work.begins_delay = true;
        }
        self.give_back_now(ctx, &unused);
    }

    /// Puts a key that has just got its state on hold, because the guard stops it.
    pub(super) fn begin_held(&mut self, left: Duration, now: Instant) {
        let held = HoldState {
            remaining: left,
            releases: 0,
            cut: true,
        };
        self.hold.adopt(held, HoldSource::Seen, now);
        self.hold.note_cause(Cause::Guard, left, now);
    }

    /// Returns how many requests wait.
    #[inline]
    pub(super) fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Returns how many requests count as waiting for the key, with those of several keys.
    pub(super) fn queued(&self) -> usize {
        self.waiting() + self.hold.joint() as usize
    }

    /// Returns the units at hand.
    pub(super) fn at_hand(&self, now: Instant) -> u32 {
        self.prefetched.units(now)
    }

    /// Takes a permit at hand, if no request waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Reservation> {
        if self.waiting() > 0 {
            None
        } else {
            self.prefetched.take(cost, now)
        }
    }

    /// Takes a permit at hand as [`take`](Self::take) does, and counts it.
    #[inline]
    pub(super) fn take_at_once(
        &mut self,
        cost: u32,
        counting: CountedAs,
        now: Instant,
    ) -> Option<Reservation> {
        let slot = self.take(cost, now)?;
        match counting {
            CountedAs::Request => self.counts.pass(cost),
            CountedAs::Units => self.counts.add_units(u64::from(cost)),
        }
        Some(slot)
    }

    /// Begins a visit: takes back the permits that requests could take without one, and counts those that
    /// were taken.
    #[inline]
    pub(in crate::limiter) fn collect(&mut self, offer: &mut Offer) {
        let (requests, units) = self.prefetched.collect(offer);
        self.counts.pass_all(requests, units);
    }

    /// Ends a visit: lets requests take the permits at hand without one, unless requests wait.
    #[inline]
    pub(in crate::limiter) fn offer(&mut self, offer: &mut Offer) {
        let may = self.waiting() == 0;
        self.prefetched.offer(offer, may);
    }

    /// Returns the permit that a request has taken of the offer.
    #[inline]
    pub(in crate::limiter) fn offered(&self, cost: u32, now: Instant) -> Option<Reservation> {
        self.prefetched.reservation(cost, now)
    }

    /// The same as [`collect`](Self::collect), for the permits that threads take without a lock.
    pub(in crate::limiter) fn collect_unlocked(&mut self, unlocked: &UnlockedPermits) {
        unlocked.collect(&mut self.prefetched);
    }

    /// The same as [`offer`](Self::offer), for permits that threads take without a lock.
    pub(in crate::limiter) fn offer_unlocked(&mut self, unlocked: &UnlockedPermits) {
        if self.waiting() == 0 {
            unlocked.offer(&mut self.prefetched);
        }
    }

    /// Takes back a permit that was surely not used. It goes to the next waiter, else back to the
    /// store. The slot of a joint request may lie ahead, and a waiter may find an earlier one. So
    /// it goes back to the store. So does any other, unless it `stays` at hand: a request may ask the store for another
    /// one soon.
    pub(super) fn give_back(&mut self, ctx: &mut KeyContext<'_>, slot: Reservation, stays: bool) {
        let is_held = self.hold.left(ctx.now).is_some();
        self.probe_comes_back(ctx, slot.probe);
        self.store.forget_refusal();
        let Some(queue) = &mut self.queue else {
            // Requests that take a permit at hand ask neither for a hold nor for a probe.
            let may_be_at_hand =
                stays && !ctx.is_draining && self.hold.is_clear(ctx.max_hold, ctx.now);
            if !may_be_at_hand || !self.prefetched.put(&slot, ctx.now) {
                self.give_back_now(ctx, &[slot.unused()]);
            }
            return;
        };
        if is_held || slot.at > ctx.now || slot.until <= ctx.now {
            queue.returns.add(&slot);
        } else {
            queue.add(slot);
        }
        self.step(ctx, None);
    }

    /// Takes back units of a permit that was used, because its request cost less. The store subtracts
    /// them from its log.
    pub(super) fn refund(&mut self, ctx: &mut KeyContext<'_>, unused: UnusedPermits) {
        self.store.forget_refusal();
        let Some(queue) = &mut self.queue else {
            return self.give_back_now(ctx, &[unused]);
        };
        queue.returns.own.push(unused);
        // The units may be enough for the first waiter.
        queue.end_pause();
        self.step(ctx, None);
    }

    /// Counts units that were sent at `sent_at` or earlier: without a permit, because a request cost
    /// more than its permit, or instead of the units of a `permit`. The next call to the store carries
    /// them. If no call is sent soon, they get one of their own.
    pub(super) fn charge(
        &mut self,
        ctx: &mut KeyContext<'_>,
        units: u64,
        sent_at: Instant,
        permit: Option<UnusedPermits>,
    ) {
        self.store.count_charge(units, ctx.now);
        let pending = self.pending.get_or_insert_default();
        let charges = pending.charges.get_or_insert_default();
        charges.add(units, sent_at, permit);
        if self.store.answers_later {
            self.send_charges_later(ctx, false);
        } else {
            self.inquire(ctx);
        }
    }

    /// Returns the charge that a call to the store carries now, and its number. Adds the permits whose units it
    /// replaces to `returns`.
    fn take_charge(
        &mut self,
        ctx: &KeyContext<'_>,
        returns: &mut Returns,
    ) -> (Option<Charge>, Option<ChargeNumber>) {
        // For so long the store counts a charge.
        let memory = ctx.spec.quota().longest_memory() + ctx.spec.transit_slack();
        let charges = self.charges();
        let taken = charges.and_then(|charges| charges.take(memory, ctx.now, returns));
        taken.unzip()
    }

    /// Returns the units that were used without a permit.
    fn charges(&mut self) -> Option<&mut PendingCharges> {
        self.pending.as_mut()?.charges.as_deref_mut()
    }

    /// Returns what the upstream stated is left of each limit.
    fn remaining(&mut self) -> Option<&mut RemainingTracker> {
        Some(&mut self.pending.as_mut()?.remaining)
    }

    /// Returns whether the store may not have counted all charges.
    pub(super) fn has_charges(&self) -> bool {
        let pending = self.pending.as_ref();
        let charges = pending.and_then(|pending| pending.charges.as_ref());
        charges.is_some_and(|charges| !charges.is_empty())
    }

    /// Returns whether a call before the call `last` carries charges and has no answer yet. `None` stands for all calls.
    pub(super) fn are_charges_under_way(&self, last: Option<ChargeNumber>) -> bool {
        let pending = self.pending.as_ref();
        let charges = pending.and_then(|pending| pending.charges.as_ref());
        charges.is_some_and(|charges| charges.are_under_way(last))
    }

    /// Sends the charges now that no call carries, in a call of their own. Its answer is for
    /// [`confirmed`](joint_ask::confirmed).
    pub(super) fn flush_charges(
        &mut self,
        ctx: &mut KeyContext<'_>,
    ) -> Option<(SentCall, StoreReply<Lease>)> {
        let charges = self.charges()?;
        charges.give_up(ctx.now);
        let has_any = charges.are_waiting();
        has_any.then(|| self.call(ctx, Ask::nothing(Returns::new(), ctx.now)))
    }

    /// Takes in whether a call has reached the store, with the charges that it carries. If not, they get another one.
    pub(super) fn charge_answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        has_arrived: bool,
    ) {
        if let Some(number) = call.charge
            && let Some(charges) = self.charges()
        {
            charges.answered(number, has_arrived);
            if !has_arrived {
                self.send_charges_later(ctx, true);
            }
        }
    }

    /// Notes that charges get a call of their own if no other call carries them before.
    fn send_charges_later(&mut self, ctx: &KeyContext<'_>, failed: bool) {
        if self.charges().is_some_and(|charges| charges.are_waiting()) {
            let delay = if failed { RETRY } else { DELAY };
            self.pass_on_by(clock::after(ctx.now, delay));
        }
    }

    /// Takes what a call to the store states is left: see [`RemainingTracker::take_due`].
    pub(super) fn take_remaining(
        &mut self,
        ctx: &KeyContext<'_>,
        max_hold: Duration,
    ) -> Option<UpstreamRemaining> {
        self.remaining()?.take_due(ctx.spec, max_hold, ctx.now)
    }

    /// Puts the key on hold, or releases it.
    pub(super) fn adopt_hold(
        &mut self,
        ctx: &mut KeyContext<'_>,
        held: HoldState,
        source: HoldSource,
    ) {
        if self.hold.adopt(held, source, ctx.now) {
            self.hold_changed(ctx);
        }
    }

    /// Takes in a hold or a release of the whole key of which this one is a part. The next call sends it to
    /// the store, in which the parts have holds of their own.
    pub(super) fn follow_whole(&mut self, ctx: &mut KeyContext<'_>, held: HoldState) {
        let is_released = held.remaining.is_zero();
        if is_released && self.hold.left(ctx.now).is_none() {
            return;
        }
        let releases = self.hold.releases().saturating_add(is_released.into());
        let held = HoldState { releases, ..held };
        self.adopt_hold(ctx, held, HoldSource::Seen);
    }

    /// Takes in the hold that the store states in its answer to a call: see [`KeyHold::answered`]. If the hold
    /// ends earlier than this process knew, because it has missed a release, the requests that wait for its
    /// end go on.
    fn hold_answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        held: HoldState,
        sent: Instant,
        bounds: TimeBounds,
    ) -> bool {
        let before = self.hold.left(ctx.now);
        let precedes_release = self.hold.answered(held, sent, bounds);
        let left = self.hold.left(ctx.now).unwrap_or_default();
        if before.is_some_and(|before| left + SAME_END < before) {
            self.wait_no_longer(ctx);
        }
        precedes_release
    }

    /// Ends what has been put off until the end of a hold, or until the probe is accepted.
    fn wait_no_longer(&mut self, ctx: &mut KeyContext<'_>) {
        self.hold.wake_all(&mut ctx.work.wakers);
        if let Some(queue) = &mut self.queue {
            queue.gathering.end();
        }
    }

    /// Gives up permits that may no longer be used, after the hold has changed, and goes on with
    /// the others.
    ///
    /// Permits at hand, and permits booked before the end of the hold, go back to the store.
    /// Waiters that cannot wait until then are refused. The other waiters get new slots, which a
    /// store that knows of the hold grants for the time after it.
    pub(super) fn hold_changed(&mut self, ctx: &mut KeyContext<'_>) {
        self.store.forget_refusal();
        self.hold.wake_all(&mut ctx.work.wakers);
        self.obey_hold(ctx.now, &mut ctx.work.wakers);
        let left = self.hold.left(ctx.now);
        let is_held = left.is_some();
        if let Some(queue) = &mut self.queue {
            // The waiters book again when the hold ends, by what is allowed then. So slots after
            // the hold are given up as well. A bucket is an exception: it cannot take back a single
            // slot between the slots of other processes. So its slots stay while the key is on
            // hold.
            if !is_held || !booking::is_paced(ctx) {
                queue.give_up_slots();
            }
            if !is_held {
                queue.enter_from(ctx.now);
            }
            // After a release, the next call does not wait for the end of the hold. After a new hold
            // it waits no longer than that, although it may have been put off for a probe.
            let held_until = clock::after(ctx.now, left.unwrap_or_default());
            if !is_held || queue.gathering.ends_after(held_until) {
                queue.gathering.end();
            }
        }
        self.step(ctx, None);
    }

    /// Gives back permits at hand, and permits booked before the end of the hold.
    fn obey_hold(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.hold.left(now) else {
            return;
        };
        // The next call returns them, and the session subtracts them then.
        let unused = self.prefetched.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.own.extend(unused);
        queue.withdraw(clock::after(now, left), now, wakers);
    }

    /// Ends the use of the key in this process: gives back the permits at hand, and refuses the requests
    /// whose slot is later than `by`. Returns the units given back.
    pub(super) fn stop(&mut self, ctx: &mut KeyContext<'_>, by: Instant) -> u64 {
        let unused = self.prefetched.clear();
        self.give_back_now(ctx, unused.as_slice());
        if let Some(queue) = &mut self.queue {
            queue.end_by(by, &mut ctx.work.wakers);
            self.step(ctx, None);
        }
        unused.map_or(0, |unused| unused.units)
    }

    /// Shares a wait that the upstream has stated beyond `max_hold`. If requests wait for a probe, asks whether this process
    /// may send it.
    pub(super) fn share_probe(&mut self, ctx: &mut KeyContext<'_>, is_awaited: bool) {
        if let Some(call) = self
            .hold
            .fleet_call(ctx.key, is_awaited, ctx.max_hold, ctx.now)
        {
            ctx.work.effects.push(Effect::ShareProbe(Box::new(call)));
        }
    }

    /// Takes in the answer of the store to such a call, or `None` if the store failed.
    pub(super) fn fleet_answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        answer: Option<&Register>,
        probe: Option<u8>,
    ) {
        if let Some(theirs) = answer.filter(|register| !register.changed) {
            self.learn_fleet(ctx, theirs);
        } else {
            let (version, is_shared) = (answer.map(|new| new.version), self.store.answers_later);
            self.hold.fleet_changed(version, probe, is_shared, ctx.now);
            if probe.is_some() {
                self.wait_no_longer(ctx);
                return self.step(ctx, None);
            }
        }
        // If the register is about an earlier hold, the next call replaces it.
        self.share_probe(ctx, probe.is_some());
    }

    /// Takes in what another process has written.
    pub(super) fn learn_fleet(&mut self, ctx: &mut KeyContext<'_>, register: &Register) {
        let was_clear = self.hold.is_clear(ctx.max_hold, ctx.now);
        if self.hold.learn_fleet(ctx.key, register, ctx.now) {
            self.hold_changed(ctx);
        } else if was_clear && !self.hold.is_clear(ctx.max_hold, ctx.now) {
            // Requests that take a permit at hand ask for no probe.
            self.give_back_prefetched(ctx);
        }
    }

    /// Takes back the probe of a request that was not sent, if it was one. Returns whether another one may
    /// leave now.
    fn probe_comes_back(&mut self, ctx: &mut KeyContext<'_>, probe: Option<ProbeNumber>) -> bool {
        let may_leave = probe.is_some_and(|number| self.hold.probe_comes_back(number, ctx.now));
        if may_leave {
            self.wait_no_longer(ctx);
        }
        may_leave
    }

    /// Takes back a probe that was not sent, of this key or of the host whose holds this key has. The others go
    /// on.
    pub(super) fn probe_not_sent(&mut self, ctx: &mut KeyContext<'_>, probe: ProbeNumber) {
        if self.probe_comes_back(ctx, Some(probe)) {
            self.step(ctx, None);
        }
    }

    /// Notes that a hold, a release or a booking may have been missed.
    pub(super) fn doubt(&mut self) {
        if let Some(hold) = self.hold.hold_mut() {
            hold.doubt();
        }
        self.store.doubt();
    }

    /// Asks the store to confirm the hold and the bookings, even if no request waits. A store that
    /// was restored to an older state would grant booked slots to other processes until this call.
    pub(super) fn confirm(&mut self, ctx: &mut KeyContext<'_>) {
        let is_at_stake = self.hold.left(ctx.now).is_some() || self.is_booked();
        if self.store.answers_later && is_at_stake {
            self.inquire(ctx);
        }
    }

    /// Returns whether slots are booked ahead.
    pub(super) fn is_booked(&self) -> bool {
        self.queue
            .as_ref()
            .is_some_and(|queue| queue.last_booked().is_some())
    }

    /// Takes in the response to a request that was sent at `sent`. The upstream refused `refused`
    /// units.
    ///
    /// Returns whether fewer units are left than this process or another one could send before the
    /// next call to the store.
    pub(super) fn upstream_stated(
        &mut self,
        spec: &LimitSpec,
        signal: &Signal,
        refused: u32,
        sent: Instant,
        now: Instant,
    ) -> bool {
        let at_hand = u64::from(self.prefetched.units(now));
        let sendable = Sendable {
            at_hand,
            in_all: at_hand.saturating_add(self.store.free()),
        };
        let remaining = &mut self.pending.get_or_insert_default().remaining;
        remaining.observe(spec, signal, refused, sent, sendable, now)
    }

    /// Gives up permits at hand and booked slots, because less is left than this process could
    /// send. Asks for them anew.
    pub(super) fn tighten(&mut self, ctx: &mut KeyContext<'_>) {
        // The next call returns them, and the session subtracts them then.
        let unused = self.prefetched.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.own.extend(unused);
        queue.give_up_slots();
        // A call under way may bring more than is left: this is done again when it is answered.
        self.store.tightens = queue.is_calling(ctx.now);
        if self.store.tightens {
            return;
        }
        let has_waiters = queue.waiting() > 0;
        if has_waiters {
            queue.gathering = Gathering::Done;
        }
        let is_less = self.remaining().is_some_and(|tracker| tracker.is_less());
        if is_less && !has_waiters {
            self.inquire(ctx);
        } else {
            self.step(ctx, None);
        }
    }

    /// Sends the store what the upstream stated, even if no request waits. Sends refusals at once.
    /// If other clients use the limit as well, sends other statements soon.
    pub(super) fn pass_on(&mut self, ctx: &mut KeyContext<'_>) {
        let external_usage = self.store.has_external_usage;
        let Some(tracker) = self.remaining() else {
            return;
        };
        let Some(pause) = tracker.due_in(ctx.spec, external_usage, ctx.now) else {
            return;
        };
        if pause.is_zero() {
            return self.inquire(ctx);
        }
        self.pass_on_by(clock::after(ctx.now, pause));
    }

    /// Notes that the store has to be called by `moment`, even if no request waits: see
    /// [`pass_on_now`](Self::pass_on_now).
    fn pass_on_by(&mut self, moment: Instant) {
        let passes_on_at = &mut self.pending.get_or_insert_default().passes_on_at;
        *passes_on_at = passes_on_at.map_or(Some(moment), |at| Some(at.min(moment)));
    }

    /// Returns when the store is called even if no request waits.
    fn passes_on_at(&self) -> Option<Instant> {
        self.pending.as_ref()?.passes_on_at
    }

    /// Sends the store what the upstream stated, and charges. If a hold is doubted, asks the store about it again.
    fn pass_on_now(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(pending) = &mut self.pending {
            pending.passes_on_at = None;
        }
        if self.charges().is_some_and(|charges| charges.are_waiting()) {
            self.inquire(ctx);
        }
        let is_doubted = self.hold.is_doubted(ctx.now);
        self.pass_on(ctx);
        if is_doubted && !ctx.work.has_begun_call() && self.passes_on_at().is_none() {
            self.confirm(ctx);
        }
    }

    /// Keeps what a lease states besides its slots. Returns when the store made the lease.
    fn remember(&mut self, ctx: &mut KeyContext<'_>, lease: &Lease, sent: Instant) -> TimeBounds {
        if let Some(set) = &lease.set_quota {
            self.take_in_set_quota(ctx, set);
        }
        let Observed {
            bounds,
            has_lost_state,
            voids_permits,
        } = self.store.observe(ctx.spec, lease, sent, ctx.now);
        if voids_permits {
            self.prefetched.clear();
            if let Some(queue) = &mut self.queue {
                queue.void();
            }
        }
        if has_lost_state {
            self.hold.store_lost_state(ctx.now);
        }
        if ctx.spec.lending().is_some() && !lease.source.is_standalone() {
            self.note_own_part(ctx.spec, sent, has_lost_state);
        }
        if let Some(grant) = &lease.prefetched {
            // The calls of joint requests are under way at the same time as another call.
            self.give_back_prefetched(ctx);
            let permits = slot(lease, grant, TimeBounds::at(bounds.earliest));
            if ctx.is_draining || !self.hold.is_clear(ctx.max_hold, ctx.now) {
                // The call was sent before the drain, or before the hold.
                self.give_back_now(ctx, &[permits.unused()]);
            } else {
                self.prefetched.fill(&permits);
            }
        }
        bounds
    }

    /// Gives back the permits at hand.
    pub(super) fn give_back_prefetched(&mut self, ctx: &KeyContext<'_>) {
        let unused = self.prefetched.clear();
        self.give_back_now(ctx, unused.as_slice());
    }

    /// Gives permits of this state back to the store without a call, and subtracts them from those that the session counts as
    /// granted.
    fn give_back_now(&mut self, ctx: &KeyContext<'_>, unused: &[UnusedPermits]) {
        if !unused.is_empty() {
            self.store.forget(unused);
            ctx.store.give_back(ctx.key, ctx.spec, unused);
        }
    }

    /// Ends a visit: leaves the lent permits that no waiter needs to be given back. Drops a queue without waiters, and gives
    /// back the permits that its next call would have returned.
    pub(super) fn end_visit(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(queue) = &mut self.queue {
            ctx.work.lent_back.append(&mut queue.returns.lent);
        }
        if let Some(queue) = self.queue.take_if(|queue| queue.is_done(ctx.now)) {
            self.give_back_now(ctx, &queue.returns.own);
        }
    }
}
