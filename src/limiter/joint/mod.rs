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
//! The requests of this process with equal keys form a [`JointSet`]. It has two sorted lists, as the
//! queue of a key has: the first request gets the first joint slot of its costs. One task at a time
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
//! | `mod` | [`Part`], [`PartRef`] and [`JointSlot`]: values |
//! | `lanes` | which requests of a set have a joint slot |
//! | `set` | [`JointSet`]: the waiters of equal keys, and their joint slots |
//! | `booking` | the search for a joint slot |
//! | `confirmation` | the calls to stores that may have lost a joint slot |
//! | `at_once` | permits that are at hand, and the permit that has them all |
//! | `waiter` | the future of a joint request |
//! | `start` | the start: permits at once, or a wait |
//! | `entrance` | the entrance of the requests of a layer |

mod at_once;
mod booking;
mod confirmation;
mod entrance;
mod lanes;
mod set;
mod start;
mod waiter;

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::engine::Core;
use super::entry::Entry;
use super::key_state::{self, KeyState};
use super::limited::LimitName;
use super::quotas::QuotaId;
use super::reservation::Reservation;
use crate::clock;
use crate::error::StoreError;
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::store::Refusal;

pub(crate) use entrance::{Entered, enter};
pub(super) use set::JointSets;
pub(crate) use start::{JointStarted, start};
pub(crate) use waiter::JointWaiter;

/// The most keys of a request.
pub(crate) const MOST_PARTS: usize = 8;

/// One key of a joint request.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    core: Arc<Core>,
    key: Key,
    /// See [`Entry::host`].
    host: Option<Key>,
    /// The quota that the request states for the key.
    quota: QuotaId,
}

/// A joint request: its keys, and what it takes of each of them.
#[derive(Clone, Debug)]
struct JointRequest {
    parts: PerPart<Part>,
    costs: Costs,
}

/// One key of a request whose permits may be at hand, and what it takes of it. To clone the `Arc`
/// would cost it 10 ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartRef<'a> {
    core: &'a Arc<Core>,
    /// It has no deadline: that of the request is the same for all parts.
    entry: Entry,
}

/// One value for each part, in their order.
pub(super) type PerPart<T> = SmallVec<[T; 4]>;

/// The cost of a request under each of its keys.
type Costs = PerPart<u32>;

impl<'a> PartRef<'a> {
    pub(in crate::limiter) fn new(core: &'a Arc<Core>, entry: Entry) -> Self {
        PartRef { core, entry }
    }

    fn core_and_key(&self) -> (&'a Arc<Core>, Key) {
        (self.core, self.entry.key)
    }

    fn to_part(self) -> Part {
        let PartRef { core, entry } = self;
        Part {
            core: core.clone(),
            key: entry.key,
            host: entry.host,
            quota: entry.quota,
        }
    }
}

/// Notes whether a slot of `key` was used, or expired before the request left.
fn ended(core: &Arc<Core>, key: Key, now: Instant, is_used: bool) {
    core.with_state(key, now, |state, ctx| {
        key_state::ended(state, ctx, is_used);
    });
}

impl JointRequest {
    /// Makes a request that keeps its limiters.
    fn new(parts: &[PartRef<'_>]) -> Self {
        JointRequest {
            parts: parts.iter().copied().map(PartRef::to_part).collect(),
            costs: parts.iter().map(|part| part.entry.cost).collect(),
        }
    }

    fn refs(&self) -> impl Iterator<Item = PartRef<'_>> {
        let parts = self.parts.iter().zip(&self.costs);
        parts.map(|(part, cost)| part.with_cost(*cost))
    }
}

