//! Booking: when the store is called for the waiters of a key, for what, and what its answer means.
//!
//! [`KeyState::step`] runs whenever something has changed: a request arrived or left, a slot is
//! due, or the store answered. It hands out the slots that are due, and [`KeyState::next_call`]
//! decides whether the store is called. One call at a time is under way. It books for all waiters
//! without a slot. Its answer arrives at [`KeyState::call_answered`].

use std::task::Poll;

use smallvec::SmallVec;

use super::KeyState;
use super::calls::{Ask, SentCall, TakenIn};
use super::context::{Effect, KeyContext, LeaseFuture};
use super::hold::ASK_AGAIN;
use super::near_booking;
use super::probation::Passage;
use super::store_view::slot;
use crate::clock;
use crate::error::StoreError;
use crate::limiter::lanes::HandedOut;
use crate::limiter::queue::{Answered, Delay, Gathering, Number};
use crate::limiter::reservation::{NoSlot, ProbeNumber};
use crate::quota::Limit;
use crate::store::{Demand, Lease, Refusal, StoreReply, trust};

/// The most permits of one call to a store that does not answer at once, so that no call keeps its
/// server busy for long.
const MOST_ASKED: usize = 500;

/// The most calls in a row to a store that answers at once: one for each demand that it refuses,
/// and one more.
const MOST_ROUNDS: usize = 64;

/// Up to how many waiters behind a slot that came back book anew under a bucket. It takes back single slots between
/// those of other processes, but not many.
const MOST_BOOKED_ANEW_BY_PACE: usize = 8;

/// What a call to the store asks for.
struct BookingCall {
    /// The permits for waiters. If there are none, the call confirms what was booked.
    demands: SmallVec<[Demand; 2]>,
    /// Whether the store has to confirm a slot. Then the call does not wait for other requests.
    confirms: bool,
    /// Whether the call fetches permits in advance as well.
    prefetches: bool,
    /// Whether only slots that are near are of use.
    is_near: bool,
}

/// Returns whether the quota has a bucket, which keeps the order of its bookings.
pub(super) fn is_paced(ctx: &KeyContext<'_>) -> bool {
    let mut limits = ctx.spec.quota().limits().iter();
    limits.any(|limit| matches!(limit, Limit::Bucket { .. }))
}

impl KeyState {
    /// Brings the key up to date. Hands out the slots that are due, and gives back slots that no
    /// waiter needs. Calls the store for waiters without a slot. The waiter `me` is being polled
    /// and needs no waking.
    pub(super) fn step(&mut self, ctx: &mut KeyContext<'_>, me: Option<(Number, u32)>) {
        if !self.are_parts_stated(ctx, ctx.now) && self.waiting() > 0 {
            self.want_statements(ctx);
            return self.return_unused(ctx);
        }
        // A store that answers at once may bring slots that are due. It may also refuse one demand
        // and leave those after it undecided.
        for round in 0.. {
            if round == MOST_ROUNDS {
                self.go_on_later(ctx);
                break;
            }
            let is_trusted = self.store.is_trusted(ctx.spec, ctx.now);
            let Some(HandedOut { died, .. }) = self.hand_out_due(ctx, me, is_trusted) else {
                return;
            };
            let Some(booking) = self.next_call(ctx, is_trusted) else {
                break;
            };
            match self.send(ctx, &booking, died) {
                // The store read the time after `ctx.now`, and to take in its answer for 100,000 waiters takes as long as a
                // permit is valid. The permits of the next call are valid from then on.
                Poll::Ready(()) => ctx.now = clock::now(),
                Poll::Pending => break,
            }
        }
        self.return_unused(ctx);
        self.borrow_later(ctx);
    }

    /// Does what is done before a request that enters now has its slot.
    pub(in crate::limiter) fn bring_up_to_date(&mut self, ctx: &mut KeyContext<'_>) {
        if !self.store.answers_later {
            self.share_probe(ctx, true);
        }
        let queue = self.queue.as_ref();
        let is_put_off = queue.is_some_and(|queue| queue.gathering.is_short(ctx.now));
        if is_put_off && !self.store.answers_later {
            self.gathered(ctx);
        } else {
            self.step(ctx, None);
        }
    }

    /// Puts the next call off a little.
    pub(super) fn go_on_later(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(queue) = &mut self.queue {
            let delay = queue.gathering.put_off(clock::SHORTEST_TIMER, ctx.now);
            ctx.work.begins_delay |= delay == Delay::Starts;
        }
    }

