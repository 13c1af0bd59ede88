//! The engine of a limiter: the state of all its keys, and what they share.
//!
//! [`Core`] is what all parts of a limiter refer to: the waiting futures, the permits, the
//! background tasks and the store. What can be read from it is here, and access to the state of a key is in `effects.rs`.
//! What a limiter does is in the files that import this one: see `limiter/mod.rs`.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, RwLock, Weak};
use std::time::{Duration, Instant};

use super::hosts::{Hosts, counted_key};
use super::in_flight::InFlightCalls;
use super::joint::JointSets;
use super::key_state::{KeyContext, KeyState, Work};
use super::key_states::KeyStates;
use super::quotas::QuotaId;
use super::settings::{OnStoreError, Settings};
use super::unit_check::UnitCheck;
use super::whole_limit::WholeLimit;

use crate::clock;
use crate::cost::Cost;
use crate::error::{LimitName, Reason, StoreError};
use crate::key::{Key, Label, RequestRef};
use crate::limit::{LimitSpec, UnusedPermits};
use crate::locks::{read, write};
use crate::refused::RefusedRequest;
use crate::stats;
use crate::store::{self, PeekRequest, StoreListener};

/// Whether this process has more than one limiter, a throttle, or a limit of calls in flight. Else no request is
/// refused because of what is [`around`](super::around) it.
static ARE_MARKS_READ: AtomicBool = AtomicBool::new(false);

/// Notes that this process has more than one limiter, a throttle, or a limit of calls in flight.
pub(crate) fn read_marks() {
    ARE_MARKS_READ.store(true, Ordering::Relaxed);
}

/// Returns whether a request may be refused because of what is around it.
#[inline]
pub(super) fn are_marks_read() -> bool {
    ARE_MARKS_READ.load(Ordering::Relaxed)
}

/// The shared state of a limiter.
pub(super) struct Core {
    pub(super) id: CoreId,
    /// The rate limits: the state of each key.
    pub(super) states: KeyStates,
    /// The calls in flight of each key. `None` if their number is not limited.
    pub(super) in_flight: Option<InFlightCalls>,
    pub(super) settings: Settings,
    /// Whether an event has reported that other processes assert other limits.
    pub(super) warned: AtomicBool,
    /// Whether requests state the unit of the limits.
    pub(super) unit_check: UnitCheck,
    pub(super) whole_limit: WholeLimit,
    /// The joint requests whose first key is of this limiter.
    pub(super) joint: JointSets,
    /// The cores of all parts of a divided quota, this one included.
    parts: OnceLock<Box<[Weak<Core>]>>,
    pub(super) hosts: Hosts,
}

/// Identifies a limiter's core without keeping it alive.
///
/// A call on its way ([`Sent`](super::Sent)) holds this number instead of an `Arc<Core>`, because
/// of the fast path. Measured through a Tower service with a permit at hand: with an `Arc`, a call
/// takes 95 ns instead of 77 ns on one thread. On each of two threads that share the limiter, it
/// takes 187 ns instead of 161 ns.
///
/// Only few responses need the core: responses that state something about limits, and all responses
/// while a key is on probation (`key_state/probation.rs`). They look it up in [`CORES`]. If the
/// limiter was dropped meanwhile, the response is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CoreId(u32);

/// The cores of this process, in the order of their numbers. A core is added when it is made, and removed when it is
/// dropped.
static CORES: RwLock<Vec<(CoreId, Weak<Core>)>> = RwLock::new(Vec::new());

impl CoreId {
    fn next() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        CoreId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the core, if its limiter still exists.
    pub(super) fn find(self) -> Option<Arc<Core>> {
        let cores = read(&CORES);
        let place = place_of(&cores, self).ok()?;
        cores[place].1.upgrade()
    }

    /// Returns the name of `key` for errors and events.
    pub(super) fn label(self, key: Key) -> Label {
        match self.find() {
            Some(core) => core.label(key, None),
            None => key.own_label(None),
        }
    }
}

/// Returns where a core stands among `cores`, or where it belongs.
fn place_of(cores: &[(CoreId, Weak<Core>)], id: CoreId) -> Result<usize, usize> {
    cores.binary_search_by_key(&id, |(id, _)| *id)
}

