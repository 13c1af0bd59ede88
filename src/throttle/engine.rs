//! The engine of the throttle: the waiters of all keys.
//!
//! [`ThrottleCore`] knows nothing of permits, futures or tasks. They hold an `Arc<ThrottleCore>` and reach the
//! waiters of their key through [`ThrottleCore::at`] and [`ThrottleCore::open`]. Both lock the key, call a closure,
//! and release the lock. Then they wake waiters, and start the sync task if the key needs one. They
//! start it through [`SharedPace::start_sync`], so that the engine need not import it.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::pace_state::PaceState;
use super::paced_queue::PacedQueue;
use super::sync_state::StoreChange;
use super::waiters::Waiters;
use crate::clock;
use crate::config_error::ConfigError;
use crate::events;
use crate::guarded::{NewKey, Watch};
use crate::key::{Key, Label, RequestRef};
use crate::key_map::{Full, KeyMap};
use crate::pacing::Pace;
use crate::rng::{Dice, dice};
use crate::stats::{self, Cause, Tally};
use crate::store::{self, Store, StoreEvent, StoreListener};
use crate::wakers::Wakers;

pub(crate) struct ThrottleSettings {
    /// Makes the pace of each key.
    pub(crate) pace: Box<dyn Fn() -> Box<dyn Pace> + Send + Sync>,
    /// Makes the random number generator of each key.
    pub(crate) dice: Box<dyn Fn() -> Dice + Send + Sync>,
    /// The longest that a request waits for its turn.
    pub(crate) max_wait: Duration,
    /// The most requests that wait for one key.
    pub(crate) max_queue: usize,
    /// The most keys in use at the same time.
    pub(crate) max_keys: usize,
    /// The longest hold that the upstream can ask for.
    pub(crate) max_hold: Duration,
    /// The store through which processes share the pace, if they do.
    pub(crate) store: Option<Arc<dyn Store>>,
    /// Stops keys with too many bad answers, if there is one.
    pub(crate) guard: Option<Arc<dyn Watch>>,
    /// The counts of the throttle, and its name in them.
    pub(crate) tally: Tally,
}

/// The state behind a [`Throttle`](super::Throttle) and all its clones.
pub(super) struct ThrottleCore {
    pub(super) settings: ThrottleSettings,
    /// The waiters of each key in use.
    pub(super) keys: KeyMap<Waiters>,
    /// How processes share the pace, if they do.
    pub(super) shared: Option<SharedPace>,
}

/// How processes share the pace of each key: through a register of a store.
#[derive(Clone)]
pub(super) struct SharedPace {
    pub(super) store: Arc<dyn Store>,
    /// The random id of this process among its peers.
    id: u64,
    /// The kind of the register. Paces that learn different state use different registers of a key.
    pub(super) kind: u64,
    /// Starts the task with this number, which writes the register of a key.
    start_sync: fn(&Arc<ThrottleCore>, Key, u64),
}

/// The work that a change of a key leaves to do without the key's lock.
#[derive(Default)]
struct Effects {
    wakers: Wakers,
    /// The number of the sync task to start, if the key needs one.
    sync_task: Option<u64>,
    /// How the store's reachability has changed, if it has.
    store_change: Option<StoreChange>,
}

impl ThrottleCore {
    pub(super) fn new(
        settings: ThrottleSettings,
        start_sync: fn(&Arc<ThrottleCore>, Key, u64),
    ) -> Result<Arc<Self>, ConfigError> {
        let keys = KeyMap::new(settings.max_keys);
        let shared = match &settings.store {
            Some(store) => {
                let kind =
                    PaceState::new((settings.pace)(), settings.max_hold, clock::now()).kind();
                let kind = kind.ok_or_else(|| {
                    ConfigError::new(
                        "this pace cannot be shared through a store: leave the store out, or take pace::Fair",
                    )
                })?;
                Some(SharedPace {
                    store: store.clone(),
                    id: dice() >> 11,
                    kind,
                    start_sync,
                })
            }
            None => None,
        };
        let core = Arc::new(ThrottleCore {
            settings,
            keys,
            shared,
        });
        stats::register(&core);
        if let Some(SharedPace { store, .. }) = &core.shared {
            let listener: Weak<dyn StoreListener> = Arc::downgrade(&core) as _;
            store.listen(listener);
        }
        Ok(core)
    }

    pub(super) fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns the name of `key` in errors and events. `request` is the request that has the key.
    pub(super) fn label(&self, key: Key, request: Option<&RequestRef<'_>>) -> Label {
        match &self.settings.store {
            Some(store) => store::label(&**store, key, request),
            None => key.own_label(request),
        }
    }

