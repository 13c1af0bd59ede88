//! The future of a request that waits for its permit.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::admission::{self, Admission, WaitFor};
use super::counting;
use super::engine::Core;
use super::entry::Entry;
use super::holds::{self, HoldWait};
use super::in_flight_slot::{self, InFlightSlot};
use super::key_state::Ticket;
use super::limited::RefusedRequest;
use super::permit::Permit;
use super::queue::{Number, next_number};
use super::quotas::QuotaId;
use super::reservation::{Reservation, Settled, WaitBound};
use super::sent::PastWait;
use super::stage::Stage;
use crate::clock;
use crate::error::{Limited, StoreError};
use crate::events;
use crate::key::{Key, Label};
use crate::stats::OpenRequest;
use crate::store::Refusal;

/// A request that waits. Dropping it frees its place in the queue.
#[derive(Debug)]
pub(crate) struct Waiter {
    core: Arc<Core>,
    key: Key,
    /// The key of its host, if the host matters: see [`Entry::host`].
    host: Option<Key>,
    ticket: Ticket,
    stage: Stage,
    /// Its in-flight slot, once it has one.
    in_flight_slot: Option<InFlightSlot>,
    /// When the wait began.
    since: Instant,
    /// Whether it has waited for something else than a slot.
    waited_before: bool,
    /// The name of its key in errors and events.
    label: Label,
}

impl Waiter {
    /// Makes a waiter that does not wait yet. `since` is when its request entered.
    pub(super) fn new(
        core: &Arc<Core>,
        &Entry {
            key, cost, host, ..
        }: &Entry,
        bound: WaitBound,
        since: Instant,
        label: Label,
    ) -> Self {
        // In all stages, the waiter watches the hold of its host under this number.
        let number = if core.hosts.hold_of(key, host).is_some() {
            next_number()
        } else {
            0
        };
        Waiter {
            core: core.clone(),
            key,
            host,
            ticket: Ticket::new(number, cost, bound),
            stage: Stage::Done,
            in_flight_slot: None,
            since,
            waited_before: false,
            label,
        }
    }

    /// Begins a wait.
    pub(super) fn waits(
        mut self,
        wait: WaitFor,
        in_flight_slot: Option<InFlightSlot>,
        now: Instant,
    ) -> Box<Self> {
        self.wait(wait, in_flight_slot, now);
        Box::new(self)
    }

    fn wait(&mut self, wait: WaitFor, in_flight_slot: Option<InFlightSlot>, now: Instant) {
        self.in_flight_slot = in_flight_slot;
        self.waited_before |= !matches!(wait, WaitFor::Slot(_));
        self.stage = Stage::begin(wait, &mut self.ticket, now);
    }

    /// Waits again, in its old place in the queue, because `permit` expired before it could be
    /// used.
    pub(crate) fn wait_again(&mut self, permit: Permit) {
        let (slot, in_flight_slot) = permit.into_parts();
        self.in_flight_slot = in_flight_slot;
        let Some(slot) = slot else { return };
        counting::give_back_units(&self.core, Some(&slot));
        holds::host_probe_not_sent(&self.core, self.key, self.host);
        self.stage = Stage::Slot;
        let ticket = &mut self.ticket;
        let opened = self
            .core
            .with_new_state(self.key, clock::now(), |state, ctx| {
                ticket.return_late(state, ctx, slot)
            });
        // If there is no room for the state of the key, this waiter has no place in the queue. Then
        // the next poll ends its wait.
        if opened.is_err() {
            self.core.give_back(self.key, slot);
        }
    }

    /// Goes on to the next stage, or ends the wait. Returns `Pending` if there is a next stage,
    /// which the caller then polls.
    fn proceed(&mut self, admission: Admission, now: Instant) -> Poll<Result<Permit, Limited>> {
        let result = match admission {
            Admission::Waits {
                wait,
                in_flight_slot,
            } => {
                self.wait(wait, in_flight_slot, now);
                return Poll::Pending;
            }
            Admission::Granted {
                slot,
                in_flight_slot,
            } => Ok(self.permit(slot, in_flight_slot, false, now)),
            Admission::Uncounted {
                cause,
                in_flight_slot,
            } => {
                events::passed(&self.core.settings.tally, &self.label, &cause);
                Ok(self.permit(None, in_flight_slot, true, now))
            }
            Admission::Refused(reason, refusal) => {
                Err(self.refused_request().refuse(reason, refusal, now))
            }
            Admission::Failed(source) => Err(self.refused_request().fail(source, now)),
        };
        self.stage = Stage::Done;
        Poll::Ready(result)
    }

