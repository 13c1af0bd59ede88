//! The holds of the keys of a request, and of their hosts.

use std::task::Context;
use std::time::{Duration, Instant};

use super::{Request, Stage};
use crate::clock;
use crate::error::Reason;
use crate::key::Key;
use crate::limiter::holds::{self, HoldWait};
use crate::limiter::limited::Stopped;
use crate::limiter::part::Part;
use crate::limiter::probe::Probe;
use crate::store::Refusal;

/// A hold that stops a request.
pub(super) struct Held {
    left: Duration,
    pub(super) end: Instant,
    part: usize,
    key: Key,
}

impl Request {
    fn hold_keys(&self) -> impl Iterator<Item = (usize, &Part, Key)> {
        self.line.hold_keys(&self.place.costs)
    }

    /// Returns the hold that stops a request which enters, the one that ends last. If the process does not know of holds
    /// of a key, and no call for the request asks about them, another process may know: it asks.
    pub(super) fn find_hold(&self, now: Instant) -> Option<Held> {
        let holds = self.hold_keys().filter_map(|(index, part, key)| {
            let Part { core, host, .. } = part;
            let is_of_host = key != part.key;
            if let Some(host) = host.filter(|_| is_of_host) {
                core.hosts.notice(host);
            }
            let mut blocked = holds::blocked(core, key, now);
            if blocked.is_none() && (is_of_host || !core.has_rates()) {
                holds::inquire(core, key, now);
                blocked = holds::blocked(core, key, now);
            }
            Held::new(index, key, blocked??, now)
        });
        holds.max_by_key(|held| held.end)
    }

    /// Watches the holds of its keys. Returns the one that ends last.
    ///
    /// The states of several keys are kept while they are watched. Otherwise the state of one key could be evicted
    /// for that of another one, and the slots of both would never be known at one moment.
    pub(super) fn watch_holds(&mut self, now: Instant, cx: &Context<'_>) -> Option<Held> {
        let number = self.place.number;
        let keeps_state = self.line.has_place_on_hold();
        let mut is_any = false;
        let holds = self.hold_keys().filter_map(|(index, part, key)| {
            is_any = true;
            let left = holds::watch(&part.core, key, number, keeps_state, now, cx)?;
            Held::new(index, key, left, now)
        });
        let last = holds.max_by_key(|held| held.end);
        self.watches = is_any;
        last
    }

    pub(super) fn unwatch_holds(&self) {
        if self.watches {
            for (_, part, key) in self.hold_keys() {
                holds::leave(&part.core, key, self.place.number);
            }
        }
    }

    /// Refuses the request if it cannot wait for the end of a hold. One such request asks for a release that may have been
    /// missed.
    pub(super) fn waits_for(&self, held: &Held, now: Instant) -> Result<(), Stopped> {
        if held.end <= self.place.bound.latest {
            return Ok(());
        }
        holds::confirm(&self.parts()[held.part].core, held.key, now);
        let refusal = Refusal::new(Some(held.left), None);
        Err(Stopped::refused(held.part, Reason::Held, refusal))
    }

    /// Refuses the request if too many wait for the end of a hold.
    pub(super) fn check_room_on_hold(&self, held: &Held) -> Result<(), Stopped> {
        let Part { core, .. } = &self.parts()[held.part];
        let max_queue = core.settings.max_queue;
        if holds::waiting(core, held.key) < max_queue {
            return Ok(());
        }
        Err(Stopped::queue_full(held.part, max_queue))
    }

    /// Gives up all but the place in the line, because a key is on hold.
    pub(super) fn keep_place_only(&mut self, held: &Held, now: Instant) {
        self.waited_before = true;
        if self.line.has_place_on_hold() {
            if matches!(self.stage, Stage::InFlight { .. }) {
                self.leave(now);
                self.again(None, now);
            } else {
                self.give_up_in_flight_slots();
            }
        } else if !matches!(self.stage, Stage::Hold(_)) {
            self.leave(now);
            self.stage = Stage::Hold(HoldWait::new(held.end));
        }
    }

    /// Returns the probes that the request leaves as. `None` if a hold or a probe stops one of its keys.
    pub(super) fn pass_holds(&self, now: Instant) -> Option<Vec<Probe>> {
        let mut probes: Vec<Probe> = Vec::new();
        for (_, part, key) in self.hold_keys() {
            // Two keys may have the hold of one host.
            if probes.iter().any(|probe| probe.is_of(part.core.id, key)) {
                continue;
            }
            // If one stops it, the probes of the keys before are dropped.
            probes.extend(holds::pass(&part.core, key, now).ok()?);
        }
        Some(probes)
    }
}

impl Held {
    fn new(part: usize, key: Key, left: Duration, now: Instant) -> Option<Self> {
        Some(Held {
            left,
            end: clock::after(now, left),
            part,
            key,
        })
    }
}
