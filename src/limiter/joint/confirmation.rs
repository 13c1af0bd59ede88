//! The confirmation of a joint slot that is due.
//!
//! If a store has not replied for some time, it may have lost its state, and the slots with it. Then
//! it has to confirm that it still has them. Slots that were booked before the quota of a key changed
//! are never confirmed, so that their requests book anew. The set waits for its reply, and no request behind
//! leaves before the first one: see [`JointSet`].

use std::sync::Arc;
use std::time::Instant;

use super::set::JointSet;
use crate::clock;
use crate::join::join_all;
use crate::limiter::key_state::{ask_to_confirm, confirmed};
use crate::limiter::part::{Part, PerPart};
use crate::limiter::slots::Slots;
use crate::limiter::store_call::StoreCall;

/// Returns the parts whose stores have to confirm their slots before `slot` may be used.
pub(in crate::limiter) fn doubtful(parts: &[Part], slot: &Slots, now: Instant) -> PerPart<usize> {
    let mut doubtful = PerPart::new();
    for (index, Part { core, key, .. }) in parts.iter().enumerate() {
        let Some(of_part) = &slot.slots[index] else {
            continue;
        };
        // No visit, which could wake tasks: the set is locked.
        let confirmed = core.states.find(*key, |state| {
            let own = core.own_spec(state, now);
            let spec = own.as_ref().unwrap_or(&core.settings.spec);
            state.has_confirmed(spec, of_part, slot.changes[index], now)
        });
        if confirmed != Some(true) {
            doubtful.push(index);
        }
    }
    doubtful
}

/// Asks the stores of the parts `doubtful` to confirm what they have granted.
pub(super) async fn confirm(set: Arc<JointSet>, doubtful: PerPart<usize>) {
    let calls = doubtful.iter().map(|part| confirm_part(&set.parts[*part]));
    join_all(calls).await;
    set.confirmed();
}

async fn confirm_part(Part { core, key, .. }: &Part) {
    let asked = core.with_state(*key, clock::now(), ask_to_confirm);
    let Some((call, reply)) = asked else { return };
    let open = StoreCall::new(core, *key, call);
    open.answered(reply.arrives().await, confirmed);
}
