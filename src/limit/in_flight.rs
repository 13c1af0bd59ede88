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
//! is valid. If more slots are taken than that, each slot that becomes free is returned, and no call begins.
//!
//! Holders may be of classes of requests, each with a share of the limit. A free slot then goes to
//! the first waiter whose class has fewer slots taken than its share, or to the first of all if
//! there is no such waiter. So a class never waits for others while it is below its share, and no
//! slot stays free while a request waits. Holders that state no share come first come, first
//! served.
//!
//! Twin: `store/redis/lua/in_flight.lua`.
//! After a change: `cargo test --all-features --lib differential`

use std::collections::VecDeque;

use super::{Claim, Micros, micros_up};
use crate::quota::percent_of;

/// The in-flight slots of one key.
#[derive(Debug, Default)]
pub(crate) struct InFlightSlots {
    /// The holders that use slots or wait.
    holders: Vec<HolderSlots>,
    /// The waiters, in the order of their arrival.
    queue: VecDeque<Batch>,
    /// How often the slots have changed. Of two updates, the one with the larger version is newer.
    version: u64,
}

/// A holder: the limiter of a process, for one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct HolderSlots {
    /// The number of the holder.
    id: u64,
    /// The number of its last claim.
    number: u64,
    /// The limit that its last claim states.
    limit: u32,
    /// Slots that it uses, or was granted since its last claim.
    taken: u32,
    /// The class of its requests. 0 for those of no class with a share.
    class: u32,
    /// The percentage of the limit that its class has. 0 if the limit is not divided.
    share: u8,
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

