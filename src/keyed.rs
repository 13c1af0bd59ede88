//! A bounded table from [`Key`] to state, in shards, so that keys seldom wait for one another.
//!
//! A key carries its hash, so looking one up hashes nothing. Entries that are idle are swept when a shard grows, never
//! one by one: a lookup costs the same whatever the number of keys.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::key::Key;

/// State that can be forgotten at some time.
pub(crate) trait Idle {
    /// What tells the time of this state.
    type Now: Copy + Ord;

    /// The moment from which it can be forgotten and made anew without harm; `None` while it is in use.
    fn idle_from(&self) -> Option<Self::Now>;

    /// The moment from which nobody would notice; before, it is forgotten only where room is needed.
    fn worthless_from(&self) -> Option<Self::Now> {
        self.idle_from()
    }
}

pub(crate) struct Keyed<T: Idle> {
    shards: Box<[Mutex<Shard<T>>]>,
    seed: u64,
    max: usize,
    /// How many keys all shards hold, those about to be made included.
    len: AtomicUsize,
    /// What the last sweep found that made no room.
    full: Mutex<Option<FullSince<T::Now>>>,
}

/// A sweep that made no room need not be done again at once.
struct FullSince<Now> {
    /// When the next key becomes idle, as far as that was known.
    next_idle: Option<Now>,
    /// How many keys were refused without another sweep.
    refused: usize,
}

struct Shard<T: Idle> {
    table: HashTable<(Key, T)>,
    /// At this many entries it is swept.
    sweep_at: usize,
}

/// As many keys as may be are in use.
#[derive(Debug)]
pub(crate) struct Full;

const SHARDS: usize = 64;
const SMALLEST_SWEEP: usize = 32;

impl<T: Idle> Keyed<T> {
    /// A table for at most `max` keys.
    pub(crate) fn new(max: usize) -> Self {
        let shard = || Mutex::new(Shard { table: HashTable::new(), sweep_at: SMALLEST_SWEEP });
        Keyed {
            shards: (0..SHARDS).map(|_| shard()).collect(),
            seed: RandomState::new().hash_one("tollgate"),
            max,
            len: AtomicUsize::new(0),
            full: Mutex::new(None),
        }
    }

    #[inline]
    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard<T>> {
        // The table takes its tags from the top bits and its buckets from the low ones; these lie between.
        lock(&self.shards[(hash >> 32) as usize % SHARDS])
    }

