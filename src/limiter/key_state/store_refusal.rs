//! A refusal of the store, kept for a while. If a later request cannot wait for the first slot
//! either, it is refused without a call to the store.

use std::time::{Duration, Instant};

use crate::clock;
use crate::quota::Limit;
use crate::store::Refusal;
use crate::wait_queue::WaitBound;

/// A refusal of the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreRefusal {
    /// The units of the refused request. A request with fewer units may find room.
    cost: u32,
    /// The limit that refused it.
    limit: Option<Limit>,
    /// The first slot that the refused request could have had.
    slot: Instant,
    /// When the store is called again, because permits may have been given back.
    ask_at: Instant,
    /// How long after a refusal the store is called again.
    pause: Duration,
}

/// How often the store is called until the first slot.
const TIMES: u32 = 4;

/// The shortest pause between two calls.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// Two first slots that are no further apart are one slot.
const SAME_SLOT: Duration = Duration::from_millis(20);

impl StoreRefusal {
    /// Returns what is kept after an answer. `cost` is the cost of the request that it refused, if
    /// it refused one. `before` is what was kept until then.
    pub(super) fn after(
        before: Option<StoreRefusal>,
        cost: Option<u32>,
        refusal: Option<Refusal>,
        now: Instant,
    ) -> Option<StoreRefusal> {
        let (cost, Refusal { wait, limit }) = cost.zip(refusal)?;
        let slot = clock::after(now, wait?);
        let is_same =
            |before: &StoreRefusal| slot.max(before.slot) - slot.min(before.slot) <= SAME_SLOT;
        let pause = match before.filter(is_same) {
            Some(before) => before.pause,
            None => ((slot - now) / TIMES).max(SHORTEST_PAUSE),
        };
        let ask_at = clock::after(now, pause).min(slot);
        Some(StoreRefusal {
            cost,
            limit,
            slot,
            ask_at,
            pause,
        })
    }

    /// Returns the refusal of a request that cannot wait for the first slot, if the store is not to
    /// be called yet.
    pub(super) fn of(&self, cost: u32, bound: WaitBound, now: Instant) -> Option<Refusal> {
        let &StoreRefusal { slot, limit, .. } = self;
        let refuses = now < self.ask_at && cost >= self.cost && bound.latest < slot;
        refuses.then(|| Refusal {
            wait: Some(slot - now),
            limit,
        })
    }
}
