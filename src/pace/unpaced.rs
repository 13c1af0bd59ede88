//! No pace at all.

use super::Pace;

/// Holds nothing back: as if the layer were not there.
///
/// For a cautious roll-out, in which the layer is put in place first and acts later, and for comparison. It has no
/// state and no constants. A refused call that is repeated inside is repeated at once, so let refusals pass with it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unpaced;

impl Pace for Unpaced {
    fn is_careful(&self) -> bool {
        false
    }
}