    /// Calls `with` with the state of `key`, which is made first where there is none.
    pub(crate) fn enter<R>(
        &self,
        key: Key,
        now: T::Now,
        make: impl FnOnce() -> T,
        with: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Full> {
        let hash = key.spread(self.seed);
        let same = |(other, _): &(Key, T)| *other == key;
        if let Some((_, state)) = self.shard(hash).table.find_mut(hash, same) {
            return Ok(with(state));
        }
        self.reserve(now)?;
        let mut shard = self.shard(hash);
        if shard.table.len() >= shard.sweep_at {
            self.sweep(&mut shard, now, T::worthless_from);
        }
        let rehash = |(key, _): &(Key, T)| key.spread(self.seed);
        let state = match shard.table.entry(hash, same, rehash) {
            Entry::Occupied(theirs) => {
                self.len.fetch_sub(1, Ordering::Relaxed);
                &mut theirs.into_mut().1
            }
            Entry::Vacant(free) => &mut free.insert((key, make())).into_mut().1,
        };
        Ok(with(state))
    }

    /// Calls `with` with each key and its state, a shard at a time.
    pub(crate) fn for_each(&self, mut with: impl FnMut(Key, &mut T)) {
        for shard in &self.shards {
            lock(shard).table.iter_mut().for_each(|(key, state)| with(*key, state));
        }
    }

    /// Calls `with` with the state of `key`, if there is any.
    #[inline]
    pub(crate) fn find<R>(&self, key: Key, with: impl FnOnce(&mut T) -> R) -> Option<R> {
        let hash = key.spread(self.seed);
        let mut shard = self.shard(hash);
        shard.table.find_mut(hash, |(other, _)| *other == key).map(|(_, state)| with(state))
    }

    /// Makes sure of room for one more key.
    fn reserve(&self, now: T::Now) -> Result<(), Full> {
        if self.len.fetch_add(1, Ordering::Relaxed) < self.max {
            return Ok(());
        }
        let refuse = || {
            self.len.fetch_sub(1, Ordering::Relaxed);
            Err(Full)
        };
        let mut full = lock(&self.full);
        if let Some(since) = full.as_mut()
            && since.next_idle.is_none_or(|next| now < next)
            && since.refused < self.max / 64
        {
            since.refused += 1;
            return refuse();
        }
        let next_idle =
            self.shards.iter().filter_map(|shard| self.sweep(&mut lock(shard), now, T::idle_from)).min();
        if self.len.load(Ordering::Relaxed) <= self.max {
            *full = None;
            return Ok(());
        }
        *full = Some(FullSince { next_idle, refused: 0 });
        refuse()
    }

    /// Forgets what can be forgotten `from` now or before. Answers when the next of those that stay can be.
    fn sweep(
        &self,
        shard: &mut Shard<T>,
        now: T::Now,
        from: impl Fn(&T) -> Option<T::Now>,
    ) -> Option<T::Now> {
        let before = shard.table.len();
        let mut next_idle = None;
        shard.table.retain(|(_, state)| {
            let idle_from = from(state);
            let stays = idle_from.is_none_or(|from| from > now);
            if stays {
                next_idle = next_idle.into_iter().chain(idle_from).min();
            }
            stays
        });
        let left = shard.table.len();
        self.len.fetch_sub(before - left, Ordering::Relaxed);
        shard.sweep_at = (left * 2).max(SMALLEST_SWEEP);
        if shard.table.capacity() > 4 * shard.sweep_at {
            shard.table.shrink_to(shard.sweep_at, |(key, _)| key.spread(self.seed));
        }
        next_idle
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Idle from the moment it holds; in use where there is none.
    struct Until(Option<u32>);

    impl Idle for Until {
        type Now = u32;

        fn idle_from(&self) -> Option<u32> {
            self.0
        }
    }

    fn key(number: u32) -> Key {
        Key::new(number.to_le_bytes())
    }

    #[test]
    fn idle_keys_are_swept_and_keys_in_use_never() {
        let keyed = Keyed::new(10_000);
        for number in 0..100_000 {
            let until = if number % 100 == 0 { None } else { Some(number + 10) };
            keyed.enter(key(number), number, || Until(until), |_| ()).unwrap();
        }
        assert!(keyed.len.load(Ordering::Relaxed) < 5_000, "{} keys", keyed.len.load(Ordering::Relaxed));
        for number in (0..100_000).step_by(100) {
            assert!(keyed.find(key(number), |_| ()).is_some(), "{number} is in use");
        }
    }

    #[test]
    fn a_full_table_refuses_a_new_key_until_an_old_one_is_idle() {
        let keyed = Keyed::new(3);
        for number in 0..3 {
            keyed.enter(key(number), 0, || Until(Some(100 + number)), |_| ()).unwrap();
        }
        assert!(keyed.enter(key(9), 0, || Until(None), |_| ()).is_err());
        assert!(keyed.enter(key(1), 0, || Until(None), |_| ()).is_ok(), "a known key is not new");
        assert!(keyed.enter(key(9), 99, || Until(None), |_| ()).is_err());
        assert!(keyed.enter(key(9), 100, || Until(None), |_| ()).is_ok());
        assert!(keyed.find(key(0), |_| ()).is_none());
    }

    #[test]
    fn max_keys_fit_at_once_and_not_one_more() {
        let keyed = Keyed::new(20_000);
        for number in 0..20_000 {
            assert!(keyed.enter(key(number), 0, || Until(None), |_| ()).is_ok(), "{number}");
        }
        assert!(keyed.enter(key(20_000), 0, || Until(None), |_| ()).is_err());
    }
}
