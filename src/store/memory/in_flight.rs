//! The calls in flight of one key, with the listeners to notify.

use std::sync::Arc;

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
        let claimed = claim.of_holder(Micros::MAX);
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
