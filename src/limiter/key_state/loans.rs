//! Slots that the parts of other classes lend, if the quota is divided among classes.
//!
//! A class books in its own part, as far ahead as its requests can wait. While they wait, it asks the
//! other parts for slots that are near (`limit/lending.rs`). The first waiters get these. That
//! frees the last slots of the own part. They are kept for the next requests for half a second, and then given
//! back. So a class also asks its own part now and then for slots that other lines gave back.
//!
//! If the own part refuses requests, the other parts are asked first: the answer is kept until they
//! have answered. The class asks each part again after the time that the part names, and less often if it
//! lends nothing.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::calls::{Ask, SentCall, TakenIn};
use super::context::{Effect, KeyContext};
use super::store_view::slot;
use super::{KeyState, joint_ask};
use crate::clock;
use crate::error::StoreError;
use crate::limiter::queue::{CallNumber, Returns};
use crate::limiter::reservation::{NoSlot, Reservation};
use crate::rng::dice;
use crate::store::{Demand, Lease, StoreReply};
use crate::tuning::ANSWER;

/// The most permits that a class asks for at once.
const MOST: usize = 64;

/// The shortest and the longest time between two rounds of asking.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(1);

/// The shortest and the longest time between two questions for sooner slots of the own part. It has some
/// if other lines of the class gave slots back.
const SHORTEST_OWN: Duration = Duration::from_millis(500);
const LONGEST_OWN: Duration = Duration::from_secs(2);

/// How long a class keeps slots of its own part, far ahead, that its waiters no longer need because other
/// parts have lent them sooner ones. Its next requests take them without a call.
const SPARED: Duration = Duration::from_millis(500);

/// How many times as long as the parts said a class waits at most.
const LONGEST_BACKOFF: u32 = 16;

/// What a class knows of the slots that other parts lend.
#[derive(Default)]
pub(super) struct Loans {
    /// When a round of asking begins, if requests wait for that. If one is under way, when it counts as lost: then it
    /// begins again.
    asks_at: Option<Instant>,
    /// When the next round may begin.
    next: Option<Instant>,
    /// What the class knows of each part, by the number of the part.
    lenders: Vec<Lender>,
    /// The answer of the own part, kept until the other parts have answered.
    kept: Option<HeldAnswer>,
}

/// What a class knows of a part that lends.
#[derive(Clone, Copy, Default)]
struct Lender {
    /// When the class may ask it next. `None` if it was not asked yet.
    next: Option<Instant>,
    /// How many times as long as the part said the class waits, minus one.
    backoff: u32,
}

/// An answer that refuses waiters.
struct HeldAnswer {
    /// The call that was answered.
    call: Option<CallNumber>,
    slots: Vec<Reservation>,
    refusal: NoSlot,
}

/// What a class asks the other parts for.
pub(in crate::limiter) struct WantedLoan {
    pub(in crate::limiter) demands: SmallVec<[Demand; 2]>,
    /// The latest slot that is of use.
    latest: Instant,
    /// Whether the own part is asked, too: all waiters have slots, the last of them far ahead.
    asks_own: bool,
    /// What is known of the parts.
    lenders: Vec<Lender>,
}

/// What a part has lent.
#[derive(Default)]
pub(in crate::limiter) struct Lent {
    pub(in crate::limiter) slots: Vec<Reservation>,
    /// After what time it may lend more, if it has refused.
    pub(in crate::limiter) again: Option<Duration>,
}

impl WantedLoan {
    /// Returns whether the part number `part` is asked at `now`.
    pub(in crate::limiter) fn asks(&self, part: usize, is_own: bool, now: Instant) -> bool {
        let next = self.lenders.get(part).and_then(|lender| lender.next);
        let is_of_use = !self.demands.is_empty() && (self.asks_own || !is_own);
        is_of_use && next.is_none_or(|next| next <= now)
    }

    /// Takes out the permits that a part has lent.
    pub(in crate::limiter) fn take(&mut self, lent: &[Reservation]) {
        for slot in lent {
            let mut demands = self.demands.iter_mut();
            if let Some(demand) = demands.find(|demand| demand.cost == slot.cost) {
                demand.count = demand.count.saturating_sub(slot.count);
            }
        }
        self.demands.retain(|demand| demand.count > 0);
    }
}

impl KeyState {
    /// Returns whether the other parts may be asked for slots now.
    pub(super) fn may_borrow(&self, ctx: &KeyContext<'_>) -> bool {
        ctx.spec.lending().is_some()
            && !self.store.is_standalone
            && self.hold.is_clear(ctx.max_hold, ctx.now)
            && self.limits.loans().is_none_or(|loans| {
                let mut moments = loans.asks_at.into_iter().chain(loans.next);
                moments.all(|at| at <= ctx.now)
            })
    }

