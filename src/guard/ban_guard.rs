//! Counts bad answers, and stops keys that have too many.
//!
//! The bad answers of all processes count in a limiter of the guard's own, over the store of the gate.
//! Each takes a permit that is never waited for. If the limiter refuses one, the guard trips: it puts
//! the key under which it counts on hold, and with it each key of the gate that counts under it. The
//! store tells the other processes of the hold, whose guards do the same.
//!
//! A bad answer that gets no permit is charged: so all of them count. A limiter in memory counts the answers of
//! this process, too. While the store is away, it decides, and what it counts is charged when the store is
//! back.
//!
//! The guard never calls its gate, its limiter or the store while it holds a lock.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, OnceLock, Weak};
use std::time::{Duration, Instant};

use http::StatusCode;

use super::counted_keys::CountedKeys;
use super::stops::{NewStop, Stops};
use super::{Counts, Guard, KeyOf};
use crate::clock;
use crate::error::{Limited, Reason, StoreError};
use crate::guarded::{self, Guarded, Watch};
use crate::key::Key;
use crate::limiter::{CountedUnit, Limiter};
use crate::quota::Quota;
use crate::signal::Signal;
use crate::stats::{Cause, GuardStats};
use crate::store::{HoldState, Store, StoreEvent, StoreListener};

type MakeLimiter = Box<dyn FnOnce() -> Limiter + Send>;

/// Most keys of one stop for which a gate reports an event. All are counted.
const MOST_EVENTS: usize = 100;

pub(crate) struct BanGuard {
    counts: Arc<Counts>,
    key: Arc<KeyOf>,
    longest: Duration,
    quota: Quota,
    /// Counts the bad answers of all processes.
    all: Limiter,
    /// Counts those of this process, which decide while the store is away.
    alone: LazyLock<Limiter, MakeLimiter>,
    /// The gates that it stops: one, or one for each limit of a layer and each part of a divided quota.
    gates: OnceLock<Vec<Weak<dyn Guarded>>>,
    stops: Stops,
    /// The keys of the gates, by the keys under which they count.
    keys: CountedKeys,
    bad: AtomicU64,
    trips: AtomicU64,
}

/// A bad answer that is counted.
struct BadAnswer {
    gate: Weak<dyn Guarded>,
    /// The key of its request.
    key: Key,
    /// The key under which it counts.
    counted: Key,
    /// When its request was sent.
    sent: Instant,
}

impl BanGuard {
    /// Makes a guard that counts in `all`. While the store is away, it counts in the limiter that `alone`
    /// makes. It knows the stops of up to `max_keys` keys.
    pub(crate) fn new(
        guard: Guard,
        all: Limiter,
        alone: MakeLimiter,
        max_keys: usize,
    ) -> Arc<Self> {
        let Guard {
            quota,
            counts,
            key,
            first,
            longest,
        } = guard;
        guarded::note_any();
        Arc::new(BanGuard {
            counts,
            key,
            longest,
            quota,
            all,
            alone: LazyLock::new(alone),
            gates: OnceLock::new(),
            stops: Stops::new(first, longest, max_keys),
            keys: CountedKeys::default(),
            bad: AtomicU64::new(0),
            trips: AtomicU64::new(0),
        })
    }

    /// Guards `gates` from now on, and listens to the `store` for stops of other processes.
    pub(crate) fn guard(self: &Arc<Self>, gates: Vec<Weak<dyn Guarded>>, store: &dyn Store) {
        // A guard is built with its gates.
        let _ = self.gates.set(gates);
        let listener: Weak<dyn StoreListener> = Arc::downgrade(self) as _;
        store.listen(listener);
    }

    fn gates(&self) -> impl Iterator<Item = Arc<dyn Guarded>> {
        self.gates
            .get()
            .into_iter()
            .flatten()
            .filter_map(Weak::upgrade)
    }

    fn count(self: Arc<Self>, bad: BadAnswer) {
        match self.all.count(bad.counted) {
            CountedUnit::Now(outcome) => self.take_in(&bad, outcome),
            CountedUnit::Later(outcome) => {
                let all = self.all.clone();
                all.spawn(async move {
                    let outcome = outcome.await;
                    self.take_in(&bad, outcome);
                });
            }
        }
    }

    /// Takes in whether the quota allowed a bad answer.
    fn take_in(&self, bad: &BadAnswer, outcome: Result<(), Limited>) {
        // What this process has counted with the store counts while the store is away, too: otherwise an outage
        // would begin with a whole quota for each process.
        let alone = self.alone.count(bad.counted);
        let Err(limited) = outcome else { return };
        // What got no permit counts all the same, also once the store is back.
        self.all.charge(bad.counted);
        let is_over = match limited {
            Limited::Store { .. } => match &alone {
                CountedUnit::Now(Err(limited)) => is_used_up(limited),
                CountedUnit::Now(Ok(())) | CountedUnit::Later(_) => false,
            },
            Limited::Local {
                reason: Reason::Held,
                ..
            } => {
                // Another process has stopped the key, and this one has not been told yet.
                // The time to retry is that of a permit, which may be later.
                self.heard(bad.counted, self.all.held(bad.counted));
                false
            }
            limited => is_used_up(&limited),
        };
        if is_over {
            self.trip(bad);
        }
    }

