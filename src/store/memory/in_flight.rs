//! The calls in flight of one key, with the listeners to notify.

use std::sync::Arc;
use std::time::Duration;

use crate::key_map::Evict;
use crate::limit::{HolderUpdate, InFlightSlots, Micros};
use crate::store::{Claim, StoreEvent, StoreListener};

/// The in-flight slots of a key, and the listeners of their holders.
#[derive(Default)]
pub(super) struct InFlightState {
    slots: InFlightSlots,
    /// The listener of each holder, by the number of the holder.
    listeners: Vec<(u64, Arc<dyn StoreListener>)>,
}

impl Evict for InFlightState {
    type Now = Micros;

    fn idle_from(&self) -> Option<Micros> {
        self.slots.is_empty().then_some(0)
    }
}

impl InFlightState {
    /// Takes in a claim. Returns the events that follow, and the holders and listeners that they
    /// are for.
    pub(super) fn claim(
        &mut self,
        claim: &Claim,
        listener: &Arc<dyn StoreListener>,
    ) -> Vec<(u64, Arc<dyn StoreListener>, StoreEvent)> {
        if !self
            .listeners
            .iter()
            .any(|(holder, _)| *holder == claim.holder)
        {
            self.listeners.push((claim.holder, listener.clone()));
        }
        // Claims within one process do not expire: a holder always states that it leaves.
        let claimed = Claim {
            ttl: Duration::MAX,
            ..*claim
        };
        let InFlightState { slots, listeners } = self;
        let mut events = Vec::new();
        slots.claim(
            0,
            claimed,
            |HolderUpdate {
                 id,
                 number,
                 granted,
                 others_wait,
                 version,
             }| {
                if let Some((_, listener)) = listeners.iter().find(|(holder, _)| *holder == id) {
                    events.push((
                        id,
                        listener.clone(),
                        StoreEvent::in_flight(number, granted, others_wait, version),
                    ));
                }
            },
        );
        listeners.retain(|(holder, _)| slots.knows(*holder));
        events
    }

    /// Returns how many slots are taken, and how many are free under a limit of `most`.
    pub(super) fn usage(&self, most: u32) -> (u32, u32) {
        self.slots.usage(most)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use crate::key::Key;
    use crate::store::{Claim, MemoryStore, Store};

    use super::*;

    /// Panics when the holder with this number is granted a slot.
    #[derive(Default)]
    struct Panics {
        holder: u64,
        told: AtomicU64,
    }

    impl StoreListener for Panics {
        fn on_event(self: Arc<Self>, _key: Key, holder: u64, event: StoreEvent) {
            if let StoreEvent::InFlight { granted: 1.., .. } = event {
                assert_ne!(holder, self.holder);
                self.told.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// A listener runs code of the user, such as the waker of a task. Without their events, others never use
    /// their slots.
    #[test]
    fn a_listener_that_panics_keeps_no_event_from_others() {
        let store = MemoryStore::default();
        let listener = Arc::new(Panics {
            holder: 2,
            ..Panics::default()
        });
        let claim = |holder, number, in_use, wanted| {
            let mut claim = Claim::new(Key::ALL, holder, number);
            (claim.limit, claim.in_use, claim.wanted) = (2, in_use, wanted);
            let listener: Arc<dyn StoreListener> = listener.clone();
            store.claim(claim, &listener);
        };
        claim(1, 1, 2, 0);
        claim(2, 1, 0, 1);
        claim(3, 1, 0, 1);
        claim(1, 2, 0, 0);
        assert_eq!(listener.told.load(Ordering::Relaxed), 1);
    }
}
