//! The future of a request that waits for its permit.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use super::admission::{self, Admission, WaitFor};
use super::engine::Core;
use super::entry::Entry;
use super::holds::{self, HoldWait};
use super::in_flight_slot::{self, InFlightSlot};
use super::key_state::Ticket;
use super::limited::RefusedRequest;
use super::queue::{Number, next_number};
use super::quotas::QuotaId;
use super::reservation::{Settled, WaitBound};
use super::sent::PastWait;
use super::stage::Stage;
use super::taken::Taken;
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

    /// Waits again, in its old place in the queue, because what it had expired before it could leave.
    pub(crate) fn wait_again(&mut self, taken: Taken) {
        let (slot, in_flight_slot) = taken.put_back();
        self.in_flight_slot = in_flight_slot;
        let Some(slot) = slot else { return };
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
    fn proceed(&mut self, admission: Admission, now: Instant) -> Poll<Result<Taken, Limited>> {
        let result = match admission {
            Admission::Waits {
                wait,
                in_flight_slot,
            } => {
                self.wait(wait, in_flight_slot, now);
                return Poll::Pending;
            }
            Admission::Granted(mut taken, uncounted) => {
                if let Err(left) = taken.pass_host(now) {
                    // Its host is on hold by now, or another request is its probe.
                    drop(taken);
                    self.ticket.turns += 1;
                    self.wait(WaitFor::HostHold(clock::after(now, left)), None, now);
                    return Poll::Pending;
                }
                Ok(self.leaves(taken, uncounted.as_ref(), now))
            }
            Admission::Refused(reason, refusal) => {
                Err(self.refused_request().refuse(reason, refusal, now))
            }
            Admission::Failed(source) => Err(self.refused_request().fail(source, now)),
        };
        self.stage = Stage::Done;
        Poll::Ready(result)
    }

    /// Ends the wait: the request leaves. `uncounted` states why it leaves without a slot, if a store failed.
    fn leaves(&self, mut taken: Taken, uncounted: Option<&StoreError>, now: Instant) -> Taken {
        let (turns, label) = (self.ticket.turns, self.label.clone());
        if let Some(cause) = uncounted {
            events::passed(&self.core.settings.tally, &label, cause);
        }
        let waited = now.saturating_duration_since(self.since);
        events::waited(&label, waited, turns);
        taken.count_units();
        let is_at_once = turns == 1 && !self.waited_before && taken.is_at_once();
        taken.after(PastWait {
            label,
            waited,
            turns,
            is_uncounted: uncounted.is_some(),
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
    ) -> Poll<Option<Result<Taken, Limited>>> {
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
    fn poll_stage(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
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
    ) -> Poll<Result<Taken, Limited>> {
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

    fn poll_slot(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
        let ticket = &mut self.ticket;
        let polled = self
            .core
            .with_state(self.key, now, |state, ctx| ticket.poll(state, ctx, cx));
        let settled = ready!(polled.unwrap_or(Poll::Ready(Settled::Refused(Refusal::NEVER))));
        self.stage = Stage::Done;
        let in_flight_slot = self.in_flight_slot.take();
        let admission = admission::slot_settled(
            &self.core,
            &self.entry(),
            self.ticket.bound,
            settled,
            in_flight_slot,
            now,
        );
        self.proceed(admission.unless_lost(now), now)
    }

    fn poll_hold(&mut self, now: Instant, cx: &mut Context<'_>) -> Poll<Result<Taken, Limited>> {
        let Stage::Hold(wait) = &mut self.stage else {
            return Poll::Pending;
        };
        let Ticket { number, bound, .. } = self.ticket;
        let left = match holds::poll_pass(&self.core, self.key, number, now, cx) {
            Ok(probe) => {
                let in_flight_slot = self.in_flight_slot.take();
                let taken =
                    admission::taken(&self.core, &self.entry(), None, in_flight_slot, probe);
                return self.proceed(Admission::Granted(taken, None).unless_lost(now), now);
            }
            Err(left) => left,
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

impl Future for Waiter {
    type Output = Result<Taken, Limited>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let now = clock::now();
            if let Some(result) = ready!(self.poll_host_hold(now, cx)) {
                return Poll::Ready(result);
            }
            if let Poll::Ready(result) = self.poll_stage(now, cx) {
                return Poll::Ready(result);
            }
            // Its host may have been put on hold just now.
            if !matches!(self.stage, Stage::HostHold(_)) {
                return Poll::Pending;
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
