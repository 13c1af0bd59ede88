//! Holds of keys: what an upstream said to one call stops all others, here and wherever the store is shared.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::task::Context;
use std::time::{Duration, Instant};

use super::engine::{Gate, Limiter};
use super::key_state::{Desk, Learn, Line, is_any_uncertain, is_of_use};
use super::queue::Number;
use super::settings::Settings;
use crate::clock;
use crate::error::StoreError;
use crate::events;
use crate::key::Key;
use crate::limit::Terms;
use crate::signal::{Observed, Signal};
use crate::store::{Held, Listener};
use crate::wakers::Wakers;

/// Which gate a call came through. A call on its way keeps this number and no more: the gate is looked for only when the
/// upstream says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct GateId(u32);

static GATES: RwLock<BTreeMap<GateId, Weak<Gate>>> = RwLock::new(BTreeMap::new());

impl GateId {
    pub(super) fn next() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        GateId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    fn limiter(self) -> Option<Limiter> {
        GATES.read().unwrap_or_else(PoisonError::into_inner).get(&self).and_then(Weak::upgrade).map(Limiter)
    }

    /// Returns what errors and events call `key` at this gate.
    pub(super) fn label(self, key: Key) -> Box<str> {
        match self.limiter() {
            Some(limiter) => limiter.label(key, None),
            None => key.own_label(None),
        }
    }

    /// A call of `key` that came through this gate has been answered. A refusal holds the key `hold`.
    #[inline]
    pub(super) fn answered(self, key: Key, hold: Key, cost: u32, sent: Instant, signal: &Signal) {
        if signal.limited().is_some() || is_of_use(signal) || is_any_uncertain() {
            self.tell(key, hold, cost, sent, signal);
        }
    }

    #[cold]
    fn tell(self, key: Key, hold: Key, cost: u32, sent: Instant, signal: &Signal) {
        if let Some(limiter) = self.limiter() {
            limiter.upstream_answered(key, hold, cost, sent, signal);
        }
    }
}

impl Gate {
    /// From now on it is told what others do, and found by its number.
    pub(super) fn listen(self: &Arc<Self>) {
        GATES.write().unwrap_or_else(PoisonError::into_inner).insert(self.id, Arc::downgrade(self));
        let listener: Weak<dyn Listener> = Arc::downgrade(self) as _;
        self.settings.store.listen(listener);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        GATES.write().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

impl Limiter {
    /// Holds `key`: nothing is sent for so long, by any process that shares the store. It is what happens by itself when
    /// the upstream answers 429. A hold only ever ends later, unless it is [released](Limiter::release).
    ///
    /// Those who wait and cannot wait so long are refused at once, with
    /// [`Reason::Held`](crate::Reason::Held).
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Key, Quota, RateLimitLayer};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = RateLimitLayer::new(Quota::per_second(50))?.limiter();
    /// limiter.hold_for(Key::ALL, Duration::from_secs(60)).await?;
    /// let refused = limiter.acquire(Key::ALL).await.unwrap_err();
    /// assert_eq!(refused.report().retry_after().map(|wait| wait.as_secs_f64().round()), Some(60.0));
    ///
    /// limiter.release(Key::ALL).await?;
    /// assert!(limiter.acquire(Key::ALL).await.is_ok());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`StoreError`] when other processes may not know of it; in this one it holds.
    ///
    /// # Cancel safety
    ///
    /// Once polled, it holds.
    pub async fn hold_for(&self, key: Key, span: Duration) -> Result<(), StoreError> {
        let now = clock::now();
        let releases = self.0.lines.find(key, |line| line.releases()).unwrap_or(0);
        let held = Held { left: span.min(LONGEST_HOLD), releases, cut: false };
        self.set_hold(key, held, now);
        let held = self.0.settings.store.hold(key, &self.terms(key), held, None).arrives().await?;
        // It may have been released by others before, which was not known here.
        self.hold_heard(key, held);
        Ok(())
    }

    /// The same until a moment. One that has passed holds nothing.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when other processes may not know of it; in this one it holds.
    pub async fn hold_until(&self, key: Key, until: Instant) -> Result<(), StoreError> {
        match until.checked_duration_since(clock::now()) {
            Some(span) if !span.is_zero() => self.hold_for(key, span).await,
            _ => Ok(()),
        }
    }

    /// Ends the hold of `key`, for all processes that share the store.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when it may still hold.
    pub async fn release(&self, key: Key) -> Result<(), StoreError> {
        let held = self.0.settings.store.release(key, &self.terms(key)).arrives().await?;
        self.set_hold(key, held, clock::now());
        Ok(())
    }

    /// For how long `key` is held, as far as this process knows.
    pub(super) fn held(&self, key: Key, now: Instant) -> Option<Duration> {
        self.0.lines.find(key, |line| line.held(now)).flatten()
    }

    /// What holds `key` has changed.
    fn set_hold(&self, key: Key, held: Held, now: Instant) {
        // Without room for one more key, the next call learns it from the store.
        let _ = self.open_line(key, now, |line, desk, wakers| ((), line.hold(desk, held, true, wakers)));
    }

    /// Somebody else has held `key`, or released it: of use where there is anything to hold back, or the store is not
    /// asked.
    pub(super) fn hold_heard(&self, key: Key, held: Held) {
        let now = clock::now();
        let hear = |line: &mut Line, desk: &Desk<'_>, wakers: &mut Wakers| {
            ((), line.hold(desk, held, false, wakers))
        };
        let asks_nobody = self.0.settings.terms.quota().limits().is_empty() || self.0.hosts.are_any();
        if asks_nobody && !held.left.is_zero() {
            let _ = self.open_line(key, now, hear);
        } else {
            self.at_line(key, now, hear);
        }
    }

