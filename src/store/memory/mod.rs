//! Counts in this process: the default store.

mod booking;
mod in_flight;
#[cfg(test)]
mod set_quota_properties;

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::event::{StoreListeners, notify};
use super::register::Registers;
use super::{
    Change, Claim, InForce, Lease, LeaseRequest, PeekRequest, Recipients, Register,
    RegisterRequest, Store, StoreError, StoreEvent, StoreListener, StoreReply, Usage,
};
use crate::clock;
use crate::key::Key;
use crate::key_map::{Evict, Full, KeyMap};
use crate::limit::{
    ChangeKind, Ledger, LimitSpec, Micros, QuotaChange, StoredHold, UnusedPermits, micros_down,
};
use booking::held;
pub(super) use booking::{book, hold, usage};
use in_flight::InFlightState;

/// Counts permits in this process.
///
/// The store holds at most `max_keys` keys. It drops a key once the limits of the key have
/// forgotten all use. If no key can be dropped, the store refuses a new key with
/// [`StoreError::Full`]. To find a key to drop, a call looks at no more than 64 keys. So if very
/// few of many keys can be dropped, the store may refuse a new key as well.
///
/// Layers that share one store share the counts of equal keys.
///
/// ```
/// # fn main() -> Result<(), tollgate::ConfigError> {
/// use std::sync::Arc;
/// use tollgate::{store::MemoryStore, Quota, RateLimitLayer};
///
/// let store = Arc::new(MemoryStore::new(1_000_000));
/// let limit = RateLimitLayer::builder(Quota::per_hour(5000)).store(store).build()?;
/// # Ok(())
/// # }
/// ```
pub struct MemoryStore {
    /// The ledgers of limits of rate.
    counts: KeyMap<KeyLedger>,
    /// The calls in flight.
    in_flight: KeyMap<InFlightState>,
    registers: Registers,
    listeners: StoreListeners,
    max_keys: usize,
}

impl MemoryStore {
    /// The default of `max_keys`.
    pub(crate) const DEFAULT_MAX_KEYS: usize = 100_000;

    /// Makes a store for at most `max_keys` keys that are limited at the same time. Default:
    /// 100,000.
    ///
    /// A key in use takes about 160 bytes, and up to 4 kB under a limit of 100 or more that is used
    /// up.
    pub fn new(max_keys: usize) -> Self {
        MemoryStore {
            counts: KeyMap::new(max_keys),
            in_flight: KeyMap::new(max_keys),
            registers: Registers::new(max_keys),
            listeners: StoreListeners::default(),
            max_keys,
        }
    }

    /// Runs `with` on the ledger of a key at `now`. Makes the ledger if there is none.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`] if there is no room for one more key.
    fn with<R>(
        &self,
        key: Key,
        spec: &LimitSpec,
        now: Micros,
        with: impl FnOnce(&mut Ledger, Micros) -> R,
    ) -> Result<R, StoreError> {
        self.enter(
            key,
            now,
            || Ledger::new(spec, now),
            |counts| counts.with(spec, now, with),
        )
    }

    /// Runs `with` on the ledger of a key as it is. Makes the ledger with `make` if there is none.
    ///
    /// # Errors
    ///
    /// [`StoreError::Full`] if there is no room for one more key.
    fn enter<R>(
        &self,
        key: Key,
        now: Micros,
        make: impl FnOnce() -> Ledger,
        with: impl FnOnce(&mut KeyLedger) -> R,
    ) -> Result<R, StoreError> {
        self.counts
            .enter(key, now, || KeyLedger::new(make()), |_, _| (), with)
            .map_err(|Full| self.full())
    }

    /// Returns the error of a call for one more key than there is room for.
    fn full(&self) -> StoreError {
        StoreError::Full {
            max_keys: self.max_keys,
        }
    }

    /// Changes the set quota of `key`, and notifies all listeners if it is another one then.
    fn change_quota(
        &self,
        key: Key,
        spec: &LimitSpec,
        kind: ChangeKind,
        life: Duration,
    ) -> Result<InForce, StoreError> {
        let now = clock::micros(clock::now());
        // The state of a key is not lost before its version is forgotten, so any version will do that
        // is larger than the last one.
        let change = QuotaChange {
            kind,
            life,
            above: 0,
        };
        let (before, in_force) = self.enter(
            key,
            now,
            || Ledger::empty(now),
            |counts| {
                counts.align(spec, now);
                let before = counts.ledger.quota_version();
                counts.ledger.change_quota(spec, change, now);
                counts.fresh_from = counts.ledger.fresh_from();
                let hold = held(counts.ledger.hold(StoredHold::default()), now);
                (before, InForce::new(hold, counts.ledger.quota_unless(0)))
            },
        )?;
        if let Some(quota) = &in_force.set_quota
            && before != quota.version
        {
            let event = StoreEvent::SetQuota(Box::new(quota.clone()));
            self.listeners.notify_all(key, &event);
        }
        Ok(in_force)
    }

