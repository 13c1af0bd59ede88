//! Calls in flight: the claims that a store receives, and the events that it sends to listeners.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::{HoldState, Register, StoreError};
use crate::key::Key;

/// What a limiter states about the calls of a key: how many are in flight, and how many wait.
///
/// It states the whole state, not what changed: a claim that is lost is replaced by the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Claim {
    /// The key.
    pub key: Key,
    /// The holder: another number for each limiter of a process, and a new one for each time that it opens the key.
    pub holder: u64,
    /// Grows with each claim of the holder. A claim that arrives after a later one is ignored.
    pub number: u64,
    /// How many may be in flight at the same time.
    pub limit: u32,
    /// How many seats it uses: calls in flight.
    pub in_use: u32,
    /// How many more it wants, for its waiters.
    pub wanted: u32,
    /// How many seats it knows that it was ever given.
    pub granted_seen: u64,
    /// How long the claim is valid if it is not repeated, because its process died.
    pub ttl: Duration,
}

impl Claim {
    /// The claim of no holder.
    #[cfg(feature = "redis")]
    pub(crate) const NONE: Claim = Claim {
        key: Key::ALL,
        holder: 0,
        number: 0,
        limit: 0,
        in_use: 0,
        wanted: 0,
        granted_seen: 0,
        ttl: Duration::ZERO,
    };

    /// Returns whether its holder uses no seat and wants none: it leaves.
    #[cfg(feature = "redis")]
    pub(crate) fn is_over(&self) -> bool {
        self.in_use == 0 && self.wanted == 0
    }
}

/// What a store notifies a listener of.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreEvent {
    /// The seats of a holder.
    #[non_exhaustive]
    InFlight {
        /// The number of the last claim that the store took in. If that is not the last that was made, this is old.
        number: u64,
        /// How many seats the holder was ever given.
        granted: u64,
        /// Whether other holders wait. Then a seat whose call has ended goes back, not to the next waiter here.
        others_wait: bool,
        /// Grows with each change: an event with a smaller version is older.
        version: u64,
    },
    /// The claim failed. The store retries while any seats are in use.
    Failed(StoreError),
    /// The hold of the key has changed.
    Hold(HoldState),
    /// An upstream stated that less is left of a limit than the store knew. Permits that are at hand or booked may be too many.
    #[non_exhaustive]
    RemainingFell {
        /// [`Lease::writes`](crate::store::Lease::writes) of the state that knows it. A limiter with an answer of at least this number
        /// knows it, too.
        writes: u64,
    },
    /// Another process has changed a register.
    Register(Register),
    /// No events arrive from now on, until [`EventsMissed`](StoreEvent::EventsMissed).
    Disconnected,
    /// Events may have been missed: holds and registers have to be read again.
    EventsMissed,
    /// There is a new connection to the server, which may have lost its state meanwhile: bookings have to be confirmed as well, before
    /// other processes are granted the same.
    Reconnected,
    /// The store has confirmed the last claim. Its seats are valid until this moment, unless a claim is confirmed again. With a store that
    /// never sends this they are valid for ever.
    ClaimValidUntil(Instant),
    /// The last claim has expired and could not be repeated: other holders may be given the seats.
    ClaimExpired,
}

impl StoreEvent {
    /// Makes [`StoreEvent::InFlight`], for stores of your own.
    pub fn in_flight(number: u64, given: u64, others_wait: bool, version: u64) -> Self {
        StoreEvent::InFlight { number, granted: given, others_wait, version }
    }
}

/// A limiter or throttle that a store notifies.
pub trait StoreListener: Send + Sync + 'static {
    /// Receives an event of `key`, or of its calls in flight that `holder` claimed. Must not block or panic.
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent);
}

/// Notifies `listener`. If the listener panics, no other listener is affected: the panic ends here, after the panic hook has
/// reported it.
pub(super) fn notify(listener: Arc<dyn StoreListener>, key: Key, holder: u64, event: StoreEvent) {
    let _ = catch_unwind(AssertUnwindSafe(|| listener.on_event(key, holder, event)));
}

/// The listeners that are notified of holds and registers, for as long as they live.
#[derive(Default)]
pub(super) struct StoreListeners(Mutex<Listening>);

#[derive(Default)]
struct Listening {
    listeners: Vec<Weak<dyn StoreListener>>,
    /// At this length, listeners that were dropped are removed.
    sweep_at: usize,
}

impl StoreListeners {
    const SMALLEST_SWEEP: usize = 16;

    /// Notifies `listener` from now on.
    ///
    /// A listener that was dropped is removed by the next notification, or when the list has doubled since the last
    /// removal: a program that makes a layer for each tenant does not keep all of them.
    pub(super) fn add(&self, listener: Weak<dyn StoreListener>) {
        let mut listening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if listening.listeners.len() >= listening.sweep_at {
            listening.remove_dropped();
        }
        listening.listeners.push(listener);
    }

    /// Notifies all of them. Does not hold the lock while it does.
    pub(super) fn tell(&self, key: Key, event: &StoreEvent) {
        let mut listening = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        listening.remove_dropped();
        let alive: Vec<_> = listening.listeners.iter().filter_map(Weak::upgrade).collect();
        drop(listening);
        alive.into_iter().for_each(|listener| notify(listener, key, 0, event.clone()));
    }
}

impl Listening {
    fn remove_dropped(&mut self) {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        self.sweep_at = (2 * self.listeners.len()).max(StoreListeners::SMALLEST_SWEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Deaf;

    impl StoreListener for Deaf {
        fn on_event(self: Arc<Self>, _key: Key, _holder: u64, _event: StoreEvent) {}
    }

    #[test]
    fn listeners_that_were_dropped_are_removed() {
        let (listeners, kept) = (StoreListeners::default(), Arc::new(Deaf));
        for number in 0..10_000 {
            let dropped: Weak<dyn StoreListener> = Arc::downgrade(&(Arc::new(Deaf) as _));
            listeners.add(dropped);
            if number % 1000 == 0 {
                let alive: Arc<dyn StoreListener> = kept.clone();
                listeners.add(Arc::downgrade(&alive));
            }
        }
        let listening = listeners.0.lock().unwrap();
        let alive = listening.listeners.iter().filter(|listener| listener.strong_count() > 0).count();
        assert_eq!(alive, 10, "a listener that lives stays");
        assert!(listening.listeners.len() <= 2 * alive + 16, "{} are kept", listening.listeners.len());
    }
}
