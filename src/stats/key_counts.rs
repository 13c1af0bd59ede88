//! The counts of one key, which are a part of its state.

use super::values::{Outcome, Requests};
use crate::key::label::may_mislead;

/// What the requests of one key have done since its state was made.
#[derive(Debug, Default)]
pub(crate) struct KeyCounts {
    passed: u64,
    units: u64,
    /// `None` until a request had another outcome, or the key got a name.
    more: Option<Box<RareCounts>>,
}

/// What only keys have whose requests do not all pass at once.
#[derive(Debug, Default)]
struct RareCounts {
    /// The other outcomes. `passed` is zero.
    requests: Requests,
    name: Option<Box<str>>,
    /// Whether the user has given the name. Such a name stays.
    is_given: bool,
}

/// What is counted by key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    pub(crate) requests: Requests,
    pub(crate) units: u64,
}

impl Counted {
    pub(crate) fn add(&mut self, counts: &KeyCounts) {
        self.add_passed(counts.passed, counts.units);
        // Most keys of a program with many keys have none.
        if let Some(more) = &counts.more {
            self.requests.merge(&more.requests, u64::wrapping_add);
        }
    }

    /// Adds requests that passed, and their units.
    pub(crate) fn add_passed(&mut self, passed: u64, units: u64) {
        self.requests.passed = self.requests.passed.wrapping_add(passed);
        self.units = self.units.wrapping_add(units);
    }

    /// Adds or replaces each count by `merge` of it and that of `other`.
    pub(crate) fn merge(&mut self, other: &Counted, merge: impl Fn(u64, u64) -> u64) {
        self.requests.merge(&other.requests, &merge);
        self.units = merge(self.units, other.units);
    }
}

/// The longest name of a key, in bytes.
const LONGEST_NAME: usize = 64;

impl KeyCounts {
    /// Counts requests that got permits of `units` in all, at once.
    #[inline]
    pub(crate) fn pass_all(&mut self, requests: u32, units: u32) {
        self.passed += u64::from(requests);
        self.units += u64::from(units);
    }

    /// Counts a request that got a permit of `units` at once.
    #[inline]
    pub(crate) fn pass(&mut self, units: u32) {
        self.passed += 1;
        self.units += u64::from(units);
    }

    /// Counts units of a request that counts elsewhere.
    #[inline]
    pub(crate) fn add_units(&mut self, units: u64) {
        self.units += units;
    }

    /// Subtracts units of a permit that was given back. Returns those that were counted elsewhere.
    pub(crate) fn give_back_units(&mut self, units: u64) -> u64 {
        let own = units.min(self.units);
        self.units -= own;
        units - own
    }

    pub(crate) fn count(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            outcome => *self.more.get_or_insert_default().requests.of(outcome) += 1,
        }
    }

    pub(crate) fn counted(&self) -> Counted {
        let mut counted = Counted::default();
        counted.add(self);
        counted
    }

    pub(crate) fn units(&self) -> u64 {
        self.units
    }

    pub(crate) fn name(&self) -> Option<&str> {
        self.more.as_ref()?.name.as_deref()
    }

    /// Returns whether the user has named the key.
    pub(crate) fn is_named(&self) -> bool {
        self.more.as_ref().is_some_and(|more| more.is_given)
    }

    /// Gives the key the name that the user wants: at most 64 bytes, without control characters.
    pub(crate) fn set_name(&mut self, name: &str) {
        let more = self.more.get_or_insert_default();
        more.name = Some(shown(name));
        more.is_given = true;
    }

    /// Keeps the label of the key as its name, if it has none.
    pub(crate) fn note_label(&mut self, label: &str) {
        let name = &mut self.more.get_or_insert_default().name;
        if name.is_none() {
            *name = Some(shown(label));
        }
    }
}

/// Returns a name as it may stand in a line of a log: at most 64 bytes, without characters that
/// [hide or move](may_mislead) the text around them.
pub(crate) fn shown(name: &str) -> Box<str> {
    let all = name.char_indices();
    let fits = all.take_while(|(start, c)| start + c.len_utf8() <= LONGEST_NAME);
    let shown = fits.map(|(_, c)| if may_mislead(c) { '?' } else { c });
    shown.collect::<String>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_have_no_control_characters() {
        assert_eq!(&*shown("a\nb\u{7}"), "a?b?");
        let long = "ä".repeat(40);
        assert_eq!(&*shown(&long), "ä".repeat(32));
        assert_eq!(&*shown(&format!("x{long}")), format!("x{}", "ä".repeat(31)));
    }

    #[test]
    fn a_given_name_is_kept() {
        let mut counts = KeyCounts::default();
        counts.note_label("3fa94c01");
        assert!(!counts.is_named());
        counts.set_name("tenant 17");
        counts.note_label("3fa94c01");
        assert_eq!(
            (counts.name(), counts.is_named()),
            (Some("tenant 17"), true)
        );
        assert_eq!(counts.counted(), Counted::default());
    }
}
