//! The waiters of one key, in the order of their arrival. Each has one timer and is woken once.
//!
//! They and the slots booked for them stand in [`Lanes`]: a slot is booked for permits of one cost. One call to the store
//! books for all waiters without a slot.
//!
//! When a slot is booked, the timer of the waiter that has it is set to it, if it stands in the front. If waiters move up
//! later, only the timer of the first waiter is moved, to the first slot. A waiter that wakes hands
//! out the slots that are due, so no waiter depends on a task that is not polled for longer than a permit is valid. A waiter
//! that does not come for its slot is settled with it and gets no other one, until its future is polled.
//!
//! | file | what it has |
//! |---|---|
//! | `mod` | [`Queue`]: the waiters and slots of a key |
//! | `call` | [`Queue`]: the call to the store, and what its answer means for the waiters, those of each cost |
//! | `gathering` | the batching delay of the next call |

mod call;
mod gathering;

use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Context;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::lanes::{Booked, HandOut, HandedOut, Lanes, SlotWait};
use super::prefetched::Prefetched;
use super::reservation::{NoSlot, ProbeNumber, Reservation};
use crate::clock::{self, SHORTEST_TIMER};
use crate::limit::UnusedPermits;
use crate::store::{Demand, Refusal};
use crate::tuning::{ANSWER, MISSED};
use crate::wait_queue::Left;
pub(super) use crate::wait_queue::Number;
use crate::wait_queue::WaitBound;
use crate::wakers::Wakers;

use call::Calling;
pub(super) use call::{Answered, CallNumber};
pub(super) use gathering::{Delay, Gathering};

/// The longest time that a call waits for other requests to join it. A request of another process
/// may overtake these requests by this much.
const LONGEST_GATHERING: Duration = Duration::from_millis(10);

/// How far ahead a slot is at least that is kept for the next waiters.
const SPARED_AHEAD: Duration = Duration::from_secs(1);

/// The most slots that are booked anew behind one that came back. A ledger keeps as many returned slots for those
/// that gave them back, where others have booked behind.
const MOST_BOOKED_ANEW: usize = 32;

/// For how many waiters slots are booked anew at most for each permit that a waiter was too late for.
const MOST_ANEW_FOR_ONE: usize = 64;

/// How long slots are not booked anew for fewer permits, for each waiter.
const ANEW_FOR_EACH: Duration = Duration::from_micros(1);

/// Permits of the own part that go back to the store.
pub(super) type Returns = SmallVec<[UnusedPermits; 4]>;

/// Permits that no waiter can use.
#[derive(Default)]
pub(super) struct GivenUp {
    /// Those of the own part.
    pub(super) own: Returns,
    /// Those that other parts have lent.
    pub(super) lent: Vec<Reservation>,
}

impl GivenUp {
    pub(super) fn add(&mut self, slot: &Reservation) {
        match slot.lender {
            None => self.own.push(slot.unused()),
            Some(_) => self.lent.push(*slot),
        }
    }
}

