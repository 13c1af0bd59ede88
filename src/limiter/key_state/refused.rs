//! A refusal by the store, kept until it can have changed: a request that cannot wait for the first slot is refused with it,
//! and the store is not asked for each.

use std::time::{Duration, Instant};

use crate::clock;
use crate::limiter::reservation::WaitBound;
use crate::quota::Limit;
use crate::store::Refusal;

#[derive(Clone, Copy, Debug)]
pub(super) struct Refused {
    /// The units of the request that was refused; a request with fewer units may find room.
    cost: u32,
    limit: Option<Limit>,
    /// The first slot that the refused request could have had.
    slot: Instant,
    /// When the store is asked again, because permits may have been given back.
    ask_at: Instant,
    pause: Duration,
}

/// How often the store is asked until the first slot.
const TIMES: u32 = 4;

const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

/// Slots that are not further apart are the same.
const SAME: Duration = Duration::from_millis(20);

impl Refused {
    /// What is kept after an answer in which a request of `cost` units was refused, if any.
    pub(super) fn after(
        before: Option<Refused>,
        cost: Option<u32>,
        refusal: Option<Refusal>,
        now: Instant,
    ) -> Option<Refused> {
        let (cost, Refusal { wait, limit }) = cost.zip(refusal)?;
        let slot = clock::after(now, wait?);
        let is_same = |before: &Refused| slot.max(before.slot) - slot.min(before.slot) <= SAME;
        let pause = match before.filter(is_same) {
            Some(before) => before.pause,
            None => ((slot - now) / TIMES).max(SHORTEST_PAUSE),
        };
        let ask_at = clock::after(now, pause).min(slot);
        Some(Refused { cost, limit, slot, ask_at, pause })
    }

    /// The refusal of a request that cannot wait for the slot, if the store is not to be asked yet.
    pub(super) fn of(&self, cost: u32, bound: WaitBound, now: Instant) -> Option<Refusal> {
        let &Refused { slot, limit, .. } = self;
        let refuses = now < self.ask_at && cost >= self.cost && bound.latest < slot;
        refuses.then(|| Refusal { wait: Some(slot - now), limit })
    }
}
