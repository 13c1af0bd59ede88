//! The hold of a key: until when nothing may leave, because an upstream or an operator said so.
//!
//! What lies at hand and what was booked before its end goes back; who cannot wait so long is told; the others take new
//! slots, which a store that knows of the hold gives for the time after it.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::{Desk, Errand, Line};
use crate::clock;
use crate::gate::queue::Wakers;
use crate::jitter::jittered;
use crate::store::Held;

pub(super) struct Holding {
    until: Instant,
    releases: u32,
    /// Until when the store knows of it.
    known_until: Instant,
    /// How often in a row the upstream said no and not for how long.
    refusals: u32,
    /// While there are any.
    uncertain: Option<Uncertain>,
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
        let is_news = hold.until > clock::after(hold.known_until, SAME);
        let left = if is_news { hold.until.saturating_duration_since(now) } else { Duration::ZERO };
        Held { left, releases: hold.releases }
    }

    /// The store has said what holds.
    pub(super) fn hold_answered(&mut self, held: Held, now: Instant) {
        if self.hold.is_some() || !held.is_none() {
            self.adopt(held, now);
        }
        if let Some(hold) = &mut self.hold {
            hold.known_until = clock::after(now, held.left);
        }
    }

    /// Takes in what holds. Answers whether that changes anything.
    fn adopt(&mut self, held: Held, now: Instant) -> bool {
        let none =
            || Box::new(Holding { until: now, releases: 0, known_until: now, refusals: 0, uncertain: None });
        let hold = self.hold.get_or_insert_with(none);
        let until = clock::after(now, held.left);
        let changes = held.releases > hold.releases
            || (held.releases == hold.releases && until > clock::after(hold.until, SAME));
        if changes {
            (hold.until, hold.releases) = (until, held.releases);
        }
        changes
    }

    /// The key is held, or released.
    pub(in crate::gate) fn hold(
        &mut self,
        desk: &Desk<'_>,
        held: Held,
        wakers: &mut Wakers,
    ) -> Option<Errand> {
        if !self.adopt(held, desk.now) {
            return None;
        }
        self.obey(desk.now, wakers);
        if let (None, Some(queue)) = (self.held(desk.now), &mut self.queue) {
            // What was booked for the time after it may be had earlier.
            queue.give_up_slots();
        }
        let errand = self.step(desk, None, wakers);
        self.close();
        errand
    }

    /// Gives up what lies before the end of the hold.
    pub(super) fn obey(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.held(now) else { return };
        let unused = self.clear();
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
                self.adopt(Held { left: Duration::ZERO, releases }, now);
                let hold = self.hold.as_mut()?;
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

    /// A hold may have been missed.
    pub(in crate::gate) fn doubt(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.doubt();
        }
    }
}
