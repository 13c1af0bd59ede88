//! The hold of a key: until when no request may leave, after a refusal by the upstream or by an operator.
//!
//! Permits at hand, and permits booked before its end, go back to the store. Waiters that cannot wait until its end are refused. The
//! other waiters get new slots, which a store that knows of the hold grants for the time after it.
//!
//! A hold that was cut to `max_hold` ends on probation: one request leaves as a probe, and the others once it has passed. If it is
//! refused, that is a new hold. If its response takes long, another probe follows.
//!
//! Three moments describe one end, by the evidence for it:
//!
//! | moment | means |
//! |---|---|
//! | `until` | the end, as far as this process knows; requests wait for it |
//! | `sure_until` | the part of it that this process saw itself or that the store returned; it is sent to the store |
//! | `known_until` | the part of it that the store knows of, at most; the rest is sent with the next call |

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use super::KeyState;
use super::context::KeyContext;
use super::refusal::{Refusals, SAME, Wait};
use crate::clock;
use crate::limiter::queue::{Gathering, Number};
use crate::quota::Limit;
use crate::store::HoldState;
use crate::wakers::Wakers;

pub(super) struct Holding {
    until: Instant,
    /// Until when it holds at least, by what this process saw or the store answered. A published message may have been on its way for
    /// long.
    sure_until: Instant,
    releases: u32,
    /// Whether it was cut: the upstream asked for longer.
    cut: bool,
    /// When the probe left, on probation.
    probe: Option<Instant>,
    /// Until when the store knows of it, at most.
    known_until: Instant,
    /// When it last changed. Answers to calls that were sent before may not know of it.
    since: Instant,
    /// When the store or another process last confirmed it; `None` if a message may have been missed.
    heard: Option<Instant>,
    /// When this process last sent a refusal to the store.
    told: Option<Instant>,
    /// Whether the store has lost it, so that it has to be sent again.
    retell: bool,
    /// The tasks that wait for nothing but its end.
    waiting: BTreeMap<Number, Waker>,
    refusals: Refusals,
    /// Set while a call that passes changes anything.
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

    /// Sets another end.
    fn set(&mut self, until: Instant, cut: bool) {
        (self.until, self.cut, self.probe) = (until, cut, None);
        if cut {
            self.uncertain.get_or_insert_with(Uncertain::new);
        }
    }
}

/// Whether requests may leave a key after a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Passage {
    /// All requests may.
    Open,
    /// One request may, as the probe.
    Probe,
    /// No request may until the probe has passed, or for this long.
    Probing(Duration),
}

/// The next call that passes matters: until then all responses are read.
#[derive(Debug)]
struct Uncertain;

/// How many there are in the process.
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

/// Returns whether responses other than refusals matter to any key.
#[inline]
pub(in crate::limiter) fn is_any_uncertain() -> bool {
    UNCERTAIN.load(Ordering::Relaxed) > 0
}

/// The shortest time between two refusals that this process sends to the store, unless the hold is longer by a tenth.
const TELL_AGAIN: Duration = Duration::from_secs(1);

/// A probe whose response takes longer is followed by another.
const PROBE: Duration = Duration::from_secs(5);

/// The longest probation, and no longer than `max_hold`.
const LONGEST_PROBATION: Duration = Duration::from_secs(60);

/// How often the store is asked for a release while requests come.
pub(super) const ASK_AGAIN: Duration = Duration::from_secs(1);

impl KeyState {
    /// Returns for how long the key is on hold.
    pub(in crate::limiter) fn held(&self, now: Instant) -> Option<Duration> {
        let until = self.hold.as_ref()?.until;
        (until > now).then(|| until - now)
    }

    /// Returns until when the hold matters.
    pub(super) fn hold_matters_until(&self) -> Option<Instant> {
        let hold = self.hold.as_ref()?;
        let probation = if hold.cut { LONGEST_PROBATION } else { Duration::ZERO };
        Some(clock::after(hold.until, hold.refusals.matters_for().max(probation)))
    }

    /// Returns whether requests may leave, if the key is not on hold.
    pub(super) fn passage(&self, max_hold: Duration, now: Instant) -> Passage {
        let Some(hold) = self.hold.as_ref().filter(|hold| hold.cut) else { return Passage::Open };
        if clock::after(hold.until, LONGEST_PROBATION.min(max_hold)) <= now {
            return Passage::Open;
        }
        let next = hold.probe.map(|left| clock::after(left, PROBE)).filter(|next| *next > now);
        next.map_or(Passage::Probe, |next| Passage::Probing(next - now))
    }

