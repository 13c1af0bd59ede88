//! The layers, their builders, and the services where requests arrive: Tower and reqwest-middleware.
//!
//! Thin: no rule of limiting lives here.

pub(crate) mod body;
mod builder;
mod extractors;
mod rate_limit;
#[cfg(feature = "reqwest")]
mod reqwest;
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
pub(crate) mod retry;
pub(crate) mod service;
mod throttle;
pub(crate) mod throttle_service;

pub use builder::RateLimitBuilder;
pub(crate) use extractors::{ResponsePolicy, leave};
pub(crate) use rate_limit::Entered;
pub use rate_limit::RateLimitLayer;
pub(crate) use throttle::Begun;
pub use throttle::{AdaptiveThrottleBuilder, AdaptiveThrottleLayer, RetryingThrottleLayer};