    /// Returns whether a slot of this cost is kept for the next waiter.
    pub(super) fn has_spare(&self, cost: u32) -> bool {
        let queue = self.queue.as_ref();
        queue.is_some_and(|queue| queue.has_spare(cost))
    }

    /// Begins a round of asking when the parts may be asked again, if requests wait that other parts may serve
    /// sooner.
    pub(super) fn borrow_later(&mut self, ctx: &mut KeyContext<'_>) {
        let now = ctx.now;
        let Some(queue) = &self.queue else { return };
        if ctx.spec.lending().is_none()
            || self.store.is_standalone
            || queue.is_calling(now)
            || !self.hold.is_clear(ctx.max_hold, now)
            || !queue.waits_beyond(clock::after(now, SHORTEST))
        {
            return;
        }
        let loans = self.limits.loans_mut();
        if loans.asks_at.is_some_and(|at| at > now) {
            return;
        }
        match loans.next.filter(|next| *next > now) {
            Some(next) => loans.asks_at = Some(next),
            None => self.begin_to_borrow(ctx),
        }
    }

    /// Returns when a round of asking begins, or begins again because it was lost.
    pub(super) fn borrows_at(&self) -> Option<Instant> {
        self.limits.loans()?.asks_at
    }

    /// Leaves a round of asking to be started.
    pub(super) fn begin_to_borrow(&mut self, ctx: &mut KeyContext<'_>) {
        self.limits.loans_mut().asks_at = Some(clock::after(ctx.now, ANSWER));
        ctx.work.effects.push(Effect::Borrow);
    }

    /// Keeps an answer of the own part that refuses waiters, and leaves a round of asking to be started.
    /// The call stays under way.
    pub(super) fn keep_answer(
        &mut self,
        ctx: &mut KeyContext<'_>,
        slots: Vec<Reservation>,
        refusal: NoSlot,
    ) {
        let call = self.queue.as_ref().and_then(|queue| queue.call_number());
        let kept = HeldAnswer {
            call,
            slots,
            refusal,
        };
        let before = self.limits.loans_mut().kept.replace(kept);
        if let (Some(HeldAnswer { slots, .. }), Some(queue)) = (before, &mut self.queue) {
            slots.iter().for_each(|slot| queue.returns.add(slot));
        }
        self.begin_to_borrow(ctx);
    }

    /// Returns what the class asks the other parts for.
    pub(in crate::limiter) fn wanted_loans(
        &mut self,
        ctx: &mut KeyContext<'_>,
    ) -> Option<WantedLoan> {
        let queue = self
            .queue
            .as_ref()
            .filter(|_| ctx.spec.lending().is_some() && self.hold.is_clear(ctx.max_hold, ctx.now));
        let is_booked = queue.is_some_and(|queue| queue.all_have_slots());
        let wanted = queue.and_then(|queue| queue.sooner(MOST));
        match wanted {
            Some((demands, latest)) => {
                let is_far = latest > clock::after(ctx.now, LONGEST);
                let lenders = self.limits.loans_mut().lenders.clone();
                Some(WantedLoan {
                    demands,
                    latest,
                    asks_own: is_booked && is_far && !ctx.settles,
                    lenders,
                })
            }
            None => {
                self.loans_ended(ctx);
                None
            }
        }
    }

    /// Asks this part for what is `wanted`: that of another class, or the own one, which has no horizon.
    /// Returns `None` if it lends nothing now.
    pub(in crate::limiter) fn lend(
        &mut self,
        ctx: &mut KeyContext<'_>,
        wanted: &WantedLoan,
        is_own: bool,
    ) -> Option<(SentCall, StoreReply<Lease>)> {
        let lending = ctx.spec.lending()?;
        let lends = is_own || lending.percent() > 0;
        if !lends || self.store.is_standalone || !self.hold.is_clear(ctx.max_hold, ctx.now) {
            return None;
        }
        let horizon = clock::after(ctx.now, lending.horizon());
        let latest = if is_own {
            wanted.latest
        } else {
            wanted.latest.min(horizon)
        };
        let ask = Ask::slots(&wanted.demands, latest, Returns::new()).borrowing(!is_own);
        Some(self.call(ctx, ask))
    }