impl Part {
    fn with_cost(&self, cost: u32) -> PartRef<'_> {
        let &Part {
            ref core,
            key,
            host,
            quota,
        } = self;
        let entry = Entry {
            key,
            cost,
            deadline: None,
            host,
            quota,
        };
        PartRef { core, entry }
    }

    /// Returns what errors call the limit of the part.
    fn limit_name(&self) -> LimitName {
        self.core.limit_name(self.key)
    }

    /// Returns how often the limits of the key have changed.
    fn changes(&self) -> u32 {
        let changes = |state: &mut KeyState| state.limits.changes();
        self.core.states.find(self.key, changes).unwrap_or(0)
    }

    /// Returns the limits of the key that decide about a request.
    fn quota(&self) -> Arc<LimitSpec> {
        self.core.quota_of(self.key)
    }

    /// Takes in that a slot of no use goes back with the next call.
    fn given_up(&self, slot: &Reservation, now: Instant) {
        if slot.until <= now {
            self.ended(now, false);
        }
        self.core.with_state(self.key, now, |state, _| {
            key_state::given_up(state);
        });
    }

    /// Notes whether a slot was used, or expired before the request left.
    fn ended(&self, now: Instant, is_used: bool) {
        ended(&self.core, self.key, now, is_used);
    }

    /// Returns whether other processes may share its store.
    fn is_remote(&self) -> bool {
        self.core.settings.shared_store.background().is_some()
    }

    /// Returns whether two parts count in one store. Stores with a fallback are decorated, so
    /// they are compared without it.
    fn has_store_of(&self, other: &Part) -> bool {
        let store = |part: &Part| Arc::as_ptr(&part.core.settings.shared_store).cast::<()>();
        store(self) == store(other)
    }

    /// Returns the keys whose holds stop a request: the key of the part, and that of its host if
    /// each host has holds of its own.
    fn hold_keys(&self) -> impl Iterator<Item = Key> {
        let keys = [Some(self.key), self.core.hosts.hold_of(self.key, self.host)];
        keys.into_iter().flatten()
    }
}

/// Gives back slots of `parts`.
fn give_back(parts: &[Part], slots: PerPart<Option<Reservation>>) {
    give_back_of(parts.iter().map(|part| (&part.core, part.key)), slots);
}

fn give_back_of<'a>(
    parts: impl Iterator<Item = (&'a Arc<Core>, Key)>,
    slots: PerPart<Option<Reservation>>,
) {
    let now = clock::now();
    for ((core, key), slot) in parts.zip(slots) {
        if let Some(slot) = slot {
            if slot.until <= now {
                ended(core, key, now, false);
            }
            core.give_back(key, slot);
        }
    }
}

/// Returns the longest wait of a request: the shortest `max_wait` of its limiters.
fn max_wait(parts: &[Part]) -> Duration {
    let waits = parts.iter().map(|part| part.core.settings.max_wait);
    waits.min().unwrap_or_default()
}

/// Returns how many requests with these keys may wait: the smallest `max_queue` of their limiters.
fn max_queue<'a>(cores: impl Iterator<Item = &'a Arc<Core>>) -> usize {
    let queues = cores.map(|core| core.settings.max_queue);
    queues.min().unwrap_or(usize::MAX)
}

/// The slots of a joint request, which have a moment in common.
#[derive(Debug)]
struct JointSlot {
    /// What it was booked for. Requests with these costs can use it.
    costs: Costs,
    /// The slots by part. `None` for a part that needs none, or that passes uncounted because its
    /// store failed.
    slots: PerPart<Option<Reservation>>,
    /// How often the limits of each part had changed when its slot was booked.
    changes: PerPart<u32>,
    /// The moment from which all of them may be used.
    at: Instant,
    /// The moment from which one of them may no longer be used. `None` if there are none.
    until: Option<Instant>,
    /// The part that allows the request last.
    last: usize,
    /// Whether the request that takes it has waited for nothing but the answers of stores.
    is_at_once: bool,
    /// Why a part passes uncounted.
    uncounted: Option<(usize, StoreError)>,
}

impl JointSlot {
    fn is_expired(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

/// Why a joint request is refused.
#[derive(Clone, Debug)]
struct JointRefusal {
    /// The part that refuses it.
    part: usize,
    cause: Cause,
}

#[derive(Clone, Debug)]
enum Cause {
    /// The wait would be too long, or was.
    Wait(Refusal),
    /// The key of the part is on hold for too long.
    Held(Refusal),
    /// The store of the part failed.
    Failed(StoreError),
}
