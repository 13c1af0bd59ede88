//! Calls in flight: which process uses how many slots of the limit, and which ones wait.
//!
//! A limit of `n` calls in flight has `n` **seats** (in-flight slots). Each process is a *holder*. It does not take and return single
//! seats. It sends its *claim*, the whole state: how many seats it uses, and how many more it wants. A claim that is lost, repeated
//! or late does no harm, because the next one replaces it. A claim is valid for its *life*; a holder that sends no claim for that
//! long has left, and its seats are free.
//!
//! > The first in the queue gets a seat while fewer than `n` are taken. Taken seats are the seats that holders state they use, and
//! > the seats they were given since.
//!
//! *Why it is never over.* A holder uses no seat that it was not given, and none beyond the life of its last claim. A seat that it was
//! given and does not know of yet is kept for it. So the seats counted as taken are never fewer than those in use, and at most `n` of
//! them were ever given at the same time.
//!
//! If holders state different limits, the smallest applies, for as long as a holder that states it lives.
//!
//! Twin: `store/redis/lua/in_flight.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::Micros;

/// The seats of one key.
#[derive(Debug, Default)]
pub(crate) struct InFlightSlots {
    holders: Vec<Holder>,
    queue: VecDeque<Batch>,
    /// How often this changed. Of two messages the one with the larger number is true.
    version: u64,
}

/// A holder: the limiter of a process, for one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holder {
    id: u64,
    /// The number of its last claim.
    number: u64,
    /// The limit that it states.
    limit: u32,
    /// InFlightSlots that it uses, or was given.
    taken: u32,
    /// InFlightSlots that it was ever given and could use.
    granted: u64,
    /// Whether it knows that other holders wait.
    told: bool,
    /// Whether it was given seats since the last message to it.
    notify: bool,
    until: Micros,
}

/// Waiters of one holder that stand together in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    holder: u64,
    count: u32,
}

/// The most batches. Further waiters join the last batch of their holder, so that the queue stays bounded.
const MOST_BATCHES: usize = 250;

/// What a holder states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderClaim {
    pub(crate) id: u64,
    /// Larger than that of its claims before.
    pub(crate) number: u64,
    pub(crate) limit: u32,
    /// InFlightSlots that it uses.
    pub(crate) in_use: u32,
    /// How many more it wants.
    pub(crate) wanted: u32,
    /// How many seats it knows that it was ever given.
    pub(crate) granted_seen: u64,
    pub(crate) ttl: Micros,
}

/// The answer to a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderUpdate {
    pub(crate) id: u64,
    /// The last of its claims that was taken in.
    pub(crate) number: u64,
    /// InFlightSlots that it was ever given.
    pub(crate) granted: u64,
    /// Whether other holders wait. Then a seat that becomes free goes back.
    pub(crate) others_wait: bool,
    pub(crate) version: u64,
}

impl InFlightSlots {
    /// Takes in a claim. Calls `tell` with the answer to its holder, and with events for the others.
    pub(crate) fn claim(&mut self, now: Micros, claim: HolderClaim, mut tell: impl FnMut(HolderUpdate)) {
        self.forget(now);
        let index = self.holders.iter().position(|holder| holder.id == claim.id);
        let index = index.unwrap_or_else(|| {
            self.holders.push(Holder { id: claim.id, granted: claim.granted_seen, ..Holder::default() });
            self.holders.len() - 1
        });
        self.version += 1;
        if self.holders[index].number < claim.number {
            self.take_in(now, claim, index);
        }
        self.give();
        let InFlightSlots { holders, queue, version } = self;
        for holder in &mut *holders {
            let others_wait = queue.iter().any(|batch| batch.holder != holder.id);
            if holder.id == claim.id || holder.notify || (others_wait && !holder.told && holder.taken > 0) {
                (holder.told, holder.notify) = (others_wait, false);
                let Holder { id, number, granted: given, .. } = *holder;
                tell(HolderUpdate { id, number, granted: given, others_wait, version: *version });
            }
        }
        holders.retain(|holder| holder.taken > 0 || queue.iter().any(|batch| batch.holder == holder.id));
    }

    /// Removes the holders whose claims have expired.
    pub(crate) fn forget(&mut self, now: Micros) {
        let InFlightSlots { holders, queue, .. } = self;
        holders.retain(|holder| holder.until > now);
        queue.retain(|batch| holders.iter().any(|holder| holder.id == batch.holder));
    }

    /// Returns how many seats are taken, and how many are free under a limit of `most`.
    pub(crate) fn usage(&self, most: u32) -> (u32, u32) {
        let taken = self.holders.iter().fold(0u32, |taken, holder| taken.saturating_add(holder.taken));
        let most = self.holders.iter().map(|holder| holder.limit).min().unwrap_or(most).min(most);
        (taken, most.saturating_sub(taken))
    }

    /// Returns whether `holder` uses seats or waits.
    pub(crate) fn knows(&self, holder: u64) -> bool {
        self.holders.iter().any(|known| known.id == holder)
    }

    /// Returns whether no holder uses seats or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    fn take_in(&mut self, now: Micros, claim: HolderClaim, index: usize) {
        let holder = &mut self.holders[index];
        // InFlightSlots that were given after the holder sent this claim go to the waiters that the claim names, up to their
        // number. The messages about the other seats are older than the claim, so the holder ignores them.
        let unheard = holder.granted.saturating_sub(claim.granted_seen).min(u64::from(holder.taken)) as u32;
        let kept = unheard.min(claim.wanted);
        (holder.number, holder.granted) = (claim.number, claim.granted_seen + u64::from(kept));
        holder.limit = claim.limit;
        holder.taken = claim.in_use.saturating_add(kept);
        holder.until = now.saturating_add(claim.ttl);
        self.line_up(claim.id, claim.wanted - kept);
    }

    /// Sets the number of waiters of `holder`. New waiters are last in the queue. If waiters leave, they are the last waiters of the
    /// holder.
    fn line_up(&mut self, holder: u64, wants: u32) {
        let queue = &mut self.queue;
        let waiting = queue.iter().filter(|batch| batch.holder == holder).map(|batch| batch.count).sum();
        let mut leaving = u32::saturating_sub(waiting, wants);
        for batch in queue.iter_mut().rev().filter(|batch| batch.holder == holder) {
            let left = batch.count.min(leaving);
            batch.count -= left;
            leaving -= left;
        }
        queue.retain(|batch| batch.count > 0);
        let coming = wants.saturating_sub(waiting);
        if coming == 0 {
            return;
        }
        let last = if queue.len() < MOST_BATCHES {
            queue.back_mut().filter(|batch| batch.holder == holder)
        } else {
            queue.iter_mut().rev().find(|batch| batch.holder == holder)
        };
        match last {
            Some(batch) => batch.count += coming,
            None => queue.push_back(Batch { holder, count: coming }),
        }
    }

    fn give(&mut self) {
        let (_, mut free) = self.usage(u32::MAX);
        while free > 0
            && let Some(batch) = self.queue.front_mut()
        {
            let (id, count) = (batch.holder, batch.count.min(free));
            batch.count -= count;
            free -= count;
            if batch.count == 0 {
                self.queue.pop_front();
            }
            if let Some(holder) = self.holders.iter_mut().find(|holder| holder.id == id) {
                holder.taken += count;
                holder.granted += u64::from(count);
                holder.notify = true;
            }
        }
    }
}
