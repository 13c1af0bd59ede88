//! Counts in this process: the default store.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::in_flight::Listeners;
use super::register::Registers;
use super::{
    Answer, Ask, Change, Charge, Claim, Held, Lease, Left, LimitUsage, Listener, News, Refusal, Register,
    Segment, Store, StoreError, Tell, Usage,
};
use crate::clock;
use crate::key::Key;
use crate::key_map::{Evict, Full, KeyMap};
use crate::limit::{
    Claimed, Grant, Hold, Ledger, Micros, Seats, Terms, Told, Unused, micros_down, micros_up,
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
    listeners: Listeners,
    max_keys: usize,
}

/// The calls of a key in flight, and whom to tell about them.
#[derive(Default)]
struct Flight {
    seats: Seats,
    listeners: Vec<(u64, Arc<dyn Listener>)>,
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
        MemoryStore { counts, flights, registers, listeners: Listeners::default(), max_keys }
    }

    fn with<R>(
        &self,
        key: Key,
        terms: &Terms,
        now: Micros,
        with: impl FnOnce(&mut Ledger, Micros) -> R,
    ) -> Result<R, StoreError> {
        let make = || Counts { fresh_from: 0, ledger: Box::new(Ledger::new(terms, now)) };
        let count = |counts: &mut Counts| counts.with(terms, now, with);
        let counted = self.counts.enter(key, now, make, |_, _| (), count);
        counted.map_err(|Full| StoreError::Full { max_keys: self.max_keys })
    }

    /// Changes the hold of `key`, and notifies all listeners.
    fn set_hold(
        &self,
        key: Key,
        terms: &Terms,
        change: impl FnOnce(&mut Ledger, Micros) -> Hold,
    ) -> Answer<Held> {
        let now = clock::micros(clock::now());
        let set = |ledger: &mut Ledger, now| held(change(ledger, now), now);
        let held = match self.with(key, terms, now, set) {
            Ok(held) => held,
            Err(full) => return Answer::Now(Err(full)),
        };
        self.listeners.tell(key, &News::Held(held));
        Answer::Now(Ok(held))
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
    fn with<R>(&mut self, terms: &Terms, now: Micros, with: impl FnOnce(&mut Ledger, Micros) -> R) -> R {
        if terms.quota().has_fixed_window() {
            self.ledger.align(clock::wall_ahead_lately(clock::now()));
        }
        let now = self.ledger.advance(terms, now);
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
    fn claim(&mut self, claim: &Claim, listener: &Arc<dyn Listener>) -> Vec<(u64, Arc<dyn Listener>, News)> {
        let &Claim { holder: id, number, most, sits, wants, heard, .. } = claim;
        if !self.listeners.iter().any(|(holder, _)| *holder == id) {
            self.listeners.push((id, listener.clone()));
        }
        // Within one process, no holder can fall silent without having left.
        let claimed = Claimed { id, number, most, sits, wants, heard, life: Micros::MAX };
        let (Flight { seats, listeners }, mut news) = (self, Vec::new());
        seats.claim(0, claimed, |Told { id, number, given, others_wait, version }| {
            if let Some((_, listener)) = listeners.iter().find(|(holder, _)| *holder == id) {
                news.push((id, listener.clone(), News::seats(number, given, others_wait, version)));
            }
        });
        listeners.retain(|(holder, _)| seats.knows(*holder));
        news
    }
}

impl Store for MemoryStore {
    fn lease(&self, ask: Ask<'_>) -> Answer<Lease> {
        let now = clock::micros(clock::now());
        Answer::Now(self.with(ask.key, ask.terms, now, |ledger, now| book(ledger, now, &ask)))
    }

    fn give_back(&self, key: Key, terms: &Arc<Terms>, unused: &[Unused]) {
        let now = clock::micros(clock::now());
        self.counts.find(key, |counts| {
            counts.with(terms, now, |ledger, _| unused.iter().for_each(|&unused| ledger.take_back(unused)));
        });
    }

    fn claim(&self, claim: Claim, listener: &Arc<dyn Listener>) {
        let (key, now) = (claim.key, clock::micros(clock::now()));
        match self.flights.enter(
            key,
            now,
            Flight::default,
            |_, _| (),
            |flight| flight.claim(&claim, listener),
        ) {
            Ok(news) => {
                news.into_iter().for_each(|(holder, listener, news)| listener.hear(key, holder, news))
            }
            Err(Full) => {
                let full = StoreError::Full { max_keys: self.max_keys };
                listener.clone().hear(key, claim.holder, News::Failed(full));
            }
        }
    }

    fn hold(&self, key: Key, terms: &Arc<Terms>, held: Held, left: Option<Left>) -> Answer<Held> {
        self.set_hold(key, terms, |ledger, now| {
            let held = ledger.hold_anew(hold(held, now));
            left.iter().for_each(|left| ledger.see(left));
            held
        })
    }

    fn release(&self, key: Key, terms: &Arc<Terms>) -> Answer<Held> {
        self.set_hold(key, terms, |ledger, _| ledger.release())
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.listeners.add(listener);
    }

    fn compare_and_set(&self, change: Change) -> Answer<Register> {
        let now = clock::micros(clock::now());
        let full = |Full| StoreError::Full { max_keys: self.max_keys };
        let answer = self.registers.compare_and_set(&change, now).map_err(full);
        if let (Ok(Register { changed: true, version, .. }), Some(value)) = (&answer, change.value)
            && change.tell != Tell::Nobody
        {
            // They are all here.
            let register = Register { kind: change.kind, version: *version, value, ..Register::default() };
            self.listeners.tell(change.key, &News::Register(register));
        }
        Answer::Now(answer)
    }

    fn peek(&self, key: Key, terms: &Arc<Terms>) -> Answer<Usage> {
        let now = clock::micros(clock::now());
        let known = self.counts.find(key, |counts| counts.with(terms, now, usage));
        let rates = known.unwrap_or_else(|| usage(&mut Ledger::new(terms, now), now));
        let Some(most) = terms.quota().most_in_flight() else { return Answer::Now(Ok(rates)) };
        let taken = self.flights.find(key, |flight| flight.seats.usage(most));
        let (taken, free) = taken.unwrap_or((0, most));
        Answer::Now(Ok(rates.in_flight(most, taken, free)))
    }
}

pub(super) fn book(ledger: &mut Ledger, now: Micros, ask: &Ask<'_>) -> Lease {
    let held = held(ledger.hold(hold(ask.held, now)), now);
    ask.returns.iter().for_each(|&unused| ledger.take_back(unused));
    ask.charges.iter().take(Charge::MOST).for_each(|&charge| ledger.charge(charge));
    // What is left is compared with what the log has: after the returns and the charges.
    ask.left.iter().for_each(|left| ledger.see(left));
    let latest = now.saturating_add(micros_down(ask.latest));
    let life = micros_up(ask.life);
    let mut lease = Lease { now, held, ..Lease::default() };
    for need in ask.needs {
        let segments = &mut lease.segments;
        let granted = |grant: Grant| segments.push(segment(grant, need.cost, now));
        if let Err(late) = ledger.book(latest, need.cost, need.count, life, granted) {
            let wait = (late.slot < Micros::MAX).then(|| span(now, late.slot));
            lease.refused = Some(Refusal { wait, limit: late.limit });
            break;
        }
    }
    lease.shared = ledger.is_shared();
    if lease.refused.is_none() && ask.prefetch > 0 {
        let grant = ledger.prefetch(ask.prefetch, micros_up(ask.prefetch_life));
        lease.prefetched = grant.map(|grant| segment(grant, 1, now));
    }
    lease.free = if lease.refused.is_none() { ledger.free() } else { 0 };
    lease
}

fn segment(grant: Grant, cost: u32, now: Micros) -> Segment {
    let Grant { slot, life, stamp, count } = grant;
    Segment { cost, count, wait: span(now, slot), life: Duration::from_micros(life), slot, stamp }
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
    Usage { limits, free: ledger.free(), next_slot, held, alone: false }
}

pub(super) fn hold(held: Held, now: Micros) -> Hold {
    let Held { left, releases, cut } = held;
    let until = if left.is_zero() { 0 } else { now.saturating_add(micros_up(left)) };
    Hold { until, cut, releases }
}

fn held(hold: Hold, now: Micros) -> Held {
    let left = span(now, hold.until);
    Held { left, releases: hold.releases, cut: !left.is_zero() && hold.cut }
}
