//! The names of hosts that are keys, so that all errors and events name such a key alike.
//!
//! An error of a request that is refused has the request at hand, and with it the host. An event of a hold, or
//! an error of a response, has the key only.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use super::{Key, Label};
use crate::locks::lock;

/// The names are in this many tables, each with a lock of its own.
const TABLES: usize = 16;

/// The most names of a table. A table that is full begins anew.
const MOST: usize = 1000;

type Table = Mutex<Option<HashMap<Key, Label>>>;

static NAMES: [Table; TABLES] = [const { Mutex::new(None) }; TABLES];

fn table(key: Key) -> MutexGuard<'static, Option<HashMap<Key, Label>>> {
    let table = &NAMES[key.low as usize % TABLES];
    lock(table)
}

/// Notes that the requests of `key` go to `host`, and to no other.
pub(crate) fn note(key: Key, host: &str) {
    let mut table = table(key);
    let names = table.get_or_insert_default();
    if names.len() >= MOST && !names.contains_key(&key) {
        names.clear();
    }
    names.entry(key).or_insert_with(|| Label::of_host(host));
}

/// Returns the name of the host whose requests have `key`.
pub(super) fn of(key: Key) -> Option<Label> {
    table(key).as_ref()?.get(&key).cloned()
}
