//! A bounded map from [`Key`] to state, in shards, so that keys seldom wait for one another.
//!
//! A key carries its hash, so a lookup hashes nothing. Unused state is evicted by the CLOCK
//! algorithm: each shard has a hand, and each new key moves the hand on by a few entries. So a call
//! looks at a few entries, whatever the number of keys.

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use hashbrown::HashTable;

use crate::key::Key;
use crate::locks::lock;
use crate::rng::dice;

/// State that can be evicted.
pub(crate) trait Evict {
    /// The type of the state's clock.
    type Now: Copy + Ord;

    /// Returns the moment from which the state may be evicted if room is needed; `None` while it is
    /// in use.
    fn idle_from(&self) -> Option<Self::Now>;

    fn is_idle(&self, now: Self::Now) -> bool {
        self.idle_from().is_some_and(|idle| idle <= now)
    }

    /// Returns the moment from which the state is useless: then it is evicted in any case.
    fn worthless_from(&self) -> Option<Self::Now> {
        self.idle_from()
    }
}

/// A bounded map from [`Key`] to state.
pub(crate) struct KeyMap<T> {
    shards: Box<[Mutex<Shard<T>>]>,
    seed: u64,
    max: usize,
    /// The number of keys in all shards, including keys that are about to be added.
    len: AtomicUsize,
    /// The shard that is searched for room next.
    next: AtomicUsize,
}

struct Shard<T> {
    table: HashTable<(Key, T)>,
    /// The bucket that the hand looks at next.
    hand: usize,
}

/// The map is full: all keys that were looked at are in use.
#[derive(Debug)]
pub(crate) struct Full;

/// The fewest shards. In so many, threads seldom meet. With more shards than keys, each lookup
/// would wait for the cache lines of a table of its own.
const FEWEST_SHARDS: usize = 128;

/// The most keys of a shard on average. A full map of 832,000 keys or more has more shards than the
/// fewest.
///
/// A shard's table has a power of two of buckets, of which seven eighths can be in use: 7168 of
/// 8192. With 6500 keys on average, nearly no shard of a full map has more than these, and each
/// table is 79 % full.
///
/// A shard's table grows as keys come, and to grow it moves all its entries in one call. Moving
/// 3584 entries of 24 bytes takes about 0.07 ms. Large states are kept in a `Box`, so that entries
/// stay small.
const KEYS_IN_A_SHARD: usize = 6500;

const MOST_SHARDS: usize = 8192;

/// The number of buckets that each new key looks at. With eight, a seventh of the entries are
/// useless and not found yet.
const LOOK: usize = 8;

/// The buckets of one shard that are searched for room, and the keys in all shards.
const LOOK_FOR_ROOM: usize = 32;
const MOST_LOOKED_AT: usize = 64;

/// Tables smaller than this are not shrunk.
const SMALL: usize = 64;

/// The room for one key more, until the key has its state.
struct Room<'a>(&'a AtomicUsize);

impl Drop for Room<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T: Evict> KeyMap<T> {
    /// Makes a map for at most `max` keys.
    pub(crate) fn new(max: usize) -> Self {
        let shards = max
            .div_ceil(KEYS_IN_A_SHARD)
            .clamp(FEWEST_SHARDS, MOST_SHARDS);
        let shards = (0..shards).map(|_| {
            Mutex::new(Shard {
                table: HashTable::new(),
                hand: 0,
            })
        });
        KeyMap {
            shards: shards.collect(),
            seed: dice(),
            max,
            len: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
        }
    }