    /// Another process has heard that less is left.
    pub(super) fn less_heard(&self, key: Key, writes: u64) {
        self.at_line(key, clock::now(), |line, desk, wakers| ((), line.less_heard(desk, writes, wakers)));
    }

    /// What others held or released may have been missed, and the store may have forgotten what is held; or booked, if it is
    /// `reconnected`.
    pub(super) fn news_missed(&self, reconnected: bool, now: Instant) {
        let mut keys = Vec::new();
        self.0.lines.for_each(|key, line| {
            line.doubt();
            if line.held(now).is_some() || (reconnected && line.is_booked()) {
                keys.push(key);
            }
        });
        for key in keys {
            self.at_line(key, now, |line, desk, wakers| ((), line.confirm(desk, wakers)));
        }
    }

    /// For how long `key` is held; until then, the task is woken when that changes.
    pub(super) fn poll_hold(
        &self,
        key: Key,
        number: Number,
        now: Instant,
        cx: &Context<'_>,
    ) -> Option<Duration> {
        let max_hold = self.0.settings.max_hold;
        self.0.lines.find(key, |line| line.poll_hold(number, max_hold, now, cx)).flatten()
    }

    /// One waits for the end of the hold no more.
    pub(super) fn leave_hold(&self, key: Key, number: Number) {
        self.0.lines.find(key, |line| line.leave_hold(number));
    }

