//! The events that a store sends to its listeners.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use super::{HoldState, Register, SetQuota, StoreError};
use crate::key::Key;
use crate::locks::lock;

/// An event of which a store notifies a listener.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreEvent {
    /// The store changed the in-flight slots of a holder.
    #[non_exhaustive]
    InFlight {
        /// The number of the last claim that the store took in. If the holder has sent a later
        /// claim, it ignores this event.
        number: u64,
        /// How many slots the store has ever granted to the holder.
        granted: u64,
        /// Whether other holders wait, or more slots are taken than the limit has, which was lowered. Then the
        /// holder returns each slot whose call has ended, and does not pass it to its next waiter.
        others_wait: bool,
        /// The version of the holder's slots, which grows with each event. An event with a smaller
        /// version is older.
        version: u64,
    },
    /// The claim failed. The store retries while the holder uses slots.
    Failed(StoreError),
    /// The hold of the key has changed.
    Hold(HoldState),
    /// An upstream stated that less is left of a limit than the store knew. Permits that are
    /// prefetched or booked may be too many.
    #[non_exhaustive]
    RemainingFell {
        /// [`Lease::writes`](crate::store::Lease::writes) of the state after this event. If a
        /// limiter has a reply with at least this number, it knows what is left.
        writes: u64,
    },
    /// A quota was set for the key, or has ended.
    SetQuota(Box<SetQuota>),
    /// Another process has changed a register.
    Register(Register),
    /// The store receives no events from other processes until
    /// [`EventsMissed`](StoreEvent::EventsMissed).
    Disconnected,
    /// The store receives events again and may have missed some. A listener reads holds, set
    /// quotas and registers again.
    EventsMissed,
    /// The store has a new connection to its server, which may have lost its state. A listener also
    /// has the store confirm its bookings, before other processes are granted the same.
    Reconnected,
    /// The store has confirmed the last claim. The holder's slots are valid until this moment,
    /// unless a later claim is confirmed. If a store never sends this event, its claims do not
    /// expire.
    ClaimValidUntil(Instant),
    /// The last claim has expired and could not be repeated. Other holders may be granted the
    /// slots.
    ClaimExpired,
}

impl StoreEvent {
    /// Makes [`StoreEvent::InFlight`], for stores of your own.
    pub fn in_flight(number: u64, granted: u64, others_wait: bool, version: u64) -> Self {
        StoreEvent::InFlight {
            number,
            granted,
            others_wait,
            version,
        }
    }
}

/// A limiter or throttle that a store notifies.
pub trait StoreListener: Send + Sync + 'static {
    /// Receives an event about `key`. If the event is about calls in flight, `holder` is the holder
    /// of the claim, else 0. Must not block or panic.
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent);
}

/// Notifies `listener`. A panic of the listener ends here, after the panic hook has reported it,
/// and affects no other listener.
pub(super) fn notify(listener: Arc<dyn StoreListener>, key: Key, holder: u64, event: StoreEvent) {
    let _ = catch_unwind(AssertUnwindSafe(|| listener.on_event(key, holder, event)));
}

/// The listeners that are notified of holds and registers until they are dropped.
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
    /// A dropped listener is removed by the next notification, or when the list has doubled since
    /// the last removal. So the list of a program that makes a layer for each tenant stays short.
    pub(super) fn add(&self, listener: Weak<dyn StoreListener>) {
        let mut listening = lock(&self.0);
        if listening.listeners.len() >= listening.sweep_at {
            listening.remove_dropped();
        }
        listening.listeners.push(listener);
    }

    /// Notifies all listeners of an event about `key`. Does not hold the lock meanwhile.
    pub(super) fn notify_all(&self, key: Key, event: &StoreEvent) {
        let mut listening = lock(&self.0);
        listening.remove_dropped();
        let alive: Vec<_> = listening
            .listeners
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        drop(listening);
        alive
            .into_iter()
            .for_each(|listener| notify(listener, key, 0, event.clone()));
    }
}

impl Listening {
    fn remove_dropped(&mut self) {
        self.listeners
            .retain(|listener| listener.strong_count() > 0);
        self.sweep_at = (2 * self.listeners.len()).max(StoreListeners::SMALLEST_SWEEP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silent;

    impl StoreListener for Silent {
        fn on_event(self: Arc<Self>, _key: Key, _holder: u64, _event: StoreEvent) {}
    }

    #[test]
    fn listeners_that_were_dropped_are_removed() {
        let (listeners, kept) = (StoreListeners::default(), Arc::new(Silent));
        for number in 0..10_000 {
            let dropped: Weak<dyn StoreListener> = Arc::downgrade(&(Arc::new(Silent) as _));
            listeners.add(dropped);
            if number % 1000 == 0 {
                let alive: Arc<dyn StoreListener> = kept.clone();
                listeners.add(Arc::downgrade(&alive));
            }
        }
        let listening = listeners.0.lock().unwrap();
        let alive = listening
            .listeners
            .iter()
            .filter(|listener| listener.strong_count() > 0)
            .count();
        assert_eq!(alive, 10, "a listener that lives stays");
        assert!(
            listening.listeners.len() <= 2 * alive + 16,
            "{} are kept",
            listening.listeners.len()
        );
    }
}
