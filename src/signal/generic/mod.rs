//! The `X-RateLimit-…` families: headers with `ratelimit` in their name, whoever sends them.

pub(super) mod family;
pub(super) mod group;
pub(super) mod lines;
pub(super) mod words;
