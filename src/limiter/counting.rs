//! What a limiter counts: requests by outcome, and the units of their permits.
//!
//! A request counts once. If it takes permits at hand, the state of its key counts it
//! ([`CountedAs`](super::reservation::CountedAs)). Otherwise it is counted where its outcome is known: in
//! [`wait::slow`](super::wait::slow) if it does not wait, else by [`Wait`](super::wait::Wait). A joint
//! request counts under its first key.
//!
//! Units count when a permit is made, for each of its keys. If the permit is given up unused, they are
//! subtracted.

use std::sync::Arc;
use std::time::Instant;

use super::engine::Core;
use super::key_state::KeyState;
use super::quotas::QuotaId;
use crate::clock;
use crate::events;
use crate::key::{Key, Label};
use crate::stats::{Engine, Flush, GateState, KeyCounts, KeyStats, Outcome, Stats, Tally, Waiting};

impl Engine for Core {
    fn tally(&self) -> &Tally {
        &self.settings.tally
    }

    fn label_of(&self, key: Key) -> Label {
        self.label(key, None)
    }

    fn visit_counts(&self, key: Key, visit: &mut dyn FnMut(&mut KeyCounts)) -> bool {
        self.states
            .find(key, |state| visit(&mut state.counts))
            .is_some()
    }

    fn stats(&self) -> Stats {
        let now = clock::now();
        // Before the keys: see `Tally::counted`.
        let mut counted = self.tally().counted();
        let settings = &self.settings;
        let has_quotas = settings.quotas.is_any();
        let mut gate = GateState {
            in_flight: self.in_flight.as_ref().map(|calls| calls.stats()),
            // A key that rests makes no call, from whose answer its state would learn that the store is back.
            keys_alone: (settings.fallback.as_ref()).map_or(0, |fallback| fallback.keys_alone()),
            max_keys: settings.max_keys,
            limits: settings.spec.quota().limits().to_vec(),
            guard: (settings.guard.as_ref())
                .filter(|_| settings.reports_guard)
                .map(|guard| guard.stats()),
            ..GateState::default()
        };
        self.states.for_each(|_, state| {
            counted.add(&state.counts);
            gate.keys += 1;
            gate.at_hand += u64::from(state.at_hand(now));
            gate.add_hold(state.hold.left(now));
            let has_set_quota = has_quotas && state.limits.is_set_by_operator();
            gate.keys_with_set_quota += usize::from(has_set_quota);
        });
        let (passed, units) = self.states.unlocked_counts();
        counted.add_passed(passed, units);
        self.tally().stats(counted, self.unit_name(), gate, now)
    }

    fn given_back_elsewhere(&self, key: Key, units: u64) {
        if key == Key::ALL {
            self.states.give_back_unlocked(units);
        }
    }

    fn in_use(&self) -> Vec<(Key, u64)> {
        let (_, unlocked_units) = self.states.unlocked_counts_of_state();
        let mut all = Vec::new();
        self.states.for_each(|key, state| {
            let unlocked = if key == Key::ALL { unlocked_units } else { 0 };
            all.push((key, state.counts.units() + unlocked));
        });
        all
    }

    fn key_stats(&self, key: Key, waiting: &Waiting) -> Option<KeyStats> {
        let now = clock::now();
        let (unlocked, unlocked_units) = match key {
            Key::ALL => self.states.unlocked_counts_of_state(),
            _ => (0, 0),
        };
        self.states.find(key, |state| {
            let mut counted = state.counts.counted();
            counted.add_passed(unlocked, unlocked_units);
            KeyStats {
                name: key_name(self, key, state),
                counted,
                waiting: waiting.of(key),
                held: state.hold.left(now),
            }
        })
    }

    fn in_flight(&self) -> u64 {
        let calls = self.in_flight.as_ref();
        calls.map_or(0, |calls| calls.stats().in_use)
    }

    fn stop(self: Arc<Self>, by: Instant) -> u64 {
        let now = clock::now();
        let mut keys = Vec::new();
        self.states.for_each(|key, _| keys.push(key));
        let given_back = keys
            .into_iter()
            .filter_map(|key| self.with_state(key, now, |state, ctx| state.stop(ctx, by)))
            .sum();
        self.joint.end_by(by);
        given_back
    }

    fn flush(self: Arc<Self>) -> Flush {
        Box::pin(async move { Core::flush(&self).await })
    }
}

/// Counts the request of `key` that got a slot of these `units` at once, on the slow path.
pub(super) fn passed(core: &Core, key: Key, units: u32) {
    let counted = core.states.find(key, |state| state.counts.pass(units));
    if counted.is_none() {
        core.tally().count(Outcome::Passed);
        core.tally().add_units(units.into());
    }
}

/// Notes a class that has no share, and reports it once. `core` counts the requests of all others.
#[cold]
pub(super) fn unknown_class(core: &Core, class: &str) {
    let tally = core.tally();
    if tally.classes().is_new(class) {
        events::unknown_class(tally, class);
    }
}

/// Notes whether a request of a layer without a class function has a class. Reports it once if none has.
#[inline]
pub(super) fn note_class(core: &Core, has_class: bool) {
    let tally = core.tally();
    if tally.classes().is_without(has_class) {
        events::no_class(tally);
    }
}

/// Gives `key` a name, unless it has one of `name`'s kind already.
pub(super) fn name_key(core: &Arc<Core>, key: Key, name: &str) {
    // If there is no room for one more key, its requests are refused.
    let _ = core.with_new_state(key, clock::now(), |state, _| state.counts.set_name(name));
}

/// Returns the name that the user gave to a key, else its label, and the route whose quota it has.
fn key_name(core: &Core, key: Key, state: &KeyState) -> Box<str> {
    if let Some(name) = state.counts.name() {
        return name.into();
    }
    label_with_route(core, key, state.limits.quota_id())
}

/// Returns the label of a key, and the route that has the `quota` of the key, if one has it.
pub(super) fn label_with_route(core: &Core, key: Key, quota: Option<QuotaId>) -> Box<str> {
    let label = core.label(key, None);
    match quota.and_then(|quota| core.settings.quotas.route(quota)) {
        Some(route) => format!("{label} {route}").into(),
        None => (*label).into(),
    }
}
