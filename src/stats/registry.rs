//! All gates of this process.

use std::pin::Pin;
use std::ptr;
use std::sync::{Arc, Mutex, Weak};
#[cfg(feature = "metrics")]
use std::thread;
use std::time::{Duration, Instant};

#[cfg(feature = "metrics")]
use super::exporter::{is_noting, note_dropped};
use super::key_counts::KeyCounts;
#[cfg(feature = "metrics")]
use super::labelled_keys::WithKeys;
use super::tally::{Tally, Waiting};
use super::values::{Cause, KeyStats, Outcome, Stats};
use crate::error::{Limited, StoreError};
use crate::events;
use crate::key::{Key, Label};
use crate::locks::lock;

/// Completes when the store of a gate has what was given back.
pub(crate) type Flush = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

/// The engine of a gate: the core of a limiter or of a throttle.
pub(crate) trait Engine: Send + Sync {
    fn tally(&self) -> &Tally;

    /// Returns the name of `key` in events.
    fn label_of(&self, key: Key) -> Label;

    /// Visits the counts of `key`. Returns whether the key has state.
    fn visit_counts(&self, key: Key, visit: &mut dyn FnMut(&mut KeyCounts)) -> bool;

    /// Counts a request of `key` in the state of the key, or in the tally if the key has none.
    fn count(&self, key: Key, outcome: Outcome) {
        if !self.visit_counts(key, &mut |counts| counts.count(outcome)) {
            self.tally().count(outcome);
        }
    }

    /// Counts units of `key` in the state of the key, or in the tally if the key has none.
    fn add_units(&self, key: Key, units: u64) {
        if !self.visit_counts(key, &mut |counts| counts.add_units(units)) {
            self.tally().add_units(units);
        }
    }

    /// Subtracts units of a permit of `key` that was given back: in the state of the key as far as it has counted them.
    fn give_back_units(&self, key: Key, units: u64) {
        let mut elsewhere = units;
        self.visit_counts(key, &mut |counts| elsewhere = counts.give_back_units(units));
        self.given_back_elsewhere(key, elsewhere);
        self.tally().give_back(elsewhere);
    }

    /// Notes units of a permit of `key` that was given back, if they are counted for the key outside of its state.
    fn given_back_elsewhere(&self, _key: Key, _units: u64) {}

    /// Keeps the label of a key as its name, if it has none.
    fn note_label(&self, key: Key, label: &str) {
        self.visit_counts(key, &mut |counts| counts.note_label(label));
    }

    /// Counts a request that is refused, of `key` if it has one, and reports it.
    fn refused(&self, key: Option<Key>, limited: &Limited) {
        let outcome = self.tally().refusal(limited);
        let mut count = |counts: &mut KeyCounts| {
            counts.count(outcome);
            counts.note_label(limited.report().key());
        };
        if !key.is_some_and(|key| self.visit_counts(key, &mut count)) {
            self.tally().count(outcome);
        }
        events::limited(self.tally(), limited);
    }

    /// Returns whether `key` has no name that the user has given.
    fn is_unnamed(&self, key: Key) -> bool {
        let mut is_named = false;
        self.visit_counts(key, &mut |counts| is_named = counts.is_named());
        !is_named
    }

    fn stats(&self) -> Stats;

    /// Counts and reports that `key` is on hold for `left`.
    fn report_hold(&self, key: Key, left: Duration, cause: Cause) {
        self.tally().held(cause);
        self.tell_hold(key, left, cause);
    }

    /// Reports that `key` is on hold for `left`, which is counted already.
    fn tell_hold(&self, key: Key, left: Duration, cause: Cause) {
        events::held(self.tally(), &self.label_of(key), left, cause);
    }

    /// Returns the keys with state, and their units.
    fn in_use(&self) -> Vec<(Key, u64)>;

    /// Returns up to `most` keys: those with the most requests that wait, then those with the most units.
    fn busiest(&self, most: usize, waiting: &Waiting) -> Vec<Key> {
        let keys = self.in_use().into_iter();
        busiest_of(
            keys.map(|(key, units)| (waiting.of(key), units, key))
                .collect(),
            most,
        )
    }

    /// Returns the stats of a key. `None` if it has no state.
    fn key_stats(&self, key: Key, waiting: &Waiting) -> Option<KeyStats>;

    /// Returns the stats of the busiest keys.
    fn busiest_stats(&self, most: usize) -> Vec<KeyStats> {
        let waiting = self.tally().waiting_by_key();
        let keys = self.busiest(most, &waiting).into_iter();
        keys.filter_map(|key| self.key_stats(key, &waiting))
            .collect()
    }

    /// Returns the stats, and the series of the keys that have metrics of their own.
    #[cfg(feature = "metrics")]
    fn with_keys(&self) -> WithKeys {
        // The keys first: they have not counted more than the gate.
        let labelled = self.tally().labelled();
        let waiting = self.tally().waiting_by_key();
        let keys = labelled.read(
            |key| self.key_stats(key, &waiting),
            |most| self.busiest(most, &waiting),
        );
        (self.stats(), keys)
    }

    /// Returns how many calls are in flight, if the gate counts them.
    fn in_flight(&self) -> u64;

    /// Gives back what is at hand, and refuses the requests whose slot is later than `by`. Returns the
    /// units given back.
    fn stop(self: Arc<Self>, by: Instant) -> u64;

    /// Returns when the store has what was given back.
    fn flush(self: Arc<Self>) -> Flush;
}

fn busiest_of(mut all: Vec<(usize, u64, Key)>, most: usize) -> Vec<Key> {
    all.sort_unstable_by(|a, b| b.cmp(a));
    all.truncate(most);
    all.into_iter().map(|(_, _, key)| key).collect()
}

/// The gates, the oldest first.
static GATES: Mutex<Vec<Weak<dyn Engine>>> = Mutex::new(Vec::new());

/// Adds a gate, which calls [`unregister`] when it is dropped. Not one whose requests another gate counts, too.
pub(crate) fn register(gate: &Arc<impl Engine + 'static>) {
    if !gate.tally().is_second() {
        let gate = Arc::downgrade(gate);
        lock(&GATES).push(gate);
    }
}

/// Removes a gate that is being dropped, after an exporter has its last counts.
pub(crate) fn unregister(gate: &dyn Engine) {
    if gate.tally().is_second() {
        return;
    }
    // Also if a function of the user panics, such as one that names a key.
    let _removed = Removed(gate);
    #[cfg(feature = "metrics")]
    note_dropped(|| gate.with_keys());
}

/// Removes the gate when this is dropped.
struct Removed<'a>(&'a dyn Engine);

impl Drop for Removed<'_> {
    fn drop(&mut self) {
        lock(&GATES).retain(|gate| !ptr::addr_eq(gate.as_ptr(), self.0));
    }
}

/// Returns the gates that exist, the oldest first.
pub(super) fn all() -> Vec<Arc<dyn Engine>> {
    let gates = lock(&GATES);
    gates.iter().filter_map(Weak::upgrade).collect()
}

/// Returns the gates that exist, once no gate is being dropped: an exporter has the last counts of all others.
#[cfg(feature = "metrics")]
pub(crate) fn all_but_noted() -> Vec<Arc<dyn Engine>> {
    loop {
        // They are not dropped under the lock: each may be the last handle of its gate.
        let gates: Vec<_> = lock(&GATES).iter().map(Weak::upgrade).collect();
        // A thread that drops a gate would wait for itself.
        if gates.iter().all(Option::is_some) || is_noting() {
            return gates.into_iter().flatten().collect();
        }
        // Another thread is about to remove it.
        thread::yield_now();
    }
}
