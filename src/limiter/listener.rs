//! The events of the store: what other processes did, and how the store answers claims for calls in
//! flight.

use std::sync::Arc;

use super::engine::Core;
use super::holds;
use super::in_flight_slot;
use super::key_state::{FLEET_PROBE, KeyState};
use super::own_quota;
use crate::clock;
use crate::key::Key;
use crate::store::{StoreEvent, StoreListener};

impl StoreListener for Core {
    fn on_event(self: Arc<Self>, key: Key, holder: u64, event: StoreEvent) {
        let core = &self;
        match event {
            StoreEvent::Hold(held) => holds::adopt_published(core, key, held),
            StoreEvent::RemainingFell { writes } => {
                core.with_state(key, clock::now(), |state, ctx| {
                    if state.store.is_behind(writes) {
                        state.tighten(ctx);
                    }
                });
            }
            StoreEvent::EventsMissed => events_missed(core, false),
            StoreEvent::Reconnected => events_missed(core, true),
            StoreEvent::Register(register) if register.kind == FLEET_PROBE => {
                // Also a process that has not used the key keeps its requests back. If there is no room, it probes for itself.
                let now = clock::now();
                let _ =
                    core.with_new_state(key, now, |state, ctx| state.learn_fleet(ctx, &register));
            }
            StoreEvent::SetQuota(set) => own_quota::take_in(core, key, &set),
            event => in_flight_slot::on_event(core, key, holder, event),
        }
    }
}

/// Takes in that this process may have missed events of the store. So it asks the store again about
/// holds. If the store was `reconnected`, it may also have lost its state. Then this process asks
/// about bookings as well.
fn events_missed(core: &Arc<Core>, reconnected: bool) {
    let now = clock::now();
    let mut keys = Vec::new();
    core.states.for_each(|key, state| {
        state.doubt();
        if state.hold.left(now).is_some() || (reconnected && state.is_booked()) {
            keys.push(key);
        }
    });
    for key in keys {
        core.with_state(key, now, KeyState::confirm);
    }
}