    fn trip(&self, bad: &BadAnswer) {
        let (Some(gate), now) = (bad.gate.upgrade(), clock::now()) else {
            return;
        };
        let releases = self.all.held(bad.counted).releases;
        let stop = self.stops.trip(bad.counted, bad.sent, releases, now);
        let Some(NewStop { span, number }) = stop else {
            return;
        };
        self.trips.fetch_add(1, Ordering::Relaxed);
        // The guards of the other processes hear of the stop first, then their gates.
        self.all.hold(bad.counted, span);
        gate.clone().hold(bad.key, span);
        self.hold_all(bad.counted, span);
        // A function of the user takes this event, and may panic.
        gate.report(bad.key, &self.quota, span, number);
    }

    /// Holds the keys of all gates that count under `counted`. Counts and reports each that is new.
    fn hold_all(&self, counted: Key, span: Duration) {
        let keys = self.keys.under(counted);
        for gate in self.gates().filter(|_| !keys.is_empty()) {
            let own = keys.iter().map(|key| gate.own_key(*key));
            // All are on hold before a handler is told of the first: it may panic.
            let begun: Vec<Key> = own
                .filter(|key| gate.clone().hold_known(*key, span))
                .collect();
            for (index, key) in begun.into_iter().enumerate() {
                gate.tally().held(Cause::Guard);
                if index < MOST_EVENTS {
                    gate.tell_hold(key, span, Cause::Guard);
                }
            }
        }
    }

    /// Takes in that requests that count under `counted` are stopped.
    fn heard(&self, counted: Key, held: HoldState) {
        let now = clock::now();
        if !held.remaining.is_zero() && self.stops.heard(counted, held, now) {
            self.hold_all(counted, held.remaining);
        }
    }

    /// Asks the store about the stops in force, because their releases may have been missed. The gates find out by
    /// themselves, and their requests go on: then bad answers have to count again. A stop that was missed is heard of
    /// with the next bad answer.
    fn look_again(self: &Arc<Self>) {
        let mut stops = self.stops.in_force(clock::now());
        // The others are holds of keys under which no gate counts.
        stops.retain(|(counted, _)| !self.keys.under(*counted).is_empty());
        for (counted, releases) in stops {
            let guard = self.clone();
            self.all.spawn(async move {
                // A store that has lost its state knows of no release.
                if let Some(held) = guard.all.stored_hold(counted).await
                    && held.remaining.is_zero()
                    && held.releases > releases
                {
                    guard.released(counted);
                }
            });
        }
    }

    /// Ends the stop of the keys that count under `counted` in this process.
    fn released(&self, counted: Key) {
        if let Some(until) = self.stops.release(counted, clock::now()) {
            let keys = self.keys.under(counted);
            for gate in self.gates().filter(|_| !keys.is_empty()) {
                for key in &keys {
                    gate.clone().release_known(gate.own_key(*key), until);
                }
            }
        }
    }
}

/// Returns whether a bad answer was not counted because the quota is used up. Otherwise there is no room for its key, or
/// the limiter ends.
fn is_used_up(limited: &Limited) -> bool {
    matches!(limited.reason(), Some(Reason::MaxWait(_)))
}

impl Watch for BanGuard {
    fn is_bad(&self, status: StatusCode, signal: &Signal) -> bool {
        (self.counts)(status, signal)
    }

    fn answered(self: Arc<Self>, gate: Arc<dyn Guarded>, key: Key, sent: Instant) {
        self.bad.fetch_add(1, Ordering::Relaxed);
        let counted = self.counted(key);
        if self.stops.left(counted, clock::now()).is_some() {
            // It was on its way when the guard tripped.
            self.all.charge(counted);
            return;
        }
        let gate = Arc::downgrade(&gate);
        self.count(BadAnswer {
            gate,
            key,
            counted,
            sent,
        });
    }

    fn counted(&self, key: Key) -> Key {
        (self.key)(key).and("tollgate guard")
    }

    fn note_key(&self, counted: Key, key: Key) {
        self.keys.add(counted, key);
    }

    fn forget_key(&self, key: Key) {
        self.keys.remove(self.counted(key), key);
    }

    fn stopped_for(&self, counted: Key, now: Instant) -> Option<Duration> {
        self.stops.left(counted, now)
    }

    fn longest(&self) -> Duration {
        self.longest
    }

    fn release(
        self: Arc<Self>,
        key: Key,
    ) -> Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>> {
        let counted = self.counted(key);
        self.released(counted);
        Box::pin(async move { self.all.release(counted).await })
    }

    fn give_back(&self) {
        self.all.give_back();
    }

    fn stats(&self) -> GuardStats {
        GuardStats {
            bad: self.bad.load(Ordering::Relaxed),
            trips: self.trips.load(Ordering::Relaxed),
        }
    }
}

impl StoreListener for BanGuard {
    fn on_event(self: Arc<Self>, key: Key, _holder: u64, event: StoreEvent) {
        match event {
            StoreEvent::Hold(held) if held.remaining.is_zero() => self.released(key),
            StoreEvent::Hold(held) => self.heard(key, held),
            StoreEvent::EventsMissed | StoreEvent::Reconnected => self.look_again(),
            _ => {}
        }
    }
}
