//! The holds of the keys of a request, and of their hosts.

use std::task::Context;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::{Request, WaitStage};
use crate::clock::{self, Timer};
use crate::error::Reason;
use crate::key::Key;
use crate::limiter::holds::{self, Probe};
use crate::limiter::part::{Part, PartRef};
use crate::limiter::reservation::{NoSlot, Stopped};
use crate::store::Refusal;
use crate::suspicion::{Suspicion, is_any_suspected};

/// The kind of a request, of which a key is under [suspicion](crate::suspicion).
#[derive(Debug)]
pub(crate) struct Suspect {
    pub(crate) kind: Key,
    /// For each of its parts under suspicion, the key that has the holds of the kind.
    pub(super) holds: Vec<(usize, Key)>,
}

impl Suspect {
    /// Returns the kind of the request with these parts, if one of them is under suspicion.
    #[inline]
    pub(crate) fn find(parts: &[PartRef<'_>], kind: impl FnOnce() -> Key) -> Option<Box<Self>> {
        match is_any_suspected() {
            true => Suspect::find_slow(parts, kind),
            false => None,
        }
    }

    #[cold]
    fn find_slow(parts: &[PartRef<'_>], kind: impl FnOnce() -> Key) -> Option<Box<Self>> {
        let mut holds: Vec<(usize, Key)> = Vec::new();
        for (index, PartRef { core, entry }) in parts.iter().enumerate() {
            if entry.cost == 0 {
                continue;
            }
            let key = core.hold_key(entry.key, entry.host);
            let suspected = core
                .states
                .find(key, |state| state.hold.suspicion().is_some());
            if suspected == Some(true) {
                holds.push((index, key));
            }
        }
        if holds.is_empty() {
            return None;
        }
        let kind = kind();
        for (_, key) in &mut holds {
            *key = key.of_kind(kind);
        }
        Some(Box::new(Suspect { kind, holds }))
    }

    /// Returns whether this process knows that no hold of the kind stops the request.
    pub(crate) fn is_clear(&self, parts: &[PartRef<'_>]) -> bool {
        let now = clock::now();
        self.holds.iter().all(|(index, key)| {
            let core = parts[*index].core;
            let max_hold = core.settings.max_hold;
            let known = core
                .states
                .find(*key, |state| state.hold.is_clear(max_hold, now));
            // Another process may hold the kind.
            let is_shared = core.settings.shared_store.background().is_some();
            known.unwrap_or(!is_shared)
        })
    }

    pub(super) fn is_hold(&self, key: Key) -> bool {
        self.holds.iter().any(|(_, hold)| *hold == key)
    }
}

/// A hold that stops a request.
pub(super) struct KeyOnHold {
    left: Duration,
    pub(super) end: Instant,
    part: usize,
    key: Key,
}

impl Request {
    /// Returns the keys whose holds stop the request, those that it costs something of, each with its part: those of its
    /// kind, the keys themselves, unless their line `obeys` the hold, and those of hosts.
    // As an iterator, it would be 8,000 lines of LLVM more.
    fn hold_keys(&self, obeys: bool) -> SmallVec<[(usize, &Part, Key); 4]> {
        let parts = self.parts();
        let mut keys = SmallVec::new();
        if let Some(suspect) = &self.suspect {
            for (index, key) in &suspect.holds {
                keys.push((*index, &parts[*index], *key));
            }
        }
        for (index, (part, cost)) in parts.iter().zip(&self.place.costs).enumerate() {
            if *cost == 0 {
                continue;
            }
            if !obeys {
                keys.push((index, part, part.key));
            }
            if let Some(host) = part.host_hold() {
                keys.push((index, part, host));
            }
        }
        keys
    }

    /// Returns whether its line obeys the hold of the key for the request: once it is in the queue of the key.
    fn is_held_in_line(&self) -> bool {
        let is_in_queue = self.in_flight.is_empty() || matches!(self.stage, WaitStage::Slots);
        self.line.obeys_hold() && is_in_queue
    }

    /// Returns the hold that stops a request which enters, the one that ends last. Of a key without a state, another process
    /// may know a hold. If no call for the request will tell, the store is asked.
    pub(super) fn find_hold(&self, now: Instant) -> Option<KeyOnHold> {
        let keys = self.hold_keys(self.is_held_in_line());
        let holds = keys.into_iter().filter_map(|(index, part, key)| {
            let Part { core, host, .. } = part;
            let is_of_queue = key == part.key;
            if let Some(host) = host.filter(|_| part.host_hold() == Some(key)) {
                core.hosts.notice(host);
            }
            let mut blocked = holds::blocked(core, key, now);
            let asks = match self.is_of_kind(key) {
                true => part.is_remote() && self.may_ask_about_kind(part),
                false => !is_of_queue || !core.has_rates(),
            };
            if blocked.is_none() && asks {
                holds::inquire(core, key, now);
                blocked = holds::blocked(core, key, now);
            }
            Some(KeyOnHold::new(index, key, blocked??, now))
        });
        holds.max_by_key(|held| held.end)
    }

    /// Returns how long the request has to wait for the end of a hold.
    pub(in crate::limiter) fn held(&self, now: Instant) -> Option<Duration> {
        let keys = self.hold_keys(false).into_iter();
        keys.filter_map(|(_, part, key)| part.core.held(key, now))
            .max()
    }

    /// Watches the holds of its keys. Returns the one that ends last.
    ///
    /// The states of several keys are kept while they are watched. Otherwise the state of one key could be evicted
    /// for that of another one, and the slots of both would never be known at one moment.
    pub(super) fn watch_holds(&mut self, now: Instant, cx: &Context<'_>) -> Option<KeyOnHold> {
        let number = self.place.number;
        let keeps_state = self.line.has_place_on_hold();
        let mut is_any = false;
        let keys = self.hold_keys(self.is_held_in_line());
        let holds = keys.into_iter().filter_map(|(index, part, key)| {
            is_any = true;
            let left = holds::watch(&part.core, key, number, keeps_state, now, cx)?;
            Some(KeyOnHold::new(index, key, left, now))
        });
        let last = holds.max_by_key(|held| held.end);
        self.watches |= is_any;
        last
    }

    pub(super) fn unwatch_holds(&self) {
        if self.watches {
            for (_, part, key) in self.hold_keys(false) {
                holds::leave(&part.core, key, self.place.number);
            }
        }
    }

    /// Refuses the request if it cannot wait for the end of a hold. One such request asks for a release that may have been
    /// missed. For the response to a probe, which may arrive at any time, it waits as long as it can.
    pub(super) fn waits_for(&self, held: &mut KeyOnHold, now: Instant) -> Result<(), Stopped> {
        let bound = self.place.bound;
        if held.end <= bound.latest {
            return Ok(());
        }
        let core = &self.parts()[held.part].core;
        let left = core.stated_hold(held.key, now).unwrap_or(held.left);
        let refusal = Refusal::new(Some(left), None);
        if core.held(held.key, now).is_none() {
            if let Some(latest) = bound.patience_ends(now) {
                held.end = latest;
                return Ok(());
            }
            let reason = match self.is_of_kind(held.key) {
                true => Reason::HeldKind,
                false => bound.reason(),
            };
            return Err(NoSlot::Refused(reason, refusal).for_part(held.part));
        }
        holds::confirm(core, held.key, now);
        // A guard that stops the key stops its kinds, too.
        let Part { key, host, .. } = &self.parts()[held.part];
        let whole = core.hold_key(*key, *host);
        let reason = match self.is_of_kind(held.key) && core.held(whole, now).is_none() {
            true => Reason::HeldKind,
            false => core.hold_reason(held.key, now),
        };
        Err(NoSlot::Refused(reason, refusal).for_part(held.part))
    }

    /// Returns whether the store may be asked about the hold of its kind: not of ever new ones.
    fn may_ask_about_kind(&self, part: &Part) -> bool {
        let Part { core, key, host } = part;
        let may = core.states.find(core.hold_key(*key, *host), |state| {
            let suspicion = state.hold.suspicion_mut();
            suspicion.is_some_and(Suspicion::may_ask)
        });
        may == Some(true)
    }

    /// Returns whether `key` has the holds of its kind.
    fn is_of_kind(&self, key: Key) -> bool {
        let suspect = self.suspect.as_ref();
        suspect.is_some_and(|suspect| suspect.is_hold(key))
    }

    /// Refuses the request if too many wait for the end of a hold.
    pub(super) fn check_room_on_hold(&self, held: &KeyOnHold) -> Result<(), Stopped> {
        let Part { core, .. } = &self.parts()[held.part];
        let max_queue = core.settings.max_queue;
        if holds::waiting(core, held.key) < max_queue {
            return Ok(());
        }
        Err(NoSlot::queue_full(max_queue).for_part(held.part))
    }

    /// Gives up all but the place in the line, because a key is on hold.
    pub(super) fn keep_place_only(&mut self, held: &KeyOnHold, now: Instant) {
        self.waited_before = true;
        if self.line.has_place_on_hold() {
            if matches!(self.stage, WaitStage::InFlight { .. }) {
                self.leave(now);
                self.again(None, now);
            } else {
                self.give_up_in_flight_slots();
            }
        } else if !matches!(self.stage, WaitStage::Hold(_)) {
            self.leave(now);
            self.stage = WaitStage::Hold(Timer::at(held.end));
        }
    }

    /// Returns the probes that the request leaves as. `None` if a hold or a probe stops one of its keys.
    pub(super) fn pass_holds(&self, now: Instant) -> Option<Vec<Probe>> {
        let mut probes: Vec<Probe> = Vec::new();
        for (_, part, key) in self.hold_keys(self.line.obeys_hold()) {
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

impl KeyOnHold {
    fn new(part: usize, key: Key, left: Duration, now: Instant) -> Self {
        KeyOnHold {
            left,
            end: clock::after(now, left),
            part,
            key,
        }
    }
}
