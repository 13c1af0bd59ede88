//! The waiters of one key: a paced queue in real time, with wakers and timers.
//!
//! The [`PacedQueue`] decides which request leaves when, and the [`WaitQueue`] keeps the requests
//! whose futures wait. Only the timer of the first waiter follows the next slot of the paced queue.
//! The timer of every other waiter fires when that waiter must give up. So a slot wakes one task,
//! not all of them.
//!
//! Every change of the paced queue ends in [`Waiters::grant_due`], which grants what is due and
//! sets the timer of the first waiter.

use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::kinds::Kinds;
use super::paced_queue::{Flight, PacedQueue};
use super::sync::SyncSupervisor;
use crate::clock::{self, SleepMark};
use crate::error::{Reason, StoreError};
use crate::key::Key;
use crate::key_map::Evict;
use crate::limiter::Held;
use crate::signal::Signal;
use crate::stats::{Cause, KeyCounts};
use crate::store::{Refusal, Register};
use crate::wait_queue::{Left, Number, WaitBound, WaitQueue};
use crate::wakers::Wakers;

/// How long the pace of an idle key is worth keeping.
const WORTHLESS_AFTER: Duration = Duration::from_secs(3600);

#[derive(Debug)]
pub(super) struct Waiters {
    pub(super) queue: PacedQueue,
    /// What the requests of the key have done.
    pub(super) counts: KeyCounts,
    /// The requests whose futures wait. A wait ends with a request in flight.
    waits: WaitQueue<TurnWait, Flight>,
    /// Why the key is on hold, if this process knows.
    hold_origin: Option<PaceHoldOrigin>,
    /// Present for some time after a refusal.
    kinds: Option<Box<Kinds>>,
    /// Begins with a hold. `None` if neither the key nor a kind is on hold.
    sleep: Option<SleepMark>,
    /// When a request arrived or was answered last, or the key was held or released.
    last_used: Instant,
    pub(super) sync: SyncSupervisor,
}

/// Why a key is on hold.
#[derive(Clone, Copy, Debug)]
struct PaceHoldOrigin {
    cause: Cause,
    since: Instant,
    /// The end of the hold that this is about.
    until: Instant,
}

/// What is known of a request that waits for its turn.
#[derive(Debug)]
struct TurnWait {
    /// Until when the request can wait for its turn.
    latest: Instant,
    /// While the request waits for an answer of the store, it waits at least until this moment.
    answer_by: Instant,
}

impl TurnWait {
    /// Returns until when the request waits. A request that cannot wait for its turn still waits for an answer of the store,
    /// if a call is under way.
    fn waits_until(&self, awaits_register: bool) -> Instant {
        match awaits_register {
            true => self.latest.max(self.answer_by),
            false => self.latest,
        }
    }
}

/// Why a request cannot wait for its turn, and when it could have left if that is known.
#[derive(Debug)]
pub(super) struct TurnTooLate {
    /// Why, if not because its wait ends before its turn.
    pub(super) reason: Option<Reason>,
    pub(super) retry_at: Option<Instant>,
}

impl TurnTooLate {
    /// Returns the reason and the refusal of a request with this `bound`.
    pub(super) fn refused(self, bound: WaitBound, now: Instant) -> (Reason, Refusal) {
        let wait = self.retry_at.map(|at| at.saturating_duration_since(now));
        let reason = self.reason.unwrap_or_else(|| bound.reason());
        (reason, Refusal::new(wait, None))
    }
}

/// The answer to a request in flight.
#[derive(Clone, Copy)]
pub(super) struct TurnAnswer<'a> {
    pub(super) signal: &'a Signal,
    /// The kind of the request, if it is known.
    pub(super) kind: Option<Key>,
    /// The longest hold of a kind.
    pub(super) max_hold: Duration,
    /// How long the request can wait to be sent again, if it was refused and may be.
    pub(super) back_within: Option<WaitBound>,
    /// Whether it was refused before: then it gives up its place, for others may be accepted.
    pub(super) was_refused: bool,
}

