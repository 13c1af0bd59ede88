//! What a store is told of calls in flight, and what it tells those who listen.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use super::{Held, Register, StoreError};
use crate::key::Key;

/// What a gate says about the calls of a key: how many are in flight, and how many wait.
///
/// It says how things are, not what changed: one that is lost is made up for by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// Whose calls.
    pub key: Key,
    /// Who says so: another number in each gate of a process, and another one for what it says of the key anew.
    pub holder: u64,
    /// Larger than that of the holder's claims before; one that arrives after a later one is passed over.
    pub number: u64,
    /// How many may be in flight at the same time.
    pub most: u32,
    /// How many seats it sits on: calls in flight.
    pub sits: u32,
    /// How many more it wants, for those who wait.
    pub wants: u32,
    /// How many seats it knows that it was ever given.
    pub heard: u64,
    /// For how long a claim is good that is not repeated, when its process dies.
    pub life: Duration,
}

impl Claim {
    /// Of nobody.
    #[cfg(feature = "redis")]
    pub(crate) const NONE: Claim = Claim {
        key: Key::ALL,
        holder: 0,
        number: 0,
        most: 0,
        sits: 0,
        wants: 0,
        heard: 0,
        life: Duration::ZERO,
    };

    /// Whether its holder sits on nothing and wants nothing: it leaves.
    #[cfg(feature = "redis")]
    pub(crate) fn is_over(&self) -> bool {
        self.sits == 0 && self.wants == 0
    }
}

/// What a store tells a gate.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum News {
    /// How things are.
    #[non_exhaustive]
    Seats {
        /// The last claim that was taken in. Where that is not the last that was made, this is old news.
        number: u64,
        /// How many seats it was ever given.
        given: u64,
        /// Whether other gates wait: then a seat whose call has ended is to go back, not to the next who waits here.
        others_wait: bool,
        /// Grows with what changes: what has a smaller one is older.
        version: u64,
    },
    /// The claim could not be made; the store tries again while any seats are taken.
    Failed(StoreError),
    /// What holds the key has changed.
    Held(Held),
    /// Another process has changed a register.
    Register(Register),
    /// From now on what others do is not heard, until [`Missed`](News::Missed) is.
    Deaf,
    /// What others did may have been missed: what is known of holds and registers is to be asked again.
    Missed,
    /// The last claim has run out, and could not be repeated: the seats may be given to others.
    Lost,
}

impl News {
    /// How things are: for stores of your own.
    pub fn seats(number: u64, given: u64, others_wait: bool, version: u64) -> Self {
        News::Seats { number, given, others_wait, version }
    }
}

/// Who is told: a gate.
pub trait Listener: Send + Sync + 'static {
    /// Hears what there is to know about `key`, or about its calls for which `holder` claimed. Does not block.
    fn hear(self: Arc<Self>, key: Key, holder: u64, news: News);
}

/// Those who are told of holds and registers, for as long as they live.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Vec<Weak<dyn Listener>>>);

impl Listeners {
    pub(super) fn add(&self, listener: Weak<dyn Listener>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(listener);
    }

    /// Tells all, without the lock.
    pub(super) fn tell(&self, key: Key, news: &News) {
        let mut listeners = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listeners.retain(|listener| listener.strong_count() > 0);
        let alive: Vec<_> = listeners.iter().filter_map(Weak::upgrade).collect();
        drop(listeners);
        alive.into_iter().for_each(|listener| listener.hear(key, 0, news.clone()));
    }
}
