//! The hold of a key, in the store's time.

use std::cmp::Ordering;

use super::Micros;

/// Until when nothing may be sent, because the upstream refused a request or an operator put the key on hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) until: Micros,
    /// Whether the upstream stated a longer hold.
    pub(crate) cut: bool,
    /// How often holds were released. A hold from before a release is over, even if a later message names it.
    pub(crate) releases: u32,
}

impl Hold {
    /// Returns which of two holds applies. Its end only moves later, unless the hold was released.
    pub(super) fn or(self, other: Hold) -> Hold {
        match self.releases.cmp(&other.releases) {
            Ordering::Less => other,
            Ordering::Equal if other.until > self.until => other,
            Ordering::Equal => self,
            Ordering::Greater => self,
        }
    }
}
