//! Whether requests have classes, and whether these have a share.
//!
//! A class may be mistyped, and it may come from a client. So a class without a share is noted once, up to
//! [`MOST`] of them, and only a hash of it is kept. Neither memory nor events grow with what clients send.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::key::Key;
use crate::locks::lock;

/// The most classes without a share that are noted.
const MOST: usize = 16;

/// After so many requests without a class, it is likely that none will have one.
const WITHOUT_CLASS: u32 = 100;

/// What is known of the classes of the requests of a divided quota.
#[derive(Debug, Default)]
pub(crate) struct ClassCheck {
    /// The hashes of the classes without a share.
    unknown: Mutex<Vec<Key>>,
    /// How many requests came without a class, up to [`WITHOUT_CLASS`]. It stays there once a request had
    /// a class.
    without_class: AtomicU32,
}

impl ClassCheck {
    /// Notes a class that has no share. Returns whether it is reported: if it is new, and one of the first
    /// [`MOST`].
    pub(crate) fn is_new(&self, class: &str) -> bool {
        let mut unknown = lock(&self.unknown);
        let class = Key::new(class);
        let is_new = unknown.len() < MOST && !unknown.contains(&class);
        if is_new {
            unknown.push(class);
        }
        is_new
    }

    /// Returns how many classes without a share were noted.
    pub(super) fn unknown(&self) -> u64 {
        lock(&self.unknown).len() as u64
    }

    /// Notes whether a request has a class. Returns whether it is reported that none has one.
    #[inline]
    pub(crate) fn is_without(&self, has_class: bool) -> bool {
        let before = self.without_class.load(Ordering::Relaxed);
        if before >= WITHOUT_CLASS {
            return false;
        }
        if has_class {
            self.without_class.store(WITHOUT_CLASS, Ordering::Relaxed);
            return false;
        }
        self.without_class.fetch_add(1, Ordering::Relaxed) + 1 == WITHOUT_CLASS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_is_new_once_and_only_so_many_are_noted() {
        let check = ClassCheck::default();
        assert_eq!([check.is_new("wbe"), check.is_new("wbe")], [true, false]);
        let new = (0..1000).filter(|number| check.is_new(&number.to_string()));
        assert_eq!(new.count(), MOST - 1);
        assert_eq!(check.unknown(), MOST as u64);
    }

    #[test]
    fn requests_without_a_class_are_reported_once_unless_one_had_a_class() {
        let reports = |check: &ClassCheck| (0..300).filter(|_| check.is_without(false)).count();
        assert_eq!(reports(&ClassCheck::default()), 1);
        let check = ClassCheck::default();
        assert!(!check.is_without(true));
        assert_eq!(reports(&check), 0);
    }
}
