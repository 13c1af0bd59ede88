//! The store that all processes of a run share: a memory store behind a link that takes time and
//! fails.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::clock;
use super::numbers::span;
use super::scenario::StoreModel;
use tollgate::__lab::Dice;
use tollgate::__lab::{dice, lease_later};
use tollgate::Key;
use tollgate::store::{
    Change, Claim, InForce, Lease, LeaseRequest, LimitSpec, MemoryStore, PeekRequest, Recipients,
    Register, RegisterRequest, Store, StoreError, StoreEvent, StoreListener, StoreReply,
    UnusedPermits, Usage,
};

/// The store, its model, and its listeners.
pub(super) struct SharedStore {
    memory: MemoryStore,
    model: StoreModel,
    /// The beginning of the run.
    origin: Instant,
    dice: Mutex<Dice>,
    calls: AtomicU64,
    /// The listeners and their addresses.
    listeners: Mutex<Vec<(u64, Arc<dyn StoreListener>)>>,
}

/// What becomes of one call of the store.
struct Trip {
    /// When the call reaches the store, if it does.
    done: Option<Instant>,
    /// When the caller has the answer, or gives up.
    back: Instant,
    is_answered: bool,
}

impl SharedStore {
    pub(super) fn new(model: &StoreModel) -> Self {
        SharedStore {
            memory: MemoryStore::default(),
            model: model.clone(),
            origin: clock::now(),
            dice: Mutex::new(Dice::seeded(dice())),
            calls: AtomicU64::new(0),
            listeners: Mutex::default(),
        }
    }

    /// Returns how often the store was called.
    pub(super) fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Creates the link of one process to the store.
    pub(super) fn link(self: &Arc<Self>) -> Arc<dyn Store> {
        Arc::new(StoreLink {
            store: self.clone(),
            address: dice() >> 11,
        })
    }

    /// Draws what becomes of a call that is made now.
    fn trip(&self) -> Trip {
        let now = clock::now();
        self.calls.fetch_add(1, Ordering::Relaxed);
        let trip = self.drawn_trip();
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        let there = now + trip / 2;
        let is_away = self.away_until(there).is_some();
        let is_done = !is_away || dice.roll() < 0.5;
        let is_lost = self.model.lose > 0.0 && dice.roll() < self.model.lose;
        let is_answered = !is_away && !is_lost && trip <= TIMEOUT;
        Trip {
            done: is_done.then_some(there),
            back: now + if is_answered { trip } else { TIMEOUT },
            is_answered,
        }
    }

    /// Notifies the listeners that `tell` selects.
    fn tell(&self, tell: Recipients, key: Key, event: &StoreEvent) {
        let listeners = self
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let is_told = |address: u64| match tell {
            Recipients::All => true,
            Recipients::One(one) => one == address,
            _ => false,
        };
        let chosen: Vec<_> = listeners
            .iter()
            .filter(|(address, _)| is_told(*address))
            .cloned()
            .collect();
        drop(listeners);
        chosen
            .into_iter()
            .for_each(|(_, listener)| listener.on_event(key, 0, event.clone()));
    }

    /// Draws how long a call takes to the store and back.
    fn drawn_trip(&self) -> Duration {
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        span(self.model.trip.drawn(&mut dice))
    }

    /// Returns the end of the outage, if the store is unreachable at `moment`.
    fn away_until(&self, moment: Instant) -> Option<Instant> {
        let at = moment.saturating_duration_since(self.origin).as_secs_f64();
        self.model
            .away_until(at)
            .map(|until| self.origin + span(until))
    }
}

/// The link of one process to the store.
struct StoreLink {
    store: Arc<SharedStore>,
    address: u64,
}

impl StoreLink {
    /// Does `act` at the store, even if the answer is dropped.
    fn go<T: Send + 'static>(
        &self,
        act: impl FnOnce(&MemoryStore) -> StoreReply<T> + Send + 'static,
    ) -> StoreReply<T> {
        // Without a runtime the run is over.
        let Ok(runtime) = Handle::try_current() else {
            return StoreReply::Ready(Err(StoreError::Lost));
        };
        let (trip, store) = (self.store.trip(), self.store.clone());
        let call = runtime.spawn(async move {
            let mut answer = Err(away());
            if let Some(done) = trip.done {
                clock::sleep_until(done).await;
                answer = act(&store.memory).arrives().await;
            }
            clock::sleep_until(trip.back).await;
            if trip.is_answered {
                answer
            } else {
                Err(away())
            }
        });
        StoreReply::Pending(Box::pin(async move {
            call.await.unwrap_or(Err(StoreError::Lost))
        }))
    }
}

