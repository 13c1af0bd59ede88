//! A request of a key under suspicion: which kind of requests it is of, and the holds of that kind.

use smallvec::SmallVec;

use super::key_state::KeyState;
use super::part::PartRef;
use crate::clock;
use crate::key::Key;
use crate::suspicion::is_any_suspected;

/// The kind of a request, of which a key is under [suspicion](crate::suspicion).
#[derive(Debug)]
pub(crate) struct Suspect {
    pub(crate) kind: Key,
    /// For each of its parts under suspicion, the key that has the holds of the kind.
    pub(super) holds: SmallVec<[(usize, Key); 1]>,
}

impl Suspect {
    /// Returns the kind of the request with these parts, if one of them is under suspicion.
    #[inline]
    pub(crate) fn find(parts: &[PartRef<'_>], kind: impl FnOnce() -> Key) -> Option<Box<Self>> {
        match is_any_suspected() {
            true => Suspect::find_slow(parts, kind),
            false => None,
        }
    }

    #[cold]
    fn find_slow(parts: &[PartRef<'_>], kind: impl FnOnce() -> Key) -> Option<Box<Self>> {
        let suspected = |(index, PartRef { core, entry }): (usize, &PartRef<'_>)| {
            let key = core.hold_key(entry.key, entry.host);
            let is_suspected = |state: &mut KeyState| state.hold.suspicion().is_some();
            let is_suspected = entry.cost > 0 && core.states.find(key, is_suspected)?;
            is_suspected.then_some((index, key))
        };
        let mut holds: SmallVec<[(usize, Key); 1]> =
            parts.iter().enumerate().filter_map(suspected).collect();
        if holds.is_empty() {
            return None;
        }
        let kind = kind();
        for (_, key) in &mut holds {
            *key = key.of_kind(kind);
        }
        Some(Box::new(Suspect { kind, holds }))
    }

    /// Returns whether this process knows that no hold of the kind stops the request.
    pub(crate) fn is_clear(&self, parts: &[PartRef<'_>]) -> bool {
        let now = clock::now();
        self.holds.iter().all(|(index, key)| {
            let core = parts[*index].core;
            let max_hold = core.settings.max_hold;
            let is_clear = |state: &mut KeyState| state.hold.is_clear(max_hold, now);
            // Another process may hold the kind.
            let is_shared = core.settings.shared_store.background().is_some();
            core.states.find(*key, is_clear).unwrap_or(!is_shared)
        })
    }

    /// Returns whether `key` has holds of the kind.
    pub(super) fn is_hold(&self, key: Key) -> bool {
        self.holds.iter().any(|(_, hold)| *hold == key)
    }
}