impl Core {
    /// Makes a core that can be found by its number, and subscribes it to the events of the store.
    /// The subscription does not keep the core alive.
    pub(super) fn new(settings: Settings) -> Arc<Self> {
        clock::prepare();
        // Further units of a quota leave the holds of hosts to its first one.
        let unit = settings.spec.quota().unit();
        let unit = unit.filter(|_| !settings.is_further_unit);
        let class = settings.part.and_then(|part| part.class);
        let hosts = Hosts::new(unit, class, settings.max_keys);
        let core = Arc::new(Core {
            id: CoreId::next(),
            states: KeyStates::new(settings.max_keys),
            in_flight: InFlightCalls::new(&settings),
            settings,
            warned: AtomicBool::new(false),
            unit_check: UnitCheck::default(),
            whole_limit: WholeLimit::default(),
            joint: JointSets::default(),
            parts: OnceLock::new(),
            hosts,
        });
        let mut cores = write(&CORES);
        // Two that are made at once may come in either order.
        let place = place_of(&cores, core.id).unwrap_or_else(|place| place);
        cores.insert(place, (core.id, Arc::downgrade(&core)));
        if cores.len() > 1 || core.in_flight.is_some() {
            read_marks();
        }
        drop(cores);
        stats::register(&core);
        let listener: Weak<dyn StoreListener> = Arc::downgrade(&core) as _;
        core.settings.store.listen(listener);
        core
    }

    /// Returns whether rates are limited, and not only calls in flight.
    pub(super) fn has_rates(&self) -> bool {
        !self.settings.spec.quota().limits().is_empty()
    }

    /// Returns the error of a process without room for one more key.
    pub(super) fn full(&self) -> StoreError {
        StoreError::Full {
            max_keys: self.settings.max_keys,
        }
    }

    /// Returns whether other processes are known to limit a key by another quota.
    pub(super) fn has_warned(&self) -> bool {
        self.warned.load(Ordering::Relaxed)
    }

    /// Returns whether both are of one limiter: they may count other units, or another class.
    pub(super) fn is_of_limiter_of(&self, other: &Core) -> bool {
        Arc::ptr_eq(&self.settings.quotas, &other.settings.quotas)
    }