/// How a request in flight has ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The number under which it waits to be sent again, if it was refused.
    pub(super) back: Option<Number>,
    /// For how long the answer holds the key, or requests of this kind, and why. `None` if no hold has begun, or become longer.
    pub(super) held: Option<(Duration, Cause)>,
}

/// What the queue decides on a request that arrives.
pub(super) enum Arrival {
    Leaves(Flight),
    Waits(Number),
    TooLate(TurnTooLate),
    /// Too many requests wait.
    Full,
}

/// How much later than the first waiter the second one looks whether a turn is due. The task of the first may
/// be one that is not polled.
const FALLBACK: Duration = Duration::from_millis(20);

/// How many waiters have timers that follow the slot.
const FRONT: usize = 2;

/// Returns when the waiter at `place` looks whether a turn is due, if the first one does so at `first`. In a queue that
/// moves at its pace, a turn each `interval`, those behind the front have left by then.
fn looks_at(place: u64, first: Instant, interval: Duration) -> Instant {
    let behind_front = place.saturating_sub(1);
    let later = FALLBACK.saturating_mul(u32::try_from(place).unwrap_or(u32::MAX));
    let turns = interval.saturating_mul(u32::try_from(behind_front).unwrap_or(u32::MAX));
    clock::after(first, later.saturating_add(turns))
}

impl Waiters {
    pub(super) fn new(queue: PacedQueue, now: Instant) -> Self {
        Waiters {
            queue,
            counts: KeyCounts::default(),
            waits: WaitQueue::default(),
            hold_origin: None,
            kinds: None,
            sleep: None,
            last_used: now,
            sync: SyncSupervisor::default(),
        }
    }