    /// Hands out the slots that are due, if they are trusted. Returns `None` if there is no queue.
    fn hand_out_due(
        &mut self,
        ctx: &mut KeyContext<'_>,
        me: Option<(Number, u32)>,
        is_trusted: bool,
    ) -> Option<HandedOut> {
        let now = ctx.now;
        let passage = self.hold.passage(ctx.max_hold, now);
        let (most, probe) = match passage {
            // The store has to confirm the slots first.
            _ if !is_trusted => (0, None),
            Passage::Open => (usize::MAX, None),
            Passage::Probe => (1, Some(ProbeNumber::next())),
            Passage::Probing(_) | Passage::Asking => (0, None),
        };
        let queue = self.queue.as_mut()?;
        if matches!(passage, Passage::Probing(_)) {
            // The probe may be a request of several keys, which has no place in this queue. The
            // waiters book anew when it is accepted.
            queue.give_up_slots();
        }
        queue.take_from(&mut self.prefetched, now);
        let handed_out = queue.hand_out(most, probe, now, me, &mut ctx.work.wakers);
        if let Some(number) = probe.filter(|_| handed_out.count > 0) {
            self.hold.probe_leaves(number, now);
            // Those that can wait no longer have no timer for it.
            queue.wake_impatient(now, &mut ctx.work.wakers);
        }
        Some(handed_out)
    }

    /// Returns what the store is asked for now. Returns `None` if no call is needed, if one is under way, or if the
    /// next one waits for other requests to join it or for the end of a hold.
    fn next_call(&mut self, ctx: &mut KeyContext<'_>, is_trusted: bool) -> Option<BookingCall> {
        let booking = self.needed(ctx, is_trusted)?;
        let delay = self.delay(ctx, &booking);
        ctx.work.begins_delay |= delay == Delay::Starts;
        (delay == Delay::Over).then_some(booking)
    }

    /// Returns what the next call asks for. Returns `None` if no call is needed, or if one is under
    /// way.
    fn needed(&mut self, ctx: &KeyContext<'_>, is_trusted: bool) -> Option<BookingCall> {
        let now = ctx.now;
        let queue = self.queue.as_mut()?;
        let has_doubtful_slot = !is_trusted && queue.is_due(now);
        queue.trim(now);
        if queue.is_calling(now) {
            return None;
        }
        queue.give_up_call();
        let is_clear = self.hold.is_clear(ctx.max_hold, now);
        // Permits are scarce if slots lie ahead: none are fetched in advance.
        let is_scarce = queue.last_booked().is_some();
        let trusted_for = trust(ctx.spec.quota().longest_memory());
        if !queue.gathering.is_under_way() {
            // What other parts have lent does not come back with this call.
            let may = is_clear
                && is_trusted
                && ctx.spec.lending().is_none()
                && !queue.is_paused(now)
                && (!is_paced(ctx) || queue.waiting() <= MOST_BOOKED_ANEW_BY_PACE);
            // A store that answers later may fail, or answer when slots that are near would have been due. Those further
            // ahead than it is trusted would be of no use then either.
            let answers_later = self.store.answers_later;
            let from = match answers_later {
                true => clock::after(now, trusted_for),
                false => now,
            };
            queue.give_up_behind_freed(may.then_some(from), answers_later, now);
        }
        // The next slot is confirmed early enough for the answer to arrive before the slot is due.
        let lead = trusted_for / 4;
        let unconfirmed = queue
            .next_slot()
            .filter(|slot| is_clear && !self.store.is_trusted(ctx.spec, *slot));
        let confirms = has_doubtful_slot
            || unconfirmed.is_some_and(|slot| queue.takes_confirmation(slot, lead, now));
        let is_for_first = self.store.answers_later
            && ctx.settles
            && near_booking::is_for_first(queue, ctx.spec, now);
        let demands = queue.needs(
            match (is_clear && !is_for_first, self.store.answers_later) {
                (false, _) => 1,
                (true, true) => MOST_ASKED,
                (true, false) => usize::MAX,
            },
        );
        if demands.is_empty() && !confirms {
            return None;
        }
        let prefetches = self.store.answers_later
            && is_clear
            && !is_scarce
            && !demands.is_empty()
            && !ctx.settles;
        Some(BookingCall {
            demands,
            confirms,
            prefetches,
            is_near: ctx.settles && !is_for_first,
        })
    }

