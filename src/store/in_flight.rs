//! What a store is told of calls in flight, and what it tells those who listen.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

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
    /// An upstream said that less is left of a limit than the store knew: permits that lie at hand or are booked may be too
    /// many.
    #[non_exhaustive]
    Less {
        /// [`Lease::writes`](crate::store::Lease::writes) of the state that knows it: who has been answered so or later
        /// knows it too.
        writes: u64,
    },
    /// Another process has changed a register.
    Register(Register),
    /// From now on what others do is not heard, until [`Missed`](News::Missed) is.
    Deaf,
    /// What others did may have been missed: what is known of holds and registers is to be asked again.
    Missed,
    /// There is another connection to the server, which may have lost its state meanwhile: what is booked there is to be
    /// asked again as well, before others are granted the same.
    Reconnected,
    /// The store has confirmed the last claim: its seats are the gate's until then, and no longer unless it is confirmed
    /// again. A store that does not say so keeps them for ever.
    Good(Instant),
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
    /// Hears what there is to know about `key`, or about its calls for which `holder` claimed. Does not block, and does
    /// not panic.
    fn hear(self: Arc<Self>, key: Key, holder: u64, news: News);
}

/// Notifies `listener`. One that panics harms nobody else: the panic ends here, after the panic hook has reported it.
pub(super) fn notify(listener: Arc<dyn Listener>, key: Key, holder: u64, news: News) {
    let _ = catch_unwind(AssertUnwindSafe(|| listener.hear(key, holder, news)));
}

/// The listeners that are notified of holds and registers, for as long as they live.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Listening>);

#[derive(Default)]
struct Listening {
    listeners: Vec<Weak<dyn Listener>>,
    /// At this length, listeners that were dropped are removed.
    sweep_at: usize,
}

impl Listeners {
    const SMALLEST_SWEEP: usize = 16;

    /// Notifies `listener` from now on.
    ///
    /// A listener that was dropped is removed by the next notification, or when the list has doubled since the last
    /// removal: a program that makes a layer for each tenant does not keep all of them.
    pub(super) fn add(&self, listener: Weak<dyn Listener>) {
        let mut listening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if listening.listeners.len() >= listening.sweep_at {
            listening.remove_dropped();
        }
        listening.listeners.push(listener);
    }

    /// Notifies all of them. Does not hold the lock while it does.
    pub(super) fn tell(&self, key: Key, news: &News) {
        let mut listening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listening.remove_dropped();
        let alive: Vec<_> = listening.listeners.iter().filter_map(Weak::upgrade).collect();
        drop(listening);
        alive.into_iter().for_each(|listener| notify(listener, key, 0, news.clone()));
    }
}

impl Listening {
    fn remove_dropped(&mut self) {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        self.sweep_at = (2 * self.listeners.len()).max(Listeners::SMALLEST_SWEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Deaf;

    impl Listener for Deaf {
        fn hear(self: Arc<Self>, _key: Key, _holder: u64, _news: News) {}
    }

    #[test]
    fn listeners_that_were_dropped_are_removed() {
        let (listeners, kept) = (Listeners::default(), Arc::new(Deaf));
        for number in 0..10_000 {
            let dropped: Weak<dyn Listener> = Arc::downgrade(&(Arc::new(Deaf) as _));
            listeners.add(dropped);
            if number % 1000 == 0 {
                let alive: Arc<dyn Listener> = kept.clone();
                listeners.add(Arc::downgrade(&alive));
            }
        }
        let listening = listeners.0.lock().unwrap();
        let alive = listening.listeners.iter().filter(|listener| listener.strong_count() > 0).count();
        assert_eq!(alive, 10, "a listener that lives stays");
        assert!(listening.listeners.len() <= 2 * alive + 16, "{} are kept", listening.listeners.len());
    }
}
