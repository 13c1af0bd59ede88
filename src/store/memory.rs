//! Counts in this process: the default store.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::in_flight::StoreListeners;
use super::register::Registers;
use super::{
    Charge, Claim, Grant, HoldState, Lease, LeaseRequest, LimitUsage, Recipients, Refusal, Register,
    RegisterRequest, Store, StoreError, StoreEvent, StoreListener, StoreReply, UpstreamRemaining, Usage,
};
use crate::clock;
use crate::key::Key;
use crate::key_map::{Evict, Full, KeyMap};
use crate::limit::{
    Booking, Hold, HolderClaim, HolderUpdate, InFlightSlots, Ledger, LimitSpec, Micros, UnusedPermits,
    micros_down, micros_up,
};

/// Counts permits in this process.
///
/// Bounded: it holds at most `max_keys` keys. Keys whose limits have forgotten all use are forgotten too; a limited one
/// never is, so when all are in use a new key is refused ([`StoreError::Full`]). No call looks at more than 64 keys for
/// one that can be forgotten. So if very few of many keys can be forgotten, a new key may be refused as well.
///
/// Several layers may share one store, and then share the counts of equal keys.
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
    counts: KeyMap<Counts>,
    flights: KeyMap<Flight>,
    registers: Registers,
    listeners: StoreListeners,
    max_keys: usize,
}

/// The calls of a key in flight, and whom to tell about them.
#[derive(Default)]
struct Flight {
    seats: InFlightSlots,
    listeners: Vec<(u64, Arc<dyn StoreListener>)>,
}

impl MemoryStore {
    /// The default of `max_keys`.
    pub const DEFAULT_MAX_KEYS: usize = 100_000;

    /// A store for at most `max_keys` keys that are limited at once. Default: 100,000.
    ///
    /// A key in use takes about 300 bytes, and up to 4 kB under a limit of 100 or more that is used up.
    pub fn new(max_keys: usize) -> Self {
        let (counts, flights) = (KeyMap::new(max_keys), KeyMap::new(max_keys));
        let registers = Registers::new(max_keys);
        MemoryStore { counts, flights, registers, listeners: StoreListeners::default(), max_keys }
    }

    fn with<R>(
        &self,
        key: Key,
        spec: &LimitSpec,
        now: Micros,
        with: impl FnOnce(&mut Ledger, Micros) -> R,
    ) -> Result<R, StoreError> {
        let make = || Counts { fresh_from: 0, ledger: Box::new(Ledger::new(spec, now)) };
        let count = |counts: &mut Counts| counts.with(spec, now, with);
        let counted = self.counts.enter(key, now, make, |_, _| (), count);
        counted.map_err(|Full| StoreError::Full { max_keys: self.max_keys })
    }

    /// Changes the hold of `key`, and notifies all listeners.
    fn set_hold(
        &self,
        key: Key,
        spec: &LimitSpec,
        change: impl FnOnce(&mut Ledger, Micros) -> Hold,
    ) -> StoreReply<HoldState> {
        let now = clock::micros(clock::now());
        let set = |ledger: &mut Ledger, now| held(change(ledger, now), now);
        let held = match self.with(key, spec, now, set) {
            Ok(held) => held,
            Err(full) => return StoreReply::Ready(Err(full)),
        };
        self.listeners.tell(key, &StoreEvent::Hold(held));
        StoreReply::Ready(Ok(held))
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore::new(MemoryStore::DEFAULT_MAX_KEYS)
    }
}

impl std::fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryStore").field("max_keys", &self.max_keys).finish_non_exhaustive()
    }
}

/// The ledger of a key, and when it can be forgotten, which is kept beside it so that a check does not read the ledger.
struct Counts {
    fresh_from: Micros,
    ledger: Box<Ledger>,
}

impl Counts {
    fn with<R>(&mut self, spec: &LimitSpec, now: Micros, with: impl FnOnce(&mut Ledger, Micros) -> R) -> R {
        if spec.quota().has_fixed_window() {
            self.ledger.align(clock::wall_ahead_lately(clock::now()));
        }
        let now = self.ledger.advance(spec, now);
        let done = with(&mut self.ledger, now);
        self.fresh_from = self.ledger.fresh_from();
        done
    }
}

impl Evict for Counts {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        Some(self.fresh_from)
    }
}

impl Evict for Flight {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        self.seats.is_empty().then_some(0)
    }
}

impl Flight {
    fn claim(
        &mut self,
        claim: &Claim,
        listener: &Arc<dyn StoreListener>,
    ) -> Vec<(u64, Arc<dyn StoreListener>, StoreEvent)> {
        let &Claim { holder: id, number, limit, in_use, wanted, granted_seen, .. } = claim;
        if !self.listeners.iter().any(|(holder, _)| *holder == id) {
            self.listeners.push((id, listener.clone()));
        }
        // Within one process, no holder can fall silent without having left.
        let claimed = HolderClaim { id, number, limit, in_use, wanted, granted_seen, ttl: Micros::MAX };
        let (Flight { seats, listeners }, mut event) = (self, Vec::new());
        seats.claim(0, claimed, |HolderUpdate { id, number, granted, others_wait, version }| {
            if let Some((_, listener)) = listeners.iter().find(|(holder, _)| *holder == id) {
                event.push((
                    id,
                    listener.clone(),
                    StoreEvent::in_flight(number, granted, others_wait, version),
                ));
            }
        });
        listeners.retain(|(holder, _)| seats.knows(*holder));
        event
    }
}