    /// Notes that the probe leaves now.
    pub(super) fn probe_leaves(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            hold.probe = Some(now);
        }
    }

    /// Notes that a permit came back unused. If it was the probe's, another request may be the probe.
    pub(super) fn probe_comes_back(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.probe = None;
        }
    }

    /// Returns for how long no request may leave, because of a hold or a probe. A request that may leave on probation is the probe.
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

    /// Returns for how long no request may leave, because of a hold or a probe. The next request may be the probe.
    pub(in crate::limiter) fn waits(&self, max_hold: Duration, now: Instant) -> Option<Duration> {
        self.held(now).or_else(|| match self.passage(max_hold, now) {
            Passage::Open | Passage::Probe => None,
            Passage::Probing(left) => Some(left),
        })
    }

    /// Returns whether all requests may leave, without a probe.
    pub(in crate::limiter) fn is_clear(&self, max_hold: Duration, now: Instant) -> bool {
        self.hold.is_none() || self.held(now).is_none() && self.passage(max_hold, now) == Passage::Open
    }

    /// Returns how many tasks wait for nothing but the end of the hold.
    pub(in crate::limiter) fn waiting_for_hold(&self) -> usize {
        self.hold.as_ref().map_or(0, |hold| hold.waiting.len())
    }

    /// Returns the hold for the store, as far as the store may not know of it.
    pub(super) fn held_for_store(&self, now: Instant) -> HoldState {
        let Some(hold) = &self.hold else { return HoldState::default() };
        // Otherwise each call would move it by the difference of the trips. The ledger of a process on its own knows of no hold.
        let is_news = self.alone || hold.sure_until > clock::after(hold.known_until, SAME);
        let left = if is_news { hold.sure_until.saturating_duration_since(now) } else { Duration::ZERO };
        HoldState { remaining: left, releases: hold.releases, cut: hold.cut }
    }

    /// Takes in the hold that the store answered to a call sent at `sent`. Its time lay between the two moments. Returns `false` if
    /// the store decided before a release that this process knows of.
    pub(super) fn hold_answered(
        &mut self,
        held: HoldState,
        sent: Instant,
        (earliest, latest): (Instant, Instant),
    ) -> bool {
        if self.hold.is_none() && held.is_none() {
            return true;
        }
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(sent)));
        let least = clock::after(earliest, held.remaining);
        // A hold that is over ended before, not when the answer came: the task being served asked the time earlier.
        let most = if held.remaining.is_zero() { least } else { clock::after(latest, held.remaining) };
        if held.releases < hold.releases {
            return sent >= hold.since;
        }
        hold.heard = Some(latest);
        hold.known_until = most;
        if held.releases > hold.releases {
            (hold.sure_until, hold.releases, hold.since) = (least, held.releases, sent);
            hold.set(most, held.cut);
            return true;
        }
        hold.sure_until = hold.sure_until.max(least);
        let cut = if held.remaining.is_zero() { hold.cut } else { held.cut };
        if sent < hold.since {
            hold.until = hold.until.max(most);
        } else if hold.sure_until <= clock::after(most, SAME) {
            hold.sure_until = hold.sure_until.min(most);
            if cut != hold.cut {
                hold.set(most, cut);
            }
            hold.until = most;
        } else {
            // The store has lost it.
            hold.until = hold.sure_until;
        }
        true
    }

    /// Takes in a hold that this process saw (`sure`) or that was published. Returns whether that changes anything.
    fn adopt(&mut self, held: HoldState, now: Instant, sure: bool) -> bool {
        let hold = self.hold.get_or_insert_with(|| Box::new(Holding::new(now)));
        let until = clock::after(now, held.remaining);
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

    /// Puts the key on hold, or releases it.
    pub(in crate::limiter) fn hold(&mut self, ctx: &mut KeyContext<'_>, held: HoldState, sure: bool) {
        if self.adopt(held, ctx.now, sure) {
            self.hold_changed(ctx);
        }
    }

    /// The hold has changed: gives up permits that may not be used any more, and goes on with the others.
    pub(in crate::limiter) fn hold_changed(&mut self, ctx: &mut KeyContext<'_>) {
        self.refused = None;
        if let Some(hold) = &mut self.hold {
            ctx.work.wakers.add(std::mem::take(&mut hold.waiting).into_values());
        }
        self.obey(ctx.now, &mut ctx.work.wakers);
        let is_held = self.held(ctx.now).is_some();
        if let Some(queue) = &mut self.queue {
            // Later bookings go as well, so that all is booked anew when it ends, by what is allowed then. Not for paced quotas: a bucket
            // in which other processes have slots cannot take single ones back.
            let is_paced = |limit: &Limit| matches!(limit, Limit::Bucket { .. });
            if !is_held || !ctx.spec.quota().limits().iter().any(is_paced) {
                queue.give_up_slots();
            }
            // No task waits for its end any more.
            if !is_held && queue.gathering == Gathering::UnderWay {
                queue.gathering = Gathering::Done;
            }
        }
        self.step(ctx, None);
        self.close(ctx);
    }

    /// Asks the store to confirm the hold and the bookings, even if no request waits. A store that came back with an older state grants
    /// booked slots to other processes until it is asked.
    pub(in crate::limiter) fn confirm(&mut self, ctx: &mut KeyContext<'_>) {
        let is_at_stake = self.held(ctx.now).is_some() || self.is_booked();
        if self.later && is_at_stake {
            self.inquire(ctx);
        }
    }

    /// Returns whether slots are booked ahead.
    pub(in crate::limiter) fn is_booked(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.last_booked().is_some())
    }

    /// Returns whether the key is on hold and a release may have been missed.
    pub(super) fn doubts_hold(&self, now: Instant) -> bool {
        let is_doubted = self.hold.as_ref().is_some_and(|hold| hold.heard.is_none());
        is_doubted && self.held(now).is_some()
    }

    /// The store has lost its state, and the hold with it.
    pub(super) fn hold_forgotten(&mut self, now: Instant) {
        if let Some(hold) = &mut self.hold {
            (hold.sure_until, hold.known_until, hold.retell) = (hold.until, now, true);
        }
    }

    /// Sends the hold to a store that lost its state, before a process that does not know the hold calls it.
    pub(super) fn retell_hold(&mut self, ctx: &mut KeyContext<'_>) {
        let retell = self.hold.as_mut().is_some_and(|hold| std::mem::take(&mut hold.retell));
        if retell {
            self.confirm(ctx);
        }
    }

    /// Gives back permits at hand, and permits booked before the end of the hold.
    pub(super) fn obey(&mut self, now: Instant, wakers: &mut Wakers) {
        let Some(left) = self.held(now) else { return };
        // The session takes off what goes back with the next call.
        let unused = self.prefetched.clear();
        let queue = self.queue.get_or_insert_default();
        queue.returns.extend(unused);
        queue.withdraw(clock::after(now, left), now, wakers);
    }

    /// Returns how often holds were released.
    pub(in crate::limiter) fn releases(&self) -> u32 {
        self.hold.as_ref().map_or(0, |hold| hold.releases)
    }

    /// Takes in a refusal of a request that was sent at `sent`. Returns the hold that follows, if it is longer than the present one, and
    /// whether the store has to be told.
    pub(in crate::limiter) fn refused_upstream(
        &mut self,
        retry_after: Option<Duration>,
        max_hold: Duration,
        sent: Instant,
        now: Instant,
    ) -> Option<(HoldState, bool)> {
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
        Some((HoldState { remaining: left, releases: hold.releases, cut }, tells))
    }

    /// Takes in that a request passed that was sent at `sent`. Returns whether that ends a probation: then other requests may leave, and
    /// the store has to be told.
    pub(in crate::limiter) fn accepted_upstream(&mut self, sent: Instant, now: Instant) -> bool {
        let Some(hold) = self.hold.as_mut().filter(|hold| hold.until <= now) else { return false };
        hold.refusals.passed(sent);
        // The permit of a probe may be used although another one that came back was taken for it.
        let passed = hold.cut && sent >= hold.until;
        if passed {
            (hold.cut, hold.probe) = (false, None);
        }
        if !hold.cut && !hold.refusals.is_waiting() {
            hold.uncertain = None;
        }
        passed
    }

    /// Returns whether a request that is held asks the store, since a release may have been missed. One request asks for all.
    pub(in crate::limiter) fn asks_for_release(&mut self, now: Instant) -> bool {
        let Some(hold) = &mut self.hold else { return false };
        let asks = hold.heard.is_none_or(|heard| clock::after(heard, ASK_AGAIN) <= now);
        if asks {
            hold.heard = Some(now);
        }
        asks
    }

    /// Returns for how long no request may leave. The task is woken when that changes.
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

    /// Returns for how long no request may leave, for a waiter that also waits for other things, and is the probe only when it leaves.
    /// The task is woken when the key is put on hold or released.
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

    /// Removes a task that waits for the end of the hold.
    pub(in crate::limiter) fn leave_hold(&mut self, number: Number) {
        if let Some(hold) = &mut self.hold {
            hold.waiting.remove(&number);
        }
    }

    /// Notes that a hold or a release may have been missed.
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