    /// Decides whether a needed call is sent now. It may have to wait for the end of a hold, for
    /// the answer to a probe, or for other requests to join it.
    fn delay(&mut self, ctx: &mut KeyContext<'_>, booking: &BookingCall) -> Delay {
        let now = ctx.now;
        if self.waiting() > 0 {
            self.share_probe(ctx, true);
        }
        let Some(queue) = &mut self.queue else {
            return Delay::Over;
        };
        if let Some(left) = self.hold.blocked_for(ctx.max_hold, now) {
            // The slots are booked when the hold ends or the probe is accepted, by what is known
            // then.
            queue.gathering.put_off(left, now)
        } else if self.store.answers_later && !booking.confirms || queue.is_paused(now) {
            queue.batch(now)
        } else if !self.store.answers_later && queue.gathering.is_short(now) {
            Delay::UnderWay
        } else {
            Delay::Over
        }
    }

    /// Calls the store. Ready if it has answered at once. If permits expired since the last call (`died`), the permits of
    /// later calls are valid for longer.
    fn send(&mut self, ctx: &mut KeyContext<'_>, booking: &BookingCall, died: bool) -> Poll<()> {
        let demands = &booking.demands;
        let queue = self.queue.get_or_insert_default();
        let mut latest = queue.latest().unwrap_or(ctx.now);
        if booking.is_near {
            latest = latest.min(near_booking::latest(ctx.now));
        }
        let returns = std::mem::take(&mut queue.returns.own);
        if died {
            self.store.lengthen_life(ctx.spec);
        }
        let ask = Ask::slots(demands, latest, returns).prefetching(booking.prefetches);
        match self.ask(ctx, ask) {
            Some((call, answer)) => {
                let queue = self.queue.get_or_insert_default();
                queue.call_sent(demands, ctx.now, false);
                ctx.now = clock::now();
                self.answered(ctx, call, answer);
                Poll::Ready(())
            }
            None => Poll::Pending,
        }
    }

    /// Calls the store. Returns the answer of a store that answers at once. Else the call is under way: its answer arrives
    /// at [`call_answered`](Self::call_answered).
    fn ask(
        &mut self,
        ctx: &mut KeyContext<'_>,
        ask: Ask<'_>,
    ) -> Option<(SentCall, Result<Lease, StoreError>)> {
        let demands = ask.demands;
        match self.call(ctx, ask) {
            (call, StoreReply::Ready(answer)) => Some((call, answer)),
            (call, StoreReply::Pending(answer)) => {
                self.call_under_way(ctx, demands, call, answer);
                None
            }
        }
    }

    /// Notes that the answer to a call for `demands` is still to come, and leaves the call to be
    /// run.
    pub(super) fn call_under_way(
        &mut self,
        ctx: &mut KeyContext<'_>,
        demands: &[Demand],
        call: SentCall,
        answer: LeaseFuture,
    ) {
        let queue = self.queue.get_or_insert_default();
        let number = queue.call_sent(demands, ctx.now, ctx.is_watched());
        let call = SentCall {
            number: Some(number),
            ..call
        };
        ctx.work.effects.push(Effect::Call(call, answer));
    }

    /// Gives back the permits that no waiter needs, unless a call that returns them is about to be
    /// sent.
    fn return_unused(&mut self, ctx: &KeyContext<'_>) {
        let is_clear = self.hold.is_clear(ctx.max_hold, ctx.now);
        let Some(queue) = &mut self.queue else { return };
        let gathers = is_clear && queue.gathering.is_under_way();
        if !queue.returns.own.is_empty() && !queue.is_calling(ctx.now) && !gathers {
            let unused = std::mem::take(&mut queue.returns.own);
            self.give_back_now(ctx, &unused);
            if ctx.spec.lending().is_some() {
                self.note_own_part(ctx.spec, ctx.now, false);
            }
        }
    }

    /// Calls the store even if no request waits. The call states what this process knows of the
    /// key, and the reply states what the store knows. Does nothing while another call is under
    /// way.
    pub(in crate::limiter) fn inquire(&mut self, ctx: &mut KeyContext<'_>) {
        if self
            .queue
            .as_ref()
            .is_some_and(|queue| queue.is_calling(ctx.now))
        {
            return;
        }
        let returns = self.queue.as_mut().map(|queue| {
            queue.give_up_call();
            std::mem::take(&mut queue.returns.own)
        });
        let ask = Ask::nothing(returns.unwrap_or_default(), ctx.now);
        if let Some((call, answer)) = self.ask(ctx, ask) {
            ctx.now = clock::now();
            self.answered(ctx, call, answer);
        }
    }

