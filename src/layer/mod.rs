//! The layers, their builders, and the services where requests arrive: Tower and reqwest-middleware.
//!
//! Thin: no rule of limiting lives here.

pub(crate) mod body;
mod extractors;
mod rate_limit;
mod rate_limit_builder;
#[cfg(feature = "reqwest")]
mod reqwest;
mod response_policy;
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
pub(crate) mod retry;
pub(crate) mod service;
mod throttle;
mod throttle_builder;
pub(crate) mod throttle_service;

pub(crate) use rate_limit::Entered;
pub use rate_limit::RateLimitLayer;
pub(crate) use rate_limit::leave;
pub use rate_limit_builder::RateLimitBuilder;
pub(crate) use response_policy::ResponsePolicy;
pub(crate) use throttle::Begun;
pub use throttle::{AdaptiveThrottleLayer, RetryingThrottleLayer};
pub use throttle_builder::AdaptiveThrottleBuilder;
