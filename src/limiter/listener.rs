//! The events of the store: what other processes did, and how the store answers claims for calls in
//! flight.

use std::sync::{Arc, Weak};

use super::engine::Core;
use crate::clock;
use crate::key::Key;
use crate::store::{StoreEvent, StoreListener};

impl Core {
    /// Subscribes to the events of the store. The subscription does not keep the core alive.
    pub(super) fn listen(self: &Arc<Self>) {
        let listener: Weak<dyn StoreListener> = Arc::downgrade(self) as _;
        self.settings.store.listen(listener);
    }
}

impl StoreListener for Core {
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        match event {
            StoreEvent::Hold(held) => self.hold_heard(key, held),
            StoreEvent::RemainingFell { writes } => self.less_heard(key, writes),
            StoreEvent::EventsMissed => self.events_missed(false, clock::now()),
            StoreEvent::Reconnected => self.events_missed(true, clock::now()),
            event => self.in_flight_heard(key, holder, event),
        }
    }
}
