//! No pace at all.

use super::Pace;

/// Lets every request leave at once, as if the layer were not there.
///
/// Use it for a cautious roll-out, in which the layer is deployed first and acts later, and for
/// comparison. It has no state and no constants. It does not delay a refused request that is sent
/// again, so do not combine it with retries.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoPacing;

impl Pace for NoPacing {
    fn is_careful(&self) -> bool {
        false
    }
}
