//! The keys of the gates of a guard, by the key under which their bad answers count.
//!
//! A stop is published as a hold of the counted key, and each process holds its keys that count under it.
//! Holds of other keys look the same, and there may be hundreds a second of them. So these keys are
//! found without a look at all the others.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use crate::key::Key;
use crate::locks::lock;

/// Keys that count under one key, each with the number of its states: a gate for each class has one.
type Keys = HashMap<Key, u32>;

#[derive(Default)]
pub(super) struct CountedKeys(Mutex<HashMap<Key, Keys>>);

impl CountedKeys {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Keys>> {
        lock(&self.0)
    }

    /// Adds a state of `key`.
    pub(super) fn add(&self, counted: Key, key: Key) {
        let mut all = self.lock();
        *all.entry(counted).or_default().entry(key).or_default() += 1;
    }

    /// Removes a state of `key`.
    pub(super) fn remove(&self, counted: Key, key: Key) {
        let mut all = self.lock();
        let Some(keys) = all.get_mut(&counted) else {
            return;
        };
        if let Some(states) = keys.get_mut(&key) {
            *states -= 1;
            if *states == 0 {
                keys.remove(&key);
            }
        }
        if keys.is_empty() {
            all.remove(&counted);
        }
    }

    /// Returns the keys that count under `counted`.
    pub(super) fn under(&self, counted: Key) -> Vec<Key> {
        let all = self.lock();
        let keys = all.get(&counted).map(HashMap::keys);
        keys.into_iter().flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_is_known_while_it_has_a_state() {
        let keys = CountedKeys::default();
        let (counted, key, other) = (Key::new("all"), Key::new("a"), Key::new("b"));
        for added in [key, key, other] {
            keys.add(counted, added);
        }
        keys.remove(counted, key);
        let under = keys.under(counted);
        assert!(under.len() == 2 && under.contains(&key) && under.contains(&other));
        keys.remove(counted, key);
        assert_eq!(keys.under(counted), [other]);
        keys.remove(counted, other);
        assert!(keys.under(counted).is_empty() && keys.lock().is_empty());
    }
}