    /// Admits or queues a request that arrives now and can wait within `bound`, unless `max_queue`
    /// others wait. Its `kind` is known if a refusal has begun a suspicion.
    pub(super) fn arrived(
        &mut self,
        kind: Option<Key>,
        bound: WaitBound,
        max_queue: usize,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Arrival {
        self.last_used = now;
        if let Some(late) = self.held_beyond(bound.latest, now) {
            return Arrival::TooLate(late);
        }
        if let (Some(kinds), Some(kind)) = (&mut self.kinds, kind)
            && let Err(until) = kinds.pass(kind, now)
        {
            return Arrival::TooLate(TurnTooLate {
                reason: Some(Reason::HeldKind),
                retry_at: Some(until),
            });
        }
        let number = self.queue.arrived(now);
        if self.waits.is_empty()
            && let Some(flight) = self.queue.depart(now)
        {
            // No other request waits, so the flight is this request's.
            return Arrival::Leaves(flight);
        }
        self.wait(number, bound, now);
        self.grant_due(now, wakers);
        if let Some(flight) = self.waits.collect(number) {
            return Arrival::Leaves(flight);
        }
        if let Some(late) = self.too_late(number, now) {
            self.leave(number, now, wakers);
            return Arrival::TooLate(late);
        }
        if self.queue.waiting() > max_queue {
            self.leave(number, now, wakers);
            return Arrival::Full;
        }
        Arrival::Waits(number)
    }

    fn wait(&mut self, number: Number, bound: WaitBound, now: Instant) {
        let (latest, answer_by) = (bound.latest, bound.answered_by(now));
        self.waits
            .enter(number, TurnWait { latest, answer_by }, latest);
    }

    /// Polls the wait of request `number`.
    pub(super) fn poll(
        &mut self,
        number: Number,
        now: Instant,
        cx: &mut Context<'_>,
        wakers: &mut Wakers,
    ) -> Poll<Result<Flight, TurnTooLate>> {
        self.waits.runs(number);
        let latest = self.waits_until(number, now);
        if latest >= now {
            self.grant_due(now, wakers);
            if let Some(flight) = self.waits.collect(number) {
                return Poll::Ready(Ok(flight));
            }
        }
        if let Some(late) = self.too_late(number, now) {
            self.leave(number, now, wakers);
            return Poll::Ready(Err(late));
        }
        let place = match self.waits.get(number) {
            // No task of those before it has come for some time: it is the one that looks from now on.
            Some(waiter) if waiter.wakes_at() <= now => self.place(number).min(1),
            _ => self.place(number),
        };
        let look_at = self.look_at(now);
        let look_at = look_at.map(|first| looks_at(place, first, self.queue.interval()));
        if let Some(waiter) = self.waits.get_mut(number) {
            waiter.wake_at(look_at.map_or(latest, |at| at.min(latest)));
            waiter.register(cx);
        }
        Poll::Pending
    }

    /// Returns the place of request `number` in the line. Behind the front it may be too far back: others may have left.
    fn place(&self, number: Number) -> u64 {
        let place = self
            .waits
            .numbers(..)
            .take(FRONT)
            .position(|of| of == number);
        place.map_or_else(
            || number - self.waits.numbers(..).next().unwrap_or(number),
            |place| place as u64,
        )
    }

    /// Ends the wait of request `number`. If its turn had come, the next request has it.
    pub(super) fn leave(&mut self, number: Number, now: Instant, wakers: &mut Wakers) {
        match self.waits.leave(number) {
            Some(Left::Settled(flight)) => self.queue.unsent(flight, now),
            Some(Left::Waiting(_)) | None => _ = self.queue.leave(number),
        }
        self.grant_due(now, wakers);
    }

    /// Ends a request in flight with its answer.
    pub(super) fn answered(
        &mut self,
        flight: Flight,
        answer: &TurnAnswer<'_>,
        now: Instant,
        wakers: &mut Wakers,
    ) -> Ended {
        self.last_used = now;
        if let Some(left) = self.is_about_kind(flight.sent(), answer, now) {
            self.lost(flight, now, wakers);
            let held = (!left.is_zero()).then_some((left, Cause::Kind));
            return Ended { back: None, held };
        }
        let mut number = flight.number;
        let held_before = self.queue.held_until();
        let refused = self.queue.answered(flight, answer.signal, now);
        let held_until = self.queue.held_until();
        let mut back = None;
        if let (Some(refused), Some(bound)) = (refused, answer.back_within)
            && bound.latest > now
            && self.held_beyond(bound.latest, now).is_none()
        {
            match answer.was_refused {
                true => number = self.queue.back_behind(refused, now),
                false => self.queue.back(refused, now),
            }
            self.wait(number, bound, now);
            back = Some(number);
        }
        if let (Some(kinds), Some(until)) = (&mut self.kinds, held_until) {
            kinds.lasts_beyond(until);
        }
        let longer = held_until.filter(|until| Some(*until) > held_before);
        let held = longer.and_then(|until| {
            let cause = match answer.signal.refusal() {
                Some(_) => Cause::Upstream,
                None => Cause::UsedUp,
            };
            self.note_cause(until, cause, now);
            Some((until.checked_duration_since(now)?, cause))
        });
        self.wake_held(held_before, wakers);
        self.grant_due(now, wakers);
        Ended { back, held }
    }

    /// Takes in the answer to a request that was sent at `sent`. Returns for how long its kind is on hold, if the answer
    /// is a refusal that is about this kind alone.
    fn is_about_kind(
        &mut self,
        sent: Instant,
        answer: &TurnAnswer<'_>,
        now: Instant,
    ) -> Option<Duration> {
        if !self.queue.is_careful() {
            // There is no pace to protect, and no request is kept back.
            return None;
        }
        let TurnAnswer { signal, kind, .. } = *answer;
        self.kinds.take_if(|kinds| kinds.is_over(now));
        if signal.refusal().is_none() {
            if let (Some(kinds), Some(kind)) = (&mut self.kinds, kind) {
                kinds.accepted(kind, sent);
            }
            return None;
        }
        let is_held = self.queue.held_until().is_some_and(|until| until > now);
        let stated = signal.retry_after();
        let kinds = match &mut self.kinds {
            Some(kinds) => kinds,
            none => none.insert(Box::new(Kinds::new(self.queue.save_pace(now), now))),
        };
        let left = kinds.refused(kind, is_held, stated, answer.max_hold, now)?;
        // During a hold of another cause, such as that of an operator, the pace stays as it is.
        if !is_held && let Some(before) = kinds.take_pace_before(now) {
            self.queue.restore_pace(&before, now);
        }
        Some(left)
    }

    /// Ends a request in flight without an answer.
    pub(super) fn lost(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.lost(flight, now);
        self.grant_due(now, wakers);
    }

    /// Ends a request that was not sent although its turn had come.
    pub(super) fn unsent(&mut self, flight: Flight, now: Instant, wakers: &mut Wakers) {
        self.queue.unsent(flight, now);
        self.grant_due(now, wakers);
    }

    /// Lets a request whose turn had come, but which was not sent, wait in its old place within `bound`.
    pub(super) fn wait_again(
        &mut self,
        flight: Flight,
        bound: WaitBound,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        let number = flight.number;
        self.queue.wait_again(flight, now);
        self.wait(number, bound, now);
        self.grant_due(now, wakers);
    }

    /// Holds the key until `until`.
    pub(super) fn hold_until(
        &mut self,
        until: Instant,
        cause: Cause,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        self.last_used = now;
        self.queue.hold_until(until, now);
        self.note_cause(until, cause, now);
        self.wake_held(None, wakers);
        self.grant_due(now, wakers);
    }

    /// Notes why the key is on hold until `until`, unless another hold lasts longer.
    fn note_cause(&mut self, until: Instant, cause: Cause, now: Instant) {
        if self.queue.held_until() == Some(until) {
            let since = now;
            self.hold_origin = Some(PaceHoldOrigin {
                cause,
                since,
                until,
            });
        }
    }

    /// Returns the hold of the key, if it is on hold.
    pub(super) fn held(&self, now: Instant) -> Option<Held> {
        let until = self.queue.held_until().filter(|until| *until > now)?;
        let origin = self.hold_origin;
        let origin = origin.filter(|origin| origin.until == until);
        Some(Held {
            left: until - now,
            cause: origin.map(|origin| origin.cause),
            age: origin.map(|origin| now.saturating_duration_since(origin.since)),
        })
    }

    pub(super) fn release(&mut self, now: Instant, wakers: &mut Wakers) {
        self.last_used = now;
        self.queue.release(now);
        self.kinds = None;
        self.grant_due(now, wakers);
    }

    /// Takes in for how long the machine has slept during a hold of the key or of a kind: it ends earlier by that. Called at
    /// both ends of each change.
    pub(super) fn wake(&mut self, wakers: &mut Wakers) {
        let kind_held_until = self.kinds.as_ref().and_then(|kinds| kinds.held_until());
        let held_until = self.queue.held_until().max(kind_held_until);
        if held_until.is_none_or(|until| until <= clock::now()) {
            self.sleep = None;
            return;
        }
        let slept = self.sleep.get_or_insert_with(SleepMark::new).look();
        if !slept.is_zero() {
            self.queue.hold_is_shorter(slept);
            if let Some(kinds) = &mut self.kinds {
                kinds.holds_are_shorter(slept);
            }
            if let Some(origin) = &mut self.hold_origin {
                origin.until = clock::before(origin.until, slept);
            }
            self.grant_due(clock::now(), wakers);
        }
    }

    /// Grants every turn that is due, and sets the timers of the waiters in the front.
    fn grant_due(&mut self, now: Instant, wakers: &mut Wakers) {
        while let Some(flight) = self.queue.depart(now) {
            if let Err(flight) = self.waits.settle(flight.number, flight, wakers) {
                self.queue.unsent(flight, now);
            }
        }
        let Some(look_at) = self.look_at(now) else {
            return;
        };
        let (interval, awaits_register) = (self.queue.interval(), self.queue.awaits_register());
        for (place, (_, waiter)) in (0..).zip(self.waits.iter_mut(..).take(FRONT)) {
            let at = looks_at(place, look_at, interval);
            waiter.wake_at(at.min(waiter.request.waits_until(awaits_register)));
        }
    }

    /// Returns when to poll the first waiter again if nothing else happens.
    fn look_at(&self, now: Instant) -> Option<Instant> {
        let held_until = self.queue.held_until();
        let held = held_until.and_then(|until| until.checked_duration_since(now));
        // The machine may sleep meanwhile. If processes share the pace, this is the only moment that is known here.
        let wakes_at = held
            .filter(|_| self.queue.waiting() > 0)
            .map(|left| clock::after(now, clock::look_again(left)));
        let moments = [
            self.queue.look_at(),
            wakes_at,
            self.sync.late_at(&self.queue),
        ];
        moments.into_iter().flatten().min()
    }

    /// Returns until when request `number` waits.
    fn waits_until(&self, number: Number, now: Instant) -> Instant {
        let Some(waiter) = self.waits.get(number) else {
            return now;
        };
        waiter.request.waits_until(self.queue.awaits_register())
    }

    /// Returns the refusal of request `number`, if its wait is over, or if the key is on hold for longer.
    fn too_late(&self, number: Number, now: Instant) -> Option<TurnTooLate> {
        let latest = self.waits_until(number, now);
        let held = self.held_beyond(latest, now);
        if held.is_some() || latest > now {
            return held;
        }
        Some(TurnTooLate {
            reason: None,
            retry_at: self.queue.slot(),
        })
    }

    /// Returns the refusal of a request that can wait until `latest`, if the key is on hold for
    /// longer.
    fn held_beyond(&self, latest: Instant, now: Instant) -> Option<TurnTooLate> {
        let until = self
            .queue
            .held_until()
            .filter(|until| *until > now && *until > latest)?;
        Some(TurnTooLate {
            reason: Some(Reason::Held),
            retry_at: Some(until),
        })
    }

    /// If the hold ends later than `held_before`, wakes the waiters that cannot wait for its end.
    fn wake_held(&mut self, held_before: Option<Instant>, wakers: &mut Wakers) {
        let held_until = self.queue.held_until();
        if let Some(until) = held_until.filter(|until| Some(*until) > held_before) {
            self.waits.wake_where(|wait| wait.latest < until, wakers);
        }
    }
}

/// What a pace that processes share adds.
impl Waiters {
    /// Calls the sync task if a compare-and-set is due. Returns the number of a task to start if
    /// none serves the key, or if the one that does is late.
    pub(super) fn needs_sync_task(&mut self, now: Instant, wakers: &mut Wakers) -> Option<u64> {
        if self.sync.give_up_late_task(&mut self.queue, now, wakers) {
            self.grant_due(now, wakers);
        }
        self.sync.call_task(&self.queue, now, wakers)
    }

