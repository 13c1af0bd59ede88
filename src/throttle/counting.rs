//! What a throttle counts: requests by outcome, and the attempts that it lets leave.
//!
//! A request counts once, also if it is sent again after a refusal by the upstream. Each attempt is a
//! unit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::ThrottleCore;
use super::waiters::Waiters;
use crate::clock;
use crate::cost::Cost;
use crate::key::{Key, Label};
use crate::stats::{
    Engine, Flush, GateState, InFlightStats, KeyCounts, KeyStats, PaceStats, Stats, Tally, Waiting,
    unregister,
};

impl Engine for ThrottleCore {
    fn tally(&self) -> &Tally {
        &self.settings.tally
    }

    fn label_of(&self, key: Key) -> Label {
        self.label(key, None)
    }

    fn visit_counts(&self, key: Key, visit: &mut dyn FnMut(&mut KeyCounts)) -> bool {
        self.find(key, |waiters| visit(&mut waiters.counts))
            .is_some()
    }

    fn stats(&self) -> Stats {
        let now = clock::now();
        // Before the keys: see `Tally::counted`.
        let mut counted = self.tally().counted();
        let mut in_flight = InFlightStats::default();
        let mut gate = GateState {
            max_keys: self.settings.max_keys,
            guard: self.settings.guard.as_ref().map(|guard| guard.stats()),
            ..GateState::default()
        };
        self.keys.for_each(|_, waiters| {
            counted.add(&waiters.counts);
            gate.keys += 1;
            in_flight.in_use += waiters.queue.in_flight() as u64;
            gate.add_hold(held(waiters, now));
            let outlook = waiters.queue.outlook(now);
            // A key at rest makes no call that would find the store back.
            let is_used = outlook.waiting + outlook.in_flight > 0;
            gate.keys_alone += usize::from(outlook.is_alone && is_used);
            gate.pace = Some(PaceStats {
                per_second: (!outlook.interval.is_zero())
                    .then(|| outlook.interval.as_secs_f64().recip()),
                processes: outlook.processes,
            });
        });
        gate.in_flight = Some(in_flight);
        gate.pace = gate.pace.filter(|_| gate.keys == 1);
        self.tally().stats(counted, Cost::REQUESTS, gate, now)
    }

    fn in_use(&self) -> Vec<(Key, u64)> {
        let mut all = Vec::new();
        self.keys.for_each(|key, waiters| {
            all.push((key, waiters.counts.units()));
        });
        all
    }

    fn key_stats(&self, key: Key, waiting: &Waiting) -> Option<KeyStats> {
        let now = clock::now();
        self.find(key, |waiters| KeyStats {
            name: match waiters.counts.name() {
                Some(name) => name.into(),
                None => (*self.label(key, None)).into(),
            },
            counted: waiters.counts.counted(),
            waiting: waiting.of(key),
            held: held(waiters, now),
        })
    }

    fn in_flight(&self) -> u64 {
        let mut sum = 0;
        self.keys
            .for_each(|_, waiters| sum += waiters.queue.in_flight() as u64);
        sum
    }

    /// Nothing is at hand, and it is not known when turns come: the requests that wait end by themselves.
    fn stop(self: Arc<Self>, _by: Instant) -> u64 {
        0
    }

    fn flush(self: Arc<Self>) -> Flush {
        Box::pin(async move {
            if let Some(guard) = &self.settings.guard {
                guard.give_back();
            }
            match &self.settings.store {
                Some(store) => store.flush().arrives().await,
                None => Ok(()),
            }
        })
    }
}

impl Drop for ThrottleCore {
    fn drop(&mut self) {
        unregister(self);
    }
}

fn held(waiters: &Waiters, now: Instant) -> Option<Duration> {
    waiters.held(now).map(|held| held.left)
}