    /// Makes the context of a visit to the state of `key`, under its `own` limits or the configured
    /// ones.
    pub(super) fn ctx<'a>(
        &'a self,
        key: Key,
        now: Instant,
        own: Option<&'a Arc<LimitSpec>>,
    ) -> KeyContext<'a> {
        let settings = &self.settings;
        KeyContext {
            key,
            store: &settings.store,
            spec: own.unwrap_or(&settings.spec),
            now,
            max_queue: settings.max_queue,
            fails_open: settings.on_store_error == OnStoreError::FailOpen,
            max_hold: settings.max_hold,
            settles: settings.settles,
            is_draining: settings.tally.is_draining(),
            work: Work::default(),
        }
    }

    /// Returns the limits of the key of `state` if they are not the configured ones: those of its set
    /// quota, or else those that requests have stated.
    pub(super) fn own_spec(&self, state: &mut KeyState, now: Instant) -> Option<Arc<LimitSpec>> {
        state.limits.spec(&self.settings.spec, now)
    }

    /// Returns the limits of `key`: its own, else the configured ones.
    pub(super) fn terms(&self, key: Key) -> Arc<LimitSpec> {
        let own = self
            .states
            .read(key, |state| self.own_spec(state, clock::now()));
        own.unwrap_or_else(|| self.settings.spec.clone())
    }

    /// Returns the limits of `key` that decide about a request.
    pub(super) fn quota_of(&self, key: Key) -> Arc<LimitSpec> {
        let Settings { spec, quotas, .. } = &self.settings;
        if !quotas.is_any() {
            return spec.clone();
        }
        let own = self.states.read(key, |state| state.limits.quota().cloned());
        own.unwrap_or_else(|| spec.clone())
    }

    /// Returns the quota that requests have stated for `key`.
    pub(super) fn quota_id(&self, key: Key) -> Option<QuotaId> {
        self.states.read(key, |state| state.limits.quota_id())
    }

    /// Returns whether a request that states `quota` leaves the quota of `key` as it is.
    pub(super) fn has_quota(&self, key: Key, quota: QuotaId) -> bool {
        if quota == QuotaId::NONE {
            return true;
        }
        let known = self.states.find(key, |state| state.limits.has_quota(quota));
        known.unwrap_or(quota == QuotaId::CONFIGURED)
    }

    /// Returns the limits of this part of a quota that a request states. `None` for the configured one.
    pub(super) fn spec_of(&self, quota: QuotaId) -> Option<Arc<LimitSpec>> {
        let quotas = &self.settings.quotas;
        quotas.spec(quota, self.part_index(), self.unit())
    }

    /// Returns the largest cost of a request that the limits of `key` allow.
    pub(super) fn largest_cost(&self, key: Key) -> u32 {
        self.quota_of(key).quota().largest_cost()
    }

    /// Gives units of a key back to the store, although the state of the key is gone. If its limits are not known,
    /// the store keeps those that it has.
    pub(super) fn give_back_stateless(&self, key: Key, unused: &[UnusedPermits]) {
        let Settings { spec, quotas, .. } = &self.settings;
        let spec = match quotas.is_any() {
            true => Arc::new(LimitSpec::none()),
            false => spec.clone(),
        };
        self.settings.store.give_back(key, &spec, unused);
    }

    /// Returns the name of `key`, which came with `request`, for errors and events.
    pub(super) fn label(&self, key: Key, request: Option<&RequestRef<'_>>) -> Label {
        store::label(&*self.settings.store, self.whole(key), request)
    }

    /// Returns what the limits count. `None` for requests.
    pub(super) fn unit(&self) -> Option<&'static str> {
        self.settings.spec.quota().unit()
    }

    /// Returns the key that a refusal of a request puts on hold: that of the host's holds, or `key`.
    pub(super) fn hold_key(&self, key: Key, host: Option<Key>) -> Key {
        self.hosts.hold_of(key, host).unwrap_or(key)
    }

    /// Notes a request of `key` to `host` that has other keys, too: see [`Hosts::reach`].
    #[inline]
    pub(super) fn note_host(&self, key: Key, host: Option<Key>) {
        let Some(host) = host.filter(|host| *host != key) else {
            return;
        };
        if self.hosts.are_of(key) {
            // Without a key function, nothing is learned from several hosts.
            if self.hosts.are_any() {
                self.hosts.notice(host);
            }
            return;
        }
        // The requests of all classes have the key.
        match self.part_at(0, key) {
            Some((first, key)) => first.note_host_of_key(key, host),
            None => self.note_host_of_key(key, host),
        }
    }

    #[inline]
    fn note_host_of_key(&self, key: Key, host: Key) {
        let of_keys = &self.hosts.of_keys;
        of_keys.note(key, host, || self.states.find(key, |_| ()).is_some());
    }

    /// Returns the name of what the limits count.
    pub(super) fn unit_name(&self) -> &'static str {
        self.unit().unwrap_or(Cost::REQUESTS)
    }

    /// Returns the key under which the units of requests with `key` are counted here.
    #[inline]
    pub(super) fn key_of(&self, key: Key) -> Key {
        counted_key(key, self.unit(), self.class())
    }

    /// Returns the class that this core counts, if it has a share.
    #[inline]
    pub(super) fn class(&self) -> Option<&'static str> {
        self.settings.part?.class
    }

    /// Returns the key for this part of the quota of `key`.
    #[inline]
    pub(super) fn part_of(&self, key: Key) -> Key {
        counted_key(key, None, self.class())
    }

    /// Returns the key whose quota is divided, of which `key` is a part.
    // The key of a class is the whole one with a mask, which a second time takes off: see `Key::of_class`.
    pub(super) fn whole(&self, key: Key) -> Key {
        self.part_of(key)
    }

    /// Asks about one request of `key` under the limits `spec`.
    pub(super) fn peek_request(&self, key: Key, spec: &Arc<LimitSpec>) -> PeekRequest {
        PeekRequest {
            in_flight_key: self.whole(key),
            ..PeekRequest::new(key, spec)
        }
    }

    /// Notes the cores of all parts of the quota.
    pub(super) fn note_parts(&self, parts: &[Arc<Core>]) {
        let parts = parts.iter().map(Arc::downgrade).collect();
        // They are noted once, when they are made.
        let _ = self.parts.set(parts);
    }

    /// Returns the number of the part that this core counts.
    pub(super) fn part_index(&self) -> usize {
        self.settings.part.map_or(0, |part| part.index)
    }

    /// Returns whether the quota is divided among classes.
    pub(super) fn is_divided(&self) -> bool {
        self.settings.part.is_some()
    }

    /// Returns the cores of all parts of the quota, each with its key for the part of which `key` is one.
    ///
    /// Holds are set and ended for the last part first: the classes [follow](KeyState::follow_whole) the
    /// first part, and must not take its hold for one of another process.
    pub(super) fn all_parts(
        self: &Arc<Self>,
        key: Key,
    ) -> impl DoubleEndedIterator<Item = (Arc<Core>, Key)> + use<> {
        let whole = self.whole(key);
        let parts = self.parts.get().into_iter().flatten();
        let mut parts: Vec<Arc<Core>> = parts.filter_map(Weak::upgrade).collect();
        if parts.is_empty() {
            parts.push(self.clone());
        }
        parts.into_iter().map(move |core| {
            let key = core.part_of(whole);
            (core, key)
        })
    }

    /// Returns the core of a class, or of the rest if it has no share, and its key for the part of which
    /// `key` is one. `None` if the quota is not divided.
    pub(super) fn part_of_class(&self, key: Key, class: &str) -> Option<(Arc<Core>, Key)> {
        let parts = self.parts.get()?;
        let cores = || parts.iter().filter_map(Weak::upgrade);
        let of_class = cores().find(|core| core.class() == Some(class));
        let core = of_class.or_else(|| cores().next())?;
        let key = core.part_of(self.whole(key));
        Some((core, key))
    }

    /// Returns the core of the part with this number, and its key for the part of which `key` is one.
    pub(super) fn part_at(&self, number: u8, key: Key) -> Option<(Arc<Core>, Key)> {
        let core = self.parts.get()?.get(usize::from(number))?.upgrade()?;
        let key = core.part_of(self.whole(key));
        Some((core, key))
    }

    /// Returns the limits of this part of the quota of `key`: those of its set quota, else of `quota`, which requests
    /// have stated for it, else the configured ones.
    pub(super) fn spec_of_part(&self, key: Key, quota: Option<QuotaId>) -> Arc<LimitSpec> {
        let set = self
            .states
            .read(key, |state| state.limits.set_spec().cloned());
        let spec = set.or_else(|| self.spec_of(quota?));
        spec.unwrap_or_else(|| self.settings.spec.clone())
    }

    /// Returns what errors call the limit of `key`.
    pub(super) fn limit_name(&self, key: Key) -> LimitName {
        let Settings { name, quotas, .. } = &self.settings;
        let quota = if quotas.is_any() {
            self.quota_id(key)
        } else {
            None
        };
        LimitName {
            name: *name,
            route: quota.and_then(|quota| quotas.route(quota)),
            unit: self.unit(),
            class: self.class(),
        }
    }

    /// Returns what errors state of a request of `key` that is refused and has not waited.
    pub(super) fn refused_request(&self, key: Key) -> RefusedRequest {
        RefusedRequest::new(self.label(key, None), self.limit_name(key))
    }

    /// Returns how long `key` stays on hold, by what this process knows.
    pub(super) fn held(&self, key: Key, now: Instant) -> Option<Duration> {
        self.states.read(key, |state| state.hold.left(now))
    }

    /// Returns for how long callers are told that `key` is on hold: see [`KeyHold::stated_left`](super::key_state::KeyHold::stated_left).
    pub(super) fn stated_hold(&self, key: Key, now: Instant) -> Option<Duration> {
        self.states.read(key, |state| state.hold.stated_left(now))
    }

    /// Returns why a request is refused while `key` is on hold.
    pub(super) fn hold_reason(&self, key: Key, now: Instant) -> Reason {
        self.states
            .find(key, |state| state.hold.reason(now))
            .unwrap_or(Reason::Held)
    }

    /// Returns how many requests count as waiting for `key`.
    pub(super) fn queued(&self, key: Key) -> usize {
        self.states.read(key, |state| state.queued())
    }

    /// Returns `max_queue` if as many requests wait for `key`, and a request of this cost needs something of it.
    pub(super) fn full_queue(&self, key: Key, cost: u32) -> Option<usize> {
        let max_queue = self.settings.max_queue;
        (cost > 0 && self.queued(key) >= max_queue).then_some(max_queue)
    }

    /// Returns whether requests pass uncounted after `error` of the store.
    pub(super) fn fails_open_on(&self, error: &StoreError) -> bool {
        self.settings.on_store_error == OnStoreError::FailOpen
            && !matches!(error, StoreError::Full { .. })
    }

    /// Gives all prefetched permits back to the store, and waits until the store has them.
    pub(super) async fn shutdown(self: &Arc<Self>) -> Result<(), StoreError> {
        self.give_back_all();
        self.flush().await
    }

    /// Waits until the store has all charges, and all that was given back to it.
    pub(super) async fn flush(self: &Arc<Self>) -> Result<(), StoreError> {
        if let Some(guard) = &self.settings.guard {
            guard.give_back();
        }
        let charged = self.send_charges().await;
        self.settings.store.flush().arrives().await.and(charged)
    }

    /// Gives all prefetched permits back to the store.
    pub(super) fn give_back_all(&self) {
        let now = clock::now();
        self.states.for_each(|key, state| {
            let own = self.own_spec(state, now);
            state.give_back_prefetched(&self.ctx(key, now, own.as_ref()));
        });
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        f.debug_struct("Limiter")
            .field("quota", settings.spec.quota())
            .field("max_wait", &settings.max_wait)
            .field("max_queue", &settings.max_queue)
            .field("max_keys", &settings.max_keys)
            .finish_non_exhaustive()
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        stats::unregister(self);
        let mut cores = write(&CORES);
        if let Ok(place) = place_of(&cores, self.id) {
            cores.remove(place);
        }
    }
}
