//! Where requests arrive: Tower services and reqwest-middleware. Thin: no rule lives here.

pub(crate) mod held;
#[cfg(feature = "reqwest")]
mod reqwest;
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
pub(crate) mod retry;
pub(crate) mod throttle;
pub(crate) mod tower;
