//! The names of units that limits count.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use crate::cost::Cost;

/// The longest name of a unit, in bytes.
pub(super) const LONGEST_NAME: usize = 32;

/// Returns whether `name` may be the name of a unit: a letter, and then letters, digits, `_`, `-`
/// and `.`.
pub(super) fn is_name(name: &str) -> bool {
    let is_inside = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
    name.len() <= LONGEST_NAME
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name.bytes().all(is_inside)
}

/// Returns the unit of this name, or `None` for requests.
///
/// A name that is read from text is kept until the process ends. Each name is kept once.
pub(super) fn named(name: &str) -> Option<&'static str> {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    if name == Cost::REQUESTS {
        return None;
    }
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return Some(*known);
    }
    let kept: &'static str = Box::leak(name.into());
    names.insert(kept);
    Some(kept)
}