/// Returns the next number. All keys of the process share one count, because a waiter keeps its
/// number when the state of its key is evicted and made anew.
pub(super) fn next_number() -> Number {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The waiters of a key, and the call to the store for them.
#[derive(Default)]
pub(super) struct Queue {
    /// Waiters and slots by cost.
    lanes: Lanes<Reservation>,
    /// The latest slot that a waiter can use.
    latest: Option<Instant>,
    /// The last waiter that has come.
    last: Option<Number>,
    call: Option<Calling>,
    /// When the oldest call was sent that the store has not answered. A call that was given up
    /// counts as well.
    unanswered: Option<Instant>,
    /// What the call under way asks for.
    asked: SmallVec<[Demand; 2]>,
    /// The batching delay of the next call.
    pub(super) gathering: Gathering,
    /// The slot that the store was last asked to confirm before it was due.
    confirmed: Option<Instant>,
    /// Until when the store is not called: it decides nothing, because it lost its state and does not
    /// know what it had granted, or no slot is near.
    paused_until: Option<Instant>,
    /// Since when the store has granted nothing, if it was asked for slots that are near.
    pub(super) refused_since: Option<Instant>,
    /// Until when slots far ahead are kept for the next waiters, because other parts have lent sooner
    /// ones to those that had them.
    pub(super) spares_until: Option<Instant>,
    /// The first slot that came back unused since the last call. Waiters with later slots could leave sooner.
    freed: Option<Instant>,
    /// The permits that waiters were too late for, since slots were booked anew for that, and when the first of them was
    /// missed.
    missed: Option<(Instant, usize)>,
    /// Until when slots are not booked anew for few permits that were missed.
    rests_until: Option<Instant>,
    /// Whether waiters have given up good slots for the next call, or the one under way.
    is_exchange: bool,
    /// Permits that no waiter can use. Those of the own part go back to the store with the next call.
    pub(super) returns: GivenUp,
}

impl Booked for Reservation {
    type Costs = u32;
    type Outcome = Result<Reservation, NoSlot>;

    fn costs(&self) -> &u32 {
        &self.cost
    }

    fn at(&self) -> Instant {
        self.at
    }

    fn until(&self) -> Option<Instant> {
        Some(self.until)
    }

    fn permits(&self) -> usize {
        self.count as usize
    }

    fn split(&mut self, permits: usize) -> Option<Self> {
        let count = u32::try_from(permits).ok()?;
        self.count = self.count.checked_sub(count).filter(|left| *left > 0)?;
        Some(Reservation { count, ..*self })
    }

    fn granted(self, is_in_line: bool, probe: Option<ProbeNumber>) -> Result<Reservation, NoSlot> {
        Ok(Reservation {
            is_at_once: self.is_at_once && !is_in_line,
            probe,
            ..self
        })
    }
}

impl Queue {
    /// Returns how many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.lanes.waiting()
    }

    /// Returns whether no request waits, all outcomes were collected, and no call is under way.
    pub(super) fn is_done(&self, now: Instant) -> bool {
        self.lanes.is_empty() && !self.is_calling(now)
    }

    pub(super) fn last_booked(&self) -> Option<Instant> {
        self.lanes.last_slot()
    }

    /// Returns the latest slot that a waiter can use.
    pub(super) fn latest(&self) -> Option<Instant> {
        self.latest
    }

    /// Adds a waiter. A new one is last; one that missed its slot returns to its old place. If the
    /// key is on hold for `held`, the store is called when the hold ends.
    pub(super) fn wait(
        &mut self,
        number: Number,
        cost: u32,
        bound: WaitBound,
        now: Instant,
        held: Option<Duration>,
    ) {
        let latest = bound.latest;
        let wait = SlotWait::new(bound, now);
        let gives_up_at = wait.gives_up_at;
        let asked_from = held.map_or(now, |left| clock::after(now, left));
        let entered = self
            .paused_until
            .map_or(asked_from, |until| until.max(asked_from));
        // The runtime in which the store is called may stop. So the waiter wakes when the call
        // counts as lost.
        let wakes_at = held.map_or(gives_up_at, |_| {
            gives_up_at.min(clock::after(asked_from, ANSWER))
        });
        let watched = self.watched_until().into_iter();
        let wakes_at = watched
            .chain(bound.patience_ends(now))
            .fold(wakes_at, Instant::min);
        let wait = SlotWait {
            entered,
            is_in_line: entered > now,
            ..wait
        };
        let returns = &mut self.returns;
        self.lanes.change(&cost, |lane| {
            // If it is the last one and can wait for a slot that is kept, it has this slot. Otherwise the slots
            // that are kept go back.
            let is_last = lane.would_be_last(number);
            let has_slot = is_last && lane.spare().is_some_and(|spare| spare.at <= latest);
            if !has_slot {
                lane.trim(None, |slot| returns.add(&slot));
            }
            lane.enter(number, wait, wakes_at);
            if has_slot {
                let leaving = lane.assign(1, 0, now);
                debug_assert!(leaving.is_empty(), "it can wait for its slot");
            }
        });
        self.latest = self.latest.max(Some(latest));
        self.last = self.last.max(Some(number));
    }

    /// Returns whether a slot of this cost is kept for the next waiter.
    pub(super) fn has_spare(&self, cost: u32) -> bool {
        let lane = self.lanes.get(&cost);
        lane.is_some_and(|lane| lane.spare().is_some())
    }

    /// Removes a waiter. Returns its outcome if its wait had ended.
    pub(super) fn leave(
        &mut self,
        number: Number,
        cost: u32,
    ) -> Option<Result<Reservation, NoSlot>> {
        match self.lanes.leave(number, &cost)? {
            Left::Waiting(_) => None,
            Left::Settled(settled) => Some(settled),
        }
    }

    /// Takes the outcome of a wait that has ended.
    pub(super) fn collect(
        &mut self,
        number: Number,
        cost: u32,
        now: Instant,
    ) -> Option<Result<Reservation, NoSlot>> {
        self.lanes.collect(number, &cost, now)
    }

    /// Adds a slot for the waiters of its cost.
    pub(super) fn add(&mut self, slot: Reservation) {
        self.lanes.add(slot);
    }

    /// Moves permits at hand to the first waiters without a slot.
    pub(super) fn take_from(&mut self, prefetched: &mut Prefetched, now: Instant) {
        // Most keys with waiters have no permits at hand, and those that have some have few waiters.
        while prefetched.units(now) > 0 {
            let of_use = self.lanes.without_slot().find_map(|(_, cost, lane)| {
                let missing = Some(lane.missing()).filter(|missing| *missing > 0)?;
                prefetched.take_many(*cost, missing, now)
            });
            let Some(slot) = of_use else { return };
            self.lanes.add(slot);
        }
    }

    /// Hands out the slots that are due, the first one to the first waiter, up to `most` permits in
    /// all. The task of waiter `running` runs already, so it is not woken.
    pub(super) fn hand_out(
        &mut self,
        most: usize,
        probe: Option<ProbeNumber>,
        now: Instant,
        running: Option<(Number, u32)>,
        wakers: &mut Wakers,
    ) -> HandedOut {
        if let Some((number, cost)) = running {
            self.lanes.runs(number, &cost);
        }
        let how = HandOut {
            most,
            probe,
            running: running.map(|(number, _)| number),
            now,
        };
        let mut missed = 0;
        let handed_out = self.lanes.hand_out(
            how,
            |_| true,
            |slot| {
                missed += slot.permits();
                self.returns.add(&slot);
            },
            wakers,
        );
        if missed > 0 {
            self.missed(missed, now);
        }
        handed_out
    }

    /// Notes that a slot at `at` came back unused.
    pub(super) fn freed(&mut self, at: Instant) {
        self.freed = Some(self.freed.map_or(at, |freed| freed.min(at)));
    }

    /// Notes that waiters were too late for `permits`.
    pub(super) fn missed(&mut self, permits: usize, now: Instant) {
        self.missed.get_or_insert((now, 0)).1 += permits;
    }

    /// Returns when slots are booked anew for the permits that were missed.
    ///
    /// That takes ten milliseconds for 100,000 waiters. If each task that came too late had it done, the next ones would be
    /// too late because of that. So it waits until enough of them have come, or for a time.
    fn books_anew_at(&self) -> Option<Instant> {
        let (missed_at, permits) = self.missed?;
        let are_few = permits * MOST_ANEW_FOR_ONE < self.waiting();
        let rests_until = self.rests_until.filter(|_| are_few);
        Some(rests_until.unwrap_or(missed_at))
    }

    /// Gives back slots behind one that came back unused since the last call: then this call books for their waiters
    /// again. `from` is the first that may go back, if any may. If the store answers later, the waiters are asked for once
    /// more in case that the call fails.
    pub(super) fn give_up_behind_freed(
        &mut self,
        from: Option<Instant>,
        answers_later: bool,
        now: Instant,
    ) {
        let is_due = self.books_anew_at().is_some_and(|at| at <= now);
        let missed = self
            .missed
            .take_if(|_| is_due || answers_later || from.is_none());
        if missed.is_some() {
            let waiting = u32::try_from(self.waiting()).unwrap_or(u32::MAX);
            self.rests_until = Some(clock::after(now, ANEW_FOR_EACH.saturating_mul(waiting)));
        }
        let has_missed = missed.is_some() && !answers_later;
        let missed_at = missed.map(|(at, _)| at);
        let freed = self.freed.take().into_iter().chain(missed_at).min();
        let (Some(freed), Some(from)) = (freed, from) else {
            return;
        };
        // Waiters that missed their slots fit in where others go back. Slots of one cost are booked anew in one step, so
        // all of them go back.
        let most = match has_missed {
            true if self.lanes.costs() == 1 => usize::MAX,
            true => MOST_BOOKED_ANEW.max(self.lanes.waiting_without_slot()),
            false => MOST_BOOKED_ANEW,
        };
        self.lanes.take_after(freed.max(from), most, |slot| {
            self.is_exchange = answers_later;
            self.returns.add(&slot);
        });
    }

    /// Returns whether waiters have given up good slots for the call that was answered. Returns true once.
    pub(super) fn take_exchange(&mut self) -> bool {
        !self.asked.is_empty() && std::mem::take(&mut self.is_exchange)
    }

    /// Gives back the slots that no waiter needs, the last ones first.
    pub(super) fn trim(&mut self, now: Instant) {
        self.spares_until = self.spares_until.filter(|until| *until > now);
        let spared_from = self.spares_until.map(|_| clock::after(now, SPARED_AHEAD));
        let freed = self.lanes.trim(spared_from, |slot| self.returns.add(&slot));
        if let Some(freed) = freed {
            self.freed(freed);
        }
        if self.waiting() == 0 {
            self.latest = None;
        }
    }

    /// Returns whether a request waits.
    pub(super) fn is_waiting(&self, number: Number, cost: u32) -> bool {
        self.lanes.wait_of(number, &cost).is_some()
    }

    /// Returns whether a waiter can wait no longer.
    pub(super) fn is_over(&self, number: Number, cost: u32, now: Instant) -> bool {
        // Its timer may be set to a slot that has gone since.
        let wait = self.lanes.wait_of(number, &cost);
        wait.is_some_and(|wait| wait.ends_at() <= now)
    }

    /// Returns whether a request waits for a slot later than `moment`, or without a slot.
    pub(super) fn waits_beyond(&self, moment: Instant) -> bool {
        let mut lanes = self.lanes.iter();
        !self.all_have_slots() || lanes.any(|(_, lane)| lane.waits_beyond(moment))
    }

    /// Returns whether each waiter has a slot.
    pub(super) fn all_have_slots(&self) -> bool {
        self.lanes.first_without_slot().is_none()
    }

    /// Returns what the waiters could use sooner than their slots, `most` permits in all, and the latest
    /// slot that is of use.
    pub(super) fn sooner(&self, most: usize) -> Option<(SmallVec<[Demand; 2]>, Instant)> {
        let mut lanes: Vec<(Number, u32, usize, Instant)> = Vec::new();
        for (cost, lane) in self.lanes.iter() {
            if let Some((first, count, latest)) = lane.sooner() {
                lanes.push((first, *cost, count, latest));
            }
        }
        lanes.sort_unstable_by_key(|(first, ..)| *first);
        let latest = lanes.iter().map(|(.., latest)| *latest).max()?;
        let mut left = most;
        let mut demands = SmallVec::new();
        for (_, cost, count, _) in lanes {
            let count = count.min(left);
            left -= count;
            if count > 0 {
                demands.push(Demand::new(cost, u32::try_from(count).unwrap_or(u32::MAX)));
            }
        }
        Some((demands, latest))
    }

    /// Returns whether the next call waits for other requests to join it. Starts the batching delay
    /// if there was none.
    ///
    /// The call waits until the tasks that are ready to run have run, because they may ask as well.
    /// If slots lie ahead, new requests wait anyway, and the call waits for some milliseconds. If
    /// the store is paused, the call waits until the pause is over.
    pub(super) fn batch(&mut self, now: Instant) -> Delay {
        let paused = self.paused_for(now).unwrap_or_default();
        let ahead = self.last_booked().unwrap_or(now);
        let ahead = ahead.saturating_duration_since(now);
        let delay = paused.max((ahead / 8).min(LONGEST_GATHERING));
        let delay = Some(delay).filter(|delay| *delay >= SHORTEST_TIMER);
        self.gathering.batch(delay.unwrap_or_default(), now)
    }

    /// Returns whether the store is not to be called yet.
    pub(super) fn is_paused(&self, now: Instant) -> bool {
        self.paused_for(now).is_some()
    }

    /// Returns for how long the store is not to be called yet.
    pub(super) fn paused_for(&self, now: Instant) -> Option<Duration> {
        let until = self.paused_until.filter(|until| *until > now)?;
        Some(until.saturating_duration_since(now))
    }

    /// Ends a pause: the next call need not wait for its end.
    pub(super) fn end_pause(&mut self) {
        self.paused_until = None;
        self.gathering.end();
    }

    /// Returns whether a slot is due that a waiter needs.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.next_slot().is_some_and(|slot| slot <= now)
    }

    /// Returns whether a slot is due, or slots are to be booked anew.
    pub(super) fn goes_on(&self, now: Instant) -> bool {
        self.is_due(now) || self.books_anew_at().is_some_and(|at| at <= now)
    }

    /// Returns when the key has to be visited if no waiter wakes: see [`Lanes::goes_on_at`], or to book slots anew.
    pub(super) fn goes_on_at(&self, now: Instant) -> Option<Instant> {
        // Once a call waits for others to join it, or for the end of a hold, that is the moment.
        let anew = self
            .books_anew_at()
            .filter(|_| self.waiting() > 0 && !self.gathering.is_under_way());
        let anew = anew.map(|at| at.max(clock::after(now, MISSED)));
        self.lanes.goes_on_at(now).into_iter().chain(anew).min()
    }

    /// Returns the next slot that a waiter takes.
    pub(super) fn next_slot(&self) -> Option<Instant> {
        self.lanes.next_slot()
    }

    /// Returns whether the store is called now to confirm the next slot, `lead` before the slot is
    /// due. Returns true once for each slot. If it is too early, the waiter of the slot wakes in
    /// time.
    pub(super) fn takes_confirmation(
        &mut self,
        slot: Instant,
        lead: Duration,
        now: Instant,
    ) -> bool {
        if self.confirmed == Some(slot) {
            return false;
        }
        let at = slot.checked_sub(lead).unwrap_or(now);
        if at <= now {
            self.confirmed = Some(slot);
            return true;
        }
        self.lanes.wake_for_next_slot(at);
        false
    }

    /// Drops all slots, which are not valid any more. The waiters keep their places.
    pub(super) fn void(&mut self) {
        self.lanes.change_all(|lane| lane.take_all(drop));
    }

    pub(super) fn wake_all(&mut self, wakers: &mut Wakers) {
        self.lanes.wake_where(|_| true, wakers);
    }

    /// Wakes the waiters that do not wait for what has no known moment any more.
    pub(super) fn wake_impatient(&mut self, now: Instant, wakers: &mut Wakers) {
        let is_impatient = |wait: &SlotWait| wait.bound.patience_ends(now).is_none();
        self.lanes.wake_where(is_impatient, wakers);
    }

    /// Lets no request wait for longer than `by`. Refuses those whose slot is later.
    pub(super) fn end_by(&mut self, by: Instant, wakers: &mut Wakers) {
        self.lanes
            .change_all(|lane| lane.end_by(by, || Err(NoSlot::NEVER), wakers));
        self.latest = self.latest.map(|latest| latest.min(by));
    }

    /// Gives back all slots that are booked.
    pub(super) fn give_up_slots(&mut self) {
        let returns = &mut self.returns;
        self.lanes
            .change_all(|lane| lane.take_all(|slot| returns.add(&slot)));
    }

    /// Lets no request leave before `until`: gives back the slots before it, and refuses the waiters
    /// that cannot wait until then.
    pub(super) fn withdraw(&mut self, until: Instant, now: Instant, wakers: &mut Wakers) {
        let refusal = Refusal::for_span(until.saturating_duration_since(now));
        self.lanes
            .change_all(|lane| lane.withdraw(until, refusal, &mut self.returns, wakers));
    }

    /// Registers the task of a waiter. It wakes at its slot, or when it can wait no longer.
    pub(super) fn register(
        &mut self,
        number: Number,
        cost: u32,
        now: Instant,
        cx: &mut Context<'_>,
    ) {
        let watched = self.watched_until().filter(|until| *until > now);
        self.lanes.register(number, &cost, watched, now, cx);
    }

    /// Returns the last slot that is booked for a cost.
    pub(super) fn last_slot(&self, cost: u32) -> Option<Instant> {
        self.lanes.get(&cost)?.last_slot()
    }
}
