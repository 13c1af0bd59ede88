//! The keys of a request: what it states for each when it enters, and the slots that it gets.

use std::ptr;
use std::sync::Arc;
use std::time::Instant;

use smallvec::{SmallVec, smallvec};

use super::engine::Core;
use super::holds::Probe;
use super::quotas::QuotaId;
use super::reservation::Reservation;
use crate::error::{LimitName, StoreError};
use crate::key::Key;
use crate::limit::LimitSpec;
use crate::quota::Limit;

/// The most keys of a request.
pub(crate) const MOST_PARTS: usize = 8;

/// A request that enters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) cost: u32,
    pub(crate) deadline: Option<Instant>,
    /// The key of its host. `None` if the host does not matter.
    ///
    /// The host matters if each host has holds of its own (`hosts.rs`). It also matters if the
    /// client follows redirects, because the response of another host states nothing about this
    /// key.
    pub(crate) host: Option<Key>,
    /// The quota that the request states for the key.
    pub(crate) quota: QuotaId,
}

impl Entry {
    /// Makes the entry of a request that states nothing but its cost.
    #[inline]
    pub(crate) fn new(key: Key, cost: u32) -> Self {
        Entry {
            key,
            cost,
            deadline: None,
            host: None,
            quota: QuotaId::NONE,
        }
    }
}

/// One key of a request.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(super) core: Arc<Core>,
    pub(super) key: Key,
    /// See [`Entry::host`].
    pub(super) host: Option<Key>,
}

/// One key of a request whose permits may be at hand, and what it takes of it. To clone the `Arc`
/// would cost it 10 ns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartRef<'a> {
    pub(super) core: &'a Arc<Core>,
    /// Its deadline is not read: that of the request is the same for all parts.
    pub(super) entry: Entry,
}

/// One key of a request by hand that has not entered.
#[derive(Debug)]
pub(super) struct NewPart {
    pub(super) core: Arc<Core>,
    pub(super) entry: Entry,
    /// The key that the caller gave. That of the entry is another one if the limits count a unit.
    pub(super) named: Key,
}

impl NewPart {
    /// Returns the key as a part of a request that enters.
    pub(super) fn as_part(&self) -> PartRef<'_> {
        PartRef::new(&self.core, self.entry)
    }
}

/// One value for each part, in their order.
pub(super) type PerPart<T> = SmallVec<[T; 4]>;

/// The cost of a request under each of its keys.
pub(super) type Costs = PerPart<u32>;

/// Returns the deadline of a request by hand: the earliest of those that the caller has set.
pub(super) fn earliest_deadline<'a>(
    parts: impl IntoIterator<Item = &'a NewPart>,
) -> Option<Instant> {
    let deadlines = parts.into_iter().filter_map(|part| part.entry.deadline);
    deadlines.min()
}

/// Returns the first of the parts that would count a request a second time under one key.
pub(super) fn repeated(parts: &[PartRef<'_>]) -> Option<usize> {
    (0..parts.len()).find(|index| {
        let part = &parts[*index];
        parts[..*index].iter().any(|other| other.is_same(part))
    })
}

/// Returns the part that has the label of the part `index`: all units of a key have the label of the first.
pub(super) fn labelled(index: usize, is_further_unit: impl Fn(usize) -> bool) -> usize {
    let mut before = (0..=index).rev();
    before
        .find(|part| !is_further_unit(*part))
        .unwrap_or_default()
}

impl<'a> PartRef<'a> {
    pub(super) fn new(core: &'a Arc<Core>, entry: Entry) -> Self {
        PartRef { core, entry }
    }

    /// Returns whether two parts would count a request twice under one key.
    pub(super) fn is_same(&self, other: &PartRef<'_>) -> bool {
        self.entry.key == other.entry.key && has_store_of(self.core, other.core)
    }

    pub(super) fn to_part(self) -> Part {
        let PartRef { core, entry } = self;
        Part {
            core: core.clone(),
            key: entry.key,
            host: entry.host,
        }
    }
}

impl Part {
    /// Returns what errors call the limit of the part.
    pub(super) fn limit_name(&self) -> LimitName {
        self.core.limit_name(self.key)
    }

    /// Returns how often the limits of the key have changed.
    pub(super) fn changes(&self) -> u32 {
        let states = &self.core.states;
        states.read(self.key, |state| state.limits.changes())
    }

    /// Returns the limits of the key that decide about a request.
    pub(super) fn quota(&self) -> Arc<LimitSpec> {
        self.core.quota_of(self.key)
    }

    /// Returns the key whose holds stop a request because of its host, if each host has holds of its own.
    pub(super) fn host_hold(&self) -> Option<Key> {
        self.core.hosts.hold_of(self.key, self.host)
    }

    /// Returns the limit of its rates. `None` if there are several, of which any may delay a request.
    pub(super) fn only_rate(&self) -> Option<Limit> {
        match self.quota().quota().limits() {
            [only] => Some(*only),
            _ => None,
        }
    }

    /// Returns whether other processes may share its store.
    pub(super) fn is_remote(&self) -> bool {
        self.core.settings.shared_store.background().is_some()
    }

    /// Returns whether two parts count in one store.
    pub(super) fn has_store_of(&self, other: &Part) -> bool {
        has_store_of(&self.core, &other.core)
    }
}

/// Returns whether two limiters count in one store. Stores with a fallback are decorated, so they are compared without
/// it.
pub(super) fn has_store_of(core: &Core, other: &Core) -> bool {
    let (one, other) = (&core.settings.shared_store, &other.settings.shared_store);
    ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// The slots of a request, which have a moment in common.
#[derive(Debug)]
pub(super) struct Slots {
    /// What they were booked for: any request of the set with these costs can use them. The queue of a key does
    /// not read it.
    pub(super) costs: Costs,
    /// The slots by part. `None` for a part that needs none, or that passes uncounted because its
    /// store failed.
    pub(super) slots: SmallVec<[Option<Reservation>; 1]>,
    /// How often the limits of each part had changed when its slot was booked. Empty if they go back.
    pub(super) changes: Costs,
    /// The moment from which all of them may be used.
    pub(super) at: Instant,
    /// The moment from which one of them may no longer be used. `None` if there are none.
    pub(super) until: Option<Instant>,
    /// The part that allows the request last.
    pub(super) last: usize,
    /// Whether the request that takes it has waited for nothing but the answers of stores.
    pub(super) is_at_once: bool,
    /// Why a part passes uncounted.
    pub(super) uncounted: Option<(usize, StoreError)>,
    /// The probe that a request without a slot leaves as. With a slot, the slot has it.
    pub(super) probe: Option<Probe>,
}

impl Slots {
    /// What a request has that needs no slot.
    pub(super) fn none(now: Instant) -> Self {
        Slots {
            costs: Costs::new(),
            slots: smallvec![None],
            changes: Costs::new(),
            at: now,
            until: None,
            last: 0,
            is_at_once: false,
            uncounted: None,
            probe: None,
        }
    }

    /// The slot of a request with one key.
    pub(super) fn of_one(slot: Reservation) -> Self {
        Slots {
            slots: smallvec![Some(slot)],
            until: Some(slot.until),
            is_at_once: slot.is_at_once,
            ..Slots::none(slot.at)
        }
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}
