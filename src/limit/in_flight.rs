//! Calls in flight: who sits, and who waits for a seat.
//!
//! A limit of `n` calls in flight has `n` **seats**. Each process is a *holder*. It does not take and return seats, it
//! says how things are, its *claim*: how many it sits on, and how many more it wants. A claim that is lost, repeated or
//! late harms nothing: the next one says it all again. A claim is good for a *life*; a holder that is silent for so long
//! has left, with all its seats.
//!
//! > A seat is given to the first in the queue while fewer than `n` are taken: those that holders say they sit on, and
//! > those they were given since.
//!
//! *Why it is never over.* A holder sits on no seat that it was not given, and on none beyond the life of its last claim.
//! What it says it sits on was given to it; what it was given and has not heard of is kept for it until it has. So the
//! seats counted as taken are never fewer than those sat on, and at most `n` of them were ever given at the same time.
//!
//! Holders that assert different numbers all get the smallest, for as long as any that asserts it lives.
//!
//! Twin: `store/redis/lua/in_flight.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::Micros;

/// The seats of one key.
#[derive(Debug, Default)]
pub(crate) struct Seats {
    holders: Vec<Holder>,
    queue: VecDeque<Batch>,
    /// How often this changed: what was told later is true.
    version: u64,
}

/// Who holds or wants seats: a gate in a process, for one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holder {
    id: u64,
    /// The number of its last claim.
    number: u64,
    /// What it asserts the limit to be.
    most: u32,
    /// Seats it sits on, or was given.
    taken: u32,
    /// Seats it was ever given, as far as it could keep them.
    given: u64,
    /// Whether it was told that others wait.
    told: bool,
    /// Whether it was given seats since it was last told.
    news: bool,
    until: Micros,
}

/// Some who wait, of one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Batch {
    holder: u64,
    count: u32,
}

/// Beyond so many batches, those who come join the last one of their holder: fair enough, and bounded.
const MOST_BATCHES: usize = 250;

/// What a holder says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claimed {
    pub(crate) id: u64,
    /// Larger than that of its claims before.
    pub(crate) number: u64,
    pub(crate) most: u32,
    /// Seats it sits on.
    pub(crate) sits: u32,
    /// How many more it wants.
    pub(crate) wants: u32,
    /// How many it knows that it was ever given.
    pub(crate) heard: u64,
    pub(crate) life: Micros,
}

/// What a holder is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) id: u64,
    /// The last of its claims that was taken in.
    pub(crate) number: u64,
    /// Seats it was ever given.
    pub(crate) given: u64,
    /// Whether others wait: then a seat that becomes free is not its own to pass on.
    pub(crate) others_wait: bool,
    pub(crate) version: u64,
}

impl Seats {
    /// A holder claims. `tell` hears what is news: to the claimant, always, and to others.
    pub(crate) fn claim(&mut self, now: Micros, claim: Claimed, mut tell: impl FnMut(Told)) {
        self.forget(now);
        let index = self.holders.iter().position(|holder| holder.id == claim.id);
        let index = index.unwrap_or_else(|| {
            self.holders.push(Holder { id: claim.id, given: claim.heard, ..Holder::default() });
            self.holders.len() - 1
        });
        self.version += 1;
        if self.holders[index].number < claim.number {
            self.take_in(now, claim, index);
        }
        self.give();
        let Seats { holders, queue, version } = self;
        for holder in &mut *holders {
            let others_wait = queue.iter().any(|batch| batch.holder != holder.id);
            if holder.id == claim.id || holder.news || (others_wait && !holder.told && holder.taken > 0) {
                (holder.told, holder.news) = (others_wait, false);
                let Holder { id, number, given, .. } = *holder;
                tell(Told { id, number, given, others_wait, version: *version });
            }
        }
        holders.retain(|holder| holder.taken > 0 || queue.iter().any(|batch| batch.holder == holder.id));
    }

    /// Those who were silent for a life have left.
    pub(crate) fn forget(&mut self, now: Micros) {
        let Seats { holders, queue, .. } = self;
        holders.retain(|holder| holder.until > now);
        queue.retain(|batch| holders.iter().any(|holder| holder.id == batch.holder));
    }

    /// Seats that are taken, and those that are free under a limit of `most`.
    pub(crate) fn usage(&self, most: u32) -> (u32, u32) {
        let taken = self.holders.iter().fold(0u32, |taken, holder| taken.saturating_add(holder.taken));
        let most = self.holders.iter().map(|holder| holder.most).min().unwrap_or(most).min(most);
        (taken, most.saturating_sub(taken))
    }

    /// Whether `holder` sits or waits.
    pub(crate) fn knows(&self, holder: u64) -> bool {
        self.holders.iter().any(|known| known.id == holder)
    }

    /// Whether nobody sits and nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.holders.is_empty()
    }

    fn take_in(&mut self, now: Micros, claim: Claimed, index: usize) {
        let holder = &mut self.holders[index];
        // What it was given and had not heard of when it spoke is for those it says are waiting, as far as they are so
        // many. What it will hear of the rest is older than its claim: it passes that over.
        let unheard = holder.given.saturating_sub(claim.heard).min(u64::from(holder.taken)) as u32;
        let kept = unheard.min(claim.wants);
        (holder.number, holder.given) = (claim.number, claim.heard + u64::from(kept));
        holder.most = claim.most;
        holder.taken = claim.sits.saturating_add(kept);
        holder.until = now.saturating_add(claim.life);
        self.line_up(claim.id, claim.wants - kept);
    }

    /// Makes those who wait for `holder` so many. Who comes is last; who leaves was the last of its holder's.
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
                holder.given += u64::from(count);
                holder.news = true;
            }
        }
    }
}
