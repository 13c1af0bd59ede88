//! The hold of a key: until when nothing may leave, because an upstream or an operator said so.
//!
//! What lies at hand and what was booked before its end goes back; who cannot wait so long is told; the others take new
//! slots, which a store that knows of the hold gives for the time after it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::{Desk, Errand, Line};
use crate::clock;
use crate::gate::queue::{Gathering, Number, Wakers};
use crate::jitter::jittered;
use crate::quota::Limit;
use crate::store::Held;

pub(super) struct Holding {
    until: Instant,
    /// Until when it holds at least, by what was seen here or answered: what is told of it. What was told to all may have
    /// been on its way for long.
    sure_until: Instant,
    releases: u32,
    /// Until when the store knows of it, at most.
    known_until: Instant,
    /// Since when it is what it is: answers to calls of before may not know of it.
    since: Instant,
    /// When the store or others last spoke of it; none where some word may have been missed.
    heard: Option<Instant>,
    /// Whether the store has lost it, and was not told again yet.
    retell: bool,
    /// The tasks that wait for its end alone.
    waiting: BTreeMap<Number, Waker>,
    /// How often in a row the upstream said no and not for how long.
    refusals: u32,
    /// While there are any.
    uncertain: Option<Uncertain>,
}

impl Holding {
    fn new(now: Instant) -> Self {
        Holding {
            until: now,
            sure_until: now,
            releases: 0,
            known_until: now,
            since: now,
            heard: None,
            retell: false,
            waiting: BTreeMap::new(),
            refusals: 0,
            uncertain: None,
        }
    }
}

/// An upstream has said no and not for how long: until it says yes, answers are looked at.
struct Uncertain;

/// How many there are, in all gates.
static UNCERTAIN: AtomicUsize = AtomicUsize::new(0);

impl Uncertain {
    fn new() -> Self {
        UNCERTAIN.fetch_add(1, Ordering::Relaxed);
        Uncertain
    }
}

impl Drop for Uncertain {
    fn drop(&mut self) {
        UNCERTAIN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether an answer that is no refusal is of interest to anybody.
#[inline]
pub(in crate::gate) fn is_any_uncertain() -> bool {
    UNCERTAIN.load(Ordering::Relaxed) > 0
}

/// What is so much later is the same, seen after another trip.
const SAME: Duration = Duration::from_millis(5);

/// How often the store is asked whether a hold still holds, while somebody calls.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The first hold where the upstream does not say for how long; each further one is twice as long.
const FIRST_HOLD: Duration = Duration::from_secs(1);

impl Line {
    /// For how long it is held.
    pub(in crate::gate) fn held(&self, now: Instant) -> Option<Duration> {
        let until = self.hold.as_ref()?.until;
        (until > now).then(|| until - now)
    }

    /// Until when it is of use to know of the hold.
    pub(super) fn hold_matters_until(&self) -> Option<Instant> {
        let hold = self.hold.as_ref()?;
        let again = FIRST_HOLD.saturating_mul(1 << hold.refusals.min(10));
        Some(if hold.refusals > 0 { clock::after(hold.until, again) } else { hold.until })
    }

    /// What the store is told of the hold: all there is where it may not know.
    pub(super) fn held_for_store(&self, now: Instant) -> Held {
        let Some(hold) = &self.hold else { return Held::default() };
        // Else each exchange would move it later by what the trips differ. The ledger of a process alone knows of nothing.
        let is_news = self.alone || hold.sure_until > clock::after(hold.known_until, SAME);
        let left = if is_news { hold.sure_until.saturating_duration_since(now) } else { Duration::ZERO };
        Held { left, releases: hold.releases }
    }

    /// The store has said what holds, in answer to a call sent at `sent`; its time was between two moments of ours.
    pub(super) fn hold_answered(
        &mut self,
        held: Held,
        sent: Instant,
        (earliest, latest): (Instant, Instant),
    ) {
        if self.hold.is_none() && held.is_none() {
            return;
        }
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(sent)));
        let least = clock::after(earliest, held.left);
        // What holds nothing has ended before, not when the answer came: who is being served asked the time earlier.
        let most = if held.left.is_zero() { least } else { clock::after(latest, held.left) };
        if held.releases < hold.releases {
            return;
        }
        hold.heard = Some(latest);
        hold.known_until = most;
        if held.releases > hold.releases {
            (hold.until, hold.sure_until, hold.releases, hold.since) = (most, least, held.releases, sent);
            return;
        }
        hold.sure_until = hold.sure_until.max(least);
        if sent < hold.since {
            hold.until = hold.until.max(most);
        } else if hold.sure_until <= clock::after(most, SAME) {
            (hold.until, hold.sure_until) = (most, hold.sure_until.min(most));
        } else {
            // It has forgotten.
            hold.until = hold.sure_until;
        }
    }

