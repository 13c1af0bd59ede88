//! What a quota allows for: how long permits live, and how much of the rate that may cost.

use std::time::Duration;

/// How long a permit is usable after its slot, unless slots are far apart or very close.
pub(crate) const LIFE: Duration = Duration::from_millis(10);

/// The transit slack, and the loss of rate that is allowed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slacks {
    /// How much the transit time to the upstream may vary.
    pub(crate) transit: Duration,
    /// How long before and after the boundary of a fixed window no request is sent.
    pub(crate) boundary: Duration,
    /// The most of the rate, in per cent, that the life of permits and the transit slack may cost.
    pub(crate) rate_loss: u32,
}

impl Slacks {
    /// The transit slack by default.
    pub(crate) const TRANSIT: Duration = Duration::from_millis(10);

    /// The largest loss that is allowed by default, in per cent.
    pub(crate) const RATE_LOSS: u32 = 10;

    /// The largest loss that a layer may allow, in per cent.
    pub(crate) const LARGEST_RATE_LOSS: u32 = 50;

    /// What a layer allows for by default.
    pub(crate) const DEFAULT: Slacks = Slacks {
        transit: Slacks::TRANSIT,
        boundary: Duration::from_millis(100),
        rate_loss: Slacks::RATE_LOSS,
    };
}