    #[inline]
    fn shard(&self, hash: u64) -> MutexGuard<'_, Shard<T>> {
        // The table takes its tags from the top bits and its buckets from the low ones; these bits
        // are in between.
        let share = u64::from((hash >> 16) as u32) * self.shards.len() as u64;
        lock(&self.shards[(share >> 32) as usize])
    }

    /// Calls `with` with the state of `key`, which is made first if there is none. Evicted state
    /// goes to `forgotten`.
    pub(crate) fn enter<R>(
        &self,
        key: Key,
        now: T::Now,
        make: impl FnOnce() -> T,
        mut forgotten: impl FnMut(Key, T),
        with: impl FnOnce(&mut T) -> R,
    ) -> Result<R, Full> {
        let hash = key.spread(self.seed);
        let mut shard = self.shard(hash);
        if let Some(state) = shard.get(hash, key) {
            return Ok(with(state));
        }
        drop(shard);
        self.reserve(now, &mut forgotten)?;
        let room = Room(&self.len);
        let mut shard = self.shard(hash);
        let Looked { gone, .. } = shard.look(LOOK, now, &mut forgotten);
        self.len.fetch_sub(gone, Ordering::Relaxed);
        shard.shrink(self.seed);
        if let Some(state) = shard.get(hash, key) {
            return Ok(with(state));
        }
        // It may panic: a function of the user makes a pace.
        let state = make();
        std::mem::forget(room);
        Ok(with(shard.insert(hash, key, state, self.seed)))
    }

    /// Calls `with` with each key and its state, a shard at a time.
    pub(crate) fn for_each(&self, mut with: impl FnMut(Key, &mut T)) {
        for shard in &self.shards {
            lock(shard)
                .table
                .iter_mut()
                .for_each(|(key, state)| with(*key, state));
        }
    }

    /// Returns the number of keys.
    pub(crate) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed).min(self.max)
    }

    /// Calls `with` with the state of `key`, if there is any.
    #[inline]
    pub(crate) fn find<R>(&self, key: Key, with: impl FnOnce(&mut T) -> R) -> Option<R> {
        let hash = key.spread(self.seed);
        self.shard(hash).get(hash, key).map(with)
    }

    /// Returns whether [`enter`](Self::enter) finds room for `key`, or could: a full map looks at some keys
    /// only.
    pub(crate) fn has_room(&self, key: Key, now: T::Now) -> bool {
        self.len() < self.max
            || self.find(key, |_| ()).is_some()
            || self.shards.iter().any(|shard| {
                let shard = lock(shard);
                shard.table.iter().any(|(_, state)| state.is_idle(now))
            })
    }

    /// Makes room for one more key. If the map is full, it evicts the least useful of the keys that
    /// it looks at.
    fn reserve(&self, now: T::Now, forgotten: &mut dyn FnMut(Key, T)) -> Result<(), Full> {
        if self.len.fetch_add(1, Ordering::Relaxed) < self.max {
            return Ok(());
        }
        let mut left = MOST_LOOKED_AT;
        // If there are few keys, these are all of them.
        for _ in 0..FEWEST_SHARDS {
            let number = self.next.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            let mut shard = lock(&self.shards[number]);
            let Looked {
                keys,
                mut gone,
                least,
            } = shard.look(LOOK_FOR_ROOM, now, forgotten);
            if let (0, Some((_, bucket))) = (gone, least) {
                gone = usize::from(shard.forget(bucket, forgotten));
            }
            if gone > 0 {
                self.len.fetch_sub(gone, Ordering::Relaxed);
                return Ok(());
            }
            left = left.saturating_sub(keys);
            if left == 0 {
                break;
            }
        }
        self.len.fetch_sub(1, Ordering::Relaxed);
        Err(Full)
    }
}

/// The result of a look at some buckets.
struct Looked<Now> {
    /// The number of keys in these buckets.
    keys: usize,
    /// The number of evicted keys.
    gone: usize,
    /// The idle key that is useless first, and its bucket.
    least: Option<(Now, usize)>,
}

// The functions of a shard are not generic in what its callers do: each of fifty callers would have a copy of the
// table's code.
impl<T: Evict> Shard<T> {
    #[inline]
    fn get(&mut self, hash: u64, key: Key) -> Option<&mut T> {
        let found = self.table.find_mut(hash, |(other, _)| *other == key);
        found.map(|(_, state)| state)
    }

    /// Inserts a key that the shard does not have.
    fn insert(&mut self, hash: u64, key: Key, state: T, seed: u64) -> &mut T {
        let table = &mut self.table;
        let entry = table.insert_unique(hash, (key, state), |(key, _)| key.spread(seed));
        &mut entry.into_mut().1
    }

    /// Looks at the next `buckets`, and evicts useless keys.
    fn look(
        &mut self,
        buckets: usize,
        now: T::Now,
        forgotten: &mut dyn FnMut(Key, T),
    ) -> Looked<T::Now> {
        let mut looked = Looked {
            keys: 0,
            gone: 0,
            least: None,
        };
        let all = self.table.num_buckets();
        for _ in 0..buckets.min(all) {
            self.hand = if self.hand + 1 < all {
                self.hand + 1
            } else {
                0
            };
            let Some((_, state)) = self.table.get_bucket(self.hand) else {
                continue;
            };
            looked.keys += 1;
            let Some(worthless) = state.worthless_from() else {
                continue;
            };
            if worthless <= now {
                looked.gone += usize::from(self.forget(self.hand, forgotten));
            } else if state.is_idle(now) && looked.least.is_none_or(|(least, _)| worthless < least)
            {
                looked.least = Some((worthless, self.hand));
            }
        }
        looked
    }

    fn forget(&mut self, bucket: usize, forgotten: &mut dyn FnMut(Key, T)) -> bool {
        let Ok(entry) = self.table.get_bucket_entry(bucket) else {
            return false;
        };
        let ((key, state), _) = entry.remove();
        forgotten(key, state);
        true
    }

    /// Frees memory once a round, if most of it is unused.
    fn shrink(&mut self, seed: u64) {
        let all = self.table.num_buckets();
        if self.hand < LOOK && all > SMALL && self.table.len() < all / 8 {
            self.table
                .shrink_to(2 * self.table.len(), |(key, _)| key.spread(seed));
        }
    }
}
