//! Headers of any server: with `ratelimit` in their name, or with other words that describe a quota.

pub(super) mod family;
pub(super) mod group;
pub(super) mod lines;
pub(super) mod members;
pub(super) mod words;