impl Store for StoreLink {
    fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
        self.go(lease_later(&request))
    }

    fn give_back(&self, key: Key, spec: &Arc<LimitSpec>, unused: &[UnusedPermits]) {
        let (spec, unused) = (spec.clone(), unused.to_vec());
        drop(self.go(move |memory| {
            memory.give_back(key, &spec, &unused);
            StoreReply::Ready(Ok(()))
        }));
    }

    /// Repeats the claim until the store has acknowledged it, as a store does whose claims expire.
    fn claim(&self, claim: Claim, listener: &Arc<dyn StoreListener>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let (store, listener) = (self.store.clone(), listener.clone());
        drop(runtime.spawn(async move {
            let kept = listener.clone();
            let listener = DelayedListener::new(&store, move || Some(kept.clone()));
            loop {
                let trip = store.trip();
                if let Some(done) = trip.done {
                    clock::sleep_until(done).await;
                    store.memory.claim(claim, &listener);
                }
                if trip.is_answered {
                    return;
                }
                clock::sleep_until(trip.back).await;
                listener
                    .clone()
                    .on_event(claim.key, claim.holder, StoreEvent::Failed(away()));
            }
        }));
    }

    fn change(&self, key: Key, spec: &Arc<LimitSpec>, change: Change) -> StoreReply<InForce> {
        let spec = spec.clone();
        self.go(move |memory| memory.change(key, &spec, change))
    }

    fn listen(&self, listener: Weak<dyn StoreListener>) {
        let listener = DelayedListener::new(&self.store, move || listener.upgrade());
        self.store.memory.listen(Arc::downgrade(&listener));
        // The memory store keeps only a weak reference.
        self.store
            .listeners
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((self.address, listener));
    }

    fn compare_and_set(&self, mut change: RegisterRequest) -> StoreReply<Register> {
        // The memory store would notify every listener.
        let tell = std::mem::replace(&mut change.notify, Recipients::None);
        let store = self.store.clone();
        self.go(move |memory| {
            let (key, value) = (change.key, change.value.clone());
            let StoreReply::Ready(answer) = memory.compare_and_set(change) else {
                unreachable!("memory answers at once")
            };
            if let (
                Ok(Register {
                    kind,
                    changed: true,
                    version,
                    ..
                }),
                Some(value),
            ) = (&answer, value)
            {
                let mut told = Register::default();
                (told.kind, told.version, told.value) = (*kind, *version, value);
                store.tell(tell, key, &StoreEvent::Register(told));
            }
            StoreReply::Ready(answer)
        })
    }

    fn address(&self) -> u64 {
        self.address
    }

    fn peek(&self, request: PeekRequest) -> StoreReply<Usage> {
        self.go(move |memory| memory.peek(request))
    }

    fn flush(&self) -> StoreReply<()> {
        self.go(Store::flush)
    }
}

/// A listener that is notified half a round trip later, or once the store is reachable again.
struct DelayedListener<F> {
    store: Arc<SharedStore>,
    listener: F,
}

impl<F: Fn() -> Option<Arc<dyn StoreListener>> + Send + Sync + 'static> DelayedListener<F> {
    #[expect(clippy::new_ret_no_self, reason = "callers need it as a trait object")]
    fn new(store: &Arc<SharedStore>, listener: F) -> Arc<dyn StoreListener> {
        Arc::new(DelayedListener {
            store: store.clone(),
            listener,
        })
    }
}

impl<F: Fn() -> Option<Arc<dyn StoreListener>> + Send + Sync + 'static> StoreListener
    for DelayedListener<F>
{
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let delay = self.store.drawn_trip() / 2;
        drop(runtime.spawn(async move {
            let at = clock::now() + delay;
            let missed = self.store.away_until(at);
            clock::sleep_until(missed.map_or(at, |until| until + delay)).await;
            let event = match event {
                StoreEvent::Hold(_)
                | StoreEvent::SetQuota(_)
                | StoreEvent::RemainingFell { .. }
                | StoreEvent::Register(_)
                    if missed.is_some() =>
                {
                    StoreEvent::EventsMissed
                }
                event => event,
            };
            if let Some(listener) = (self.listener)() {
                listener.on_event(key, holder, event);
            }
        }));
    }
}

fn away() -> StoreError {
    StoreError::Away(Arc::new(io::Error::from(io::ErrorKind::TimedOut)))
}

/// How long a call waits for an answer: the default of the Redis store.
const TIMEOUT: Duration = Duration::from_millis(250);
