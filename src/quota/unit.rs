//! The names of units that limits count.

use std::sync::Mutex;

use crate::cost::Cost;
use crate::locks::lock;

/// The longest name of a unit, in bytes.
pub(super) const LONGEST_NAME: usize = 32;

/// Returns whether `name` may be the name of a unit: a letter, and then letters, digits, `_`, `-`
/// and `.`.
pub(super) fn is_name(name: &str) -> bool {
    name.len() <= LONGEST_NAME
        && name.starts_with(|first: char| first.is_ascii_alphabetic())
        && name
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

/// The most names that are read from text in one process, besides [`WELL_KNOWN`].
const MOST_NAMES: usize = 256;

/// Names that need no place.
const WELL_KNOWN: [&str; 8] = [
    Cost::REQUESTS,
    "tokens",
    "points",
    "credits",
    "bytes",
    "messages",
    "input-tokens",
    "output-tokens",
];

/// Returns the name of a unit that was read from text, so that it lives as long as the process.
/// `None` if the process has read [`MOST_NAMES`] others.
///
/// A quota is `Copy` and made in constants, so its units are `&'static str`. Each name is kept once, and
/// there are at most [`MOST_NAMES`] of at most 32 bytes: so quotas that come from requests or a database
/// cannot fill the memory.
pub(super) fn named(name: &str) -> Option<&'static str> {
    static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    if let Some(known) = WELL_KNOWN.into_iter().find(|known| *known == name) {
        return Some(known);
    }
    let mut names = lock(&NAMES);
    if let Some(known) = names.iter().find(|known| **known == name) {
        return Some(*known);
    }
    if names.len() >= MOST_NAMES {
        return None;
    }
    let kept: &'static str = Box::leak(name.into());
    names.push(kept);
    Some(kept)
}
