//! The line of one key in this process: the permits at hand, and the queue of those who wait.
//!
//! One store call at a time books for all who wait. Where nobody waits, a key in heavy use fetches a few permits ahead,
//! so that the next calls need no store; how many follows from how fast they are used.

mod wait;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::memory::Remembered;
use super::queue::{Gathering, Number, Patience, Queue, Settled, Slot, Wakers};
use super::stock::Stock;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::keyed::Idle;
use crate::limit::{Terms, Unused};
use crate::store::{Answer, Ask, Lease, Need, Refusal, Segment, Store, trust};

pub(super) use wait::Place;

/// What a line needs to know of its gate.
pub(super) struct Desk<'a> {
    pub(super) key: Key,
    pub(super) store: &'a Arc<dyn Store>,
    pub(super) terms: &'a Arc<Terms>,
    pub(super) now: Instant,
    pub(super) max_waiting: usize,
}

/// How long after its slot a permit is usable, unless wake-ups come late. With the default `transit_slack`, the margin
/// is 20 ms.
pub(crate) const LIFE: Duration = Duration::from_millis(10);

/// The longest life, for windows that are not longer than twenty times that.
const LONGEST_LIFE: Duration = Duration::from_millis(20);

/// The most permits that a store is asked for in one call: one with a server is not to keep it long.
const MOST_ASKED: usize = 500;

/// A sweep that is so late will not come.
const LOST_SWEEP: Duration = Duration::from_secs(1);

/// How late a task may wake.
const WAKE_UP: Duration = Duration::from_millis(5);

pub(super) struct Line {
    stock: Stock,
    /// Only while somebody waits.
    queue: Option<Box<Queue>>,
    life: Duration,
    /// Whether the store takes a trip to answer.
    later: bool,
    /// When somebody looks whether permits at hand were left over.
    sweep_at: Option<Instant>,
    /// What is remembered of a store that may lose its state.
    memory: Option<Box<Remembered>>,
}

/// What is to be done for a line without its lock.
pub(super) enum Errand {
    /// Run a call to its end.
    Call(Call),
    /// Come back after so long: others may join the next call meanwhile.
    Gather(Duration),
}

/// A store's answer that is still to come.
pub(super) type Call = Pin<Box<dyn Future<Output = Result<Lease, StoreError>> + Send>>;

/// What came of entering a line.
pub(super) enum Entered {
    Granted(Slot),
    Waiting(Number),
    Refused(Refusal),
    Failed(StoreError),
    LineFull,
}

impl Idle for Line {
    type Now = Instant;

    fn idle_from(&self) -> Option<Instant> {
        self.queue.is_none().then(|| self.stock.until())
    }

    fn worthless_from(&self) -> Option<Instant> {
        let remembered = self.memory.as_ref().map(|memory| memory.until());
        self.idle_from().map(|idle| idle.max(self.stock.soon()).max(remembered.unwrap_or(idle)))
    }
}

impl Line {
    pub(super) fn new(now: Instant) -> Self {
        Line { stock: Stock::new(now), queue: None, life: LIFE, later: false, sweep_at: None, memory: None }
    }

