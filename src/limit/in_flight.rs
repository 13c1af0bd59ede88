//! The slots of an in-flight limit: how many each process uses, and which processes wait.
//!
//! A limit of `n` calls in flight has `n` **in-flight slots**. A limiter of a process is a *holder*
//! for each of its keys. A holder does not take and return single slots. It sends its *claim*: how
//! many slots it uses, and how many more it wants. A claim states everything, so a claim that is
//! lost, repeated or late does no harm: the next one replaces it. A claim is valid for its time to
//! live. If a holder sends no claim for that long, it has left, and its slots are free.
//!
//! > The first waiter in the queue gets a slot while fewer than `n` slots are taken. The taken
//! > slots are those that holders state they use, and those that were granted since.
//!
//! *Why the limit is never exceeded.* A holder uses only slots that it was granted, and only while
//! its last claim is valid. A slot that was granted to a holder is kept for it until the holder
//! knows of it. So the slots that count as taken are never fewer than the slots in use. At most `n`
//! slots count as taken at the same time.
//!
//! If holders state different limits, the smallest applies for as long as the claim that states it
//! is valid.
//!
//! Twin: `store/redis/lua/in_flight.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::Micros;

/// The in-flight slots of one key.
#[derive(Debug, Default)]
pub(crate) struct InFlightSlots {
    /// The holders that use slots or wait.
    holders: Vec<Holder>,
    /// The waiters, in the order of their arrival.
    queue: VecDeque<Batch>,
    /// How often the slots have changed. Of two updates, the one with the larger version is newer.
    version: u64,
}

/// A holder: the limiter of a process, for one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holder {
    /// The number of the holder.
    id: u64,
    /// The number of its last claim.
    number: u64,
    /// The limit that its last claim states.
    limit: u32,
    /// Slots that it uses, or was granted since its last claim.
    taken: u32,
    /// Slots that it was ever granted and could use.
    granted: u64,
    /// Whether it was notified that other holders wait.
    knows_others_wait: bool,
    /// Whether it was granted slots since its last update.
    has_new_slots: bool,
    /// When its last claim expires.
    until: Micros,
}

/// Waiters of one holder that stand together in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    /// The number of the holder.
    holder: u64,
    /// How many waiters there are.
    count: u32,
}

/// The most batches. Further waiters join the last batch of their holder, so that the queue stays
/// bounded.
const MOST_BATCHES: usize = 250;

/// The claim of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderClaim {
    /// The number of the holder.
    pub(crate) id: u64,
    /// The number of the claim, which grows with each claim of the holder.
    pub(crate) number: u64,
    /// The limit that the holder states.
    pub(crate) limit: u32,
    /// Slots that the holder uses.
    pub(crate) in_use: u32,
    /// How many more slots the holder wants.
    pub(crate) wanted: u32,
    /// Slots that the holder was ever granted, as far as it knows.
    pub(crate) granted_seen: u64,
    /// How long the claim is valid.
    pub(crate) ttl: Micros,
}

/// The slots of a holder: the reply to its claim, or an event after the claim of another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderUpdate {
    /// The number of the holder.
    pub(crate) id: u64,
    /// The number of its last claim that was taken in.
    pub(crate) number: u64,
    /// Slots that the holder was ever granted.
    pub(crate) granted: u64,
    /// Whether other holders wait. Then the holder returns each slot that becomes free.
    pub(crate) others_wait: bool,
    /// The version of the slots, which grows with each update.
    pub(crate) version: u64,
}

