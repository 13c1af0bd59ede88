//! Holds: until when a key may send nothing.

use std::time::Duration;

/// The hold of a key, which may send nothing because the upstream refused a request or an operator
/// put it on hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldState {
    /// For how long from now the key may send nothing. Zero if the key is not on hold.
    pub remaining: Duration,
    /// How often holds of the key were released. A hold with a smaller number is over, even if a
    /// later message states it.
    pub releases: u32,
    /// Whether the upstream may refuse for longer, because the hold was cut to `max_hold`, or the
    /// upstream states no waits, or such that are too short. When such a hold ends, one request leaves before the
    /// others.
    pub cut: bool,
}

impl HoldState {
    /// Makes a hold that ends `remaining` from now and was not cut. The holds of the key were
    /// released `releases` times.
    pub const fn new(remaining: Duration, releases: u32) -> Self {
        HoldState {
            remaining,
            releases,
            cut: false,
        }
    }

    /// Returns whether there is no hold and there was no release.
    pub(crate) fn is_none(&self) -> bool {
        *self == HoldState::default()
    }
}