    /// Changes the hold of `key`, and notifies all listeners.
    fn change_hold(
        &self,
        key: Key,
        spec: &LimitSpec,
        change: impl FnOnce(&mut Ledger, Micros) -> StoredHold,
    ) -> Result<InForce, StoreError> {
        let now = clock::micros(clock::now());
        let held = self.with(key, spec, now, |ledger, now| held(change(ledger, now), now))?;
        self.listeners.notify_all(key, &StoreEvent::Hold(held));
        Ok(InForce::new(held, None))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore::new(MemoryStore::DEFAULT_MAX_KEYS)
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore")
            .field("max_keys", &self.max_keys)
            .finish_non_exhaustive()
    }
}

/// The ledger of a key, which follows the wall clock, and sleeps of the machine.
#[derive(Clone)]
pub(super) struct KeyLedger {
    /// When the ledger can be dropped. A copy of a value of the ledger, so that a search for a
    /// ledger to drop reads no ledger.
    fresh_from: Micros,
    ledger: Box<Ledger>,
}

impl KeyLedger {
    pub(super) fn new(ledger: Ledger) -> Self {
        KeyLedger {
            fresh_from: 0,
            ledger: Box::new(ledger),
        }
    }

    /// Moves the boundaries of fixed windows to the wall clock. A set quota may have some that `spec`
    /// does not have.
    fn align(&mut self, spec: &LimitSpec, now: Micros) {
        if spec.quota().has_fixed_window() || self.ledger.has_set_quota() {
            self.ledger
                .align(clock::wall_ahead_lately(clock::now()), now);
        }
    }

    /// Runs `with` on the ledger at `now`, under `spec`.
    pub(super) fn with<R>(
        &mut self,
        spec: &LimitSpec,
        now: Micros,
        with: impl FnOnce(&mut Ledger, Micros) -> R,
    ) -> R {
        self.align(spec, now);
        let now = self.ledger.advance(spec, now);
        self.ledger.wake(|| micros_down(clock::slept_lately()));
        let done = with(&mut self.ledger, now);
        self.fresh_from = self.ledger.fresh_from();
        done
    }
}

impl Evict for KeyLedger {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        Some(self.fresh_from)
    }
}

impl Store for MemoryStore {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let now = clock::micros(clock::now());
        StoreReply::Ready(self.with(request.key, request.spec, now, |ledger, now| {
            book(ledger, now, &request)
        }))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        let now = clock::micros(clock::now());
        self.counts.find(key, |counts| {
            counts.with(spec, now, |ledger, _| {
                for unused in unused {
                    ledger.take_back(*unused);
                }
            });
        });
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let (key, now) = (claim.key, clock::micros(clock::now()));
        match self.in_flight.enter(
            key,
            now,
            InFlightState::default,
            |_, _| (),
            |state| state.claim(&claim, listener),
        ) {
            Ok(events) => {
                for (holder, listener, event) in events {
                    notify(listener, key, holder, event);
                }
            }
            Err(Full) => {
                let failed = StoreEvent::Failed(self.full());
                notify(listener.clone(), key, claim.holder, failed);
            }
        }
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        let changed = change.check(spec).and_then(|()| match change {
            Change::Hold {
                hold: state,
                remaining,
            } => self.change_hold(key, spec, |ledger, now| {
                let in_force = ledger.hold_anew(hold(state, now));
                if let Some(remaining) = &remaining {
                    ledger.see(spec, remaining);
                }
                in_force
            }),
            Change::Release => self.change_hold(key, spec, |ledger, _| ledger.release()),
            Change::Quota { kind, life } => self.change_quota(key, spec, kind, life),
        });
        StoreReply::Ready(changed)
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.listeners.add(listener);
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        let now = clock::micros(clock::now());
        let reply = self.registers.compare_and_set(&change, now);
        if let (Ok(register), Some(value)) = (&reply, change.value)
            && register.changed
            && change.notify != Recipients::None
        {
            // All listeners are in this process, so `Recipients::One` is all of them.
            let changed = Register {
                kind: change.kind,
                version: register.version,
                value,
                ..Register::default()
            };
            self.listeners
                .notify_all(change.key, &StoreEvent::Register(changed));
        }
        StoreReply::Ready(reply.map_err(|Full| self.full()))
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        let now = clock::micros(clock::now());
        let (key, spec) = (request.key, &request.spec);
        // A question changes nothing: limits that it states would apply to others.
        let mut copy = self
            .counts
            .find(key, |counts| counts.clone())
            .unwrap_or_else(|| KeyLedger::new(Ledger::new(spec, now)));
        let rates = copy.with(spec, now, |ledger, now| usage(ledger, spec, &request, now));
        let Some(most) = spec.quota().most_in_flight() else {
            return StoreReply::Ready(Ok(rates));
        };
        let in_flight = self
            .in_flight
            .find(request.in_flight_key, |state| state.usage(most));
        let (used, free) = in_flight.unwrap_or((0, most));
        StoreReply::Ready(Ok(rates.in_flight(most, used, free)))
    }
}