impl Store for MemoryStore {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        let now = clock::micros(clock::now());
        StoreReply::Ready(
            self.with(request.key, request.spec, now, |ledger, now| book(ledger, now, &request)),
        )
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        let now = clock::micros(clock::now());
        self.counts.find(key, |counts| {
            counts.with(spec, now, |ledger, _| unused.iter().for_each(|&unused| ledger.take_back(unused)));
        });
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let (key, now) = (claim.key, clock::micros(clock::now()));
        match self.flights.enter(
            key,
            now,
            Flight::default,
            |_, _| (),
            |flight| flight.claim(&claim, listener),
        ) {
            Ok(event) => {
                event.into_iter().for_each(|(holder, listener, event)| listener.on_event(key, holder, event))
            }
            Err(Full) => {
                let full = StoreError::Full { max_keys: self.max_keys };
                listener.clone().on_event(key, claim.holder, StoreEvent::Failed(full));
            }
        }
    }

    fn hold(
        &self,
        key: Key,
        spec: &Arc<LimitSpec>,
        held: HoldState,
        left: Option<UpstreamRemaining>,
    ) -> StoreReply<HoldState> {
        self.set_hold(key, spec, |ledger, now| {
            let held = ledger.hold_anew(hold(held, now));
            left.iter().for_each(|left| ledger.see(left));
            held
        })
    }

    fn release(&self, key: Key, spec: &Arc<LimitSpec>) -> StoreReply<HoldState> {
        self.set_hold(key, spec, |ledger, _| ledger.release())
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        self.listeners.add(listener);
    }

    fn compare_and_set(&self, change: RegisterRequest) -> StoreReply<Register> {
        let now = clock::micros(clock::now());
        let full = |Full| StoreError::Full { max_keys: self.max_keys };
        let answer = self.registers.compare_and_set(&change, now).map_err(full);
        if let (Ok(Register { changed: true, version, .. }), Some(value)) = (&answer, change.value)
            && change.notify != Recipients::None
        {
            // They are all here.
            let register = Register { kind: change.kind, version: *version, value, ..Register::default() };
            self.listeners.tell(change.key, &StoreEvent::Register(register));
        }
        StoreReply::Ready(answer)
    }

    fn peek(&self, key: Key, spec: &Arc<LimitSpec>) -> StoreReply<Usage> {
        let now = clock::micros(clock::now());
        let known = self.counts.find(key, |counts| counts.with(spec, now, usage));
        let rates = known.unwrap_or_else(|| usage(&mut Ledger::new(spec, now), now));
        let Some(most) = spec.quota().most_in_flight() else { return StoreReply::Ready(Ok(rates)) };
        let taken = self.flights.find(key, |flight| flight.seats.usage(most));
        let (taken, free) = taken.unwrap_or((0, most));
        StoreReply::Ready(Ok(rates.in_flight(most, taken, free)))
    }
}

pub(super) fn book(ledger: &mut Ledger, now: Micros, request: &LeaseRequest<'_>) -> Lease {
    let held = held(ledger.hold(hold(request.hold, now)), now);
    request.returns.iter().for_each(|&unused| ledger.take_back(unused));
    request.charges.iter().take(Charge::MOST).for_each(|&charge| ledger.charge(charge));
    // What is left is compared with what the log has: after the returns and the charges.
    request.remaining.iter().for_each(|left| ledger.see(left));
    let latest = now.saturating_add(micros_down(request.latest));
    let life = micros_up(request.validity);
    let mut lease = Lease { now, hold: held, ..Lease::default() };
    for demand in request.demands {
        let grants = &mut lease.grants;
        let granted = |grant: Booking| grants.push(segment(grant, demand.cost, now));
        if let Err(late) = ledger.book(latest, demand.cost, demand.count, life, granted) {
            let wait = (late.slot < Micros::MAX).then(|| span(now, late.slot));
            lease.refused = Some(Refusal { wait, limit: late.limit });
            break;
        }
    }
    lease.external_usage = ledger.is_shared();
    if lease.refused.is_none() && request.prefetch > 0 {
        let grant = ledger.prefetch(request.prefetch, micros_up(request.prefetch_validity));
        lease.prefetched = grant.map(|grant| segment(grant, 1, now));
    }
    lease.free = if lease.refused.is_none() { ledger.free() } else { 0 };
    lease
}

fn segment(grant: Booking, cost: u32, now: Micros) -> Grant {
    let Booking { slot, life, stamp, count } = grant;
    Grant { cost, count, wait: span(now, slot), validity: Duration::from_micros(life), slot, stamp }
}

fn span(now: Micros, slot: Micros) -> Duration {
    Duration::from_micros(slot.saturating_sub(now))
}

pub(super) fn usage(ledger: &mut Ledger, now: Micros) -> Usage {
    let limits = ledger
        .usage()
        .map(|(limit, used, free, reserved)| LimitUsage { limit, used, free, reserved })
        .collect();
    let next_slot = span(now, ledger.next_slot(0));
    let held = held(ledger.hold(Hold::default()), now);
    Usage { limits, free: ledger.free(), next_slot, hold: held, degraded: false }
}

pub(super) fn hold(held: HoldState, now: Micros) -> Hold {
    let HoldState { remaining: left, releases, cut } = held;
    let until = if left.is_zero() { 0 } else { now.saturating_add(micros_up(left)) };
    Hold { until, cut, releases }
}

fn held(hold: Hold, now: Micros) -> HoldState {
    let left = span(now, hold.until);
    HoldState { remaining: left, releases: hold.releases, cut: !left.is_zero() && hold.cut }
}