impl InFlightSlots {
    /// Takes in a claim. Calls `notify` with the update for its holder, and with those for other
    /// holders.
    pub(crate) fn claim(
        &mut self,
        now: Micros,
        claim: HolderClaim,
        mut notify: impl FnMut(HolderUpdate),
    ) {
        self.forget(now);
        let index = self.holders.iter().position(|holder| holder.id == claim.id);
        let index = index.unwrap_or_else(|| {
            self.holders.push(Holder {
                id: claim.id,
                granted: claim.granted_seen,
                ..Holder::default()
            });
            self.holders.len() - 1
        });
        self.version += 1;
        if self.holders[index].number < claim.number {
            self.take_in(now, claim, index);
        }
        self.grant();
        let InFlightSlots {
            holders,
            queue,
            version,
        } = self;
        for holder in &mut *holders {
            let others_wait = queue.iter().any(|batch| batch.holder != holder.id);
            let must_return_slots = others_wait && !holder.knows_others_wait && holder.taken > 0;
            if holder.id == claim.id || holder.has_new_slots || must_return_slots {
                holder.knows_others_wait = others_wait;
                holder.has_new_slots = false;
                let Holder {
                    id,
                    number,
                    granted,
                    ..
                } = *holder;
                notify(HolderUpdate {
                    id,
                    number,
                    granted,
                    others_wait,
                    version: *version,
                });
            }
        }
        holders.retain(|holder| {
            holder.taken > 0 || queue.iter().any(|batch| batch.holder == holder.id)
        });
    }

    /// Removes the holders whose claims have expired.
    pub(crate) fn forget(&mut self, now: Micros) {
        let InFlightSlots { holders, queue, .. } = self;
        holders.retain(|holder| holder.until > now);
        queue.retain(|batch| holders.iter().any(|holder| holder.id == batch.holder));
    }

    /// Returns how many slots are taken, and how many are free under a limit of `most`.
    pub(crate) fn usage(&self, most: u32) -> (u32, u32) {
        let taken = self
            .holders
            .iter()
            .fold(0u32, |taken, holder| taken.saturating_add(holder.taken));
        let most = self
            .holders
            .iter()
            .map(|holder| holder.limit)
            .min()
            .unwrap_or(most)
            .min(most);
        (taken, most.saturating_sub(taken))
    }

    /// Returns whether `holder` uses slots or waits.
    pub(crate) fn knows(&self, holder: u64) -> bool {
        self.holders.iter().any(|known| known.id == holder)
    }

    /// Returns whether no holder uses slots or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    /// Replaces the claim of the holder at `index`.
    fn take_in(&mut self, now: Micros, claim: HolderClaim, index: usize) {
        let holder = &mut self.holders[index];
        // The holder did not know of these slots when it sent the claim. They go to the waiters
        // that the claim states. If there are more slots than waiters, the others are free again.
        // The holder ignores the updates about them, which are older than the claim.
        let unseen = holder
            .granted
            .saturating_sub(claim.granted_seen)
            .min(u64::from(holder.taken)) as u32;
        let kept = unseen.min(claim.wanted);
        holder.number = claim.number;
        holder.granted = claim.granted_seen + u64::from(kept);
        holder.limit = claim.limit;
        holder.taken = claim.in_use.saturating_add(kept);
        holder.until = now.saturating_add(claim.ttl);
        self.set_waiters(claim.id, claim.wanted - kept);
    }

    /// Sets the number of waiters of `holder` to `count`. New waiters join the end of the queue. If
    /// the holder has fewer waiters than before, its last ones leave.
    fn set_waiters(&mut self, holder: u64, count: u32) {
        let queue = &mut self.queue;
        let waiting = queue
            .iter()
            .filter(|batch| batch.holder == holder)
            .map(|batch| batch.count)
            .sum();
        let mut leaving = u32::saturating_sub(waiting, count);
        for batch in queue
            .iter_mut()
            .rev()
            .filter(|batch| batch.holder == holder)
        {
            let left = batch.count.min(leaving);
            batch.count -= left;
            leaving -= left;
        }
        queue.retain(|batch| batch.count > 0);
        let coming = count.saturating_sub(waiting);
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
            None => queue.push_back(Batch {
                holder,
                count: coming,
            }),
        }
    }

    /// Grants the free slots to the waiters that came first.
    fn grant(&mut self) {
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
                holder.has_new_slots = true;
            }
        }
    }
}
