//! The layers, their builders, and the services where requests arrive: Tower and
//! reqwest-middleware.
//!
//! No rule of limiting is here. Each layer is a gate and each service an edge; they meet at one
//! [seam].

mod attempts;
pub(crate) mod body;
mod extractors;
#[cfg(feature = "grpc")]
pub(crate) mod grpc;
mod guard;
#[cfg(feature = "llm")]
mod llm;
mod rate_limit;
mod rate_limit_builder;
#[cfg(feature = "reqwest")]
mod reqwest;
mod response_policy;
#[cfg(any(feature = "retry", feature = "reqwest-retry"))]
pub(crate) mod retry;
mod retrying;
pub(crate) mod routes;
mod seam;
mod service;
mod settings;
#[cfg(test)]
mod sleep_tests;
mod throttle;
mod throttle_builder;

pub use attempts::Attempts;
#[cfg(feature = "llm")]
pub use llm::Llm;
pub use rate_limit::RateLimitLayer;
pub use rate_limit_builder::RateLimitBuilder;
pub use retrying::{CloneRequest, RetryingThrottleLayer};
pub use service::{AdaptiveThrottle, RateLimit, ResponseFuture};
pub use throttle::AdaptiveThrottleLayer;
pub use throttle_builder::AdaptiveThrottleBuilder;