    fn upstream_answered(&self, key: Key, hold: Key, cost: u32, sent: Instant, signal: &Signal) {
        let (now, Settings { terms, learn, .. }) = (clock::now(), &self.0.settings);
        let limited = signal.limited().is_some();
        let refused = if limited { cost } else { 0 };
        let accepts = |line: &mut Line, desk: &Desk<'_>, wakers: &mut Wakers| {
            let passed = !limited && line.accepted_upstream(sent, now);
            (passed, if passed { line.hold_changed(desk, wakers) } else { None })
        };
        // Of several hosts under one key, each has quotas of its own.
        let learns = *learn != Learn::Nothing && !(hold != key && self.0.hosts.are_several());
        let held_apart = (hold != key).then(|| self.at_line(hold, now, accepts)).flatten();
        let passed = self.at_line(key, now, |line, desk, wakers| {
            let (passed, errand) = if hold == key { accepts(line, desk, wakers) } else { (false, None) };
            let mut is_less = false;
            if learns {
                line.learn(*learn, terms, signal, desk);
                // It is said of the limits that hold from now on.
                let learned = self.learned(line, now);
                let terms = learned.as_ref().unwrap_or(terms);
                is_less = line.upstream_said(terms, signal, refused, sent, now);
            }
            // A refusal holds the key, and is told with the hold.
            let tightens = is_less && (!limited || hold != key);
            let errand = if tightens { errand.or_else(|| line.tighten(desk, wakers)) } else { errand };
            (passed, errand)
        });
        if held_apart.or(passed) == Some(true) {
            // The probe has passed: the others may leave, in all processes. Nobody waits for the answer.
            drop(self.0.settings.store.release(hold, &self.terms(hold)));
        }
        let retry_after = if limited {
            signal.retry_after()
        } else {
            // It was said after the call was sent: where the answer took long, nobody knows how long after.
            let slow = now.saturating_duration_since(sent).saturating_sub(QUICK);
            used_up_for(signal).map(|span| span.saturating_sub(slow))
        };
        if limited || retry_after.is_some() {
            self.hold_by_signal(key, hold, signal, retry_after, sent, now);
        }
        self.at_line(key, now, |line, desk, wakers| ((), line.pass_on(desk, wakers)));
    }

    /// The upstream has refused a call of `key`, or will refuse the next. It holds `hold`, if it names no other scope.
    fn hold_by_signal(
        &self,
        key: Key,
        hold: Key,
        signal: &Signal,
        retry_after: Option<Duration>,
        sent: Instant,
        now: Instant,
    ) {
        let Settings { max_hold, store, on_scope, .. } = &self.0.settings;
        let scoped = signal.scope().zip(on_scope.as_ref()).map(|(scope, on_scope)| on_scope(key, scope));
        let Some(held_key) = scoped.unwrap_or(Some(hold)).filter(|_| !max_hold.is_zero()) else { return };
        let held = self.open_line(held_key, now, |line, desk, _| {
            let held = line.refused_upstream(retry_after, *max_hold, sent, now);
            let left = held.filter(|(_, tells)| *tells).and_then(|_| line.left(desk.terms, *max_hold, now));
            (held.map(|held| (held, left)), None)
        });
        if let Ok(Some(((held, tells), left))) = held {
            events::held(&self.label(held_key, None), held.left);
            if tells {
                // Another key may have other limits: they are not told.
                let terms = if held_key == key { self.terms(key) } else { Arc::new(Terms::none()) };
                // The store first: waiters ask it anew, and are to find what is left. Nobody waits for its answer but the
                // next call.
                drop(store.hold(held_key, &terms, held, left));
            }
            self.set_hold(held_key, held, now);
        }
    }
}

/// For how long the upstream says that there is nothing left, to a call that it still answered.
///
/// Only of a quota that is of all calls, whatever it counts: another may be of other calls than those of this key. And not
/// for so short that a whole second more or less would matter: the limit here knows better.
fn used_up_for(signal: &Signal) -> Option<Duration> {
    const LONG: Duration = Duration::from_secs(5);
    let used_up = signal.quotas().iter().filter(|quota| quota.remaining() == Some(0));
    let used_up = used_up.filter(|quota| quota.is_of_all_calls());
    used_up.filter_map(Observed::reset_after).max().filter(|reset_after| *reset_after >= LONG)
}

/// What takes no longer is said when it is heard.
const QUICK: Duration = Duration::from_millis(250);

/// Holds of more are cut to this: 366 days.
const LONGEST_HOLD: Duration = Duration::from_secs(366 * 86_400);
