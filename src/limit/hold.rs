//! The hold of a key, in the store's time.

use std::cmp::Ordering;

use super::Micros;

/// The hold of a key. Until it ends, the key may send nothing, because the upstream refused a
/// request or an operator put the key on hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoredHold {
    /// When the hold ends. 0 if there is none.
    pub(crate) until: Micros,
    /// Whether the upstream asked for a longer hold than the process that sent it allows.
    pub(crate) cut: bool,
    /// How often holds were released. A hold with a smaller number is over, even if a message about
    /// it arrives later.
    pub(crate) releases: u32,
    /// For how long the machine had slept in all when it was set. The store's time stood still meanwhile.
    pub(crate) slept: Micros,
}

impl StoredHold {
    /// Takes in for how long the machine has slept in all: the hold ends earlier by what came after it was set.
    pub(super) fn wake(&mut self, slept: Micros) {
        let since = slept.saturating_sub(self.slept);
        self.until = self.until.saturating_sub(since);
        self.slept = slept;
    }

    /// Returns which of two holds applies. The end of a hold moves only later, unless the hold was
    /// released.
    ///
    /// In Redis, a release of a state that was lost does not end the hold of a later one: `main.lua` tells them apart
    /// by the incarnation that the caller knows. A ledger in memory has none.
    pub(super) fn or(self, other: StoredHold) -> StoredHold {
        match self.releases.cmp(&other.releases) {
            Ordering::Less => other,
            Ordering::Equal if other.until > self.until => other,
            Ordering::Equal => self,
            Ordering::Greater => self,
        }
    }
}