/// The slots of a holder: the reply to its claim, or an event after the claim of another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HolderUpdate {
    /// The number of the holder.
    pub(crate) id: u64,
    /// The number of its last claim that was taken in.
    pub(crate) number: u64,
    /// Slots that the holder was ever granted.
    pub(crate) granted: u64,
    /// Whether other holders wait, or the limit was lowered below what is taken. Then the holder returns each slot that
    /// becomes free.
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
        claim: Claim,
        mut notify: impl FnMut(HolderUpdate),
    ) {
        self.forget(now);
        let known = self
            .holders
            .iter()
            .position(|holder| holder.id == claim.holder);
        let index = known.unwrap_or_else(|| {
            self.holders.push(HolderSlots {
                id: claim.holder,
                granted: claim.granted_seen,
                ..HolderSlots::default()
            });
            self.holders.len() - 1
        });
        self.version += 1;
        if self.holders[index].number < claim.number {
            self.take_in(now, claim, index);
        }
        self.grant();
        let is_over = self.smallest_limit() < Some(taken(self.holders.iter()));
        let InFlightSlots { holders, queue, .. } = self;
        for holder in &mut *holders {
            let others_wait = is_over || queue.iter().any(|batch| batch.holder != holder.id);
            let must_return_slots = others_wait && !holder.knows_others_wait && holder.taken > 0;
            if holder.id == claim.holder || holder.has_new_slots || must_return_slots {
                holder.knows_others_wait = others_wait;
                holder.has_new_slots = false;
                notify(HolderUpdate {
                    id: holder.id,
                    number: holder.number,
                    granted: holder.granted,
                    others_wait,
                    version: self.version,
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
        let taken = taken(self.holders.iter());
        let most = self.smallest_limit().unwrap_or(most).min(most);
        (taken, most.saturating_sub(taken))
    }

    /// Returns the smallest limit that a holder states.
    fn smallest_limit(&self) -> Option<u32> {
        self.holders.iter().map(|holder| holder.limit).min()
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
    fn take_in(&mut self, now: Micros, claim: Claim, index: usize) {
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
        // A holder that leaves, because it neither uses a slot nor waits, keeps no slot from others.
        holder.limit = if claim.is_over() {
            u32::MAX
        } else {
            claim.limit
        };
        holder.class = claim.class;
        holder.share = claim.share;
        holder.taken = claim.in_use.saturating_add(kept);
        holder.until = now.saturating_add(micros_up(claim.ttl));
        self.set_waiters(claim.holder, claim.wanted - kept);
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

    /// Grants the free slots: to the waiters that came first of those whose class is below its share,
    /// and then to those that came first of all.
    fn grant(&mut self) {
        let (_, mut free) = self.usage(u32::MAX);
        let is_divided = self.holders.iter().any(|holder| holder.share > 0);
        while free > 0 {
            let below_share = is_divided.then(|| self.first_below_share()).flatten();
            let (index, most) = below_share.unwrap_or((0, free));
            let Some(batch) = self.queue.get_mut(index) else {
                return;
            };
            let (id, count) = (batch.holder, batch.count.min(most).min(free));
            batch.count -= count;
            free -= count;
            if batch.count == 0 {
                self.queue.remove(index);
            }
            if let Some(holder) = self.holders.iter_mut().find(|holder| holder.id == id) {
                holder.taken += count;
                holder.granted += u64::from(count);
                holder.has_new_slots = true;
            }
        }
    }

    /// Returns the place of the first batch whose class has fewer slots taken than its share, and how
    /// many are missing.
    fn first_below_share(&self) -> Option<(usize, u32)> {
        let limit = self.smallest_limit()?;
        let mut batches = self.queue.iter().enumerate();
        batches.find_map(|(index, batch)| match self.missing_of_class(batch, limit) {
            0 => None,
            missing => Some((index, missing)),
        })
    }

    /// Returns how many slots the class of a batch lacks to its share of `limit`.
    fn missing_of_class(&self, batch: &Batch, limit: u32) -> u32 {
        let mut holders = self.holders.iter();
        let Some(holder) = holders.find(|holder| holder.id == batch.holder) else {
            return 0;
        };
        let of_class = self
            .holders
            .iter()
            .filter(|other| other.class == holder.class);
        // At least one slot is that of a class, unless the limit is not divided.
        let share = percent_of(limit, holder.share).max(u32::from(holder.share > 0));
        share.saturating_sub(taken(of_class))
    }
}

/// Returns how many slots `holders` have taken.
fn taken<'a>(holders: impl Iterator<Item = &'a HolderSlots>) -> u32 {
    holders.fold(0, |taken, holder| taken.saturating_add(holder.taken))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::key::Key;

    /// Holders whose claims arrive at once and are never lost, and each waiter for itself.
    struct World {
        limit: u32,
        /// The class and the share of each holder.
        classes: Vec<(u32, u8)>,
        slots: InFlightSlots,
        number: u64,
        in_use: Vec<u32>,
        granted: Vec<u64>,
        /// The holders of all waiters, in the order of their arrival.
        waiting: Vec<usize>,
    }

    impl World {
        fn new(limit: u32, classes: Vec<(u32, u8)>) -> Self {
            World {
                limit,
                slots: InFlightSlots::default(),
                number: 0,
                in_use: vec![0; classes.len()],
                granted: vec![0; classes.len()],
                waiting: Vec::new(),
                classes,
            }
        }

        fn wanted(&self, holder: usize) -> u32 {
            let of_holder = self.waiting.iter().filter(|other| **other == holder);
            of_holder.count() as u32
        }

        fn used_by(&self, class: u32) -> u32 {
            let holders = self.classes.iter().zip(&self.in_use);
            let of_class = holders.filter(|((other, _), _)| *other == class);
            of_class.map(|(_, in_use)| in_use).sum()
        }

        /// Returns how many slots the class of a holder has.
        fn share_of(&self, holder: usize) -> u32 {
            let share = u32::from(self.classes[holder].1);
            match self.limit * share / 100 {
                0 if share > 0 => 1,
                slots => slots,
            }
        }

        /// Returns whether the class of a holder has fewer slots than its share.
        fn is_below_share(&self, holder: usize) -> bool {
            self.used_by(self.classes[holder].0) < self.share_of(holder)
        }

        /// Gives free slots to the waiters, one after the other, as the rule says.
        fn serve(&mut self) -> BTreeMap<usize, u32> {
            let mut served = BTreeMap::new();
            while self.in_use.iter().sum::<u32>() < self.limit && !self.waiting.is_empty() {
                let below = self
                    .waiting
                    .iter()
                    .position(|holder| self.is_below_share(*holder));
                let holder = self.waiting.remove(below.unwrap_or(0));
                self.in_use[holder] += 1;
                *served.entry(holder).or_default() += 1;
            }
            served
        }

        /// Sends the claim of a holder. Its updates are those that the rule asks for.
        fn claim(&mut self, holder: usize) -> Result<(), TestCaseError> {
            self.number += 1;
            let (class, share) = self.classes[holder];
            let claim = Claim {
                limit: self.limit,
                class,
                share,
                in_use: self.in_use[holder],
                wanted: self.wanted(holder),
                granted_seen: self.granted[holder],
                ttl: Duration::from_millis(1),
                ..Claim::new(Key::ALL, holder as u64, self.number)
            };
            let mut updates = Vec::new();
            self.slots.claim(0, claim, |update| updates.push(update));
            let mut got = BTreeMap::new();
            for update in updates {
                let holder = update.id as usize;
                let more = update.granted - self.granted[holder];
                self.granted[holder] = update.granted;
                if more > 0 {
                    got.insert(holder, more as u32);
                }
            }
            prop_assert_eq!(&got, &self.serve());
            // The laws, without the rule. The limit is kept, and no slot is free while a request waits.
            let used: u32 = self.in_use.iter().sum();
            prop_assert!(used <= self.limit);
            prop_assert_eq!(self.slots.usage(self.limit), (used, self.limit - used));
            prop_assert!(used == self.limit || self.waiting.is_empty());
            // While a class waits below its share, no class gets slots beyond its own.
            let is_passed_over = (0..self.classes.len())
                .any(|other| self.wanted(other) > 0 && self.is_below_share(other));
            for (holder, _) in got {
                let used = self.used_by(self.classes[holder].0);
                prop_assert!(!is_passed_over || used <= self.share_of(holder));
            }
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(histories::config(250))]

        #[test]
        fn free_slots_go_to_classes_below_their_share(
            limit in 1u32..12,
            classes in prop::collection::vec(0u32..4, 1..7),
            percents in prop::sample::select(vec![[50, 30, 10, 10], [1, 99, 0, 0], [34, 33, 33, 0], [0; 4]]),
            steps in prop::collection::vec((0usize..7, 0u32..5, 0u32..4), 0..100),
        ) {
            let classes = classes.into_iter().map(|class| (class, percents[class as usize]));
            let classes: Vec<_> = classes.collect();
            let mut world = World::new(limit, classes);
            for (number, (holder, enter, end)) in steps.into_iter().enumerate() {
                let holder = holder % world.classes.len();
                world.in_use[holder] -= end.min(world.in_use[holder]);
                world.waiting.extend((0..enter).map(|_| holder));
                // Now and then the last waiter leaves.
                if enter == 0
                    && number % 5 == 0
                    && let Some(last) = world.waiting.iter().rposition(|other| *other == holder)
                {
                    world.waiting.remove(last);
                }
                world.claim(holder)?;
            }
        }
    }

    #[test]
    fn the_limit_of_a_holder_that_leaves_is_forgotten() {
        let mut slots = InFlightSlots::default();
        let mut claim = |id, number, limit, in_use, wanted| {
            let claim = Claim {
                limit,
                in_use,
                wanted,
                ttl: Duration::from_millis(1),
                ..Claim::new(Key::ALL, id, number)
            };
            let mut granted = BTreeMap::new();
            slots.claim(0, claim, |update| {
                _ = granted.insert(update.id, update.granted)
            });
            granted
        };
        claim(1, 1, 1, 1, 0);
        assert_eq!(claim(2, 1, 10, 0, 5).get(&2), Some(&0));
        assert_eq!(claim(1, 2, 1, 0, 0).get(&2), Some(&5));
    }

    #[test]
    fn a_class_below_its_share_goes_first() {
        // The first holder is of all others, the second of a class with half of the limit.
        let mut world = World::new(10, vec![(0, 50), (1, 50)]);
        world.waiting = vec![0; 100];
        world.claim(0).unwrap();
        assert_eq!(world.in_use, [10, 0], "all slots while the class is idle");
        world.waiting.extend([1; 7]);
        world.claim(1).unwrap();
        for _ in 0..7 {
            world.in_use[0] -= 1;
            world.claim(0).unwrap();
        }
        assert_eq!(world.in_use, [5, 5], "its share, and then the first of all");
        assert_eq!(world.wanted(1), 2);
    }
}
