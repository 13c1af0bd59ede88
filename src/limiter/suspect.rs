//! A request of a key under suspicion: which kind of requests it is of, and the holds of that kind.

use smallvec::SmallVec;

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
        let mut holds: SmallVec<[(usize, Key); 1]> = SmallVec::new();
        for (index, PartRef { core, entry }) in parts.iter().enumerate() {
            if entry.cost == 0 {
                continue;
            }
            let key = core.hold_key(entry.key, entry.host);
            let suspected = core
                .states
                .find(key, |state| state.hold.suspicion().is_some());
            if suspected == Some(true) {
                holds.push((index, key));
            }
        }
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
            let known = core
                .states
                .find(*key, |state| state.hold.is_clear(max_hold, now));
            // Another process may hold the kind.
            let is_shared = core.settings.shared_store.background().is_some();
            known.unwrap_or(!is_shared)
        })
    }

    pub(super) fn is_hold(&self, key: Key) -> bool {
        self.holds.iter().any(|(_, hold)| *hold == key)
    }
}