    /// Takes in what holds, as it was seen here (`sure`) or told to all. Answers whether that changes anything.
    fn adopt(&mut self, held: Held, now: Instant, sure: bool) -> bool {
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(now)));
        let until = clock::after(now, held.left);
        let released = held.releases > hold.releases;
        if released {
            (hold.releases, hold.sure_until) = (held.releases, now);
        }
        if held.releases < hold.releases {
            return false;
        }
        hold.heard = Some(now);
        if sure {
            hold.sure_until = hold.sure_until.max(until);
        }
        let changes = released || until > clock::after(hold.until, SAME);
        if changes {
            (hold.until, hold.since) = (until, now);
        }
        changes
    }

    /// The key is held, or released.
    pub(in crate::gate) fn hold(
        &mut self,
        desk: &Desk<'_>,
        held: Held,
        sure: bool,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        if !self.adopt(held, desk.now, sure) {
            return None;
        }
        if let Some(hold) = &mut self.hold {
            std::mem::take(&mut hold.waiting).into_values().for_each(|waker| wakers.add(Some(waker)));
        }
        self.obey(desk.now, wakers);
        let is_held = self.held(desk.now).is_some();
        if let Some(queue) = &mut self.queue {
            // What was booked for later goes as well, so that all is asked for anew when it ends, as it is allowed then; but
            // not where it is paced: a bucket that others have slots in cannot take single ones back.
            let is_paced = |limit: &Limit| matches!(limit, Limit::Bucket { .. });
            if !is_held || !desk.terms.quota().limits().iter().any(is_paced) {
                queue.give_up_slots();
            }
            // Nobody waits for its end any more.
            if !is_held && queue.gathering == Gathering::UnderWay {
                queue.gathering = Gathering::Done;
            }
        }
        let errand = self.step(desk, None, wakers);
        self.close(desk);
        errand
    }

    /// Asks the store whether it still holds, though nobody waits.
    pub(in crate::gate) fn confirm_hold(&mut self, desk: &Desk<'_>, wakers: &mut Wakers) -> Option<Errand> {
        self.held(desk.now)?;
        if self.later { self.inquire(desk, wakers) } else { None }
    }

    /// The store could not be asked whether it still holds: it is asked again, though nobody may wait.
    pub(super) fn asks_again(&self, now: Instant) -> Option<Errand> {
        let doubted = self.hold.as_ref().is_some_and(|hold| hold.heard.is_none());
        (doubted && self.held(now).is_some()).then_some(Errand::PassOn(ASK_AGAIN))
    }

    /// The store has lost its state: what is known of the hold is all there is.
    pub(super) fn hold_forgotten(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            (hold.sure_until, hold.known_until, hold.retell) = (hold.until, now, true);
        }
    }

    /// Tells a store that has lost its state, before others ask it who know nothing.
    pub(super) fn retell_hold(&mut self, desk: &Desk<'_>, wakers: &mut Wakers) -> Option<Errand> {
        let retell = self.hold.as_mut().is_some_and(|hold| std::mem::take(&mut hold.retell));
        if retell { self.confirm_hold(desk, wakers) } else { None }
    }

    /// Gives up what lies at hand, and what is booked for before the end of the hold.
    pub(super) fn obey(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.held(now) else { return };
        // What goes back with the next call is forgotten then.
        let unused = self.stock.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.withdraw(clock::after(now, left), now, wakers);
    }

    /// How often holds were released.
    pub(in crate::gate) fn releases(&self) -> u32 {
        self.hold.as_ref().map_or(0, |hold| hold.releases)
    }

    /// The upstream has refused a call. Answers the hold that follows, if it is longer than the one there is.
    pub(in crate::gate) fn refused_upstream(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        now: Instant,
    ) -> Option<Held> {
        let (held, releases) = (self.held(now), self.releases());
        let left = match retry_after {
            Some(wait) => wait.min(max_hold),
            // It says nothing that is not known: that call was sent before the hold began.
            None if held.is_some() => return None,
            None => {
                let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(now)));
                hold.uncertain.get_or_insert_with(Uncertain::new);
                hold.refusals += 1;
                let longest = FIRST_HOLD.saturating_mul(1 << (hold.refusals - 1).min(10));
                jittered(longest.min(max_hold))
            }
        };
        let longer = left > held.unwrap_or_default().saturating_add(SAME);
        longer.then_some(Held { left, releases })
    }

    /// A call was answered otherwise.
    pub(in crate::gate) fn accepted_upstream(&mut self, now: Instant) {
        if let Some(hold) = self.hold.as_mut().filter(|hold| hold.until <= now) {
            (hold.refusals, hold.uncertain) = (0, None);
        }
    }

    /// Whether the store is to be asked by one who is held: a release may have been missed. One asks for all.
    pub(super) fn asks_for_release(&mut self, now: Instant) -> bool {
        let Some(hold) = &mut self.hold else { return false };
        let asks = hold.heard.is_none_or(|heard| clock::after(heard, ASK_AGAIN) <= now);
        if asks {
            hold.heard = Some(now);
        }
        asks
    }

    /// For how long the key is held; until then, the task is woken when that changes.
    pub(in crate::gate) fn poll_hold(
        &mut self,
        number: Number,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let left = self.held(now)?;
        self.hold.as_mut()?.waiting.insert(number, cx.waker().clone());
        Some(left)
    }

    /// One waits for the end of the hold no more.
    pub(in crate::gate) fn leave_hold(&mut self, number: Number) {
        if let Some(hold) = &mut self.hold {
            hold.waiting.remove(&number);
        }
    }

    /// A hold may have been missed, or a release.
    pub(in crate::gate) fn doubt(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.heard = None;
        }
        if let Some(memory) = &mut self.memory {
            memory.doubt();
        }
    }
}