    fn permit(
        &self,
        slot: Option<Reservation>,
        in_flight_slot: Option<InFlightSlot>,
        is_uncounted: bool,
        now: Instant,
    ) -> Permit {
        let (turns, label) = (self.ticket.turns, self.label.clone());
        let waited = now.saturating_duration_since(self.since);
        events::waited(&label, waited, turns);
        counting::add_units(&self.core, self.key, slot.as_ref());
        let is_at_once =
            turns == 1 && !self.waited_before && slot.as_ref().is_some_and(|slot| slot.is_at_once);
        let permit = Permit::new(self.core.clone(), self.key, slot, in_flight_slot);
        permit.after(PastWait {
            label,
            waited,
            turns,
            host: self.host,
            is_uncounted,
            is_at_once,
        })
    }

    /// Returns the request for its error.
    pub(super) fn refused_request(&self) -> RefusedRequest {
        RefusedRequest {
            label: self.label.clone(),
            limit: self.core.limit_name(self.key),
            since: self.since,
            turns: self.ticket.turns,
        }
    }

    /// Makes the request that waits, to be counted.
    pub(super) fn open_request(&self) -> OpenRequest<Core> {
        OpenRequest::new(self.core.clone(), self.key, self.since)
    }

    fn entry(&self) -> Entry {
        Entry {
            key: self.key,
            cost: self.ticket.cost,
            deadline: None,
            host: self.host,
            // The key has had its quota since the request entered.
            quota: QuotaId::NONE,
        }
    }

    /// Returns its number in the queue. A waiter that watched its host's hold has one already, and
    /// with it a place in front of all later requests.
    fn number(&self) -> Option<Number> {
        (self.ticket.number > 0).then_some(self.ticket.number)
    }

