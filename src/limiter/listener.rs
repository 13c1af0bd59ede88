//! The events of the store: what other processes did, and how the store answers claims for calls in flight.

use std::sync::{Arc, Weak};

use super::engine::Core;
use crate::clock;
use crate::key::Key;
use crate::store::{Listener, News};

impl Core {
    /// Subscribes to the events of the store. The subscription does not keep the core alive.
    pub(super) fn listen(self: &Arc<Self>) {
        let listener: Weak<dyn Listener> = Arc::downgrade(self) as _;
        self.settings.store.listen(listener);
    }
}

impl Listener for Core {
    fn hear(self: Arc<Self>, key: Key, holder: u64, news: News) {
        match news {
            News::Held(held) => self.hold_heard(key, held),
            News::Less { writes } => self.less_heard(key, writes),
            News::Missed => self.events_missed(false, clock::now()),
            News::Reconnected => self.events_missed(true, clock::now()),
            news => self.in_flight_heard(key, holder, news),
        }
    }
}
