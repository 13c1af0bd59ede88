//! The headers of standards: `RateLimit` fields and `Retry-After`.

pub(super) mod ratelimit;
pub(super) mod retry_after;
pub(super) mod structured;
