//! The hold of a key: until when nothing may leave, because an upstream or an operator said so.
//!
//! What lies at hand and what was booked before its end goes back; a request that cannot wait so long is refused; the
//! others take new slots, which a store that knows of the hold gives for the time after it.
//!
//! A hold that was cut to the longest allowed ends on probation: one request leaves, the probe, and the others when it has
//! passed. If it is refused, that is a new hold. A probe whose response takes long is followed by another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::refusal::{Refusals, SAME, Wait};
use super::{Effect, KeyContext, KeyState};
use crate::clock;
use crate::limiter::queue::{Gathering, Number};
use crate::quota::Limit;
use crate::store::Held;
use crate::wakers::Wakers;

pub(super) struct Holding {
    until: Instant,
    /// Until when it holds at least, by what was seen here or answered: the store is told of it. What was published to all
    /// may have been on its way for long.
    sure_until: Instant,
    releases: u32,
    /// Whether the upstream said that it lasts longer.
    cut: bool,
    /// On probation: when the probe left.
    probe: Option<Instant>,
    /// Until when the store knows of it, at most.
    known_until: Instant,
    /// Since when it is what it is: answers to calls of before may not know of it.
    since: Instant,
    /// When the store or others last spoke of it; none if some message may have been missed.
    heard: Option<Instant>,
    /// When this process last told the store of a refusal.
    told: Option<Instant>,
    /// Whether the store has lost it, and was not told again yet.
    retell: bool,
    /// The tasks that wait for its end alone.
    waiting: BTreeMap<Number, Waker>,
    refusals: Refusals,
    /// While a call that passes would change anything.
    uncertain: Option<Uncertain>,
}

impl Holding {
    fn new(now: Instant) -> Self {
        Holding {
            until: now,
            sure_until: now,
            releases: 0,
            cut: false,
            probe: None,
            known_until: now,
            since: now,
            heard: None,
            told: None,
            retell: false,
            waiting: BTreeMap::new(),
            refusals: Refusals::default(),
            uncertain: None,
        }
    }

    /// Holds until another moment.
    fn set(&mut self, until: Instant, cut: bool) {
        (self.until, self.cut, self.probe) = (until, cut, None);
        if cut {
            self.uncertain.get_or_insert_with(Uncertain::new);
        }
    }
}

/// Whether requests may leave a key that was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// All may.
    Open,
    /// One may, as a probe.
    Probe,
    /// None before the probe has passed, or so long.
    Probing(Duration),
}

/// Something is to be learned from the next call that passes: until then all responses are looked at.
#[derive(Debug)]
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
pub(in crate::limiter) fn is_any_uncertain() -> bool {
    UNCERTAIN.load(Ordering::Relaxed) > 0
}

/// How often this process tells the store of one refusal after the other, unless it is longer by a tenth.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// A probe whose response takes longer is followed by another.
const PROBE: Duration = Duration::from_secs(5);

/// The longest probation, and no longer than `max_hold`.
const LONGEST_PROBATION: Duration = Duration::from_secs(60);