    /// Takes the store's answer to the compare-and-set of sync task `number`.
    pub(super) fn cas_answered(
        &mut self,
        number: u64,
        answer: Result<Register, StoreError>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        if self.sync.is_served_by(number) {
            let held_before = self.queue.held_until();
            self.sync.cas_answered(&mut self.queue, answer, now, wakers);
            self.peers_changed(held_before, now, wakers);
        }
    }

    /// Notes that sync task `number` was dropped with its runtime. Wakes the waiters, whose tasks
    /// start another sync task.
    pub(super) fn sync_task_lost(&mut self, number: u64, now: Instant, wakers: &mut Wakers) {
        if self.sync.task_lost(number, &mut self.queue, now, wakers) {
            self.waits.wake_where(|_| true, wakers);
        }
    }

    /// Takes the register that another process has written.
    pub(super) fn register_changed(
        &mut self,
        register: Register,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        let held_before = self.queue.held_until();
        self.queue.register_changed(register, now);
        self.peers_changed(held_before, now, wakers);
    }

    fn peers_changed(&mut self, held_before: Option<Instant>, now: Instant, wakers: &mut Wakers) {
        self.wake_held(held_before, wakers);
        self.grant_due(now, wakers);
        // The requests that waited only for the store's answer have it now.
        self.waits.wake_where(|wait| wait.latest <= now, wakers);
    }
}

impl Evict for Waiters {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        // Other processes hear of a release once the store is back. Its key has to be kept until then.
        let is_idle = self.waits.is_empty()
            && self.queue.in_flight() == 0
            && !self.queue.has_unwritten_release();
        is_idle.then(|| {
            self.queue
                .held_until()
                .map_or(self.last_used, |until| until.max(self.last_used))
        })
    }

    fn worthless_from(&self) -> Option<Instant> {
        Some(clock::after(self.idle_from()?, WORTHLESS_AFTER))
    }
}