    /// How many wait.
    pub(super) fn waiting(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.waiting())
    }

    /// Units at hand.
    pub(super) fn at_hand(&self, now: Instant) -> u32 {
        self.stock.units(now)
    }

    /// A permit at hand, if nobody waits for one.
    #[inline]
    pub(super) fn take(&mut self, cost: u32, now: Instant) -> Option<Slot> {
        if self.waiting() > 0 { None } else { self.stock.take(cost, now) }
    }

    /// The same, for a request that leaves at once.
    #[inline]
    pub(super) fn spend(&mut self, cost: u32, now: Instant) -> bool {
        self.waiting() == 0 && self.stock.spend(cost, now)
    }

    /// One enters: it gets a permit, a place in the line, or a refusal.
    pub(super) fn enter(
        &mut self,
        desk: &Desk<'_>,
        cost: u32,
        patience: Patience,
        wakers: &mut Wakers,
    ) -> (Entered, Option<Errand>) {
        if let Some(slot) = self.take(cost, desk.now) {
            return (Entered::Granted(slot), None);
        }
        if self.queue.is_none() && !self.later {
            return self.enter_empty(desk, cost, patience);
        }
        let queue = self.queue.get_or_insert_default();
        if queue.waiting() >= desk.max_waiting {
            return (Entered::LineFull, None);
        }
        if let Some(wait) = queue.paused_beyond(patience, desk.now) {
            return (Entered::Refused(Refusal { wait: Some(wait), limit: None }), None);
        }
        let number = next_number();
        queue.wait(number, cost, patience, desk.now);
        let errand = self.step(desk, Some(number), wakers);
        let entered = match self.collect(number) {
            Some(Settled::Granted(slot)) => Entered::Granted(slot),
            Some(Settled::Refused(refusal)) => Entered::Refused(refusal),
            Some(Settled::Failed(error)) => Entered::Failed(error),
            None => Entered::Waiting(number),
        };
        self.close();
        (entered, errand)
    }

    /// Nobody waits: a store that answers at once is asked for this one alone, and for what may be fetched ahead.
    fn enter_empty(&mut self, desk: &Desk<'_>, cost: u32, patience: Patience) -> (Entered, Option<Errand>) {
        let prefetch = self.stock.order(desk.terms, self.stock_life(desk), desk.now);
        let left = self.stock.clear();
        let need = Need { cost, count: 1 };
        let ask = self.ask(desk, std::slice::from_ref(&need), prefetch, patience.latest, left.as_slice());
        match desk.store.lease(ask) {
            Answer::Now(Err(error)) => (Entered::Failed(error), None),
            Answer::Now(Ok(lease)) => {
                if let Some(segment) = &lease.prefetched {
                    self.stock.fill(&slot(&lease, segment, (desk.now, desk.now)));
                }
                let Some(segment) = lease.segments.first() else {
                    let learning = lease.learning.map(|wait| Refusal { wait: Some(wait), limit: None });
                    return (Entered::Refused(lease.refused.or(learning).unwrap_or(Refusal::NEVER)), None);
                };
                let slot = slot(&lease, segment, (desk.now, clock::now()));
                if segment.wait.is_zero() {
                    return (Entered::Granted(slot), None);
                }
                let queue = self.queue.get_or_insert_default();
                let number = next_number();
                queue.wait(number, cost, patience, desk.now);
                queue.answered([slot], None, desk.now, &mut Wakers::default());
                (Entered::Waiting(number), None)
            }
            Answer::Later(call) => {
                let queue = self.queue.get_or_insert_default();
                let number = next_number();
                queue.wait(number, cost, patience, desk.now);
                queue.asking(&[need]);
                self.later = true;
                (Entered::Waiting(number), Some(Errand::Call(call)))
            }
        }
    }

    fn ask<'a>(
        &mut self,
        desk: &'a Desk<'_>,
        needs: &'a [Need],
        prefetch: u32,
        latest: Instant,
        returns: &'a [Unused],
    ) -> Ask<'a> {
        let memory = self.memory.as_mut().map(|memory| {
            memory.forget(returns);
            memory.tell(desk.now)
        });
        Ask {
            key: desk.key,
            terms: desk.terms,
            needs,
            prefetch,
            latest: latest.saturating_duration_since(desk.now),
            life: self.life,
            prefetch_life: self.stock_life(desk),
            returns,
            memory: memory.unwrap_or_default(),
        }
    }

    /// Keeps what a lease says besides its segments. Answers between which moments its time was.
    fn remember(
        &mut self,
        desk: &Desk<'_>,
        lease: &Lease,
        sent: Instant,
        now: Instant,
    ) -> (Instant, Instant) {
        let mut bounds = (sent, now);
        if self.later {
            let memory = self.memory.get_or_insert_with(|| Box::new(Remembered::new(lease, sent, now)));
            if memory.incarnation() != lease.incarnation {
                // The store does not know of what it granted before.
                self.stock.clear();
                if let Some(queue) = &mut self.queue {
                    queue.void();
                }
            }
            memory.update(lease, desk.terms.quota().longest_memory(), sent, now);
            bounds = memory.bounds();
        }
        if let Some(segment) = &lease.prefetched {
            self.stock.fill(&slot(lease, segment, (bounds.0, bounds.0)));
        }
        bounds
    }

    /// What is fetched ahead may live for a two-hundredth of the window.
    fn stock_life(&self, desk: &Desk<'_>) -> Duration {
        self.life.max(desk.terms.quota().shortest_window() / 200)
    }

    /// Brings the line up to date: slots that are due go out, slots nobody needs go back, the store is asked for those
    /// who have none. `me` is being polled and needs no waking.
    fn step(&mut self, desk: &Desk<'_>, me: Option<Number>, wakers: &mut Wakers) -> Option<Errand> {
        // An answer at once may bring slots that are due at once; a second round hands them out, and more are never
        // needed: what a store grants is alive.
        let mut now = desk.now;
        for _ in 0..3 {
            let trusted = self.is_trusted(desk, now);
            let queue = self.queue.as_mut()?;
            queue.take_from(&mut self.stock, now);
            let died = trusted && queue.hand_out(now, me, wakers);
            let doubtful = !trusted && queue.is_due(now);
            queue.trim();
            let needs = queue.needs(if self.later { MOST_ASKED } else { usize::MAX });
            if queue.is_calling() || (needs.is_empty() && !doubtful) {
                break;
            }
            if self.later && !doubtful {
                match queue.gathering {
                    Gathering::NotYet => return Some(Errand::Gather(queue.gather(now))),
                    Gathering::UnderWay => break,
                    Gathering::Done => {}
                }
            }
            // Where slots lie ahead, permits are scarce.
            let scarce = queue.last_booked().is_some();
            let mut returns = std::mem::take(&mut queue.returns);
            let latest = queue.latest().unwrap_or(desk.now);
            let ahead = self.later && !scarce && !needs.is_empty();
            let prefetch =
                if ahead { self.stock.order(desk.terms, self.stock_life(desk), desk.now) } else { 0 };
            returns.extend(self.stock.clear());
            if died {
                self.lengthen_life(desk);
            }
            match desk.store.lease(self.ask(desk, &needs, prefetch, latest, &returns)) {
                Answer::Now(answer) => {
                    // The store asked the time after we did.
                    now = clock::now();
                    self.mark_asked(&needs);
                    self.answered(desk, answer, now, wakers);
                }
                Answer::Later(call) => {
                    self.mark_asked(&needs);
                    self.later = true;
                    return Some(Errand::Call(call));
                }
            }
        }
        let queue = self.queue.as_mut()?;
        let next_call_is_near = queue.is_calling() || queue.gathering == Gathering::UnderWay;
        if !queue.returns.is_empty() && !next_call_is_near {
            desk.store.give_back(desk.key, desk.terms, &std::mem::take(&mut queue.returns));
        }
        None
    }

    fn mark_asked(&mut self, needs: &[Need]) {
        if let Some(queue) = &mut self.queue {
            queue.asking(needs);
        }
    }

    /// The call sent at `desk.now` has been answered.
    fn answered(
        &mut self,
        desk: &Desk<'_>,
        answer: Result<Lease, StoreError>,
        now: Instant,
        wakers: &mut Wakers,
    ) {
        let sent = desk.now;
        let bounds = match &answer {
            Ok(lease) => self.remember(desk, lease, sent, now),
            Err(_) => (sent, now),
        };
        let trusted = self.is_trusted(desk, now);
        let Some(queue) = &mut self.queue else { return };
        match answer {
            Ok(Lease { learning: Some(wait), .. }) => queue.pause(wait, now, wakers),
            Ok(lease) => {
                let slots = lease.segments.iter().map(|segment| slot(&lease, segment, bounds));
                let end = Settled::Refused(lease.refused.unwrap_or(Refusal::NEVER));
                let died = queue.answered(slots, Some(&end), now, wakers);
                let uncertain = bounds.1.saturating_duration_since(bounds.0);
                let life = LIFE.max(uncertain.saturating_mul(2).saturating_add(WAKE_UP));
                let lately = if died { self.life * 2 } else { self.life - self.life / 8 };
                self.life = life.max(lately).min(longest_life(desk.terms));
            }
            Err(error) => {
                if !trusted && queue.is_due(now) {
                    // Nobody knows whether the store still knows of them.
                    queue.void();
                }
                queue.answered([], Some(&Settled::Failed(error)), now, wakers);
            }
        }
    }

    fn is_trusted(&self, desk: &Desk<'_>, now: Instant) -> bool {
        let trust = trust(desk.terms.quota().longest_memory());
        self.memory.as_ref().is_none_or(|memory| memory.is_trusted(trust, now))
    }

    /// The call sent at `sent`, which answered later, has been answered.
    pub(super) fn call_answered(
        &mut self,
        desk: &Desk<'_>,
        answer: Result<Lease, StoreError>,
        sent: Instant,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        // A permit's life counts from when the call was sent: of one that took longer, what was due at once is dead.
        let took = desk.now.saturating_duration_since(sent);
        let longest = longest_life(desk.terms);
        let dead = |segment: &Segment| segment.wait.saturating_add(segment.life) <= took;
        let too_slow = took >= self.life
            && self.life >= longest
            && answer.as_ref().is_ok_and(|lease| lease.segments.iter().any(dead));
        let answer = if too_slow { answer.and(Err(StoreError::TooSlow { took, longest })) } else { answer };
        self.answered(&Desk { now: sent, ..*desk }, answer, desk.now, wakers);
        let errand = self.step(desk, None, wakers);
        self.close();
        errand
    }

    /// Those who were to join the next call have joined.
    pub(super) fn gathered(&mut self, desk: &Desk<'_>, wakers: &mut Wakers) -> Option<Errand> {
        self.queue.as_mut()?.gathering = Gathering::Done;
        let errand = self.step(desk, None, wakers);
        if let Some(queue) = self.queue.as_mut().filter(|queue| queue.gathering == Gathering::Done) {
            queue.gathering = Gathering::NotYet;
        }
        self.close();
        errand
    }

    /// When to [`sweep`](Line::sweep), should nobody be about to.
    pub(super) fn start_sweep(&mut self, now: Instant) -> Option<Instant> {
        // One that is late was lost with its runtime.
        let nobody = self.sweep_at.is_none_or(|at| clock::after(at, LOST_SWEEP) < now);
        let until = self.stock.until();
        (nobody && self.stock.units(now) > 0).then(|| *self.sweep_at.insert(until))
    }

    /// Gives back what was left over at hand when it died: an idle process takes nothing from the others. Answers when to
    /// look again.
    pub(super) fn sweep(&mut self, desk: &Desk<'_>) -> Option<Instant> {
        self.sweep_at = Some(self.stock.until()).filter(|until| *until > desk.now);
        if self.sweep_at.is_none()
            && let Some(left) = self.clear()
        {
            desk.store.give_back(desk.key, desk.terms, &[left]);
        }
        self.sweep_at
    }

    /// Takes out what lies at hand, for the store.
    pub(super) fn clear(&mut self) -> Option<Unused> {
        let unused = self.stock.clear();
        if let Some(memory) = &mut self.memory {
            memory.forget(unused.as_slice());
        }
        unused
    }

    /// A permit comes back that was surely not used: it goes to the next in line, else back to the store.
    pub(super) fn give_back(&mut self, desk: &Desk<'_>, slot: Slot, wakers: &mut Wakers) -> Option<Errand> {
        let Some(queue) = &mut self.queue else {
            if !self.stock.put(&slot, desk.now) {
                desk.store.give_back(desk.key, desk.terms, &[slot.unused()]);
            }
            return None;
        };
        queue.add(slot);
        let errand = self.step(desk, None, wakers);
        self.close();
        errand
    }

    fn close(&mut self) {
        if self.queue.as_ref().is_some_and(|queue| queue.is_done()) {
            self.queue = None;
        }
    }
}

/// One count for the process: a line may be forgotten and opened anew while somebody means to come back to its place.
fn next_number() -> Number {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// When this process may use a segment of a lease, whose time was between two moments: never before its slot, and never
/// after its deadline. A microsecond is for the store's time being cut to whole ones.
fn slot(lease: &Lease, segment: &Segment, (earliest, latest): (Instant, Instant)) -> Slot {
    let lasts = segment.wait.saturating_add(segment.life).saturating_sub(Duration::from_micros(1));
    Slot {
        at: clock::after(latest, segment.wait),
        until: clock::after(earliest, lasts),
        cost: segment.cost,
        count: segment.count,
        slot: segment.slot,
        stamp: segment.stamp,
        incarnation: lease.incarnation,
    }
}

fn longest_life(terms: &Terms) -> Duration {
    LONGEST_LIFE.max(terms.quota().shortest_window() / 20)
}
