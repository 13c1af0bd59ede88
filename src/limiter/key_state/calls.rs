//! The one way to the store: [`KeyState::call`] sends every call of a key, and [`KeyState::take_in`] takes in
//! every answer.
//!
//! Whatever a call is for, it carries what the store may not know: the hold, what the upstream has stated is
//! left, and units that were used without a permit. Each answer states the same besides the slots: the session, a
//! quota that was set, the hold, permits at hand. The caller takes in the slots:
//!
//! | call | sent by | its slots are for |
//! |---|---|---|
//! | for the waiters of the key | `booking` | all that wait without a slot |
//! | for a request that enters alone | `ticket` | this one |
//! | for one key of a joint request | `joint_ask` | this one, until its other keys agree |
//! | for what other parts lend | `loans` | the waiters of another class |
//! | to confirm, to pass on, to flush | `booking`, `joint_ask`, `mod` | none |

use std::time::Instant;

use super::KeyState;
use super::charges::ChargeNumber;
use super::context::KeyContext;
use crate::error::StoreError;
use crate::limiter::queue::{CallNumber, Returns};
use crate::limiter::session::TimeBounds;
use crate::store::{Demand, JointCall, Lease, LeaseRequest, StoreReply};

/// What a call asks for.
pub(super) struct Ask<'a> {
    pub(super) demands: &'a [Demand],
    /// No slot after this moment is of use.
    latest: Instant,
    /// Permits that go back with the call.
    returns: Returns,
    /// Whether permits are fetched in advance, too.
    prefetches: bool,
    /// Whether the permits at hand go back with the call, because it asks for others.
    takes_at_hand: bool,
    /// Whether the slots are for another class, which borrows them.
    borrows: bool,
    joint: Option<&'a JointCall>,
}

impl<'a> Ask<'a> {
    /// A call that asks for nothing: it states what this process knows, and its answer what the store knows.
    pub(super) fn nothing(returns: Returns, now: Instant) -> Self {
        Ask {
            demands: &[],
            latest: now,
            returns,
            prefetches: false,
            takes_at_hand: false,
            borrows: false,
            joint: None,
        }
    }

    /// A call for slots until `latest`.
    pub(super) fn slots(demands: &'a [Demand], latest: Instant, returns: Returns) -> Self {
        Ask {
            demands,
            latest,
            takes_at_hand: true,
            ..Ask::nothing(returns, latest)
        }
    }

    pub(super) fn prefetching(self, prefetches: bool) -> Self {
        Ask { prefetches, ..self }
    }

    /// The slots are for another class. Permits at hand stay.
    pub(super) fn borrowing(self, borrows: bool) -> Self {
        Ask {
            borrows,
            takes_at_hand: false,
            ..self
        }
    }

    /// A store that decides about several keys in one step puts the call to `joint` instead of sending it.
    pub(super) fn joint(self, joint: &'a JointCall) -> Self {
        Ask {
            joint: Some(joint),
            ..self
        }
    }
}

/// A call that was sent, and has no answer yet.
#[derive(Clone, Copy, Debug)]
pub(in crate::limiter) struct SentCall {
    pub(in crate::limiter) sent: Instant,
    /// The units that it carries.
    pub(super) charge: Option<ChargeNumber>,
    /// The number of a call that the waiters of the key wait for.
    pub(super) number: Option<CallNumber>,
}

/// An answer that was taken in, but for its slots and refusals.
pub(super) struct TakenIn {
    pub(super) lease: Lease,
    /// When the store made the lease.
    pub(super) bounds: TimeBounds,
    /// Whether the store decided before a release that this process knows of. Then the rest of the answer is out of
    /// date, too.
    pub(super) precedes_release: bool,
}

impl KeyState {
    pub(super) fn call(
        &mut self,
        ctx: &mut KeyContext<'_>,
        ask: Ask<'_>,
    ) -> (SentCall, StoreReply<Lease>) {
        let Ask {
            demands,
            latest,
            mut returns,
            prefetches,
            takes_at_hand,
            borrows,
            joint,
        } = ask;
        let prefetch = if prefetches && !ctx.is_draining {
            let life = self.store.prefetch_life(ctx.spec);
            self.prefetched.order(ctx.spec, life, ctx.now)
        } else {
            0
        };
        if takes_at_hand {
            returns.extend(self.prefetched.clear());
        }
        let (charge, charge_number) = self.take_charge(ctx, &mut returns);
        self.store.forget(&returns);
        let reply = ctx.store.lease(LeaseRequest {
            key: ctx.key,
            spec: ctx.spec,
            demands,
            prefetch,
            latest: latest.saturating_duration_since(ctx.now),
            validity: self.store.life(),
            prefetch_validity: self.store.prefetch_life(ctx.spec),
            returns: &returns,
            session: self.store.client_session(ctx.now),
            // While the store is unreachable, the process may have a ledger of its own. That ledger
            // knows of no hold.
            hold: self.hold.for_store(self.store.is_standalone, ctx.now),
            remaining: self.take_remaining(ctx, ctx.max_hold),
            charges: charge.as_slice(),
            borrows,
            joint,
        });
        if matches!(reply, StoreReply::Pending(_)) {
            self.store.answers_later = true;
        }
        let call = SentCall {
            sent: ctx.now,
            charge: charge_number,
            number: None,
        };
        (call, reply)
    }

    /// Notes that the store has answered at once, although it seemed to answer later.
    pub(in crate::limiter) fn note_at_once(&mut self) {
        self.store.answers_later = false;
    }

    /// Takes in the answer to a call, at `now`, except its slots and refusals. The caller takes these in, and then
    /// calls [`after_answer`](Self::after_answer).
    ///
    /// # Errors
    ///
    /// The store failed, or its answer took longer than any permit is valid.
    pub(super) fn take_in(
        &mut self,
        ctx: &mut KeyContext<'_>,
        call: SentCall,
        answer: Result<Lease, StoreError>,
    ) -> Result<TakenIn, StoreError> {
        self.charge_answered(ctx, call, answer.is_ok());
        let lease = answer?;
        if self.store.answers_later
            && let Err(error) = self.store.check_speed(ctx.spec, &lease, call.sent, ctx.now)
        {
            ctx.store.give_back(ctx.key, ctx.spec, &lease.unused());
            return Err(error);
        }
        let bounds = self.remember(ctx, &lease, call.sent);
        let precedes_release =
            !lease.source.is_standalone() && self.hold_answered(ctx, lease.hold, call.sent, bounds);
        Ok(TakenIn {
            lease,
            bounds,
            precedes_release,
        })
    }

    /// Goes on after an answer. It may bring a hold, permits at hand after a hold has begun, or show that the store
    /// has lost its state. All of this matters to the requests that wait for the key.
    pub(super) fn after_answer(&mut self, ctx: &mut KeyContext<'_>) {
        self.obey_hold(ctx.now, &mut ctx.work.wakers);
        // The store has lost its state. This call restores the hold before another process calls the store
        // without knowing of the hold. While it is under way, the step only hands out permits. If another call is
        // under way, its answer comes here, too.
        let queue = self.queue.as_ref();
        let is_calling = queue.is_some_and(|queue| queue.is_calling(ctx.now));
        if !is_calling && self.hold.take_resend() {
            self.confirm(ctx);
        }
    }
}