    /// Takes in the answer to a call. If the waiters do not wait for it, because it was for something else or counted as
    /// lost, the permits that it brings are given back.
    pub(in crate::limiter) fn call_answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) {
        let under_way = self.queue.as_ref().and_then(|queue| queue.call_number());
        if call.number.is_none() || call.number != under_way {
            self.charge_answered(ctx, call, answer.is_ok());
            if let Ok(lease) = answer {
                ctx.store.give_back(ctx.key, ctx.spec, &lease.unused());
            }
            return;
        }
        let failed = !self.answered(ctx, call, answer);
        if self.store.tightens {
            return self.tighten(ctx);
        }
        self.step(ctx, None);
        if !ctx.work.has_begun_call() {
            self.pass_on(ctx);
        }
        self.send_charges_later(ctx, failed);
        if failed && !ctx.work.has_begun_call() && self.hold.is_doubted(ctx.now) {
            self.pass_on_by(clock::after(ctx.now, ASK_AGAIN));
        }
    }

    /// Takes in the answer to a call for the waiters. Returns whether the store has answered.
    fn answered(
        &mut self,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) -> bool {
        let taken_in = self.take_in(ctx, call, answer);
        let is_ok = taken_in.is_ok();
        match taken_in {
            Ok(taken_in) => self.granted(ctx, &taken_in),
            Err(error) => self.failed(ctx, error),
        }
        self.after_answer(ctx);
        is_ok
    }

    /// Takes in the slots of a lease.
    fn granted(&mut self, ctx: &mut KeyContext<'_>, taken_in: &TakenIn) {
        let now = ctx.now;
        let &TakenIn {
            ref lease,
            bounds,
            precedes_release,
        } = taken_in;
        // Units that come back do not help a request that is never allowed.
        let may_help = ctx.settles && lease.refused.is_none_or(|refusal| refusal.wait.is_some());
        let keeps =
            lease.refused.is_some() && !may_help && !precedes_release && self.may_borrow(ctx);
        let Some(queue) = &mut self.queue else { return };
        queue.take_exchange();
        if let Some(wait) = lease.recovering {
            return queue.pause(wait, now, &mut ctx.work.wakers);
        }
        let slots = lease.grants.iter().map(|grant| slot(lease, grant, bounds));
        let refusal = NoSlot::TooLate(lease.refused.unwrap_or(Refusal::NEVER));
        if keeps && queue.waiting() > 0 {
            return self.keep_answer(ctx, slots.collect(), refusal);
        }
        let end = if precedes_release || may_help {
            None
        } else {
            Some(&refusal)
        };
        let least = self.store.least_use(ctx.spec);
        let Answered { died, refused } =
            queue.answered(slots, end, least, now, &mut ctx.work.wakers);
        if precedes_release {
            // The store decided while the key was on hold. The next call asks for all waiters
            // again.
            queue.give_up_slots();
            return;
        }
        self.store.adapt_life(ctx.spec, bounds, died);
        if may_help {
            let queue = self.queue.get_or_insert_default();
            near_booking::answered(queue, ctx.spec, lease, now, &mut ctx.work.wakers);
        } else {
            self.store.note_refusal(refused, lease, ctx.fails_open, now);
        }
    }

    fn failed(&mut self, ctx: &mut KeyContext<'_>, error: StoreError) {
        let now = ctx.now;
        let Some(queue) = &mut self.queue else { return };
        if let Some(left) = self.hold.left(now)
            && ctx.fails_open
        {
            // No request passes uncounted while the key is on hold.
            return queue.pause(left, now, &mut ctx.work.wakers);
        }
        if !self.store.is_trusted(ctx.spec, now) && queue.is_due(now) {
            // The store may have lost the slots that it booked.
            queue.void();
        }
        let end = NoSlot::Failed(error);
        let end = Some(&end).filter(|_| !queue.take_exchange());
        let least = self.store.least_use(ctx.spec);
        queue.answered([], end, least, now, &mut ctx.work.wakers);
    }

    /// Ends the batching delay of the next call.
    pub(super) fn gathered(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(queue) = &mut self.queue {
            queue.gathering = Gathering::Done;
        }
        self.step(ctx, None);
        if let Some(queue) = &mut self.queue
            && queue.gathering == Gathering::Done
        {
            // No call was needed.
            queue.gathering = Gathering::NotYet;
        }
    }
}