    /// Takes in the answer of this part. Returns what it has lent.
    pub(in crate::limiter) fn lent(
        &mut self,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) -> Lent {
        let now = ctx.now;
        let Ok(taken_in) = self.take_in(ctx, call, answer) else {
            return Lent::default();
        };
        let TakenIn {
            lease,
            bounds,
            precedes_release,
        } = taken_in;
        let is_clear = self.hold.is_clear(ctx.max_hold, now);
        if !is_clear {
            joint_ask::go_on(self, ctx);
        }
        let is_usable = !precedes_release && !lease.source.is_standalone() && is_clear;
        let slots = lease.grants.iter().map(|grant| slot(&lease, grant, bounds));
        let (usable, others): (Vec<_>, Vec<_>) =
            slots.partition(|slot| is_usable && slot.until > now.max(slot.at));
        let died = is_usable && !others.is_empty();
        self.store.adapt_life(ctx.spec, bounds, died);
        for slot in others {
            self.give_back_now(ctx, &[slot.unused()]);
        }
        let horizon = ctx.spec.lending().map(|lending| lending.horizon());
        let wait = lease.refused.and_then(|refusal| refusal.wait);
        Lent {
            slots: usable,
            again: wait.map(|wait| wait.saturating_sub(horizon.unwrap_or_default())),
        }
    }

    /// Takes in what the part number `part` has lent, which may be the own one. The first waiters get it.
    pub(in crate::limiter) fn borrowed(
        &mut self,
        ctx: &mut KeyContext<'_>,
        part: usize,
        is_own: bool,
        lent: &Lent,
    ) {
        let now = ctx.now;
        let gained: u32 = lent.slots.iter().map(|slot| slot.count).sum();
        let loans = self.limits.loans_mut();
        if loans.lenders.len() <= part {
            loans.lenders.resize(part + 1, Lender::default());
        }
        let lender = &mut loans.lenders[part];
        lender.backoff = match gained {
            0 => (lender.backoff * 2 + 1).min(LONGEST_BACKOFF - 1),
            1 => lender.backoff,
            _ => lender.backoff / 2,
        };
        let again = lent.again.unwrap_or_default().max(SHORTEST);
        let (again, longest) = if is_own {
            (SHORTEST_OWN, LONGEST_OWN)
        } else {
            (again, LONGEST)
        };
        let wait = (again * (lender.backoff + 1)).min(longest);
        // Processes do not ask at the same moment.
        let jitter = u32::try_from(dice() % 64).unwrap_or_default();
        lender.next = Some(clock::after(now, wait * (96 + jitter) / 128));
        let Some(queue) = &mut self.queue else {
            ctx.work.lent_back.extend(&lent.slots);
            return;
        };
        lent.slots.iter().for_each(|slot| queue.add(*slot));
        if gained > 0 {
            queue.spares_until = Some(clock::after(now, SPARED));
            self.go_on_with_loans(ctx);
        }
    }

    /// Ends a round of asking: takes in the answer of the own part that was kept meanwhile.
    pub(in crate::limiter) fn loans_ended(&mut self, ctx: &mut KeyContext<'_>) {
        let now = ctx.now;
        let loans = self.limits.loans_mut();
        // The own part may be due for long: it is not asked while all slots are near.
        let next = loans.lenders.iter().filter_map(|lender| lender.next);
        let first = next.filter(|next| *next > now).min();
        let next = clock::after(now, SHORTEST).max(first.unwrap_or(now));
        loans.next = Some(next);
        loans.asks_at = None;
        let kept = loans.kept.take();
        match (kept, &mut self.queue) {
            (None, _) => {}
            (Some(kept), Some(queue)) if kept.call == queue.call_number() => {
                let (slots, refusal) = (kept.slots, Some(&kept.refusal));
                let least = self.store.least_use(ctx.spec);
                queue.answered(slots, refusal, least, now, &mut ctx.work.wakers);
            }
            // A round may take longer than a call that is not lost. Then the waiters were asked for again.
            (Some(kept), Some(queue)) => {
                kept.slots.iter().for_each(|slot| queue.returns.add(slot));
            }
            (Some(kept), None) => {
                let unused: Vec<_> = kept.slots.iter().map(Reservation::unused).collect();
                self.give_back_now(ctx, &unused);
            }
        }
        self.go_on_with_loans(ctx);
        self.want_statements_before(ctx, next);
    }

    /// Goes on with slots that were not booked by a call for the waiters. During a hold they are of no use.
    fn go_on_with_loans(&mut self, ctx: &mut KeyContext<'_>) {
        if let Some(queue) = &mut self.queue
            && self.hold.left(ctx.now).is_some()
        {
            queue.give_up_slots();
        }
        self.step(ctx, None);
    }
}
