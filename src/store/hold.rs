//! Holds: until when a key may send nothing.

use std::time::Duration;

/// How long a key may send nothing, because the upstream refused a request or an operator put the key on hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct HoldState {
    /// For how long, from now; zero when it is not held.
    pub remaining: Duration,
    /// How often holds of the key were released. A hold from before a release is over, even if a later message names it.
    pub releases: u32,
    /// Whether the upstream may refuse for longer: the hold was cut to `max_hold`, or the upstream states too short a wait. When
    /// it ends, one request of each process leaves before the others.
    pub cut: bool,
}

impl HoldState {
    /// Makes a hold that lasts `left` from now, of a key whose holds were released `releases` times. It was not cut.
    pub const fn new(left: Duration, releases: u32) -> Self {
        HoldState { remaining: left, releases, cut: false }
    }

    /// Whether there is no hold and there was no release.
    pub(crate) fn is_none(&self) -> bool {
        *self == HoldState::default()
    }
}