/// How often the store is asked whether a hold still holds, while somebody calls.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl KeyState {
    /// For how long it is held.
    pub(in crate::limiter) fn held(&self, now: Instant) -> Option<Duration> {
        let until = self.hold.as_ref()?.until;
        (until > now).then(|| until - now)
    }

    /// Until when it is of use to know of the hold.
    pub(super) fn hold_matters_until(&self) -> Option<Instant> {
        let hold = self.hold.as_ref()?;
        let probation = if hold.cut { LONGEST_PROBATION } else { Duration::ZERO };
        Some(clock::after(hold.until, hold.refusals.matters_for().max(probation)))
    }

    /// Whether requests may leave, if the key is not held.
    pub(super) fn passage(&self, max_hold: Duration, now: Instant) -> Passage {
        let Some(hold) = self.hold.as_ref().filter(|hold| hold.cut) else { return Passage::Open };
        if clock::after(hold.until, LONGEST_PROBATION.min(max_hold)) <= now {
            return Passage::Open;
        }
        let next = hold.probe.map(|left| clock::after(left, PROBE)).filter(|next| *next > now);
        next.map_or(Passage::Probe, |next| Passage::Probing(next - now))
    }

    /// The probe leaves now.
    pub(super) fn probe_leaves(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            hold.probe = Some(now);
        }
    }

    /// A permit came back unused: if it was the probe's, another request may be the probe.
    pub(super) fn probe_comes_back(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.probe = None;
        }
    }

    /// For how long no request may leave, because of a hold or a probe. A request that may leave on probation is the probe.
    pub(in crate::limiter) fn blocked(&mut self, max_hold: Duration, now: Instant) -> Option<Duration> {
        if let Some(left) = self.held(now) {
            return Some(left);
        }
        match self.passage(max_hold, now) {
            Passage::Open => None,
            Passage::Probe => {
                self.probe_leaves(now);
                None
            }
            Passage::Probing(left) => Some(left),
        }
    }

    /// For how long no request may leave, because of a hold or a probe. The next request may be the probe.
    pub(in crate::limiter) fn waits(&self, max_hold: Duration, now: Instant) -> Option<Duration> {
        self.held(now).or_else(|| match self.passage(max_hold, now) {
            Passage::Open | Passage::Probe => None,
            Passage::Probing(left) => Some(left),
        })
    }

    /// Whether all requests may leave, and none is the probe.
    pub(in crate::limiter) fn is_clear(&self, max_hold: Duration, now: Instant) -> bool {
        self.hold.is_none() || self.held(now).is_none() && self.passage(max_hold, now) == Passage::Open
    }

    /// How many tasks wait for the end of the hold alone.
    pub(in crate::limiter) fn waiting_for_hold(&self) -> usize {
        self.hold.as_ref().map_or(0, |hold| hold.waiting.len())
    }

    /// What the store is told of the hold: all there is where it may not know.
    pub(super) fn held_for_store(&self, now: Instant) -> Held {
        let Some(hold) = &self.hold else { return Held::default() };
        // Else each exchange would move it later by what the trips differ. The ledger of a process alone knows of nothing.
        let is_news = self.alone || hold.sure_until > clock::after(hold.known_until, SAME);
        let left = if is_news { hold.sure_until.saturating_duration_since(now) } else { Duration::ZERO };
        Held { left, releases: hold.releases, cut: hold.cut }
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
            (hold.sure_until, hold.releases, hold.since) = (least, held.releases, sent);
            hold.set(most, held.cut);
            return;
        }
        hold.sure_until = hold.sure_until.max(least);
        let cut = if held.left.is_zero() { hold.cut } else { held.cut };
        if sent < hold.since {
            hold.until = hold.until.max(most);
        } else if hold.sure_until <= clock::after(most, SAME) {
            hold.sure_until = hold.sure_until.min(most);
            if cut != hold.cut {
                hold.set(most, cut);
            }
            hold.until = most;
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
        let is_same = hold.until > now && until <= clock::after(hold.until, SAME);
        let changes = released || (until > now.max(hold.until) && !is_same);
        if changes {
            hold.since = now;
            hold.set(until, held.cut);
        }
        changes
    }

    /// The key is held, or released.
    pub(in crate::limiter) fn hold(
        &mut self,
        ctx: &KeyContext<'_>,
        held: Held,
        sure: bool,
        wakers: &mut Wakers,
    ) -> Option<Effect> {
        if !self.adopt(held, ctx.now, sure) {
            return None;
        }
        self.hold_changed(ctx, wakers)
    }

    /// What holds the key has changed: gives up what may no longer be used, and goes on with what may.
    pub(in crate::limiter) fn hold_changed(
        &mut self,
        ctx: &KeyContext<'_>,
        wakers: &mut Wakers,
    ) -> Option<Effect> {
        self.refused = None;
        if let Some(hold) = &mut self.hold {
            std::mem::take(&mut hold.waiting).into_values().for_each(|waker| wakers.add(Some(waker)));
        }
        self.obey(ctx.now, wakers);
        let is_held = self.held(ctx.now).is_some();
        if let Some(queue) = &mut self.queue {
            // What was booked for later goes as well, so that all is asked for anew when it ends, as it is allowed then; but
            // not where it is paced: a bucket that others have slots in cannot take single ones back.
            let is_paced = |limit: &Limit| matches!(limit, Limit::Bucket { .. });
            if !is_held || !ctx.terms.quota().limits().iter().any(is_paced) {
                queue.give_up_slots();
            }
            // Nobody waits for its end any more.
            if !is_held && queue.gathering == Gathering::UnderWay {
                queue.gathering = Gathering::Done;
            }
        }
        let effect = self.step(ctx, None, wakers);
        self.close(ctx);
        effect
    }

    /// Asks the store whether it still knows of the hold and of what is booked, though nobody may wait for its answer. A
    /// store that came back with an older state grants what is booked to others, until it hears of it.
    pub(in crate::limiter) fn confirm(
        &mut self,
        ctx: &KeyContext<'_>,
        wakers: &mut Wakers,
    ) -> Option<Effect> {
        let is_at_stake = self.held(ctx.now).is_some() || self.is_booked();
        if self.later && is_at_stake { self.inquire(ctx, wakers) } else { None }
    }

    /// Whether slots are booked ahead.
    pub(in crate::limiter) fn is_booked(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.last_booked().is_some())
    }

    /// The store could not be asked whether it still holds: it is asked again, though nobody may wait.
    pub(super) fn asks_again(&self, now: Instant) -> Option<Effect> {
        let doubted = self.hold.as_ref().is_some_and(|hold| hold.heard.is_none());
        (doubted && self.held(now).is_some()).then_some(Effect::PassOn(ASK_AGAIN))
    }

    /// The store has lost its state: what is known of the hold is all there is.
    pub(super) fn hold_forgotten(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            (hold.sure_until, hold.known_until, hold.retell) = (hold.until, now, true);
        }
    }

    /// Tells a store that has lost its state, before others ask it who know nothing.
    pub(super) fn retell_hold(&mut self, ctx: &KeyContext<'_>, wakers: &mut Wakers) -> Option<Effect> {
        let retell = self.hold.as_mut().is_some_and(|hold| std::mem::take(&mut hold.retell));
        if retell { self.confirm(ctx, wakers) } else { None }
    }

    /// Gives up what lies at hand, and what is booked for before the end of the hold.
    pub(super) fn obey(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.held(now) else { return };
        // What goes back with the next call is forgotten then.
        let unused = self.prefetched.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.withdraw(clock::after(now, left), now, wakers);
    }

    /// How often holds were released.
    pub(in crate::limiter) fn releases(&self) -> u32 {
        self.hold.as_ref().map_or(0, |hold| hold.releases)
    }

    /// The upstream has refused a call that was sent at `sent`. Returns the hold that follows, if it is longer than the one
    /// there is, and whether the store is to be told.
    pub(in crate::limiter) fn refused_upstream(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        sent: Instant,
        now: Instant,
    ) -> Option<(Held, bool)> {
        let before = self.held(now);
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(now)));
        hold.uncertain.get_or_insert_with(Uncertain::new);
        let Wait { left, cut } = hold.refusals.refused(retry_after, max_hold, before, sent, now)?;
        let before = before.unwrap_or_default();
        let lately = hold.told.is_some_and(|told| clock::after(told, TELL_AGAIN) > now);
        let tells = !lately || left > before.saturating_add(before / 10);
        if tells {
            hold.told = Some(now);
        }
        Some((Held { left, releases: hold.releases, cut }, tells))
    }

    /// A call that was sent at `sent` has passed. Returns whether that ends a probation: then others may leave, and the
    /// store is to be told.
    pub(in crate::limiter) fn accepted_upstream(&mut self, sent: Instant, now: Instant) -> bool {
        let Some(hold) = self.hold.as_mut().filter(|hold| hold.until <= now) else { return false };
        hold.refusals.passed(sent);
        let passed = hold.cut && hold.probe.is_some() && sent >= hold.until;
        if passed {
            (hold.cut, hold.probe) = (false, None);
        }
        if !hold.cut && !hold.refusals.is_waiting() {
            hold.uncertain = None;
        }
        passed
    }

    /// Whether the store is to be asked by one who is held: a release may have been missed. One asks for all.
    pub(in crate::limiter) fn asks_for_release(&mut self, now: Instant) -> bool {
        let Some(hold) = &mut self.hold else { return false };
        let asks = hold.heard.is_none_or(|heard| clock::after(heard, ASK_AGAIN) <= now);
        if asks {
            hold.heard = Some(now);
        }
        asks
    }

    /// For how long no request may leave; until then, the task is woken when that changes.
    pub(in crate::limiter) fn poll_hold(
        &mut self,
        number: Number,
        max_hold: Duration,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let left = self.blocked(max_hold, now)?;
        self.hold.as_mut()?.waiting.insert(number, cx.waker().clone());
        Some(left)
    }

    /// For how long no request may leave, for one that waits for other things too and is the probe only when it leaves. The
    /// task is woken when the key is held or released.
    pub(in crate::limiter) fn watch_hold(
        &mut self,
        number: Number,
        max_hold: Duration,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(now)));
        hold.waiting.insert(number, cx.waker().clone());
        self.waits(max_hold, now)
    }

    /// One waits for the end of the hold no more.
    pub(in crate::limiter) fn leave_hold(&mut self, number: Number) {
        if let Some(hold) = &mut self.hold {
            hold.waiting.remove(&number);
        }
    }

    /// A hold may have been missed, or a release.
    pub(in crate::limiter) fn doubt(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.heard = None;
        }
        if let Some(session) = &mut self.session {
            session.doubt();
        }
        self.refused = None;
    }
}