    /// Changes the waiters of `key`, and creates them if the key is not in use.
    pub(super) fn open<R>(
        self: &Arc<Self>,
        key: Key,
        now: Instant,
        with: impl FnOnce(&mut Waiters, &mut Wakers) -> R,
    ) -> Result<R, Full> {
        let mut effects = Effects::default();
        let guard = self.settings.guard.as_ref();
        let guarded = guard.map(|guard| NewKey::new(guard, key));
        let mut gone = Vec::new();
        let opened = self.keys.enter(
            key,
            now,
            || self.new_waiters(guarded, now),
            |key, waiters| {
                self.settings.tally.absorb(&waiters.counts);
                if guard.is_some() {
                    gone.push(key);
                }
            },
            |waiters| self.change(waiters, with, &mut effects),
        );
        if let Some(guard) = guard {
            gone.into_iter().for_each(|key| guard.forget_key(key));
        }
        self.run(key, effects);
        opened
    }

    /// Changes the waiters of `key`. Returns `None` if the key is not in use; a key with a waiter
    /// or a request in flight always is.
    pub(super) fn at<R>(
        self: &Arc<Self>,
        key: Key,
        with: impl FnOnce(&mut Waiters, &mut Wakers) -> R,
    ) -> Option<R> {
        let mut effects = Effects::default();
        let done = self
            .keys
            .find(key, |waiters| self.change(waiters, with, &mut effects));
        self.run(key, effects);
        done
    }

    /// Calls `with` on the waiters of `key`, if the key is in use. Neither wakes a waiter nor
    /// starts a task.
    pub(super) fn find<R>(&self, key: Key, with: impl FnOnce(&mut Waiters) -> R) -> Option<R> {
        self.keys.find(key, with)
    }

    /// Returns for how long a key without state would be on hold from the beginning, because a guard stops it.
    pub(super) fn stopped_for(&self, key: Key, now: Instant) -> Option<Duration> {
        let guard = self.settings.guard.as_ref()?;
        guard.stopped_for(guard.counted(key), now)
    }

    /// Makes the waiters of a new key. It begins on hold if its guard has stopped it.
    fn new_waiters(&self, guarded: Option<NewKey<'_>>, now: Instant) -> Waiters {
        let ThrottleSettings {
            pace,
            dice,
            max_hold,
            ..
        } = &self.settings;
        let mut queue = PacedQueue::new(pace(), dice(), *max_hold, now);
        if let Some(SharedPace { store, id, .. }) = &self.shared {
            queue.share(*id, store.address(), now);
        }
        let mut waiters = Waiters::new(queue, now);
        if let Some(left) = guarded.and_then(|key| key.begins(&self.settings.tally, now)) {
            let until = clock::after(now, left);
            waiters.hold_until(until, Cause::Guard, now, &mut Wakers::default());
        }
        waiters
    }

    fn change<R>(
        &self,
        waiters: &mut Waiters,
        with: impl FnOnce(&mut Waiters, &mut Wakers) -> R,
        effects: &mut Effects,
    ) -> R {
        waiters.wake(&mut effects.wakers);
        let done = with(waiters, &mut effects.wakers);
        waiters.wake(&mut effects.wakers);
        if self.is_shared() {
            effects.sync_task = waiters.needs_sync_task(clock::now(), &mut effects.wakers);
            effects.store_change = waiters.sync.take_change();
        }
        done
    }

    fn run(self: &Arc<Self>, key: Key, effects: Effects) {
        effects.wakers.wake();
        if let (Some(number), Some(shared)) = (effects.sync_task, &self.shared) {
            (shared.start_sync)(self, key, number);
        }
        let (tally, label) = (&self.settings.tally, || self.label(key, None));
        match effects.store_change {
            Some(StoreChange::Away(error)) => events::pace_alone(tally, &label(), &error),
            Some(StoreChange::Back) => events::pace_shared(tally, &label()),
            None => {}
        }
    }
}

impl StoreListener for ThrottleCore {
    fn on_event(self: Arc<Self>, key: Key, _: u64, event: StoreEvent) {
        let Some(kind) = self.shared.as_ref().map(|shared| shared.kind) else {
            return;
        };
        let now = clock::now();
        match event {
            StoreEvent::Register(register) if register.kind == kind => {
                self.at(key, |waiters, wakers| {
                    waiters.register_changed(register, now, wakers)
                });
            }
            StoreEvent::EventsMissed | StoreEvent::Reconnected | StoreEvent::Disconnected => {
                let mut keys = Vec::new();
                self.keys.for_each(|key, waiters| {
                    if waiters.queue.events_missed(now) {
                        keys.push(key);
                    }
                });
                // Starts or wakes the sync task of each key. If the store is unreachable, those
                // tasks notice it.
                for key in keys {
                    self.at(key, |_, _| ());
                }
            }
            _ => {}
        }
    }
}
