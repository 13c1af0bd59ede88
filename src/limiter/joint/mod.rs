//! Joint requests: requests that take permits of several keys, all or none.
//!
//! A request may count under several keys, each with a quota of its own: a message to a channel
//! counts for the channel and for all channels. It may leave when all of its keys allow it at one
//! moment. It then has a slot of each key, and the slots have a moment in common: a *joint slot*.
//!
//! # How a joint slot is found
//!
//! No key is locked while another is asked. The request books at one key, and asks the next key for
//! a slot not before that one ([`Demand::earliest`](crate::store::Demand::earliest)). If the next
//! key allows the request only later, the earlier slots are given back and booked anew for the
//! later moment. Each round moves the moment only later, so the search ends: with a common moment,
//! or beyond the longest wait. A refusal gives all slots back, so it leaves no trace.
//!
//! Each key remembers the last slot to which it moved a request. The key whose slot is the furthest
//! ahead is asked first, alone. If no key has one ahead, the keys of a store that answers later are
//! asked at the same time.
//!
//! A slot that is later than the first free one is kept as an advance booking by the store. It
//! counts only in the windows that it touches. So a request that waits long for one key takes
//! nothing from the other keys meanwhile.
//!
//! # Order
//!
//! The requests of this process with equal keys form a [`JointSet`]. They and their joint slots stand in
//! [`Lanes`](super::lanes::Lanes), as those of a key do: the first request gets the first joint slot of its costs. One task at a time
//! books for the set, for the first request that has no slot. So a request that costs much is
//! overtaken by none that costs less.
//!
//! A joint slot that is due goes to the first request. If a store has not replied for some time, it
//! has to confirm its slot before. The requests behind wait for that, too.
//!
//! The request leaves when its task runs. By then, the joint slot may be useless:
//!
//! - A key was put on hold, or a store has lost its state.
//! - The task runs so late that a slot has expired.
//! - A key is on probation, and another request is its probe. If the turns of several requests come
//!   at one moment, the first whose task runs is the probe.
//!
//! Then all of its slots are given back, and the request is first in its set again. A later request
//! of the set may have left before it came back. In all other cases, no request is overtaken by a
//! later one of its set.
//!
//! | file | what it has |
//! |---|---|
//! | `mod` | slots that go back |
//! | `set` | [`JointSet`]: the waiters of equal keys, and their joint slots |
//! | `booking` | the search for a joint slot, and the calls to stores that may have lost one |

mod booking;
mod set;

use std::sync::Arc;
use std::time::Instant;

use super::engine::Core;
use super::key_state;
use super::part::Part;
use super::reservation::Reservation;
use crate::clock;
use crate::key::Key;

pub(super) use booking::doubtful;
pub(super) use set::{JointSet, JointSets};

/// Notes whether a slot of `key` was used, or expired before the request left.
pub(super) fn ended(core: &Arc<Core>, key: Key, now: Instant, is_used: bool) {
    core.with_state(key, now, |state, ctx| {
        key_state::ended(state, ctx, is_used);
    });
}

pub(super) fn give_back(parts: &[Part], slots: impl IntoIterator<Item = Option<Reservation>>) {
    let now = clock::now();
    for (Part { core, key, .. }, slot) in parts.iter().zip(slots) {
        if let Some(slot) = slot {
            if slot.until <= now {
                ended(core, *key, now, false);
            }
            core.give_back(*key, slot);
        }
    }
}
