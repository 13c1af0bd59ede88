//! The `X-RateLimit-…` families: headers of any server with `ratelimit` in their name.

pub(super) mod family;
pub(super) mod group;
pub(super) mod lines;
pub(super) mod words;