    /// Polls the hold of its host. Ready with `None` if the waiter may go on, and with `Some` if
    /// its wait has ended.
    fn poll_host_hold(
        &mut self,
        now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Permit, Limited>>> {
        let Some(hold) = self.core.hosts.hold_of(self.key, self.host) else {
            return Poll::Ready(None);
        };
        let Ticket { number, bound, .. } = self.ticket;
        if let Some(left) = holds::watch_host(&self.core, hold, number, now, cx) {
            // Requests to other hosts can use what the waiter has: it gives that up.
            self.leave_stage();
            let end = clock::after(now, left);
            if end > bound.latest {
                return self.proceed(Admission::held(left), now).map(Some);
            }
            if !matches!(self.stage, Stage::HostHold(_)) {
                self.waited_before = true;
                self.stage = Stage::HostHold(HoldWait::new(end));
            }
            if let Stage::HostHold(wait) = &mut self.stage {
                wait.wake_at(end, cx);
            }
            return Poll::Pending;
        }
        if matches!(self.stage, Stage::HostHold(_)) {
            self.stage = Stage::Done;
            let admission =
                admission::enter_past_host(&self.core, &self.entry(), self.number(), bound, now);
            return match self.proceed(admission, now) {
                Poll::Ready(result) => Poll::Ready(Some(result)),
                Poll::Pending => Poll::Ready(None),
            };
        }
        Poll::Ready(None)
    }

    /// Polls what the waiter waits for, other than the hold of its host.
    fn poll_stage(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Permit, Limited>> {
        if matches!(self.stage, Stage::InFlightSlot { .. })
            && let Poll::Ready(result) = self.poll_in_flight_slot(now, cx)
        {
            return Poll::Ready(result);
        }
        match self.stage {
            Stage::Slot => self.poll_slot(now, cx),
            Stage::Hold(_) => self.poll_hold(now, cx),
            Stage::HostHold(_) | Stage::InFlightSlot { .. } | Stage::Done => Poll::Pending,
        }
    }

    fn poll_in_flight_slot(
        &mut self,
        now: Instant,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Permit, Limited>> {
        let Stage::InFlightSlot { number, until } = self.stage else {
            return Poll::Pending;
        };
        let settled = ready!(in_flight_slot::poll(
            &self.core, self.key, number, until, now, cx
        ));
        self.stage = Stage::Done;
        let bound = &mut self.ticket.bound;
        if bound.is_none {
            // `max_wait` is zero, so the request waited only for the store's answer. That time does
            // not count: the request can still ask for a slot that is due now.
            bound.latest = bound.latest.max(now);
        }
        let bound = *bound;
        let admission =
            match admission::in_flight_slot_settled(&self.core, self.key, bound, settled) {
                Ok(in_flight_slot) => admission::enter_with_in_flight_slot(
                    &self.core,
                    &self.entry(),
                    in_flight_slot,
                    self.number(),
                    bound,
                    now,
                ),
                Err(stopped) => stopped,
            };
        self.proceed(admission, now)
    }

    fn poll_slot(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Permit, Limited>> {
        let ticket = &mut self.ticket;
        let polled = self
            .core
            .with_state(self.key, now, |state, ctx| ticket.poll(state, ctx, cx));
        let settled = ready!(polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER))));
        self.stage = Stage::Done;
        let in_flight_slot = self.in_flight_slot.take();
        if let Settled::Granted(slot) = settled
            && is_lost(in_flight_slot.as_ref(), now)
        {
            self.core.give_back(self.key, slot);
            return self.proceed(Admission::Failed(StoreError::InFlightSlotLost), now);
        }
        let admission = admission::slot_settled(
            &self.core,
            &self.entry(),
            self.ticket.bound,
            settled,
            in_flight_slot,
            now,
        );
        self.proceed(admission, now)
    }

    fn poll_hold(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Permit, Limited>> {
        let Stage::Hold(wait) = &mut self.stage else {
            return Poll::Pending;
        };
        let Ticket { number, bound, .. } = self.ticket;
        let Err(left) = holds::poll_pass(&self.core, self.key, number, now, cx) else {
            let in_flight_slot = self.in_flight_slot.take();
            if is_lost(in_flight_slot.as_ref(), now) {
                holds::probe_not_sent(&self.core, self.key);
                return self.proceed(Admission::Failed(StoreError::InFlightSlotLost), now);
            }
            return self.proceed(
                Admission::Granted {
                    slot: None,
                    in_flight_slot,
                },
                now,
            );
        };
        let end = clock::after(now, left);
        if end > bound.latest {
            holds::leave(&self.core, self.key, number);
            let refusal = Refusal {
                wait: Some(left),
                limit: None,
            };
            let in_flight_slot = self.in_flight_slot.take();
            let admission = admission::slot_settled(
                &self.core,
                &self.entry(),
                bound,
                Settled::Refused(refusal),
                in_flight_slot,
                now,
            );
            return self.proceed(admission, now);
        }
        wait.wake_at(end, cx);
        Poll::Pending
    }

    /// Returns `permit`, unless its host is on hold by now. Then the waiter gives up what it has
    /// and waits again.
    fn past_host(&mut self, permit: Permit, now: Instant) -> Option<Permit> {
        let hold = self.core.hosts.hold_of(self.key, self.host);
        let Some(left) = hold.and_then(|hold| holds::pass(&self.core, hold, now).err()) else {
            return Some(permit);
        };
        let (slot, _) = permit.into_parts();
        counting::give_back_units(&self.core, slot.as_ref());
        holds::not_sent(&self.core, self.key, slot);
        self.ticket.turns += 1;
        self.wait(WaitFor::HostHold(clock::after(now, left)), None, now);
        None
    }

    /// Gives up what the waiter waits for, and its in-flight slot. A wait for its host's hold goes
    /// on.
    fn leave_stage(&mut self) {
        self.in_flight_slot = None;
        if !matches!(self.stage, Stage::HostHold(_)) {
            self.stage.leave(&self.core, self.key, &self.ticket);
            self.stage = Stage::Done;
        }
    }
}

/// Returns whether the claim of this process expired while the request with this in-flight slot waited.
fn is_lost(in_flight_slot: Option<&InFlightSlot>, now: Instant) -> bool {
    in_flight_slot.is_some_and(|slot| slot.is_lost(now))
}

impl Future for Waiter {
    type Output = Result<Permit, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let now = clock::now();
            let result = match ready!(self.poll_host_hold(now, cx)) {
                Some(result) => result,
                None => ready!(self.poll_stage(now, cx)),
            };
            let permit = match result {
                Ok(permit) => permit,
                Err(limited) => return Poll::Ready(Err(limited)),
            };
            if let Some(permit) = self.past_host(permit, now) {
                return Poll::Ready(Ok(permit));
            }
        }
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.leave_stage();
        if let Some(hold) = self.core.hosts.hold_of(self.key, self.host) {
            holds::leave(&self.core, hold, self.ticket.number);
        }
    }
}
